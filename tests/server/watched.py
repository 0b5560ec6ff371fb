"""A server that says how its thread worked, and users of it as processes: for tests of fairness."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from mqfs.ninep.client.connection import connect
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, environment, short_folder, start

GREEDY, POLITE = 65_533, 65_534


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


class User:
    """A program that acts as a user."""

    def __init__(self, address: str, uid: int, *role: str) -> None:
        self.process = start(
            [sys.executable, "-m", "tests.server.users", address, str(uid), *role],
            cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> bytes:
        """The next that it prints."""
        assert self.process.stdout is not None
        poll = select.poll()  # select(2) knows 1,024 descriptors
        poll.register(self.process.stdout, select.POLLIN)
        assert poll.poll(HANG_S * 1_000), "it stands still"
        line = self.process.stdout.readline()
        assert line, "it ended"
        return line

    def trips(self, seconds: float) -> tuple[float, float]:
        """How long the 99th of 100 round trips takes, and the longest, in seconds."""
        self.begin(seconds)
        times = self.times()
        return p99(times), max(times)

    def begin(self, seconds: float, pause_s: float = 0.0) -> None:
        """Round trips for so long, so far apart."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%f %f\n" % (seconds, pause_s))
        self.process.stdin.flush()

    def times(self) -> list[float]:
        """How long each took."""
        return [ended - began for began, _, ended in self.moments()]

    def moments(self) -> list[tuple[float, float, float]]:
        """When each began, when its write was answered, and when its read was, by the monotonic clock."""
        return list(map(tuple, json.loads(self.line())))  # type: ignore[arg-type]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def soon(_: float) -> None:
    """It takes the server less than a millisecond, mostly."""
    time.sleep(0.0005)


@contextmanager
def user(address: str, uid: int, *role: str) -> Iterator[User]:
    made = User(address, uid, *role)
    try:
        yield made
    finally:
        made.end()


class Measured(NamedTuple):
    """A server that records how its thread works."""

    address: str
    server: Server
    work: Path

    def record(self) -> Work:
        """What it recorded since the last time."""
        self.work.unlink(missing_ok=True)
        self.server.process.send_signal(signal.SIGUSR1)
        eventually(self.work.exists, "the record is written", soon)
        longest, *rest = array("d", self.work.read_bytes())
        return Work(longest, rest[::4], rest[1::4], rest[2::4], rest[3::4])

    def longest(self) -> float:
        """The longest piece of work since the last time, in seconds of the thread."""
        return self.record().longest


class Work(NamedTuple):
    """The work of a server's thread, in seconds."""

    longest: float  # piece of work without a switch to another task
    clock: list[float]  # the moments that were recorded
    thread: list[float]  # how long it had worked by then
    served: list[float]  # when it had last sent replies to the polite user by then
    asked: list[float]  # where it noticed a request of that user: when it had looked before; else 0

    @property
    def share(self) -> float:
        """The part of the time that it worked."""
        return (self.thread[-1] - self.thread[0]) / (self.clock[-1] - self.clock[0])

    def thread_at(self, moment: float) -> float:
        """How long it had worked at a moment of the monotonic clock."""
        at = min(max(bisect_right(self.clock, moment), 1), len(self.clock) - 1)
        (first, second), (before, after) = self.clock[at - 1 : at + 1], self.thread[at - 1 : at + 1]
        part = (moment - first) / (second - first) if second > first else 1.0
        return before + (after - before) * min(max(part, 0.0), 1.0)

    def between(self, asked: float, answered: float) -> float:
        """How long it worked from when the polite user asked, until it had served it. Neither how late that user's
        process sends its request nor how late it learns of the answer matters: another one may have the processor."""
        served = self.served[max(bisect_right(self.clock, answered) - 1, 0)]
        asked = max(asked, self._looked_before(asked, min(served, answered)))
        return self.thread_at(min(max(served, asked), answered)) - self.thread_at(asked)

    def _looked_before(self, begin: float, end: float) -> float:
        """When it looked for requests in vain, before it noticed the first one in that time; 0: it noticed none."""
        moments = range(bisect_left(self.clock, begin), bisect_right(self.clock, end))
        return next((self.asked[at] for at in moments if self.asked[at]), 0.0)

    def trips(self, moments: list[tuple[float, float, float]]) -> list[float]:
        """How long it worked during each round trip."""
        return [self.between(began, written) + self.between(written, ended) for began, written, ended in moments]


def program(uid: int) -> list[str]:
    """A server that records how its thread works, and when it serves that user."""
    return [sys.executable, "-m", "tests.server.measured", str(uid)]


@contextmanager
def measuring(*more: str) -> Iterator[Measured]:
    """For all users of this machine, with a group for each of the two. `more`: its options."""
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        quota = ("--limit", f"{GREEDY} kept=64M", *more)
        ways = ("--listen", f"unix!{folder}/s", "--http", f"unix!{folder}/web", "--fq", f"unix!{folder}/fq")
        server = stack.enter_context(Server(*ways, *quota, cwd=folder, program=program(POLITE)))
        os.chmod(folder, 0o755)
        for way in ("s", "web"):
            os.chmod(f"{folder}/{way}", 0o666)
        with connect(f"unix!{folder}/s") as client:
            for group in ("ours", "theirs"):
                client.mkdir(group)
                client.chmod(group, 0o777)
            client.create("ours/s").close()
            client.chmod("ours/s", 0o666)
        yield Measured(f"unix!{folder}/s", server, Path(folder, "work"))
