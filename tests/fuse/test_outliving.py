"""`mqfs mount`: the mount of a server elsewhere outlives that server."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pexpect
import pytest

from mqfs.client.info import Stats
from mqfs.ninep.client import connection
from mqfs.remote.ahead import AGE_S
from mqfs.remote.session import INTERRUPT_S, TICK_S
from tests.fuse.served_by import READ, Child, calls
from tests.support.batches import frame
from tests.support.campaign import seed, whole
from tests.support.eventually import HANG_S, eventually
from tests.support.frozen import Frozen, mounted_behind
from tests.support.server import COMMAND, Server, mounted, short_folder, unmount
from tests.support.shell import hang_up
from tests.support.tools import MODULES, environment

KILLS, RESTARTS, READERS, WRITERS = (500, 100, 100, 20) if whole() else (5, 1, 8, 4)
PAUSE_S = 0.3 if whole() else 0.005  # of a writer: each message has as many readers
MOST_UP_S = 1.2 if whole() else 0.3  # of the server, between two ends of it
LATE_S = 10 * HANG_S if whole() else HANG_S  # until the last reader has the last message


class Elsewhere:
    """A server on disk, and a mount of it in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.path = folder, folder / "elsewhere"
        self.path.mkdir()
        self.server = Server.at(folder)
        (folder / "mount").mkdir()
        words = [*COMMAND, "mount", self.server.address, str(self.path), *options]
        self.mount = Server(cwd=folder / "mount", program=words)
        self.guard = threading.Timer(24 * HANG_S if whole() else HANG_S, self.mount.process.kill)
        self.guard.start()

    def group(self, name: str, *ctl: str) -> Path:
        path = self.path / name
        path.mkdir()
        (path / "ctl").write_text("".join(f"{line}\n" for line in ctl))
        return path

    def close(self) -> None:
        self.guard.cancel()
        try:
            self.mount.close()
        finally:
            unmount(self.path)
            self.server.close()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    with short_folder() as folder:
        it = Elsewhere(folder)
        try:
            yield it
        finally:
            it.close()


def test_a_parked_reader_goes_on_after_a_kill(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    stream = group / "s"
    stream.touch()
    with ThreadPoolExecutor(1) as threads, open(stream, "rb", buffering=0) as file:
        stream.write_bytes(b"1")
        assert file.read(64) == b"1"
        answer = threads.submit(file.read, 64)
        elsewhere.server.restart()
        stream.write_bytes(b"2")
        assert answer.result(HANG_S) == b"2", "neither the first again, nor an error"


def test_a_reader_without_replay_misses_nothing_written_after_the_restart(elsewhere: Elsewhere) -> None:
    stream = elsewhere.group("g") / "s"
    stream.touch()
    with ThreadPoolExecutor(2) as threads, open(stream, "rb", buffering=0) as file:
        answer = threads.submit(file.read, 64)
        elsewhere.server.stop(signal.SIGKILL)
        written = threads.submit(stream.write_bytes, b"1")
        elsewhere.server.start()
        assert written.result(HANG_S) == 1
        assert answer.result(HANG_S) == b"1"


READ_ONCE = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)
os.dup2(fd, 3)
print("open", flush=True)
sys.stdin.readline()
try:
    print(os.read(3, 100))
except BlockingIOError:
    print("nothing")
