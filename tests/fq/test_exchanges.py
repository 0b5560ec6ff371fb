"""Changes of queues that fail half-way: what is left is as before, so that they can be asked again."""

from __future__ import annotations

import contextlib
from time import process_time
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from mqfs.clock import SystemClock
from mqfs.engine.group import Group
from mqfs.engine.language.programs import parse
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadStore, OverLimit
from mqfs.fq.codec import Message
from mqfs.fq.exchanges import SETTINGS, Binding, BrokerCounts, Exchange, Exchanges
from mqfs.fq.publishing import Publisher, origin
from mqfs.fq.queues import Queue, QueueOptions
from mqfs.model import User
from mqfs.serving.await_step import await_step
from mqfs.store.store import DiskStore
from tests.store.script import PATH
from tests.support.hand import ROOT
from tests.support.lying_disk import RecordingDisk
from tests.support.queues import Queues


@attrs.define
class Client:
    """A member of a queue."""

    bound: list[Exchange] = attrs.Factory(list)

    def on_bound(self, exchange: Exchange) -> None:
        self.bound.append(exchange)


MEM = QueueOptions("mem", private=False)


async def joined(options: QueueOptions = MEM, tree: Tree | None = None) -> tuple[Exchanges, Queue, Client]:
    """A queue with a client."""
    client = Client()
    exchanges = Exchanges(tree or Queues().tree, "fq")
    await exchanges.start()
    await exchanges.join(ROOT, b"q", options, lambda _: client)
    return exchanges, exchanges.queues[b"q"], client


def test_a_change_of_permanence_that_failed_is_made_when_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        exchanges, queue, client = await joined()
        for name in (b"a", b"b"):
            await exchanges.bind(ROOT, queue, name, b"prefix:", permanent=False)
        real, asked = Exchanges.command, []

        async def refuse_second(it: Exchanges, user: User, group: Group, *lines: str) -> None:
            asked.append(group)
            if len(asked) == 2:
                raise OverLimit("no more files")
            await real(it, user, group, *lines)

        monkeypatch.setattr(Exchanges, "command", refuse_second)
        options = QueueOptions("mem", private=False, permanent=True)
        with pytest.raises(OverLimit):
            await exchanges.join(ROOT, b"q", options, lambda _: client)
        await exchanges.join(ROOT, b"q", options, lambda _: client)
        consumers = [exchange.consumer(queue) for exchange in exchanges]
        assert [consumer.state.transient for consumer in consumers] == [False, False]
        assert (queue.permanent, queue.holds) == (True, {})

    trio.run(run)


def test_a_binding_that_could_not_be_held_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        exchanges, queue, client = await joined()
        with monkeypatch.context() as patched:

            def refuse(*_: object) -> None:
                raise OverLimit("no more files")

            patched.setattr(Exchanges, "_hold", refuse)
            with pytest.raises(OverLimit):
                await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
        exchange = exchanges.find(b"a")
        assert isinstance(exchange, Exchange)
        assert (exchange.bindings, queue.exchanges, exchange.consumer(queue), client.bound) == ({}, set(), None, [])
        assert not list(exchange.group.views.values())
        await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
        assert (client.bound, [*queue.holds]) == ([exchange], [exchange])

    trio.run(run)


def test_a_client_that_joins_while_the_last_one_leaves_has_a_queue() -> None:
    """Also where its last exchange is removed in that time."""

    async def run() -> None:
        exchanges, queue, client = await joined()
        await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)
        (exchange,) = exchanges
        async with trio.open_nursery() as nursery, exchanges.changing(b"q"):
            nursery.start_soon(exchanges.join, ROOT, b"q", MEM, lambda _: later)
            await trio.testing.wait_all_tasks_blocked()
            queue.members.remove(client)
            nursery.start_soon(exchanges.leave, queue)
            await trio.testing.wait_all_tasks_blocked()
            await await_step(exchanges.tree.rmdir(ROOT, exchange.group.parent, "a"))
            assert not list(exchanges)
        assert exchanges.queues[b"q"].members == [later]

    later = Client()
    trio.run(run)


def test_an_exchange_whose_making_was_cut_short_has_its_settings() -> None:
    """Wherever the server was killed, or the power was cut."""
    disk = RecordingDisk()

    async def bind() -> None:
        tree = Tree(DiskStore(PATH, disk=disk), SystemClock(), owner=ROOT)
        exchanges, queue, _ = await joined(tree=tree)
        await exchanges.bind(ROOT, queue, b"a", b"prefix:", permanent=False)

    trio.run(bind)
    found = 0
    for left in disk.left:
        with contextlib.suppress(BadStore):  # there is no store yet
            tree = Tree(DiskStore(PATH, disk=left), SystemClock(), owner=ROOT)
            if (group := dict(tree.root.groups).get("fq")) is not None and (made := group.groups.get("a")) is not None:
                assert set(SETTINGS) <= set(made.settings.lines())
                found += 1
    assert found


def test_refusals_of_a_full_stream_open_no_file_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        exchanges, queue, _ = await joined()
        await exchanges.bind(ROOT, queue, b"e", b"prefix:", permanent=False)
        exchange = exchanges.find(b"e")
        assert exchange is not None
        await exchanges.command(ROOT, exchange.group, "full reject", "depth 1")
        real, opened = Tree.open, []

        def count(it: Tree, user: User, node: Any, flags: int, **more: bool) -> Any:
            opened.append(node.name)
            return real(it, user, node, flags, **more)

        monkeypatch.setattr(Tree, "open", count)
        publisher = Publisher(exchanges, ROOT, counts := BrokerCounts(), bytes(4), await_step)
        sent = [Message(b"e", b"r", bytes(16), b"%d" % number) for number in range(100)]
        await publisher.publish(sent, lambda _: origin(b"me", bytes(4)))
        publisher.close()
        assert (counts.routed, counts.no_route) == (1, 99)
        assert opened.count(".batch") == 1

    trio.run(run)


def cycle_s(count: int) -> float:
    """CPU seconds to bind a queue to that many programs, beside another, and to remove it; the least of some runs."""
    group, times = Group.__new__(Group), []
    for _ in range(3):
        exchange = Exchange(group)
        queues = [Queue(name, 0, MEM) for name in (b"stays", b"goes")]
        programs = [parse(f"prefix:{n}") for n in range(count)]
        began = process_time()
        for route, program in enumerate(programs):
            for queue in queues:
                assert program.text not in exchange.of(queue)
                exchange.enter(Binding(2 * route + queues.index(queue), queue, program.text, program, True, 0))
        for binding in list(exchange.of(queues[1]).values()):
            exchange.leave(binding.route)
        times.append(process_time() - began)
        assert len(exchange.bindings) == count
    return min(times)


def test_a_queue_of_many_programs_costs_no_more_for_each() -> None:
    assert cycle_s(8_000) < 20 * cycle_s(1_000)
