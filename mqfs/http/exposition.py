"""The formats of Prometheus: text 0.0.4, and OpenMetrics 1.0. A family is all samples of one name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_METRICS_1 = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
END = "# EOF\n"  # of OpenMetrics

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Family(NamedTuple):
    """`kind`: counter, gauge or histogram. `about` has no backslash and no line end."""

    name: str
    kind: str
    about: str

    def head(self, open_metrics: bool) -> str:
        """The lines before its samples. In OpenMetrics the suffix of a counter is no part of its name."""
        name = self.name.removesuffix("_total") if open_metrics and self.kind == "counter" else self.name
        return f"# HELP {name} {self.about}\n# TYPE {name} {self.kind}\n"


def labels(**values: str) -> str:
    """With their braces, or "" where there are none."""
    words = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())
    text = ",".join(words)
    return f"{{{text}}}" if text else ""


def samples(name: str, rows: Iterable[tuple[str, float]]) -> str:
    """A line for each row of labels and value."""
    return "".join([f"{name}{text} {value}\n" for text, value in rows])
