"""The device loop without a kernel: requests that a kernel rarely or never sends."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from mqfs import limits
from mqfs.clock import SystemClock
from mqfs.engine.nodes import Meta
from mqfs.engine.tree.attributes import Listing
from mqfs.engine.tree.tree import Tree
from mqfs.errors import Stale
from mqfs.fuse import protocol
from mqfs.fuse.backend import File, Files, LocalTree, Nodes
from mqfs.fuse.device_loop import DeviceLoop
from mqfs.model import User
from mqfs.store.memory import MemoryStore
from tests.support.timers import ring_timers

USER = User(0, 0)


class Bench:
    """A device loop whose device is a socket, and whose libfuse is another."""

    def __init__(self) -> None:
        self.tree = Tree(MemoryStore(), SystemClock(), owner=USER)
        self.files = Files()
        self.kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.libfuse, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.kernel, device, ours):
            end.setblocking(False)
        self.ends = (self.kernel, device, self.libfuse, ours)
        self.nodes = Nodes(self.tree)
        self.loop = DeviceLoop(LocalTree(self.tree), self.nodes, self.files, device.fileno(), ours)
        stream: Any = self.tree.create(USER, self.tree.root, "s", 0o644)
        self.fh = self.files.add(stream, self.tree.open(USER, stream, os.O_RDWR), True, True)

    def ask(self, opcode: int, unique: int, body: bytes, uid: int = 0, node: int = 1) -> None:
        size = protocol.IN_HEADER + len(body)
        self.kernel.send(protocol.HEADER.pack(size, opcode, unique, node, uid, 0, os.getpid()) + bytes(4) + body)

    def read(self, unique: int, fh: int, flags: int = 0, uid: int = 0) -> None:
        where = protocol.U64.pack(fh) + bytes(8) + protocol.U32.pack(100)
        owner = protocol.U32.pack(protocol.READ_LOCKOWNER) + bytes(8)
        self.ask(protocol.READ, unique, where + owner + protocol.U64.pack(flags), uid)

    async def reply(self) -> tuple[int, int, bytes]:
        """(unique, errno, the rest)"""
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(self.kernel)
        reply = self.kernel.recv(1 << 20)
        _, number, unique = protocol.REPLY.unpack_from(reply)
        return unique, -number, reply[protocol.OUT_HEADER :]


def gone(*_: object) -> int:
    """A reply to a request whose caller was killed."""
    raise OSError(errno.ENOENT, "gone")


def with_bench(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        bench = Bench()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.loop.requests)
                await check(bench)
                nursery.cancel_scope.cancel()
        finally:
            for end in bench.ends:
                end.close()

    trio.run(run)


def test_an_interrupt_may_overtake_its_request() -> None:
    async def check(bench: Bench) -> None:
        bench.ask(protocol.INTERRUPT, 7, protocol.U64.pack(10))
        bench.read(10, bench.fh)
        assert await bench.reply() == (10, errno.EINTR, b"")
        bench.read(12, bench.fh)
        bench.ask(protocol.INTERRUPT, 13, protocol.U64.pack(12))
        assert await bench.reply() == (12, errno.EINTR, b"")
        assert (bench.tree.waits.used, len(bench.loop.parked.early), len(bench.loop.parked.by_unique)) == (0, 0, 0)

    with_bench(check)


def test_one_user_does_not_take_all_reads_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARKED", 32)

    async def check(bench: Bench) -> None:
        for unique in range(2, 42, 2):
            bench.read(unique, bench.fh, uid=1001)
        for unique in range(34, 42, 2):
            assert await bench.reply() == (unique, errno.ENFILE, b"")
        bench.read(50, bench.fh, uid=1002)
        await trio.testing.wait_all_tasks_blocked()
        assert (len(bench.loop.parked.by_unique), bench.tree.waits.used) == (17, 17)
        bench.ask(protocol.INTERRUPT, 51, protocol.U64.pack(50))
        assert await bench.reply() == (50, errno.EINTR, b"")
        bench.loop.close()
        assert (len(bench.loop.parked.by_unique), bench.tree.waits.used) == (0, 0)

    with_bench(check)


def test_who_may_not_write_asks_for_no_sync() -> None:
    async def check(bench: Bench) -> None:
        node: Any = bench.files.open[bench.fh].node
        other = User(1001, 1001)
        fh = bench.files.add(node, bench.tree.open(other, node, os.O_RDONLY), True, False)
        listing = bench.files.add_listing(Listing(bench.tree, other, bench.tree.root, other.uid))
        for unique, opcode, of, refused in (
            (2, protocol.FSYNC, bench.fh, 0),
            (4, protocol.FSYNC, fh, errno.EACCES),
            (6, protocol.FSYNCDIR, listing, errno.EACCES),
        ):
            bench.ask(opcode, unique, protocol.U64.pack(of) + bytes(8))
            assert await bench.reply() == (unique, refused, b"")

    with_bench(check)


def test_remembered_interrupts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INTERRUPTS", 10)

    async def check(bench: Bench) -> None:
        for i in range(100):
            bench.ask(protocol.INTERRUPT, 1, protocol.U64.pack(1000 + i))
            await trio.testing.wait_all_tasks_blocked()
        assert list(bench.loop.parked.early) == list(range(1090, 1100))

    with_bench(check)


def test_requests_that_mean_nothing_are_refused_and_the_loop_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def check(bench: Bench) -> None:
        bench.ask(9999, 2, b"")
        assert await bench.reply() == (2, errno.ENOSYS, b"")
        bench.read(4, 12345)
        assert await bench.reply() == (4, errno.ESTALE, b"")
        bench.ask(protocol.POLL, 6, protocol.POLL_IN.pack(12345, 1, 0, 1))
        assert await bench.reply() == (6, errno.ESTALE, b"")
        bench.ask(protocol.OPENDIR, 8, bytes(8))
        assert (await bench.reply())[:2] == (8, 0)
        assert caplog.records == []
        node = bench.files.open[bench.fh].node
        bench.files.open[99] = File(node, None, 1, True, True)  # what only a bug could bring about
        bench.read(10, 99)
        assert await bench.reply() == (10, errno.EIO, b"")
        bench.read(12, bench.fh, os.O_NONBLOCK)
        assert await bench.reply() == (12, errno.EAGAIN, b"")

    with_bench(check)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_an_open_whose_caller_is_gone_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply to it is not taken: no one would ever release the handle."""

    async def check(bench: Bench) -> None:
        nodes, files = len(bench.nodes), len(bench.files.open)
        monkeypatch.setattr(bench.loop.device, "writev", gone)
        bench.ask(protocol.CREATE, 20, protocol.CREATE_IN.pack(os.O_RDWR, 0o100644) + b"made\0")
        await trio.testing.wait_all_tasks_blocked()
        made: Any = bench.tree.walk(USER, bench.tree.root, "made")
        assert (len(bench.nodes), len(bench.files.open), bench.tree.open_files.count) == (nodes, files, files)
        bench.ask(protocol.OPEN, 22, protocol.OPEN_IN.pack(os.O_RDONLY), node=bench.nodes.enter(made))
        await trio.testing.wait_all_tasks_blocked()
        assert (len(bench.files.open), bench.tree.open_files.count) == (files, files)

    with_bench(check)


