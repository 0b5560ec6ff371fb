"""Open files of a server's tree: after a restart reads continue, and no message is written twice.

- Each read of a file with a position returns that position; when the file is opened again, reads continue there. A
  reader of a stream reads ahead, as that claims nothing.
- A message is written by `.put` under an id, so that a write without an answer can be repeated. If the group's `dedup`
  time is too short for that, the write fails with EIO instead.
- A claim ends with its server: a command about it is Stale.
- A snapshot (`.stats`, `.kept/STREAM`) is opened again, and read from the requested offset.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mqfs import limits
from mqfs.engine.files.handle import PartialRead
from mqfs.errors import (
    BadRequest,
    Denied,
    DiskFailed,
    Exists,
    Interrupted,
    MqfsError,
    NotFound,
    OverLimit,
    Stale,
    TooLong,
)  # fmt: skip
from mqfs.model import Step, User, Wait
from mqfs.ninep.client.machine import check
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import Fcall
from mqfs.ninep.codec.wire import READ_OVERHEAD
from mqfs.ninep.server.resumable import (
    CLOSED,
    LINES,
    PARKABLE,
    POSITION,
    POSITIONED,
    READABLE,
    SEQUENTIAL,
    SIZED,
    STATE,
    TAKES,
    WRITABLE,
)
from mqfs.remote.ahead import ReadAhead, open_state
from mqfs.remote.channels import REOPEN_PAUSES_S, PutChannel, next_id, read_dedup, with_id
from mqfs.remote.link import Link
from mqfs.remote.session import CommandRequest, OneRequest, Procedure, ServerStopsError, drop

if TYPE_CHECKING:
    from mqfs.remote.tree import RemoteNode, RemoteTree

CLAIM_VERBS = frozenset(("ack", "nack", "release", "dead", "touch"))
ANSWERED_VERBS = frozenset(("info", "measure", "selected", "streams"))  # the next read returns their answers
SETUP_VERBS = frozenset(("format", "select", "cover", "until", "prefetch", "seek"))  # repeated when it is reopened
ONCE_VERBS = frozenset(("eof", "clear", "drop", "redrive"))  # of ctl: never repeated
MARGIN_S = 1.0  # no repeat that close to the time when the id is forgotten


class OpenFile:
    """An open file, with the calls of the engine's handles. It outlives its fid."""

    opening: Step[object] = None
    reader_pid = 0

    def __init__(self, tree: RemoteTree, node: RemoteNode, user: User, access: int) -> None:
        self.tree, self.session, self.node, self.user, self.access = tree, tree.session, node, user, access
        self.reads, self.writes = access != os.O_WRONLY, access != os.O_RDONLY
        self.fid, self.link = -1, None  # type: int, Link | None
        self.failed: MqfsError | None = None  # why it could not be opened again
        self.takes = self.parkable = self.sequential = self.positioned = self.cuts_lines = False
        self.size: int | None = None
        self.position = 0  # after the last message read, in a file with a position
        self.resume = 0  # the position at which the next Tread has to continue
        self.last = PartialRead()
        self.returned: list[bytes] = []  # read next: undelivered data, and why a claim is stale
        self.due = set[str]()  # "refusal", "answer": texts at the server, which the next reads return in that order
        self.texts: dict[str, bytes] = {}  # the unread rests of such texts
        self.setup: dict[str, str] = {}  # commands to repeat
        self.partial = b""  # an unfinished line
        self.claimed_on: Link | None = None  # the connection of the last claim
        self.channel: PutChannel | None = None
        self.dedup_s = float("inf")  # how long ids are remembered by a `.put` that was opened again
        self.ahead: ReadAhead | None = None
        self._readers: dict[int, Callable[[], None]] = {}  # stop functions of the watched processes behind its claims
        self._is_watching = False
        self._notify: Callable[[], None] | None = None  # of poll

    # ------------------------------------------------------------ opening

    def open(self, link: Link, repeated: bool) -> Procedure[OpenFile]:
        fid, replies = yield from self.tree.opened_with(
            link, self.user, self.node, self.access, lambda fid: [open_state(fid)]
        )
        yield from self.on_opened(link, fid, check(replies[0]))
        return self

    def on_opened(self, link: Link, fid: int, state: Any) -> Procedure[None]:
        """Set the fid and the STATE of the opened file, and register it."""
        self.fid, self.link = fid, link
        self.position, size, flags = STATE.unpack(state.data)
        self.takes, self.parkable = bool(flags & TAKES), bool(flags & PARKABLE)
        self.sequential, self.positioned = bool(flags & SEQUENTIAL), bool(flags & POSITIONED)
        self.cuts_lines = bool(flags & LINES)
        self.size = size if flags & SIZED else None
        if self.positioned and self.parkable and not self.writes:
            self.ahead = ReadAhead(self)
        if self.writes and self.node.is_stream:
            self.channel = yield from self.tree.channels.find(link, self.user, self.node)
        self.session.files[self] = None

    def reopen(self, link: Link) -> Procedure[None]:
        """Open the file on a new connection, or record why that failed."""
        setup = "".join(f"{line}\n" for line in self.setup.values()).encode()
        said: list[Fcall] = [m.Twrite(0, 0, 0, setup)] if setup else []

        def requests(fid: int) -> list[Fcall]:
            return [*(one._replace(fid=fid) for one in said), open_state(fid)]  # type: ignore[attr-defined]

        for pause_s in (*REOPEN_PAUSES_S, 0.0):
            try:
                if self.writes and self.node.name == ".put" and not self.node.is_in_part:
                    self.dedup_s = yield from self._read_dedup(link)
                fid, replies = yield from self.tree.opened_with(link, self.user, self.node, self.access, requests)
                for reply in replies:
                    check(reply)
                yield from self.tree.locks.retake(self, fid)
            except MqfsError as error:
                if pause_s:  # a stopping server may refuse it: then this connection ends
                    yield pause_s
                else:
                    self.failed = error
            else:
                self.fid, self.link, self.failed = fid, link, None
                self.due.clear()
                if self not in self.session.files:  # closed meanwhile
                    drop(link, fid)
                self.resume = self.position if self.positioned else 0
                return

    def _read_dedup(self, link: Link) -> Procedure[float]:
        """Return for how many seconds an id is remembered; 0 if unknown."""
        try:
            return (yield from read_dedup(self.tree, self.node, link))
        except MqfsError:
            return 0.0

    def on_ready(self) -> None:
        """Resume reads and polls: all files are open again."""
        self._is_watching = False
        if self.ahead is not None:
            self.ahead.on_ready()
        if (notify := self._notify) is not None:
            self._notify = None
            notify()  # the kernel polls again

    def on_closed(self) -> None:
        """End the reads: the mount ends."""
        if self.ahead is not None:
            self.ahead.end(None)

    def require_fid(self) -> int:
        if self.failed is not None:
            raise self.failed
        return self.fid

    # ------------------------------------------------------------ reading

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        if self.returned:
            data = self.returned.pop(0)
            if len(data) > count:
                self.returned.insert(0, data[count:])
            return data[:count]
        if not self.reads:
            raise Denied(f"{self.node.name!r}: not open for reading")
        if self.ahead is not None:
            return self.ahead.read(count, offset)
        call: OneRequest[bytes]
        if (self.due or self.texts) and self.positioned:
            return self._read_text(count, offset)
        if self.positioned:
            if (rest := self.rest(count, offset)) is not None:
                return rest
            call = OneRequest(self.session, self._ask_next, partial(self._took_next, count, offset))
        else:
            took = partial(self._took, count, offset, self.reader_pid)
            call = OneRequest(self.session, partial(self._ask, count, offset), took)
        return self.session.begin(call)

    def rest(self, count: int, offset: int) -> bytes | None:
        """Return the rest of the last message, or None if the next message is due."""
        last = self.last
        return last.rest(count, offset, self.sequential) if last.can_push_back or last.body else None

    def _ask(self, count: int, offset: int, call: OneRequest[bytes]) -> Fcall | bytes:
        if self.failed is not None:
            return self.after_failure()
        assert call.link is not None
        return m.Tread(0, self.fid, offset, min(count, call.link.machine.msize - READ_OVERHEAD))

    def after_failure(self) -> bytes:
        """Return end-of-file if the file could not be opened again because it was removed. Raises any other reason."""
        assert self.failed is not None
        if isinstance(self.failed, NotFound | Stale):
            return b""
        raise self.failed

    def _took(self, count: int, offset: int, pid: int, reply: Any) -> Step[bytes]:
        data: bytes = reply.data
        if not data and count and (self.takes or self.parkable):
            return self.verify_end(partial(self.read, count, offset))
        if self.takes:
            if data:
                self.claimed_on = self.link
                self._watch_readers(pid)
        elif not self.parkable and 0 < len(data) < count:  # the kernel takes a short reply for a snapshot's end
            return self._read_on(data, count, offset)
        return data

    def _read_on(self, data: bytes, count: int, offset: int) -> Step[bytes]:
        """Read the rest of what the kernel asked of a snapshot: one message of 9P holds less."""
        rest = self.read(count - len(data), offset + len(data))
        if not isinstance(rest, Wait):
            return data + rest
        whole: Wait[bytes] = Wait()

        def joined(wait: Wait[bytes]) -> None:
            try:
                whole.resolve(data + wait.result())
            except MqfsError as error:
                whole.fail(error)

        rest.subscribe(joined)
        return whole

    def _ask_next(self, call: OneRequest[bytes]) -> Fcall | bytes:
        if self.failed is not None:
            return self.after_failure()
        return self.next_request()

    def next_request(self) -> m.Tread:
        assert self.link is not None
        count = min(limits.MESSAGE_BYTES + POSITION.size, self.link.machine.msize - READ_OVERHEAD)
        request = m.Tread(0, self.fid, self.resume, count)
        self.resume = 0
        return request

    def verify_end(self, again: Callable[[], Step[bytes]]) -> Step[bytes]:
        """Return end-of-file, unless the server only says it as it stops: then read `again` from the next one."""

        def finish(reply: Any) -> Step[bytes]:
            if STATE.unpack(reply.data)[2] & CLOSED:
                raise ServerStopsError
            return again() if call.repeated else b""

        def make(call: OneRequest[bytes]) -> Fcall | bytes:
            return open_state(self.fid) if self.failed is None else self.after_failure()

        call: OneRequest[bytes] = OneRequest(self.session, make, finish, is_short=True)
        return self.session.begin(call)

    def _took_next(self, count: int, offset: int, reply: Any) -> Step[bytes]:
        if len(reply.data) == POSITION.size and count:
            return self.verify_end(partial(self.read, count, offset))
        (self.position,) = POSITION.unpack_from(reply.data)
        return self.last.first(reply.data[POSITION.size :], count, offset)

    def _read_text(self, count: int, offset: int) -> Step[bytes]:
        """Read a text of the server, or the rest of one, before the rest of the last message, which is kept here. A new
        text replaces the rest of an older one of its kind."""
        for kind in ("refusal", "answer"):
            text = self.texts.pop(kind, b"")
            if kind in self.due:
                break
            if text:
                if len(text) > count:
                    self.texts[kind] = text[count:]
                return text[:count]
        is_due = True

        def make(call: OneRequest[bytes]) -> Fcall | bytes:
            nonlocal is_due
            if self.failed is not None:
                return self.after_failure()
            is_due = bool(self.due)  # else the text was lost with its server
            return self.next_request() if is_due else open_state(self.fid)

        def finish(reply: Any) -> Step[bytes]:
            if is_due:
                kind = "refusal" if "refusal" in self.due else "answer"
                self.due.discard(kind)
                self.texts[kind] = reply.data[POSITION.size :]
            return self.read(count, offset)

        call: OneRequest[bytes] = OneRequest(self.session, make, finish)
        return self.session.begin(call)

    def push_back(self, data: bytes) -> None:
        if self.positioned and not self.returned and not self.texts:
            self.last.back(data)
        elif data:
            self.returned.insert(0, data)

    def _watch_readers(self, pid: int) -> None:
        """Release a claim when both the process that read it and the one that opened the file have ended: a child may
        keep the file open."""
        processes = self.tree.processes
        if not pid or processes is None:
            return
        for one in {pid, self.user.pid} - self._readers.keys():
            if (stop := processes.watch(one, partial(self._on_ended, one))) is not None:
                self._readers[one] = stop
        if not self._readers:
            self._give_back()

    def _on_ended(self, pid: int) -> None:
        del self._readers[pid]
        if not self._readers:
            self._give_back()

    def _give_back(self) -> None:
        if self.link is not None and self.claimed_on is self.link:
            if self.node.is_stream:
                self.session.call(self._renew)
            else:
                self.link.send_one(m.Twrite(0, self.fid, 0, b"nack 0s\n"), lambda reply: None)

    def _renew(self, link: Link, repeated: bool) -> Procedure[None]:
        """Open the file again under another fid. The old fid, when dropped, releases its claims."""
        if repeated or self.claimed_on is not link:  # the connection's end released them
            return
        old = self.fid
        yield from self.reopen(link)
        if self in self.session.files:  # else `close` dropped it
            drop(link, old)

    # ------------------------------------------------------------ poll

    def poll(self, events: int, notify: Callable[[], None] | None) -> Step[int]:
        """Return which of READABLE and WRITABLE the file is. If none of `events`, call `notify` once it may be."""
        if self.returned or self.texts or (self.positioned and self.last.given < len(self.last.body)):
            return READABLE | WRITABLE
        if self.ahead is not None:
            return self.ahead.poll(notify)
        if notify is not None:
            self._notify = notify
            self._watch_state()  # before the present state is asked for
        call: OneRequest[int] = OneRequest(self.session, self._ask_state, self._took_state, is_short=True)
        return self.session.begin(call)

    def _ask_state(self, call: OneRequest[int]) -> Fcall:
        return open_state(self.require_fid())

    def _took_state(self, reply: Any) -> int:
        ready: int = STATE.unpack(reply.data)[2] & (READABLE | WRITABLE)
        return ready

    def _watch_state(self) -> None:
        link = self.link
        if not self._is_watching and link is not None and not link.lost:
            self._is_watching = True
            link.send_one(open_state(self.fid, change=True), partial(self._on_state, link))

    def _on_state(self, link: Link, reply: Fcall | None) -> None:
        if link is not self.link:
            return
        self._is_watching = False
        if reply is not None and (notify := self._notify) is not None:
            self._notify = None
            notify()

    def watch(self, then: Callable[[], None] | None) -> None:
        self._notify = then

    # ------------------------------------------------------------ writing

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        if not self.writes:
            raise Denied(f"{self.node.name!r}: not open for writing")
        name, parent = self.node.name, self.node.parent
        if name == "ctl" and parent is not None and parent.name == ".txn":
            return self._write_request(data, len(data), is_repeatable=True)  # a commit has an id
        if name in ("ctl", ".cursor") or (parent is not None and parent.name == ".consumers"):
            return self._write_commands(data)
        if len(data) > limits.MESSAGE_BYTES:
            self.refuse_long(len(data))
        if self.channel is not None:
            return self._write_lines(data) if self.cuts_lines else self._publish(data, len(data))
        if name == ".put" and not self.node.is_in_part:
            return self._write_request(with_id(data, next_id()), len(data), is_repeatable=True)
        return self._write_request(data, len(data), is_repeatable=False)

    def refuse_long(self, size: int) -> NoReturn:
        """Raise TooLong for a write of at least `size` bytes: a mount may get only the first piece of it."""
        raise TooLong(f"write of {size} bytes or more (expected at most {limits.MESSAGE_BYTES} with a mount)")

    def _write_request(self, data: bytes, size: int, rest: bytes = b"", *, is_repeatable: bool) -> Step[int]:
        """Write once to the file's own fid.

        If the outcome is unknown, the write fails unless it is repeatable and its id still remembered. `size`: the
        result. `rest`: the unfinished line that is kept after it.
        """
        began_s = time.monotonic()

        def make(call: OneRequest[int]) -> Fcall:
            if call.repeated and not (is_repeatable and time.monotonic() - began_s <= self.dedup_s - MARGIN_S):
                raise DiskFailed(f"{self.node.name!r}: server lost, outcome of the write unknown")
            assert call.link is not None
            if len(data) > (most := call.link.machine.msize - 24):
                raise TooLong(f"{len(data)} bytes (expected at most {most} with this msize)")
            return m.Twrite(0, self.require_fid(), 0, data)

        written = partial(self._written, size, rest)
        call: OneRequest[int] = OneRequest(self.session, make, written, held=len(data), is_once=True)
        return self.session.begin(call)

    def _written(self, size: int, rest: bytes, reply: Fcall) -> int:
        """Set the unfinished line only now: a refused or cancelled write leaves it as it was."""
        self.partial = rest
        return size

    def _publish(self, body: bytes, size: int, rest: bytes = b"", more: bytes = b"") -> Step[int]:
        """Write one message, or lines, under an id. If `.put` refuses the first attempt, for the id or its keys, write
        to the file's own fid without an id.

        `size`: the result, 0 for the last line of a closed file. `rest`: as of `_write_request`. `more`: keys of
        `.put`.
        """
        channel, began_s = self.channel, time.monotonic()
        assert channel is not None
        # By its inode: another client may have renamed the stream, and made another of that name.
        head = b'{"stream":%s,"file":%d,"id":"%s"%s} ' % (self._quoted_name, self.node.qid.path, next_id(), more)
        data = head + body

        def make(call: OneRequest[int]) -> Fcall:
            self.require_fid()
            if call.link is not channel.link:
                raise DiskFailed(f"{self.node.name!r}: .put cannot be opened again")
            if call.repeated and time.monotonic() - began_s > channel.dedup_s - MARGIN_S:
                raise DiskFailed(f"{self.node.name!r}: server lost, outcome of the write unknown after 'dedup'")
            return m.Twrite(0, channel.fid, 0, data)

        def recover(error: MqfsError) -> Step[int]:
            # BadRequest: an older server does not know the key `file` or `lines`.
            if isinstance(error, OverLimit | NotFound | Denied | BadRequest) and not call.repeated:
                return self._write_request(body, size, rest, is_repeatable=False)
            raise error

        written = partial(self._written, size, rest)
        held = len(data) if size else 0  # 0 for a last line: its close(2) cannot be refused
        call: OneRequest[int] = OneRequest(self.session, make, written, recover=recover, held=held, is_once=True)
        return self.session.begin(call)

    @property
    def _quoted_name(self) -> bytes:
        """The stream's name in JSON."""
        name = self.node.name
        if name != self._quoted[0]:
            self._quoted = name, json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogateescape")
        return self._quoted[1]

    _quoted = "", b""

    def _write_lines(self, data: bytes) -> Step[int]:
        """Write whole lines as messages, and keep the text after the last newline. Several lines are written together,
        so that the server keeps all of a write or none."""
        *lines, rest = (self.partial + data).split(b"\n")
        if len(rest) > limits.LINE_BYTES or any(len(line) >= limits.MESSAGE_BYTES for line in lines):
            raise TooLong(f"line too long (expected at most {limits.MESSAGE_BYTES} bytes)")
        if not lines:
            self.partial = rest
            return len(data)
        whole, size = b"".join(line + b"\n" for line in lines), len(data)
        if len(whole) > limits.MESSAGE_BYTES:  # beyond the server's limit: the count says how much is written
            whole, rest = whole[: whole.rindex(b"\n", 0, limits.MESSAGE_BYTES) + 1], b""
            size = len(whole) - len(self.partial)
        is_one = whole.find(b"\n") == len(whole) - 1
        return self._publish(whole, size, rest, b"" if is_one else b',"lines":true')

    # ------------------------------------------------------------ commands

    def _write_commands(self, data: bytes) -> Step[int]:
        """Write the whole lines of a file of commands. An unfinished line waits for the next write, or the close."""
        before, text = self.partial, self.partial + data
        whole, newline, rest = text.rpartition(b"\n")
        if rest == b"ack" and not newline:  # as in the engine: no other command begins with it
            whole, newline, rest = rest, b"\n", b""
        if len(text) > limits.CTL_BYTES:  # the server refuses it, and reports that in `.errors`
            whole, newline, rest = text[: limits.MESSAGE_BYTES], b"", b""
        elif not newline:
            self.partial = rest
            return len(data)
        self.partial = rest
        lines = whole.decode("utf-8", "surrogateescape").split("\n")
        verbs = {(line.split() or [""])[0] for line in lines}

        def make(call: OneRequest[int]) -> Fcall:
            fid = self.require_fid()
            lost = self.claimed_on is not None and self.claimed_on is not call.link
            if verbs & CLAIM_VERBS and (lost or call.repeated):
                self.returned.append(b"claim of a server that ended\n")
                raise Stale("claim of a server that ended (expected a read before)")
            if call.repeated and verbs & ONCE_VERBS:
                raise DiskFailed(f"{self.node.name!r}: server lost, outcome of the write unknown")
            return m.Twrite(0, fid, 0, whole + newline)

        def finish(reply: Fcall) -> Step[int]:
            return self._on_commands(lines, len(data))

        def recover(error: MqfsError) -> int:
            if call.repeated and isinstance(error, Exists | NotFound):
                return len(data)  # the first attempt had succeeded
            if self.reads and not isinstance(error, Interrupted):
                self.due.add("refusal")
            raise error

        def undo(error: BaseException) -> None:
            if self.partial is rest:  # else a later write changed it
                self.partial = before if isinstance(error, Interrupted) else b""

        once = bool(verbs & ONCE_VERBS)
        call: CommandRequest[int] = CommandRequest(self.session, make, finish, recover=recover, is_once=once)
        call.undo = undo
        return self.session.begin(call)

    def _on_commands(self, lines: list[str], size: int) -> Step[int]:
        """Record accepted commands that hold until the next of their kind, and read the new position."""
        for line in lines:
            verb = (line.split() or [""])[0]
            if verb in ANSWERED_VERBS and self.reads:
                self.due.add("answer")
            if verb not in SETUP_VERBS or self.node.name == "ctl":
                continue
            if verb == "seek":
                self.setup.pop("until", None)
            key = "select" if verb == "cover" else verb
            self.setup.pop(key, None)
            self.setup[key] = line
            if verb in ("seek", "format"):
                self.last = PartialRead()
        if not self.positioned:
            self.setup.pop("seek", None)  # a consumer's position is at the server
            return size
        took = partial(self._took_position, size)
        call: OneRequest[int] = OneRequest(self.session, self._ask_state, took, is_short=True)
        return self.session.begin(call)

    def _took_position(self, size: int, reply: Any) -> int:
        self.position = STATE.unpack(reply.data)[0]
        self.setup.pop("seek", None)
        return size

    def flush(self) -> Step[int]:
        if not self.partial or self.channel is not None:
            return 0
        return self._write_commands(b"\n")

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        if self.session.files.pop(self, 0) == 0:
            return
        if self.partial and self.channel is not None:
            line, self.partial = self.partial, b""
            self._publish(line, 0)
        for stop in self._readers.values():
            stop()
        self._readers.clear()
        self._notify = None
        self.tree.locks.forget(self)
        if self.ahead is not None:
            self.ahead.end(None)
        if self.channel is not None:
            self.tree.channels.release(self.channel)
        if self.link is not None and self.failed is None:
            drop(self.link, self.fid)
