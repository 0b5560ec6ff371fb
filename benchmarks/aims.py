"""Every aim beside its peer, in one run and one table, pinned or not.

    taskset -c 0 .venv/bin/python benchmarks/aims.py [--rounds 3] [--only TEXT]...     all on one CPU
    .venv/bin/python benchmarks/aims.py                                                on all there are

It ends by itself: parts that were not begun within LONGEST_S are left out, and reported. Figures are medians of rounds
by turns. The processor time is that of one message, in all processes together. `make bench-aims` runs both commands.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import files  # noqa: E402
import history  # noqa: E402
import ninep  # noqa: E402
import readers  # noqa: E402
from peer_servers import versions  # noqa: E402
from peers import BARE, BODIES, CPUS, RING, RING64, Bench, Scenario  # noqa: E402

LONGEST_S = 660.0
RING_OFF, PWRITE, MOUNT = "mqfs library, ring, replay off", "bare pwrite", "mqfs mount"
QUEUE, QUEUE64, FILES = "mqfs library", "mqfs library, batches", "mqfs mount, ack next"
BEAN, REDIS, REDIS64, STREAM = "beanstalkd", "Redis streams", "Redis streams, batches", "Redis stream"


class Aim(NamedTuple):
    """A figure or, with a peer, a multiple of the peer's. `below`: less is better."""

    text: str
    ours: str
    least: float
    peer: str = ""
    below: bool = False
    key: str = "rate"


class Part(NamedTuple):
    """Rows that are measured together. `measure` returns rows by their names, each with its figures."""

    name: str
    measure: Callable[[Run], dict[str, dict[str, Any]]]
    aims: tuple[Aim, ...]


class Run(NamedTuple):
    bench: Bench
    folder: Path


def scenario(*ways: str, kind: str, size: int = 1024, **more: Any) -> Callable[[Run], dict[str, dict[str, Any]]]:
    return lambda run: run.bench.measure(Scenario("", kind, list(ways), size, **more), run.folder)


def read_history(run: Run) -> dict[str, dict[str, Any]]:
    count = history.MILLION
    rows = history.measure(count, 64, 3)
    used = {name: (row.ours + row.server) / count * 1e6 for name, row in rows.items()}
    return {name: {"rate": count / row.seconds, "cpu_us": used[name]} for name, row in rows.items()}


def write_files(run: Run) -> dict[str, dict[str, Any]]:
    """Measure writes of files: on one CPU by processor time, which equals the clock on an idle machine; on two by the
    clock."""
    run.folder.mkdir()
    program = run.folder / "rate"
    subprocess.run(["cc", "-O2", "-o", program, HERE / "rate.c"], check=True)
    rows: dict[str, dict[str, Any]] = {}
    for kind in ("loop", "tree"):
        with files.server(kind, run.folder, CPUS[0]) as (path, pid):
            if kind == "tree":
                path = files.group(path, "g", "replay off", "sync off")
            for size, count in ((64, 20_000), (65_536, 2_000)):
                for cpu in CPUS[:2] if kind == "tree" and size == 64 else CPUS[:1]:
                    found = [files.both_rates(program, pid, path, 1, count, size, cpu=cpu)[0] for _ in range(4)][1:]
                    clock, used = (sorted(column)[1] for column in zip(*found, strict=True))
                    two = cpu != CPUS[0]
                    rows[f"{kind} {size}{', two CPUs' * two}"] = {"rate": clock if two else used, "cpu_us": 1e6 / used}
                    if size == 64:
                        rows.setdefault(f"{kind} 64, clock", {"rate": clock, "cpu_us": 1e6 / used})
    return rows


def ask_ninep(run: Run) -> dict[str, dict[str, Any]]:
    run.folder.mkdir()
    bench = ninep.Bench(run.folder, 30_000, CPUS[0], disk=True)
    rows: dict[str, dict[str, Any]] = {}
    with bench.mqfs() as ours, bench.diod() as theirs:
        for what in ("read", "write"):
            found = [
                (bench.rate(ours, what, "/b", 1), bench.rate(theirs, what, str(run.folder / "b"), 1)) for _ in range(3)
            ]
            for name, column in zip(("mqfs", "diod"), zip(*found, strict=True), strict=True):
                rows[f"{name} {what}"] = {"rate": max(column)}
    return rows


def idle_readers(run: Run) -> dict[str, dict[str, Any]]:
    run.folder.mkdir()
    return {"10,000 readers": {"idle": readers.run(run.folder, 10_000).idle * 100}}


