"""A group's ring in this process: attaching to it, publishing, and what becomes of that when it or the server ends.

Owns the handle that publishers share, and the names of streams as that ring has them. What does not go through a ring
(options, views, groups that have none) it leaves to the files: it says so by returning None.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mqfs import limits, ring
from mqfs.client.transport.attach_client import AttachClient, NoAttachSocket
from mqfs.client.types import Link
from mqfs.errors import Again, BadRing, Busy, Disconnected, MqfsError, NotFound, Stale, TooLong
from mqfs.model import Kind

if TYPE_CHECKING:
    from mqfs.client.subscription import Filters, Patterns, Subscription

SLICE_S = 0.1  # of a wait, between two looks at whether the client was closed
LOOK_S = 0.5  # between two looks at whether the server is there
GRACE_S = 10.0  # that a publisher waits for a killed server to be there again, with `reconnect=True`
REST_S = 5.0  # after a refusal the files are used for so long
ENDING_S = 5.0  # for a generation to end, all of it in the log
ANSWER_S = 5.0  # in which a server that took a ring over has committed what was in it
PAUSE_S = 0.02
LOOKS = 1_000  # at what others change meanwhile
_MESSAGE = int(Kind.MESSAGE)


class Refused(Exception):
    """The group has no ring for us now; `why` is the error that said so."""

    def __init__(self, why: MqfsError) -> None:
        super().__init__(str(why))
        self.why = why


class Attached:
    """A generation of a group's ring. The connection that holds it may be a later one than that which gave it."""

    def __init__(self, handle: ring.Ring, door: AttachClient, said: dict[str, Any]) -> None:
        self.ring, self.door = handle, door
        self.generation: int = said["generation"]
        self.deliver: str = said["deliver"]
        self.ttl_ns: int = said["ttl_ns"]
        self.over = False  # another took its place
        self.publishing = threading.Lock()
        self.numbers: dict[str, int] = {}  # names and numbers of one generation mean the same for ever

    @property
    def next(self) -> int:
        """The sequence that the next message takes, or one that was. Raises Stale where it is damaged."""
        for _ in range(LOOKS):
            sequence = self.ring.next
            if sequence:
                return sequence
        raise Stale("the ring is damaged")

    def number(self, stream: str) -> int | None:
        """None: it is a view. Raises NotFound, Disconnected."""
        said = self.door.ask({"stream": stream})
        if said.get("view"):
            return None
        number: int = said["number"]
        self.numbers[stream] = number
        return number

    def name(self, number: int) -> str | None:
        """None: no stream has that number."""
        try:
            name: str = self.door.ask({"number": number})["stream"]
        except NotFound:
            return None
        return name


