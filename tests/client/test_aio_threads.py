"""Readers of an async program that wait have no threads: a thousand of them need a handful, over every transport."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import anyio
import pytest

import mqfs
from mqfs import aio, errors, ring
from mqfs.client.aio import AsyncClient, AsyncSubscription
from mqfs.client.subscription import CursorSubscription
from tests.client.opening import Opening
from tests.support.campaign import seed
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, short_folder

READERS = 1_000
THREADS = 10


@pytest.fixture(
    params=[pytest.param("9p", marks=pytest.mark.process), pytest.param("ring", marks=pytest.mark.process), "inside"]
)
def any_opening(request: pytest.FixtureRequest, tmp_path: Path) -> Opening:
    if request.param == "inside":
        return partial(aio.open, tmp_path / "store")
    if request.param == "ring" and ring.MISSING:
        pytest.skip(ring.MISSING)
    shared: Server = request.getfixturevalue("shared")
    return partial(aio.connect, shared.address, transport="auto" if request.param == "ring" else request.param)


class Threads:
    """The most threads that this process had, beyond those before."""

    def __init__(self) -> None:
        self.before, self.most = threading.active_count() - 1, 0

    def look(self) -> None:
        self.most = max(self.most, threading.active_count() - self.before)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 20])
def test_a_thousand_subscriptions_have_ten_threads(any_opening: Opening, name: str, groups: int) -> None:
    async def main() -> None:
        threads = Threads()
        async with any_opening() as client:
            opened = [await client.group(f"{name}/{n}", create=True, ctl=["sync off"]) for n in range(groups)]
            for group in opened:
                await group.create("s")
            subscriptions = await asyncio.gather(*(opened[n % groups].subscribe() for n in range(READERS)))
            threads.look()
            got = 0

            async def read(messages: AsyncSubscription) -> None:
                nonlocal got
                async for message in messages:
                    threads.look()
                    got += 1
                    if message.body == b"end":
                        return

            tasks = [asyncio.create_task(read(messages)) for messages in subscriptions]
            for body in "first", "second", "end":
                before = got
                for group in opened:
                    await group.publish("s", body)
                while got < before + READERS:
                    threads.look()
                    await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            await asyncio.gather(*(messages.close() for messages in subscriptions))
            threads.look()
        assert got == 3 * READERS
        assert threads.most <= THREADS

    asyncio.run(asyncio.wait_for(main(), HANG_S))


@pytest.mark.slow
def test_many_handles_share_the_messages_of_a_consumer(opening: Opening, name: str) -> None:
    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["sync off", "replay all"])
            handles = await asyncio.gather(*(group.consume("c") for _ in range(200)))
            bodies: list[bytes] = []

            async def work(claims: aio.AsyncClaims) -> None:
                async with claims:
                    async for claim in claims:
                        async with claim:
                            bodies.append(claim.body)

            async with asyncio.TaskGroup() as tasks:
                for claims in handles:
                    tasks.create_task(work(claims))
                await group.publish_many([("s", str(number)) for number in range(300)])
                while len(bodies) < 300:
                    await asyncio.sleep(0.01)
                for claims in handles:
                    await claims.finish()
            assert sorted(map(int, bodies)) == list(range(300))
            assert (await group.consumer("c").lag()) == 0

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_an_opening_call_is_awaited_entered_or_iterated(any_opening: Opening, name: str, backend: str) -> None:
    async def main() -> None:
        client = await any_opening()
        async with client:
            group = await client.group(name, create=True, settings=mqfs.Settings(replay="all"))
            await group.publish_many([("s", b"1"), ("s", b"2")])
            async with group.subscribe(existing=True) as messages:
                assert (await messages.get(HANG_S)).body == b"1"
            async with await group.subscribe(existing=True) as messages:
                assert (await messages.get(HANG_S)).body == b"1"
            assert [message.body async for message in group.history()] == [b"1", b"2"]
            messages = await group.history(last=1)
            assert [message.body async for message in messages] == [b"1"]
            await messages.close()
            async for claim in group.consume("c"):
                async with claim:
                    assert claim.body == b"1"
                break
            async with await group.consume("d") as claims, await claims.get(HANG_S) as claim:
                assert claim.body == b"1"
            async with await group.writer("s") as body:
                await body.write(b"3")
            assert (await group.get(3)).body == b"3"
        with pytest.raises(errors.Disconnected):
            await group.publish("s", b"x")
        async with any_opening() as again:
            assert await again.group(name)

    anyio.run(main, backend=backend)


def test_a_wait_that_times_out_or_is_cancelled_holds_no_message(opening: Opening, name: str, backend: str) -> None:
    """A later message goes to a handle that waits, not to one that has waited."""

    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            async with group.consume("c") as first, group.consume("c") as second:
                with pytest.raises(TimeoutError, match=r"no message in 0\.01 s"):
                    await first.get(0.01)
                with anyio.move_on_after(0.01):
                    await first.get()
                await group.publish("s", b"1")
                async with await second.get(HANG_S) as claim:
                    assert (claim.body, claim.deliveries) == (b"1", 1)
            async with group.subscribe() as messages:
                with anyio.move_on_after(0.01):
                    await messages.get()
                await group.publish("s", b"2")
                assert (await messages.get(HANG_S)).body == b"2"

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("size", [1, 1_000_000], ids=["short", "in pieces"])
def test_what_no_task_has_waited_for_is_released(tree: mqfs.Client, name: str, size: int, release: bool) -> None:
    """A message that came when its handle was closed is redelivered, and never counts as failed."""
    group = tree.group(name, create=True, ctl=["replay all"])
    came = threading.Event()
    claims = group.consume("c")
    claims._when_ready(came.set)
    group.publish("s", b"\xff" * size)
    assert came.wait(HANG_S)
    claims.close(release)
    with group.consume("c") as claims:
        assert claims.get(HANG_S).deliveries == 1


def test_a_closed_subscription_begins_no_read(tree: mqfs.Client, name: str) -> None:
    """Its task may look at it after another has closed it: the next file has its number."""
    group = tree.group(name, create=True)
    was_called = threading.Event()
    closed = CursorSubscription(group._link, group.path, "s", start="end")
    closed.close()
    with CursorSubscription(group._link, group.path, "#", start="end") as messages:
        closed._file.when_ready(was_called.set)
        assert was_called.is_set()
        group.publish("s", b"x")
        assert messages.get(HANG_S).body == b"x"


def test_interrupt_and_close_end_a_wait(any_opening: Opening, name: str, backend: str) -> None:
    async def main() -> None:
        async with any_opening() as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            async with group.subscribe() as messages, group.consume("c") as claims:
                for source in messages, claims:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(expect, source, errors.Interrupted)
                        await anyio.wait_all_tasks_blocked()
                        await source.interrupt()
                    await source.interrupt()
                    await expect(source, errors.Interrupted)
                await group.publish("s", b"x")
                assert (await messages.get(HANG_S)).body == (await claims.get(HANG_S)).body == b"x"
                for source in messages, claims:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(expect, source, EOFError)
                        await anyio.wait_all_tasks_blocked()
                        await source.close()

    async def expect(source: AsyncSubscription | aio.AsyncClaims, error: type[Exception]) -> None:
        with pytest.raises(error):
            await source.get(HANG_S)

    anyio.run(main, backend=backend)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["9p", "auto"])
def test_readers_wait_for_a_server_that_goes_away(transport: str, backend: str) -> None:
    async def main(server: Server) -> None:
        async with aio.connect(server.address, transport=transport) as client:
            group = await client.group("g", create=True, ctl=["replay all"])
            await group.create("s")
            async with anyio.create_task_group() as tasks:
                got: list[bytes] = []

                async def read(messages: AsyncSubscription) -> None:
                    async for message in messages:
                        got.append(message.body)
                        if message.body == b"after":
                            return

                for _ in range(20):
                    tasks.start_soon(read, await group.subscribe())
                await group.publish("s", b"before")
                while got.count(b"before") < 20:
                    await anyio.sleep(0.01)
                await anyio.to_thread.run_sync(server.kill)
                await anyio.to_thread.run_sync(server.start)
                while True:
                    try:
                        await group.publish("s", b"after", id="after")
                        break
                    except errors.Disconnected:  # the first call after the loss
                        continue
            assert got.count(b"after") == 20
            assert got.count(b"before") == 20

    with short_folder() as folder, Server.at(folder) as server:
        anyio.run(main, server, backend=backend)


@pytest.mark.process
@pytest.mark.parametrize("transport", ["9p", "auto"])
def test_readers_of_a_server_that_is_away_hold_up_no_others(transport: str, backend: str) -> None:
    """More readers than the client has threads wait for their server; others obey their limits all the same."""

    async def main(server: Server) -> None:
        async with aio.connect(server.address, transport=transport) as client:
            group = await client.group("g", create=True, ctl=["replay all"])
            await group.publish_many([("s", b"0")])
            readers = [await group.subscribe() for _ in range(4)]
            claims = [await group.consume(f"c{number}") for number in range(4)]
            brief, limited = await group.subscribe(), await group.subscribe(reconnect=False)
            got: list[bytes] = []

            async def read(source: AsyncSubscription | aio.AsyncClaims) -> None:
                item = await source.get()
                while item.body != b"after":
                    item = await source.get()
                got.append(item.body)

            async with anyio.create_task_group() as tasks:
                for source in [*readers, *claims]:
                    tasks.start_soon(read, source)
                await anyio.wait_all_tasks_blocked()
                await anyio.to_thread.run_sync(server.kill)
                for _ in range(3):
                    with pytest.raises(TimeoutError, match="no message in"):
                        await brief.get(0.0)
                    with pytest.raises(errors.Disconnected):
                        await limited.get()
                await brief.interrupt()
                with pytest.raises(errors.Interrupted):
                    await brief.get()
                await anyio.to_thread.run_sync(server.start)
                with server.connect() as other:
                    other.group("g").publish("s", b"after")
                assert (await brief.get()).body == b"after"
            assert len(got) == 8

    with short_folder() as folder, Server.at(folder) as server:
        anyio.run(partial(bounded, partial(main, server)), backend=backend)


@pytest.mark.slow
def test_waits_that_are_cancelled_lose_and_repeat_nothing(any_opening: Opening, name: str, backend: str) -> None:
    """Subscriptions and handles whose waits end at any moment, beside a publisher."""
    count, dice = 500, Random(seed())

    async def reading(source: AsyncSubscription | aio.AsyncClaims, got: list[int], total: list[int]) -> None:
        while len(total) < count:
            with suppress(TimeoutError), anyio.move_on_after(dice.random() * 0.004):
                while len(total) < count:
                    item = await source.get(dice.choice([None, None, 0.001]))
                    if isinstance(item, aio.AsyncClaim):
                        assert item.deliveries == 1
                        await item.ack()
                    got.append(int(item.body))

    async def publishing(group: aio.AsyncGroup) -> None:
        number = 0
        while number < count:
            several = min(dice.choice([1, 1, 1, 5, 50]), count - number)
            await group.publish_many([("s", str(number + more)) for more in range(several)])
            number += several
            await anyio.sleep(dice.random() * 0.002)

    async def main() -> None:
        async with any_opening() as client:
            group = await client.group(name, create=True, ctl=["replay all", "sync off"])
            await group.create("s")
            got: list[list[int]] = [[] for _ in range(5)]
            claimed: list[int] = []
            async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
                for each in got:
                    tasks.start_soon(reading, await stack.enter_async_context(group.subscribe("s")), each, each)
                for _ in range(3):
                    claims = await stack.enter_async_context(group.consume("c"))
                    tasks.start_soon(reading, claims, claimed, claimed)
                tasks.start_soon(publishing, group)
            assert got == [[*range(count)]] * 5
            assert sorted(claimed) == [*range(count)]

    anyio.run(bounded, main, backend=backend)


async def bounded(main: Callable[[], Awaitable[None]]) -> None:
    """Fail where it hangs."""
    with anyio.fail_after(HANG_S):
        await main()


@pytest.mark.parametrize("single", ["", "s", "#"], ids=["work", "single", "pattern"])
def test_a_worker_whose_event_loop_has_ended_counts_no_delivery_as_failed(
    opening: Opening, name: str, backend: str, single: str
) -> None:
    """Its client was not closed, and its threads are the program's: they claim nothing more."""
    before, clients = {*threading.enumerate()}, []

    async def main() -> None:
        client = await cast("Awaitable[AsyncClient]", opening())
        clients.append(client)
        group = await client.group(name, create=True, ctl=["replay all", "retries 1"])
        await group.create("s")
        await (group.on(single, print, single=True) if single else group.work("w", print))

    def workers() -> list[threading.Thread]:
        own = ("_run)", "listener", "streams")
        return [t for t in threading.enumerate() if t not in before and any(word in t.name for word in own)]

    anyio.run(main, backend=backend)
    with clients[0].sync as client:
        group = client.group(name)
        assert workers()
        for number in range(3):
            group.publish("s", str(number), single=bool(single))
        eventually(lambda: not workers(), "the end of the threads")
        with group.take("s") if single else group.consume("w") as claims:
            assert [(claim.body, claim.deliveries) for claim in (claims.get(HANG_S) for _ in range(3))] == [
                (b"0", 1), (b"1", 1), (b"2", 1),
            ]  # fmt: skip
        assert list(group.history(pattern="dead")) == []
