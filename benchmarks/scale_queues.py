"""Work queues at scale: many waiting messages, many consumers, many views; their memory and time.

    python benchmarks/scale_queues.py [--quick] [--part waiting|consumers|views]

The server is the real one, with a store on disk, used through its mount. Times of single operations are medians, by the
clock of the client. Memory is the server's anonymous memory: the kernel may evict mapped pages of the log's index.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from queue_peers import until  # noqa: E402

from mqfs.fuse.mount import mounted, unmount  # noqa: E402

LINE = b"x" * 99 + b"\n"
LOOKS = 200  # operations for a median


class Serving:
    """A server that is started, stopped and killed."""

    def __init__(self, base: Path) -> None:
        self.base, self.mount = base, base / "mq"
        self.mount.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the server. Return the seconds until it serves."""
        begun = time.monotonic()
        words = ["--store", str(self.base / "store"), "--mount", str(self.mount)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mqfs", "serve", *words], cwd=HERE.parent, stderr=subprocess.DEVNULL
        )
        until(lambda: (self.mount / "ctl").exists(), 120)
        return time.monotonic() - begun

    def end(self, number: int = signal.SIGTERM) -> float:
        """End the server by a signal. Return the seconds until it has ended."""
        assert self.process is not None
        begun = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(120)
        if mounted(str(self.mount)):
            unmount(str(self.mount), lazily=True)
        return time.monotonic() - begun

    @property
    def memory(self) -> float:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    def group(self, name: str, *lines: str) -> Path:
        made = self.mount / name
        made.mkdir()
        tell(made, *lines)
        return made


