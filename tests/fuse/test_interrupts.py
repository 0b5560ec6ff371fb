"""A process that waits can be interrupted, and then nothing is lost and nothing is there twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuse.served_by import READ, WRITE, Child, Served, calls, libc
from tests.fuse.test_data import drain
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually, patient

READER = """
fd = os.open(mq + "/s", os.O_RDONLY)
print("open")
print(os.read(fd, 100))
"""

# Writes through libc, because Python repeats an interrupted write itself.
WRITER = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(mq + "/s", os.O_WRONLY)
def write(data):
    done = libc.write(fd, data, len(data))
    return done if done >= 0 else -ctypes.get_errno()
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
"""


def reader(mq: Path) -> Child:
    child = Child(mq, READER)
    assert child.line() == "open"
    eventually(lambda: calls(child.process.pid, READ))
    return child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGALRM])
def test_a_killed_reader_consumes_nothing(mq: Path, served: Served, number: signal.Signals) -> None:
    (mq / "ctl").write_text("replay off\n")
    (mq / "s").touch()
    with reader(mq) as first, reader(mq) as second:
        eventually(lambda: served.sizes()["waiting"] == 2)
        first.process.send_signal(number)
        first.process.wait(HANG_S)
        eventually(lambda: served.sizes()["waiting"] == 1)
        (mq / "s").write_text("for the living")
        assert second.line() == "b'for the living'"


def test_a_stopped_reader_goes_on(mq: Path, served: Served) -> None:
    (mq / "s").touch()
    with reader(mq) as child:
        child.process.send_signal(signal.SIGSTOP)
        eventually(lambda: served.sizes()["waiting"] == 0)
        child.process.send_signal(signal.SIGCONT)
        eventually(lambda: served.sizes()["waiting"] == 1)
        (mq / "s").write_text("x")
        assert child.line() == "b'x'"


def test_an_alarm_ends_a_read_with_eintr(mq: Path, served: Served) -> None:
    (mq / "s").touch()
    program = """
import ctypes
libc, alarms = ctypes.CDLL(None, use_errno=True), []
signal.signal(signal.SIGALRM, lambda *_: alarms.append("alarm"))
signal.siginterrupt(signal.SIGALRM, True)
fd = os.open(mq + "/s", os.O_RDONLY)
failed = alarmed(libc.read, fd, ctypes.create_string_buffer(10), 10) < 0
print(failed and errno.errorcode[ctypes.get_errno()], alarms[0])
print(os.read(fd, 10))
"""
    with Child(mq, program) as child:
        assert child.line() == "EINTR alarm"
        (mq / "s").write_text("x")
        assert child.line() == "b'x'"


def test_no_signal_ends_an_open_of_a_snapshot(mq: Path, served: Served) -> None:
    """Not one that is there soon, and whose handler asks for a restart."""
    (mq / "ctl").write_text("data line\n")
    with open(mq / "s", "wb", buffering=0) as file:
        for _ in range(20):
            file.write(b"x\n" * 1000)
    program = """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
failed = 0
for number in range(30):
    fd = libc.open(os.fsencode(mq + ("/.kept/s", "/.stats")[number % 2]), os.O_RDONLY)
    if fd < 0: failed += 1
    else: libc.close(fd)
signal.setitimer(signal.ITIMER_REAL, 0)
print(failed)
"""
    with Child(mq, program) as child:
        assert child.line() == "0"
    assert served.sizes()["waiting"] == 0


def test_a_writer_without_room_can_be_interrupted_and_has_written_nothing(mq: Path, served: Served) -> None:
    (mq / "ctl").write_text("depth 1\nfull block\n")
    (mq / "s").write_text("1")
    program = WRITER + 'print(-alarmed(write, b"2") == errno.EINTR)\n'
    program += 'print(write(b"3"))'
    with Child(mq, program) as child:
        assert child.line() == "True"
        eventually(lambda: calls(child.process.pid, WRITE))
        (mq / "ctl").write_text("clear s\n")
        assert child.line() == "1"
    assert drain(mq / "s") == [b"3"]
    with Child(mq, WRITER + 'write(b"4")') as child:
        eventually(lambda: served.sizes()["waiting"] == 1)
        child.process.kill()
        child.process.wait(HANG_S)
        eventually(lambda: served.sizes()["waiting"] == 0)
    assert drain(mq / "s") == [b"3"]


