"""The replicated log: what an engine must do, its one writer, and its readers. There is no I/O in the reader and the
writer, except for a file with the rest of a batch that is too large for memory.

    number    17 frame   18 frame   19 own, epoch 4   20 frame   21 frame
    writer    epoch 3 ended here ^   epoch 4 ------------------------->
    append    frame 22 exactly after 21, while 19 is the newest takeover; one at a time

An append has one of three outcomes. Answered: it is in the log. Refused: another record has the number, or it was
appended before. Unknown: no answer came, and it may still arrive. After the last two the writer reads the record of its
number. Its own bytes mean that it is in the log; other bytes, that another server is the primary. Without a record the
same bytes are sent again under the same number. No answer except these counts: a leader that was cut off refuses
appends after records that it did not see, and reads may be late.

A takeover counts when it is in the log and a look after it shows no later record. Otherwise a server that was suspended
for longer than frames are kept, between its last read and its request, could take the number of a trimmed frame. The
first frame after an owner's last one is a takeover, which is never trimmed, so its own frames need no such look.

The scheme of a URL names the engine. The packages that an engine needs are imported when it is opened.
"""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from tempfile import TemporaryFile
from typing import IO, NamedTuple, Protocol, cast

import attrs

from mqfs import limits
from mqfs.errors import NOT_INSTALLED, BadConfig, BadReplica
from mqfs.replica.frame import Entry, Frame, Owner, crc_of, decode, encode


class Refused(Exception):
    """The engine answered that this request did not append."""


class NoAnswer(Exception):
    """There was no answer, or an inconclusive one: it is unknown whether the request was carried out. The text says
    why."""


class Fenced(Exception):
    """Another server took over: no further write may be acknowledged."""


class Stopped(Exception):
    """The server stops."""


class LogRecord(NamedTuple):
    number: int
    data: bytes


_REPORT = re.compile(rb"([0-9]{1,20}) ([0-9]{1,10})")


class Report(NamedTuple):
    """A standby's report that its disk has all frames up to that number. If an engine loses its end, a number is used
    again for another frame: the CRC field tells them apart."""

    number: int
    crc: int

    def encode(self) -> bytes:
        return b"%d %d" % self

    @classmethod
    def decode(cls, data: bytes) -> Report | None:
        """Decode a report; None for other bytes."""
        found = _REPORT.fullmatch(data)
        return None if found is None else cls(int(found[1]), int(found[2]))


class Objects(Protocol):
    """Named objects beside a log: its checkpoints. All calls raise NoAnswer, and BadReplica if no later attempt can
    succeed. Names have letters, digits, `-` and `/`."""

    def put(self, name: str, data: bytes) -> None:
        """Make or replace an object, durably."""
        ...

    def get(self, name: str) -> bytes | None:
        """Return the whole object; None if it does not exist."""
        ...

    def list(self, prefix: str, after: str = "", most: int = 0) -> Sequence[str]:
        """Return the names with that prefix above `after`, sorted: the first `most`; 0: all."""
        ...

    def delete(self, *names: str) -> None:
        """Remove objects; missing ones are ignored."""
        ...

    def remove_stale_uploads(self) -> None:
        """Remove the remains of calls of `put` that did not end, and are older than limits.REPLICA_UPLOAD_S: some of
        them."""
        ...


class ReplicatedLog(Protocol):
    """A log on an engine. All calls raise NoAnswer, and BadReplica if no later attempt can succeed. One thread uses
    it."""

    name: str  # the URL without credentials
    pace_s: float  # between two groups of appends that no writer waits for
    objects: Objects

    def append(self, data: bytes, after: int, own: int, *, takeover: bool) -> None:
        """Append a record as number `after` + 1, durably: only if `after` is the last number and, if the engine has
        that condition, the newest takeover is `own`. Raises Refused."""
        ...

    def get(self, number: int) -> bytes | None:
        """Return the record of that number; None if it does not exist, or is not seen yet."""
        ...

    def newest(self, after: int) -> LogRecord | None:
        """Return the last record above `after`, as far as it is seen; None if there is none."""
        ...

    def read(self, after: int, wait_s: float) -> Sequence[LogRecord]:
        """Return some records above `after`, in order; wait for the first one at most `wait_s` seconds."""
        ...

    def trim(self, before: int) -> None:
        """Remove frames below that number, except takeovers: a late request of an old primary must meet them."""
        ...

    def report(self, name: str, report: Report) -> None:
        """Report how far the standby `name` is. Reports are repeated, so one may be lost, or left out if it is
        expensive."""
        ...

    def reports(self) -> dict[str, Report]:
        """Return the newest report of each standby, as far as reports arrived."""
        ...

    def promises(self) -> Sequence[str]:
        """Return what the engine promises and what it does not, in a few words each: for the log of a start."""
        ...

    def close(self) -> None: ...