"""


def test_a_program_that_does_not_wait_is_answered_by_the_next_server(elsewhere: Elsewhere) -> None:
    """The server ends with its read, and with the flush of that, unanswered."""
    group = elsewhere.group("g", "replay all", "consumer c")
    words = [sys.executable, "-c", READ_ONCE, str(group / ".consumers" / "c")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        os.kill(elsewhere.server.process.pid, signal.SIGSTOP)
        print(file=process.stdin, flush=True)
        process.stdin.close()
        eventually(lambda: Path(f"/proc/{process.pid}/syscall").read_text().startswith("0 0x3 "), "it to read")
        elsewhere.server.restart()
        with ThreadPoolExecutor(1) as threads:
            try:
                assert threads.submit(process.stdout.read).result(HANG_S) == "nothing\n"
            finally:
                process.kill()


def test_without_a_server_a_program_that_does_not_wait_reads_what_the_mount_has(elsewhere: Elsewhere) -> None:
    stream = elsewhere.group("g", "replay all") / "s"
    with open(stream, "wb", buffering=0) as file:
        for number in range(40):
            file.write(b"%d" % number)
    fd = os.open(stream, os.O_RDONLY | os.O_NONBLOCK)
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    for number in range(10):
        assert ready.poll(HANG_S * 1000)
        assert os.read(fd, 9) == b"%d" % number
    assert ready.poll(HANG_S * 1000)
    time.sleep(2 * AGE_S)  # how old it is then, and not something waited for
    elsewhere.server.stop(signal.SIGKILL)
    eventually(lambda: "connection lost" in elsewhere.mount.text(), "the mount to know")
    begun_s = time.monotonic()
    assert os.read(fd, 9) == b"10"
    assert time.monotonic() - begun_s < INTERRUPT_S, "as long as a call waits for a connection"
    os.close(fd)


class Traffic:
    """Writers and readers of one stream, mq-work, and a lister, until `over`."""

    def __init__(self, folder: Path, group: Path) -> None:
        self.group, self.done, self.over = group, folder / "done", threading.Event()
        self.done.touch()
        for name in ("s", "jobs"):
            (group / name).touch()
        (group / "ctl").write_text("consumer work jobs\nconsumer claimed s\nretries 0\n")
        command = ["sh", "-c", f'echo "$(cat)" >>{self.done}']
        words = [sys.executable, "-m", MODULES["mq-work"], "-j2", str(group / ".consumers/work"), "--", *command]
        self.worker = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)

    def write(self, stream: str, number: int) -> list[bytes]:
        written: list[bytes] = []
        with open(self.group / stream, "wb", buffering=0) as file:
            while not self.over.is_set():
                body = b"%d.%d" % (number, len(written))
                assert file.write(body) == len(body)
                written.append(body)
                self.over.wait(PAUSE_S)
        return written

    def read(self) -> list[bytes]:
        got: list[bytes] = []
        with open(self.group / "s", "rb", buffering=0) as file:
            while (data := file.read(64)) != b"end":
                got.append(data)
        return got

    def claim(self) -> list[bytes]:
        seen: list[bytes] = []  # an ack without an answer is Stale, though it may be in force
        with open(self.group / ".consumers" / "claimed", "r+b", buffering=0) as file:
            while True:
                body = file.read(64)
                seen.append(body)
                try:
                    file.write(b"ack\n")
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    file.read(4096)  # the reason
                    continue
                if body == b"end":
                    return seen

    def list_all(self) -> int:
        count = 0
        while not self.over.is_set():
            subprocess.run(["ls", "-lR", str(self.group.parent)], check=True, capture_output=True, timeout=HANG_S)
            count += 1
        return count

    def finish_work(self, jobs: list[bytes]) -> int:
        """Wait until mq-work did all; how many it did again."""
        expected = {body.decode() for body in jobs}
        is_done = eventually(lambda: set(self.done.read_text().split()) >= expected or self.worker.poll(), "all jobs")
        assert is_done is True, f"mq-work ended: {self.worker.communicate()}"
        self.worker.send_signal(signal.SIGTERM)
        _, said = self.worker.communicate(timeout=HANG_S)
        assert self.worker.returncode == 0, said
        assert all("the message may be redelivered" in line for line in said.splitlines()), said
        done = self.done.read_text().split()
        assert set(done) == expected
        return len(done) - len(expected)

    def close(self) -> None:
        self.over.set()
        self.worker.kill()
        self.worker.wait()


@pytest.mark.timeout(7_200)
def test_messages_are_there_once_and_in_order_under_kills(elsewhere: Elsewhere) -> None:
    """Readers, writers, workers and a lister, while the server is killed again and again."""
    traffic = Traffic(elsewhere.folder, group := elsewhere.group("g", "replay all"))
    with ThreadPoolExecutor(READERS + WRITERS + 3) as threads, contextlib.ExitStack() as failing:
        failing.callback(elsewhere.mount.process.kill)  # nothing waits for it then
        failing.callback(traffic.close)
        readers = [threads.submit(traffic.read) for _ in range(READERS)]
        claimer, lister = threads.submit(traffic.claim), threads.submit(traffic.list_all)
        writers = [threads.submit(traffic.write, "s", number) for number in range(WRITERS)]
        putter = threads.submit(traffic.write, "jobs", 0)
        luck = random.Random(seed())
        for end in range(KILLS + RESTARTS):
            elsewhere.server.restart(signal.SIGTERM if end % 6 == 5 else signal.SIGKILL)
            time.sleep(luck.uniform(0, MOST_UP_S))  # the moment, not something waited for
        traffic.over.set()
        written = [body for writer in writers for body in writer.result(HANG_S)]
        (group / "s").write_bytes(b"end")
        for reader in readers:
            check_once_and_in_order(reader.result(LATE_S), written)
        assert set(claimer.result(LATE_S)) == {*written, b"end"}
        assert lister.result(HANG_S) > 0
        again = traffic.finish_work(putter.result(HANG_S))
        assert again <= 2 * (KILLS + RESTARTS), "two jobs were under way at a time"
        failing.pop_all()
    print(f"{KILLS} kills, {RESTARTS} restarts, {len(written)} messages, {READERS} readers, {again} jobs again")


def check_once_and_in_order(got: list[bytes], written: list[bytes]) -> None:
    assert sorted(got) == sorted(written), "each write once"
    newest: dict[bytes, int] = {}
    for body in got:
        writer, _, number = body.partition(b".")
        assert int(number) == newest.get(writer, -1) + 1, f"{body!r} after {newest.get(writer)}"
        newest[writer] = int(number)


def test_two_end_marks_in_a_row_are_two_ends_of_file(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    stream = group / "s"
    stream.touch()
    with open(stream, "rb", buffering=0) as file:
        stream.write_bytes(b"1")
        (group / "ctl").write_text("eof s\neof s\n")
        stream.write_bytes(b"2")
        assert [file.read(64) for _ in range(4)] == [b"1", b"", b"", b"2"]


@pytest.mark.parametrize("data", ["message", "line"])
def test_a_write_goes_to_the_stream_that_was_opened_whatever_its_name_is(elsewhere: Elsewhere, data: str) -> None:
    """As logrotate(8) has it; the mount hears nothing of what other clients rename, create and remove."""
    group = elsewhere.group("g", "replay all", f"data {data}")
    other = connection.connect(elsewhere.server.address, timeout=HANG_S)
    with other, open(group / "log", "ab", buffering=0) as log, open(group / "x", "ab", buffering=0) as removed:
        log.write(b"one\n")
        other.rename("g/log", "log.1")
        other.create("g/log").close()
        log.write(b"two\n")
        removed.write(b"three\n")
        other.remove("g/x")
        other.create("g/x").close()
        with pytest.raises(OSError, match=r"No such file|Stale"):
            removed.write(b"four\n")
    with elsewhere.server.connect() as client:
        found = [(message.stream, message.body) for message in client.group("g").history()]
    assert found == [("log.1", b"one\n"), ("log.1", b"two\n")]


def test_a_write_has_more_lines_than_a_connection_has_tags(elsewhere: Elsewhere) -> None:
    group, lines = elsewhere.group("g", "replay all", "data line"), b"".join(b"%d\n" % n for n in range(40_000))
    (group / "s").touch()
    with open(group / "s", "wb", buffering=0) as file:
        assert file.write(lines) == len(lines)
    assert (group / ".kept" / "s").read_bytes() == lines


def test_lines_that_wait_for_room_when_the_server_ends_are_written_to_the_next(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all", "data line", "depth 3", "full block")
    (group / "s").write_bytes(b"0\n1\n2\n")
    with ThreadPoolExecutor(2) as threads, open(group / "s", "wb") as one, open(group / "s", "wb", buffering=0) as two:
        alone, both = threads.submit(os.write, one.fileno(), b"3\n"), threads.submit(two.write, b"4\n5\n")
        eventually(lambda: json.loads((group / ".stats").read_text())["streams"]["s"]["blocked"] == 2, "both to wait")
        elsewhere.server.restart()
        (group / "ctl").write_text("clear s\n")
        assert (alone.result(HANG_S), both.result(HANG_S)) == (2, 4)
        assert (group / ".kept" / "s").read_bytes() in (b"3\n4\n5\n", b"4\n5\n3\n")


def test_lines_are_there_once_and_in_order_under_kills(elsewhere: Elsewhere) -> None:
    group, over = elsewhere.group("g", "replay all", "data line"), threading.Event()
    (group / "s").touch()

    def write() -> bytes:
        written = b""
        with open(group / "s", "wb", buffering=0) as file:
            for number in itertools.takewhile(lambda _: not over.is_set(), itertools.count()):
                lines = b"".join(b"%d.%d\n" % (number, line) for line in range(number % 4 + 1))
                assert file.write(lines) == len(lines)
                written += lines
        return written

    with ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as failing:
        failing.callback(elsewhere.mount.process.kill)  # nothing waits for it then
        failing.callback(over.set)
        writer, luck = threads.submit(write), random.Random(seed())
        for _ in range(KILLS):
            elsewhere.server.restart()
            time.sleep(luck.uniform(0, MOST_UP_S))  # the moment, not something waited for
        over.set()
        written = writer.result(HANG_S)
        assert (group / ".kept" / "s").read_bytes() == written
        failing.pop_all()


def test_a_large_kept_stream_is_read_in_one_call(elsewhere: Elsewhere) -> None:
    """A reply of 9P has less than that; the kernel takes a short one for the end."""
    group, body = elsewhere.group("g", "replay all"), bytes(700_000)
    for _ in range(4):
        (group / "s").write_bytes(body)
    with open(group / ".kept" / "s", "rb", buffering=0) as file:
        assert len(file.read(10_000_000)) == 4 * len(body)


def test_a_claim_stays_while_the_shell_that_opened_its_file_lives(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    (group / "s").touch()
    (group / ".consumers" / "w").touch()
    for job in ("one", "two"):
        (group / "s").write_text(f"{job}\n")
    take = "exec 3<>.consumers/w; echo format each >&3; a=$(cat <&3); b=$(cat <&3)"
    script = f"{take}; echo ack 1 >&3 && echo ack >&3 && echo $a $b"
    done = subprocess.run(["bash", "-c", script], cwd=group, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert (done.stdout, done.stderr) == ("one two\n", "")


def test_a_reader_that_waits_goes_on_when_the_others_of_its_open_file_end(elsewhere: Elsewhere) -> None:
    """Then the mount opens the file again, so that what they claimed goes back."""
    group = elsewhere.group("g", "deliver one", "replay all")
    (group / "s").touch()
    program = """
