"""The Nth call of libc below a store fails in a real server, of all calls, once or for good; see failing_calls.c.

Nothing acknowledged is lost, nothing is there that was not sent, no unit is half there, the server runs on; a start
that meets such a call is served or refused in one line, and the next one succeeds.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqfs.errors import MqfsError, NotFound
from mqfs.ninep.client.connection import Client, connect
from tests.ring.memory.build import compiler
from tests.server.test_block_device import read_all
from tests.support import ROOT
from tests.support.batches import frame
from tests.support.campaign import seed, size, whole
from tests.support.eventually import HANG_S
from tests.support.server import Server

CHANGE, LOOK, OPEN = 1, 2, 4
FAULTS = {errno.EIO: CHANGE | LOOK | OPEN, errno.ENOSPC: CHANGE, errno.EMFILE: OPEN}
FOR_GOOD = 1 << 62
SERVER = [sys.executable, "-m", "tests.server.small_server"]
CASES, STARTS = 20, 5  # of one store


class Control(ctypes.Structure):
    """As in failing_calls.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("kinds", "calls", "first", "last", "number", "failed")]


@pytest.fixture
def control(tmp_path: Path) -> Control:
    path = tmp_path / "control"
    path.write_bytes(bytes(ctypes.sizeof(Control)))
    with open(path, "r+b") as file:
        return Control.from_buffer(mmap.mmap(file.fileno(), 0))


class Case:
    """Two groups of its own, and what was sent to them and acknowledged while a call failed."""

    def __init__(self, number: int) -> None:
        self.number, self.group, self.trimmed = number, f"g{number}", f"t{number}"
        self.sent: set[bytes] = set()
        self.acknowledged: set[bytes] = set()
        self.units: list[set[bytes]] = []
        self.newest = b""  # acknowledged in the group that keeps three
        self.refused = 0

    def bodies(self, what: str, count: int) -> list[bytes]:
        made = [b"%d.%s.%d." % (self.number, what.encode(), n) + b"x" * (n * 211 % 1_500) for n in range(count)]
        self.sent.update(made)
        return made

    def attempt(self, act: Callable[[], object]) -> bool:
        """A refusal is an answer; that the connection ends, or nothing is answered, is none."""
        try:
            act()
        except MqfsError:
            self.refused += 1
            return False
        return True

    def run(self, tree: Client) -> None:
        for group, lines in ((self.group, b"consumer w\n"), (self.trimmed, b"depth 3\n")):
            self.attempt(lambda group=group: tree.mkdir(group))  # type: ignore[misc]
            self.attempt(lambda group=group, lines=lines: tree.open(f"{group}/ctl", "w").write(lines))  # type: ignore[misc]
            for name in ("s", "t"):
                self.attempt(lambda group=group, name=name: tree.create(f"{group}/{name}").close())  # type: ignore[misc]
        for body in self.bodies("plain", 40):
            if self.attempt(lambda body=body: tree.open(f"{self.group}/s", "w").write(body)):  # type: ignore[misc]
                self.acknowledged.add(body)
        for body in self.bodies("trimmed", 40):
            if self.attempt(lambda body=body: tree.open(f"{self.trimmed}/s", "w").write(body)):  # type: ignore[misc]
                self.newest = body
        self._unit("batch", lambda bodies: self._batch(tree, bodies))
        self._unit("txn", lambda bodies: self._transaction(tree, bodies))
        if len(self.acknowledged) > 3:
            self.attempt(lambda: self._work(tree))
        self.attempt(lambda: tree.rename(f"{self.group}/t", "u"))
        self.attempt(lambda: tree.remove(f"{self.group}/u"))
        self.look(tree)

    def _unit(self, name: str, write: Callable[[list[bytes]], None]) -> None:
        bodies = self.bodies(name, 5)
        self.units.append(set(bodies))
        if self.attempt(lambda: write(bodies)):
            self.acknowledged.update(bodies)

    def _batch(self, tree: Client, bodies: list[bytes]) -> None:
        tree.open(f"{self.group}/.batch", "w").write(b"".join(frame("s", body) for body in bodies))

    def _transaction(self, tree: Client, bodies: list[bytes]) -> None:
        tree.mkdir(f"{self.group}/.txn/p")
        for body in bodies:
            tree.open(f"{self.group}/.txn/p/s", "w").write(body)
        tree.open(f"{self.group}/.txn/ctl", "w").write(b"commit job.1 p\n")

    def _work(self, tree: Client) -> None:
        worker = tree.open(f"{self.group}/.consumers/w", "r+")
        for command in (b"ack\n", b"nack 1h\n", b"ack\n"):
            worker.receive(timeout=HANG_S)
            worker.write(command)

    def look(self, tree: Client) -> None:
        """Look at what the server shows now: some may be refused, but nothing else is shown."""
        for group in (self.group, self.trimmed):
            self.attempt(lambda group=group: self._read(tree, group))  # type: ignore[misc]

    def _read(self, tree: Client, group: str) -> None:
        cursor = tree.open(f"{group}/.cursor", "r+")
        cursor.write(b"seek first\nuntil end\n")
        while body := cursor.receive(timeout=HANG_S):
            assert body in self.sent, f"case {self.number}: served {body!r:.40}, which was not written"

    def check(self, address: str) -> None:
        """After a start without any fault."""
        found: dict[str, list[bytes]] = {}
        for group in (self.group, self.trimmed):
            try:
                found[group] = read_all(address, group)
            except NotFound:
                found[group] = []
            assert len(set(found[group])) == len(found[group]), f"case {self.number}: a message is there twice"
            assert self.sent.issuperset(found[group]), f"case {self.number}: a message is there that was not written"
        there = set(found[self.group])
        assert self.acknowledged <= there, f"case {self.number}: lost {min(self.acknowledged - there)!r:.40}"
        assert all(len(unit & there) in (0, len(unit)) for unit in self.units), f"case {self.number}: half a unit"
        assert not self.newest or self.newest in found[self.trimmed], f"case {self.number}: lost {self.newest!r:.40}"