# ------------------------------------------------------------ reader


class FramesMissing(BadReplica):
    """Frames between two frames are missing in the log."""


@attrs.define
class Position:
    """A position of a reader or a writer in the log, and the primary there."""

    store: uuid.UUID | None = None  # of the log; None: nothing was read yet
    number: int = 0
    crc: int = 0
    epoch: int = 0
    own: int = 0  # number of the newest takeover
    address: str = ""  # of the primary
    time_ns: int = 0

    def advance(self, record: LogRecord) -> Frame:
        """Advance to the next record. Raises BadReplica if it does not continue this log; FramesMissing if it is later
        than the next frame."""
        frame = decode(record.data)
        where = f"frame {record.number}"
        if self.store is not None and frame.store != self.store:
            raise BadReplica(f"{where}: of store {frame.store} (expected {self.store})")
        if frame.number != record.number:
            raise BadReplica(f"{where}: says it is {frame.number}: the log was copied or made again")
        if (frame.previous, frame.previous_crc) != (self.number, self.crc):
            kind = FramesMissing if frame.previous > self.number else BadReplica
            raise kind(f"{where}: follows frame {frame.previous}, not {self.number}: frames are missing")
        if frame.epoch != self.epoch + (frame.owner is not None):
            raise BadReplica(f"{where}: of epoch {frame.epoch} (expected {self.epoch}): appended after a takeover")
        self.go_to(frame, crc_of(record.data))
        return frame

    def go_to(self, frame: Frame, crc: int) -> None:
        """Set the position after that frame."""
        self.store, self.number, self.crc, self.epoch = frame.store, frame.number, crc, frame.epoch
        self.time_ns = frame.time_ns
        if frame.owner is not None:
            self.own, self.address = frame.number, frame.owner.address


class Reader:
    """Reads frames in order, as batches that are applied together."""

    def __init__(self, position: Position, folder: str | None = None) -> None:
        """`position`: after the last frame that was applied. `folder`: for the nameless file with the rest of a batch
        that is too large for memory; None: the folder of temporary files."""
        self.position = position  # after the last record that was read
        self.complete = attrs.evolve(position)  # after the last frame that ends a batch
        self._folder = folder
        self._parts: list[Frame] = []
        self._rest: IO[bytes] | None = None  # frames after `_parts`, each after its size
        self._given: IO[bytes] | None = None  # the rest of the batch before
        self._bytes = 0

    def feed(self, record: LogRecord) -> Iterable[Frame] | None:
        """Return the frames of the batch that this record ends, to be iterated once, before the next call; None if it
        ends no batch. A takeover drops the unfinished batch of the primary before it, which was never acknowledged.
        Raises BadReplica, OSError."""
        if self._given is not None:
            self._given.close()
        frame = self.position.advance(record)
        if frame.owner is not None:
            self.close()
        self._bytes += len(record.data)
        if self._bytes <= limits.REPLICA_BATCH_BYTES:
            self._parts.append(frame)
        else:
            self._rest = self._rest or TemporaryFile(dir=self._folder)  # noqa: SIM115 - `close`
            self._rest.write(len(record.data).to_bytes(4, "little") + record.data)
        if frame.more:
            return None
        self.complete = attrs.evolve(self.position)
        return self._take()

    def _take(self) -> Iterable[Frame]:
        parts, self._given = self._parts, self._rest
        self._parts, self._rest, self._bytes = [], None, 0
        return parts if self._given is None else chain(parts, _frames_of(self._given))

    def close(self) -> None:
        """Drop an incomplete batch."""
        for file in (self._rest, self._given):
            if file is not None:
                file.close()
        self._parts, self._rest, self._given, self._bytes = [], None, None, 0


def _frames_of(file: IO[bytes]) -> Iterator[Frame]:
    file.seek(0)
    while size := file.read(4):
        yield decode(file.read(int.from_bytes(size, "little")))


