"""Parked requests: their call of the tree returned a `Wait` that is not yet resolved, flushed or aborted."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mqfs import limits
from mqfs.errors import DiskFailed, Interrupted, MqfsError, OverLimit
from mqfs.model import Step, Wait
from mqfs.net.peer import Peer
from mqfs.ninep.codec.messages import Fcall, Rflush, Rread, Tflush
from mqfs.ninep.codec.notation import show
from mqfs.ninep.codec.wire import R_READ, READ_HEADER, READ_OVERHEAD, Dialect, decode, encode, refusal
from mqfs.ninep.server.fids import Fid
from mqfs.quotas import UserLimits


class Negotiated:
    """The terms of a connection, agreed by its last Tversion and its Tattach."""

    __slots__ = ("dialect", "msize", "resumable", "unix", "v9fs")

    def __init__(self) -> None:
        self.agree(None, limits.MSIZE_LEAST)

    def agree(self, dialect: Dialect | None, msize: int) -> None:
        """Set the terms of a Tversion. `dialect` None: none was accepted."""
        self.dialect, self.msize = dialect, msize
        self.unix = dialect is not None and dialect.unix
        self.v9fs = False  # its Tattach declared that the client is Linux v9fs
        self.resumable = False  # its Tattach declared that the client is a mount, see resumable.py


class Later(NamedTuple):
    """A reply that `then` makes from the result of `wait`, perhaps after another wait. `calls`: whether `then` calls
    the tree. `makes`: the number of the fid that the request attaches or proves."""

    wait: Wait[Any]
    then: Callable[[Any], Fcall | Later]
    fid: Fid | None = None
    calls: bool = False
    makes: int | None = None


class Pending:
    """A parked request, and the tags of the flushes that wait for it."""

    __slots__ = ("calls", "counted", "fid", "flushes", "makes", "tag", "then", "wait")

    def __init__(self, tag: int, later: Later) -> None:
        self.tag = tag
        self.wait, self.then, self.fid, self.calls, self.makes = later
        self.flushes: list[int] = []
        self.counted = True  # charged to its user's limit of waits


def later(
    step: Step[Any],
    then: Callable[[Any], Fcall | Later],
    *,
    fid: Fid | None = None,
    calls: bool = False,
    makes: int | None = None,
) -> Fcall | Later:
    """Return the reply to a step: at once, or when the step is resolved. `calls`, `makes`: see Later."""
    return Later(step, then, fid, calls, makes) if isinstance(step, Wait) else then(step)


def both(first: Step[Any], second: Step[Any]) -> Step[None]:
    """Return a step that is done when both are, or fails with the first error. Joined waits cannot be cancelled."""
    waits = [step for step in (first, second) if isinstance(step, Wait)]
    if len(waits) < 2:
        return waits[0] if waits else None
    whole: Wait[None] = Wait()

    def settled(wait: Wait[Any]) -> None:
        waits.remove(wait)
        try:
            wait.result()
        except Exception as error:
            if not whole.settled:
                whole.fail(error)
        if not waits and not whole.settled:
            whole.resolve(None)

    for wait in tuple(waits):
        wait.subscribe(settled)
    return whole


class PendingRequests:
    """The parked requests of a connection. If one cannot be cancelled, its flush waits with it.

    Each is charged to its user's limit of `waits`. `wake` is called when a wait has produced a reply, perhaps from
    inside the engine.
    """

    def __init__(self, waits: UserLimits, peer: Peer, replies: Replies, wake: Callable[[], object]) -> None:
        self.by_tag: dict[int, Pending] = {}  # requests, and the flushes that wait for them
        self.making: set[int] = set()  # numbers of fids being attached or proven: requests that name them wait
        self.wake = wake
        self._waits, self._peer, self._replies = waits, peer, replies
        self.ready: deque[Pending] = deque()  # resolved, and the reply needs the tree

    @property
    def _is_full(self) -> bool:
        return len(self.by_tag) >= limits.TAGS

    def park(self, tag: int, later: Later, flushes: Sequence[int] = ()) -> None:
        """Park a request, and the tags of `flushes` that wait for it, until its wait is resolved. Raises OverLimit
        beyond a limit where the wait can be cancelled; else the request is parked all the same."""
        if self._is_full and not later.wait.settled and later.wait.cancel():
            raise OverLimit(f"too many parked requests (expected at most {limits.TAGS} of a connection)")
        pending = Pending(tag, later)
        pending.flushes.extend(flushes)
        try:
            self._waits.acquire(self._peer.account)
        except OverLimit:
            if later.wait.cancel():
                raise
            pending.counted = False
        self.by_tag[tag] = pending
        for flush in flushes:
            self.by_tag[flush] = pending
        if later.fid is not None:
            later.fid.pending.add(tag)
        if later.makes is not None:
            self.making.add(later.makes)
        later.wait.subscribe(lambda _: self._settled(pending))

    def _settled(self, pending: Pending) -> None:
        """Complete a request, or queue it if its reply needs the tree. May be called from inside the engine: call
        nothing of the engine here."""
        if self.by_tag.get(pending.tag) is not pending:
            return  # aborted by a Tversion, or by the end of the connection
        if pending.calls:
            self.ready.append(pending)
        else:
            self._complete(pending)
        self.wake()

    def complete_ready(self) -> None:
        """Make the replies that need the tree. Never call this from inside the engine."""
        while self.ready:
            self._complete(self.ready.popleft())

    def _complete(self, pending: Pending) -> None:
        if self.by_tag.get(pending.tag) is not pending:
            return
        self._remove(pending)
        try:
            reply = pending.then(pending.wait.result())
            if isinstance(reply, Later):
                self.park(pending.tag, reply, pending.flushes)
                return
            self._replies.reply(reply)
        except Exception as error:
            if not (pending.flushes and isinstance(error, Interrupted)):  # it was cancelled after all
                self._replies.refuse(pending.tag, error)
        for tag in pending.flushes:
            self._replies.reply(Rflush(tag))

    def _remove(self, pending: Pending) -> None:
        for tag in (pending.tag, *pending.flushes):
            del self.by_tag[tag]
        if pending.counted:
            self._waits.release(self._peer.account)
        if pending.fid is not None:
            pending.fid.pending.discard(pending.tag)
        if pending.makes is not None:
            self.making.discard(pending.makes)

    def flush(self, request: Tflush) -> None:
        """Cancel a request. If it cannot be cancelled any more, answer it first and the flush after it.

        A claim first completes its search of the existing messages, as its client may be one that does not wait; its
        flush is parked meanwhile. Where there is no room to park the flush, the search is cancelled at once.
        """
        pending = self.by_tag.get(request.oldtag)
        if pending is None:
            self._replies.reply(Rflush(request.tag))
        elif pending.wait.cancel(None if self._is_full else Interrupted()):
            self._remove(pending)
            for tag in (*pending.flushes, request.tag):
                self._replies.reply(Rflush(tag))
        else:
            pending.flushes.append(request.tag)
            self.by_tag[request.tag] = pending

    def interrupt(self, fid: Fid) -> None:
        """Refuse the requests of a fid that can be cancelled."""
        for tag in list(fid.pending):
            pending = self.by_tag[tag]
            if pending.wait.cancel():
                self._remove(pending)
                self._replies.refuse(tag, Interrupted())
                for flush in pending.flushes:
                    self._replies.reply(Rflush(flush))

    def abort(self) -> Iterator[None]:
        """Cancel all requests that can be cancelled, without an answer, in steps. The others stay parked."""
        for pending in reversed(dict.fromkeys(self.by_tag.values())):  # newest first: none becomes its queue's head
            if self.by_tag.get(pending.tag) is pending and pending.wait.cancel():
                self._remove(pending)
            yield

    def clear(self) -> Iterator[None]:
        """Remove all requests, in steps. A write that was appended stays, unanswered."""
        parked, self.by_tag = self.by_tag, {}
        self.making.clear()
        self.ready.clear()
        for pending in reversed(dict.fromkeys(parked.values())):
            pending.wait.cancel()
            if pending.counted:
                self._waits.release(self._peer.account)
            yield


# ---------------------------------------------------------------- replies

log = logging.getLogger("mqfs.ninep")

APART_BYTES = 16_384  # longer data is sent as a buffer of its own, not copied after its header
TRACE_DATA_BYTES = 64


class Replies:
    """Frames that the driver of a session has not taken yet, in order of sending.

    `where` names the peer in the log; `trace` is called with a line for each frame.
    """

    def __init__(self, negotiated: Negotiated, where: str, trace: Callable[[str], None] | None) -> None:
        self.bytes = 0  # not taken yet
        self.taken_bytes = 0
        self._negotiated, self._where, self._trace = negotiated, where, trace
        self._frames: list[bytes] = []

    def take(self) -> list[bytes]:
        """Return and remove all frames, whole or in pieces, in order; the caller sends them."""
        self.taken_bytes += self.bytes
        frames, self._frames, self.bytes = self._frames, [], 0
        return frames

    def put(self, head: bytes, data: bytes = b"") -> None:
        """Append a frame."""
        if self._trace is not None:
            frame = head + data
            self._trace(f"<- {show(decode(frame, 0, len(frame), self._negotiated.unix), TRACE_DATA_BYTES)}")
        self.bytes += len(head) + len(data)
        if len(data) > APART_BYTES:
            self._frames += (head, data)
        else:
            self._frames.append(head + data)

    def reply(self, message: Fcall) -> None:
        if type(message) is Rread:
            length = len(message.data)
            self.put(READ_HEADER.pack(READ_OVERHEAD + length, R_READ, message.tag, length), message.data)
        else:
            self.put(encode(message, self._negotiated.unix))

    def refuse(self, tag: int, error: BaseException) -> None:
        """Answer with an error. An exception that is not an MqfsError is logged and answered as DiskFailed."""
        if isinstance(error, OSError):
            log.error("%s: request failed: %s", self._where, error)
            error = DiskFailed()
        elif not isinstance(error, MqfsError):
            log.error("9P request failed", exc_info=error)
            error = DiskFailed()
        terms = self._negotiated
        self.put(encode(refusal(terms.dialect or Dialect.PLAIN, tag, error, terms.v9fs), terms.unix))
