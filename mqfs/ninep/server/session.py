"""The server's half of one 9P connection, without I/O: bytes in, calls of the tree, bytes out.

Requests are performed inline, in the order they arrive. Only a call that returned a `Wait` is parked under its tag; the
reply is made when the wait is resolved. A session reads no socket and sends nothing: connection.py passes bytes to
`receive` and sends those of `take`. Reads and writes are here; the other messages are performed in operations.py and
linux_operations.py.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import (
    Again,
    BadFid,
    BadFrame,
    BadRequest,
    BadTokens,
    Denied,
    IsDirectory,
    TooLong,
    Unsupported,
)
from mqfs.model import Step, Wait
from mqfs.net.peer import Peer
from mqfs.net.tokens import Proof
from mqfs.ninep.codec.messages import Fcall, Rread, Rversion, Rwrite, Tflush, Tread, Tversion, Twrite
from mqfs.ninep.codec.notation import show
from mqfs.ninep.codec.wire import (
    HEADER,
    IO_OVERHEAD,
    R_READ,
    R_WRITE,
    READ_HEADER,
    READ_OVERHEAD,
    RWRITE,
    T_FLUSH,
    T_READ,
    T_VERSION,
    T_WRITE,
    TREAD,
    TYPES,
    WRITE_HEADER,
    Buffer,
    Framer,
    decode,
    negotiate,
)
from mqfs.ninep.server import linux_operations, operations, resumable
from mqfs.ninep.server.fids import NOWHERE, Fid, FidTable, OpenDirectory
from mqfs.ninep.server.pending import TRACE_DATA_BYTES, Later, Negotiated, PendingRequests, Replies, later

log = logging.getLogger("mqfs.ninep")

Operation = Callable[["Session", Any], Fcall | Later]
OPERATIONS: dict[type[Any], Operation] = {**operations.OPERATIONS, **linux_operations.OPERATIONS}

FIDS = ("fid", "afid", "newfid", "dfid", "olddirfid", "newdirfid", "dirfd")  # fields that hold the number of a fid

_numbers = itertools.count(1)


def ended(*_: object) -> None:
    """Do nothing: a stand-in for the driver's callbacks once its connection has ended."""