# ------------------------------------------------------------ writer


class Append(NamedTuple):
    """A request: append these bytes as number `after` + 1."""

    data: bytes
    after: int
    own: int
    takeover: bool


class Look(NamedTuple):
    """A request: read the record of that number, and check for a later one."""

    number: int


class Writer:
    """The appends of one server. `request` is the next request; its outcome is passed to one of the `on_` methods."""

    def __init__(self, position: Position, store: uuid.UUID, run: uuid.UUID) -> None:
        """`position`: after the last record that was read. `run`: a number that only this run of the server has."""
        self.position, self._store, self.run = position, store, run
        self._frame: Frame | None = None
        self._data = b""
        self._looks = False
        self.fenced = False
        self.is_owner = False

    @property
    def is_idle(self) -> bool:
        return self._frame is None and not self.fenced

    @property
    def request(self) -> Append | Look | None:
        """The next request; None: nothing is under way."""
        frame = self._frame
        if frame is None:
            return None
        if self._looks:
            return Look(frame.number)
        return Append(self._data, frame.previous, self.position.own, frame.owner is not None)

    def take_over(self, address: str, time_ns: int, run: uuid.UUID | None = None) -> None:
        """Begin a takeover. It succeeds only if the position is at the end of the log. `run`: of another server, to
        which the owner hands over; the owner appends nothing after that."""
        self._begin(self.position.epoch + 1, [Owner(run or self.run, address)], time_ns, more=False)

    def accept(self) -> None:
        """Accept the takeover at the position as one of this run: the owner before handed over, or the takeover arrived
        late."""
        self.is_owner = True

    def append(self, entries: Sequence[Entry], time_ns: int, *, more: bool) -> None:
        """Begin to append a frame: only as the owner, and only when idle."""
        assert self.is_owner
        self._begin(self.position.epoch, entries, time_ns, more=more)

    def _begin(self, epoch: int, entries: Sequence[Entry], time_ns: int, *, more: bool) -> None:
        assert self.is_idle
        at = self.position
        number = at.number + 1
        self._frame = Frame(self._store, epoch, number, at.number, at.crc, max(time_ns, at.time_ns), more, entries)
        self._data, self._looks = encode(self._frame), False

    def on_appended(self) -> None:
        """Note that the engine confirmed the append. After a takeover a look follows."""
        assert self._frame is not None
        if self._frame.owner is not None and not self._looks:
            self._looks = True
            return
        self.position.go_to(self._frame, crc_of(self._data))
        self.is_owner = True
        self._frame = None

    def on_unclear(self) -> None:
        """Note that the append was refused, or not answered: the next request is a look."""
        self._looks = True

    def on_found(self, data: bytes | None, *, later: bool) -> None:
        """Handle the outcome of a look. `data`: the record of that number, if it is seen; `later`: a higher number is
        seen."""
        assert self._frame is not None
        if data == self._data and not (later and self._frame.owner is not None):
            self.on_appended()
        elif data is not None or later:
            self.fenced, self._frame = True, None
        else:
            self._looks = False  # send the same bytes under the same number: the first of them counts


# ------------------------------------------------------------ the engine of a URL


_OBJECTS = ("mqfs.replica.objects", "ObjectLog", "objects")
_STREAM = ("mqfs.replica.jetstream", "JetStreamLog", "nats")
_ENGINES = {
    "nats": _STREAM, "tls": _STREAM,
    "s3": _OBJECTS, "gs": _OBJECTS, "az": _OBJECTS, "file": _OBJECTS,
}  # fmt: skip


def check_url(url: str) -> None:
    """Raise BadConfig if no engine has such a URL."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _ENGINES or not rest:
        known = "nats://HOST,HOST/NAME, s3://BUCKET/NAME, gs://, az:// or file:///DIR"
        raise BadConfig(f"--replica {url.partition('@')[2] or url!r}: unknown engine (expected {known})")


def open_log(url: str, *, create: bool = True) -> ReplicatedLog:
    """Open the log at that URL, and contact its engine once. `create`: make the log if it does not exist. Raises
    BadConfig and BadReplica, each with one line of text."""
    check_url(url)
    module, name, extra = _ENGINES[url.partition("://")[0]]
    try:
        engine = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise BadReplica(f"--replica: {error.name}: {NOT_INSTALLED.format(extra)}") from None
    return cast(ReplicatedLog, engine(url, create=create))