class Campaign:
    def __init__(self, folder: Path, control: Control, luck: random.Random) -> None:
        self.folder, self.control, self.luck = folder, control, luck
        self.address = f"unix!{folder}/s"
        self.calls: dict[int, int] = {}  # by kinds, that a case makes when none fails
        self.done = self.acknowledged = self.refused = self.refused_starts = self.failed = 0
        compiler("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
                 ROOT / "tests/server/failing_calls.c", "-o", folder / "failing.so", "-ldl")  # fmt: skip

    def arm(self, calls: int, number: int) -> str:
        """One of the next `calls` calls fails, once or it and all behind it."""
        self.control.calls, self.control.number, self.control.failed = 0, number, 0
        self.control.first = self.luck.randint(1, calls)
        self.control.last = self.luck.choice([self.control.first, FOR_GOOD])
        self.control.kinds = FAULTS[number]
        once = "once" if self.control.last < FOR_GOOD else "for good"
        return f"call {self.control.first} of {calls}: {errno.errorcode[number]} {once}"

    def disarm(self) -> int:
        """How many calls there were."""
        self.control.kinds = self.control.first = self.control.last = 0
        self.failed += self.control.failed
        return int(self.control.calls)

    def start(self, store: str, shim: bool) -> Server:
        more = {"LD_PRELOAD": str(self.folder / "failing.so"), "MQFS_FAIL_BELOW": str(self.folder / store),
                "MQFS_FAIL_CONTROL": str(self.folder / "control")} if shim else {}  # fmt: skip
        # A group whose `ctl` is refused keeps what it is sent all the same.
        arguments = "--store", str(self.folder / store), "--listen", "unix!s", "--default", "replay all"
        return Server(*arguments, cwd=self.folder, program=SERVER, **more)

    def run_case(self, server: Server, case: Case, number: int | None, kinds: int = 0) -> str:
        if number is None:
            self.control.calls, self.control.kinds = 0, kinds
            what = "no fault"
        else:
            what = self.arm(self.calls[FAULTS[number]], number)
        with connect(self.address) as tree:
            tree.socket.settimeout(HANG_S)
            case.run(tree)
            self.calls[kinds] = self.disarm()
            assert server.process.poll() is None, f"{what}: the server ended: {server.text()}"
            tree.list("")
            case.look(tree)
        assert number is not None or not case.refused
        self.refused += case.refused
        self.acknowledged += len(case.acknowledged)
        return what

    def store(self, name: str, cases: int, starts: int) -> None:
        """Cases on a store of their own, then starts of it that meet a failing call, then a look at what is there."""
        made, seen = [], []
        server = self.start(name, True)
        try:
            for kinds in set(FAULTS.values()) - self.calls.keys():
                made.append(Case(len(made)))
                self.run_case(server, made[-1], None, kinds)
            for _ in range(cases):
                made.append(Case(len(made)))
                seen.append(f"{made[-1].group} {self.run_case(server, made[-1], self.luck.choice(list(FAULTS)))}")
                self.done += 1
            if self.luck.random() < 0.5:
                assert server.stop() == 0, (seen, server.text())
            else:
                server.kill()
        finally:
            if server.process.poll() is None:
                server.kill()
        for _ in range(starts):
            seen.append(self._start_that_fails(name))
            self.done += 1
        server = self.start(name, False)
        try:
            for case in made:
                case.check(self.address)
        except AssertionError as error:
            raise AssertionError(f"{name}: {str(error)[:300]} after {seen}: {server.text()[-3_000:]}") from None
        finally:
            code = server.stop()
        assert code == 0, server.text()
        assert "Traceback" not in server.text(), server.text()

    def _start_that_fails(self, name: str) -> str:
        """A start may be refused in one line; the store is what it was."""
        number = self.luck.choice(list(FAULTS))
        self.control.calls, self.control.kinds = 0, FAULTS[number]
        self.start(name, True).kill()
        what = f"start, {self.arm(max(1, self.disarm()), number)}"
        refusal = ""
        try:
            self.start(name, True).kill()
        except AssertionError as error:
            refusal = str(error)
            self.refused_starts += 1
        assert not refusal or "ended with 1: " in refusal, f"{what}: {refusal}"
        self.disarm()
        return what


@pytest.mark.timeout(7_200)
def test_the_nth_call_fails(tmp_path: Path, control: Control) -> None:
    calls, began = size(1_000) if whole() else CASES + STARTS, time.monotonic()
    campaign, number = Campaign(tmp_path, control, random.Random(seed())), 0
    try:
        while campaign.done < calls:
            campaign.store(f"store{number}", CASES, STARTS)
            number += 1
    finally:
        print(
            f"{campaign.done} failing calls ({campaign.failed} with those behind them), {campaign.acknowledged}"
            f" acknowledged, {campaign.refused} refused, {campaign.refused_starts} starts refused,"
            f" {time.monotonic() - began:.0f} s"
        )
    assert campaign.refused > 0
