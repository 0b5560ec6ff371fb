"""Processor time of one message of 64 bytes in the program and in the server.

    .venv/bin/python benchmarks/layers.py [--rounds 3]          on all CPUs; with `taskset -c 0` on one

One program does one operation at a time, without competitors. So the figures show the cost of each way, not the
behaviour of a machine under load. The ways are measured by turns; the round with the least processor time counts, with
its time by the clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import click

import mqfs
from mqfs.client.publisher import Durability

sys.path.insert(0, str(Path(__file__).resolve().parent))

from history import Row, measured

BODY = b"x" * 64
RING = 20_000  # messages of a round in shared memory: all fit into a ring
CALLS = 5_000  # requests of a round that are answered one by one


@contextmanager
def server(folder: str) -> Iterator[int]:
    """Run a server with a mount, and yield its process number."""
    os.mkdir(f"{folder}/mq")
    words = ["serve", "--store", f"{folder}/store", "--listen", f"unix!{folder}/9p", "--mount", f"{folder}/mq"]
    command = [sys.executable, "-m", "mqfs", *words, "--default", "sync off"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("ready" in line for line in process.stderr), "the server did not start"
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


class Ways:
    """The measured ways. Each method performs one for some messages, and returns their number."""

    def __init__(self, client: mqfs.Client, folder: str) -> None:
        self.ring = client.group("ring", create=True, ctl=["replay all"])
        self.batch = [("s", BODY)] * 64
        self.live = self.ring.subscribe("s")
        self.work = client.group("work", create=True, ctl=["deliver one", "replay off"])
        self.singly, self.ahead = self.work.take("s"), self.work.take("t", prefetch=64)
        os.mkdir(f"{folder}/mq/mount")
        Path(f"{folder}/mq/mount/ctl").write_text("replay all\n")
        path = f"{folder}/mq/mount/s"
        self.writes, self.reads = os.open(path, os.O_WRONLY | os.O_CREAT), os.open(path, os.O_RDONLY)

    def publish(self, count: int, wait: Durability) -> int:
        for _ in range(count):
            self.ring.publish("s", BODY, wait=wait)
        return count

    def publish_many(self) -> int:
        for _ in range(RING // 64):
            self.ring.publish_many(self.batch, wait="published")
        return RING // 64 * 64

    def iterate(self, count: int) -> int:
        return sum(1 for _ in islice(self.live, count))

    def history(self) -> int:
        return sum(1 for _ in self.ring.history())

    def claim(self, claims: mqfs.Claims, count: int) -> int:
        for _ in range(count):
            with claims.get(60):
                pass
        return count

    def write(self) -> int:
        for _ in range(CALLS):
            os.write(self.writes, BODY)
        return CALLS

    def read(self) -> int:
        for _ in range(CALLS):
            os.read(self.reads, 4_096)
        return CALLS

    def round(self, note: Callable[[str, Callable[[], int], int], None]) -> None:
        """Measure all ways once. `note` is called with the name of a way, its call, and the expected number of
        messages."""
        note("publish, ring", lambda: self.publish(RING, "published"), RING)
        note("iterate, ring", lambda: self.iterate(RING), RING)
        many = RING // 64 * 64
        note("publish_many by 64, ring", self.publish_many, many)
        note("iterate those, ring", lambda: self.iterate(many), many)
        note("publish, ring, once the log has it", lambda: self.publish(CALLS, "committed"), CALLS)
        self.iterate(CALLS)
        for name in ("s", "t"):
            self.work.publish_many([(name, BODY)] * CALLS)
        note("claim and ack", lambda: self.claim(self.singly, CALLS), CALLS)
        note("claim and ack, prefetch 64", lambda: self.claim(self.ahead, CALLS), CALLS)
        note("mount, write", self.write, CALLS)
        note("mount, read", self.read, CALLS)
        kept = self.history()
        note("history, 9P", self.history, kept)


@click.command(help=__doc__)
@click.option("--rounds", default=3)
def main(rounds: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, server(folder) as pid:

        def note(name: str, call: Callable[[], int], count: int) -> None:
            row: Row = measured(call, count, pid)
            found.setdefault(name, []).append(tuple(value / count * 1e6 for value in row))

        with mqfs.connect(f"unix:{folder}/9p") as client:
            ways = Ways(client, folder)
            for _ in range(rounds):
                ways.round(note)
    click.echo(
        f"| us a message, CPUs {sorted(os.sched_getaffinity(0))} | program | server | clock |\n|---|---|---|---|"
    )
    for name, rows in found.items():
        clock, ours, theirs = min(rows, key=lambda row: row[1] + row[2])
        click.echo(f"| {name} | {ours:.3g} | {theirs:.3g} | {clock:.3g} |")


if __name__ == "__main__":
    main()
