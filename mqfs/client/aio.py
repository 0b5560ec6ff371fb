"""The library for async programs of trio and asyncio: name for name the same calls, awaited.

Owns the async groups and clients. Each call runs its sync twin in a thread, a waiting one for as long as it waits.
Cancelling a wait interrupts it and loses no message; other calls are short and run to their end. Handlers run in the
event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial, wraps
from typing import Concatenate, ParamSpec
from weakref import WeakSet

import anyio

from mqfs.client import client as sync
from mqfs.client.async_bridge import InLoop, Loop, in_thread, lifted
from mqfs.client.async_handles import (
    AsyncClaim,
    AsyncClaims,
    AsyncHandler,
    AsyncRegistration,
    AsyncSubscription,
    AsyncWorker,
    AsyncWriter,
    release,
)
from mqfs.client.delivery import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.message import Message
from mqfs.client.types import Duration, Filters, Patterns, Subscription
from mqfs.client.workers import Worker

P = ParamSpec("P")


def opened(
    method: Callable[Concatenate[Group, P], Subscription],
) -> Callable[Concatenate[AsyncGroup, P], Awaitable[AsyncSubscription]]:
    """The async twin of a method of a group that subscribes."""

    @wraps(method)
    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncSubscription:
        return AsyncSubscription(await in_thread(partial(method, self.sync, *args, **kwargs)))

    return call


class AsyncGroup:
    """See `Group`."""

    def __init__(self, group: Group, loop: Loop, workers: WeakSet[Worker]) -> None:
        """`workers`: that are stopped with the client."""
        self.sync, self.path, self.filters = group, group.path, group.filters
        self._loop, self._workers = loop, workers

    publish = lifted(Group.publish)
    publish_json = lifted(Group.publish_json)
    publish_many = lifted(Group.publish_many)
    streams = lifted(Group.streams)
    groups = lifted(Group.groups)
    consumers = lifted(Group.consumers)
    stats = lifted(Group.stats)
    settings = lifted(Group.settings)
    ctl = lifted(Group.ctl)
    bind = lifted(Group.bind)
    unbind = lifted(Group.unbind)
    redrive = lifted(Group.redrive)
    purge = lifted(Group.purge)
    create = lifted(Group.create)
    remove = lifted(Group.remove)
    remove_consumer = lifted(Group.remove_consumer)
    close = lifted(Group.close)
    subscribe = opened(Group.subscribe)
    history = opened(Group.history)

    @asynccontextmanager
    async def writer(
        self,
        stream: str,
        *,
        ttl: Duration | None = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        id: str = "",
        create: bool = True,
    ) -> AsyncIterator[AsyncWriter]:
        """See `Group.writer`; an exception, and being cancelled, drops the body."""
        body = await in_thread(
            partial(self.sync.writer, stream, ttl=ttl, priority=priority, headers=headers, id=id, create=create)
        )
        try:
            yield AsyncWriter(body)
        except BaseException as error:
            await in_thread(partial(body.__exit__, type(error), error, error.__traceback__))
            raise
        await in_thread(body.close)

    async def on(
        self,
        pattern: Patterns,
        handler: AsyncHandler,
        *,
        existing: bool = False,
        filters: Filters = (),
        concurrency: int = 1,
        once: bool = False,
        dedup: bool = True,
        single: bool = False,
        on_error: Callable[[Exception, Message | None], object] | None = None,
    ) -> AsyncRegistration:
        """See `Group.on`."""
        report = None if on_error is None else InLoop(self._loop, on_error)
        call = partial(
            self.sync.on, pattern, InLoop(self._loop, handler),
            existing=existing, filters=filters, concurrency=concurrency, once=once, dedup=dedup, single=single,
            on_error=report,
        )  # fmt: skip
        return AsyncRegistration(await in_thread(call), handler)

    async def once(
        self, pattern: Patterns, handler: AsyncHandler, *, existing: bool = False, filters: Filters = ()
    ) -> AsyncRegistration:
        """See `Group.once`."""
        return await self.on(pattern, handler, existing=existing, filters=filters, once=True)

    async def unsubscribe(self, pattern: Patterns | None = None, handler: AsyncHandler | None = None) -> int:
        """See `Group.unsubscribe`."""
        of = None if handler is None else InLoop(self._loop, handler)
        return await in_thread(partial(self.sync.unsubscribe, pattern, of))

    def consume(
        self,
        consumer: str,
        *,
        over: str = "",
        pattern: Patterns = "#",
        private: bool = False,
        transient: bool = False,
        create: bool = True,
        renew: bool = False,
        reconnect: bool | float | None = None,
    ) -> AbstractAsyncContextManager[AsyncClaims]:
        """See `Group.consume`; always in an `async with`."""
        return _claiming(
            partial(
                self.sync.consume, consumer, over=over, pattern=pattern, private=private, transient=transient,
                create=create, renew=renew, reconnect=reconnect,
            )
        )  # fmt: skip

    def take(
        self, stream: str, *, create: bool = False, renew: bool = False, reconnect: bool | float | None = None
    ) -> AbstractAsyncContextManager[AsyncClaims]:
        """See `Group.take`; always in an `async with`."""
        return _claiming(partial(self.sync.take, stream, create=create, renew=renew, reconnect=reconnect))

    async def work(
        self,
        consumer: str,
        handler: Callable[[AsyncClaim], object],
        *,
        concurrency: int = 1,
        over: str = "",
        renew: bool = False,
    ) -> AsyncWorker:
        """See `Group.work`. The end of the client stops the worker; a cancelled handler releases its
        claim."""

        def run(claim: Claim) -> None:
            if not self._loop.call(handler, AsyncClaim(claim)):
                release(claim)

        call = partial(self.sync.work, consumer, run, concurrency=concurrency, over=over, renew=renew)
        worker = await in_thread(call)
        self._workers.add(worker)
        return AsyncWorker(worker)


@asynccontextmanager
async def _claiming(make: Callable[[], Claims]) -> AsyncIterator[AsyncClaims]:
    claims = await in_thread(make)
    clean = False
    try:
        yield AsyncClaims(claims)
        clean = True
    except anyio.get_cancelled_exc_class():
        clean = True
        raise
    finally:
        await in_thread(partial(claims.close, release=clean))


class AsyncClient:
    """See `Client`."""

    def __init__(self, client: sync.Client) -> None:
        self.sync, self._loop = client, Loop()
        self._workers: WeakSet[Worker] = WeakSet()

    async def group(
        self, path: str = "", *, create: bool = False, ctl: Sequence[str] = (), escape: bool = False
    ) -> AsyncGroup:
        """See `Client.group`."""
        group = await in_thread(partial(self.sync.group, path, create=create, ctl=ctl, escape=escape))
        return AsyncGroup(group, self._loop, self._workers)

    remove_group = lifted(sync.Client.remove_group)

    async def close(self) -> None:
        """See `Client.close`. Stops the workers."""
        for worker in list(self._workers):
            await in_thread(worker.stop)
        await in_thread(self.sync.close)

    def cancel_handlers(self) -> None:
        """Cancel the handlers under way, and those to come."""
        self._loop.cancel()


def opening(make: Callable[P, sync.Client]) -> Callable[P, AbstractAsyncContextManager[AsyncClient]]:
    """The async twin of `mqfs.connect` or `mqfs.open`, for an `async with`. An exception cancels the handlers."""

    @asynccontextmanager
    @wraps(make)
    async def client(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[AsyncClient]:
        made = AsyncClient(await in_thread(partial(make, *args, **kwargs)))
        try:
            yield made
        except BaseException:
            made.cancel_handlers()
            raise
        finally:
            await made.close()

    return client


connect = opening(sync.connect)
open = opening(sync.open)
AsyncReading = AsyncSubscription  # its name in version 0.1
