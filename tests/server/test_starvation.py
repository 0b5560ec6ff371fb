"""Starvation: one user takes whatever can be had of the server, another's round trips go on.

How long these take depends on what else the machine does. What the server lets them wait for, in time of its thread
((measured.py), hardly does: that is held to the turns that users have, and the clock only to a hang.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from mqfs import limits
from mqfs.ninep.blocking import connect
from tests import campaign
from tests.client.conftest import short_folder
from tests.patience import patient
from tests.server.process import ROOT, Running, environment, serving, until
from tests.server.users import KINDS

GREEDY, POLITE = 65_533, 65_534
RUNS = 5
RUN_S = campaign.size(50) / 10
WAIT_S = 2 * (limits.TURN_LONG_S + limits.TURN_S)  # what is there before it, and as much as a busy core makes of it
P99_S, LONGEST_S = patient(2.0), patient(10.0)  # on a machine that does other things too
HANG_S = patient(60.0)


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
        assert select.select([self.process.stdout], [], [], HANG_S)[0], "it stands still"
        line = self.process.stdout.readline()
        assert line, "it ended"
        return line

    def trips(self) -> tuple[float, float]:
        """How long the 99th of 100 round trips takes, and the longest, in seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%f\n" % RUN_S)
        self.process.stdin.flush()
        times: list[float] = json.loads(self.line())
        return statistics.quantiles(times, n=100)[98], max(times)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


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
    server: Running
    waits: Path

    def settle(self) -> list[float]:
        """Of each request, or each few of them, since the last time: seconds of the server's thread."""
        before = self.waits.read_text().count("\n") if self.waits.exists() else 0
        self.server.process.send_signal(signal.SIGUSR1)
        until(lambda: self.waits.exists() and self.waits.read_text().count("\n") > before, "the waits are written")
        found: list[float] = json.loads(self.waits.read_text().splitlines()[-1])
        return found


@pytest.fixture
def measured() -> Iterator[Measured]:
    """For all users of this machine, with a group for each of the two."""
    program = [sys.executable, "-m", "tests.server.measured", str(POLITE)]
    with short_folder() as folder, serving("--listen", f"unix!{folder}/s", cwd=Path(folder), program=program) as server:
        os.chmod(folder, 0o755)
        os.chmod(f"{folder}/s", 0o666)
        with connect(f"unix!{folder}/s") as client:
            for group in ("ours", "theirs"):
                client.mkdir(group)
                client.chmod(group, 0o777)
            client.create("ours/s").close()
            client.chmod("ours/s", 0o666)
        yield Measured(f"unix!{folder}/s", server, Path(folder, "waits"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_go_on_beside_a_greedy_user(
    measured: Measured, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = measured.address
    with user(address, POLITE, "polite") as ours:
        ours.trips()  # what is done once is done
        measured.settle()
        alone = [ours.trips() for _ in range(RUNS)]
        usual = measured.settle()
        with user(address, GREEDY, "greedy", kind) as theirs:
            assert theirs.line() == b"at work\n"
            measured.settle()
            beside = [ours.trips() for _ in range(RUNS)]
            waits = measured.settle()
            assert theirs.process.poll() is None, "the greedy one goes on, too"
        after = ours.trips()
    before, during = (statistics.median(p99 for p99, _ in runs) for runs in (alone, beside))
    longest = max(most for _, most in [*beside, after])
    usually, waited = (statistics.quantiles(each, n=100)[98] for each in (usual, waits))
    with capsys.disabled():
        times = f"p99 {before * 1e3:.2f} ms alone, {during * 1e3:.2f} ms beside, {during / before:.1f} x"
        work = f"{usually * 1e3:.2f} and {waited * 1e3:.2f} ms behind other work, at most {max(waits) * 1e3:.0f} ms"
        print(f"\n{kind}: {times}, the longest {longest * 1e3:.0f} ms; {work}")
    assert waited <= WAIT_S
    assert max(during, after[0]) < P99_S
    assert longest < LONGEST_S
