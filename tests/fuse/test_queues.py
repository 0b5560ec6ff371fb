"""Work queues through a real mount: shells and processes that take, die and look."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.ninep.client import connection
from tests.fuse.served_by import READ, Child, Served, libc
from tests.fuse.test_data import sh
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server
from tests.support.tools import mq as mq_tool
from tests.support.tools import mq_cat, mq_work

RDWR_NB = os.O_RDWR | os.O_NONBLOCK


def put(stream: Path, *bodies: str) -> None:
    fd = os.open(stream, os.O_WRONLY | os.O_CREAT)
    for body in bodies:
        os.write(fd, body.encode())
    os.close(fd)


def consumer(mq: Path, *bodies: str) -> Path:
    """A consumer in a group with these messages."""
    put(mq / "s", *bodies)
    (mq / ".consumers" / "w").touch()
    return mq / ".consumers" / "w"


def queue(mq: Path, *bodies: str, ctl: str = "") -> Path:
    """A stream in a group that delivers to one."""
    (mq / "ctl").write_text(f"deliver one\n{ctl}")
    put(mq / "s", *bodies)
    return mq / "s"


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def stats(mq: Path) -> Any:
    return json.loads((mq / ".stats").read_text())


def shown(path: Path) -> list[bytes]:
    """The messages that wait there, without taking."""
    with opened(path, os.O_RDONLY) as fd:
        return list(iter(lambda: os.read(fd, 4096), b""))


# ---------------------------------------------------------------- directories


def test_a_consumer_is_made_listed_and_removed_by_name(mq: Path) -> None:
    assert sh("touch .consumers/a; : >.consumers/b; ls .consumers; rm .consumers/a; ls .consumers", mq) == "a\nb\nb\n"
    assert sh("cd .consumers && pwd -P && ls .. | grep -c order && stat -c %F . b", mq).splitlines()[1:] == [
        "1",
        "directory",
        "regular empty file",
    ]
    os.mknod(mq / ".consumers" / "m")
    refusals: list[Callable[[], object]] = [
        lambda: os.mkdir(mq / ".consumers" / "d"),
        lambda: os.rename(mq / ".consumers" / "b", mq / ".consumers" / "c"),
        lambda: os.rename(mq / ".consumers" / "b", mq / "c"),
        lambda: os.mkdir(mq / ".kept" / "d"),
        lambda: os.mknod(mq / ".kept" / "s"),
        lambda: os.symlink("x", mq / ".consumers" / "l"),
        lambda: os.chmod(mq / ".consumers", 0o777),
    ]
    for call in refusals:
        with pytest.raises(PermissionError):
            call()
    with pytest.raises(FileExistsError):
        os.close(os.open(mq / ".consumers" / "b", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    assert sorted(os.listdir(mq / ".consumers")) == ["b", "m"]
    numbers = [path.stat().st_ino for path in (mq, mq / ".consumers", mq / ".kept", *(mq / ".consumers").iterdir())]
    assert len(set(numbers)) == 5


def test_rm_r_removes_a_group_with_consumers_and_kept_messages(mq: Path) -> None:
    (mq / "g").mkdir()
    (mq / "g" / "ctl").write_text("replay all\n")
    consumer(mq / "g", "1", "2")
    assert sh("rm -r g; ls", mq) == "ctl\norder\n"


def test_a_consumer_with_claims_is_busy(mq: Path) -> None:
    path = consumer(mq, "1")
    with opened(path) as fd:
        assert os.read(fd, 10) == b"1"
        with pytest.raises(OSError, match="busy") as caught:
            path.unlink()
        assert caught.value.errno == errno.EBUSY
        os.write(fd, b"ack\n")
        path.unlink()
        assert os.read(fd, 10) == b""
        with pytest.raises(OSError, match="Stale"):
            os.write(fd, b"seek first\n")


# ---------------------------------------------------------------- workers


WORKER = """
exec 3<>jobs/.consumers/mailer; echo 'format line' >&3
while IFS= read -r -u3 job; do send "$job" 3>&- && echo ack >&3 || echo nack >&3; done
"""
SEND = """
send() {
  if [ "$1" = bad ] && [ ! -e "$DONE.bad" ]; then : >"$DONE.bad"; return 1; fi
  echo "$1" >>"$DONE"
}
"""


def test_the_worker_in_plain_shell(mq: Path, tmp_path: Path) -> None:
    jobs = mq / "jobs"
    jobs.mkdir()
    (jobs / "ctl").write_text("replay all\nbackoff 1ms 1ms\nconsumer mailer mail\n")
    done = tmp_path / "done"
    done.touch()
    put(jobs / "mail", "one\n", "bad\n", "two")
    workers = [
        subprocess.Popen(["bash", "-c", SEND + WORKER], cwd=mq, env={**os.environ, "DONE": str(done)}) for _ in range(3)
    ]
    try:
        for number in range(100):
            put(jobs / "mail", f"job {number}\n")
        eventually(lambda: len(done.read_text().splitlines()) == 103)
        assert sorted(done.read_text().splitlines()) == sorted(["one", "bad", "two", *(f"job {n}" for n in range(100))])
        eventually(lambda: stats(jobs)["consumers"]["mailer"]["acknowledged"] == 103)
        told = stats(jobs)["consumers"]["mailer"]
        assert (told["failed"], told["claimed"], told["waiting"]) == (1, 0, 0)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_head_takes_one_line_and_goes_back_to_the_rest_of_the_message(mq: Path) -> None:
    queue(mq, "1\n", "2\n3\n", "4\n")
    assert sh("head -n1 <>s; { head -n1; head -n1; } <>s; head -n1 <>s", mq) == "1\n2\n3\n4\n"
    assert shown(mq / "s") == []


def test_ten_readers_share_a_queue(mq: Path, tmp_path: Path) -> None:
    queue(mq)
    count = size(10_000)
    outs = [tmp_path / str(number) for number in range(10)]
    readers = [subprocess.Popen(["bash", "-c", f"exec cat <>s >{out}"], cwd=mq) for out in outs]
    try:
        eventually(lambda: (mq / ".who").read_text().count('"s"') == 10)
        put(mq / "s", *(f"{number}\n" for number in range(count)))
        eventually(lambda: stats(mq)["streams"]["s"]["consumer"]["acknowledged"] == count)
        (mq / "s").unlink()
        for reader in readers:
            assert reader.wait(HANG_S) == 0
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    found = [list(map(int, out.read_text().split())) for out in outs]
    assert sorted(number for part in found for number in part) == list(range(count))
    assert all(part == sorted(part) for part in found)


def test_a_handle_that_is_closed_gives_back(mq: Path) -> None:
    path = consumer(mq, "1", "2")
    with opened(path) as fd:
        assert [os.read(fd, 10), os.read(fd, 10)] == [b"1", b"2"]
        assert shown(path) == []
    assert shown(path) == [b"1", b"2"]


def test_private_and_transient(mq: Path) -> None:
    (mq / "ctl").write_text("consumer p private\nconsumer t transient\n")
    with opened(mq / ".consumers" / "p"), pytest.raises(OSError, match="busy"):
        os.open(mq / ".consumers" / "p", os.O_RDWR)
    with opened(mq / ".consumers" / "t"):
        assert sorted(os.listdir(mq / ".consumers")) == ["p", "t"]
    eventually(lambda: os.listdir(mq / ".consumers") == ["p"])


# ---------------------------------------------------------------- who dies


SHELL = """
exec 3<>{path}
IFS= read -r -u3 job
sleep 1000 &
echo $job $!
wait
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["consumer", "queue"])
def test_a_dead_reader_gives_back_though_a_child_has_its_descriptor(
    mq: Path, served: Served, kind: str, number: signal.Signals
) -> None:
    path = consumer(mq, "job\n") if kind == "consumer" else queue(mq, "job\n", ctl="ack next\nretries 0\n")
    shell = subprocess.Popen(["bash", "-c", SHELL.format(path=path)], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    job, child = shell.stdout.readline().split()
    try:
        assert job == "job"
        assert served.sizes()["watched"] == 1
        with opened(path, RDWR_NB) as fd, pytest.raises(BlockingIOError):
            os.read(fd, 10)
        with opened(path) as fd:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(0) == []
            shell.send_signal(number)
            assert poll.poll(HANG_S * 1_000) == [(fd, select.POLLIN)]
            assert os.read(fd, 10) == b"job\n"
            eventually(lambda: served.sizes()["watched"] == 1)  # ourselves
        assert os.path.exists(f"/proc/{child}/fd/3"), "the child still has it open"
    finally:
        os.kill(int(child), signal.SIGKILL)
        shell.kill()
        shell.wait()
        shell.stdout.close()
    eventually(lambda: not served.sizes()["files"])
    assert served.sizes()["watched"] == 0


def test_cat_in_a_living_shell_keeps_the_claim(mq: Path) -> None:
    consumer(mq, "one\n", "two\n", "three\n")
    script = """
exec 3<>.consumers/w
echo format each >&3
a=$(cat <&3); b=$(cat <&3)
echo ack >&3 && echo "$b done"
echo ack 1 >&3 && echo "$a done"
cat <&3
echo release >&3
cat <&3
echo info >&3
head -c 11 <&3
"""
    assert sh(script, mq) == "two done\none done\nthree\nthree\nsequence 3\n"[: -len("\n")].replace(
        "sequence 3", "sequence 3\n"
    )
    assert shown(mq / ".consumers" / "w") == [b"three\n"], "the shell has ended"


def test_a_thread_reads_and_its_process_is_meant(mq: Path, served: Served) -> None:
    path = consumer(mq, "1")
    program = f"""
import threading
def take(): print(os.read(fd, 10))
fd = os.open({str(path)!r}, os.O_RDWR)
thread = threading.Thread(target=take); thread.start(); thread.join()
input()
print(os.write(fd, b"ack"))
input()
"""
    with Child(mq, program) as child:
        assert child.line() == "b'1'"
        assert served.sizes()["watched"] == 1
        child.tell()
        assert child.line() == "3", "the thread is gone, its process lives"
    eventually(lambda: not served.sizes()["files"])


HEIR = """
import os, sys, threading
thread = threading.Thread(target=lambda: print(os.read(3, 10), flush=True))
thread.start()
thread.join()
sys.stdin.read(1)
print(os.write(3, b"ack"), flush=True)
sys.stdin.read(1)
"""


def test_who_opened_may_be_gone_while_who_reads_lives(mq: Path, served: Served) -> None:
    """A shell opens, starts a program with the descriptor, and ends. A thread of the program reads, and ends."""
    path = consumer(mq, "1")
    shell = subprocess.Popen(
        ["bash", "-c", 'exec 3<>"$1"; exec 4<&0; python3 -c "$2" <&4 & exit', "-", path, HEIR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    assert shell.stdin is not None
    with shell, shell.stdout, shell.stdin:
        assert shell.stdout.readline() == "b'1'\n"
        shell.wait(HANG_S)
        eventually(lambda: served.sizes()["watched"] == 1)
        assert stats(mq)["consumers"]["w"]["claimed"] == 1
        shell.stdin.write("x")
        shell.stdin.flush()
        assert shell.stdout.readline() == "3\n"
    eventually(lambda: not served.sizes()["files"])
    assert served.sizes()["watched"] == 0


@pytest.mark.root
def test_a_mount_that_is_ended_by_force_gives_back_all_claims(tmp_path: Path) -> None:
    """No one releases what is open then; the server continues over 9P."""
    mount = tmp_path / "mq"
    mount.mkdir()
    with Server("--listen", "unix!sock", cwd=tmp_path, mount=mount):
        (mount / "ctl").write_text("replay all\n")
        path = consumer(mount, "1")
        fd = os.open(path, os.O_RDWR)
        assert os.read(fd, 10) == b"1"
        libc.umount2(os.fsencode(mount), 1)
        with pytest.raises(OSError, match=r"not connected|abort"):
            os.write(fd, b"ack")
        with connection.connect(f"unix!{tmp_path}/sock", timeout=HANG_S) as client:
            again = client.open(".consumers/w", "r+")
            assert again.receive(10, 10) == b"1"
            assert json.loads(client.open(".stats").receive(65536, 10))["consumers"]["w"]["handles"] == 1
        with contextlib.suppress(OSError):
            os.close(fd)


# ---------------------------------------------------------------- waiting, interrupts, poll


TAKER = """
fd = os.open(mq, os.O_RDWR)
print("open")
print(os.read(fd, 100))
"""


@pytest.mark.parametrize("kind", ["consumer", "queue"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_read_has_claimed_nothing(mq: Path, served: Served, kind: str, number: signal.Signals) -> None:
    path = consumer(mq) if kind == "consumer" else queue(mq)
    with Child(path, TAKER) as first, Child(path, TAKER) as second:
        for child in (first, second):
            assert child.line() == "open"
        eventually(lambda: served.sizes()["waiting"] == 2)
        first.process.send_signal(number)
        first.process.wait(HANG_S)
        eventually(lambda: served.sizes()["waiting"] == 1)
        put(mq / "s", "for the living")
        assert second.line() == "b'for the living'"


def test_signals_at_any_moment_lose_nothing_and_take_nothing_twice(mq: Path) -> None:
    count = size(5000)
    path = consumer(mq)
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
fd = os.open({str(path)!r}, os.O_RDWR)
print("open")
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
buffer, got = ctypes.create_string_buffer(100), []
while not got or got[-1] != b"end":
    n = libc.read(fd, buffer, 100)
    if n > 0:
        got.append(buffer.raw[:n])
        while libc.write(fd, b"ack", 3) < 0: assert ctypes.get_errno() == errno.EINTR
signal.setitimer(signal.ITIMER_REAL, 0)
print(got == [b"%d" % i for i in range(len(got) - 1)] + [b"end"], len(got))
"""
    with Child(mq, program) as child:
        assert child.line() == "open"
        put(mq / "s", *map(str, range(count)), "end")
        assert child.line() == f"True {count + 1}"
    told = stats(mq)["consumers"]["w"]
    assert (told["acknowledged"], told["failed"], told["waiting"]) == (count + 1, 0, 0)


def test_a_read_that_claimed_nothing_leaves_the_last_claim(mq: Path) -> None:
    with opened(consumer(mq, "1"), RDWR_NB) as fd:
        assert os.read(fd, 10) == b"1"
        with pytest.raises(BlockingIOError):
            os.read(fd, 10)
        os.write(fd, b"ack\n")
        os.write(fd, b"until end\n")
        assert os.read(fd, 10) == b""


def test_a_claim_hangs_on_who_waited_for_it(mq: Path, served: Served) -> None:
    """Two heirs of a process that is gone wait on its descriptor; the first dies with what it got."""
    path = consumer(mq)
    heir = "import os, signal, sys; os.read(int(sys.argv[1]), 10); signal.pause()"
    program = f"""
import subprocess
fd = os.open({str(path)!r}, os.O_RDWR)
for _ in range(2):
    print(subprocess.Popen([sys.executable, "-c", {heir!r}, str(fd)], pass_fds=[fd]).pid)
    input()
os._exit(0)
"""
    heirs: list[int] = []
    with Child(mq, program) as opener:
        try:
            for number in (1, 2):
                heirs.append(int(opener.line()))
                eventually(lambda number=number: served.sizes()["waiting"] == number)  # type: ignore[misc]
                opener.tell()
            opener.process.wait(HANG_S)
            put(mq / "s", "1")
            eventually(lambda: stats(mq)["consumers"]["w"]["claimed"] == 1)
            assert served.sizes()["waiting"] == 1
            os.kill(heirs[0], signal.SIGKILL)
            eventually(lambda: served.sizes()["waiting"] == 0)
            told = stats(mq)["consumers"]["w"]
            assert (told["failed"], told["claimed"]) == (1, 1), "the other has it"
        finally:
            for pid in heirs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not served.sizes()["files"])


@pytest.mark.parametrize("kind", ["consumer", "queue"])
def test_poll_and_nonblocking(mq: Path, kind: str) -> None:
    path = consumer(mq) if kind == "consumer" else queue(mq)
    with opened(path, RDWR_NB) as fd:
        with pytest.raises(BlockingIOError):
            os.read(fd, 10)
        poll = select.epoll()
        poll.register(fd, select.EPOLLIN)
        assert poll.poll(0) == []
        put(mq / "s", "x")
        assert poll.poll(HANG_S) == [(fd, select.EPOLLIN)]
        assert os.read(fd, 10) == b"x"
        poll.modify(fd, select.EPOLLIN)
        assert poll.poll(0) == []
        poll.close()


def test_two_consumers_each_see_everything(mq: Path) -> None:
    consumer(mq, "1", "2")
    (mq / ".consumers" / "v").touch()
    for name in "wv":
        with opened(mq / ".consumers" / name) as fd:
            assert [os.read(fd, 10), os.read(fd, 10)] == [b"1", b"2"]
            os.write(fd, b"ack 1\nack 2\n")


def test_locks_work_on_the_new_files(mq: Path) -> None:
    path = consumer(mq, "1")
    for file, flags in ((path, os.O_RDWR), (mq / ".kept" / "s", os.O_RDONLY), (mq / ".put", os.O_RDWR)):
        with opened(file, flags) as one, opened(file, flags) as two:
            fcntl.flock(one, fcntl.LOCK_EX)
            with pytest.raises(BlockingIOError):
                fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_put(mq: Path) -> None:
    put(mq / "s")
    (mq / "s").touch()
    assert sh("""echo '{"stream":"s","priority":7} hello' >.put""", mq) == ""
    with opened(mq / ".put") as fd:
        os.write(fd, b'{"stream":"s"} again')
        assert os.read(fd, 100) == b"2\n"
        with pytest.raises(OSError, match="Invalid"):
            os.write(fd, b'{"stream":"s","x":1} again')
        assert b"unknown key 'x'" in os.read(fd, 1000)
    assert sh('echo \'{"stream":"none"} x\' >.put', mq).endswith("No such file or directory\n")
    with opened(mq / "s", os.O_RDONLY) as fd:
        assert [os.read(fd, 100), os.read(fd, 100)] == [b"hello\n", b"again"]


# ---------------------------------------------------------------- who only looks


LOOKERS = [
    "grep -ra job {0}",
    "tar cf - {0} | cat >$OUT",
    "cp -r {0} $OUT",
    "find {0} -ls -type f -exec head -c 100 '{{}}' +",
    "find {0} -type f | xargs file",
    "ls -laR {0}; du -a {0}; stat .consumers/* .kept/*",
    "cat jobs .consumers/* .kept/*",
]


@pytest.mark.parametrize("script", LOOKERS, ids=lambda script: script.partition(" ")[0])
def test_whoever_only_looks_changes_nothing(mq: Path, tmp_path: Path, script: str) -> None:
    (mq / "ctl").write_text("deliver one\nack next\nconsumer all\nconsumer own jobs\nbind view #\n")
    put(mq / "jobs", "job 1\n", "job 2\n", "job 3\n")
    with opened(mq / "jobs") as taken, opened(mq / ".consumers" / "all") as claimed:
        assert [os.read(taken, 100), os.read(claimed, 100)] == [b"job 1\n", b"job 1\n"]
        before = looked_at(mq)
        (tmp_path / "out").mkdir()
        looker = subprocess.run(
            ["bash", "-c", script.format("jobs view order .consumers .kept ctl .stats .who .errors .put")],
            cwd=mq,
            env={**os.environ, "OUT": str(tmp_path / "out" / ("tar" if "tar" in script else ""))},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert looker.stderr == ""
        assert looker.stdout.count("job 2") >= 3 or not script.startswith(("grep", "cat", "find {0} -ls"))
        assert looked_at(mq) == before
        os.write(claimed, b"ack\n")
        assert [os.read(claimed, 100) for _ in range(2)] == [b"job 2\n", b"job 3\n"]
        assert [os.read(taken, 100) for _ in range(2)] == [b"job 2\n", b"job 3\n"]
    with opened(mq / ".consumers" / "own") as fd:
        assert [os.read(fd, 100) for _ in range(3)] == [b"job 1\n", b"job 2\n", b"job 3\n"]


def looked_at(mq: Path) -> Any:
    told = stats(mq)
    for consumer in (*told["consumers"].values(), *(s["consumer"] for s in told["streams"].values())):
        consumer.pop("handles")
    return told["consumers"], told["streams"]


# ---------------------------------------------------------------- .kept


def kept(mq: Path, count: int = 1000) -> tuple[Path, bytes]:
    lines = [f"line {number}\n" for number in range(count)]
    put(mq / "s", *lines)
    return mq / ".kept" / "s", "".join(lines).encode()


def test_a_kept_stream_is_an_ordinary_file(mq: Path, tmp_path: Path) -> None:
    path, body = kept(mq)
    total = len(body)
    assert path.stat().st_size == total
    assert os.access(path, os.R_OK)
    assert (mq / "s").stat().st_size == 0
    assert sh("echo $(wc -lc <.kept/s); wc -l .kept/s; stat -c '%s %F %A' .kept/s", mq) == (
        f"1000 {total}\n1000 .kept/s\n{total} regular file -r--r--r--\n"
    )
    assert sh("tail -n 10 .kept/s", mq) == "".join(f"line {n}\n" for n in range(990, 1000))
    assert sh("tail -c 9 .kept/s; head -n 2 .kept/s; tac .kept/s | head -n 1; sed -n 501p .kept/s", mq) == (
        "line 999\nline 0\nline 1\nline 999\nline 500\n"
    )
    assert sh("grep -c 'line 99' .kept/s; grep -r 'line 777' .kept; cmp .kept/s .kept/s && echo same", mq) == (
        "11\n.kept/s:line 777\nsame\n"
    )
    assert sh(
        f"cp -a .kept/s {tmp_path}/a; cat .kept/s >{tmp_path}/b; tar cf {tmp_path}/t .kept; tar tvf {tmp_path}/t", mq
    )
    sh(f"dd if=.kept/s of={tmp_path}/c bs=4M status=none; dd if=.kept/s of={tmp_path}/d bs=7 status=none", mq)
    sh(
        f"tar xOf {tmp_path}/t .kept/s >{tmp_path}/e; split -n 3 .kept/s {tmp_path}/x; cat {tmp_path}/x* >{tmp_path}/f",
        mq,
    )
    for name in "abcdef":
        assert (tmp_path / name).read_bytes() == body, name
    assert path.read_bytes() == body
    assert "line 999" in sh("less .kept/s | cat; file .kept/s", mq)
    assert sh("rm .kept/s; ls .kept; echo x >.kept/s", mq).splitlines()[0] == "s"


def test_a_large_kept_stream_is_read_in_one_call(mq: Path) -> None:
    blocks = [bytes([65 + number]) * 1_000_000 for number in range(6)]
    fd = os.open(mq / "s", os.O_WRONLY | os.O_CREAT)
    for block in blocks:
        os.write(fd, block)
    os.close(fd)
    with opened(mq / ".kept" / "s", os.O_RDONLY) as fd:
        assert os.read(fd, 10_000_000) == b"".join(blocks)
        assert os.pread(fd, 4, 999_998) == b"AABB"
        assert os.pread(fd, 100, 6_000_000) == b""
        assert os.lseek(fd, -3, os.SEEK_END) == 5_999_997
        assert os.read(fd, 100) == b"FFF"


def test_a_kept_file_can_be_mapped(mq: Path) -> None:
    import mmap

    path, body = kept(mq)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as view:
        assert view[:] == body


def test_a_kept_file_does_not_grow_while_it_is_open(mq: Path) -> None:
    path, body = kept(mq, 10)
    with opened(path, os.O_RDONLY) as early:
        put(mq / "s", "more\n")
        with opened(path, os.O_RDONLY) as late:
            assert os.path.getsize(path) == len(body) + 5
            for fd, whole in ((early, body), (late, body + b"more\n"), (early, body)):
                assert os.fstat(fd).st_size == len(whole)
                assert os.lseek(fd, 0, os.SEEK_END) == len(whole)
                assert os.pread(fd, 4096, 0) == whole
            (mq / "ctl").write_text("clear s\n")
            assert os.path.getsize(path) == 0
            assert os.fstat(early).st_size == len(body)
            assert os.pread(early, 4096, 0) == body
        with opened(f"/proc/self/fd/{early}", os.O_RDONLY) as again:  # type: ignore[arg-type]
            assert os.pread(again, 4096, 0) == b""
            assert os.lseek(again, 0, os.SEEK_END) == 0
        assert os.lseek(early, 0, os.SEEK_END) == len(body)


def sh_in_time(script: str, cwd: Path) -> str:
    """What it prints. Where messages of a large `.kept` file went before they were read, it is run again."""
    return eventually(lambda: [text for text in [sh(script, cwd)] if "Stale file handle" not in text], script)[0]


def test_copies_of_a_stream_that_grows_are_whole(mq: Path, tmp_path: Path) -> None:
    """Each is what was kept at some moment: whole messages, in order, and of the size that was reported."""
    (mq / "ctl").write_text("depth 2000\n")
    put(mq / "s", "0 line\n")
    program = """
fd = os.open(mq + "/s", os.O_WRONLY)
print("going")
number = 1
while True:
    os.write(fd, b"%d line\\n" % number)
    number += 1
"""
    with Child(mq, program) as child:
        assert child.line() == "going"
        newest = -1
        for number in range(size(200)):
            out = tmp_path / "out"
            errors = sh_in_time(f"cp .kept/s {out} && tar cf {out}.tar .kept/s && tar xOf {out}.tar >{out}.too", mq)
            assert errors == "", f"round {number}"
            for copy in (out, Path(f"{out}.too")):
                lines = copy.read_text().splitlines(keepends=True)
                first = int(lines[0].split()[0])
                assert lines == [f"{first + n} line\n" for n in range(len(lines))]
                assert first + len(lines) >= newest
                newest = first + len(lines)
            assert sh_in_time("tail -n 1 .kept/s; wc -l <.kept/s", mq).count(" line\n") == 1


def test_tables_do_not_grow_with_kept_files_and_consumers(mq: Path, served: Served) -> None:
    path = consumer(mq, "x")
    before = eventually(lambda: not (sizes := served.sizes())["files"] and sizes)
    for _ in range(size(3000)):
        (mq / ".kept" / "s").read_bytes()
        shown(path)
        os.listdir(mq / ".consumers")
    after = eventually(lambda: not (sizes := served.sizes())["files"] and sizes)
    assert after["nodes"] < before["nodes"] + 100
    for table in ("files", "listings", "waiting", "handles", "parked", "watched"):
        assert after[table] == before[table], table


def test_a_reader_that_waits_sleeps_in_read(mq: Path) -> None:
    """And a write to the same descriptor is not held up by it, over a consumer."""
    path = consumer(mq)
    program = f"""
import threading
fd = os.open({str(path)!r}, os.O_RDWR)
thread = threading.Thread(target=lambda: print(os.read(fd, 10)))
thread.start()
print("open")
input()
print(os.write(fd, b"format line\\n"))
"""
    with Child(mq, program) as child:
        assert child.line() == "open"
        tasks = Path(f"/proc/{child.process.pid}/task")
        eventually(lambda: any(calls_in(task, READ) for task in tasks.iterdir()))
        child.tell()
        assert child.line() == "12"
        put(mq / "s", "x")
        assert child.line() == "b'x\\n'"


def calls_in(task: Path, number: int) -> bool:
    with contextlib.suppress(OSError):
        words = (task / "syscall").read_text().split()
        return words[0] == str(number) and words[1] != "0x0"
    return False


def test_what_lies_behind_many_others_is_there_for_who_does_not_wait(tmp_path: Path) -> None:
    """A claim that does not wait for new messages has those that are there, however many it passes over."""
    with Server.at(tmp_path, "--http", "unix!web", mount=True) as server, server.connect() as client:
        view = 'bind v prefix:"" payload_contains("needle")'
        group = client.group("g", create=True, ctl=["replay all", "sync off", view])
        for number in range(6):
            group.ctl(f"consumer c{number} v")
        group.create("s")
        group.publish_many([("s", b"hay")] * 20_000)
        group.publish("s", b"needle")
        mq = server.path / "g"
        with opened(mq / ".consumers" / "c0", os.O_RDONLY | os.O_NONBLOCK) as file:
            assert os.read(file, 100) == b"needle"
        assert b"needle" in mq_tool("peek", mq / ".consumers" / "c0").stdout
        with opened(mq / ".consumers" / "c0", os.O_RDWR | os.O_NONBLOCK) as file:
            assert os.read(file, 100) == b"needle"
        with opened(mq / ".consumers" / "c5", os.O_RDWR | os.O_NONBLOCK) as file:
            os.write(file, b"seek end\n")
            os.write(file, b"seek -1\n")
            assert os.read(file, 100) == b"needle"
        with group.consume("c1") as claims:
            assert claims.get(0).body == b"needle"
        assert mq_cat("-e", "--consumer", "c2", mq).stdout == b"needle"
        assert mq_work("-e", mq / ".consumers" / "c3", "--", "cat").stdout == b"needle"
        words = ["curl", "-s", "--unix-socket", str(tmp_path / "web"), "-X", "POST"]
        url = "http://localhost/g/.consumers/c4/claim?wait=0s"
        assert b'"needle"' in subprocess.run([*words, url], check=True, stdout=subprocess.PIPE).stdout
