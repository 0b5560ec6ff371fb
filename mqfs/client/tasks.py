"""The library for trio programs: the same calls, awaited.

Owns the meeting of threads and trio's cancellation, and nothing of what the calls do: each runs the call of the same
name in a thread, a waiting one for as long as it waits. Cancelling a wait for a message interrupts it and loses none;
other calls are short and are carried out to their end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import outcome
import trio

from mqfs.client import client as sync
from mqfs.client.consuming import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.reading import Reading
from mqfs.errors import Interrupted, MqfsError
from mqfs.types import Message

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_LIMITER = trio.CapacityLimiter(math.inf)


async def in_thread(call: Callable[[], T]) -> T:
    """Carry a call out to its end."""
    return await trio.to_thread.run_sync(call, limiter=_LIMITER)


async def interruptible(call: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """A call that waits. Cancelled, it is interrupted; what came all the same is returned."""
    while True:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            value: T = await _waited(call, interrupt)
            return value
        except Interrupted:
            pass  # we are cancelled; or it was meant for a wait that ended by itself


async def _waited(call: Callable[[], T], interrupt: Callable[[], None]) -> T:
    task, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()

    def deliver(result: outcome.Outcome[T]) -> None:
        token.run_sync_soon(trio.lowlevel.reschedule, task, result)

    def abort(_: object) -> trio.lowlevel.Abort:
        threading.Thread(target=interrupt, name="mqfs-interrupt", daemon=True).start()  # it may wait for a lock
        return trio.lowlevel.Abort.FAILED

    trio.lowlevel.start_thread_soon(call, deliver)
    value: T = await trio.lowlevel.wait_task_rescheduled(abort)
    return value


class _Source(Protocol[T_co]):
    """What both readings and claims have."""

    def get(self, timeout: float | None = None) -> T_co: ...

    def interrupt(self) -> None: ...


class AsyncReading:
    """Messages, one by one; one task at a time."""

    def __init__(self, reading: Reading) -> None:
        self.sync = reading

    async def get(self) -> Message:
        """The next message. Raises EOFError at the end."""
        return await _get(self.sync)

    def __aiter__(self) -> AsyncReading:
        return self

    async def __anext__(self) -> Message:
        return await _next(self.sync)

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await in_thread(self.sync.close)

    async def __aenter__(self) -> AsyncReading:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _get(source: _Source[T]) -> T:
    return await interruptible(source.get, source.interrupt)


async def _next(source: _Source[T]) -> T:
    try:
        return await _get(source)
    except EOFError:
        raise StopAsyncIteration from None


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
        with trio.CancelScope(shield=True):
            if isinstance(error, trio.Cancelled) and not self.sync.settled:
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

    async def get(self) -> AsyncClaim:
        """The next message, claimed. Raises EOFError at the end."""
        return AsyncClaim(await _get(self.sync))

    def __aiter__(self) -> AsyncClaims:
        return self

    async def __anext__(self) -> AsyncClaim:
        return AsyncClaim(await _next(self.sync))


def lifted(method: Callable[Concatenate[Group, P], T]) -> Callable[Concatenate[AsyncGroup, P], Awaitable[T]]:
    """The method of a group, awaited."""

    async def call(self: AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(partial(method, self.sync, *args, **kwargs))

    call.__doc__ = method.__doc__
    return call


def opened(
    method: Callable[Concatenate[Group, P], Reading],
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
    async def consume(
        self, consumer: str, *, over: str = "", private: bool = False, transient: bool = False, renew: bool = False
    ) -> AsyncIterator[AsyncClaims]:
        """As `Group.consume`; always in an `async with`."""
        make = partial(self.sync.consume, consumer, over=over, private=private, transient=transient, renew=renew)
        claims = await in_thread(make)
        clean = False
        try:
            yield AsyncClaims(claims)
            clean = True
        except trio.Cancelled:
            clean = True
            raise
        finally:
            with trio.CancelScope(shield=True):
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
            with trio.CancelScope(shield=True):
                await in_thread(client.close)


connect = _Maker(sync.connect)
open = _Maker(sync.open)
