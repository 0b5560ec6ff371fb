"""The files of `.txn`, open: its `ctl`, and what is written in a part.

Their commands; parts and commits are in transactions.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from mqfs import errors, limits
from mqfs.engine.files.commands import PrintedCommands
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.files.put import FramesFile, PutHandle
from mqfs.engine.language.put_request import parse
from mqfs.engine.nodes import StagedStream, TxnCtl
from mqfs.engine.publishing.batch import Line
from mqfs.errors import unknown
from mqfs.model import Step, User
from mqfs.records import batch, headers
from mqfs.syntax.quoting import split

_USAGE = {"commit": "commit PRODUCER.NUMBER PART...", "abort": "abort PART...", "forget": "forget PRODUCER..."}


class TxnCtlHandle(PrintedCommands):
    """`.txn/ctl`. One write is one command, with or without its newline: its answer says what became of it."""

    def print(self) -> str:
        return self.group.transactions.text(self.user)

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
    """A stream in a part."""

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
        """The unfinished line, which the file keeps."""
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
            part.closed.append(self._end)  # the commit has the line, unless it is refused
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
    """`.batch` in a part."""

    node: StagedStream

    @property
    def places(self) -> Mapping[bytes, int]:
        return self.node.part.places

    def stream(self, name: str) -> object:
        return self.node.part.stream(self.user, name)

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        return self.take_response(count) or b""

    def _post(self, packed: batch.EncodedBatch, value: int) -> Step[int]:
        self.node.part.add(self.user, packed)
        return value


class PartPutHandle(PutHandle):
    """`.put` in a part: priority, ttl and id take effect at the commit."""

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
    """What an open file of that kind is."""
    if isinstance(node, TxnCtl):
        return TxnCtlHandle
    return {".batch": PartBatchHandle, ".put": PartPutHandle}.get(node.name, PartWriter)
