"""Servers over an engine that gives every order of outcomes: requests that are late, lost or repeated, answers that do
not come, reads that are old. The real machines of mqfs/replica/log.py run in it; the mutants are rules left out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from copy import deepcopy

import attrs

from mqfs.replica.frame import Frame, crc_of, decode, encode
from mqfs.replica.log import Append, LogRecord, Look, Position, Reader, Writer
from mqfs.store.replication import LogBytes

STORE = uuid.UUID(int=1)


class Engine:
    """A log with the condition of a stream (after the last one, under that takeover), or of an object store (created if
    absent). `sees_owner` off: a stream that looks at the number alone. `names_have_check_sum`: as it says."""

    def __init__(self, kind: str, *, sees_owner: bool = True, names_have_check_sum: bool = False) -> None:
        self.kind, self.sees_owner, self.names_have_check_sum = kind, sees_owner, names_have_check_sum
        self.history: list[LogRecord] = []  # in the order of their arrival
        self.trimmed = 0  # frames below it are gone, but for takeovers
        self.base: tuple[Position, list[bytes]] = Position(), []  # what a checkpoint would hold
        self.own = 0

    def records(self, seen: int | None = None) -> list[LogRecord]:
        """The log, as far as the first `seen` arrivals show it."""
        found: dict[int, bytes] = {}
        for record in self.history[:seen]:
            if record.number >= self.trimmed or decode(record.data).owner is not None:
                found.setdefault(record.number, record.data)
        return [LogRecord(number, found[number]) for number in sorted(found)]

    def execute(self, request: Append) -> bool:
        """Whether it was appended."""
        there = {record.number: record.data for record in self.records()}
        number = request.after + 1
        if self.kind == "stream":
            last = self.history[-1].number if self.history else 0
            refused = request.after != last or (self.sees_owner and request.own != self.own)
        elif self.names_have_check_sum:
            refused = there.get(number) == request.data
        else:
            refused = number in there
        if not refused:
            self.history.append(LogRecord(number, request.data))
            if request.takeover:
                self.own = number
        return not refused

    def look(self, request: Look, seen: int) -> tuple[bytes | None, bool]:
        """The record of that number, and whether there is a later one, after `seen` arrivals."""
        records = self.records(seen)
        data = next((record.data for record in records if record.number == request.number), None)
        return data, any(record.number > request.number for record in records)


@attrs.define
class Server:
    """One server that may become the primary: what it read, what it acknowledged."""

    engine: Engine
    name: int
    writer_class: type[Writer] = Writer
    acknowledges_early: bool = False
    reader: Reader = attrs.field(factory=lambda: Reader(Position()))
    applied: list[bytes] = attrs.field(factory=list)
    writer: Writer | None = None
    waits: int | None = None  # the request whose answer it waits for
    payload: bytes | None = None
    acknowledged: list[tuple[int, bytes]] = attrs.field(factory=list)  # with the epoch
    runs: int = 0

    def catch_up(self, seen: int) -> None:
        """Read on, as far as it is seen; a base where the frames are gone."""
        if self.reader.position.number < self.engine.base[0].number:
            base, applied = deepcopy(self.engine.base)
            self.reader, self.applied = Reader(base), applied
        for record in self.engine.records(seen):
            if record.number > self.reader.position.number:
                if record.number > self.reader.position.number + 1:
                    return  # the reads are older than the base
                self.applied += payloads(self.reader.feed(record))

    def take_over(self) -> None:
        self.runs += 1
        run = uuid.UUID(int=100 * self.name + self.runs)
        self.writer = self.writer_class(attrs.evolve(self.reader.position), STORE, run)
        self.writer.take_over("", 0)
        self.waits = self.payload = None

    def publish(self, payload: bytes, *, more: bool) -> None:
        writer = self.writer
        assert writer is not None
        writer.append([LogBytes(1, 1, 0, payload)], 0, more=more)
        self.payload = payload
        if self.acknowledges_early:
            self.acknowledged.append((writer.position.epoch, payload))

    def acknowledge(self) -> None:
        """Acknowledge what was appended; give up where another server is the primary."""
        writer = self.writer
        if writer is None or not (writer.is_idle or writer.fenced):
            return
        if writer.fenced:
            self.writer = None
        elif self.payload is not None and not self.acknowledges_early:
            self.acknowledged.append((writer.position.epoch, self.payload))
        self.payload = None


def payloads(batch: Iterable[Frame] | None) -> list[bytes]:
    return [entry.data for frame in batch or () for entry in frame.entries if isinstance(entry, LogBytes)]


class Renumbering(Writer):
    """A mutant: what was refused is sent again under the next free number, whoever is the primary."""

    engine: Engine

    def on_found(self, data: bytes | None, *, later: bool) -> None:
        frame, last = self._frame, self.engine.records()[-1:]
        if frame is None or data is None or data == self._data or not self.is_owner:
            super().on_found(data, later=later)
            return
        number, crc = last[0].number, crc_of(last[0].data)
        self._frame = frame._replace(number=number + 1, previous=number, previous_crc=crc)
        self._data, self._looks = encode(self._frame), False


class Pipelining(Writer):
    """A mutant: the next frame is sent before the answer to the one before it."""

    def assume_appended(self) -> None:
        if self.is_owner and self._frame is not None:
            super().on_appended()


class Unlooking(Writer):
    """A mutant: a takeover counts as soon as it is appended."""

    def on_appended(self) -> None:
        self._looks = True
        super().on_appended()

    def on_found(self, data: bytes | None, *, later: bool) -> None:
        super().on_found(data, later=later and data != self._data)
