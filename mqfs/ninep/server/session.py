"""The server's half of one 9P connection, without I/O: bytes in, the tree's calls, bytes out.

Owns fids, tags and flushing. Requests are performed in the order they arrive, inline; only a call that returned a
`Wait` is pending under its tag, and its reply is made by whoever settles it. It reads no socket and sends nothing:
server.py brings `receive` what arrived and carries away what `take` returns. What each message does is in
operations.py and linux_operations.py.
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
    DiskFailed,
    Interrupted,
    IsDirectory,
    MqfsError,
    OverLimit,
    TooLong,
    Unsupported,
)
from mqfs.file_locks import Key
from mqfs.net.peer import Peer
from mqfs.net.tokens import Proof
from mqfs.ninep.codec.dialect import Dialect, negotiate, refusal
from mqfs.ninep.codec.messages import Fcall, Rflush, Rread, Rversion, Rwrite, Tflush, Tread, Tversion, Twrite
from mqfs.ninep.codec.notation import show
from mqfs.ninep.codec.numbers import TYPES
from mqfs.ninep.codec.wire import (
    HEADER,
    IO_OVERHEAD,
    R_READ,
    R_WRITE,
    READ_HEADER,
    READ_OVERHEAD,
    RWRITE,
    T_READ,
    T_WRITE,
    TREAD,
    WRITE_HEADER,
    Buffer,
    Framer,
    decode,
    encode,
)
from mqfs.ninep.server import linux_operations, operations
from mqfs.ninep.server.fids import NOWHERE, Fid
from mqfs.ninep.server.pending import Later, Pending
from mqfs.wait import Wait

log = logging.getLogger("mqfs.ninep")

TRACE_DATA_BYTES = 64
APART_BYTES = 16_384  # data above this is sent from where it lies, not copied behind its header

Operation = Callable[["Session", Any], "Fcall | Later"]
OPERATIONS: dict[type[Any], Operation] = {**operations.OPERATIONS, **linux_operations.OPERATIONS}

_numbers = itertools.count(1)


def ended(*_: object) -> None:
    """What is left to do for a driver of which the connection has ended."""


class Session:
    """One connection. `wake` is called when a reply came without `receive`, perhaps from inside the engine."""

    def __init__(
        self,
        tree: Tree,
        peer: Peer,
        wake: Callable[[], None],
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.tree, self.peer = tree, peer
        self.number = next(_numbers)
        self.dialect: Dialect | None = None  # None until a Tversion was agreed to
        self.unix = False
        self.v9fs = False  # attached as Linux v9fs says it is, in so many words
        self.msize = limits.MSIZE_LEAST
        self.attached = False
        self.wrong_tokens = 0
        self.delay: Callable[[Callable[[], None]], None] = lambda then: then()  # a driver with a clock does it later
        self.unsent = 0  # bytes that `take` returned and the driver could not send yet
        self.fids: dict[int, Fid] = {}
        self.proofs: dict[int, Proof] = {}  # the fids of Tauth
        self._wake, self._trace = wake, trace
        self._framer = Framer(self.msize)
        self._pending: dict[int, Pending] = {}  # by tag; a flush that waits is there too, as what it waits for
        self._ready: deque[Pending] = deque()  # settled, and the reply needs the tree
        self._anew: Iterator[None] | None = None  # what a Tversion still has to do
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._taken_bytes = 0

    # ------------------------------------------------------------ bytes in and out

    @property
    def congested(self) -> bool:
        """Too much is unanswered or not taken: do not read on, call `receive` again when that has changed."""
        return self._out_bytes + self.unsent > limits.REPLY_BYTES or len(self._pending) > limits.TAGS

    @property
    def unfinished(self) -> int:
        """How many bytes came that are no whole request, or were not performed yet."""
        return self._framer.unfinished

    @property
    def held(self) -> int:
        """How many bytes wait here: of requests, and of replies."""
        return self._framer.unfinished + self._out_bytes + self.unsent

    @property
    def missing(self) -> int:
        """How many bytes the request that has begun still needs, if that is known."""
        return self._framer.missing

    @property
    def waiting(self) -> int:
        """How many requests wait, flushes included."""
        return len(self._pending)

    def receive(self, data: bytes = b"", slice_s: float = math.inf) -> bool:
        """Perform what arrived. False: congested, or the slice was over, before its end: to be called again.

        BadFrame: the connection is to be ended.
        """
        room, until = limits.REPLY_BYTES - self.unsent, perf_counter() + slice_s
        if self._anew is not None and not self._begin_anew(until):
            return False
        for buffer, start, size in self._framer.frames(data):
            number = buffer[start + 4]
            if self._trace is not None:
                self._general(buffer, start, size)
            elif number == T_READ and size == TREAD.size:
                self._read(*TREAD.unpack_from(buffer, start)[2:])
            elif number == T_WRITE and size >= WRITE_HEADER.size:
                self._write(buffer, start, size)
            else:
                self._general(buffer, start, size)
            if self._anew is not None and not self._begin_anew(until):
                return False
            if self._out_bytes > room or len(self._pending) > limits.TAGS or perf_counter() > until:
                return False
        return True

    def _begin_anew(self, until: float) -> bool:
        """Go on with a Tversion. False: the slice was over before its end."""
        for _ in self._anew or ():
            if perf_counter() > until:
                return False
        self._anew = None
        return True

    def take(self) -> list[bytes]:
        """The replies so far, to be sent in this order. Not to be called from inside the engine."""
        while self._ready:
            self._complete(self._ready.popleft())
        self._taken_bytes += self._out_bytes
        out, self._out, self._out_bytes = self._out, [], 0
        return out

    def abort(self) -> Iterator[None]:
        """The client asks for nothing more: only what is done and not yet answered still waits. In steps."""
        for pending in reversed(dict.fromkeys(self._pending.values())):  # so that none becomes the first of its queue
            if self._pending.get(pending.tag) is pending and pending.wait.cancel():
                self._forget(pending)
            yield

    def close(self, sent: int | None = None) -> None:
        """As `closing`, in one piece."""
        for _ in self.closing(sent):
            pass

    def closing(self, sent: int | None = None) -> Iterator[None]:
        """The connection ended: nothing waits any more, nothing stays open. In steps.

        `sent`: how many of the bytes that `take` returned left. A message that was taken and did not is given back.
        """
        yield from self._anew or ()
        yield from self.abort()  # first: until then a message may come for one of its reads
        if sent is not None:
            for fid in self.fids.values():
                if fid.reader is not None and fid.given[0] > sent:
                    fid.reader.push_back(fid.given[1])
        yield from self._reset()
        self._out, self._out_bytes, self._framer = [], 0, Framer(self.msize)  # now, and not with the next collection
        self._wake = self.delay = ended  # no circle with its driver: looks for those are rare

    def _put(self, head: bytes, data: bytes = b"") -> None:
        """A frame goes out, in one piece or two."""
        if self._trace is not None:
            frame = head + data
            self._trace(f"<- {show(decode(frame, 0, len(frame), self.unix), TRACE_DATA_BYTES)}")
        self._out_bytes += len(head) + len(data)
        if len(data) > APART_BYTES:
            self._out += (head, data)
        else:
            self._out.append(head + data)

    def _reply(self, message: Fcall) -> None:
        if type(message) is Rread:
            length = len(message.data)
            self._put(READ_HEADER.pack(READ_OVERHEAD + length, R_READ, message.tag, length), message.data)
        else:
            self._put(encode(message, self.unix))

    def _refuse(self, tag: int, error: BaseException) -> None:
        """Answer with an error; one that is not a condition of the tree is a bug, and said so in the log."""
        if isinstance(error, OSError):
            log.error("%s: request failed: %s", self.peer.where, error)
            error = DiskFailed()
        elif not isinstance(error, MqfsError):
            log.error("9P request failed", exc_info=error)
            error = DiskFailed()
        self._put(encode(refusal(self.dialect or Dialect.PLAIN, tag, error, self.v9fs), self.unix))

    # ------------------------------------------------------------ requests

    def _general(self, buffer: Buffer, start: int, size: int) -> None:
        """Any request, by way of its value."""
        if buffer[start + 4] not in TYPES and not buffer[start + 4] & 1 and self.dialect is not None:
            tag = HEADER.unpack_from(buffer, start)[2]
            self._refuse(tag, Unsupported(f"message of type {buffer[start + 4]}"))
            return
        request = decode(buffer, start, size, self.unix)
        if self._trace is not None:
            self._trace(f"-> {show(self._without_secrets(request), TRACE_DATA_BYTES)}")
        kind = type(request)
        if buffer[start + 4] & 1:
            raise BadFrame(f"{kind.__name__} from a client")
        if isinstance(request, Tversion):
            self._anew = self._version(request)
        elif self.dialect is None:
            raise BadFrame(f"{kind.__name__} before Tversion")
        elif isinstance(request, Tread):
            self._read(request.tag, request.fid, request.offset, request.count)
        elif isinstance(request, Twrite):
            self._write(buffer, start, size)
        elif request.tag in self._pending:
            self._refuse(request.tag, BadRequest(f"tag {request.tag} is in use"))
        elif isinstance(request, Tflush):
            self._flush(request)
        else:
            self._perform(request)

    def _without_secrets(self, request: Fcall) -> Fcall:
        if isinstance(request, Twrite) and request.fid in self.proofs:
            return request._replace(data=b"(a token)")
        return request

    def _version(self, request: Tversion) -> Iterator[None]:
        """Begin anew: whatever was, is over. In steps."""
        yield from self.abort()
        yield from self._reset()
        dialect = negotiate(request.version)
        if dialect is not None and request.msize < limits.MSIZE_LEAST:
            self._refuse(request.tag, BadRequest(f"msize {request.msize}; at least {limits.MSIZE_LEAST} is right"))
            return
        self.dialect = dialect
        self.unix = dialect is not None and dialect.unix
        self.v9fs = False
        self.msize = min(request.msize, limits.MSIZE_MOST) if dialect else limits.MSIZE_LEAST
        self._framer.msize = self.msize
        self._reply(Rversion(request.tag, self.msize, dialect.version if dialect else "unknown"))

    def _perform(self, request: Fcall) -> None:
        kind = type(request)
        try:
            if self.dialect is None or not self.dialect.has(kind):
                raise Unsupported(f"{kind.__name__} in this dialect")
            answer = OPERATIONS[kind](self, request)
            if isinstance(answer, Later):
                self._park(request.tag, answer)
            else:
                self._reply(answer)
        except BadFrame:
            raise
        except Exception as error:
            self._refuse(request.tag, error)

    def _read(self, tag: int, number: int, offset: int, count: int) -> None:
        fid = self.fids.get(number)
        try:
            if tag in self._pending or fid is None or fid.reader is None or count == 0:
                self._read_other(tag, number, fid, offset, count)
                return
            ends = False
            if fid.rest != NOWHERE:
                ends, fid.rest = fid.rest == offset, NOWHERE
                if ends and not (fid.truncated and (fid.unfinished or not fid.takes)):
                    self._put(READ_HEADER.pack(READ_OVERHEAD, R_READ, tag, 0))
                    return
            count = min(count, self.msize - READ_OVERHEAD)
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
            self._put(READ_HEADER.pack(READ_OVERHEAD + len(step), R_READ, tag, len(step)), step)
        except BadFrame:
            raise
        except Exception as error:
            self._refuse(tag, error)

    def _read_other(self, tag: int, number: int, fid: Fid | None, offset: int, count: int) -> None:
        """Whatever is not the reading of a file."""
        if self.dialect is None:
            raise BadFrame("Tread before Tversion")
        if tag in self._pending:
            raise BadRequest(f"tag {tag} is in use")
        if number in self.proofs:
            self._reply(Rread(tag, b""))  # there is nothing to be told
            return
        fid = self.fid(number)
        if fid.listing is not None and not self.dialect.linux:
            most = min(count, self.msize - READ_OVERHEAD)
            self._reply(Rread(tag, fid.listing.read(self.tree, offset, most, self.unix)))
        elif fid.listing is not None:
            raise IsDirectory
        elif fid.reader is None and not fid.xattr:
            raise BadFid(f"fid {number} is not open for reading")
        else:
            self._reply(Rread(tag, b""))

    def _park_read(self, tag: int, fid: Fid, offset: int, count: int, wait: Wait[bytes]) -> None:
        if fid.nonblocking and not wait.settled and wait.cancel():
            raise Again

        def then(data: bytes) -> Fcall:
            if fid.fills:
                self._expect_rest(fid, offset, count, len(data))
            if fid.takes:
                self._note_given(fid, data)
            return Rread(tag, data)

        self._park(tag, Later(wait, then, fid))

    def _expect_rest(self, fid: Fid, offset: int, count: int, length: int) -> None:
        """Linux v9fs asks again until its caller's buffer is full or 0 bytes come: have that answered, not parked.

        It asks again after a short answer, and after a full one whose count it clipped to msize - 24: that may have
        been all of a message, or a part whose rest is there. A full answer to a smaller count filled its caller's
        buffer.
        """
        if length and (length < count or count == self.msize - IO_OVERHEAD):
            fid.rest, fid.truncated = offset + length, length == count

    def _note_given(self, fid: Fid, data: bytes) -> None:
        """The next frame that goes out brings a message which was taken."""
        fid.given = self._taken_bytes + self._out_bytes + READ_OVERHEAD + len(data), data

    def _write(self, buffer: Buffer, start: int, size: int) -> None:
        _, _, tag, number, offset, length = WRITE_HEADER.unpack_from(buffer, start)
        if length != size - WRITE_HEADER.size:
            raise BadFrame(f"a Twrite of {length} bytes in a frame of {size}")
        if self.dialect is None:
            raise BadFrame("Twrite before Tversion")
        fid = self.fids.get(number)
        begin = start + WRITE_HEADER.size
        try:
            if tag in self._pending:
                raise BadRequest(f"tag {tag} is in use")
            if fid is None and number in self.proofs:
                self._prove(tag, self.proofs[number], bytes(memoryview(buffer)[begin : begin + length]))
                return
            if fid is None or fid.writer is None:
                raise BadFid(f"fid {number} is not open for writing")
            if length > self.msize - IO_OVERHEAD:
                raise TooLong(f"at most {self.msize - IO_OVERHEAD} bytes with this msize")
            fid.rest = NOWHERE  # whoever writes in between does not go on with a read
            step = fid.writer.write(bytes(memoryview(buffer)[begin : begin + length]), offset)
            if isinstance(step, Wait):
                self._park_write(tag, fid, step)
            else:
                self._put(RWRITE.pack(RWRITE.size, R_WRITE, tag, step))
        except BadFrame:
            raise
        except Exception as error:
            self._refuse(tag, error)

    def _prove(self, tag: int, proof: Proof, token: bytes) -> None:
        """A token. A wrong one is answered after a while, and the connection ends where they go on, or do not wait."""
        if self.wrong_tokens and self._pending:
            raise BadTokens("a token came before the wrong one was answered")
        try:
            self._put(RWRITE.pack(RWRITE.size, R_WRITE, tag, proof.write(token)))
        except Denied as error:
            self.wrong_tokens += 1
            if self.wrong_tokens >= limits.TOKEN_GUESSES:
                raise BadTokens(f"{self.wrong_tokens} wrong tokens") from None
            wait: Wait[int] = Wait()
            self._park(tag, Later(wait, lambda count: Rwrite(tag, count)))
            self.delay(partial(wait.fail, error))

    def _park_write(self, tag: int, fid: Fid, wait: Wait[int]) -> None:
        if fid.nonblocking and not wait.settled and wait.cancel():
            raise Again
        self._park(tag, Later(wait, lambda count: Rwrite(tag, count), fid))

    # ------------------------------------------------------------ waiting and flushing

    def _park(self, tag: int, later: Later) -> None:
        """Hold a request until its wait is settled. Too many of them: one that can still be taken back is refused."""
        if len(self._pending) >= limits.TAGS and not later.wait.settled and later.wait.cancel():
            raise OverLimit(f"{limits.TAGS} requests of this connection wait")
        pending = Pending(tag, later)
        try:
            self.tree.waits.take(self.peer.account)
        except OverLimit:
            if later.wait.cancel():
                raise
            pending.counted = False
        self._pending[tag] = pending
        if later.fid is not None:
            later.fid.pending.add(pending)
        later.wait.subscribe(lambda _: self._settled(pending))

    def _settled(self, pending: Pending) -> None:
        """Perhaps from inside the engine, which must not be called from here."""
        if self._pending.get(pending.tag) is not pending:
            return  # given up by a Tversion, or by the end of the connection
        if pending.calls:
            self._ready.append(pending)
        else:
            self._complete(pending)
        self._wake()

    def _complete(self, pending: Pending) -> None:
        if self._pending.get(pending.tag) is not pending:
            return
        self._forget(pending)
        try:
            self._reply(pending.then(pending.wait.result()))
        except Exception as error:
            self._refuse(pending.tag, error)
        for tag in pending.flushes:
            self._reply(Rflush(tag))

    def _forget(self, pending: Pending) -> None:
        for tag in (pending.tag, *pending.flushes):
            del self._pending[tag]
        if pending.counted:
            self.tree.waits.give(self.peer.account)
        if pending.fid is not None:
            pending.fid.pending.discard(pending)

    def _flush(self, request: Tflush) -> None:
        """Give up a request. What can no longer be given up is answered first, then the flush."""
        pending = self._pending.get(request.oldtag)
        if pending is None:
            self._reply(Rflush(request.tag))
        elif pending.wait.cancel():
            self._forget(pending)
            self._reply(Rflush(request.tag))
        else:
            pending.flushes.append(request.tag)
            self._pending[request.tag] = pending

    # ------------------------------------------------------------ fids

    def fid(self, number: int) -> Fid:
        fid = self.fids.get(number)
        if fid is None:
            raise BadFid(f"fid {number} is not known")
        return fid

    def add(self, fid: Fid) -> None:
        """A new fid. Raises OverLimit."""
        self.tree.memory.take(self.peer.account, limits.FID_BYTES)
        self.fids[fid.number] = fid

    def check_new(self, number: int) -> None:
        """May this number become a fid?"""
        if number in self.fids or number in self.proofs:
            raise BadFid(f"fid {number} is in use")
        if len(self.fids) + len(self.proofs) >= limits.FIDS:
            raise OverLimit(f"{limits.FIDS} fids of this connection are in use")

    def clunk(self, fid: Fid) -> None:
        """Let go of a fid: its reads that wait end as interrupted, its writes are answered when they are done."""
        for pending in list(fid.pending):
            if pending.wait.cancel():
                self._forget(pending)
                self._refuse(pending.tag, Interrupted())
        del self.fids[fid.number]
        self.tree.memory.give(self.peer.account, limits.FID_BYTES)
        self._close(fid)

    def _close(self, fid: Fid) -> None:
        if fid.locked:
            self.tree.locks.release_through(Key(fid.node.qid.path, False), (self.number, fid.number))
        if fid.listing is not None:
            fid.listing.close()
        handle, fid.handle, fid.reader, fid.writer, fid.listing = fid.handle, None, None, None, None
        if handle is not None:
            handle.close()
        if fid.remove_at_close:
            try:
                operations.remove_node(self.tree, fid)
            except MqfsError as error:
                log.info("not removed at its close: %s: %s", fid.node.name, error)

    def _reset(self) -> Iterator[None]:
        """Nothing waits and no fid is known any more. A write that is appended stays, unanswered. In steps."""
        pending, self._pending = self._pending, {}
        self._ready.clear()
        for one in reversed(dict.fromkeys(pending.values())):
            one.wait.cancel()
            if one.counted:
                self.tree.waits.give(self.peer.account)
            yield
        fids, self.fids, self.proofs = self.fids, {}, {}
        self.tree.memory.give(self.peer.account, limits.FID_BYTES * len(fids))
        for fid in fids.values():
            try:
                self._close(fid)
            except Exception:
                log.exception("closing fid %d failed", fid.number)
            yield
