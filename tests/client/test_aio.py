"""The library under trio and asyncio: the same over both transports, and what cancelling does."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import anyio
import anyio.abc
import pytest

from mqfs import Message, aio, errors
from mqfs.client import Client
from mqfs.client.aio import AsyncGroup
from tests.client.opening import Opening
from tests.support.eventually import eventually
from tests.support.server import Server


def test_publish_subscribe_and_history(opening: Opening, name: str, backend: str) -> None:
    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            got: list[Message] = []

            async def read() -> None:
                async with await group.subscribe("a.*") as messages:
                    begun.set()
                    async for message in messages:
                        got.append(message)
                        if len(got) == 3:
                            return

            async with anyio.create_task_group() as nursery:
                begun = anyio.Event()
                nursery.start_soon(read)
                await begun.wait()
                assert (await group.publish("a.b", b"1")).sequence
                await group.publish_many([("c", b"no"), ("a.b", b"2"), ("a.c", b"3")])
            assert [message.body for message in got] == [b"1", b"2", b"3"]
            async with await group.history() as history:
                assert [message.body async for message in history] == [b"1", b"no", b"2", b"3"]
            assert await group.streams() == ["a.b", "a.c", "c"]
            with pytest.raises(errors.BadCommand):
                await group.ctl("nonsense")

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("kind", ["consume", "take"])
def test_what_asyncio_cancels_while_it_is_opened_is_closed(
    server: Server, name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Not by the collection of garbage: until then a private consumer was busy."""
    gc.disable()
    request.addfinalizer(gc.enable)

    async def use(group: AsyncGroup, number: int) -> None:
        async with (
            group.consume(f"c{number}", private=True) if kind == "consume" else group.take(f"s{number}") as claims
        ):
            await claims.get()

    def handles(client: Client) -> int:
        stats = client.group(name).stats()
        found = [*stats.consumers.values(), *(stream.consumer for stream in stats.streams.values())]
        return sum(consumer.handles for consumer in found if consumer is not None)

    async def main() -> None:
        async with aio.connect(server.address, transport="9p") as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            for number in range(60):
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(use(group, number), 0.0002 * (number % 25))
            with server.connect() as other:
                await asyncio.to_thread(eventually, lambda: handles(other) == 0)

    asyncio.run(main())


def test_cancelling_loses_nothing(opening: Opening, name: str, backend: str) -> None:
    async def publish(group: AsyncGroup) -> None:
        for number in range(200):
            await group.publish("s", str(number))

    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all", "sync off"])
            got: list[int] = []
            async with await group.subscribe() as messages, anyio.create_task_group() as nursery:
                nursery.start_soon(publish, group)
                while len(got) < 200:
                    with anyio.move_on_after(0.001):
                        while len(got) < 200:
                            got.append(int((await messages.get()).body))
            assert got == list(range(200))

    anyio.run(main, backend=backend)


def test_many_wait_and_the_loop_goes_on(opening: Opening, name: str, backend: str) -> None:
    """More readers than the threads trio allows by default."""

    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["sync off"])
            done = []

            async def read(*, task_status: anyio.abc.TaskStatus[None]) -> None:
                async with await group.subscribe() as messages:
                    task_status.started()
                    done.append((await messages.get()).body)

            async with anyio.create_task_group() as nursery:
                for _ in range(60):
                    await nursery.start(read)
                await group.publish("s", b"x")
            assert done == [b"x"] * 60

    anyio.run(main, backend=backend)


def test_consuming(opening: Opening, name: str, backend: str) -> None:
    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all", "backoff 1ms 1ms"])
            await group.publish_many([("s", b"1"), ("s", b"2")])
            async with group.consume("c") as claims:
                claim = await claims.get()
                with pytest.raises(ZeroDivisionError):
                    async with claim:
                        1 / 0  # noqa: B018
                seen = {}
                async for claim in claims:
                    async with claim:
                        seen[claim.body] = claim.deliveries
                    if len(seen) == 2:
                        break
                assert seen == {b"1": 2, b"2": 1}
                with anyio.move_on_after(0.01) as waited:
                    await claims.get()
                assert waited.cancelled_caught
                await group.publish("s", b"3")
                with anyio.CancelScope() as scope:
                    async with await claims.get() as claim:
                        scope.cancel()
                        await anyio.sleep_forever()
                again = await claims.get()  # released, not counted
                assert (again.body, again.deliveries) == (b"3", 1)
                await again.ack()
            assert (await group.stats()).consumers["c"].waiting == 0

    anyio.run(main, backend=backend)


def test_a_wait_with_a_deadline_of_asyncio(opening: Opening, name: str) -> None:
    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            async with await group.subscribe() as messages:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(messages.get(), 0.01)
                waiting = asyncio.ensure_future(messages.get())
                await group.publish("s", b"1")
                assert (await asyncio.wait_for(waiting, 20)).body == b"1"

    asyncio.run(main())


@pytest.mark.slow
def test_a_body_of_any_size(opening: Opening, name: str, backend: str) -> None:
    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all", "sync off"])
            async with group.writer("s", headers={"of": "bytes"}) as body:
                for number in range(30):
                    await body.write(bytes([number]) * 100_000)

            async def fail() -> None:
                async with group.writer("s") as body:
                    await body.write(b"half")
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail()
            with anyio.CancelScope() as scope:
                async with group.writer("s") as body:
                    await body.write(b"half")
                    scope.cancel()
                    await anyio.sleep_forever()
            async with await group.history() as history:
                found = [message async for message in history]
            assert [len(message.body) for message in found] == [3_000_000]
            assert found[0].body[-100_001:] == bytes([28]) + bytes([29]) * 100_000

    anyio.run(main, backend=backend)