def open_snapshot(bench: Bench, unique: int, uid: int = 0) -> None:
    """Open `.stats`, which is made a row at a time, and here not to its end: no timers run."""
    bench.tree.timers.piece_s = lambda continued: 0.0  # type: ignore[method-assign]
    node = bench.nodes.enter(Meta(bench.tree.root, ".stats"), alone=True)
    bench.ask(protocol.OPEN, unique, protocol.OPEN_IN.pack(os.O_RDONLY), uid, node)


def test_an_open_that_waits_is_interrupted_and_closed() -> None:
    async def check(bench: Bench) -> None:
        files = bench.tree.open_files.count
        open_snapshot(bench, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert (bench.tree.open_files.count, bench.loop.parked.tasks.used) == (files + 1, 1)
        bench.ask(protocol.INTERRUPT, 21, protocol.U64.pack(20))
        assert await bench.reply() == (20, errno.EINTR, b"")
        bench.ask(protocol.INTERRUPT, 23, protocol.U64.pack(22))  # before its request
        open_snapshot(bench, 22)
        assert await bench.reply() == (22, errno.EINTR, b"")
        open_snapshot(bench, 24)
        await trio.testing.wait_all_tasks_blocked()
        bench.loop.close()
        assert await bench.reply() == (24, errno.EINTR, b"")
        assert (bench.tree.open_files.count, len(bench.files.open)) == (files, files)
        assert (bench.loop.parked.tasks.used, len(bench.loop.parked.by_unique)) == (0, 0)

    with_bench(check)


@pytest.mark.parametrize("first", [True, False])
def test_an_open_that_is_soon_done_is_not_interrupted(first: bool) -> None:
    async def check(bench: Bench) -> None:
        if first:
            bench.ask(protocol.INTERRUPT, 21, protocol.U64.pack(20))
        open_snapshot(bench, 20)
        await trio.testing.wait_all_tasks_blocked()
        if not first:
            bench.ask(protocol.INTERRUPT, 21, protocol.U64.pack(20))
            await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ring_timers, bench.tree)
            assert (await bench.reply())[:2] == (20, 0)
            nursery.cancel_scope.cancel()
        assert (bench.loop.parked.tasks.used, len(bench.loop.parked.early)) == (0, 0)

    with_bench(check)


