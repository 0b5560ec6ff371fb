"""A server that says how long requests waited in it, and users of it as processes: for tests of who waits for whom."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from mqfs.ninep.blocking import connect
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, environment, short_folder

GREEDY, POLITE = 65_533, 65_534


class User:
    """A program that acts as a user."""

    def __init__(self, address: str, uid: int, *role: str) -> None:
        self.process = subprocess.Popen(
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
        return statistics.quantiles(times, n=100)[98], max(times)

    def begin(self, seconds: float) -> None:
        """Round trips for so long."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%f\n" % seconds)
        self.process.stdin.flush()

    def times(self) -> list[float]:
        """How long each took."""
        times: list[float] = json.loads(self.line())
        return times

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
    """A server that measures how long the polite user's requests wait."""

    address: str
    server: Server
    waits: Path

    def settle(self) -> tuple[list[float], float]:
        """What each request, or each few of them, waited since the last time, and the longest piece of work: in seconds
        of the server's thread."""
        before = self.waits.read_text().count("\n") if self.waits.exists() else 0
        self.server.process.send_signal(signal.SIGUSR1)
        eventually(
            lambda: self.waits.exists() and self.waits.read_text().count("\n") > before, "the waits are written", soon
        )
        *found, longest = json.loads(self.waits.read_text().splitlines()[-1])
        return found, longest


def program(uid: int) -> list[str]:
    """A server that measures how long requests of that user wait."""
    return [sys.executable, "-m", "tests.server.measured", str(uid)]


@contextmanager
def measuring() -> Iterator[Measured]:
    """For all users of this machine, with a group for each of the two."""
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        ways = ("--listen", f"unix!{folder}/s", "--http", f"unix!{folder}/web", "--fq", f"unix!{folder}/fq")
        server = stack.enter_context(Server(*ways, cwd=folder, program=program(POLITE)))
        os.chmod(folder, 0o755)
        for way in ("s", "web"):
            os.chmod(f"{folder}/{way}", 0o666)
        with connect(f"unix!{folder}/s") as client:
            for group in ("ours", "theirs"):
                client.mkdir(group)
                client.chmod(group, 0o777)
            client.create("ours/s").close()
            client.chmod("ours/s", 0o666)
        yield Measured(f"unix!{folder}/s", server, Path(folder, "waits"))
