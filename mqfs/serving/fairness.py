"""Fairness: how users share the one thread, whatever front end they use.

Where two users have requests, each has the thread for limits.TURN_S of processor time by turns, however many
connections it has: all connections of a user stand in one queue, and one of them has the queue's turn.

    user A   [ queue: 3 connections ]   works 0.2 ms | waits        | works ...
    user B   [ queue: 1 connection  ]   waits        | works 0.2 ms | waits ...

A user alone pays nothing: time is measured only while another user is present.

The first connections of a user wait for input in trio, which wakes all those with input before it runs other tasks. The
other connections wait in an epoll of that user, a few of which are woken at a time: all connections of a process with
thousands may end at once.
"""

from __future__ import annotations

import math
import select
from collections.abc import Awaitable, Callable, Hashable
from time import perf_counter, thread_time
from weakref import WeakValueDictionary

import trio

from mqfs import limits

_WATCHED_S = 10.0
_ONCE = select.EPOLLIN | select.EPOLLONESHOT


class Fairness:
    """The queues of all users, and the user of the last request."""

    def __init__(self) -> None:
        self.last: FairQueue | None = None
        self.changed_at = -math.inf  # when a request last came from another user than the one before it
        self.asked_at, self.asked = -math.inf, 0  # time of the last request, and the number of requests
        self._asked_before = 0  # `asked` at the last piece of long work
        self._of: WeakValueDictionary[Hashable, FairQueue] = WeakValueDictionary()
        self._spacing = trio.Lock()  # between accepted connections

    def of(self, user: Hashable) -> FairQueue:
        """Return the queue of a user, for all its connections."""
        queue = self._of.get(user)
        return queue if queue is not None else self._of.setdefault(user, FairQueue(self))

    def shared(self, queue: FairQueue) -> bool:
        """Count a request of the queue's user. Return whether another user had a request lately."""
        now = perf_counter()
        self.asked_at = now
        self.asked += 1
        if self.last is not queue:
            if self.last is not None:
                self.changed_at = now
            self.last = queue
        return now - self.changed_at < limits.TURN_SHARED_S

    def piece_s(self, continued: bool) -> float:
        """Return how long a piece of long work may take now, in seconds. `continued`: a piece of it was done before. A
        request since then is another user's, as the client of the work waits for it."""
        now, before, self._asked_before = perf_counter(), self._asked_before, self.asked
        if continued and self.asked != before:
            self.changed_at = now
        return limits.PIECE_S if now - self.changed_at < limits.TURN_SHARED_S else limits.LOOKING_S

    async def accepted(self, user: Hashable) -> None:
        """Serve others after accepting a connection of a user, before the next one, whose user is unknown yet. Front
        ends take turns: together they accept no more than one alone."""
        now = perf_counter()
        alone = self.last in (None, self._of.get(user)) and now - self.changed_at > limits.TURN_SHARED_S
        if alone or now - self.asked_at > limits.TURN_SHARED_S:
            await trio.lowlevel.checkpoint()
        else:
            async with self._spacing:
                await trio.sleep(limits.ACCEPTED_S)


