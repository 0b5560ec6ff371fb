"""flock and POSIX locks: never granted twice, given back when their holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from mqfs.model import Wait
from mqfs.state.file_locks import Held, Key, Locks
from tests.fuse.served_by import FCNTL, FLOCK, Child, Served, calls
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually

KINDS = {"flock": FLOCK, "lockf": FCNTL}
KEY = Key(1, False)

HOLDER = """
fd = os.open(mq + "/s", os.O_RDWR)
fcntl.{kind}(fd, fcntl.LOCK_EX)
print("held")
input()
fcntl.{kind}(fd, fcntl.LOCK_UN)
print("released")
input()
"""


def held(mq: Path, kind: str) -> Child:
    child = Child(mq, HOLDER.format(kind=kind))
    assert child.line() == "held"
    return child


@pytest.fixture(autouse=True)
def stream(mq: Path) -> None:
    (mq / "s").touch()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_is_one_holder_s(mq: Path, kind: str) -> None:
    lock = getattr(fcntl, kind)
    fd = os.open(mq / "s", os.O_RDWR)
    with held(mq, kind) as child:
        with pytest.raises(BlockingIOError):
            lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        child.tell()
        assert child.line() == "released"
        lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_waits_is_granted_when_its_holder_dies(mq: Path, kind: str) -> None:
    with held(mq, kind) as first, Child(mq, HOLDER.format(kind=kind)) as second:
        eventually(lambda: calls(second.process.pid, KINDS[kind]))
        first.process.kill()
        assert second.line() == "held"


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_waits_can_be_interrupted(mq: Path, served: Served, kind: str) -> None:
    with held(mq, kind), Child(mq, HOLDER.format(kind=kind)) as second:
        eventually(lambda: calls(second.process.pid, KINDS[kind]))
        second.process.kill()
        second.process.wait(HANG_S)
        eventually(lambda: served.sizes()["locks"] == 1)
    eventually(lambda: served.sizes()["locks"] == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_becomes_shared_lets_shared_ones_in(mq: Path, kind: str) -> None:
    lock, fd = getattr(fcntl, kind), os.open(mq / "s", os.O_RDWR)
    lock(fd, fcntl.LOCK_EX)
    with Child(mq, HOLDER.format(kind=kind).replace("LOCK_EX", "LOCK_SH")) as waiting:
        eventually(lambda: calls(waiting.process.pid, KINDS[kind]))
        lock(fd, fcntl.LOCK_SH)
        assert waiting.line() == "held"
    os.close(fd)


def test_any_close_ends_a_process_s_posix_locks_but_not_its_flocks(mq: Path) -> None:
    one, two = os.open(mq / "s", os.O_RDWR), os.open(mq / "s", os.O_RDWR)
    try_it = 'fd = os.open(mq + "/s", os.O_RDWR)\nfor k in (fcntl.lockf, fcntl.flock):\n try: k(fd, 6); print("got")\n'
    try_it += ' except OSError: print("no")\n'
    fcntl.lockf(one, fcntl.LOCK_EX)
    fcntl.flock(one, fcntl.LOCK_EX)
    with Child(mq, try_it) as child:
        assert [child.line(), child.line()] == ["no", "no"]
    os.close(two)
    with Child(mq, try_it) as child:
        assert [child.line(), child.line()] == ["got", "no"]
    os.close(one)
    with Child(mq, try_it) as child:
        assert [child.line(), child.line()] == ["got", "got"]


def test_shared_locks_ranges_and_getlk(mq: Path) -> None:
    fd = os.open(mq / "s", os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_SH, 10, 0)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
    program = """
import struct
fd = os.open(mq + "/s", os.O_RDWR)
def can(kind, length, start):
    try: fcntl.lockf(fd, kind | fcntl.LOCK_NB, length, start)
    except OSError: return False
    fcntl.lockf(fd, fcntl.LOCK_UN, length, start)
    return True
print([can(1, 10, 0), can(2, 10, 0), can(2, 10, 10), can(1, 1, 29), can(2, 0, 30)])
asked = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 15, 0, 0))
print(struct.unpack("hhqqi4x", asked))
"""
    with Child(mq, program) as child:
        assert child.line() == "[True, False, True, False, True]"
        assert child.line() == f"({fcntl.F_WRLCK}, 0, 20, 10, {os.getpid()})"
    os.close(fd)


def test_a_lock_is_never_granted_twice(mq: Path) -> None:
    """Processes that take a lock, alone in turn: a counter that is not atomic stays exact."""
    counter, count = mq.parent.parent / f"{mq.name}.counter", size(2000)
    counter.write_text("0")
    program = f"""
for i in range({count}):
    fd = os.open(mq + "/s", os.O_RDWR)
    lock = (fcntl.flock, fcntl.lockf)[KIND]
    lock(fd, fcntl.LOCK_EX)
    value = int(open({str(counter)!r}).read())
    open({str(counter)!r}, "w").write(str(value + 1))
    if i % 2: lock(fd, fcntl.LOCK_UN)
    os.close(fd)
print("done")
"""
    for kind in (0, 1):
        children = [Child(mq, program.replace("KIND", str(kind))) for _ in range(3)]
        for child in children:
            assert child.line() == "done"
            child.end()
    assert counter.read_text() == str(2 * 3 * count)


def test_ranges_are_cut_and_the_table_counts() -> None:
    locks = Locks()
    assert locks.take(KEY, Held(1, True, 0, 100, 7), wait=False) is None
    locks.release(KEY, 1, 40, 60)
    assert len(locks) == 2
    assert locks.take(KEY, Held(2, True, 40, 60, 8), wait=False) is None
    assert locks.take(KEY, Held(2, False, 0, 10, 8), wait=False) is False
    waits = locks.take(KEY, Held(2, False, 0, 10, 8), wait=True)
    assert isinstance(waits, Wait)
    locks.release(KEY, 1)
    assert waits.settled
    assert len(locks) == 2
    locks.release(KEY, 2)
    assert len(locks) == 0