def test_an_interrupted_writer_in_a_group_commit_leaves_no_second_copy(serve: Callable[..., Served]) -> None:
    """Writers that repeat what was interrupted, as they must: each message is there exactly once."""
    served = serve()
    group, count = served.path / "g", size(1000)
    group.mkdir()
    (group / "ctl").write_text("replay all\nsync always\n")
    (group / "s").touch()
    program = (
        WRITER
        + f"""
name, interrupted = os.getpid(), 0
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
for i in range({count}):
    while True:
        done = write(b"%d %d" % (name, i))
        if done > 0: break
        assert -done == errno.EINTR, done
        interrupted += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print("done", interrupted)
"""
    )
    writers = [Child(group, program) for _ in range(4)]
    try:
        for writer in writers:
            assert writer.line().startswith("done")
        found = [tuple(map(int, body.split())) for body in drain(group / "s")]
        assert sorted(found) == sorted((writer.process.pid, i) for writer in writers for i in range(count))
    finally:
        for writer in writers:
            writer.end()


def test_messages_to_readers_that_are_killed_are_never_lost(mq: Path, served: Served) -> None:
    """A reader's descriptor outlives its killed thread of reads: whatever it did not get, the next read does."""
    (mq / "s").touch()
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
fd = os.open(mq + "/s", os.O_RDONLY)
print("open")
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
buffer, got = ctypes.create_string_buffer(100), []
while not got or got[-1] != b"end":
    n = libc.read(fd, buffer, 100)
    if n > 0: got.append(buffer.raw[:n])
signal.setitimer(signal.ITIMER_REAL, 0)
print(got == [b"%d" % i for i in range(len(got) - 1)] + [b"end"], len(got))
"""
    count = size(5000)
    with Child(mq, program) as child:
        assert child.line() == "open"
        fd = os.open(mq / "s", os.O_WRONLY)
        for i in range(count):
            os.write(fd, b"%d" % i)
        os.write(fd, b"end")
        os.close(fd)
        assert child.line() == f"True {count + 1}"


def test_sigterm_answers_all_who_wait_unmounts_and_exits_0(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve()
    group = served.path / "g"
    group.mkdir()
    (group / "s").touch()
    with reader(group) as child:
        begun = time.monotonic()
        assert served.stop() == 0
        assert child.line() == "b''"
        assert time.monotonic() - begun < patient(60)
    assert list(served.path.iterdir()) == []


def test_sigterm_ends_a_mount_in_which_somebody_stays(serve: Callable[..., Served]) -> None:
    served = serve()
    (served.path / "g").mkdir()
    with Child(served.path, "os.chdir(mq + '/g'); print('in'); input(); print(os.path.exists('ctl'))") as child:
        assert child.line() == "in"
        assert served.stop() == 0
        assert list(served.path.iterdir()) == []
        child.tell()
        assert child.line() == "False"


def test_unmounting_from_outside_ends_the_server_even_while_somebody_reads(serve: Callable[..., Served]) -> None:
    served = serve()
    (served.path / "s").touch()
    with reader(served.path) as child:
        if os.geteuid() == 0:
            assert libc.umount2(os.fsencode(served.path), 0) == -1  # busy, says umount
        unmount_lazily(served.path)
        child.process.kill()
        child.process.wait(HANG_S)
        assert served.process.wait(HANG_S) == 0


def unmount_lazily(path: Path) -> None:
    if os.geteuid() == 0:
        assert libc.umount2(os.fsencode(path), 2) == 0
    else:
        assert subprocess.run(["fusermount3", "-uz", path], check=False).returncode == 0


@pytest.mark.parametrize("how", ["told", "left"])
def test_a_server_that_ends_leaves_the_mount_of_another(serve: Callable[..., Served], how: str) -> None:
    """Its own was taken away while a reader had it open, and another server mounted there since."""
    first = serve(None)
    (first.path / "s").touch()
    with reader(first.path) as child:
        unmount_lazily(first.path)
        second = serve(None)
        (second.path / "second").mkdir()
        if how == "told":
            first.process.terminate()
        else:
            child.process.kill()
        assert first.process.wait(HANG_S) == 0
        assert (second.path / "second").is_dir()
    assert second.stop() == 0
    assert list(second.path.iterdir()) == []


def test_a_killed_server_frees_its_readers_and_the_next_one_cleans_up(serve: Callable[..., Served]) -> None:
    served = serve()
    group = served.path / "g"
    group.mkdir()
    (group / "ctl").write_text("replay all\n")
    (group / "s").write_text("kept")
    (group / "t").touch()
    with Child(group, READER.replace("/s", "/t")) as child:
        assert child.line() == "open"
        eventually(lambda: calls(child.process.pid, READ))
        served.process.kill()
        served.process.wait(HANG_S)
        child.process.wait(HANG_S)
    with pytest.raises(OSError, match="Transport endpoint"):
        os.stat(served.path)
    serve()
    assert drain(group / "s") == [b"kept"]
