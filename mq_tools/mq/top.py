"""`mq top`: frames of the waiting messages, rates and ages of groups, streams and consumers.

Reads `.stats`, and `.cursor` for the age of the oldest waiting message.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import attrs
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mq_tools.cursor import quote
from mq_tools.errors import ToolError, close, printable
from mq_tools.files import READ_BYTES, stats_of
from mq_tools.mq.rows import Row, consumers_of, group_row, streams_of
from mq_tools.mq.table import aligned
from mq_tools.tree import groups_below

_HEAD = ("NAME", "WAITING", "IN/s", "OUT/s", "LAG s", "OLDEST", "READERS", "FAILED", "DEAD", "DROPPED", "HELD-BACK")
_SHORTEST_S = 0.1  # minimum interval of frames on a terminal
_MARGIN = 6  # lines of a terminal that are not rows


@attrs.frozen
class Line:
    """One line of a frame."""

    name: str
    kind: str
    waiting: int
    rate_in: float | None
    rate_out: float | None
    lag_s: float | None  # time to drain the waiting messages at the present rate
    age_s: float | None
    readers: int
    failed: int
    dead: int
    dropped: int
    held_back: str | None  # the rule that makes a consumer's messages wait


_own_reads: Counter[str] = Counter()  # reads by `_age`, by group: `.stats` counts each as a read message
Sample = dict[str, tuple[str, Row]]  # by path: its group and its row


def sample(groups: Sequence[str]) -> Sample:
    """Return the rows of the groups, the groups inside, and their streams and consumers."""
    rows: Sample = {}
    for group in groups:
        for inner in groups_below(group):
            with suppress(ToolError):  # removed, or not readable
                stats = stats_of(inner)
                row = group_row(f"{inner}/", stats)
                rows[f"{inner.rstrip('/')}/"] = inner, attrs.evolve(row, taken=(row.taken or 0) - _own_reads[inner])
                for row in streams_of(stats) + consumers_of(stats):
                    rows[os.path.join(inner, row.name)] = inner, row
    return rows


def frame(before: Sample, now: Sample, seconds: float, sort: str, limit: int | None) -> list[Line]:
    """Return the lines for the difference of two samples, sorted, at most `limit`."""
    lines = [_line(path, row, before.get(path, ("", None))[1], seconds) for path, (_, row) in now.items()]
    if sort == "age":
        lines = [attrs.evolve(line, age_s=_age(now[line.name])) for line in lines]
    lines.sort(key=lambda line: (_rank(line, sort), line.name))
    return [attrs.evolve(line, age_s=_age(now[line.name])) for line in lines[:limit]]


def _rank(line: Line, sort: str) -> float:
    values = {"waiting": line.waiting, "in": line.rate_in, "out": line.rate_out, "age": line.age_s}
    values |= {"dropped": line.dropped, "dead": line.dead, "name": 0}
    return -(values[sort] or 0)


def _line(path: str, row: Row, before: Row | None, seconds: float) -> Line:
    old = before or Row(row.name, row.kind)
    out = _rate(row.taken, old.taken, seconds)
    waiting = row.waiting or 0
    return Line(
        name=path,
        kind=row.kind,
        waiting=waiting,
        rate_in=_rate(row.written, old.written, seconds),
        rate_out=out,
        lag_s=None if row.taken is None else 0.0 if not waiting else waiting / out if out else None,
        age_s=None,
        readers=row.readers or 0,
        failed=row.failed or 0,
        dead=row.dead or 0,
        dropped=row.dropped or 0,
        held_back=row.held_back,
    )


def _rate(now: int | None, before: int | None, seconds: float) -> float | None:
    if now is None or before is None or seconds <= 0:
        return None
    return max(0, now - before) / seconds  # a restarted server counts from 0


def _age(entry: tuple[str, Row]) -> float | None:
    """Return the seconds that the oldest waiting message has waited; None if unknown."""
    group, row = entry
    if row.oldest is not None:
        return max(0.0, time.time() - row.oldest)
    if not row.waiting or not row.first or row.kind == "consumer":
        return None
    try:
        fd = os.open(os.path.join(group, ".cursor"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        select_ = f"select {quote(row.name)}\n" if row.kind == "stream" else ""
        os.write(fd, f"{select_}format json\nseek {row.first}\nuntil end\n".encode())
        _own_reads[group] += 1
        return _age_of(fd)
    except (OSError, ValueError):
        return None
    finally:
        close(fd)


def _age_of(fd: int) -> float | None:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(fd, READ_BYTES)
        if not more:
            return None
        data += more
    return max(0.0, time.time() - float(json.loads(data)["time"]))


# ---------------------------------------------------------------- showing


def table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(_HEAD):
        table.add_column(head, justify="right" if number else "left", no_wrap=True, overflow="ellipsis")
    for line in lines:
        table.add_row(*map(Text, _cells(line)), style="red" if line.dead else None)
    return table


def _cells(line: Line) -> list[str]:
    rates = [_number(rate) for rate in (line.rate_in, line.rate_out, line.lag_s)]
    counts = [str(count) for count in (line.readers, line.failed, line.dead, line.dropped)]
    return [printable(line.name), str(line.waiting), *rates, _span(line.age_s), *counts, line.held_back or "-"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.1f}s"


def frames(groups: Sequence[str], sort: str, limit: Callable[[], int | None]) -> Iterator[list[Line]]:
    """Yield one frame per iteration; the caller sleeps."""
    before, at = sample(groups), time.monotonic()
    yield frame({}, before, 0, sort, limit())
    while True:
        now, then = sample(groups), time.monotonic()
        yield frame(before, now, then - at, sort, limit())
        before, at = now, then


def show_plain(groups: Sequence[str], interval_s: float, sort: str, count: int, *, as_json: bool) -> None:
    """Print `count` frames as text, the first after one interval: rates need two samples."""
    series = frames(groups, sort, lambda: None)
    next(series)
    for _ in range(count):
        time.sleep(interval_s)
        lines = next(series)
        if as_json:
            print(json.dumps([attrs.asdict(line) for line in lines], ensure_ascii=False), flush=True)
        else:
            print("\n".join(aligned([_HEAD, *map(_cells, lines)], range(1, len(_HEAD)))), flush=True)


def show_live(groups: Sequence[str], interval_s: float, sort: str, count: int | None) -> None:
    """Show frames on a terminal until q, Ctrl-C, or `count` of them."""
    console = Console()
    shown = 0
    with _keys() as is_ended, Live(console=console, screen=True, auto_refresh=False) as live:
        for lines in frames(groups, sort, lambda: max(1, console.height - _MARGIN)):
            live.update(table(lines), refresh=True)
            shown += 1
            if shown == count or is_ended(max(interval_s, _SHORTEST_S)):
                break


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys from the terminal within the block. Yield a function that waits some seconds and returns whether
    q was pressed, or the input ended."""
    fd = sys.stdin.fileno()

    def is_ended(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([fd], [], [], left)
            if ready and os.read(fd, 64)[:1] in (b"q", b"Q", b""):
                return True
        return False

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield is_ended
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
