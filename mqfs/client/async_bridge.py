"""Threads and the event loop: sync calls in threads, waits that can be cancelled, handlers in the loop.

Owns the meeting of threads and cancellation, for trio and asyncio. Imports no call of the library.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import attrs

from mqfs.errors import Interrupted

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
    """Waits for what a source gives, one task at a time."""

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


__all__ = ["InLoop", "Loop", "Waiter", "in_thread", "lifted"]
