"""The async twins of what a group gives: subscriptions, claims, writers, registrations, workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import anyio

from mqfs.client.async_bridge import Waiter, in_thread, lifted
from mqfs.client.callbacks import Registration
from mqfs.client.delivery import Claim, Claims
from mqfs.client.large import BodyWriter
from mqfs.client.message import Message
from mqfs.client.types import Body, Subscription
from mqfs.client.workers import Worker
from mqfs.errors import MqfsError

AsyncHandler: TypeAlias = Callable[[Message], object]  # a coroutine function, or a plain one


class AsyncSubscription:
    """See `Subscription`; one task at a time."""

    def __init__(self, subscription: Subscription) -> None:
        self.sync = subscription
        self._waiting: Waiter[Message] = Waiter(subscription)

    async def get(self, timeout: float | None = None) -> Message:
        """See `Subscription.get`."""
        return await self._waiting.get(timeout)

    async def interrupt(self) -> None:
        """See `Subscription.interrupt`."""
        await self._waiting.interrupt()

    def lost(self, error: Exception) -> bool:
        """See `Subscription.lost`."""
        return self.sync.lost(error)

    close = lifted(Subscription.close)
    aclose = close

    def __aiter__(self) -> AsyncSubscription:
        return self

    async def __anext__(self) -> Message:
        return await self._waiting.next()

    async def __aenter__(self) -> AsyncSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClaim:
    """See `Claim`. Its block's clean exit acknowledges, an exception is a nack, being cancelled a release."""

    def __init__(self, claim: Claim) -> None:
        self.sync = claim
        self.message, self.deliveries = claim.message, claim.deliveries

    @property
    def settled(self) -> bool:
        return self.sync.settled

    @property
    def sequence(self) -> int:
        return self.sync.sequence

    @property
    def stream(self) -> str:
        return self.message.stream

    @property
    def time_ns(self) -> int:
        return self.message.time_ns

    @property
    def body(self) -> bytes:
        return self.message.body

    @property
    def headers(self) -> Mapping[str, str]:
        return self.message.headers

    @property
    def size(self) -> int:
        return self.message.size

    @property
    def topic(self) -> str:
        return self.message.topic

    def json(self) -> Any:
        """See `Claim.json`; not awaited, as all of the body is there."""
        return self.message.json()

    ack = lifted(Claim.ack)
    nack = lifted(Claim.nack)
    release = lifted(Claim.release)
    dead = lifted(Claim.dead)
    touch = lifted(Claim.touch)

    async def __aenter__(self) -> AsyncClaim:
        self.sync.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            await in_thread(partial(release, self.sync))
        await in_thread(partial(self.sync.__exit__, kind, error, trace))


def release(claim: Claim) -> None:
    """Release a claim, unless it is settled."""
    if not claim.settled:
        with suppress(MqfsError):  # it is requeued already
            claim.release()


class AsyncClaims:
    """See `Claims`; one task at a time claims, any may settle."""

    def __init__(self, claims: Claims) -> None:
        self.sync = claims
        self._waiting: Waiter[Claim] = Waiter(claims)

    async def get(self, timeout: float | None = None) -> AsyncClaim:
        """See `Claims.get`."""
        return AsyncClaim(await self._waiting.get(timeout))

    async def interrupt(self) -> None:
        """See `Claims.interrupt`."""
        await self._waiting.interrupt()

    finish = lifted(Claims.finish)
    close = lifted(Claims.close)

    def __aiter__(self) -> AsyncClaims:
        return self

    async def __anext__(self) -> AsyncClaim:
        return AsyncClaim(await self._waiting.next())


class AsyncWriter:
    """See `BodyWriter`. From an `async with`, of which a clean exit publishes the body."""

    def __init__(self, body: BodyWriter) -> None:
        self.sync = body

    async def write(self, data: Body) -> int:
        """Append to the body."""
        return await in_thread(partial(self.sync.write, data))

    def writable(self) -> bool:
        return True

    close = lifted(BodyWriter.close)
    abort = lifted(BodyWriter.abort)


class AsyncRegistration:
    """See `Registration`."""

    def __init__(self, registration: Registration, handler: AsyncHandler) -> None:
        self.sync, self.patterns, self.handler = registration, registration.patterns, handler

    @property
    def active(self) -> bool:
        return self.sync.active

    unsubscribe = lifted(Registration.unsubscribe)
    join = lifted(Registration.join)


class AsyncWorker:
    """See `Worker`."""

    def __init__(self, worker: Worker) -> None:
        self.sync = worker

    stop = lifted(Worker.stop)
    close = lifted(Worker.close)
    join = lifted(Worker.join)

    async def __aenter__(self) -> AsyncWorker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


__all__ = [
    "AsyncClaim",
    "AsyncClaims",
    "AsyncHandler",
    "AsyncRegistration",
    "AsyncSubscription",
    "AsyncWorker",
    "AsyncWriter",
    "release",
]
