"""What a person sees of the bench: how far it is, a table at the end, JSON, a picture.

Owns the output and the exit code; measures nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import mqfs
from mqfs.bench.measure import Found, Progress, latencies, measure
from mqfs.bench.plan import Plan

FAILED = 1
_TITLES = {"publish": "publish, until kept", "delivery": "publish → receive", "round trip": "round trip, no other load"}


def run(plan: Plan) -> int:
    """Measure and show; the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C, so that nothing is left behind
    with _progress() as progress:
        found = measure(plan, progress)
    if plan.json is not None:
        _write_json(plan.json, found)
    if plan.json != "-":
        show(found, Console(highlight=False))
    if plan.plot is not None:
        from mqfs.bench import plot

        plot.draw(found, plan.plot)
    if not found.sound:
        print(f"mqfs: {wrong(found)}", file=sys.stderr)
        return FAILED
    return 0


def wrong(found: Found) -> str:
    """One line."""
    said = (
        (found.lost, "lost"),
        (found.twice, "more than once"),
        (found.disordered, "out of order"),
        (found.damaged, "damaged"),
        (found.unacknowledged, "not acknowledged"),
    )
    return "not every message came as it should: " + ", ".join(f"{count:,} {what}" for count, what in said if count)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A line that changes, where somebody looks."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda published, received: None
        return
    begun = time.monotonic()
    with Live(Text("starting"), console=console, refresh_per_second=5, transient=True) as live:

        def progress(published: int, received: int) -> None:
            seconds = time.monotonic() - begun
            text = f"{seconds:5.1f} s   published {published:,}   received {received:,}   Ctrl-C: that is enough"
            live.update(Text(text))

        yield progress


def _write_json(path: str, found: Found) -> None:
    text = json.dumps({"mqfs": mqfs.__version__, **found.told()}, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


# ---------------------------------------------------------------- the table


def show(found: Found, console: Console) -> None:
    console.print(
        described(found.plan) + ("; ended by Ctrl-C" if found.interrupted else ""), markup=False, soft_wrap=True
    )
    told = found.told()
    rates = Table("", "messages", "a second", "MB/s", "seconds", box=None)
    for name in ("published", "received"):
        row = told[name]
        figures = (f"{row['messages']:,}", f"{row['rate']:,.0f}", f"{row['mb_per_s']:,.1f}", f"{row['seconds']:.2f}")
        rates.add_row(name, *figures)
    times = Table("", "p50", "p90", "p99", "p99.9", "max", box=None)
    for name, took in found.took.items():
        times.add_row(_TITLES[name], *(brief(us) for key, us in latencies(took).items() if key != "count"))
    for table in (rates, times):
        for column in table.columns:
            column.no_wrap, column.justify = True, "right"
        table.columns[0].justify = "left"
        console.print(table)
    if found.sound and found.received:
        console.print("checked: none lost, doubled, out of order or damaged")


def brief(us: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}" if us < 1_000 * size else f"{us / size:,.0f} {unit}"
    return f"{us:.3g} µs"


def described(plan: Plan) -> str:
    takers = f"{plan.workers} sharing them" if plan.workers else f"{plan.consumers} receiving all"
    batch = f" in batches of {plan.batch}" if plan.batch > 1 else ""
    rate = f", {plan.rate:,g} a second" if plan.rate else ""
    who = f"{plan.producers} publishing{batch}{rate}, {takers}"
    wait = ", waiting for shared memory only" if plan.wait == "published" else ""
    return f"{plan.size:,} bytes, {who}; {plan.transport}, sync {plan.sync}{wait}"
