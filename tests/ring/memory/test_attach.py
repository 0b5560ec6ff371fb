"""A file that is no ring of this version and boot is refused; writes of another process into one do no harm."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.ring import Ring, _native, attach, crc32c, create
from tests.support import ROOT
from tests.support.campaign import seed, size
from tests.support.forks import child, ended, fork

SEALS = 0x1 | 0x2 | 0x4
LEAST = 1 << 16


def memory(data: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def changed(at: int, form: str, value: object) -> bytes:
    """A ring with one field of its head changed, the head's CRC right."""
    ring = create(LEAST)
    data = bytearray(os.pread(ring.fileno(), _native.HEAD_BYTES + LEAST, 0))
    struct.pack_into(form, data, at, value)
    struct.pack_into("<I", data, 52, crc32c(bytes(data[:52])))
    return bytes(data)


def refused(fd: int) -> str:
    with pytest.raises(errors.BadRing) as error:
        attach(fd)
    os.close(fd)
    return error.value.detail


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: changed(0, "8s", b"mqfsrinG"), "not a ring"),
        (lambda: changed(8, "<I", 3), "a ring of another version"),
        (lambda: changed(12, "<I", 4096), "a ring of another layout"),
        (lambda: changed(48, "<I", 128), "a ring of another layout"),
        (lambda: changed(16, "<Q", LEAST * 2), "its size does not match its head"),
        (lambda: changed(16, "<Q", LEAST - 8), "its size does not match its head"),
        (lambda: changed(16, "<Q", 2**64 - 1), "its size does not match its head"),
        (lambda: changed(32, "16s", bytes(16)), "a ring of an earlier boot"),
        (lambda: changed(24, "<Q", 1)[:52] + b"\1\2\3\4" + changed(24, "<Q", 1)[56:], "its head is corrupt"),
        (lambda: changed(24, "<Q", 1)[:40_000], "its size does not match its head"),
        (lambda: changed(24, "<Q", 1)[:20], "too short"),
        (lambda: b"", "too short"),
        (lambda: random.Random(1).randbytes(_native.HEAD_BYTES + LEAST), "not a ring"),
    ],
)
def test_what_is_no_ring_is_refused(data: Callable[[], bytes], why: str) -> None:
    assert refused(memory(data())) == why


def test_it_must_be_sealed(tmp_path: Path) -> None:
    assert refused(memory(changed(24, "<Q", 1), 0x2)) == "not sealed"
    path = tmp_path / "ring"
    path.write_bytes(changed(24, "<Q", 1))
    assert refused(os.open(path, os.O_RDWR)) == "not sealed"
    with pytest.raises(OSError):
        attach(1 << 20)


def test_another_generation() -> None:
    ring = create(LEAST, generation=7)
    assert attach(ring.fileno(), 7).generation == attach(ring.fileno()).generation == 7
    with pytest.raises(errors.Stale):
        attach(ring.fileno(), 8)


def test_nobody_can_shrink_it() -> None:
    ring = create(LEAST)
    for length in (0, _native.HEAD_BYTES, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fileno(), length)


