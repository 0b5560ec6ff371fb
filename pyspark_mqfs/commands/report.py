"""The table, plots and page of `mqfs spark stats`.

Nothing is counted here. A page is one file with embedded plots.
"""

from __future__ import annotations

import base64
import html
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mqfs.errors import BadConfig

LINES = 8  # streams with a line of their own; the others share one
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;width:100%}th,td{padding:.3em .6em;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}img{max-width:100%}"
)


def plots(result: dict[str, Any]) -> dict[str, bytes]:
    """Return plots as PNG by name: rate and size, and latency if it is known."""
    try:
        import matplotlib
    except ImportError:
        raise BadConfig("plots need matplotlib (in a clone: script/setup spark)") from None
    matplotlib.use("Agg")
    images = {"rate": _draw(_rate, result), "size": _draw(_size, result)}
    if any(row["latency_s"] for row in result["streams"]):
        images["latency"] = _draw(_latency, result)
    return images


def _draw(draw: Any, result: dict[str, Any]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    draw(figure.subplots(), result)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _rate(axes: Any, result: dict[str, Any]) -> None:
    rates = result["rates"]
    lines = sorted(rates["streams"].items(), key=lambda line: -sum(line[1]))
    times = (
        [datetime.fromtimestamp(rates["begin"] + n * rates["step"], UTC) for n in range(len(lines[0][1]))]
        if lines
        else []
    )
    for name, values in lines[:LINES]:
        axes.plot(times, values, label=name, linewidth=1.2)
    if len(lines) > LINES:
        rest = [sum(column) for column in zip(*(values for _, values in lines[LINES:]), strict=True)]
        axes.plot(times, rest, label=f"{len(lines) - LINES} others", linewidth=1.2, color="0.6")
    axes.set(title="Messages a second", ylim=(0, None))
    axes.tick_params(axis="x", labelrotation=20)
    if lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _size(axes: Any, result: dict[str, Any]) -> None:
    sizes = result["sizes"]
    axes.bar([_bytes(size) for size, _ in sizes], [count for _, count in sizes], color="#47a")
    axes.set(title="Messages by size (a bar is from its label to twice of it)")
    axes.grid(axis="y", alpha=0.3)


def _latency(axes: Any, result: dict[str, Any]) -> None:
    rows = [row for row in result["streams"] if row["latency_s"]][: 3 * LINES]
    for share in ("p50", "p99", "p999"):
        axes.plot([row["stream"] for row in rows], [row["latency_s"][share] * 1e3 for row in rows], "o", label=share)
    axes.set(title="Latency, ms, from sending to publishing", ylim=(0, None))
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _bytes(size: float) -> str:
    for unit in ("B", "K", "M", "G"):
        if size < 1_024 or unit == "G":
            return f"{size:.0f}{unit}" if size == int(size) else f"{size:.1f}{unit}"
        size /= 1_024
    raise AssertionError


def page(result: dict[str, Any], title: str) -> str:
    """Return the report as HTML."""
    images = "".join(
        f'<p><img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></p>'
        for name, data in plots(result).items()
    )
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells(row))}</tr>" for row in result["streams"]
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{images}<table><tr>{head}</tr>{rows}</table>\n"
    )


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a stream."""
    speed = row["messages_a_second"]
    return [
        row["stream"], f"{row['messages']:,}", _bytes(row["bytes"]), f"{speed:,.1f}" if speed else "",
        _bytes(row["size"]["p50"]), _bytes(row["size"]["p99"]), _bytes(row["largest"]), _time(row["first"]),
        _time(row["last"]),
    ]  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


HEADS = ("stream", "messages", "bytes", "a second", "size p50", "p99", "largest", "first", "last")


def table(result: dict[str, Any]) -> str:
    """Return the table for a terminal."""
    rows = [list(HEADS), *(cells(row) for row in result["streams"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADS))]
    lines = [
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([*lines, *result.get("files", [])])


def check_path(path: str) -> None:
    """Raise BadConfig if the folder of a report does not exist."""
    if not Path(path).parent.is_dir():
        raise BadConfig(f"--report {path!r}: no folder there (expected an existing directory)")


def write(result: dict[str, Any], path: str, title: str) -> list[str]:
    """Write a page to PATH.html, or else plots to PATH-rate.png and so on; return the files."""
    if path.endswith((".html", ".htm")):
        Path(path).write_text(page(result, title))
        return [path]
    files = []
    for name, data in plots(result).items():
        file = f"{path.removesuffix('.png')}-{name}.png"
        Path(file).write_bytes(data)
        files.append(file)
    return files
