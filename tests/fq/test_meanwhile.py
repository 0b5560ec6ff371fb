"""The tree changes while a step of fq waits: what was looked up before the wait may be another's, or gone."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import NotFound
from mqfs.fq import codec
from mqfs.fq.codec import Message, MessageParser
from mqfs.fq.delivery import Delivery
from mqfs.fq.exchanges import BrokerCounts, Exchange, Exchanges
from mqfs.fq.publishing import Publisher, origin
from mqfs.fq.queues import Queue, QueueOptions, Refused, points
from mqfs.fq.server import FqServer
from mqfs.fq.web import Checkpoints
from mqfs.model import Wait
from mqfs.net.tokens import Tokens
from mqfs.serving.accept import listen
from mqfs.serving.await_step import await_step
from mqfs.serving.fairness import Fairness
from mqfs.serving.stream import SocketStream
from mqfs.store.store import DiskStore
from tests.fq import client
from tests.fq.test_exchanges import joined
from tests.support.eventually import HANG_S, eventually_async
from tests.support.hand import ROOT
from tests.support.queues import Queues
from tests.support.tokens import SECRET, line_of


def write(tree: Tree, exchange: Exchange, name: str, body: bytes) -> None:
    """A message of that stream, which is made."""
    if name not in exchange.group.streams:
        tree.create(ROOT, exchange.group, name, 0o666)
    handle = tree.open(ROOT, tree.walk(ROOT, exchange.group, name), os.O_WRONLY)
    assert handle.write(body) == len(body)
    handle.close()


@contextlib.asynccontextmanager
async def delivered(exchanges: Exchanges, queue: Queue) -> AsyncIterator[Callable[[], Any]]:
    """Deliver to a client that waits; gives how the client receives messages."""
    near, far = socket.socketpair()
    near.setblocking(False)
    channel = SocketStream(near, trio.lowlevel.wait_readable)
    delivery = Delivery(exchanges, ROOT, queue, channel, BrokerCounts(), bytes(4), Fairness().of("one"))
    end, parser = trio.socket.from_stdlib_socket(far), MessageParser(relayed=True)

    async def receive() -> list[Message]:
        found: list[Message] = []
        while not found:
            data = await end.recv(1 << 16)
            assert data
            found = parser.receive(data)
        return found

    with near, end:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(delivery.run)
            await wait_all_tasks_blocked()
            yield receive
            delivery.end(clean=False)


def test_a_stream_that_goes_between_the_claim_and_the_send_takes_only_its_messages_with_it() -> None:
    async def run() -> None:
        exchanges, queue, _ = await joined()
        await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
        exchange = exchanges.find(b"a")
        assert exchange is not None
        async with delivered(exchanges, queue) as receive:
            for name in ("first", "other"):  # for the read that waits; one that another made after it
                write(exchanges.tree, exchange, name, b"gone")
                exchanges.tree.unlink(ROOT, exchange.group, name)
                write(exchanges.tree, exchange, "stays", name.encode())
                (message,) = await receive()
                assert (message.route, message.payload) == (b"stays", name.encode())
                await wait_all_tasks_blocked()

    trio.run(run)


@pytest.mark.parametrize("gone", ["waits", "next"])
def test_a_stream_that_goes_while_its_publisher_waits_takes_no_message_with_it(gone: str) -> None:
    """Batches of two: the third waits for room, the fourth has yet to be made."""
    routes = ["any", "any", "any", "any", "waits", "any", "next", "any"]

    async def run() -> None:
        exchanges, queue, _ = await joined(QueueOptions("mem", private=False, policy="block", backlog=4))
        await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
        group, counts = exchanges.root.groups["a"], BrokerCounts()
        publisher = Publisher(exchanges, ROOT, counts, bytes(4), await_step)
        messages = [Message(b"a", route.encode(), bytes(16), b"%d" % n) for n, route in enumerate(routes)]
        async with trio.open_nursery() as publishing:
            publishing.start_soon(publisher.publish, messages, lambda _: origin(b"me", bytes(4)))
            await wait_all_tasks_blocked()
            assert counts.routed == 4
            if gone in group.streams:
                exchanges.tree.unlink(ROOT, group, gone)
            async with delivered(exchanges, queue) as receive:
                found: list[bytes] = []
                while counts.routed + counts.no_route < len(routes) or len(found) < counts.routed:
                    found += [message.payload for message in await receive()]
        publisher.close()
        assert found == [message.payload for message in messages]

    trio.run(run)


@attrs.define
class SlowDisk:
    """A store on disk whose answers can be held back."""

    path: Path
    held: list[Callable[[], object]] | None = None

    def open(self) -> DiskStore:
        token = trio.lowlevel.current_trio_token()

        def post(call: Callable[[], object]) -> None:
            token.run_sync_soon(lambda: call() if self.held is None else self.held.append(call))

        return DiskStore(str(self.path / "store"), post)

    def hold(self) -> None:
        self.held = []

    def release(self) -> None:
        calls, self.held = self.held or [], None
        for call in calls:
            call()


@contextlib.contextmanager
def on_disk(disk: SlowDisk) -> Any:
    store = disk.open()
    tree = Tree(store, SystemClock(), owner=ROOT)
    try:
        yield tree
    finally:
        disk.release()
        tree.close()
        store.close()


def test_the_group_of_all_exchanges_that_another_just_makes_is_used(tmp_path: Path) -> None:
    async def run() -> None:
        with on_disk(disk := SlowDisk(tmp_path)) as tree:
            disk.hold()
            making = tree.mkdir(ROOT, tree.root, "fq", 0o777)
            assert isinstance(making, Wait)
            exchanges = Exchanges(tree, "fq")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(exchanges.start)
                await wait_all_tasks_blocked()
                disk.release()
            assert exchanges.root is making.result()

    trio.run(run)


async def checkpointed(tree: Tree) -> tuple[Exchanges, Queue, str]:
    """A queue of two exchanges whose changes wait for the disk, and a place in the first."""
    exchanges, queue, _ = await joined(QueueOptions("disk", private=False, permanent=True), tree)
    for name in (b"a", b"b"):
        await exchanges.bind(ROOT, queue, name, b"prefix:", permanent=True)
        await exchanges.command(ROOT, exchanges.root.groups[name.decode()], "sync always")
    group = exchanges.root.groups["a"]
    return exchanges, queue, f"{group.number}:{group.log.end.next - 1}"


def test_a_checkpoint_is_in_all_exchanges_of_its_queue_or_in_none(tmp_path: Path) -> None:
    async def run() -> None:
        with on_disk(disk := SlowDisk(tmp_path)) as tree:
            exchanges, queue, place = await checkpointed(tree)
            checkpoints = Checkpoints(exchanges)
            async with trio.open_nursery() as nursery:
                disk.hold()
                nursery.start_soon(checkpoints.add, ROOT, b"q", b"p", place)
                await wait_all_tasks_blocked()
                nursery.start_soon(checkpoints.remove, ROOT, b"q", b"p")
                await wait_all_tasks_blocked()
                disk.release()
            assert [points(queue, exchange.group.consumers) for exchange in exchanges] == [[], []]

    trio.run(run)


def test_a_checkpoint_of_a_queue_whose_consumer_goes_meanwhile_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        with on_disk(disk := SlowDisk(tmp_path)) as tree:
            exchanges, queue, place = await checkpointed(tree)

            async def add() -> None:
                with pytest.raises(Refused, match=r"^'b' has no consumer of the queue any more$"):
                    await Checkpoints(exchanges).add(ROOT, b"q", b"p", place)

            async with trio.open_nursery() as nursery:
                disk.hold()
                nursery.start_soon(add)
                await wait_all_tasks_blocked()
                group = exchanges.root.groups["b"]
                tree.unlink(ROOT, tree.walk(ROOT, group, ".consumers"), queue.consumer)
                disk.release()

    trio.run(run)


def test_a_bind_that_takes_long_holds_up_no_other_queue(tmp_path: Path) -> None:
    """Two that make one exchange at the same time have one in the end."""

    async def run() -> None:
        with on_disk(disk := SlowDisk(tmp_path)) as tree:
            exchanges, queue, member = await joined(tree=tree)
            await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
            async with trio.open_nursery() as nursery:
                disk.hold()
                nursery.start_soon(exchanges.bind, ROOT, queue, b"a", b"prefix:x", False)
                await wait_all_tasks_blocked()
                with trio.fail_after(HANG_S):
                    await exchanges.join(ROOT, b"other", queue.options, lambda _: member)
                other = exchanges.queues[b"other"]
                nursery.start_soon(exchanges.bind, ROOT, other, b"new", b"prefix:", False)
                nursery.start_soon(exchanges.bind, ROOT, queue, b"new", b"prefix:", False)
                await wait_all_tasks_blocked()
                disk.release()
            made = exchanges.find(b"new")
            assert made is not None
            assert [len([*made.of(one)]) for one in (queue, other)] == [1, 1]

    trio.run(run)


def test_an_exchange_that_takes_long_to_make_holds_up_no_bind_to_another(tmp_path: Path) -> None:
    async def run() -> None:
        with on_disk(disk := SlowDisk(tmp_path)) as tree:
            exchanges, queue, member = await joined(tree=tree)
            await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
            names = [b"1", b"2"]
            for name in names:
                await exchanges.join(ROOT, name, queue.options, lambda _: member)
            async with trio.open_nursery() as nursery:
                disk.hold()
                for name in names:
                    nursery.start_soon(exchanges.bind, ROOT, exchanges.queues[name], name, b"prefix:", False)
                await wait_all_tasks_blocked()
                nursery.start_soon(exchanges.bind, ROOT, queue, b"a", b"prefix:x", False)
                await wait_all_tasks_blocked()
                making = [tree.is_making(exchanges.root, name.decode()) for name in names]
                bound = exchanges.find(b"a")
                routes = len(bound.bindings) if bound is not None else 0
                disk.release()
            assert (making, routes) == ([True, True], 2)

    trio.run(run)


def test_a_bind_whose_consumer_goes_with_a_reader_meanwhile_can_be_asked_again(tmp_path: Path) -> None:
    async def run() -> None:
        with on_disk(disk := SlowDisk(tmp_path)) as tree:
            exchanges, queue, _ = await joined(tree=tree)
            group: Any = await await_step(tree.mkdir(ROOT, exchanges.root, "a", 0o777))

            async def bind() -> None:
                with pytest.raises(NotFound, match="'q': removed with its last reader"):
                    await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)

            async with trio.open_nursery() as nursery:
                disk.hold()
                nursery.start_soon(bind)
                await wait_all_tasks_blocked()
                tree.open(ROOT, group.consumers["q"], os.O_RDWR).close()
                disk.release()
            assert not queue.exchanges
            assert await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
            assert list(queue.holds) == [exchanges.find(b"a")]

    trio.run(run)


def test_a_client_that_goes_in_the_moment_in_which_the_server_stops(caplog: pytest.LogCaptureFixture) -> None:
    """It is no failure, of the server or of its connection. Whichever of both is first is left to chance."""

    async def run() -> None:
        listener = listen("tcp!127.0.0.1!0")
        server = FqServer(Queues().tree, group="fq", node=bytes(4), tcp_user="root")
        server.add(listener)
        near, far = socket.socketpair()
        with near, far:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                name = listener.socket.getsockname()
                one = await trio.to_thread.run_sync(partial(client.Client, name, "q", with_data=False))
                one.commands.sendall(20_000 * codec.status())
                await wait_all_tasks_blocked(0.02)  # the server waits for room for its answers
                far.send(b"x")
                one.commands.close()  # it resets the connection, as there are answers that it has not read
                await trio.lowlevel.wait_readable(near)
                await server.stop()

    for _ in range(20):
        trio.run(run)
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize("now", ["", line_of("root", SECRET, "read")], ids=["revoked", "changed"])
def test_a_token_that_is_revoked_while_its_client_waits_to_join_is_not_in_force(tmp_path: Path, now: str) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(line_of("root", SECRET))

    async def run() -> None:
        tokens, listener = Tokens(str(file)), listen("tcp!127.0.0.1!0")
        server = FqServer(Queues().tree, group="fq", node=bytes(4), tokens=tokens)
        server.add(listener)

        def join() -> None:
            with pytest.raises(client.Refused):
                client.Client(listener.socket.getsockname(), "q", user="root", password=SECRET, with_data=False)

        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            changing = server.exchanges.changing(b"q")
            async with trio.open_nursery() as joining:
                await changing.acquire()
                joining.start_soon(trio.to_thread.run_sync, join)
                await eventually_async(lambda: changing.statistics().tasks_waiting == 1)
                file.write_text(now)
                tokens.replace(tokens.read())
                changing.release()
            assert not server.exchanges.queues
            await server.stop()

    trio.run(run)