def tell(group: Path, *lines: str) -> None:
    file = os.open(group / "ctl", os.O_WRONLY)
    os.write(file, "".join(f"{line}\n" for line in lines).encode())
    os.close(file)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def took(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def median_us(do: Callable[[], object], times: int = LOOKS) -> float:
    return statistics.median(took(do) for _ in range(times)) * 1e6


def fill(stream: Path, count: int) -> None:
    """Write `count` messages of 100 bytes; the group has `data line`."""
    with opened(stream, os.O_WRONLY) as file:
        while count:
            some = min(count, 600)
            os.write(file, LINE * some)
            count -= some


# ---------------------------------------------------------------- much that waits


def waiting(server: Serving, count: int) -> None:
    server.start()
    empty = server.memory
    one = server.group("one", "deliver one", "ack next", "data line", "sync off")
    over = server.group("over", "replay off", "data line", "sync off", "consumer w")
    for group in (one, over):
        (group / "s").touch()
        begun = time.monotonic()
        fill(group / "s", count)
        print(f"{group.name:5} {count:,} messages of 100 B in {time.monotonic() - begun:.1f} s; ", end="")
        print(f"server {server.memory:.0f} MB (empty {empty:.0f})")
    print(f"clean stop {server.end():.2f} s, start {server.start():.2f} s, server {server.memory:.0f} MB; ", end="")
    server.end(signal.SIGKILL)
    print(f"start after kill -9 {server.start():.2f} s, server {server.memory:.0f} MB")
    with opened(one / "s", os.O_RDWR) as file:
        first = took(lambda: os.read(file, 4096)) * 1e3
        print(f"one   first read {first:.1f} ms, then {median_us(lambda: os.read(file, 4096)):.0f} us; ", end="")
        print(f"server {server.memory:.0f} MB")
    claims(server, over / ".consumers" / "w", [1, 100, 10_000, min(100_000, count // 2)])
    print(
        f"stats {took((over / '.stats').read_bytes) * 1e3:.1f} ms, one {took((one / '.stats').read_bytes) * 1e3:.1f} ms"
    )
    ended = server.end()
    print(
        f"start after a clean stop (of {ended:.1f} s): {server.start():.2f} s, server {server.memory:.0f} MB; ", end=""
    )
    look(one, over)
    held = os.open(over / ".consumers" / "w", os.O_RDWR)
    for _ in range(10_000):
        os.read(held, 4096)
    server.end(signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.close(held)
    print(f"after kill -9 with 10,000 claims: {server.start():.2f} s, server {server.memory:.0f} MB; ", end="")
    look(one, over)
    server.end()


def look(one: Path, over: Path) -> None:
    with opened(one / "s", os.O_RDWR) as file, opened(over / ".consumers" / "w", os.O_RDWR) as other:
        times = [took(lambda: os.read(file, 4096)) * 1e3, took(lambda: os.read(other, 4096)) * 1e3]
    print(f"first read {times[0]:.1f} ms, {times[1]:.1f} ms")


def claims(server: Serving, consumer: Path, counts: list[int]) -> None:
    before, held = server.memory, 0
    with opened(consumer, os.O_RDWR) as file:
        for count in counts:
            while held < count:
                os.read(file, 4096)
                held += 1
            us = median_us(lambda: os.read(file, 4096))
            held += LOOKS
            grown = server.memory - before
            print(f"over  {held:7,} claims held: a claim {us:.0f} us; server +{grown:.1f} MB", end="")
            print(f" ({grown * 1024 / held:.2f} KiB each)" if held > 5_000 else "")
    begun = time.monotonic()
    (consumer.parent.parent / "ctl").read_bytes()  # waits until all are released
    print(f"over  all {held:,} given back by the close in {time.monotonic() - begun:.2f} s; ", end="")
    print(f"a worker that opens for each then takes {median_us(lambda: work(consumer), 20):.0f} us a message")


def work(consumer: Path) -> None:
    """Handle a message as a shell does: open, read, acknowledge, close."""
    with opened(consumer, os.O_RDWR) as file:
        os.read(file, 4096)
        os.write(file, b"ack")


# ---------------------------------------------------------------- many consumers


def consumers(server: Serving, count: int) -> None:
    server.start()
    group = server.group("many", "replay all", "sync off")
    (group / "s").touch()
    with opened(group / "s", os.O_WRONLY) as file:
        alone = median_us(lambda: os.write(file, LINE))
        before, begun = server.memory, time.monotonic()
        for first in range(0, count, 100):
            tell(group, *(f"consumer c{number}" for number in range(first, first + 100)))
        made = time.monotonic() - begun
        print(f"{count:,} consumers over the group: made in {made:.1f} s ({made / count * 1e6:.0f} us each); ", end="")
        print(f"server +{server.memory - before:.1f} MB ({(server.memory - before) * 1024 / count:.2f} KiB each)")
        tell(group, "replay off")
        print(f"a write {median_us(lambda: os.write(file, LINE)):.0f} us (none: {alone:.0f}); ", end="")
        with opened(group / ".consumers" / "c7", os.O_RDWR) as taker:
            print(f"with one that takes: a claim {median_us(lambda: os.read(taker, 4096)):.0f} us, ", end="")
            print(f"an ack {median_us(lambda: os.write(taker, b'ack') and os.read(taker, 4096)):.0f} us with its claim")
    print(f".stats {took((group / '.stats').read_bytes) * 1e3:.0f} ms, ", end="")
    size = len((group / ".stats").read_bytes())
    assert len(json.loads((group / ".stats").read_text())["consumers"]) == count
    print(f"{size / 1024:.0f} KiB; ctl {took((group / 'ctl').read_bytes) * 1e3:.0f} ms; ", end="")
    print(f"ls .consumers {took(lambda: os.listdir(group / '.consumers')) * 1e3:.0f} ms")
    every = [os.open(group / ".consumers" / f"c{number}", os.O_RDWR) for number in range(count)]
    (group / "s").stat()  # so that its messages are counted from now on
    claim = took(lambda: [os.read(file, 4096) for file in every]) / count * 1e6
    ack = took(lambda: [os.write(file, b"ack") for file in every]) / count * 1e6
    print(f"each has one: a claim {claim:.0f} us, an ack {ack:.0f} us", end="; ")
    for file in every:
        os.read(file, 4096)
    server.end(signal.SIGKILL)
    for file in every:
        with contextlib.suppress(OSError):
            os.close(file)
    print(f"start after kill -9 {server.start():.2f} s, server {server.memory:.0f} MB; ", end="")
    server.end()
    print(f"after a clean stop {server.start():.2f} s, server {server.memory:.0f} MB")
    server.end()


# ---------------------------------------------------------------- many views


def views(server: Serving, streams: int, patterns: int) -> None:
    server.start()
    group = server.group("topics", "replay all", "sync off")
    before = server.memory

    def make(number: int) -> None:
        os.close(os.open(group / f"site{number % 1000}.host{number // 1000}.log", os.O_CREAT | os.O_WRONLY))

    half = streams - 2 * LOOKS
    begun = time.monotonic()
    for number in range(half):
        make(number)
    made = time.monotonic() - begun
    print(f"{half:,} streams made in {made:.1f} s ({made / half * 1e6:.0f} us each); ", end="")
    print(f"server +{server.memory - before:.0f} MB")
    fresh = iter(range(half, streams))
    print(f"without views: to make one {median_us(lambda: make(next(fresh))):.0f} us", end="")
    with opened(group / "site1.host1.log", os.O_WRONLY) as file:
        print(f", a write {median_us(lambda: os.write(file, LINE)):.0f} us")
        before, begun = server.memory, time.monotonic()
        shapes = ("site{0}.*.log", "site{0}.#", "*.host{1}.v{0}", "#.host{1}.x{0}")
        lines = [f"bind v{i} {shapes[i % 4].format(i % 1000, i // 100)}" for i in range(patterns)]
        for at in range(0, patterns, 100):
            tell(group, *lines[at : at + 100])
        bound = time.monotonic() - begun
        print(f"{patterns:,} patterns bound in {bound:.1f} s ({bound / patterns * 1e6:.0f} us each); ", end="")
        print(f"server +{server.memory - before:.0f} MB")
        print(f"with them: first write {took(lambda: os.write(file, LINE)) * 1e3:.1f} ms, ", end="")
        print(f"a write {median_us(lambda: os.write(file, LINE)):.0f} us; ", end="")
    more = iter(range(LOOKS))
    print(f"to make one {median_us(lambda: make(next(fresh))):.0f} us, ", end="")
    print(f"to bind one {median_us(lambda: tell(group, f'bind w{next(more)} site5.*.log')):.0f} us; ", end="")
    with opened(group / "v4", os.O_RDONLY) as view, opened(group / "site4.host1.log", os.O_WRONLY) as file:

        def through() -> None:
            os.write(file, LINE)
            os.read(view, 4096)

        print(f"a write and its read through a view {median_us(through):.0f} us")
    server.end(signal.SIGKILL)
    print(f"start after kill -9 {server.start():.2f} s, server {server.memory:.0f} MB; ", end="")
    server.end()
    print(f"after a clean stop {server.start():.2f} s, server {server.memory:.0f} MB")
    server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--part", choices=["waiting", "consumers", "views"], help="only this one")
    given = parser.parse_args()
    tenth = 10 if given.quick else 1
    parts: dict[str, Callable[[Serving], None]] = {
        "waiting": lambda server: waiting(server, 1_000_000 // tenth),
        "consumers": lambda server: consumers(server, 10_000 // tenth),
        "views": lambda server: views(server, 100_000 // tenth, 10_000 // tenth),
    }
    for name, part in parts.items():
        if given.part in (None, name):
            base = Path(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"))
            server = Serving(base)
            try:
                print(f"-- {name}", flush=True)
                part(server)
            finally:
                if server.process is not None and server.process.poll() is None:
                    server.end(signal.SIGKILL)
                shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
