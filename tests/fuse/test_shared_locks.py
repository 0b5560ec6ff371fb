"""Locks of a mount of a server elsewhere, where other clients have locks of the same files."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.ninep.client import connection
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import READ_LOCK, UNLOCK, WRITE_LOCK
from mqfs.ninep.codec.wire import Dialect
from mqfs.remote.tree import FLOCK_BYTE
from tests.fuse.served_by import Child, calls
from tests.fuse.test_locks import HOLDER, KINDS, held
from tests.fuse.test_outliving import Elsewhere
from tests.support.eventually import HANG_S, eventually
from tests.support.server import short_folder


class Other:
    """Another client of the server, with locks of `s`."""

    def __init__(self, address: str, group: str) -> None:
        self.client = connection.connect(address, dialect=Dialect.LINUX, timeout=HANG_S)
        self.file = self.client.open(f"{group}/s", "r+")

    def can(self, kind: int, start: int = 0, length: int = 0) -> bool:
        """Whether it was granted."""
        fid = self.file.channel.fid

        def ask() -> Any:
            return (yield m.Tlock(0, fid, kind, 0, start, length, 1, "other"))

        return not self.client.do(ask()).status

    def range(self, kind: str) -> tuple[int, int]:
        return (FLOCK_BYTE, 1) if kind == "flock" else (0, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[Elsewhere]:
    with short_folder() as folder:
        it = Elsewhere(folder)
        try:
            yield it
        finally:
            it.close()


@pytest.fixture
def mq(server: Elsewhere, request: pytest.FixtureRequest) -> Path:
    group = server.group(f"g{abs(hash(request.node.name))}")
    (group / "s").touch()
    return group


@pytest.fixture
def other(server: Elsewhere, mq: Path) -> Iterator[Other]:
    with (it := Other(server.server.address, mq.name)).client:
        yield it


INTERRUPTED = """
def give_up(*_): raise TimeoutError
signal.signal(signal.SIGALRM, give_up)
fd = os.open(mq + "/s", os.O_RDWR)
print("waits")
try:
    fcntl.{kind}(fd, fcntl.LOCK_EX)
    print("held")
except TimeoutError:
    print("interrupted")
input()
"""


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGKILL])
@pytest.mark.parametrize("waits", ["for the other client", "for a process, then for the other client"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_that_waits_can_be_interrupted_and_is_in_nobody_s_way(
    mq: Path, other: Other, kind: str, waits: str, number: signal.Signals
) -> None:
    lock, here = getattr(fcntl, kind), os.open(mq / "s", os.O_RDWR)
    if "process" in waits:
        lock(here, fcntl.LOCK_SH)
    assert other.can(READ_LOCK, *other.range(kind))
    with Child(mq, INTERRUPTED.format(kind=kind)) as child:
        assert child.line() == "waits"
        eventually(lambda: calls(child.process.pid, KINDS[kind]))
        lock(here, fcntl.LOCK_UN)
        child.process.send_signal(number)
        if number == signal.SIGKILL:
            child.process.wait(HANG_S)
        else:
            assert child.line() == "interrupted"
        assert other.can(UNLOCK, *other.range(kind))
        lock(here, fcntl.LOCK_EX)
    os.close(here)
    eventually(lambda: other.can(WRITE_LOCK, *other.range(kind)))


def test_what_is_taken_again_is_what_is_held(server: Elsewhere, mq: Path) -> None:
    with open(mq / "s", "r+b", buffering=0) as file:
        for _ in range(3):
            fcntl.lockf(file, fcntl.LOCK_EX, 100, 0)
        fcntl.lockf(file, fcntl.LOCK_UN, 20, 40)
        fcntl.lockf(file, fcntl.LOCK_SH, 10, 90)
        server.server.restart()
        fcntl.lockf(file, fcntl.LOCK_SH, 1, 0)  # its answer: all are taken again
        other = Other(server.server.address, mq.name)
        with other.client:
            free = [other.can(kind, start, 10) for start in range(0, 110, 10) for kind in (READ_LOCK, WRITE_LOCK)]
    taken, shared, none = [False, False], [True, False], [True, True]
    assert free == [*taken * 4, *none * 2, *taken * 3, *shared, *none]


def test_any_close_ends_all_posix_locks_of_the_process(mq: Path, other: Other) -> None:
    """Nothing of a lock of the whole file stays, neither here nor at the server."""
    fd = os.open(mq / "s", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    assert not other.can(WRITE_LOCK)
    os.close(os.open(mq / "s", os.O_RDONLY))
    assert other.can(WRITE_LOCK)
    assert other.can(UNLOCK)
    with held(mq, "lockf"):
        os.close(fd)


def test_one_that_cannot_become_exclusive_stays_shared(mq: Path, other: Other) -> None:
    fd = os.open(mq / "s", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_SH, 10, 0)
    assert other.can(READ_LOCK)
    with pytest.raises(BlockingIOError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 20, 0)
    assert [other.can(WRITE_LOCK, 0, 10), other.can(WRITE_LOCK, 10, 10)] == [False, True]
    with Child(mq, HOLDER.format(kind="lockf")) as child:
        eventually(lambda: calls(child.process.pid, KINDS["lockf"]))
        fcntl.lockf(fd, fcntl.LOCK_UN)
        assert other.can(WRITE_LOCK, 0, 10)
        assert other.can(UNLOCK)
        assert child.line() == "held"
    os.close(fd)


def test_flocks_that_change_their_kind_are_released_first(mq: Path, other: Other) -> None:
    """Both wait for the other's: one gets it, as each gave up its own."""
    program = """
fd = os.open(mq + "/s", os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
print("shared")
input()
fcntl.flock(fd, fcntl.LOCK_EX)
print("held")
input()
fcntl.flock(fd, fcntl.LOCK_UN)
print("released")
"""
    with Child(mq, program) as one, Child(mq, program) as two:
        assert [one.line(), two.line()] == ["shared", "shared"]
        one.tell()
        eventually(lambda: calls(one.process.pid, KINDS["flock"]))
        two.tell()
        assert one.line() == "held"
        assert not other.can(READ_LOCK, *other.range("flock"))
        one.tell()
        assert [one.line(), two.line()] == ["released", "held"]


def test_a_child_takes_the_flock_of_its_open_file_again(mq: Path) -> None:
    program = """
fd = os.open(mq + "/s", os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
if os.fork() == 0:
    fcntl.flock(fd, fcntl.LOCK_EX)
    print("again")
    fcntl.flock(fd, fcntl.LOCK_UN)
    print("released")
os.wait()
"""
    with Child(mq, program) as child:
        assert [child.line(), child.line()] == ["again", "released"]
        with held(mq, "flock"):
            pass
