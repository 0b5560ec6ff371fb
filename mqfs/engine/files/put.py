"""`.put`, one message with metadata in one write; `.batch`, many messages in one write; and the files of `.txn`.

A write to `.put` is a JSON object, one blank, tab or newline, and the body: mqfs(4), ".put".

The commands and open files of `.txn` are here; parts and commits are in transactions.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mqfs import errors, limits
from mqfs.engine.core.log import record_at
from mqfs.engine.files.handle import CommandFile, OpenFile
from mqfs.engine.language import batch_frames
from mqfs.engine.language.permissions import W, require
from mqfs.engine.language.put_request import PutRequest, Schedule, parse
from mqfs.engine.nodes import StagedStream, TxnCtl
from mqfs.engine.publishing.admission import PutId, WriteRequest, bytes_of
from mqfs.engine.publishing.batch import AtomicBatch, Line, StreamTotals, require_fit
from mqfs.engine.stream import Stream
from mqfs.errors import unknown
from mqfs.model import Kind, Step, User
from mqfs.records import batch, headers
from mqfs.records.batch import BatchSource
from mqfs.state.group import PUT
from mqfs.syntax.duration import parse_duration, print_duration
from mqfs.syntax.lines import split

_DELAYED_BYTES = 128  # in the log for a delayed message, beside its body and given headers


class PutHandle(CommandFile):
    """An open `.put`."""

    publishes = True

    def count_messages(self, data: bytes) -> int:
        try:
            put, body = parse(data)
        except errors.MqfsError:  # the write reports that
            return 1
        return body.count(b"\n") if put.lines else 1

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        self.pending = self.refusal = None  # the next read is about this write
        try:
            put, body = parse(data)
            stream = self._stream_of(put)
            require(self.user, stream.state, W, put.stream)
            step = self._put(stream, put, body, len(data))
        except errors.MqfsError as error:
            self.refused(error)
            raise
        return step

    def _stream_of(self, put: PutRequest) -> Stream:
        if not put.file:
            stream = self.group.streams.get(put.stream)
        elif put.file >> 32 == self.group.number:  # as StreamNode.qid has it
            stream = self.group.numbers.get(put.file & 0xFFFF_FFFF)
        else:
            stream = None
        if stream is None:
            raise self.group.no_stream(put.stream)
        return stream

    def _put(self, stream: Stream, put: PutRequest, body: bytes, total: int) -> Step[int]:
        due_ns = self._due_ns(put)
        if put.schedule is not None:
            return self._plan(stream, put, put.schedule, body, total)
        return self._hold(stream, put, body, due_ns, total) if due_ns else self._post(stream, put, body, total)

    def _due_ns(self, put: PutRequest) -> int:
        """Return when the message may be read, in engine time; 0: at once."""
        clock = self.group.tree.clock
        if put.at_ns is not None:
            wait = put.at_ns - clock.wall_ns()
            return self.group.held.due_at(put.at_ns, clock.engine_ns() + wait) if wait > 0 else 0
        return clock.engine_ns() + put.delay if put.delay else 0

    def _texts(self, put: PutRequest) -> dict[str, str]:
        """Return the headers. A message without options has those of a plain write."""
        if put.is_plain and not self.group.settings.sender:
            return {}
        texts = {headers.SENDER: str(self.user.uid)}
        if put.is_plain:
            return texts
        if put.priority != headers.NORMAL:
            texts[headers.PRIORITY] = str(put.priority)
        if put.ttl:
            texts[headers.TTL] = print_duration(put.ttl)
        if put.id:
            texts[headers.ID] = put.id
        if put.key:
            texts[headers.KEY] = put.key
        if put.single:
            texts[headers.SINGLE] = "true"
        return {**texts, **put.headers}

    def _answer(self, stream: Stream, put: PutRequest, due_ns: int, sequence: int, time_ns: int, known: bool) -> None:
        """Set the answer that the next read gets; the message is not delivered yet. `known`: its id was known, and all
        but the sequence is looked up."""
        self.pending = f"{sequence}\n".encode()
        if put.kept:
            ttl = put.ttl or 0
            retained = bool(due_ns) or put.single or self.group.is_retaining(stream)
            if known:
                time_ns, ttl, retained = self._known(sequence)
            ttl = min(filter(None, (ttl, self.group.settings.ttl)), default=0)
            ends_ns = time_ns + ttl if time_ns and ttl else 0
            self.pending = f"{sequence} {time_ns} {ends_ns} {known:d} {retained:d}\n".encode()

    def _known(self, sequence: int) -> tuple[int, int, bool]:
        """Return (time, or when it is due, in ns; own `ttl` in ns; whether it is retained) of the message with that
        sequence. All are 0 if the log no longer has it."""
        group, clock = self.group, self.group.tree.clock
        record = record_at(group.log.stored.reader, sequence)
        if record is None:
            return 0, 0, False
        texts, time_ns, number = headers.decode(record.headers), record.time_ns, record.stream
        if number == PUT:  # it was delayed, and perhaps it still is
            time_ns, number = clock.wall_ns() + int(texts[headers.DUE]) - clock.engine_ns(), int(texts[headers.TO])
        stream = group.numbers.get(number)
        is_there = stream is not None and (
            headers.SINGLE in texts or group.held.targets(stream, sequence) or group.is_retaining(stream)
        )
        return time_ns, parse_duration(texts.get(headers.TTL, "0")), is_there

    def _post(self, stream: Stream, put: PutRequest, body: bytes, total: int) -> Step[int]:
        texts = self._texts(put)
        head = headers.encode(texts) if texts else b""
        answer = partial(self._answer, stream, put, 0)
        bodies = [line + b"\n" for line in body.split(b"\n")[:-1]] if put.lines else [body]
        return self.group.publisher.write(
            stream,
            WriteRequest(Kind.MESSAGE, bodies, total, None, head, self._id(put), answer, None, put.expect, self),
        )

    def _id(self, put: PutRequest) -> PutId | None:
        return PutId(self.user.uid, put.id) if put.id else None

    def _hold(self, stream: Stream, put: PutRequest, body: bytes, due_ns: int, total: int) -> Step[int]:
        group, clock = self.group, self.group.tree.clock
        group.log.require_writable(messages=True)
        put_id = self._id(put)
        known = group.ids.find_duplicate(put_id) if put_id else 0
        sequence = known
        if not known:
            texts, changes = self._texts(put), []
            if put_id:
                size = len(body) + len(headers.encode(texts)) + _DELAYED_BYTES + bytes_of([put_id])
                changes = [group.ids.note(put_id, group.log.next_sequence(size))]
            sequence = group.held.put(stream, body, texts, due_ns, changes, at_ns=put.at_ns or 0)
        self._answer(stream, put, due_ns, sequence, clock.wall_ns() + due_ns - clock.engine_ns(), bool(known))
        return group.log.after_metadata_sync(total)

    def _plan(self, stream: Stream, put: PutRequest, schedule: Schedule, body: bytes, total: int) -> Step[int]:
        """Record the message as a schedule."""
        group, wait_ns = self.group, put.delay
        group.log.require_writable(messages=True)
        if put.at_ns is not None:
            wait_ns = put.at_ns - group.tree.clock.wall_ns()
            if wait_ns < 0:
                wait_ns %= schedule.every  # keep its rhythm
        sequence, known = group.held.schedules.put(self.user, stream, body, self._texts(put), schedule, wait_ns)
        run = group.held.schedules.get(put.id)
        self._answer(stream, put, 1, sequence, run.next_ns if run is not None else 0, known)
        return group.log.after_metadata_sync(total)


# ------------------------------------------------------------ batch file

# `.batch`: many messages in one write, as one unit. The layout of a frame is in batch_frames.py.


class FramesFile(CommandFile):
    """A file to which frames are written; those of one write are appended or staged together."""

    publishes = True
    _prepared: batch_frames.Packing | None = None

    @property
    def places(self) -> Mapping[bytes, int]:
        """The places of streams that earlier writes have named."""
        return {}

    def stream(self, name: str) -> Any:
        """Return the stream of that name, which the user may write to. Raises NotFound, Denied."""
        raise NotImplementedError

    def _post(self, packed: batch.EncodedBatch, value: int) -> Step[int]:
        """Append or stage the messages of a write, and return `value`."""
        raise NotImplementedError

    def count_messages(self, data: bytes) -> int:
        return batch.count_frames(data)

    def prepare(self, data: bytes) -> Iterator[None]:
        """Check frames in steps, for the write of the same data that follows. Raises what the write would."""
        self.require(reading=False)
        try:
            self._prepared = self._packing(data)
            yield from self._prepared.steps()
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        self.refusal = None  # the next read is about this write
        packing, self._prepared = self._prepared, None
        try:
            if packing is None or packing.data is not data or packing.outdated:
                packing = self._packing(data)
            return self._post(packing.whole(), len(data))
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _packing(self, data: bytes) -> batch_frames.Packing:
        sender, always = headers.of_sender(self.user.uid), self.group.settings.sender
        return batch_frames.Packing(data, self.places, sender, always, self.stream)


class BatchHandle(FramesFile):
    """An open `.batch`. The next read gets the sequence of the first message of the last write."""

    def _post(self, packed: batch.EncodedBatch, value: int) -> Step[int]:
        streams = [self.stream(name) for name in packed.fresh]
        tallies: dict[Stream, StreamTotals] = {
            streams[row.place]: StreamTotals(row.messages, row.size, row.last) for row in packed.rows
        }
        require_fit(packed.messages, len(packed.data))
        numbers = array("I", [stream.number for stream in streams])
        source = BatchSource(packed.messages, len(packed.data), numbers, lambda: [packed.data])
        expected = {self.stream(name): sequence for name, sequence in packed.expected.items()}
        unit = AtomicBatch(
            self.group.publisher, [source], tallies, value, expected=expected, done=self._tell, writer=self
        )
        return unit.write()

    def stream(self, name: str) -> Stream:
        stream = self.group.streams.get(name)
        if stream is None:
            raise self.group.no_stream(name)
        require(self.user, stream.state, W, name)
        return stream

    def _tell(self, unit: AtomicBatch) -> None:
        self.pending = f"{unit.first}\n".encode() if unit.first else None


# ------------------------------------------------------------ the files of .txn


_USAGE = {"commit": "commit PRODUCER.NUMBER PART...", "abort": "abort PART...", "forget": "forget PRODUCER..."}


class TxnCtlHandle(CommandFile):
    """An open `.txn/ctl`. A write is one command, with or without its newline, and the next read gets its answer. A
    read of the beginning prints the present state."""

    _text: bytes | None = None

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.take_response(count)
        if told is not None:
            return told
        if self._text is None or not offset:
            self._text = self.group.transactions.text(self.user).encode()
        return self._text[offset : offset + count]

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            return self._perform(data)
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _perform(self, data: bytes) -> Step[int]:
        words = self._words(data)
        if not words:
            return len(data)
        transactions, verb, names = self.group.transactions, words[0], words[1:]
        if verb == "commit" and names:
            return transactions.commit(self.user, names[0], names[1:], len(data), self)
        if verb == "abort" and names:
            transactions.abort(self.user, names)
            return len(data)
        if verb == "forget" and names:
            transactions.forget(self.user, names)
            self.audit("forget", " ".join(names))
            return self.group.log.after_metadata_sync(len(data))
        if verb in _USAGE:
            raise errors.BadCommand(f"{verb}: nothing named (expected {_USAGE[verb]})")
        raise errors.BadCommand(unknown("command", verb, _USAGE))

    def _words(self, data: bytes) -> list[str]:
        if len(data) > limits.COMMAND_BYTES:
            raise errors.TooLong(f"command of {len(data)} bytes (expected at most {limits.COMMAND_BYTES})")
        if len(data.split(None, limits.COMMAND_WORDS)) > limits.COMMAND_WORDS:
            raise errors.OverLimit(f"command: too many words (expected at most {limits.COMMAND_WORDS})")
        try:
            lines = [words for line in data.decode().split("\n") if (words := split(line))]
        except UnicodeDecodeError:
            raise errors.BadCommand("invalid command: not UTF-8") from None
        if len(lines) > 1:
            raise errors.BadCommand(f"{len(lines)} commands in one write (expected one)")
        return lines[0] if lines else []


class PartWriter(OpenFile):
    """An open stream in a part."""

    node: StagedStream
    publishes = True

    def __init__(self, node: StagedStream, user: User, reads: bool, writes: bool) -> None:
        node.part.stream(user, node.name)
        if reads:
            raise errors.Denied("a part cannot be read (open it for writing only)")
        super().__init__(node, user, reads, writes)

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        try:
            self._stage(data)
        except errors.MqfsError as error:
            self.refused(error)
            raise
        return len(data)

    def _stage(self, data: bytes) -> None:
        if not data:
            raise errors.BadRequest("EOF marker: not in a transaction")
        if len(data) > limits.MESSAGE_BYTES:
            raise errors.TooLong(f"message of {len(data)} bytes (expected at most {limits.MESSAGE_BYTES})")
        bodies, rest = [data], b""
        if self.group.settings.data == "line":
            *lines, rest = (self.partial + data).split(b"\n")
            bodies = [line + b"\n" for line in lines]
            if rest and self.is_whole:
                bodies, rest = [*bodies, rest], b""
            if len(rest) > limits.LINE_BYTES or any(len(body) > limits.MESSAGE_BYTES for body in bodies):
                raise errors.TooLong(f"line too long (expected at most {limits.MESSAGE_BYTES} bytes)")
        self.hold(max(len(rest), self.held))
        self._add(bodies)
        self.keep(rest)

    def _add(self, bodies: list[bytes]) -> None:
        self.node.part.add(self.user, self._packed(bodies, self.node.part.places))

    def _packed(self, bodies: list[bytes], known: Mapping[bytes, int]) -> batch.EncodedBatch:
        head = headers.of_sender(self.user.uid) if self.group.settings.sender else b""
        return batch.concatenate([(self.node.name, head, body) for body in bodies], known)

    def _line(self) -> Line:
        """Return the unfinished line, which stays with the file."""
        return self.user, self._packed([self.partial], {})

    def keep(self, rest: bytes, *, refuse: bool = True) -> None:
        super().keep(rest, refuse=refuse)
        if rest:
            self.node.part.unfinished[self] = self._line
        else:
            self.node.part.unfinished.pop(self, None)

    def _end(self) -> None:
        part = self.node.part
        if part.committing and self.partial:
            part.closed.append(self._end)  # the commit includes the line, unless it is refused
            return
        if self.partial and not part.dropped:
            try:
                self._add([self.partial])
                self.partial = b""
            except errors.MqfsError as error:
                why = f"last, unfinished line of {self.node.name!r} not staged: {error}"
                self.group.transactions.spoil(part, self.user, why)
        part.unfinished.pop(self, None)


class PartBatchHandle(FramesFile):
    """An open `.batch` in a part."""

    node: StagedStream

    @property
    def places(self) -> Mapping[bytes, int]:
        return self.node.part.places

    def stream(self, name: str) -> object:
        return self.node.part.stream(self.user, name)

    def _post(self, packed: batch.EncodedBatch, value: int) -> Step[int]:
        self.node.part.add(self.user, packed)
        return value


class PartPutHandle(PutHandle):
    """An open `.put` in a part: priority, ttl and id take effect at the commit."""

    node: StagedStream

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            put, body = parse(data)
            if put.file:
                raise errors.BadCommand("file: not in a part (expected the name of the stream alone)")
            if put.delay is not None or put.at_ns is not None or put.schedule is not None:
                raise errors.BadCommand("delay, at, every, cron: not in a part (its commit appends the messages)")
            if put.lines:
                raise errors.BadCommand("lines: not in a part (expected one message)")
            self.node.part.stream(self.user, put.stream)
            head = headers.encode(self._texts(put))
            part = self.node.part
            packed = batch.concatenate([(put.stream, head, body)], part.places)
            if put.expect is not None:
                packed = packed._replace(expected={put.stream: put.expect})
            ranked = put.priority != headers.NORMAL or bool(put.ttl) or put.single
            put_id = self._id(put) if self.group.settings.dedup else None
            part.add(self.user, packed, ranked=ranked, put_id=put_id)
        except errors.MqfsError as error:
            self.refused(error)
            raise
        return len(data)


def kind(node: StagedStream | TxnCtl) -> type[OpenFile]:
    """Return the class of an open file of that node."""
    if isinstance(node, TxnCtl):
        return TxnCtlHandle
    return {".batch": PartBatchHandle, ".put": PartPutHandle}.get(node.name, PartWriter)