fd = os.open(mq + "/s", os.O_RDWR)
if os.fork() == 0:
    print(os.getpid())
    print(os.read(fd, 64))
    signal.pause()
input()
if os.fork() == 0:
    print(os.getpid())
    print(os.read(fd, 64))
"""
    with Child(group, program) as opener:
        first = int(opener.line())
        (group / "s").write_bytes(b"job")
        assert opener.line() == "b'job'"
        opener.tell()
        second = int(opener.line())
        eventually(lambda: calls(second, READ))
        opener.process.wait(HANG_S)
        os.kill(first, signal.SIGKILL)
        time.sleep(0.3)  # the moment, not something waited for
        (group / "s").write_bytes(b"next")
        assert opener.line() == "b'next'"


def test_a_server_that_attaches_and_then_freezes_is_given_up() -> None:
    with (
        short_folder() as folder,
        Server.at(folder) as server,
        mounted_behind(folder, server, f",{server.address}") as (frozen, mount),
    ):
        stream = folder / "mq" / "s"
        stream.touch()
        with open(stream, "rb", buffering=0) as file:
            assert "frozen mounted" in mount.text()
            frozen.freeze()
            stream.write_bytes(b"1")
            assert file.read(64) == b"1"
        assert "frozen: connection lost" in mount.text()


@pytest.mark.parametrize("data", [b"1\n", b"1\n2\n", b"1\n2\n3"], ids=["one", "two", "rest"])
def test_lines_that_a_server_kept_and_did_not_answer_are_not_written_again(data: bytes) -> None:
    with (
        short_folder() as folder,
        Server.at(folder) as server,
        mounted_behind(folder, server) as (frozen, _),
        ThreadPoolExecutor(1) as threads,
    ):
        (group := folder / "mq" / "g").mkdir()
        (group / "ctl").write_text("replay all\ndata line\n")

        def kept() -> bytes:
            with server.connect() as client:
                return b"".join(message.body for message in client.group("g").history())

        with open(group / "s", "wb", buffering=0) as file:
            frozen.mute()
            written = threads.submit(file.write, data)
            eventually(lambda: kept().count(b"\n") == data.count(b"\n"), "the server to keep them")
            server.restart()
            frozen.end()
            assert written.result(HANG_S) == len(data)
            file.write(b"end\n")
        assert kept() == data + b"end\n"


@pytest.mark.parametrize(
    ("file", "setting", "data", "body", "why"),
    [
        ("s", "data message", b"1", b"1", None),
        ("s", "data line", b"1\n2\n", b"1\n2\n", None),
        (".put", "data message", b'{"stream":"s"} 1', b"1", None),
        (".batch", "data message", frame("s", b"1"), b"1", errno.EIO),
        ("ctl", "data message", b"eof s\n", b"", errno.EIO),
        ("s", "data message", b"1", b"1", errno.EIO),
        (".consumers/work", "data message", b"ack\n", b"1", errno.ESTALE),
    ],
    ids=["message", "lines", "put", "batch", "command", "late", "ack"],
)
def test_a_signal_has_nothing_written_again_that_a_server_kept(
    file: str, setting: str, data: bytes, body: bytes, why: int | None
) -> None:
    """Python writes again after EINTR, which says that nothing was written. `why` it fails: where the signals come for
    long, or the outcome cannot be asked for, it is not known; the claim of an `ack` has ended anyway."""
    with (
        short_folder() as folder,
        Server.at(folder) as server,
        mounted_behind(folder, server) as (frozen, mount),
        ThreadPoolExecutor(1) as threads,
    ):
        (group := folder / "mq" / "g").mkdir()
        (group / "ctl").write_text(f"replay all\n{setting}\n")
        (group / "s").touch()
        if data == b"ack\n":
            (group / file).touch()
            (group / "s").write_bytes(body)
        main = threading.get_ident()

        def is_done(stats: Stats) -> bool:
            return stats.consumers["work"].low > 1 if data == b"ack\n" else stats.streams["s"].messages > 0

        def lose() -> float:
            with server.connect() as client:
                eventually(lambda: is_done(client.group("g").stats()), "the server to keep it")
            server.stop(signal.SIGKILL)
            frozen.end()
            eventually(lambda: "connection lost" in mount.text(), "the mount to know")
            lost_s = time.monotonic()
            while True:
                signal.pthread_kill(main, signal.SIGUSR1)
                if time.monotonic() >= lost_s + (INTERRUPT_S + 2 * TICK_S if why else 0):
                    break
                time.sleep(0.01)
            server.start()
            return lost_s

        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            with open(group / file, "r+b" if data == b"ack\n" else "wb", buffering=0) as opened:
                if data == b"ack\n":
                    assert opened.read(64) == body
                frozen.mute()
                lost = threads.submit(lose)
                error = None
                try:
                    assert opened.write(data) == len(data)
                except OSError as caught:
                    error = caught.errno
                ended_s = time.monotonic()
                is_late = ended_s - lost.result(HANG_S) > INTERRUPT_S  # as long on a busy machine
                assert error == why or (error == errno.EIO and is_late and data != b"ack\n")
        finally:
            signal.signal(signal.SIGUSR1, before)
        with server.connect() as client:
            stats = client.group("g").stats().streams["s"]
            history = b"".join(message.body for message in client.group("g").history())
        assert (stats.messages, history) == (max(data.count(b"\n"), 1), body)


def test_a_claim_of_a_server_that_ended_is_stale(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    (group / "s").touch()
    (group / ".consumers" / "work").touch()
    (group / "s").write_bytes(b"job")
    with open(group / ".consumers" / "work", "r+b", buffering=0) as file:
        file.write(b"format line\n")
        assert file.read(64) == b"job\n"
        elsewhere.server.restart()
        with pytest.raises(OSError) as caught:
            file.write(b"ack\n")
        assert caught.value.errno == errno.ESTALE
        assert b"claim of a server that ended" in file.read(4096)
        assert file.read(64) == b"job\n", "delivered again, in the format that was asked for"
        file.write(b"ack\n")


def test_a_command_of_a_descriptor_that_never_waits_is_carried_out_by_the_next_server(elsewhere: Elsewhere) -> None:
    """As mq-work opens it: to be without a message is EAGAIN, to be without a server is not."""
    group = elsewhere.group("g", "replay all")
    (group / "s").touch()
    (group / ".consumers" / "work").touch()
    fd = os.open(group / ".consumers" / "work", os.O_RDWR | os.O_NONBLOCK)
    try:
        elsewhere.server.stop(signal.SIGKILL)
        with pytest.raises(BlockingIOError):
            os.read(fd, 64)
        with ThreadPoolExecutor(1) as threads:
            written = threads.submit(os.write, fd, b"format line\n")
            elsewhere.server.start()
            assert written.result(HANG_S) == 12
        (group / "s").write_bytes(b"job")
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLIN)
            assert poll.poll(HANG_S)
        assert os.read(fd, 64) == b"job\n"
    finally:
        os.close(fd)


def test_commands_that_a_signal_kept_from_the_server_leave_no_line(elsewhere: Elsewhere) -> None:
    """A program writes the same again then."""
    group = elsewhere.group("g", "replay all")
    (group / "s").write_bytes(b"one")
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
fd = os.open(mq + "/.cursor", os.O_RDWR)
os.write(fd, b"format ")
print("open")
input()
print(alarmed(libc.write, fd, b"line\\nseek ", 10) < 0 and errno.errorcode[ctypes.get_errno()])
input()
os.write(fd, b"line\\nseek ")
os.write(fd, b"first\\n")
print(os.read(fd, 64))
"""
    with Child(group, program) as child:
        assert child.line() == "open"
        elsewhere.server.kill()
        child.tell()
        assert child.line() == "EINTR"
        elsewhere.server.start()
        child.tell()
        assert child.line() == repr(b"one\n")


