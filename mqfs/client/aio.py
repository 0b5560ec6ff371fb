"""The library for async programs, trio's and asyncio's: the same calls, awaited.

Owns the meeting of threads and cancellation, and nothing of what the calls do: each runs the call of the same name in a
thread, a waiting one for as long as it waits. Cancelling a wait for a message interrupts it and loses none; other calls
are short and are carried out to their end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import anyio

from mqfs.client import client as sync
from mqfs.client.delivery import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.large import BodyWriter
from mqfs.client.types import Body, Subscription
from mqfs.errors import Interrupted, MqfsError
from mqfs.model import Message

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


async def in_thread(call: Callable[[], T]) -> T:
    """Carry a call out to its end."""
    limiter = anyio.CapacityLimiter(1)  # of its own: there may be any number
    with anyio.CancelScope(shield=True):
        value = await anyio.to_thread.run_sync(call, limiter=limiter)
    return value


class _Source(Protocol[T_co]):
    """What both readings and claims have."""

    def get(self, timeout: float | None = None) -> T_co: ...

    def interrupt(self) -> None: ...


class _Waiting(Generic[T]):
    """Waits for what a source gives, one task at a time."""

    def __init__(self, source: _Source[T]) -> None:
        self._source = source
        self._came: deque[T] = deque()  # when its wait had been cancelled: the next one's

    async def get(self) -> T:
        """Cancelled, the wait is interrupted; what came all the same is kept."""
        while not self._came:
            await self._wait()
        return self._came.popleft()

    async def next(self) -> T:
        try:
            return await self.get()
        except EOFError:
            raise StopAsyncIteration from None

    async def _wait(self) -> None:
        ended = anyio.Event()
        failed: list[BaseException] = []

        async def work() -> None:
            try:
                self._came.append(await in_thread(self._source.get))
            except Interrupted:
                pass  # the wait is cancelled; or it was meant for one that ended by itself
            except BaseException as error:
                failed.append(error)
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            try:
                await ended.wait()
            except BaseException:
                # It may wait for a lock.
                threading.Thread(target=self._source.interrupt, name="mqfs-interrupt", daemon=True).start()
                with anyio.CancelScope(shield=True):
                    await ended.wait()
                raise
        for error in failed:
            raise error


class AsyncReading:
    """Messages, one by one; one task at a time."""

    def __init__(self, reading: Subscription) -> None:
        self.sync = reading
        self._waiting: _Waiting[Message] = _Waiting(reading)

    async def get(self) -> Message:
        """The next message. Raises EOFError at the end."""
        return await self._waiting.get()

    def __aiter__(self) -> AsyncReading:
        return self

    async def __anext__(self) -> Message:
        return await self._waiting.next()

    async def aclose(self) -> None:
        await in_thread(self.sync.close)

    async def __aenter__(self) -> AsyncReading:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncClaim:
    """A claim. Its block's clean exit acknowledges, an exception is a nack, being cancelled a release."""

    def __init__(self, claim: Claim) -> None:
        self.sync = claim
        self.message, self.deliveries = claim.message, claim.deliveries

    @property
    def body(self) -> bytes:
        return self.message.body

    @property
    def headers(self) -> Mapping[str, str]:
        return self.message.headers

    async def ack(self) -> None:
        await in_thread(self.sync.ack)

    async def nack(self, delay: float | str | None = None) -> None:
        await in_thread(partial(self.sync.nack, delay))

    async def release(self) -> None:
        await in_thread(self.sync.release)

    async def dead(self, reason: str = "") -> None:
        await in_thread(partial(self.sync.dead, reason))

    async def touch(self) -> None:
        await in_thread(self.sync.touch)

    async def __aenter__(self) -> AsyncClaim:
        self.sync.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, anyio.get_cancelled_exc_class()) and not self.sync.settled:
            await in_thread(partial(_release, self.sync))
        await in_thread(partial(self.sync.__exit__, kind, error, trace))