PARTS = (
    Part(
        "live, 64 B",
        scenario(RING, RING64, "ZeroMQ ipc", kind="live", size=64),
        (
            Aim("1→1, 64 B, one by one", RING, 1.5e6),
            Aim("", RING, 1.5, "ZeroMQ ipc"),
            Aim("1→1, 64 B, batches of 64", RING64, 3e6),
            Aim("batches beside one by one", RING64, 1.0, RING),
        ),
    ),
    Part(
        "live, 1 KiB",
        scenario(RING, RING64, RING_OFF, "ZeroMQ ipc", PWRITE, kind="live"),
        (
            Aim("1→1, 1 KiB, replay off", RING_OFF, 3.0, "ZeroMQ ipc"),
            Aim("1→1, 1 KiB, kept, batches", RING64, 0.9, PWRITE),
        ),
    ),
    Part(
        "fan-out",
        scenario(RING, RING64, "NATS", "ZeroMQ ipc", kind="live", takers=8),
        (
            Aim("1→8, 1 KiB, deliveries", RING, 5.0, "NATS"),
            Aim("", RING, 1.0, "ZeroMQ ipc"),
            Aim("1→8, 1 KiB, batches", RING64, 1.0, "ZeroMQ ipc"),
        ),
    ),
    Part(
        "history",
        read_history,
        (Aim("history, 64 B", "history", 3e6), Aim("history as columns", "to_arrow", 10e6)),
    ),
    Part(
        "work queues",
        scenario(
            *(QUEUE, QUEUE64, FILES, "mqfs mount, consumer", BEAN, REDIS, REDIS64),
            *("RabbitMQ", "Celery's transport on Redis"),
            kind="work",
            senders=2,
            takers=4,
        ),
        (
            Aim("queue 2→4, library, one by one", QUEUE, 1.5, BEAN),
            Aim("", QUEUE, 1.0, "RabbitMQ"),
            Aim("", QUEUE, 1.0, "Celery's transport on Redis"),
            Aim("queue, library, batches", QUEUE64, 5.0, BEAN),
            Aim("", QUEUE64, 1.5, REDIS64),
            Aim("queue, mount, ack next", FILES, 1.5, BEAN),
            Aim("", FILES, 1.5, REDIS),
            Aim("queue, mount, consumer", "mqfs mount, consumer", 1.5, BEAN),
        ),
    ),
    Part(
        "durable, 1",
        scenario(RING, MOUNT, BARE, kind="durable", synced=True),
        (Aim("durable, 1 writer, ring", RING, 1 / 1.5, BARE), Aim("durable, 1 writer, mount", MOUNT, 1 / 1.5, BARE)),
    ),
    Part(
        "durable, 16",
        scenario(RING, MOUNT, STREAM, kind="durable", senders=16, synced=True),
        (Aim("durable, 16 one by one, ring", RING, 2.5, STREAM), Aim("", MOUNT, 2.5, STREAM)),
    ),
    Part(
        "durable, 16 × 64",
        scenario(RING, STREAM, kind="durable", senders=16, batch=64, synced=True),
        (Aim("durable, 16 in batches, ring", RING, 3.0, STREAM),),
    ),
    Part(
        "mount",
        write_files,
        (
            Aim("mount, 64 B written, one CPU", "tree 64", 0.8, "loop 64"),
            Aim("mount, 64 B, two CPUs", "tree 64, two CPUs", 0.5, "tree 64, clock"),
            Aim("mount, 64 KiB written", "tree 65536", 0.6, "loop 65536"),
        ),
    ),
    Part(
        "round trips",
        scenario(BODIES, RING, MOUNT, "ZeroMQ ipc", kind="echo", size=64),
        (
            Aim("round trip p50, ring, µs", RING, 5.0, below=True, key="p50"),
            Aim("round trip p50, mount, µs", MOUNT, 50 / 62, "ZeroMQ ipc", below=True, key="p50"),
        ),
    ),
    Part(
        "9P",
        ask_ninep,
        (Aim("9P read, 64 B", "mqfs read", 1.2, "diod read"), Aim("9P write, 64 B", "mqfs write", 1.2, "diod write")),
    ),
    Part("idle", idle_readers, (Aim("10,000 readers, % of a CPU", "10,000 readers", 0.5, below=True, key="idle"),)),
)
HEAD = f"{'aim':33}{'ours':>13}{'cpu us':>9}  {'peer':28}{'peer’s':>12}{'cpu us':>9}{'ratio':>8}{'aim':>10}"


def line(aim: Aim, rows: dict[str, dict[str, Any]]) -> str:
    ours, theirs = rows.get(aim.ours, {}), rows.get(aim.peer, {})
    lacking = [why(row) for row in (ours, theirs) if aim.key not in row]
    if aim.key not in ours or (aim.peer and aim.key not in theirs):
        return f"{aim.text:33}{figure(ours.get(aim.key)):>13}{'':9}  {aim.peer:28} {lacking[0]}"
    got = ours[aim.key] / theirs[aim.key] if aim.peer else ours[aim.key]
    met = "met" if (got <= aim.least if aim.below else got >= aim.least) else "missed"
    wanted = f"{'≤' if aim.below else '≥'} {aim.least:,.3g}" if aim.least < 1e4 else f"≥ {aim.least / 1e6:g} M"
    return (
        f"{aim.text:33}{figure(ours[aim.key]):>13}{used(ours):>9}  {aim.peer:28}{figure(theirs.get(aim.key)):>12}"
        f"{used(theirs):>9}{f'{got:.2f}' if aim.peer else '':>8}{wanted:>10}  {met}"
    )


def why(row: dict[str, Any]) -> str:
    """Return why a figure is missing."""
    return next((row[key] for key in ("missing", "failed", "late") if key in row), "not measured")


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def used(row: dict[str, Any]) -> str:
    return f"{row['cpu_us']:.2f}" if "cpu_us" in row else ""


def measure(parts: list[Part], rounds: int) -> None:
    began, base = time.monotonic(), Path(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"))
    try:
        for number, part in enumerate(parts):
            rows: dict[str, dict[str, Any]] = {}
            if time.monotonic() - began < LONGEST_S:
                run = Run(Bench(rounds, 1.0, []), base / str(number))
                run.bench.until = began + LONGEST_S
                try:
                    rows = part.measure(run)
                except (AssertionError, OSError, subprocess.SubprocessError) as error:
                    rows = {aim.ours: {"failed": str(error)} for aim in part.aims}
                shutil.rmtree(run.folder, ignore_errors=True)
            for aim in part.aims:
                print(line(aim, rows), flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(f"{time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", metavar="TEXT", help="parts so named only; repeatable")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped and mounts removed
    known = (f"{name} {version}" for name, version in versions().items())
    print(time.strftime("%Y-%m-%d"), os.uname().release, f"CPUs {CPUS}", *known, sep=", ")
    print(HEAD)
    measure([part for part in PARTS if not given.only or any(text in part.name for text in given.only)], given.rounds)


if __name__ == "__main__":
    main()
