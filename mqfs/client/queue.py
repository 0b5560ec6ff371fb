"""A durable queue with the calls of `queue.Queue`, over a stream and a consumer."""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, Full

from mqfs.client.delivery import Claim
from mqfs.client.group import Group
from mqfs.client.types import Body
from mqfs.errors import Stale, StreamFull

POLL_S = 0.05  # between two checks of `join` for acknowledgements of other programs


class Queue:
    """A queue of bodies that programs share, and that outlives them: `put`, `get`, `task_done` as in `queue.Queue`.

    After `get` an item is in flight until `task_done`, which acknowledges the oldest item in flight of this thread. If
    the program ends before that, another one gets the item again. A `with` block closes the queue.

        with mqfs.connect() as client, mqfs.Queue(client.group("jobs", create=True), "mail") as mails:
            mails.put(b"hello")
            send(mails.get())
            mails.task_done()
    """

    def __init__(self, group: Group, stream: str, *, consumer: str = "") -> None:
        """Open a queue.

        Args:
            group: The queue's group, with `deliver all`.
            stream: Its stream; a missing one is made.
            consumer: The name of its consumer; a missing one is made. Empty: the stream's name.

        Raises:
            MqfsError: See `Group.consume`.
        """
        group.create(stream)
        self._group, self._stream, self._name = group, stream, consumer or stream
        self._claims = group.consume(self._name, over=stream)
        self._taken = threading.local()
        self._acknowledged = threading.Event()  # set by `task_done` of this program

    def __repr__(self) -> str:
        return f"<mqfs queue {self._stream!r} of {self._group!r}>"

    def put(self, item: Body, block: bool = True, timeout: float | None = None) -> None:
        """Append an item, which is then as durable as the group's `sync` demands.

        Args:
            item: The item's bytes; text as UTF-8.
            block: Whether to wait for room when `depth` is reached under `full block`.
            timeout: The most seconds to wait for room. None: without limit.

        Raises:
            queue.Full: There was no room: under `full block` in time, under `full reject` at once.
        """
        try:
            self._group.publish(self._stream, item, wait_s=timeout if block else 0.0)
        except (StreamFull, TimeoutError):
            raise Full from None

    def put_nowait(self, item: Body) -> None:
        """Append an item, if there is room.

        Args:
            item: The item's bytes; text as UTF-8.

        Raises:
            queue.Full: There is no room.
        """
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> bytes:
        """Claim the next item; `task_done` has to follow.

        Args:
            block: Whether to wait for an item.
            timeout: The most seconds to wait. None: without limit.

        Returns:
            The item's bytes.

        Raises:
            queue.Empty: There was no item in time.
        """
        try:
            claim = self._claims.get(timeout if block else 0.0)
        except TimeoutError:
            raise Empty from None
        self._open.append(claim)
        return claim.body

    def get_nowait(self) -> bytes:
        """Claim the next item, if there is one.

        Returns:
            The item's bytes.

        Raises:
            queue.Empty: No item is waiting.
        """
        return self.get(block=False)

    @property
    def _open(self) -> deque[Claim]:
        """The claims of this thread."""
        if not hasattr(self._taken, "claims"):
            self._taken.claims = deque()
        claims: deque[Claim] = self._taken.claims
        return claims

    def task_done(self) -> None:
        """Acknowledge the oldest item in flight of this thread.

        Raises:
            ValueError: The thread has no item in flight.
            Stale: The item is redelivered: its lease has expired, or the connection was lost.
            MqfsError: The acknowledgement was refused, by a full disk, for example; the next call tries again.
        """
        if not self._open:
            raise ValueError("task_done failed: no item of this thread (expected one call for each get)")
        try:
            self._open[0].ack()
        except Stale:
            self._open.popleft()
            raise
        self._open.popleft()  # not earlier: after a refusal, by a full disk, for example, the next call tries again
        self._acknowledged.set()

    def qsize(self) -> int:
        """Count the items that wait for a program.

        Returns:
            Their present number; other programs put and get, too.
        """
        return self._group.consumer(self._name).info().waiting

    def empty(self) -> bool:
        """Check whether the queue is empty.

        Returns:
            Whether no item waits at present.
        """
        return not self.qsize()

    def join(self) -> None:
        """Wait until this or another program has acknowledged every item by `task_done`."""
        while self._group.consumer(self._name).lag():
            self._acknowledged.wait(POLL_S)
            self._acknowledged.clear()

    def close(self) -> None:
        """Close the queue. Items without `task_done` are requeued for other programs."""
        self._claims.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._claims.close(release=error is None)