def _release(claim: Claim) -> None:
    try:
        claim.release()
    except MqfsError:
        pass  # it was given back already


class AsyncClaims:
    """A handle on a consumer; one task at a time claims, any may settle."""

    def __init__(self, claims: Claims) -> None:
        self.sync = claims
        self._waiting: _Waiting[Claim] = _Waiting(claims)

    async def get(self) -> AsyncClaim:
        """The next message, claimed. Raises EOFError at the end."""
        return AsyncClaim(await self._waiting.get())

    def __aiter__(self) -> AsyncClaims:
        return self

    async def __anext__(self) -> AsyncClaim:
        return AsyncClaim(await self._waiting.next())


class AsyncWriter:
    """A body being written, of any size; see `BodyWriter`. Given by an `async with`, whose clean exit publishes it."""

    def __init__(self, body: BodyWriter) -> None:
        self.sync = body

    async def write(self, data: Body) -> int:
        return await in_thread(partial(self.sync.write, data))


def lifted(method: Callable[Concatenate[Group, P], T]) -> Callable[Concatenate[AsyncGroup, P], Awaitable[T]]:
    """The method of a group, awaited."""

    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(partial(method, self.sync, *args, **kwargs))

    call.__doc__ = method.__doc__
    return call


def opened(
    method: Callable[Concatenate[Group, P], Subscription],
) -> Callable[Concatenate[AsyncGroup, P], Awaitable[AsyncReading]]:
    """The method of a group that begins a reading, awaited."""

    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncReading:
        return AsyncReading(await in_thread(partial(method, self.sync, *args, **kwargs)))

    call.__doc__ = method.__doc__
    return call


class AsyncGroup:
    """A group; see `Group` for what each call does."""

    def __init__(self, group: Group) -> None:
        self.sync = group

    publish = lifted(Group.publish)
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
    subscribe = opened(Group.subscribe)
    history = opened(Group.history)

    @asynccontextmanager
    async def writer(
        self, stream: str, *, headers: Mapping[str, str] | None = None, create: bool = True
    ) -> AsyncIterator[AsyncWriter]:
        """As `Group.writer`; an exception, and being cancelled, drops it."""
        body = await in_thread(partial(self.sync.writer, stream, headers=headers, create=create))
        try:
            yield AsyncWriter(body)
        except BaseException as error:
            await in_thread(partial(body.__exit__, type(error), error, error.__traceback__))
            raise
        await in_thread(body.close)

    def consume(
        self, consumer: str, *, over: str = "", private: bool = False, transient: bool = False, renew: bool = False
    ) -> AbstractAsyncContextManager[AsyncClaims]:
        """As `Group.consume`; always in an `async with`."""
        return _claiming(
            partial(self.sync.consume, consumer, over=over, private=private, transient=transient, renew=renew)
        )

    def take(
        self, stream: str, *, create: bool = False, renew: bool = False
    ) -> AbstractAsyncContextManager[AsyncClaims]:
        """As `Group.take`; always in an `async with`."""
        return _claiming(partial(self.sync.take, stream, create=create, renew=renew))


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
    """A tree; `connect` and `open` give it."""

    def __init__(self, client: sync.Client) -> None:
        self.sync = client

    async def group(self, path: str = "", *, create: bool = False, ctl: Sequence[str] = ()) -> AsyncGroup:
        """See `Client.group`."""
        return AsyncGroup(await in_thread(partial(self.sync.group, path, create=create, ctl=ctl)))

    async def remove_group(self, path: str) -> None:
        await in_thread(partial(self.sync.remove_group, path))


class _Maker(Generic[P]):
    """`mqfs.connect` or `mqfs.open`, as an async context manager of the same parameters."""

    def __init__(self, make: Callable[P, sync.Client]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    @asynccontextmanager
    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[AsyncClient]:
        client = await in_thread(partial(self._make, *args, **kwargs))
        try:
            yield AsyncClient(client)
        finally:
            await in_thread(client.close)


connect = _Maker(sync.connect)
open = _Maker(sync.open)
