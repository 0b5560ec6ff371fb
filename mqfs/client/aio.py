"""`mqfs.aio`: the library for async programs of trio and asyncio, with the same calls by the same names.

A short call runs its sync twin in a thread. A waiting reader has none: its source (the receiver of a 9P connection, or
a watcher for all rings) calls back when a message has arrived. One of a few threads, shared by the client's readers,
then gets the message. Cancelling a wait loses no message; other calls run to their end. Handlers run in the event loop.

    await group.publish(...)  ->  thread: Group.publish         shielded from being cancelled
    async for m in s          ->  Subscription._when_ready       the receiver or the watcher calls back into the loop
                              ->  thread: Subscription.get(0)   cancelled before: its message is kept for the next
    await group.on(...)       ->  thread of the dispatcher      ->  event loop: the handler
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from math import inf
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload
from weakref import WeakSet

import anyio
import anyio.from_thread
import anyio.lowlevel
import attrs

from mqfs.client import client as sync
from mqfs.client.callbacks import Handler, HandlerGone, OnError, Registration, Worker
from mqfs.client.delivery import Claim, Claims, OfMessage
from mqfs.client.group import Group
from mqfs.client.info import Consumer, Settings
from mqfs.client.large import BodyWriter
from mqfs.client.message import Message
from mqfs.client.types import Body, Patterns, Subscription
from mqfs.client.waiting import Waiting
from mqfs.errors import Disconnected, Interrupted, MqfsError

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)

READERS, CLOSERS = 4, 2  # threads of a client that open readers and get messages, and that close readers
FETCHED = 256  # messages got at once, if a transport has received them together


async def in_thread(call: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Run a call to its end, also if cancelled. `limiter`: for calls that hold up no others; None: any number run."""
    with anyio.CancelScope(shield=True):
        value = await anyio.to_thread.run_sync(call, limiter=limiter or anyio.CapacityLimiter(1))
    return value