def test_an_answer_that_was_due_goes_with_its_server(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    (group / "s").write_bytes(b"first")
    (group / "s").write_bytes(b"second")
    with open(group / ".cursor", "r+b", buffering=0) as cursor, ThreadPoolExecutor(1) as threads:
        assert cursor.read(3) == b"fir"
        cursor.write(b"info\n")
        elsewhere.server.restart()
        assert [cursor.read(64), cursor.read(64)] == [b"st", b"second"]
        cursor.write(b"seek first\n")
        assert cursor.read(3) == b"fir"
        cursor.write(b"info\n")
        elsewhere.server.kill()
        rest = threads.submit(cursor.read, 64)
        elsewhere.server.start()
        assert [rest.result(HANG_S), cursor.read(64)] == [b"st", b"second"]


def test_virtual_files_open_across_a_restart_are_read_anew(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    (group / "s").write_bytes(b"one\n")
    with (
        open(group / ".stats", "rb", buffering=0) as stats,
        open(group / ".kept" / "s", "rb", buffering=0) as kept,
        open(group / ".cursor", "r+b", buffering=0) as cursor,
    ):
        cursor.write(b"select s\nseek first\nformat json\n")
        assert b'"one' in cursor.read(4096)
        elsewhere.server.restart()
        assert stats.read(1 << 16).startswith(b"{")
        assert kept.read(64) == b"one\n"
        (group / "s").write_bytes(b"two\n")
        assert b'"two' in cursor.read(4096), "from its position, in its format"


def test_a_write_waits_for_a_group_that_comes_a_moment_after_its_server(elsewhere: Elsewhere) -> None:
    """As one that stops refuses to open it. Neither the file is given up at once, nor the `.put` of its writes."""
    group = elsewhere.group("g", "replay all")
    with ThreadPoolExecutor(1) as threads, open(group / "s", "wb", buffering=0) as file:
        file.write(b"1")
        with connection.connect(elsewhere.server.address, timeout=HANG_S) as tree:
            tree.rename("g", "h")
        elsewhere.server.kill()
        written = threads.submit(file.write, b"2")
        elsewhere.server.start()
        with connection.connect(elsewhere.server.address, timeout=HANG_S) as tree:
            eventually(lambda: "connected again" in elsewhere.mount.text())
            time.sleep(0.2)  # the moment, not something waited for
            tree.rename("h", "g")
        assert written.result(HANG_S) == 1
        assert (group / ".kept" / "s").read_bytes() == b"12"


def test_locks_are_held_over_a_restart(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g")
    (group / "s").touch()
    import fcntl

    with open(group / "s", "wb", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)
        elsewhere.server.restart()
        program = """
for call in (fcntl.lockf, fcntl.flock):
    try:
        call(open(mq + '/s', 'wb'), fcntl.LOCK_EX | fcntl.LOCK_NB)
        print('granted')
    except BlockingIOError:
        print('held')
"""
        with Child(group, program) as other:
            assert [other.line(), other.line()] == ["held", "held"]
        fcntl.lockf(file, fcntl.LOCK_UN)


def test_calls_fail_after_patience_and_the_mount_comes_back() -> None:
    with short_folder() as folder:
        it = Elsewhere(folder, "--patience", "1s")
        try:
            stream = it.group("g", "replay all") / "s"
            stream.touch()
            it.server.stop(signal.SIGKILL)
            with pytest.raises(OSError) as caught:
                os.stat(stream)
            assert caught.value.errno == errno.EIO
            assert "no connection for 1 s" in it.mount.text()
            it.server.start()

            def is_back() -> bool:
                with contextlib.suppress(OSError):
                    return stream.stat().st_size == 0
                return False

            eventually(is_back, "the mount")
        finally:
            it.close()


@pytest.mark.parametrize("what", ["no server", "not empty", "not a directory", "missing"])
def test_a_mount_that_cannot_be_is_one_line(tmp_path: Path, what: str) -> None:
    target = tmp_path / "target"
    if what != "missing":
        target.mkdir()
    if what == "not empty":
        (target / "file").touch()
    if what == "not a directory":
        target.rmdir()
        target.touch()
    done = subprocess.run(
        [sys.executable, "-m", "mqfs", "mount", f"unix!{tmp_path}/none", str(target)],
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 1
    expected = {
        "no server": "no such socket", "not empty": "not empty", "not a directory": "not a directory",
        "missing": "No such file or directory (expected an existing directory)",
    }[what]  # fmt: skip
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------ signals, terminals


@pytest.mark.parametrize("answers", [0, 2], ids=["nothing", "attach"])
def test_a_signal_ends_the_wait_for_the_first_answers(answers: int) -> None:
    """Where the server accepts the connection, and answers nothing more."""
    with short_folder() as folder, Server.at(folder) as server:
        (path := folder / "far").mkdir()
        frozen = Frozen(folder / "frozen", server.address)
        frozen.answers = itertools.chain([range(answers)], itertools.repeat(()))
        words = [*COMMAND, "mount", f"unix!{frozen.path}", str(path), "--patience", "1h"]
        try:
            with subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) as process:
                try:
                    eventually(lambda: select.select(frozen.open[1:2], [], [], 0)[0], "it waits for an answer")
                    process.terminate()
                    _, said = process.communicate(timeout=HANG_S)
                finally:
                    process.kill()
            assert (process.returncode, said) == (0, "mqfs: SIGTERM: stopping\n")
            assert not mounted(path)
        finally:
            frozen.close()
            unmount(path)


def test_hangup_changes_nothing(elsewhere: Elsewhere) -> None:
    group = elsewhere.group("g", "replay all")
    for number in range(3):
        elsewhere.mount.process.send_signal(signal.SIGHUP)
        (group / "s").write_text(f"{number}\n")
    assert (group / ".kept" / "s").read_text() == "0\n1\n2\n"
    assert elsewhere.mount.stop() == 0


@pytest.mark.parametrize("before", [[], ["nohup"]])
def test_a_mount_in_a_terminal_ends_with_it(before: list[str]) -> None:
    """In order: it is unmounted. Under nohup it stays."""
    with short_folder() as folder, Server.at(folder) as server:
        (path := folder / "far").mkdir()
        words = [*before, *COMMAND, "mount", server.address, str(path)]
        settings = {"cwd": str(folder), "env": environment(), "timeout": HANG_S, "use_poll": True}
        terminal = pexpect.spawn(words[0], words[1:], **settings)
        try:
            eventually(lambda: mounted(path), "it is mounted")
            hang_up(terminal)
            if before:
                (path / "g").mkdir()
                os.kill(terminal.pid, signal.SIGTERM)
            eventually(lambda: os.waitpid(terminal.pid, os.WNOHANG)[0] == terminal.pid, "it ends")
            assert not mounted(path)
        finally:
            unmount(path)