def test_one_user_does_not_take_all_opens_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FUSE_TASKS", 32)

    async def check(bench: Bench) -> None:
        for unique in range(20, 60, 2):
            open_snapshot(bench, unique, uid=1001)
        for _ in range(4):
            assert (await bench.reply())[1:] == (errno.ENFILE, b"")
        open_snapshot(bench, 70, uid=1002)
        bench.ask(protocol.CREATE, 72, protocol.CREATE_IN.pack(os.O_RDWR, 0o100644) + b"made\0")
        assert (await bench.reply())[:2] == (72, 0)
        assert (len(bench.loop.parked.by_unique), bench.loop.parked.tasks.used) == (17, 17)

    with_bench(check)


def test_a_nodeid_is_opened_for_writing_once() -> None:
    tree = Tree(MemoryStore(), SystemClock(), owner=USER)
    stream: Any = tree.create(USER, tree.root, "s", 0o644)
    nodes = Nodes(tree)
    first = nodes.enter(stream, 1)
    assert nodes.enter(stream, 2) == nodes.enter(stream, 3) == first
    nodes.take(first, 1)
    with pytest.raises(Stale):
        nodes.take(first, 2)
    second, third = nodes.enter(stream, 2), nodes.enter(stream, 3)
    assert len({first, second, third}) == 3
    nodes.take(second, 2)
    nodes.take(third, 3)
    assert nodes.enter(stream, 2) not in (first, second, third)
    with pytest.raises(Stale):
        nodes.take(first, 4)
    nodes.take(first, 4)  # opened again by a descriptor: there is no other
    for nodeid, lookups in ((first, 3), (second, 1), (third, 1), (nodes.given, 1)):
        nodes.forget(nodeid, lookups)
    assert len(nodes) == 1


@pytest.mark.parametrize("ack", ["read", "next"])
@pytest.mark.parametrize("waits", [False, True])
def test_what_was_taken_for_a_caller_that_is_gone_is_the_next_readers(
    ack: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is not taken: the handle has it still, and gives it back when it is closed."""

    async def check(bench: Bench) -> None:
        tree = bench.tree
        group: Any = tree.mkdir(USER, tree.root, "g", 0o755)
        ctl = tree.open(USER, Meta(group, "ctl"), os.O_WRONLY)
        ctl.write(f"deliver one\nack {ack}\n".encode())
        stream: Any = tree.create(USER, group, "s", 0o644)
        fh = bench.files.add(stream, tree.open(USER, stream, os.O_RDWR), True, True)
        writer = tree.open(USER, stream, os.O_WRONLY)
        monkeypatch.setattr(bench.loop.device, "writev", gone)
        if not waits:
            writer.write(b"job")
        bench.read(2, fh)
        await trio.testing.wait_all_tasks_blocked()
        if waits:
            writer.write(b"job")
        shown = tree.open(USER, stream, os.O_RDONLY)
        assert shown.read(10) == b""
        bench.files.close(fh)
        assert shown.read(10) == b"job"

    with_bench(check)
