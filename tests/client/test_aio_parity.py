"""The async library has every call of the sync one, with the same parameters, and the calls behave the same."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import mqfs
from mqfs import Message, errors
from mqfs import client as sync
from mqfs.client import aio
from mqfs.client.aio import AsyncClaim, AsyncClient
from mqfs.client.large import BodyWriter
from tests.client.opening import Opening
from tests.support.eventually import HANG_S

PAIRS = [
    (sync.Client, aio.AsyncClient),
    (sync.Group, aio.AsyncGroup),
    (sync.Subscription, aio.AsyncSubscription),
    (sync.Claims, aio.AsyncClaims),
    (sync.Claim, aio.AsyncClaim),
    (sync.Registration, aio.AsyncRegistration),
    (sync.Worker, aio.AsyncWorker),
    (sync.Consumer, aio.AsyncConsumer),
    (BodyWriter, aio.AsyncWriter),
]


def calls(of: type) -> dict[str, Any]:
    """Public methods and properties, those of the standard library's bases aside."""
    classes = [base for base in of.__mro__ if base.__module__.startswith("mqfs.")]
    names = {name for base in classes for name in vars(base) if not name.startswith("_")}
    return {name: getattr(of, name) for name in names}


def parameters(call: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize(("twin", "ours"), PAIRS, ids=[twin.__name__ for twin, _ in PAIRS])
def test_every_call_has_its_async_twin(twin: type, ours: type) -> None:
    for name, call in calls(twin).items():
        assert hasattr(ours, name), name
        if callable(call):
            assert parameters(getattr(ours, name)) == parameters(call), name
        else:
            assert isinstance(getattr(ours, name), property), name


@pytest.mark.parametrize("name", ["connect", "open"])
def test_clients_are_opened_with_the_same_parameters(name: str) -> None:
    assert parameters(getattr(aio, name)) == parameters(getattr(mqfs, name))


def run(main: Callable[[AsyncClient], Any], opening: Opening, backend: str) -> None:
    """Run a story with a client, and fail where it hangs."""

    async def whole() -> None:
        with anyio.fail_after(HANG_S):
            async with opening() as client:
                await main(client)

    anyio.run(whole, backend=backend)


async def until(count: int, items: list[Any], changed: list[anyio.Event]) -> None:
    """Wait until there are `count` items; each that is appended sets the event."""
    while len(items) < count:
        changed[0] = anyio.Event()
        if len(items) < count:
            await changed[0].wait()


class Collector:
    """A coroutine function that collects what it is called with."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._changed = [anyio.Event()]

    async def __call__(self, item: Any, *more: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.items.append((item, *more) if more else item)
        self._changed[0].set()

    async def wait(self, count: int) -> list[Any]:
        await until(count, self.items, self._changed)
        return self.items


def test_on_calls_coroutines_in_order_and_unsubscribe_ends_them(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        await group.publish("s", b"0")
        handler = Collector()
        registration = await group.on("s", handler, existing=True)
        assert (
            await group.on("s", handler, existing=True) is not registration
        )  # another object of the same registration
        assert (registration.active, registration.patterns, registration.handler) == (True, ("s",), handler)
        await group.publish_many([("s", b"1"), ("t", b"no"), ("s", b"2")])
        assert [message.body for message in await handler.wait(3)] == [b"0", b"1", b"2"]
        assert await group.unsubscribe("s", handler) == 1
        await registration.join()
        assert not registration.active
        await group.publish("s", b"3")
        assert len(handler.items) == 3

    run(main, opening, backend)


def test_once_and_plain_handlers(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        await group.publish_many([("s", b"1"), ("s", b"2")])
        seen: list[Message] = []
        registration = await group.once("s", seen.append, existing=True)
        await registration.join(HANG_S)
        assert not registration.active
        assert [message.body for message in seen] == [b"1"]

    run(main, opening, backend)


def test_a_handler_ends_its_own_registration(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        ended = anyio.Event()

        async def handler(message: Message) -> None:
            assert await group.unsubscribe("s") == 1
            ended.set()

        registration = await group.on("s", handler)
        await group.publish("s", b"1")
        await ended.wait()
        await registration.join(HANG_S)
        assert not registration.active

    run(main, opening, backend)


def test_on_error_gets_what_a_coroutine_raises(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])

        async def fail(message: Message) -> None:
            raise ZeroDivisionError(message.body.decode())

        failures = Collector()
        registration = await group.on("s", fail, on_error=failures)
        await group.publish_many([("s", b"1"), ("s", b"2")])
        assert [(str(error), message.body) for error, message in await failures.wait(2)] == [("1", b"1"), ("2", b"2")]
        await registration.unsubscribe()

    run(main, opening, backend)


@pytest.mark.parametrize("how", ["on", "single", "work"])
def test_a_handler_that_awaits_a_cancelled_task_has_failed(opening: Opening, name: str, how: str) -> None:
    """It was not cancelled itself: it is called again."""

    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all", "retries 1"])
        await group.create("s")
        got, failures = Collector(), Collector()

        async def handle(item: Message | AsyncClaim) -> None:
            if item.body == b"bad":
                task = asyncio.ensure_future(anyio.sleep_forever())
                task.cancel()
                await task
            await got(item.body)

        if how == "work":
            worker = await group.work("w", handle, over="s", on_error=failures)
        else:
            registration = await group.on("s", handle, single=how == "single", on_error=failures)
        for body in "1", "bad", "2":
            await group.publish("s", body, single=how == "single")
        assert await got.wait(2) == [b"1", b"2"]
        [(error, message)] = await failures.wait(1)
        assert (str(error), message.body) == ("the handler awaited a task that was cancelled", b"bad")
        await (worker.stop() if how == "work" else registration.unsubscribe())

    run(main, opening, "asyncio")


def test_work_acknowledges_what_returns_and_requeues_what_raises(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all", "backoff 1ms 1ms"])
        await group.publish_many([("s", b"good"), ("s", b"bad")])
        done = Collector()

        async def handler(claim: AsyncClaim) -> None:
            assert (claim.stream, claim.settled) == ("s", False)
            assert claim.sequence == claim.message.sequence
            if claim.body == b"bad" and claim.deliveries == 1:
                raise ZeroDivisionError
            await done((claim.body, claim.deliveries))

        async with await group.work("w", handler, concurrency=2) as worker:
            assert sorted(await done.wait(2)) == [(b"bad", 2), (b"good", 1)]
        await worker.join(HANG_S)
        assert (await group.stats()).consumers["w"].waiting == 0

    run(main, opening, backend)


def test_a_worker_stopped_by_its_handler_ends(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        stopped = anyio.Event()

        async def handler(claim: AsyncClaim) -> None:
            await started.wait()
            await worker.stop()
            stopped.set()

        started = anyio.Event()
        worker = await group.work("w", handler)
        started.set()
        await group.publish("s", b"1")
        await stopped.wait()
        await worker.join(HANG_S)

    run(main, opening, backend)


def test_the_end_of_the_client_cancels_handlers_and_releases_their_claims(
    opening: Opening, name: str, backend: str
) -> None:
    async def whole() -> None:
        with anyio.fail_after(HANG_S):
            with pytest.raises(KeyError):
                await fail()
            async with opening() as client:
                group = await client.group(name)
                for taking in group.consume("w"), group.take("job"):
                    async with taking as claims:
                        assert (await claims.get()).deliveries == 1

    async def fail() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            begun = Collector()

            async def forever(item: object) -> None:
                await begun(item)
                await anyio.sleep_forever()

            await group.on("s", forever)
            await group.work("w", forever, over="s")
            await group.on("job", forever, single=True)
            await group.publish("s", b"1")
            await group.publish("job", b"1", single=True)
            await begun.wait(3)
            raise KeyError

    anyio.run(whole, backend=backend)


def test_get_with_a_timeout(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        await group.create("s")
        async with await group.subscribe() as messages, group.consume("c") as claims:
            with pytest.raises(TimeoutError):
                await messages.get(0.01)
            with pytest.raises(TimeoutError):
                await claims.get(timeout=0.01)
            await group.publish("s", b"1")
            assert (await messages.get(HANG_S)).body == b"1"
            claim = await claims.get(HANG_S)
            assert (claim.body, claim.time_ns) == (b"1", claim.message.time_ns)
            await claim.ack()
            assert claim.settled

    run(main, opening, backend)


def test_interrupt_ends_a_wait_and_loses_nothing(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        await group.create("s")
        async with await group.subscribe() as messages, group.consume("c") as claims:
            for waiting in messages, claims:
                await waiting.interrupt()
                with pytest.raises(errors.Interrupted):
                    await waiting.get()
            await group.publish("s", b"1")
            assert (await messages.get()).body == (await claims.get()).body == b"1"
            assert not messages.lost(errors.FellBehind("x"))
            assert messages.lost(errors.Denied("x"))

    run(main, opening, backend)


def test_finish_and_close_of_claims(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all", "backoff 1ms 1ms"])
        await group.publish("s", b"1")
        async with group.consume("c") as claims:
            claim = await claims.get()
            await claims.finish()
            with pytest.raises(EOFError):
                await claims.get()
            await claim.ack()
        async with group.consume("d") as claims:
            await claims.get()
            await claims.close()  # released, not counted
        async with group.consume("d") as claims:
            assert (await claims.get()).deliveries == 1
            await claims.close(release=False)
        async with group.consume("d") as claims:
            assert (await claims.get()).deliveries == 2

    run(main, opening, backend)


def test_a_close_raises_why_an_acknowledgement_failed_that_a_cancelled_get_was_told(
    opening: Opening, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all", "lease 30ms"])
        await group.publish("s", b"x")
        claims = await group.consume("w")
        async with group.consume("w") as others:
            claim = await claims.get()
            await others.get()
            async with claim:
                pass
            with anyio.CancelScope() as scope:
                monkeypatch.setattr(claims.sync, "_when_ready", lambda call: scope.cancel())
                await claims.get()
            with pytest.raises(errors.Stale, match="ack of 1 claims failed"):
                await claims.close()

    run(main, opening, backend)


def test_consume_and_take_have_all_options(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        await group.publish_many([("a.b", b"1"), ("a.c", b"2")])
        async with group.consume("c", pattern="a.c", reconnect=False) as claims:
            assert (await claims.get()).body == b"2"
        with pytest.raises(errors.NotFound):
            async with group.consume("missing", create=False):
                pass
        await group.publish("a.b", b"one", single=True)
        async with group.take("a.b", reconnect=False) as claims:
            assert (await claims.get()).body == b"one"

    run(main, opening, backend)


def test_a_writer_is_aborted_or_closed_early(opening: Opening, name: str, backend: str) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True, ctl=["replay all"])
        async with group.writer("s") as body:
            assert body.writable()
            await body.write(b"no")
            await body.abort()
        async with group.writer("s") as body:
            await body.write(b"yes")
            await body.close()
            async with await group.history() as history:
                assert [message.body async for message in history] == [b"yes"]

    run(main, opening, backend)


def test_close_of_a_group_ends_its_handlers_and_close_of_a_client_all(
    opening: Opening, name: str, backend: str
) -> None:
    async def main(client: AsyncClient) -> None:
        group = await client.group(name, create=True)
        assert group.path == name
        registration = await group.on("s", Collector())
        await group.close()
        assert not registration.active
        await client.close()
        with pytest.raises(errors.Disconnected):
            await group.publish("s", b"x")

    run(main, opening, backend)


@pytest.mark.slow
def test_handlers_run_in_the_loop(opening: Opening, name: str) -> None:
    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all"])
            loops: asyncio.Queue[asyncio.AbstractEventLoop] = asyncio.Queue()
            await group.on("s", lambda message: loops.put_nowait(asyncio.get_running_loop()))
            await group.publish("s", b"1")
            assert await asyncio.wait_for(loops.get(), HANG_S) is asyncio.get_running_loop()

    asyncio.run(main())
