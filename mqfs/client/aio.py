"""`mqfs.aio`: the library for async programs of trio and asyncio, name for name the same calls, awaited.

Each call runs its sync twin in a thread, a waiting one for as long as it waits. Cancelling a wait interrupts it and
loses no message; other calls are short and run to their end. Handlers run in the event loop.

    await group.publish(...)  ->  thread: Group.publish         shielded from being cancelled
    async for m in s          ->  thread: Subscription.get      cancelled: Subscription.interrupt; its message is kept
    await group.on(...)       ->  thread of the dispatcher      ->  event loop: the handler
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakSet

import anyio
import anyio.from_thread
import anyio.lowlevel
import attrs

from mqfs.client import client as sync
from mqfs.client.callbacks import Handler, OnError, Registration, Worker
from mqfs.client.delivery import Claim, Claims, OfMessage
from mqfs.client.group import Group
from mqfs.client.info import Consumer, Settings
from mqfs.client.large import BodyWriter
from mqfs.client.message import Message
from mqfs.client.types import Body, Patterns, Subscription
from mqfs.errors import Interrupted, MqfsError

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call to its end, also if cancelled."""
    limiter = anyio.CapacityLimiter(1)  # one a call: any number may wait
    with anyio.CancelScope(shield=True):
        value = await anyio.to_thread.run_sync(call, limiter=limiter)
    return value