def test_sizes() -> None:
    for wrong in (0, LEAST - 1, LEAST // 2, LEAST + 8, 3 * LEAST, 1 << 33, 1 << 63):
        with pytest.raises(errors.BadRing):
            create(wrong)
    ring = create(LEAST)
    for _ in range(5):
        ring.publish(1, bytes(LEAST // 2 - 32))
    for body, headers in ((LEAST // 2 - 31, 0), (LEAST // 2 - 32, 1), (0, 65_536), (0, 40_000), (LEAST, 0)):
        with pytest.raises(errors.OverLimit):
            ring.publish(1, bytes(body), bytes(headers))
    with pytest.raises(errors.OverLimit):
        ring.publish_unit([(1, 1, bytes(LEAST // 4))] * 2)
    ring.publish_many(1, [bytes(LEAST // 4)] * 9)
    with pytest.raises(OverflowError):
        ring.publish(1 << 32, b"")
    for kind in (0, 7):
        with pytest.raises(ValueError, match="kind"):
            ring.publish(1, b"", b"", kind)
    with pytest.raises(TypeError):
        ring.publish(1, "text")  # type: ignore[arg-type]
    assert ring.publish_many(1, [bytearray(b"a"), memoryview(b"b")]) == 16


@pytest.mark.process
def test_no_memory_is_an_error_not_a_signal(tmp_path: Path) -> None:
    def act(_: Ring) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(errors.DiskFull):
            create(1 << 20)
        create(1 << 19)

    assert ended(fork(create(LEAST), act)) == 0
    program = f"""if 1:
        import os, sys
        from mqfs import errors, ring
        fd = os.open("{tmp_path}/ring", os.O_RDWR | os.O_CREAT)
        try:
            ring._native._allocate(fd, 1 << 22)
        except errors.DiskFull as error:
            print(error.errno)
    """
    run = f"{sys.executable} -c '{program}'; status=$?; umount {tmp_path}; exit $status"
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} || exit; {run}"
    private = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*private, "true"], stderr=subprocess.DEVNULL).returncode:
        private += ["--propagation", "unchanged"]  # below a chroot the root directory is no mount point
    done = subprocess.run(
        [*private, "sh", "-c", mount],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "28\n"), done.stderr


@pytest.mark.process
def test_it_is_passed_over_a_socket_and_outlives_its_maker() -> None:
    left, right = socket.socketpair()

    def act(_: Ring) -> None:
        ring = create(LEAST)
        ring.publish(3, b"left behind")
        left.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ring.fileno()]))])
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(create(LEAST), act)) == -signal.SIGKILL
    _, fds, _, _ = socket.recv_fds(right, 1, 1)
    ring = attach(fds[0])
    os.close(fds[0])
    assert ring.tail == 48
    consumer = ring.consumer(gates=True)
    assert ring.publish(3, b"x") == 2
    assert consumer.body(0) == b"x"
    left.close()
    right.close()


@pytest.mark.process
def test_a_forked_child_must_attach_for_itself_and_keeps_no_slot_alive() -> None:
    ring = create(LEAST)
    watch = ring.consumer()
    consumers = []

    def act(again: Ring) -> None:
        consumers.append(again.consumer(gates=True))
        grandchild = os.fork()
        if not grandchild:
            for call in (lambda: again.publish(1, b""), lambda: consumers[0].body(0), lambda: again.tail):
                with pytest.raises(errors.Stale, match="of the parent process"):
                    call()
            watch_fd = os.dup(fd)
            attach(watch_fd).publish(9, b"fine")
            os.close(writes)
            os.read(reads, 1)  # until the test is over
            os._exit(0)
        again.publish(9, b"forked")
        signal.pause()

    fd = os.dup(ring.fileno())
    reads, writes = os.pipe()
    with child(ring, act) as pid:
        found = {watch.body(20.0), watch.body(20.0)}
        assert found == {b"fine", b"forked"}
        assert [row[3:] for row in ring.slots()] == [(False, True), (True, True)]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for _ in range(100):
            ring.publish(1, bytes(1000), b"", 1, 0, 1.0)
        assert [row[3:] for row in ring.slots()] == [(False, True)]
    for one in (fd, reads, writes):
        os.close(one)


class Forked(Exception):
    """In the parent, when its child has ended as it should."""


def fork_in_a_handler(*_: object) -> None:
    """As a program does that continues as a daemon on a signal."""
    pid = os.fork()
    if pid:
        assert ended(pid) == 0
        raise Forked


def full(ring: Ring) -> Any:
    gate = ring.consumer(gates=True)
    while True:
        try:
            ring.publish(1, bytes(100), b"", 1, 0, 0)
        except errors.Again:
            return gate


def locked(ring: Ring) -> Any:
    memory = mmap.mmap(ring.fileno(), 4_096)
    memory[128:132] = (1 | 1 << 31).to_bytes(4, "little")  # by a process that lives as long as the machine
    return memory


def retired(ring: Ring) -> Any:
    """Published, and the server has not said where it ended."""
    other = attach(ring.fileno())
    consumer = ring.consumer()
    other.retire(0)
    return consumer


WAITS: dict[str, tuple[Callable[[Ring], Any], Callable[[Ring, Any], object]]] = {
    "body": (lambda ring: ring.consumer(), lambda _, consumer: consumer.body()),
    "bodies": (lambda ring: ring.consumer(), lambda _, consumer: consumer.bodies(9)),
    "range": (lambda ring: ring.consumer(gates=True), lambda _, consumer: consumer.range(9)),
    "end": (retired, lambda _, consumer: consumer.record()),
    "wait": (lambda _: None, lambda ring, _: ring.wait(ring.tail)),
    "commit": (lambda _: None, lambda ring, _: ring.wait_committed(9)),
    "room": (full, lambda ring, _: ring.publish(1, bytes(100))),
    "room for several": (full, lambda ring, _: ring.publish_many(1, [bytes(100)] * 9)),
    "sequences": (lambda ring: ring.grant(0), lambda ring, _: ring.publish(1, b"x")),
    "lock": (locked, lambda ring, _: ring.publish(1, b"x")),
    "lock for a consumer": (locked, lambda ring, _: ring.consumer()),
}


@pytest.mark.process
@pytest.mark.parametrize("name", WAITS)
def test_a_handler_that_forks_while_something_is_waited_for(name: str) -> None:
    """The child gets the error of a handle that it inherited, and the parent waits on."""
    prepare, wait = WAITS[name]

    def act(again: Ring) -> None:
        pid, held = os.getpid(), prepare(again)
        signal.signal(signal.SIGALRM, fork_in_a_handler)
        with pytest.raises((Forked, errors.Stale)) as raised:  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            wait(again, held)
        if os.getpid() == pid:
            assert raised.type is Forked
            again.close()
        else:
            assert "of the parent process" in str(raised.value)

    assert ended(fork(create(LEAST), act)) == 0


def scribble(fd: int, chance: random.Random) -> None:
    """Noise anywhere but in what is checked when a ring is attached; mostly where it hurts."""
    with mmap.mmap(fd, 0) as shared:
        for _ in range(chance.randrange(1, 6)):
            at = chance.choice((128, 144, 152, 256, 264, 640, 768, _native.HEAD_BYTES)) + chance.randrange(0, 64)
            if chance.random() < 0.4:
                at = chance.randrange(_native.HEAD_BYTES, len(shared) - 8)
            value = chance.choice((0, 1, 2**64 - 1, 2**63, chance.randrange(LEAST), chance.getrandbits(64)))
            shared[at : at + 8] = struct.pack("<Q", value)


def use(ring: Ring) -> None:
    """Everything there is, once; anything but an error of ours is a failure, a signal most of all."""
    consumers = []
    for call in (
        lambda: consumers.append(ring.consumer(gates=True)),
        lambda: consumers.append(ring.consumer(wait="spin")),
        lambda: ring.publish(1, bytes(500), b"", 1, 0, 0),
        lambda: ring.publish_many(1, [bytes(100)] * 9, 0.001),
        lambda: ring.publish_unit([(1, 1, bytes(9), b"h")] * 3, 0),
        lambda: consumers[0].records(5, 0.001),
        lambda: consumers[0].range(10_000, 0),
        lambda: _native.scan(consumers[-1].range(1 << 20, 0) or b""),
        lambda: consumers[-1].bodies(50, 0),
        lambda: consumers[-1].skip(),
        lambda: consumers[-1].record(0),
        lambda: ring.wait_committed(1, 0.001),
        lambda: ring.slots(),
        lambda: [consumer.close() for consumer in consumers],
    ):
        try:
            call()
        except (errors.MqfsError, IndexError):
            pass


@pytest.mark.process
def test_noise_in_shared_memory_is_an_error_and_nothing_worse() -> None:
    def act(again: Ring) -> None:
        chance = random.Random(seed())
        for _ in range(size(3000)):
            ring = create(LEAST)
            fd = ring.fileno()
            early = ring.consumer()
            for turn in range(chance.randrange(200)):
                ring.publish(turn, bytes(turn))
            scribble(fd, chance)
            # A lock without a live holder is waited for as long as the caller likes: here it is freed to go on.
            with mmap.mmap(fd, 0) as shared:
                if chance.random() < 0.9:
                    shared[128:132] = bytes(4)
                elif shared[128:132] != bytes(4):
                    for timeout in (0, 0.001):
                        try:
                            ring.publish(1, b"", b"", 1, 0, timeout)
                        except errors.MqfsError:
                            pass
                    shared[128:132] = bytes(4)
            use(ring)
            try:
                early.records(1000, 0)
            except errors.MqfsError:
                pass

    assert ended(fork(create(LEAST), act)) == 0


@pytest.mark.process
def test_noise_while_it_is_used() -> None:
    """A process writes noise all the time; no user of the ring is harmed meanwhile."""
    ring = create(LEAST)

    def act(again: Ring) -> None:
        chance = random.Random(seed())
        while True:
            scribble(again.fileno(), chance)

    def act_too(again: Ring) -> None:
        for _ in range(size(2000)):
            with mmap.mmap(again.fileno(), 0) as shared:
                shared[128:136] = bytes(8)
            again_use(again)

    def again_use(again: Ring) -> None:
        consumer = again_consumer(again)
        for call in (
            lambda: again.publish(1, bytes(500), b"", 1, 0, 0),
            lambda: consumer and consumer.records(50, 0),
            lambda: consumer and consumer.range(10_000, 0),
            lambda: consumer and consumer.skip(),
        ):
            try:
                call()
            except errors.MqfsError:
                pass

    kept: list[_native.Consumer] = []

    def again_consumer(again: Ring) -> _native.Consumer | None:
        return kept[0] if kept else None

    def begin(again: Ring) -> None:
        kept.append(again.consumer())
        with child(again, act):
            act_too(again)

    assert ended(fork(ring, begin)) == 0


def test_a_record_that_is_none_is_met_each_time_until_skipped() -> None:
    ring = create(LEAST)
    consumer = ring.consumer()
    ring.publish(1, b"good")
    ring.publish(1, b"bad")
    ring.publish(1, b"lost")
    os.pwrite(ring.fileno(), b"B", _native.HEAD_BYTES + 40 + 32)
    assert consumer.bodies(9, 0) == [b"good"]
    for _ in range(2):
        with pytest.raises(errors.Damaged) as error:
            consumer.bodies(9, 0)
        assert error.value.sequence == 2
    consumer.skip()
    ring.publish(1, b"more")
    assert consumer.bodies(9, 0) == [b"more"]