class RingGroup:
    """See `Direct`. `required`: where it has none that is an error, and else it is told by None."""

    def __init__(
        self,
        link: Link,
        path: str,
        door_path: str,
        name: str,
        *,
        required: bool,
        reconnect: bool | float,
        timeout: float | None,
    ) -> None:
        """`path`: of the group for `link`; `name`: for the door."""
        self.closed = threading.Event()
        self._link, self._path, self._door_path, self._name = link, path, door_path, name
        self._required, self._timeout = required, timeout
        self.reconnect = reconnect
        self._pid = os.getpid()
        self._lock = threading.Lock()  # who attaches
        self._now: Attached | None = None
        self._refused: tuple[float, MqfsError] | None = None
        self._doorless_since = 0.0
        self.times_away = 0  # the server was
        self._lost_door: AttachClient | None = None  # the last by which that was seen
        _groups.add(self)

    # ------------------------------------------------------------ attaching

    def attached(self) -> Attached:
        """The ring that is current. Raises Refused, Disconnected; where a ring is required, what refused it."""
        with self._lock:
            self.require()
            at = self._now
            if at is not None and at.door.lost and at.door is not self._lost_door:
                self._lost_door = at.door
                self.times_away += 1
            if at is not None and at.ring.retired:
                at.over = True
            if at is not None and not at.over and not at.door.lost:
                return at
            if at is not None and at.door.lost and self.reconnect is False:
                at.over = True
                raise Disconnected(f"{self._link.where}: the server closed the connection")
            if self._refused is not None and time.monotonic() < self._refused[0]:
                raise Refused(self._refused[1])
            try:
                return self._attach()
            except Disconnected:
                raise
            except MqfsError as error:
                self._now = None
                if self._required:
                    raise
                self._refused = time.monotonic() + REST_S, error
                raise Refused(error) from None

    def _attach(self) -> Attached:
        """Ask for the current generation; one that is ending is waited for, a little."""
        deadline = time.monotonic() + ENDING_S
        while True:
            try:
                return self._attach_once()
            except (Busy, Stale):
                if time.monotonic() > deadline or self.closed.wait(PAUSE_S):
                    raise

    def _attach_once(self) -> Attached:
        """Raises Stale, Busy where it is to be asked again."""
        door = self._dial()
        try:
            said, fd = door.attach(self._name)
            try:
                now = self._now
                if now is None or now.generation != said["generation"]:
                    now = Attached(ring.attach(fd, said["generation"]), door, said)
                elif now.over:
                    raise Stale("the server gives a ring that was retired")
                else:
                    now.door.close()
                    now.door = door
            finally:
                os.close(fd)
        except BaseException:
            door.close()
            raise
        self._now = now
        return now

    def _dial(self) -> AttachClient:
        try:
            found = AttachClient(self._door_path, self._timeout)
        except NoAttachSocket:
            self._link.open(".stats", "r").close()  # a server that starts has its door by the time it answers
            found = self._dial_again()
        self._doorless_since = 0.0
        return found

    def _dial_again(self) -> AttachClient:
        """Where there was a door, a server that stops is on its way out: the next one has one, or none for good."""
        try:
            return AttachClient(self._door_path, self._timeout)
        except NoAttachSocket as error:
            self._doorless_since = self._doorless_since or time.monotonic()
            if self._now is None or time.monotonic() - self._doorless_since > GRACE_S:
                raise
            raise Disconnected(error.detail) from None

    def require(self) -> None:
        if os.getpid() != self._pid:
            raise Disconnected("this connection belongs to the parent process; connect again in the child")
        if self.closed.is_set():
            raise Disconnected("the client was closed")

    def again(self) -> Attached:
        """The server was away, or is: wait for it as long as a publisher does. Raises Disconnected."""
        limit = GRACE_S if self.reconnect is True else float(self.reconnect)
        deadline = time.monotonic() + limit
        while True:
            self.require()
            try:
                return self.attached()
            except Disconnected:
                if self.reconnect is False or time.monotonic() >= deadline:
                    raise
            self.closed.wait(PAUSE_S)

    def usable(self) -> Attached | None:
        """The ring to be used now; None: use the files."""
        at = self._now
        if at is not None and not at.over:
            return at
        try:
            return self.again()
        except Refused:
            return None

    # ------------------------------------------------------------ publishing

    def publish(self, stream: str, body: bytes, committed: bool) -> int | None:
        """Publish one message; its sequence. Raises NotFound."""
        if len(body) > limits.MESSAGE_BYTES:
            raise TooLong(f"{len(body)} bytes; a message has at most {limits.MESSAGE_BYTES}")
        while True:
            at = self._now
            if at is None or at.over:
                at = self.usable()
                if at is None:
                    return None
            number = at.numbers.get(stream)
            try:
                if number is None:
                    number = self._number(at, stream)
                    if number is None:
                        return None
                with at.publishing:
                    sequence = at.ring.publish(number, body, b"", _MESSAGE, 0, SLICE_S)
            except (Again, Stale, BadRing, Busy) as error:
                self._check_generation(at, error)
            else:
                if committed:
                    self.wait_committed(at, sequence)
                return sequence

    def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> tuple[int, Callable[[], None] | None]:
        """See `Direct`."""
        for _, body in messages:
            if len(body) > limits.MESSAGE_BYTES:
                raise TooLong(f"{len(body)} bytes; a message has at most {limits.MESSAGE_BYTES}")
        done, wait = 0, None
        try:
            while done < len(messages) and (at := self.usable()) is not None:
                try:
                    last = self._publish_all(at, messages[done:] if done else messages)
                except (Again, Stale, BadRing, Busy) as error:
                    done += getattr(error, "published", 0)
                    self._check_generation(at, error)
                else:
                    if last is not None:
                        done, wait = len(messages), partial(self.wait_committed, at, last)
                    break
        except MqfsError as error:
            error.published = done + getattr(error, "published", 0)  # type: ignore[attr-defined]
            raise
        return done, wait

    def _publish_all(self, at: Attached, messages: Sequence[tuple[str, bytes]]) -> int | None:
        numbers = at.numbers
        for stream in {stream for stream, _ in messages}:
            if stream not in numbers and self._number(at, stream) is None:
                return None
        first = messages[0][0]
        with at.publishing:
            if all(stream == first for stream, _ in messages):
                return at.ring.publish_many(numbers[first], [body for _, body in messages], SLICE_S)
            return at.ring.publish_drafts([(_MESSAGE, numbers[stream], body) for stream, body in messages], SLICE_S)

    def _number(self, at: Attached, stream: str) -> int | None:
        """Of a stream; None: it is a view. Raises Stale where another generation is to be asked."""
        while True:
            try:
                return at.number(stream)
            except Disconnected:
                if not self.still_valid(at):
                    raise Stale("the ring's server was away") from None

    def _check_generation(self, at: Attached, error: MqfsError) -> None:
        """Why a publish did not go through: returns where it is to be tried again."""
        self.require()
        if isinstance(error, Stale | BadRing):
            at.over = True
            self.still_valid(at)
        elif at.door.lost:
            self.still_valid(at)

    def still_valid(self, at: Attached) -> bool:
        """Attach again, the server waited for; whether it is that generation still. Raises Disconnected."""
        try:
            return self.again() is at
        except Refused:
            return False  # as the next call finds

    def wait_committed(self, at: Attached, sequence: int) -> None:
        """Wait until it is as durable as the group's `sync` promises. Raises DiskFailed; Disconnected: it is not known
        whether it is."""
        look_at = time.monotonic() + LOOK_S
        while not at.ring.wait_committed(sequence, SLICE_S):
            self.require()
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + LOOK_S
            if not at.door.lost:
                self._ask_whether_it_can_be(at)
            elif not self.still_valid(at) and not at.ring.wait_committed(sequence, ANSWER_S):
                raise Disconnected(f"the ring of {self._name or '/'} ended: whether {sequence} is kept is not known")

    @staticmethod
    def _ask_whether_it_can_be(at: Attached) -> None:
        """Raises DiskFailed where the group's log has failed."""
        try:
            at.name(1)  # any question is answered so
        except Disconnected:
            pass

    # ------------------------------------------------------------ following

    def subscribe(
        self, patterns: Patterns, *, existing: bool, filters: Filters, reconnect: bool | float
    ) -> Subscription | None:
        """See `Direct`."""
        from mqfs.client.transport.ring_subscription import NotInRing, RingSubscription

        while (at := self.usable()) is not None and at.deliver == "all":
            try:
                return RingSubscription(
                    self, at, self._link, self._path, patterns, existing=existing, filters=filters, reconnect=reconnect
                )
            except NotInRing:
                break
            except Stale:
                if not at.over:
                    break
            except Disconnected:
                if not at.door.lost:
                    raise
                self.still_valid(at)
        return None

    def close(self) -> None:
        self.closed.set()
        at = self._now
        if at is not None:
            at.door.close()


_groups: weakref.WeakSet[RingGroup] = weakref.WeakSet()


def _in_child() -> None:
    """A child has none of the parent's rings; nor does it wait for what the parent's threads hold."""
    for group in list(_groups):
        group._now, group._lock = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)

__all__ = ["Attached", "Refused", "RingGroup"]