def lifted(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """The async twin of a method of `self.sync`."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(partial(method, self.sync, *args, **kwargs))

    return call


class Loop:
    """The event loop of a client, in which threads of the library run handlers."""

    def __init__(self) -> None:
        self._token = anyio.lowlevel.current_token()
        self._scopes: set[anyio.CancelScope] = set()
        self._cancelled = False

    def call(self, handler: Callable[..., object], *args: object) -> bool:
        """Run a handler, from a thread. False: it was cancelled. Raises what the handler does."""
        return anyio.from_thread.run(self._call, handler, *args, token=self._token)

    async def _call(self, handler: Callable[..., object], *args: object) -> bool:
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self._cancelled:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                result = handler(*args)
                if inspect.isawaitable(result):
                    await result
            finally:
                self._scopes.discard(scope)
        return not scope.cancelled_caught

    def cancel(self) -> None:
        """Cancel the handlers under way, and those to come."""
        self._cancelled = True
        for scope in list(self._scopes):
            scope.cancel()


@attrs.frozen
class InLoop:
    """A handler for the sync library. Equal for the same handler, which is registered once."""

    loop: Loop
    handler: Callable[..., object]

    @property
    def shown(self) -> Callable[..., object]:
        """For filters of the group."""
        return self.handler

    def __call__(self, *args: object) -> None:
        self.loop.call(self.handler, *args)


class _Source(Protocol[T_co]):
    """The common part of subscriptions and claims."""

    def get(self, timeout: float | None = None) -> T_co: ...

    def interrupt(self) -> None: ...


class Waiter(Generic[T]):
    """Wait for the items of a source, one task at a time."""

    def __init__(self, source: _Source[T]) -> None:
        self._source = source
        self._ready: deque[T] = deque()  # received by a wait that was cancelled
        self._interrupt_requested = False  # `interrupt` was called, and no `get` has raised it yet

    async def get(self, timeout: float | None = None) -> T:
        """The next item. Being cancelled interrupts the wait; an item that arrives all the same is kept."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            await self._wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return self._ready.popleft()

    async def next(self) -> T:
        try:
            return await self.get()
        except EOFError:
            raise StopAsyncIteration from None

    async def interrupt(self) -> None:
        self._interrupt_requested = True
        await in_thread(self._source.interrupt)

    async def _wait(self, timeout: float | None) -> None:
        ended = anyio.Event()
        failed: list[BaseException] = []

        async def work() -> None:
            try:
                self._ready.append(await in_thread(partial(self._source.get, timeout)))
            except Interrupted as error:
                if self._interrupt_requested:  # else by a cancelled wait, this one or one before it
                    self._interrupt_requested = False
                    failed.append(error)
            except BaseException as error:
                failed.append(error)
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            try:
                await ended.wait()
            except BaseException:
                # In a thread, as it may wait for a lock.
                threading.Thread(target=self._source.interrupt, name="mqfs-interrupt", daemon=True).start()
                with anyio.CancelScope(shield=True):
                    await ended.wait()
                raise
        for error in failed:
            raise error


# ------------------------------------------------------------ subscriptions, claims, registrations

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


class AsyncClaim(OfMessage):
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

    @property
    def name(self) -> str:
        """See `Claims.name`."""
        return self.sync.name

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


# ------------------------------------------------------------ groups and clients

Opened: TypeAlias = Callable[Concatenate["AsyncGroup", P], Awaitable[AsyncSubscription]]
Entered: TypeAlias = Callable[Concatenate["AsyncGroup", P], AbstractAsyncContextManager[T]]
Registered: TypeAlias = Callable[Concatenate["AsyncGroup", Patterns, AsyncHandler, P], Awaitable[AsyncRegistration]]


def opened(method: Callable[Concatenate[Group, P], Subscription]) -> Opened[P]:
    """The async twin of a method of a group that subscribes."""

    @wraps(method)
    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncSubscription:
        return AsyncSubscription(await in_thread(partial(method, self.sync, *args, **kwargs)))

    return call


def claiming(method: Callable[Concatenate[Group, P], Claims]) -> Entered[P, AsyncClaims]:
    """The async twin of a method of a group that claims; always in an `async with`."""

    @asynccontextmanager
    @wraps(method)
    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[AsyncClaims]:
        claims = await in_thread(partial(method, self.sync, *args, **kwargs))
        clean = False
        try:
            yield AsyncClaims(claims)
            clean = True
        except anyio.get_cancelled_exc_class():
            clean = True
            raise
        finally:
            await in_thread(partial(claims.close, release=clean))

    return call


def writing(method: Callable[Concatenate[Group, P], BodyWriter]) -> Entered[P, AsyncWriter]:
    """The async twin of `Group.writer`; an exception, and being cancelled, drops the body."""

    @asynccontextmanager
    @wraps(method)
    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[AsyncWriter]:
        body = await in_thread(partial(method, self.sync, *args, **kwargs))
        try:
            yield AsyncWriter(body)
        except BaseException as error:
            await in_thread(partial(body.__exit__, type(error), error, error.__traceback__))
            raise
        await in_thread(body.close)

    return call


def registering(method: Callable[Concatenate[Group, Patterns, Handler, P], Registration]) -> Registered[P]:
    """The async twin of a method of a group that registers a handler, which is called in the event loop."""

    @wraps(method)
    async def call(
        self: AsyncGroup, /, pattern: Patterns, handler: AsyncHandler, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncRegistration:
        if kwargs.get("on_error") is not None:
            kwargs["on_error"] = InLoop(self._loop, kwargs["on_error"])  # type: ignore[arg-type]
        run = partial(method, self.sync, pattern, InLoop(self._loop, handler), *args, **kwargs)
        return AsyncRegistration(await in_thread(run), handler)

    return cast("Registered[P]", call)  # both may be given by name, which Concatenate cannot say


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
    get = lifted(Group.get)
    close = lifted(Group.close)
    subscribe = opened(Group.subscribe)
    history = opened(Group.history)
    consume = claiming(Group.consume)
    take = claiming(Group.take)
    writer = writing(Group.writer)
    on = registering(Group.on)
    once = registering(Group.once)

    def consumer(self, name: str) -> AsyncConsumer:
        """Look at a consumer, and move it.

        Args:
            name: Its name. It need not be there yet.

        Returns:
            The consumer.

        Raises:
            BadName: The name is not one of a consumer.
        """
        return AsyncConsumer(self.sync.consumer(name))

    async def unsubscribe(self, pattern: Patterns | None = None, handler: AsyncHandler | None = None) -> int:
        """See `Group.unsubscribe`."""
        of = None if handler is None else InLoop(self._loop, handler)
        return await in_thread(partial(self.sync.unsubscribe, pattern, of))

    async def work(
        self,
        consumer: str,
        handler: Callable[[AsyncClaim], object],
        *,
        concurrency: int = 1,
        over: str = "",
        renew: bool = False,
        on_error: Callable[[Exception, Message | None], object] | None = None,
    ) -> AsyncWorker:
        """See `Group.work`. The end of the client stops the worker; a cancelled handler releases its
        claim."""

        def run(claim: Claim) -> None:
            if not self._loop.call(handler, AsyncClaim(claim)):
                release(claim)

        report = None if on_error is None else cast("OnError", InLoop(self._loop, on_error))
        options = {"concurrency": concurrency, "over": over, "renew": renew}
        worker = await in_thread(partial(self.sync.work, consumer, run, on_error=report, **options))  # type: ignore[arg-type]
        self._workers.add(worker)
        return AsyncWorker(worker)


class AsyncConsumer:
    """See `Consumer`."""

    def __init__(self, consumer: Consumer) -> None:
        self.sync, self.name = consumer, consumer.name

    info = lifted(Consumer.info)
    lag = lifted(Consumer.lag)
    seek = lifted(Consumer.seek)


class AsyncClient:
    """See `Client`."""

    def __init__(self, client: sync.Client) -> None:
        self.sync, self._loop = client, Loop()
        self._workers: WeakSet[Worker] = WeakSet()

    async def group(
        self,
        path: str = "",
        *,
        create: bool = False,
        settings: Settings | None = None,
        ctl: Sequence[str] = (),
        escape: bool = False,
    ) -> AsyncGroup:
        """Open a group: see `Client.group`.

        Args:
            path: Its path from the root. Empty: the root.
            create: Whether it, and those above it, are made where they are missing.
            settings: Settings to change. None: none.
            ctl: More lines to write to its ctl.
            escape: Whether any text is the name of a stream.

        Returns:
            The group.

        Raises:
            NotFound: It is missing.
            BadCommand: A setting is invalid.
        """
        make = partial(self.sync.group, path, create=create, settings=settings, ctl=ctl, escape=escape)
        return AsyncGroup(await in_thread(make), self._loop, self._workers)

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


__all__ = [
    "AsyncClaim", "AsyncClaims", "AsyncClient", "AsyncConsumer", "AsyncGroup", "AsyncRegistration",
    "AsyncSubscription", "AsyncWorker", "AsyncWriter", "connect", "open",
]  # fmt: skip
