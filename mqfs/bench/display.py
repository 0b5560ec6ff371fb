"""The output of the bench: progress, tables, JSON, a plot, the exit code. Measures nothing.

The plot has histograms of the latencies and their tails. This is the only module that imports matplotlib.
"""

from __future__ import annotations

import json
import signal
import sys
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table

import mqfs
from mqfs.bench.measure import Results, latencies, measure
from mqfs.bench.plan import Plan, describe
from mqfs.server.logs import Progress

FAILED = 1
_LEAST_SHARE = 1e-6
_TITLES = {"publish": "publish", "delivery": "publish → receive", "round trip": "round trip, no other load"}


def run(plan: Plan) -> int:
    """Measure and write the output. Return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the store and the server are removed
    with Progress() as progress:
        progress("starting")
        results = measure(plan, progress)
    if plan.json != "-":
        show(results, Console(highlight=False))
    if not results.sound:
        print(f"mqfs: {failed_checks(results)}", file=sys.stderr)
    for path, write in ((plan.json, write_json), (plan.plot, draw)):  # last: a disk may be full
        if path is not None:
            try:
                write(results, path)
            except OSError as error:
                raise OSError(error.errno, error.strerror, "standard output" if path == "-" else path) from None
    return 0 if results.sound and not results.left else FAILED


def failed_checks(results: Results) -> str:
    """Return the failed checks in one line."""
    checks = (
        (results.lost, "lost"),
        (results.twice, "more than once"),
        (results.disordered, "out of order"),
        (results.damaged, "damaged"),
        (results.unacknowledged, "not acknowledged"),
    )
    failed = [f"{count:,} {what}" for count, what in checks if count]
    return f"check failed: {', '.join([*failed, results.stalled] if results.stalled else failed)}"


def write_json(results: Results, path: str) -> None:
    """Write the results to a file, or to standard output (-). Raises OSError."""
    text = json.dumps({"mqfs": mqfs.__version__, **results.as_dict()}, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


# ---------------------------------------------------------------- the table


def show(results: Results, console: Console) -> None:
    console.print(
        describe(results.plan) + ("; ended early" if results.interrupted else ""), markup=False, soft_wrap=True
    )
    figures = results.as_dict()
    rates = Table("", "messages", "a second", "MB/s", "seconds", box=None)
    for name in ("published", "received"):
        row = figures[name]
        cells = (f"{row['messages']:,}", f"{row['rate']:,.0f}", f"{row['mb_per_s']:,.1f}", f"{row['seconds']:.2f}")
        rates.add_row(name, *cells)
    times = Table("", "p50", "p90", "p99", "p99.9", "max", box=None)
    for name, histogram in results.histograms.items():
        times.add_row(_TITLES[name], *(brief(us) for key, us in latencies(histogram).items() if key != "count"))
    for table in (rates, times):
        for column in table.columns:
            column.no_wrap, column.justify = True, "right"
        table.columns[0].justify = "left"
        console.print(table)
    console.print(processor(results), highlight=False)
    if results.sound and results.received:
        console.print("checked: none lost, doubled, out of order or damaged")


def processor(results: Results) -> str:
    """Return a line with the processor time per message, of all measured processes."""
    messages = max(results.published, 1)
    bench = f"{brief(results.bench_cpu_s / messages * 1e6)} of the bench"
    if results.server_cpu_s is None:
        return f"processor: {bench} for each message published"
    return (
        f"processor: {bench}, {brief(results.server_cpu_s / messages * 1e6)} of the server for each message published"
    )


def brief(us: float) -> str:
    """Return a duration with three digits and a unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}" if us < 1_000 * size else f"{us / size:,.0f} {unit}"
    return f"{us:.3g} µs"


def draw(results: Results, path: str) -> None:
    """Draw two panels over microseconds: a histogram, and the share that took longer."""
    import matplotlib  # here: it is large, and may be missing

    matplotlib.use("Agg")  # no window, no display
    from matplotlib import pyplot

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
