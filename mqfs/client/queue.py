"""A durable queue with the calls of `queue.Queue`, over a stream and a consumer."""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, Full

from mqfs.client.delivery import Claim
from mqfs.client.group import Group
from mqfs.client.types import Body
from mqfs.errors import Stale, StreamFull

POLL_S = 0.05  # between two looks of `join` for what other programs acknowledge


class Queue:
    """A queue of bodies, shared by programs and kept over their ends: `put`, `get`, `task_done` as in `queue.Queue`.

    An item that was got is in flight until `task_done`, which acknowledges the oldest one that this thread has got.
    Where the program ends before, another one gets it again. A `with` block closes the queue.

        with mqfs.connect() as client, mqfs.Queue(client.group("jobs", create=True), "mail") as mails:
            mails.put(b"hello")
            send(mails.get())
            mails.task_done()
    """

    def __init__(self, group: Group, stream: str, *, consumer: str = "") -> None:
        """Open a queue.

        Args:
            group: Its group, with `deliver all`.
            stream: Its stream, made where it is missing.
            consumer: The name of its consumer, made where it is missing. Empty: the stream's name.

        Raises:
            MqfsError: See `Group.consume`.
        """
        group.create(stream)
        self._group, self._stream, self._name = group, stream, consumer or stream
        self._claims = group.consume(self._name, over=stream)
        self._taken = threading.local()
        self._acknowledged = threading.Event()  # by a thread of this program

    def __repr__(self) -> str:
        return f"<mqfs queue {self._stream!r} of {self._group!r}>"

    def put(self, item: Body, block: bool = True, timeout: float | None = None) -> None:
        """Append an item, which is then as durable as the group's `sync` demands.

        Args:
            item: Its bytes; text as UTF-8.
            block: Whether to wait for room, where `depth` is reached under `full block`.
            timeout: The most seconds to wait for room. None: without limit.

        Raises:
            queue.Full: There was no room: in time under `full block`, at once under `full reject`.
        """
        try:
            self._group.publish(self._stream, item, wait_s=timeout if block else 0.0)
        except (StreamFull, TimeoutError):
            raise Full from None

    def put_nowait(self, item: Body) -> None:
        """Append an item, if there is room.

        Args:
            item: Its bytes; text as UTF-8.

        Raises:
            queue.Full: There is no room.
        """
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> bytes:
        """Take the next item; `task_done` has to follow.

        Args:
            block: Whether to wait for one.
            timeout: The most seconds to wait. None: without limit.

        Returns:
            Its bytes.

        Raises:
            queue.Empty: There was none.
        """
        try:
            claim = self._claims.get(timeout if block else 0.0)
        except TimeoutError:
            raise Empty from None
        self._open.append(claim)
        return claim.body

    def get_nowait(self) -> bytes:
        """Take the next item, if there is one.

        Returns:
            Its bytes.

        Raises:
            queue.Empty: There is none.
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
        """Acknowledge the oldest item that this thread has got.

        Raises:
            ValueError: It has none.
            Stale: The item went to another program meanwhile, by its lease or a lost connection.
            MqfsError: It was not acknowledged, as on a full disk; the next call tries again.
        """
        if not self._open:
            raise ValueError("task_done failed: no item of this thread (expected one call for each get)")
        try:
            self._open[0].ack()
        except Stale:
            self._open.popleft()
            raise
        self._open.popleft()  # not before: where a full disk refuses it, say, the next call tries again
        self._acknowledged.set()

    def qsize(self) -> int:
        """Count the items that no program has got.

        Returns:
            Those of now; other programs put and get, too.
        """
        return self._group.consumer(self._name).info().waiting

    def empty(self) -> bool:
        """Ask whether no item waits.

        Returns:
            Whether that is so now.
        """
        return not self.qsize()

    def join(self) -> None:
        """Wait until every item was got, and acknowledged by `task_done`, by this program or another."""
        while self._group.consumer(self._name).lag():
            self._acknowledged.wait(POLL_S)
            self._acknowledged.clear()

    def close(self) -> None:
        """Close it. Items without `task_done` go to others."""
        self._claims.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._claims.close(release=error is None)
