"""Messages through a real mount, written and read by real programs."""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pexpect
import pytest

from mqfs import limits
from tests.fuse.served_by import Child, Served
from tests.support import campaign
from tests.support.eventually import HANG_S, eventually

RDWR_NB = os.O_RDWR | os.O_NONBLOCK


def sh(script: str, cwd: Path, timeout: float = HANG_S) -> str:
    """What a shell script prints."""
    done = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    return done.stdout + done.stderr


def drain(path: Path) -> list[bytes]:
    """All that is kept of a stream, message by message."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = []
    try:
        while True:
            found.append(os.read(fd, limits.MESSAGE_BYTES))
    except BlockingIOError:
        return found
    finally:
        os.close(fd)


def test_echo_overwriting_and_appending_are_the_same(mq: Path) -> None:
    assert sh("echo one >s; echo two >>s; echo three >s", mq) == ""
    assert drain(mq / "s") == [b"one\n", b"two\n", b"three\n"]


def test_touch_makes_a_stream_and_keeps_it(mq: Path) -> None:
    assert sh("touch s; echo x >s; touch s; touch -d 2001-01-01 s; truncate -s 0 s; truncate -s 99 s", mq) == ""
    assert drain(mq / "s") == [b"x\n"]
    assert (mq / "s").stat().st_size == 0


def test_cat_prints_what_is_kept_and_waits(mq: Path) -> None:
    sh("echo hi >s", mq)
    shell = pexpect.spawn(
        "bash", ["--norc", "--noprofile"], cwd=str(mq), encoding="utf-8", timeout=HANG_S, use_poll=True
    )
    shell.sendline("PS1='$ '; cat s")
    shell.expect("hi\r\n")
    sh("echo again >s", mq)
    shell.expect("again\r\n")
    shell.sendintr()
    shell.sendline("echo $?-ended")
    shell.expect("130-ended")
    shell.close(force=True)


def test_head_and_bash_read_go_back_to_what_they_did_not_use(mq: Path) -> None:
    for body in (b"1\n2\n3\n", b"4\n"):
        (mq / "u").write_bytes(body)
    assert sh("{ read a; read b; read c; read d; echo $a$b$c$d; } <u", mq) == "1234\n"
    assert sh("{ head -n1; head -n1; head -n2; } <u", mq) == "1\n2\n3\n4\n"


@pytest.mark.parametrize("size", [1, 4096, 65_537, limits.MESSAGE_BYTES])
def test_a_message_is_whole_whatever_its_size(mq: Path, size: int) -> None:
    body = os.urandom(size)
    buffer = bytearray(size + 7)
    buffer[7:] = body  # at an address that is not aligned
    fd = os.open(mq / "s", os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, memoryview(buffer)[7:]) == size
    assert os.writev(fd, [b"in ", b"pieces"]) == 9
    os.close(fd)
    assert drain(mq / "s") == [body, b"in pieces"]


def pieces(count: int, total: int) -> list[memoryview]:
    """Bytes in pieces that touch as many pages as they can: each begins with the last byte of a page."""
    page, most = mmap.PAGESIZE, 2 + (total - 2 * count) // count // mmap.PAGESIZE * mmap.PAGESIZE
    sizes = [most] * (count - 1) + [total - most * (count - 1)]
    return [memoryview(mmap.mmap(-1, size + 2 * page))[page - 1 : page - 1 + size] for size in sizes]


@pytest.mark.parametrize("count", [2, 3, 16, 100, 128])
def test_pieces_that_lie_worst_are_one_message_up_to_what_the_manual_says(mq: Path, count: int) -> None:
    """The kernel divides by pages, before the server sees anything."""
    whole = (257 - 2 * count) * mmap.PAGESIZE + 2 * count - 1
    for name, total, messages in (("whole", whole, 1), ("divided", whole + 1, 2)):
        fd = os.open(mq / name, os.O_WRONLY | os.O_CREAT)
        assert os.writev(fd, pieces(count, total)) == total
        os.close(fd)
        assert len(drain(mq / name)) == messages


def test_pieces_of_a_read_that_a_message_fills_get_the_next_one_too(mq: Path) -> None:
    """A page of each is touched: the kernel asks for the rest of the read when the first 256 are full."""
    for name, size, expected in (("full", 256, b"ab"), ("shorter", 255, b"a"), ("longer", 257, b"a")):
        with open(mq / name, "wb", buffering=0) as file:
            file.write(b"a" * size)
            file.write(b"b" * 10)
        fd = os.open(mq / name, os.O_RDONLY | os.O_NONBLOCK)
        buffers = [memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:1] for _ in range(300)]
        got = os.readv(fd, buffers)
        assert set(b"".join(buffers)[:got]) == set(expected)
        os.close(fd)


@pytest.mark.parametrize("size", [limits.MESSAGE_BYTES + 1, 1 << 20, (1 << 20) + 1, 3 << 20])
@pytest.mark.parametrize("shift", [0, 1, 4095])
def test_above_the_limit_nothing_is_stored(mq: Path, size: int, shift: int) -> None:
    fd = os.open(mq / "s", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError) as caught:
        os.write(fd, memoryview(bytes(size + shift))[shift:])
    os.close(fd)
    assert caught.value.errno == errno.EMSGSIZE
    assert drain(mq / "s") == []


def write_at(path: Path, data: bytes, offset: int) -> int:
    """One write(2) from that offset in a page: the kernel cuts it where its 256 pages end."""
    with mmap.mmap(-1, offset + len(data)) as pages:
        pages[offset:] = data
        fd = os.open(path, os.O_WRONLY)
        try:
            with memoryview(pages) as view, view[offset:] as part:
                return os.write(fd, part)
        finally:
            os.close(fd)


def one_message(file: str, size: int) -> bytes:
    """A write of that size to `.put` or `.batch`, of a message for the stream `s`."""
    if file == ".put":
        head = b'{"stream":"s","priority":7} '
        return head + b"x" * (size - len(head))
    return size.to_bytes(4, "little") + b"\1\0\0\0s" + b"x" * (size - 9)


@pytest.mark.parametrize("folder", ["", ".txn/part"])
@pytest.mark.parametrize("file", [".put", ".batch"])
@pytest.mark.parametrize("offset", [0, 1, 4090, 4095])
def test_a_message_with_metadata_is_whole_or_refused(mq: Path, folder: str, file: str, offset: int) -> None:
    (mq / "s").touch()
    if folder:
        (mq / folder).mkdir()
    path = mq / folder / file
    most, piece = limits.MESSAGE_BYTES, (1 << 20) - offset  # that is what the kernel sends first
    for size in (most + 1, most + len(one_message(file, 30)), 1 << 20, (1 << 20) + 1, 2 << 20):
        with pytest.raises(OSError) as caught:
            write_at(path, one_message(file, size), offset)
        assert caught.value.errno == errno.EMSGSIZE
    frames = one_message(".batch", piece // 2) + one_message(".batch", piece - piece // 2)
    if file == ".batch":  # its first piece are whole frames
        with pytest.raises(OSError) as caught:
            write_at(path, frames + one_message(file, 100), offset)
        assert caught.value.errno == errno.EMSGSIZE
    whole = one_message(file, most)
    assert write_at(path, whole, offset) == most
    if folder:
        (mq / ".txn/ctl").write_text("commit me.1 part")
    assert drain(mq / "s") == [whole[whole.index(b"x") :]]
    refusals = [json.loads(line) for line in (mq / ".errors").read_text().splitlines()]
    assert len(refusals) == (6 if file == ".batch" else 5)
    assert all(row["file"] == file and "expected at most 1044480" in row["text"] for row in refusals)


def test_a_small_buffer_gets_the_rest_next(mq: Path) -> None:
    sh("printf abcdefgh >s; printf ij >s", mq)
    fd = os.open(mq / "s", os.O_RDONLY)
    assert [os.read(fd, 3) for _ in range(4)] == [b"abc", b"def", b"gh", b"ij"]
    os.close(fd)


def test_dd_takes_large_messages(mq: Path) -> None:
    body = os.urandom(limits.MESSAGE_BYTES)
    fd = os.open(mq / "s", os.O_RDWR | os.O_CREAT)
    os.write(fd, body)
    os.close(fd)
    done = subprocess.run(
        ["dd", "if=s", "bs=1M", "count=1", "status=none"], cwd=mq, capture_output=True, timeout=HANG_S
    )
    assert done.stdout == body


def test_a_read_of_more_than_one_request_ends_with_what_is_there(mq: Path) -> None:
    """The messages fill the first request of the read exactly: a second would wait."""
    (mq / "ctl").write_text("data coalesce\n")
    for size in (limits.MESSAGE_BYTES, (1 << 20) - limits.MESSAGE_BYTES):
        fd = os.open(mq / "s", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"x" * size)
        os.close(fd)
    with mmap.mmap(-1, 8 << 20) as aligned, open(mq / "s", "rb", buffering=0) as file:
        assert [file.readinto(aligned), file.readinto(aligned)] == [limits.MESSAGE_BYTES, 4096]


def test_nonblocking_reads_by_flag_and_by_fcntl(mq: Path) -> None:
    sh("touch s", mq)
    fd = os.open(mq / "s", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        os.read(fd, 100)
    os.set_blocking(fd, True)
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(os.read(fd, 100)))
    reader.start()
    sh("echo now >s", mq)
    reader.join(HANG_S)
    assert answers == [b"now\n"]
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):
        os.read(fd, 100)
    os.close(fd)


def test_a_write_without_room_waits_or_says_again(mq: Path) -> None:
    (mq / "ctl").write_text("depth 1\nfull block\n")
    fd = os.open(mq / "s", RDWR_NB | os.O_CREAT)
    assert os.write(fd, b"1") == 1
    with pytest.raises(BlockingIOError):
        os.write(fd, b"2")
    os.close(fd)
    assert drain(mq / "s") == [b"1"]


def test_poll_select_and_epoll(mq: Path) -> None:
    sh("touch s", mq)
    fd = os.open(mq / "s", RDWR_NB)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(0) == []
    assert select.select([fd], [fd], [], 0) == ([], [fd], [])
    for ask in (lambda: poll.poll(HANG_S * 1_000), lambda: select.select([fd], [], [], 10)[0]):
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(ask)
            sh("sleep .1; echo x >s", mq)
            assert answer.result(HANG_S) in ([(fd, select.POLLIN)], [fd])
        assert os.read(fd, 10) == b"x\n"
        assert poll.poll(0) == []
    edge = select.epoll()
    edge.register(fd, select.EPOLLIN | select.EPOLLET)
    for i in range(5):
        sh(f"echo {i} >s", mq)
        assert edge.poll(HANG_S) == [(fd, select.EPOLLIN)]
        assert os.read(fd, 10) == b"%d\n" % i
    edge.close()
    os.close(fd)


def test_poll_for_room(mq: Path) -> None:
    (mq / "ctl").write_text("replay off\ndepth 1\nfull block\n")
    reader = os.open(mq / "s", os.O_RDONLY | os.O_CREAT)
    writer = os.open(mq / "s", os.O_WRONLY)
    os.write(writer, b"1")
    thread = threading.Thread(target=lambda: os.write(writer, b"2"))
    thread.start()
    other = os.open(mq / "s", os.O_WRONLY)
    eventually(lambda: select.select([], [other], [], 0)[1] == [])
    assert os.read(reader, 10) == b"1"
    assert select.select([], [other], [], 10)[1] == [other]
    assert os.read(reader, 10) == b"2"
    thread.join(HANG_S)
    for fd in (reader, writer, other):
        os.close(fd)


def test_two_threads_read_and_write_one_descriptor(mq: Path) -> None:
    fd = os.open(mq / "s", os.O_RDWR | os.O_CREAT)
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(os.read(fd, 100)))
    reader.start()
    eventually(lambda: "parked" and thread_sleeps(reader))
    assert os.write(fd, b"to myself") == 9
    reader.join(HANG_S)
    assert answers == [b"to myself"]
    os.close(fd)


def thread_sleeps(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/syscall") as file:
        return file.read().split()[0] == "0"  # read(2)


def test_a_writer_that_waits_holds_up_nobody_who_opened_the_file_himself(mq: Path, served: Served) -> None:
    (mq / "ctl").write_text("depth 1\nfull block\n")
    first = os.open(mq / "s", os.O_WRONLY | os.O_CREAT)
    second = os.open(mq / "s", os.O_WRONLY | os.O_NONBLOCK)
    os.write(first, b"1")
    thread = threading.Thread(target=lambda: os.write(first, b"2"))
    thread.start()
    eventually(lambda: served.sizes()["waiting"] == 1)
    with pytest.raises(BlockingIOError):
        os.write(second, b"3")
    (mq / "ctl").write_text("clear s\n")
    thread.join(HANG_S)
    for fd in (first, second):
        os.close(fd)
    assert drain(mq / "s") == [b"2"]


def test_writers_that_open_a_file_at_the_same_moment_are_not_in_each_other_s_way(mq: Path, served: Served) -> None:
    rounds, writers = campaign.size(100), 12
    turn = mq.parent.parent / f"{mq.name}.turn"
    turn.write_bytes(bytes(8))
    program = f"""