class FairQueue:
    """The connections of one user, which share its turn.

    The turn is measured in CPU seconds while other users are active, too. A long request, which cannot be divided, is
    then followed by a pause: otherwise every second request of the others would wait for a long one.
    """

    def __init__(self, fairness: Fairness) -> None:
        self.owner: trio.lowlevel.Task | None = None  # the task that has the turn next, or pauses; None: free
        self._fairness = fairness
        self._spent = 0.0
        self._waiting = trio.lowlevel.ParkingLot()
        self._connections = 0
        self._crowd: Crowd | None = None  # the connections beyond the first

    def join(self) -> Callable[[int], Awaitable[None]]:
        """Count a connection, until it leaves. Return the function by which it waits for input."""
        self._connections += 1
        if self._connections <= limits.IDLE_AT_ONCE:
            return trio.lowlevel.wait_readable
        if self._crowd is None:
            self._crowd = Crowd()
        return self._crowd.readable

    def leave(self) -> None:
        self._connections -= 1

    def closing(self, descriptor: int) -> None:
        """End the wait for input of a descriptor that is no longer read: in trio with trio.ClosedResourceError."""
        trio.lowlevel.notify_closing(descriptor)
        if self._crowd is not None:
            self._crowd.wake(descriptor)

    async def acquire(self) -> None:
        """Wait for the turn, after other tasks of the same user, unless this task has it already."""
        if self.owner not in (None, trio.lowlevel.current_task()):
            await self._waiting.park()

    def start(self) -> float:
        """Return the CPU clock at the start of the turn; 0 if turns are not shared."""
        return thread_time() if self._fairness.shared(self) else 0.0

    async def stop(self, began: float, done: bool, before: float = 0.0) -> None:
        """Charge the work since `began`, and `before` it, in CPU seconds. End the turn if used up, or not `done`."""
        cost = before + (thread_time() - began if began else 0.0)
        self._spent += cost
        if not done or self._spent >= limits.TURN_S:
            if began:
                self.owner, self._spent = trio.lowlevel.current_task(), 0.0
            if cost > limits.TURN_LONG_S:
                await self._pause(cost)
            else:
                await trio.lowlevel.checkpoint()
                if began and not done:  # newer requests first: trio runs tasks in any order
                    await trio.lowlevel.checkpoint()
        self.release()

    async def end(self) -> None:
        """Wait until a connection may end. While other users are present, each end has a turn of its own: of thousands
        that end at once, each costs as much as a request."""
        await self.acquire()
        began = self.start()
        try:
            await self.stop(began, not began)
        finally:  # also when cancelled: others would wait for ever for the turn of a closed connection
            self.release()

    async def _pause(self, cost: float) -> None:
        """Let others go first after a long request, until they have had many requests or have none."""
        fairness, until = self._fairness, perf_counter() + min(limits.TURN_REST_MOST * cost, limits.TURN_REST_MOST_S)
        enough = fairness.asked + limits.TURN_REST_REQUESTS
        await trio.sleep(min(limits.TURN_REST * cost, limits.TURN_REST_MOST_S))
        while fairness.asked < enough and (now := perf_counter()) < min(until, fairness.asked_at + limits.TURN_REST_S):
            await trio.sleep(min(until - now, limits.TURN_REST_S) / 4)

    def release(self) -> None:
        """Pass the turn to the next connection, if this task has it."""
        if self.owner is trio.lowlevel.current_task():
            self.owner = next(iter(self._waiting.unpark()), None)


class Crowd:
    """Connections of one user that wait for input, a few of which are woken at a time."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waiting: dict[int, trio.Event] = {}  # by descriptor
        self._watched = False

    async def readable(self, descriptor: int) -> None:
        """Wait until there is input."""
        try:
            self._epoll.register(descriptor, _ONCE)
        except FileExistsError:
            self._epoll.modify(descriptor, _ONCE)
        if not self._watched:
            self._watched = True
            trio.lowlevel.spawn_system_task(self._watch)
        event = self._waiting[descriptor] = trio.Event()
        try:
            await event.wait()
        finally:
            self._waiting.pop(descriptor, None)

    def wake(self, descriptor: int) -> None:
        if (event := self._waiting.pop(descriptor, None)) is not None:
            event.set()

    async def _watch(self) -> None:
        """Wake connections with input. End when none has waited for some time; a later one starts this task again."""
        while True:
            with trio.move_on_after(_WATCHED_S):
                await trio.lowlevel.wait_readable(self._epoll.fileno())
            found = self._epoll.poll(0, limits.IDLE_AT_ONCE)
            if not (found or self._waiting):
                self._watched = False
                return
            for descriptor, _ in found:
                self.wake(descriptor)
            await trio.lowlevel.checkpoint()  # other tasks run first


class TimeSlice:
    """The work of one connection in the time slices of its user, who is charged with it."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self._began = self._cost = 0.0  # start of the present work, and CPU seconds before it

    @property
    def most_s(self) -> float:
        """The longest piece of work that is permitted now, in seconds."""
        return limits.PIECE_S if self._began else limits.LOOKING_S

    async def start(self) -> None:
        """Wait for the turn."""
        if self._began:
            return
        await self.queue.acquire()
        self._began = self.queue.start()

    def pause(self) -> None:
        """Stop the clock and pass the turn on during a wait."""
        if self._began:
            self._cost += thread_time() - self._began
            self._began = 0.0
        self.queue.release()

    def resume(self) -> None:
        """Continue after a wait. If another connection has the turn, await `start` as well."""
        self._began = self.queue.start() if self.queue.owner is None else 0.0

    async def stop(self, done: bool = True) -> None:
        """Let other users have their turn if this one's is used up, or the work is not `done`."""
        if self._began or self._cost or not done or self.queue.owner is not None:
            began, cost = self._began or self.queue.start(), self._cost
            self._began = self._cost = 0.0
            await self.queue.stop(began, done, cost)
