"""Reads of all retained messages of a group: by `history`, as columns, and as the bytes that the server sends.

Each way reads all messages over 9P on a unix socket, by turns, from the page cache. The bytes alone are the upper bound
of the other two. The table has the rate, and the processor time of a message in both processes. The fastest of the
rounds counts.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import click
from processes import cpu_s

import mqfs

BATCH = 10_000
MILLION = 1_000_000


class Row(NamedTuple):
    seconds: float
    ours: float  # processor seconds of this process
    server: float


def measured(read: Callable[[], int], count: int, pid: int) -> Row:
    began, server, ours = time.perf_counter(), cpu_s(pid), resource.getrusage(resource.RUSAGE_SELF)
    found = read()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    assert found == count, f"{found} of {count} messages"
    mine = after.ru_utime + after.ru_stime - ours.ru_utime - ours.ru_stime
    return Row(seconds, mine, cpu_s(pid) - server)


@click.command(help=__doc__)
@click.option("--count", default=MILLION, help="Messages.")
@click.option("--size", default=64, help="Bytes of a body.")
@click.option("--rounds", default=5)
def main(count: int, size: int, rounds: int) -> None:
    show(measure(count, size, rounds), count // BATCH * BATCH)


def measure(count: int, size: int, rounds: int) -> dict[str, Row]:
    """Return the fastest round of each way."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mqfs", "serve", "--store", f"{folder}/store", "--listen", f"unix!{folder}/9p"]
        server = subprocess.Popen([*command, "--default", "sync off"], stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        assert any("ready" in line for line in server.stderr), "the server did not start"
        try:
            with mqfs.connect(f"unix:{folder}/9p", transport="9p") as client:
                group = client.group("g", create=True, ctl=["replay all"])
                for _ in range(count // BATCH):
                    group.publish_many([("s", b"x" * size)] * BATCH)
                return rows(group, count // BATCH * BATCH, rounds, server.pid)
        finally:
            server.terminate()
            server.wait()


def rows(group: mqfs.Group, count: int, rounds: int, pid: int) -> dict[str, Row]:
    def raw() -> int:
        file = group._link.open("g/.cursor", "r+")
        file.write(b"seek first\nuntil end\nformat record\n")
        seen = 0
        while data := file.receive(131_072):
            seen += len(data)
        file.close()
        return count if seen > count * 32 else 0

    reads: dict[str, Callable[[], int]] = {
        "bytes": raw,
        "history": lambda: sum(1 for _ in group.history()),
        "to_arrow": lambda: sum(batch.num_rows for batch in group.to_arrow()),
    }
    found: dict[str, list[Row]] = {name: [] for name in reads}
    for _ in range(rounds):
        for name, read in reads.items():
            found[name].append(measured(read, count, pid))
    return {name: min(some) for name, some in found.items()}


def show(rows: dict[str, Row], count: int) -> None:
    click.echo(f"{'':10} {'M/s':>6} {'of bytes':>9} {'client us':>10} {'server us':>10}")
    for name, row in rows.items():
        rate, part = count / row.seconds / 1e6, rows["bytes"].seconds / row.seconds
        click.echo(f"{name:10} {rate:6.2f} {part:9.2f} {row.ours / count * 1e6:10.3f} {row.server / count * 1e6:10.3f}")


if __name__ == "__main__":
    main()