class Session:
    """One connection. `wake` is called when a parked request was answered, perhaps from inside the engine."""

    def __init__(
        self,
        tree: Tree,
        peer: Peer,
        wake: Callable[[], None],
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.tree, self.peer = tree, peer
        self.number = next(_numbers)
        self.negotiated = Negotiated()
        self.attached = False
        self.fids = FidTable(tree.memory, peer.account)
        self.wrong_tokens = 0
        self.delay: Callable[[Callable[[], None]], None] = lambda then: then()  # calls later in a driver with a clock
        self.answered: Callable[[Callable[[], Any]], Step[Any]] = lambda call: call()  # the same for looked-up names
        self.unsent = 0  # bytes that `take` returned and the driver has not sent yet
        self._trace = trace
        self._framer = Framer(self.negotiated.msize)
        self._replies = Replies(self.negotiated, peer.where, trace)
        self._parked = PendingRequests(tree.waits, peer, self._replies, wake)
        self._restart: Iterator[None] | None = None  # the remaining steps of a Tversion
        self._early: deque[bytes] = deque()  # requests whose fid is being attached or proven, and those after them
        self._early_bytes = 0

    # ------------------------------------------------------------ bytes in and out

    @property
    def congested(self) -> bool:
        """Whether too much is unanswered or unsent: stop reading, and call `receive` once that has changed."""
        is_full = self._replies.bytes + self.unsent > limits.REPLY_BYTES or len(self._parked.by_tag) > limits.TAGS
        return is_full or (self._is_full_of_early and not self.resumes)

    @property
    def resumes(self) -> bool:
        """Whether early requests can be performed now: call `receive`."""
        return bool(self._early) and not self._is_early(self._early[0], 0, len(self._early[0]))

    @property
    def waits_to_resume(self) -> bool:
        """Whether early requests are still queued."""
        return bool(self._early)

    @property
    def _is_full_of_early(self) -> bool:
        return self._early_bytes > limits.REPLY_BYTES or len(self._early) > limits.TAGS

    @property
    def unfinished(self) -> int:
        """The bytes received of requests that are incomplete or not yet performed."""
        return self._framer.unfinished + self._early_bytes

    @property
    def held(self) -> int:
        """The bytes in memory of requests and replies."""
        return self.unfinished + self._replies.bytes + self.unsent

    @property
    def missing(self) -> int:
        """The number of bytes that the last request still needs; 0 if unknown."""
        return self._framer.missing

    @property
    def is_mute(self) -> bool:
        """Whether to drop replies as the server stops: a mount repeats its requests at the next server, and would take
        the end-of-file of a closed tree for that of its file."""
        return self.negotiated.resumable and self.tree.closing

    @property
    def waiting(self) -> int:
        """The number of parked requests, with the flushes that wait for them."""
        return len(self._parked.by_tag)

    def receive(self, data: bytes = b"", slice_s: float = math.inf) -> bool:
        """Perform requests. Return False if congested, or the slice ended, before the end of the data: call it again.

        Raises BadFrame: the caller has to end the connection.
        """
        room, until = limits.REPLY_BYTES - self.unsent, perf_counter() + slice_s
        if self._restart is not None and not self._continue_restart(until):
            return False
        if self._early:
            self._framer.keep(data)
            data = b""
            if not self._perform_early(room, until):
                return False
        for buffer, start, size in self._framer.frames(data):
            number = buffer[start + 4]
            if (self._early or self._parked.making) and self._queue_early(buffer, start, size):
                if self._is_full_of_early:
                    return False
                continue
            if self._trace is not None:
                self._general(buffer, start, size)
            elif number == T_READ and size == TREAD.size:
                self._read(*TREAD.unpack_from(buffer, start)[2:])
            elif number == T_WRITE and size >= WRITE_HEADER.size:
                self._write(buffer, start, size)
            else:
                self._general(buffer, start, size)
            if self._restart is not None and not self._continue_restart(until):
                return False
            if self._early and not self._perform_early(room, until):  # the last request was a Tflush
                return False
            if self._is_enough(room, until):
                return False
        return True

    def _is_enough(self, room: int, until: float) -> bool:
        return self._replies.bytes > room or len(self._parked.by_tag) > limits.TAGS or perf_counter() > until

    def _continue_restart(self, until: float) -> bool:
        """Continue a Tversion. Return False if the slice ended before it was done."""
        for _ in self._restart or ():
            if perf_counter() > until:
                return False
        self._restart = None
        return True

    def _is_early(self, buffer: Buffer, start: int, size: int) -> bool:
        """Whether a request names a fid whose user is being looked up: a client may send it before the answer."""
        if not self._parked.making or buffer[start + 4] not in TYPES:
            return False
        request = decode(buffer, start, size, self.negotiated.unix)
        return not self._parked.making.isdisjoint(getattr(request, name, None) for name in FIDS)

    def _queue_early(self, buffer: Buffer, start: int, size: int) -> bool:
        """Queue a request that is early, or that follows an early one. A Tversion and a Tflush wait for no look-up."""
        if buffer[start + 4] in (T_VERSION, T_FLUSH) or not (self._early or self._is_early(buffer, start, size)):
            return False
        self._early.append(bytes(memoryview(buffer)[start : start + size]))
        self._early_bytes += size
        return True

    def _perform_early(self, room: int, until: float) -> bool:
        """Perform the queued requests whose fid is ready. Return False if that was enough, or too many stay queued."""
        while self.resumes:
            frame = self._early.popleft()
            self._early_bytes -= len(frame)
            self._general(frame, 0, len(frame))
            if self._is_enough(room, until):
                return False
        return not self._is_full_of_early

    def _forget_early(self, tag: int | None = None) -> None:
        """Drop the early requests, or those of a tag, without an answer."""
        kept = [frame for frame in self._early if tag is not None and HEADER.unpack_from(frame)[2] != tag]
        self._early, self._early_bytes = deque(kept), sum(map(len, kept))

    def take(self) -> list[bytes]:
        """Return the replies so far, to be sent in this order. Never call this from inside the engine."""
        if self._parked.ready:
            self._parked.complete_ready()
        return self._replies.take()

    def abort(self) -> Iterator[None]:
        """Cancel the requests that can be cancelled, in steps. A completed, unanswered write stays parked."""
        return self._parked.abort()

    def close(self, sent: int | None = None) -> None:
        """Do what `closing` does, in one step."""
        for _ in self.closing(sent):
            pass

    def closing(self, sent: int | None = None) -> Iterator[None]:
        """End the connection, in steps: no request stays parked, no fid open.

        `sent`: how many of the bytes that `take` returned were sent. A claimed message that was not sent is released.
        """
        yield from self._restart or ()
        yield from self.abort()  # first: until then a message may arrive for one of its reads
        if sent is not None:
            for fid in self.fids.by_number.values():
                if fid.reader is not None and fid.given[0] > sent:
                    fid.reader.push_back(fid.given[1])
        yield from self._reset()
        self._replies.take()  # free its memory now, not with the next collection
        self._framer = Framer(self.negotiated.msize)
        self._parked.wake = self.delay = ended  # break the reference cycle with the driver: collections are rare

    def clunk(self, fid: Fid) -> None:
        """Remove a fid. Its parked reads fail with Interrupted; its parked writes are answered when they are done."""
        self._parked.interrupt(fid)
        self.fids.remove(fid)
        fid.close(self.tree, self.number)

    def _reset(self) -> Iterator[None]:
        """Remove all requests and fids, in steps."""
        self._forget_early()
        yield from self._parked.clear()
        for fid in self.fids.clear():
            try:
                fid.close(self.tree, self.number)
            except Exception:
                log.exception("closing fid %d failed", fid.number)
            yield

    # ------------------------------------------------------------ requests

    def _general(self, buffer: Buffer, start: int, size: int) -> None:
        """Decode and perform any request."""
        if buffer[start + 4] not in TYPES and not buffer[start + 4] & 1 and self.negotiated.dialect is not None:
            tag = HEADER.unpack_from(buffer, start)[2]
            self._replies.refuse(tag, Unsupported(f"unknown message type {buffer[start + 4]}"))
            return
        request = decode(buffer, start, size, self.negotiated.unix)
        if self._trace is not None:
            self._trace(f"-> {show(self._without_secrets(request), TRACE_DATA_BYTES)}")
        kind = type(request)
        if buffer[start + 4] & 1:
            raise BadFrame(f"unexpected {kind.__name__} (expected a request)")
        if isinstance(request, Tversion):
            self._restart = self._version(request)
        elif self.negotiated.dialect is None:
            raise BadFrame(f"{kind.__name__}: no Tversion before it")
        elif isinstance(request, Tread):
            self._read(request.tag, request.fid, request.offset, request.count)
        elif isinstance(request, Twrite):
            self._write(buffer, start, size)
        elif request.tag in self._parked.by_tag:
            self._replies.refuse(request.tag, BadRequest(f"tag {request.tag}: in use"))
        elif isinstance(request, Tflush):
            self._forget_early(request.oldtag)
            self._parked.flush(request)
        else:
            self._perform(request)

    def _without_secrets(self, request: Fcall) -> Fcall:
        if isinstance(request, Twrite) and request.fid in self.fids.proofs:
            return request._replace(data=b"(a token)")
        return request

    def _version(self, request: Tversion) -> Iterator[None]:
        """Restart the connection without requests and fids, in steps, and answer the Tversion."""
        yield from self.abort()
        yield from self._reset()
        dialect = negotiate(request.version)
        if dialect is not None and request.msize < limits.MSIZE_LEAST:
            error = BadRequest(f"msize {request.msize} (expected at least {limits.MSIZE_LEAST})")
            self._replies.refuse(request.tag, error)
            return
        msize = min(request.msize, limits.MSIZE_MOST) if dialect else limits.MSIZE_LEAST
        self.negotiated.agree(dialect, msize)
        self._framer.msize = msize
        self._replies.reply(Rversion(request.tag, msize, dialect.version if dialect else "unknown"))

    def _perform(self, request: Fcall) -> None:
        kind = type(request)
        try:
            dialect = self.negotiated.dialect
            if dialect is None or not dialect.has(kind):
                raise Unsupported(f"{kind.__name__}: not in {dialect.version if dialect else 'any dialect'}")
            self._answer(request.tag, OPERATIONS[kind](self, request))
        except BadFrame:
            raise
        except Exception as error:
            self._replies.refuse(request.tag, error)

    def _answer(self, tag: int, answer: Fcall | Later) -> None:
        if isinstance(answer, Later):
            self._parked.park(tag, answer)
        else:
            self._replies.reply(answer)

    def _read(self, tag: int, number: int, offset: int, count: int) -> None:
        fid = self.fids.by_number.get(number)
        try:
            if tag in self._parked.by_tag or fid is None or fid.reader is None or count == 0:
                self._read_other(tag, number, fid, offset, count)
                return
            ends = False
            if fid.rest != NOWHERE:
                ends, fid.rest = fid.rest == offset, NOWHERE
                if ends and not (fid.truncated and (fid.unfinished or not fid.takes)):
                    self._replies.put(READ_HEADER.pack(READ_OVERHEAD, R_READ, tag, 0))
                    return
            count = min(count, self.negotiated.msize - READ_OVERHEAD)
            step = fid.reader.read(count, offset)
            if ends and isinstance(step, Wait) and not step.settled and step.cancel():
                step = b""
            if isinstance(step, Wait):
                self._park_read(tag, fid, offset, count, step)
                return
            if fid.fills:
                self._expect_rest(fid, offset, count, len(step))
            if fid.takes:
                self._note_given(fid, step)
            self._replies.put(READ_HEADER.pack(READ_OVERHEAD + len(step), R_READ, tag, len(step)), step)
        except BadFrame:
            raise
        except Exception as error:
            self._replies.refuse(tag, error)

    def _read_other(self, tag: int, number: int, fid: Fid | None, offset: int, count: int) -> None:
        """Answer a read of anything but an open file's data: a token's fid, a STATE, a directory, or an error."""
        if self.negotiated.dialect is None:
            raise BadFrame("Tread: no Tversion before it")
        if tag in self._parked.by_tag:
            raise BadRequest(f"tag {tag}: in use")
        if number in self.fids.proofs:
            most = min(count, self.negotiated.msize - READ_OVERHEAD)
            self._replies.reply(Rread(tag, self.fids.proofs[number].read(most, offset)))
            return
        fid = self.fids.find(number)
        if fid.handle is not None and count == 0 and self.negotiated.resumable:
            step: Any
            if offset:
                step = resumable.await_state(fid)
            else:
                step = resumable.state(fid.handle, fid.reader is not None, fid.writer is not None)
            self._answer(tag, later(step, lambda data: Rread(tag, data), fid=fid))
        elif fid.listing is not None and not self.negotiated.dialect.linux:
            self._answer(tag, self._read_directory(tag, fid, fid.listing, offset, count))
        elif fid.listing is not None:
            raise IsDirectory
        elif fid.reader is None and not fid.xattr:
            raise BadFid(f"fid {number}: not open for reading")
        else:
            self._replies.reply(Rread(tag, b""))

    def _read_directory(self, tag: int, fid: Fid, listing: OpenDirectory, offset: int, count: int) -> Fcall | Later:
        most = min(count, self.negotiated.msize - READ_OVERHEAD)

        def then(_: None) -> Fcall | Later:
            step = self.answered(partial(listing.read, self.tree, offset, most, self.negotiated.unix))
            return later(step, lambda data: Rread(tag, data), fid=fid)

        return later(listing.begin(offset), then, fid=fid, calls=True)

    def _park_read(self, tag: int, fid: Fid, offset: int, count: int, wait: Wait[bytes]) -> None:
        if fid.nonblocking and not wait.settled and wait.cancel(Again()):
            raise Again

        def then(data: bytes) -> Fcall:
            if fid.fills:
                self._expect_rest(fid, offset, count, len(data))
            if fid.takes:
                self._note_given(fid, data)
            return Rread(tag, data)

        self._parked.park(tag, Later(wait, then, fid))

    def _expect_rest(self, fid: Fid, offset: int, count: int, length: int) -> None:
        """Have the next read of Linux v9fs answered at once, not parked: v9fs repeats a read until its buffer is full.

        It repeats a read after a short reply, and after a full one whose count it clipped to msize - 24: that may have
        been a whole message, or a part of one with more to read. A full reply to a smaller count filled its caller's
        buffer.
        """
        if length and (length < count or count == self.negotiated.msize - IO_OVERHEAD):
            fid.rest, fid.truncated = offset + length, length == count

    def _note_given(self, fid: Fid, data: bytes) -> None:
        """Record where the reply with a claimed message, the next reply, will end."""
        fid.given = self._replies.taken_bytes + self._replies.bytes + READ_OVERHEAD + len(data), data

    def _write(self, buffer: Buffer, start: int, size: int) -> None:
        _, _, tag, number, offset, length = WRITE_HEADER.unpack_from(buffer, start)
        if length != size - WRITE_HEADER.size:
            raise BadFrame(f"invalid Twrite: {length} bytes in a frame of {size}")
        if self.negotiated.dialect is None:
            raise BadFrame("Twrite: no Tversion before it")
        fid = self.fids.by_number.get(number)
        begin = start + WRITE_HEADER.size
        try:
            if tag in self._parked.by_tag:
                raise BadRequest(f"tag {tag}: in use")
            if fid is None and number in self.fids.proofs:
                self._prove(tag, number, bytes(memoryview(buffer)[begin : begin + length]))
                return
            if fid is None or fid.writer is None:
                raise BadFid(f"fid {number}: not open for writing")
            if length > (most := self.negotiated.msize - IO_OVERHEAD):
                raise TooLong(f"{length} bytes (expected at most {most} with this msize)")
            fid.rest = NOWHERE  # a write ends a repeated read
            step = fid.writer.write(bytes(memoryview(buffer)[begin : begin + length]), offset)
            if isinstance(step, Wait):
                self._park_write(tag, fid, step)
            else:
                self._replies.put(RWRITE.pack(RWRITE.size, R_WRITE, tag, step))
        except BadFrame:
            raise
        except Exception as error:
            self._replies.refuse(tag, error)

    def _prove(self, tag: int, number: int, token: bytes) -> None:
        """Check a token. A wrong one is answered after a delay. Several, or another during the delay, end the
        connection."""
        if self.wrong_tokens and self._parked.by_tag:
            raise BadTokens("token: sent before the last one was answered")
        step = self.answered(partial(self._check_token, self.fids.proofs[number], token))
        self._answer(tag, later(step, lambda step: later(step, lambda count: Rwrite(tag, count)), makes=number))

    def _check_token(self, proof: Proof, token: bytes) -> Step[int]:
        """Return the count of the Rwrite. Raises BadTokens, BadRequest, TooLong, NotAnswered."""
        try:
            return proof.write(token)
        except Denied as error:
            self.wrong_tokens += 1
            if self.wrong_tokens >= limits.TOKEN_GUESSES:
                raise BadTokens(f"wrong tokens: {self.wrong_tokens}") from None
            wait: Wait[int] = Wait()
            self.delay(partial(wait.fail, error))
            return wait

    def _park_write(self, tag: int, fid: Fid, wait: Wait[int]) -> None:
        if fid.nonblocking and not wait.settled and wait.cancel():
            raise Again
        self._parked.park(tag, Later(wait, lambda count: Rwrite(tag, count), fid))