async def open_in_thread(open: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Run a call that opens something. If asyncio itself cancels the task, which no shield stops, the opened object is
    closed, as no caller has it."""
    opened = Future[Any]()

    def run() -> T:
        try:
            found = open()
        except BaseException as error:
            opened.set_exception(error)
            raise
        opened.set_result(found)
        return found

    try:
        return await in_thread(run, limiter)
    except BaseException:
        opened.add_done_callback(lambda _: threading.Thread(target=close_unwanted, args=(opened,), daemon=True).start())
        raise


def close_unwanted(opened: Future[Any]) -> None:
    if opened.exception() is None:
        found = opened.result()
        with suppress(MqfsError):
            (found.abort if isinstance(found, BodyWriter) else found.close)()


def lifted(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """Return the async twin of a method of `self.sync`."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(partial(method, self.sync, *args, **kwargs))

    return call


def like(twin: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator that copies the docstring of the sync twin."""

    def documented(method: F) -> F:
        method.__doc__ = twin.__doc__
        return method

    return documented


class Loop:
    """The event loop of a client, in which threads of the library run handlers."""

    def __init__(self) -> None:
        self._token = anyio.lowlevel.current_token()
        native: Any = getattr(self._token, "native_token", self._token)  # trio's token, or the loop of asyncio
        self._soon = getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe
        self._scopes: set[anyio.CancelScope] = set()
        self._cancelled = False
        self.readers = anyio.CapacityLimiter(READERS)
        self.closers = anyio.CapacityLimiter(CLOSERS)  # separate: readers may all wait for a server until closed

    def soon(self, call: Callable[[], object]) -> None:
        """Run a call in the loop, from any thread, without waiting."""
        with suppress(RuntimeError):  # the loop has ended
            self._soon(call)

    def call(self, handler: Callable[..., object], *args: object) -> None:
        """Run a handler, from a thread. Raises the handler's errors, and HandlerGone if it was cancelled or the loop
        has ended."""
        begun: list[bool] = []
        try:
            anyio.from_thread.run(self._call, begun, handler, *args, token=self._token)
        except RuntimeError as error:
            if begun:  # the handler's error
                raise
            raise HandlerGone("the event loop has ended (expected the client to be closed before)") from error

    async def _call(self, begun: list[bool], handler: Callable[..., object], *args: object) -> None:
        begun.append(True)
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self._cancelled:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                result = handler(*args)
                if inspect.isawaitable(result):
                    await result
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if scope.cancel_called or task is None or task.cancelling():
                    raise
                raise RuntimeError("the handler awaited a task that was cancelled") from error
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise HandlerGone("the handler was cancelled")

    def cancel(self) -> None:
        """Cancel running and later handlers."""
        self._cancelled = True
        for scope in list(self._scopes):
            scope.cancel()


@attrs.frozen
class InLoop:
    """A handler for the sync library. Objects of the same handler are equal, so that it is registered once."""

    loop: Loop
    handler: Callable[..., object]

    @property
    def shown(self) -> Callable[..., object]:
        """The handler as filters of the group see it."""
        return self.handler

    def __call__(self, *args: object) -> None:
        self.loop.call(self.handler, *args)


class Waiter(Generic[T]):
    """The async wait for the items of a source, by one task at a time."""

    def __init__(self, source: Waiting[T], loop: Loop, most: int = FETCHED) -> None:
        """`most`: items received at once."""
        self._source, self._loop, self._most = source, loop, most
        self._ready: deque[T | Exception] = deque()  # received, not returned or raised yet

    async def get(self, timeout: float | None = None) -> T:
        """Return the next item. Cancelling ends the wait; an item that arrives all the same is kept for the next."""
        await anyio.lowlevel.checkpoint()
        deadline = inf if timeout is None else time.monotonic() + timeout
        while not self._ready:
            await self._wait(deadline)
            if not self._ready and time.monotonic() >= deadline:
                raise TimeoutError(f"no message in {timeout or 0:g} s")
        item = self._ready.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    async def next(self) -> T:
        try:
            return await self.get()
        except EOFError:
            raise StopAsyncIteration from None
        except Disconnected:
            if self._source._closed.is_set():
                raise StopAsyncIteration from None
            raise

    async def interrupt(self) -> None:
        await in_thread(self._source.interrupt)

    @property
    def is_empty(self) -> bool:
        """Whether all received items were returned."""
        return not self._ready

    def clear(self) -> list[T | Exception]:
        """Drop and return the received items and errors, as the source is being closed."""
        items = [*self._ready]
        self._ready.clear()
        return items

    async def _wait(self, deadline: float) -> None:
        """Wait until an item has arrived, or the deadline; then read."""
        arrived = anyio.Event()
        after_s, timeout_s = inf, 0.0
        try:
            after_s, timeout_s = self._source._when_ready(partial(self._loop.soon, arrived.set)) or (inf, 0.0)
        except MqfsError:
            arrived.set()  # `get` raises it, or reconnects
        until = min(deadline, time.monotonic() + after_s)
        try:
            with anyio.move_on_after(until - time.monotonic() if until < inf else None):
                await arrived.wait()
        except BaseException:
            await self._read(0.0)  # cancel the begun read, or keep the item that answered it
            raise
        await self._read(0.0 if arrived.is_set() else timeout_s)

    async def _read(self, timeout: float) -> None:
        await in_thread(partial(self._fetch, timeout), self._loop.readers)

    def _fetch(self, timeout: float) -> None:
        """Get the present items, on a thread; an error is queued after the items before it."""
        try:
            self._ready.append(self._source.get(timeout))
            while self._source._has_next() and len(self._ready) < self._most:
                self._ready.append(self._source.get(0.0))
        except TimeoutError:
            pass
        except Exception as error:
            self._ready.append(error)


# ------------------------------------------------------------ subscriptions, claims, registrations

AsyncHandler: TypeAlias = Callable[[Message], object]  # a coroutine function, or a plain one


class AsyncSubscription:
    """See `Subscription`; one task at a time."""

    def __init__(self, subscription: Subscription, loop: Loop) -> None:
        self.sync, self._loop = subscription, loop
        self._waiting: Waiter[Message] = Waiter(cast("Waiting[Message]", subscription), loop)

    @like(Subscription.get)
    async def get(self, timeout: float | None = None) -> Message:
        return await self._waiting.get(timeout)

    @like(Subscription.interrupt)
    async def interrupt(self) -> None:
        await self._waiting.interrupt()

    @like(Subscription.lost)
    def lost(self, error: Exception) -> bool:
        return self.sync.lost(error)

    async def close(self) -> None:
        """Close the subscription; it ends for a waiting task, too."""
        self._waiting.clear()
        await in_thread(self.sync.close, self._loop.closers)

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
    """See `Claim`. A clean exit of its block acknowledges, an exception is a nack, being cancelled a release."""

    def __init__(self, claim: Claim) -> None:
        self.sync = claim
        self.message, self.deliveries = claim.message, claim.deliveries

    @property
    def settled(self) -> bool:
        """Whether the message was acknowledged, requeued, or made a dead letter."""
        return self.sync.settled

    @property
    def sequence(self) -> int:
        """The sequence of the claim; for a body in parts, the last part's."""
        return self.sync.sequence

    ack = lifted(Claim.ack)
    nack = lifted(Claim.nack)
    release = lifted(Claim.release)
    dead = lifted(Claim.dead)
    touch = lifted(Claim.touch)

    async def __aenter__(self) -> AsyncClaim:
        self.sync.__enter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            await in_thread(partial(release, self.sync))
        if error is None and self.sync._is_acked_later:
            self.sync.__exit__(kind, error, trace)
        else:
            await in_thread(partial(self.sync.__exit__, kind, error, trace))


def release(claim: Claim) -> None:
    """Release a claim, unless it is settled."""
    if not claim.settled:
        with suppress(MqfsError):  # the server has requeued it already
            claim.release()


class AsyncClaims:
    """See `Claims`. One task at a time may claim, any may settle."""

    def __init__(self, claims: Claims, loop: Loop) -> None:
        self.sync, self._loop = claims, loop
        self._waiting: Waiter[Claim] = Waiter(claims, loop, 1)  # `claims` has the prefetched ones

    @like(Claims.get)
    async def get(self, timeout: float | None = None) -> AsyncClaim:
        if (claim := await self._next_ahead()) is not None:
            return claim
        return AsyncClaim(await self._waiting.get(timeout))

    async def _next_ahead(self) -> AsyncClaim | None:
        if not self._waiting.is_empty or (claim := self.sync._next_ahead()) is None:
            return None
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            self.sync._give_back(claim)
            raise
        return AsyncClaim(claim)

    @like(Claims.interrupt)
    async def interrupt(self) -> None:
        await self._waiting.interrupt()

    @property
    def name(self) -> str:
        """The consumer's name; for a stream's default consumer, `.` and the stream."""
        return self.sync.name

    @property
    def renew_s(self) -> float:
        """Seconds after which `async with claim:` renews its claim, by the last known lease. 0: never."""
        return self.sync.renew_s

    finish = lifted(Claims.finish)

    async def close(self, release: bool = True) -> None:
        """Close the handle; a waiting task gets the end.

        Args:
            release: Whether open claims are requeued uncounted; else they count as failed.

        Raises:
            Stale: A claim was lost before its block ended; the message is redelivered.
        """
        failures: list[MqfsError] = []
        for item in self._waiting.clear():
            if isinstance(item, Claim):
                self.sync._give_back(item)
            elif isinstance(item, MqfsError) and not isinstance(item, Disconnected | Interrupted):
                failures.append(item)  # of an acknowledgement; a cancelled `get` could not raise it
        await in_thread(partial(self.sync.close, release), self._loop.closers)
        self._waiting.clear()
        if release and failures:
            raise failures[0]

    def __aiter__(self) -> AsyncClaims:
        return self

    async def __anext__(self) -> AsyncClaim:
        if (claim := await self._next_ahead()) is not None:
            return claim
        return AsyncClaim(await self._waiting.next())

    async def __aenter__(self) -> AsyncClaims:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        released = error is None or isinstance(error, anyio.get_cancelled_exc_class())
        await self.close(released)


class AsyncWriter:
    """See `BodyWriter`. The clean exit of an `async with` publishes the body; an exception drops it."""

    def __init__(self, body: BodyWriter, _: Loop) -> None:
        self.sync = body

    @like(BodyWriter.write)
    async def write(self, data: Body) -> int:
        return await in_thread(partial(self.sync.write, data))

    @like(BodyWriter.writable)
    def writable(self) -> bool:
        return True

    close = lifted(BodyWriter.close)
    abort = lifted(BodyWriter.abort)

    async def __aenter__(self) -> AsyncWriter:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await in_thread(partial(self.sync.__exit__, kind, error, trace))


class AsyncRegistration:
    """See `Registration`."""

    def __init__(self, registration: Registration, handler: AsyncHandler) -> None:
        self.sync, self.patterns, self.handler = registration, registration.patterns, handler

    @property
    def active(self) -> bool:
        """Whether calls may follow or are under way."""
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


O = TypeVar("O", "AsyncClaims", "AsyncClient", "AsyncSubscription", "AsyncWriter")  # noqa: E741 - opened objects


class Opening(Generic[O]):
    """A call that opens something: it can be awaited, entered by `async with`, which closes the object, or iterated.

    messages = await group.subscribe()
    async with group.subscribe() as messages: ...
    async for message in group.subscribe(): ...
    """

    def __init__(self, open: Callable[[], Awaitable[O]]) -> None:
        self._open: Callable[[], Awaitable[O]] = open
        self._opened: O | None = None

    def __await__(self) -> Generator[Any, None, O]:
        return self._open().__await__()

    async def __aenter__(self) -> O:
        self._opened = await self._open()
        return await self._opened.__aenter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, trace)

    def __aiter__(self) -> Opening[O]:
        return self

    @overload
    def __anext__(self: Opening[AsyncSubscription]) -> Awaitable[Message]: ...

    @overload
    def __anext__(self: Opening[AsyncClaims]) -> Awaitable[AsyncClaim]: ...

    async def __anext__(self: Opening[Any]) -> Any:
        if self._opened is None:
            self._opened = await self._open()
        return await self._opened.__anext__()


Opens: TypeAlias = Callable[Concatenate["AsyncGroup", P], Opening[O]]
Registered: TypeAlias = Callable[Concatenate["AsyncGroup", Patterns, AsyncHandler, P], Awaitable[AsyncRegistration]]


def opens(method: Callable[Concatenate[Group, P], S], wrap: Callable[[S, Loop], O]) -> Opens[P, O]:
    """Return the async twin of a method of a group that opens something."""

    @wraps(method)
    def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> Opening[O]:
        async def open() -> O:
            sync = await open_in_thread(partial(method, self.sync, *args, **kwargs), self._loop.readers)
            return wrap(sync, self._loop)

        return Opening(open)

    return call


def registering(method: Callable[Concatenate[Group, Patterns, Handler, P], Registration]) -> Registered[P]:
    """Return the async twin of a method of a group that registers a handler; it is called in the event loop."""

    @wraps(method)
    async def call(
        self: AsyncGroup, /, pattern: Patterns, handler: AsyncHandler, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncRegistration:
        if kwargs.get("on_error") is not None:
            kwargs["on_error"] = InLoop(self._loop, kwargs["on_error"])  # type: ignore[arg-type]
        run = partial(method, self.sync, pattern, InLoop(self._loop, handler), *args, **kwargs)
        return AsyncRegistration(await in_thread(run), handler)

    return cast("Registered[P]", call)  # pattern and handler may be given by name, which Concatenate cannot express


class AsyncGroup:
    """See `Group`."""

    def __init__(self, group: Group, loop: Loop, workers: WeakSet[Worker]) -> None:
        """`workers`: the client stops them when it is closed."""
        self.sync, self.path, self.filters = group, group.path, group.filters
        self._loop, self._workers = loop, workers

    publish = lifted(Group.publish)
    publish_json = lifted(Group.publish_json)
    publish_many = lifted(Group.publish_many)
    schedule = lifted(Group.schedule)
    unschedule = lifted(Group.unschedule)
    request = lifted(Group.request)
    reply = lifted(Group.reply)
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
    to_arrow = lifted(Group.to_arrow)
    close = lifted(Group.close)
    subscribe = opens(Group.subscribe, AsyncSubscription)
    history = opens(Group.history, AsyncSubscription)
    consume = opens(Group.consume, AsyncClaims)
    take = opens(Group.take, AsyncClaims)
    writer = opens(Group.writer, AsyncWriter)
    on = registering(Group.on)
    once = registering(Group.once)

    @like(Group.consumer)
    def consumer(self, name: str) -> AsyncConsumer:
        return AsyncConsumer(self.sync.consumer(name))

    @like(Group.unsubscribe)
    async def unsubscribe(self, pattern: Patterns | None = None, handler: AsyncHandler | None = None) -> int:
        of = None if handler is None else InLoop(self._loop, handler)
        return await in_thread(partial(self.sync.unsubscribe, pattern, of))

    @like(Group.work)
    async def work(
        self,
        consumer: str,
        handler: Callable[[AsyncClaim], object],
        *,
        concurrency: int = 1,
        over: str = "",
        renew: bool = False,
        prefetch: int = 1,
        on_error: Callable[[Exception, Message | None], object] | None = None,
    ) -> AsyncWorker:
        def run(claim: Claim) -> None:
            self._loop.call(handler, AsyncClaim(claim))

        report = None if on_error is None else cast("OnError", InLoop(self._loop, on_error))
        options = {"concurrency": concurrency, "over": over, "renew": renew, "prefetch": prefetch}
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
    pause = lifted(Consumer.pause)
    resume = lifted(Consumer.resume)
    limit = lifted(Consumer.limit)
    rate = lifted(Consumer.rate)
    breaker = lifted(Consumer.breaker)


class AsyncClient:
    """See `Client`."""

    def __init__(self, client: sync.Client) -> None:
        self.sync, self._loop = client, Loop()
        self._workers: WeakSet[Worker] = WeakSet()

    @like(sync.Client.group)
    async def group(
        self,
        path: str = "",
        *,
        create: bool = False,
        settings: Settings | None = None,
        ctl: Sequence[str] = (),
        escape: bool = False,
    ) -> AsyncGroup:
        make = partial(self.sync.group, path, create=create, settings=settings, ctl=ctl, escape=escape)
        return AsyncGroup(await in_thread(make, self._loop.readers), self._loop, self._workers)

    remove_group = lifted(sync.Client.remove_group)

    async def close(self) -> None:
        """Stop the workers, end the handlers, and close the connection or the store."""
        for worker in list(self._workers):
            await in_thread(worker.stop)
        await in_thread(self.sync.close)

    def cancel_handlers(self) -> None:
        """Cancel running and later handlers."""
        self._loop.cancel()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.cancel_handlers()
        await self.close()


def opening(make: Callable[P, sync.Client]) -> Callable[P, Opening[AsyncClient]]:
    """Return the async twin of `mqfs.connect` or `mqfs.open`."""

    @wraps(make)
    def client(*args: P.args, **kwargs: P.kwargs) -> Opening[AsyncClient]:
        async def open() -> AsyncClient:
            return AsyncClient(await open_in_thread(partial(make, *args, **kwargs)))

        return Opening(open)

    return client


connect = opening(sync.connect)
open = opening(sync.open)


__all__ = [
    "AsyncClaim", "AsyncClaims", "AsyncClient", "AsyncConsumer", "AsyncGroup", "AsyncRegistration",
    "AsyncSubscription", "AsyncWorker", "AsyncWriter", "connect", "open",
]  # fmt: skip