import mmap
turn = mmap.mmap(os.open({str(turn)!r}, os.O_RDWR), 8)
print("there")
for i in range({rounds}):
    while turn[0] <= i: pass
    fd = os.open(mq + "/s%d" % i, os.O_WRONLY)
    os.write(fd, b"x")
    os.close(fd)
"""
    for i in range(rounds):
        (mq / f"s{i}").write_text("full")
    (mq / "ctl").write_text("depth 1\nfull block\n")
    children = [Child(mq, program) for _ in range(writers)]
    try:
        assert [child.line() for child in children] == ["there"] * writers
        with open(turn, "r+b") as file, mmap.mmap(file.fileno(), 8) as board:
            for i in range(rounds):
                board[0] = i + 1
                eventually(lambda: served.sizes()["waiting"] == writers)
                (mq / "ctl").write_text("depth 0\n")
                eventually(lambda: served.sizes()["waiting"] == 0)
                (mq / "ctl").write_text("depth 1\n")
        assert [child.process.wait(HANG_S) for child in children] == [0] * writers
    finally:
        for child in children:
            child.end()


def test_many_who_open_a_file_at_once_look_it_up_a_few_times_each(mq: Path, served: Served) -> None:
    (mq / "s").touch()
    before = served.sizes()["given"]
    together = threading.Barrier(200)

    def read(_: int) -> None:
        together.wait(HANG_S)
        os.close(os.open(mq / "s", os.O_RDONLY))

    with ThreadPoolExecutor(200) as threads:
        list(threads.map(read, range(200)))
    assert served.sizes()["given"] - before < 200


def test_a_descriptor_opened_for_writing_can_be_opened_again(mq: Path) -> None:
    assert sh("exec 3>s; echo a >/proc/self/fd/3; echo b >/dev/fd/3; echo c >&3; exec 4<>/proc/self/fd/3", mq) == ""
    assert drain(mq / "s") == [b"a\n", b"b\n", b"c\n"]


def test_removing_a_stream_ends_its_readers(mq: Path) -> None:
    sh("touch s", mq)
    assert sh("cat s & until grep -q '^0 ' /proc/$!/syscall; do :; done; rm s; wait $!; echo $?", mq) == "0\n"


def test_eof_mark(mq: Path) -> None:
    assert sh("echo a >s; echo eof s >ctl; echo b >s; cat s", mq) == "a\n"


def test_order_and_cursor(mq: Path) -> None:
    sh("echo 1 >b; echo 2 >a; echo 3 >b", mq)
    assert drain(mq / "order") == [b"b\0", b"a\0", b"b\0"]
    shown = sh("exec 3<>.cursor; echo 'format line' >&3; echo 'seek first' >&3; echo 'until end' >&3; cat <&3", mq)
    assert shown == "1\n2\n3\n"


def test_refusals_have_their_errno_and_the_text_can_be_read(mq: Path) -> None:
    assert "Invalid argument" in sh("echo 'replay sideways' >ctl", mq)
    assert "sideways" in (mq / ".errors").read_text()
    with pytest.raises(PermissionError):
        os.open(mq / "order", os.O_WRONLY)


def test_copying_one_stream_into_another(mq: Path) -> None:
    sh("echo 1 >s; echo 2 >s; echo eof s >ctl; cat s >t; cp s u", mq)
    assert drain(mq / "t") == [b"1\n", b"2\n"]


def test_asynchronous_reads_wait_without_standing_in_the_way(mq: Path, served: Served) -> None:
    """More waiting readers than libfuse and the kernel take by default."""
    sh("touch s", mq)
    program = f"""
import os, sys, threading
threading.stack_size(65536)
fds = [os.open({str(mq / "s")!r}, os.O_RDONLY) for _ in range(300)]
threads = [threading.Thread(target=os.read, args=(fd, 10)) for fd in fds]
for t in threads: t.start()
for t in threads: t.join()
print("all")
"""
    readers = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    eventually(lambda: served.sizes()["waiting"] == 300)
    sh("echo x >s", mq)
    assert readers.communicate(timeout=HANG_S)[0] == "all\n"
    assert eventually(lambda: served.sizes()["files"] == 0)
