"""The plot of `mqfs bench --plot`: histograms of the latencies and their tails.

The only module that imports matplotlib.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import matplotlib

from mqfs.bench.measure import Results
from mqfs.bench.plan import describe

matplotlib.use("Agg")  # no window, no display

from matplotlib import pyplot

_LEAST_SHARE = 1e-6


def draw(results: Results, path: str) -> None:
    """Draw two panels over microseconds: a histogram, and the share that took longer."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, histogram in results.histograms.items():
        bars = list(histogram.bars())
        if bars:
            _bars(left, right, name, [ns / 1000 for ns, _ in bars], [count for _, count in bars])
    for axes, title in ((left, "share of messages"), (right, "share that took longer")):
        axes.set_xscale("log")
        axes.set_xlabel("microseconds")
        axes.set_ylabel(title)
        axes.grid(visible=True, alpha=0.3)
    right.set_yscale("log")
    right.legend()
    figure.suptitle(f"mqfs bench: {describe(results.plan)}", fontsize=10)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _bars(left: Any, right: Any, name: str, us: list[float], counts: list[int]) -> None:
    total = sum(counts)
    left.step(us, [count / total for count in counts], where="mid", label=name)
    longer = [max(1 - passed / total, _LEAST_SHARE) for passed in accumulate(counts)]
    right.step(us, longer, where="post", label=name)
