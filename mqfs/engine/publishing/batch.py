"""A unit of messages on its way into the log: for one stream or several, seen together or not at all.

Everything that could refuse it is checked before anything is done; then follow the one append and the delivery. The
messages come from put.py and transactions.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import attrs

from mqfs import errors, limits
from mqfs.engine.language import batch_frames
from mqfs.engine.language.permissions import W, require
from mqfs.engine.language.settings import NO_DEPTH
from mqfs.engine.publishing.admission import (
    Admission,
    PutId,
    WriteRequest,
    bytes_of,
    depth_reached,
    has_room,
    lacking_backlog,
)
from mqfs.engine.publishing.kept_quotas import KeptQuotas, stored
from mqfs.engine.publishing.publisher import RECORD_BYTES, Publisher
from mqfs.model import Draft, Kind, Record, Step, User
from mqfs.quotas import UserLimits
from mqfs.records import batch
from mqfs.records.batch import BatchSource, RecordBatch
from mqfs.records.record import HEAD_BYTES
from mqfs.state.group import Attributes, Change, encode_change
from mqfs.store.api import Store

if TYPE_CHECKING:
    from mqfs.engine.files.handle import OpenFile
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

T = TypeVar("T")

MESSAGE = int(Kind.MESSAGE)
_DELIVERED = 64  # messages delivered between two looks whether anyone still waits
_ROUNDS = 16  # of cutting the oldest stretch of the log


@attrs.define
class StreamTotals:
    """What a unit holds for one stream."""

    messages: int = 0
    size: int = 0  # of their bodies
    last: int = 0  # which message of the unit is its last one

    def add(self, messages: int, size: int, last: int) -> None:
        self.messages += messages
        self.size += size
        self.last = last


@attrs.define(eq=False)
class AtomicBatch:
    """Messages, and what else is recorded with them. `value`: what the write returns."""

    publisher: Publisher
    sources: Sequence[BatchSource]
    tallies: dict[Stream, StreamTotals]
    value: int
    ranked: bool = False  # some have headers that say how they are served
    commit: Callable[[], Sequence[Change]] | None = None  # what records it now; nothing where it was committed already
    ids: Mapping[PutId, int] = attrs.Factory(dict)  # of messages, by their place; a known one makes all of it a repeat
    expected: Mapping[Stream, int] = attrs.Factory(dict)  # the newest message that each stream is to have before it
    done: Callable[[AtomicBatch], None] | None = None  # called when it is appended, or discarded
    undo: Callable[[], None] | None = None  # called when it will not be
    writer: OpenFile | None = None  # see WriteRequest
    first: int = 0  # sequence of its first message, once it is appended
    discarded: bool = False
    changes: Sequence[Change] = ()  # of `commit`
    lacking: Stream | None = None  # in which it waits for room
    size: int = attrs.field(init=False)  # bytes of the messages in the log
    messages: int = attrs.field(init=False)
    _waited: bool = False
    _looked: int = -1  # with how many changes of the group it was looked whether this is a repeat
    _repeats: bool = False
    _found_heads: defaultdict[int, set[bytes]] | None = None

    def __attrs_post_init__(self) -> None:
        self.size = sum(source.stored_bytes for source in self.sources)
        self.messages = sum(source.messages for source in self.sources)

    @property
    def memory(self) -> int:
        """Bytes of its messages that are in memory: what was staged is not."""
        return self.size if self.commit is None else 0

    # ------------------------------------------------------------ looking

    def write(self) -> Step[int]:
        """Append it as one unit, or do with it what `full` says; see Publisher.write."""
        self.lacking = self._guarded(self._admit)
        if self.lacking is None:
            return self._guarded(self._append)
        self._waited = True
        request = WriteRequest(MESSAGE, (), self.value, self.undo, unit=self, writer=self.writer)
        return self._guarded(partial(self.publisher.blocked.park, self.lacking, request))

    def admit(self) -> Admission:
        """Whether it can go on, having waited. Raises what refuses it now."""
        self.lacking = self._guarded(self._admit)
        return Admission.APPEND if self.lacking is None else Admission.WAIT

    def append(self) -> Step[int]:
        return self._guarded(self._append)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException:
            if self.undo is not None:
                self.undo()
            raise

    def _admit(self) -> Stream | None:
        """Whether everything it needs is there; else the stream on which it waits. Nothing is done yet where it raises
        or waits."""
        publisher = self.publisher
        publisher.log.require_writable(messages=True)
        for stream in self.tallies:
            if stream.removed:
                raise errors.NotFound(f"stream {stream.name!r}: removed")
        if self._is_repeat():
            return None
        publisher.require_expected(self.expected)
        if self.size > publisher.retention.bound_bytes():
            most = publisher.retention.bound_bytes()
            raise errors.TooLong(f"batch of {self.size} bytes: exceeds the group's log (expected at most {most})")
        if (quotas := publisher.kept_quotas) is not None:
            quotas.require(*self._kept())
        full, lacking = publisher.log.settings.full, self._without_room()
        if lacking and full == "block":
            return lacking[0]
        if lacking and full == "reject":
            raise depth_reached(lacking[0])
        self.discarded = bool(lacking) and full == "drop-new"
        if not self.discarded and (stopped := self._stopped()) is not None:
            return stopped
        if not self.discarded and self.tallies and not self._takes_room():
            if full == "block":
                return next(iter(self.tallies))
            if full == "reject":
                raise publisher.retention.bound_reached()
            self.discarded = True
        if quotas is not None and not self.discarded:
            quotas.charge(*self._kept())
        return None  # with `full drop-old` the oldest go after the append: what the disk refuses takes nothing away

    def _kept(self) -> tuple[dict[Stream, int], int]:
        """What a quota is charged: of each stream, and of all of them, as it is not known of which headers are."""
        sizes = {stream: stored(tally.messages, tally.size) for stream, tally in self.tallies.items()}
        plain = sum(HEAD_BYTES * tally.messages + tally.size for tally in self.tallies.values())
        return sizes, max(self.size - plain, 0)

    def _is_repeat(self) -> bool:
        """Whether it was committed, or one of its ids came: also while it waited, then by a change of the group. Raises
        OverLimit where there is no room to remember it."""
        if self._looked != self.publisher.log.changes:
            ids, self.changes = self.publisher.ids, self.commit() if self.commit is not None else ()
            is_committed = self.commit is not None and not self.changes
            self._repeats = is_committed or any(map(ids.find_duplicate, self.ids))
            if self.ids and not self._repeats:
                ids.require_room(Counter(put_id.uid for put_id in self.ids))
            self._looked = self.publisher.log.changes
        return self._repeats

    def _stopped(self) -> Stream | None:
        """A stream in which others came first, or for which a consumer's bound leaves no room."""
        if not self._waited and (first := next((stream for stream in self.tallies if stream.blocked), None)):
            return first
        publisher = self.publisher
        overdue = publisher.overdue
        if self._waited and overdue and (due := next((s for s in self.tallies if s.number in overdue), None)):
            return due  # what is due goes before writes that wait
        if not publisher.consumers.bounded:
            return None
        return lacking_backlog(publisher.log.settings, {s: tally.messages for s, tally in self.tallies.items()})

    def _without_room(self) -> list[Stream]:
        """The streams in which `depth` leaves no room."""
        if self.publisher.log.settings.depth is NO_DEPTH:
            return []
        heads, all_of = self._heads(), self.tallies.items()
        return [s for s, tally in all_of if not has_room(s, tally.messages, tally.size, heads.get(s.number, ()))]

    def _heads(self) -> Mapping[int, Set[bytes]]:
        """The headers of its messages by stream, where they say what is replaced."""
        if self._found_heads is None and self.publisher.retention.newest is not None:
            self._found_heads = defaultdict(set)
            for draft in RecordBatch(self.sources).messages():
                self._found_heads[draft.stream].add(draft.headers)
        return self._found_heads or {}

    def _takes_room(self) -> bool:
        """Whether the log has room for it. With `full drop-old` it has."""
        log, retention = self.publisher.log, self.publisher.retention
        if log.settings.full != "drop-old":
            return retention.take_room(self.size)
        retention.reserve_room(self.size)
        for _ in range(_ROUNDS):
            if log.upkeep.size + self.size <= retention.bound_bytes():
                break
            retention.find_room(self.size)
        return True

    # ------------------------------------------------------------ appending

    def _append(self) -> Step[int]:
        publisher = self.publisher
        if self.discarded:
            publisher.counts.discarded += self.messages
        if self.discarded or self._is_repeat():
            if self.changes:
                publisher.log.append_batch((), self.changes)
        elif self.messages or self.changes:
            noted = self._noted() if self.ids else []
            first = publisher.log.append_batch(RecordBatch(self.sources), [*self.changes, *noted])
            self.first = first if self.messages else 0
        if self.first:
            self._deliver_or_hold(self.first)
        if self.done is not None:
            self.done(self)
        publisher.mark_dirty()
        sync = publisher.log.after_metadata_sync if self.commit is not None else publisher.log.after_data_sync
        return sync(self.value)

    def _noted(self) -> list[Change]:
        """The changes by which the ids are remembered."""
        others = sum(len(encode_change(change)) + RECORD_BYTES for change in self.changes)
        end = self.publisher.log.next_sequence(self.size + others + bytes_of(self.ids))
        return [self.publisher.ids.change(put_id, end + place) for put_id, place in self.ids.items()]

    def _deliver_or_hold(self, first: int) -> None:
        publisher, time_ns = self.publisher, self.publisher.log.end.last_ns
        if publisher.log.shown is None:
            self._deliver(first, iter(enumerate(RecordBatch(self.sources).messages(), first)), time_ns)
            return
        self.sources = []  # they may go with what was staged; the log has them
        totals = {stream: (tally.messages, tally.size) for stream, tally in self.tallies.items()}
        publisher.hold(first, totals, partial(self._show, first, time_ns))

    def _show(self, first: int, time_ns: int) -> None:
        numbers = {stream.number for stream in self.tallies if not stream.removed}
        self.tallies = {stream: tally for stream, tally in self.tallies.items() if not stream.removed}
        drafts = (
            (record.sequence, Draft(record.kind, record.stream, record.body, record.headers))
            for record in self.publisher.appended(first, self.messages)
            if record.stream in numbers and not self.publisher.is_expired(record)
        )
        self._deliver(first, drafts, time_ns)

    def _deliver(self, first: int, drafts: Iterator[tuple[int, Draft]], time_ns: int) -> None:
        publisher, rest, awaited = self.publisher, self.tallies, list(self.tallies)
        for stream, tally in rest.items():
            stream.kept.appended_many(first + tally.last, tally.messages, tally.size)
        if self.ranked or publisher.fanout.is_awaited(awaited):
            rest = self._deliver_each(drafts, time_ns, awaited)
        self._count_only(rest, time_ns)
        if publisher.log.settings.depth is not NO_DEPTH:
            for stream in self.tallies:
                publisher.retention.bound_depth(stream)

    def _deliver_each(
        self, drafts: Iterator[tuple[int, Draft]], time_ns: int, awaited: list[Stream]
    ) -> dict[Stream, StreamTotals]:
        """Deliver messages one by one while someone waits for them. Returns the totals of the others."""
        publisher, streams = self.publisher, {stream.number: stream for stream in self.tallies}
        rest = {stream: StreamTotals(tally.messages, tally.size) for stream, tally in self.tallies.items()}
        # A reader that was served has left the wait list, and cannot rejoin before this returns.
        while (self.ranked or publisher.fanout.is_awaited(awaited)) and (some := list(islice(drafts, _DELIVERED))):
            for sequence, draft in some:
                stream = streams[draft.stream]
                record = Record(sequence, time_ns, stream.number, MESSAGE, 0, draft.headers, draft.body)
                publisher.deliver(stream, record)
                rest[stream].messages -= 1
                rest[stream].size -= len(draft.body)
        return rest

    def _count_only(self, rest: Mapping[Stream, StreamTotals], time_ns: int) -> None:
        """Update counters only; no reader is waiting."""
        publisher = self.publisher
        for stream, tally in rest.items():
            stream.kept.mtime_ns = time_ns
            stream.written += tally.messages
            if stream.pollers.calls:
                stream.pollers.wake()
        publisher.counts.written += sum(tally.messages for tally in rest.values())
        publisher.counts.written_bytes += sum(tally.size for tally in rest.values())
        publisher.fanout.pollers.wake()


def require_fit(messages: int, size: int) -> None:
    """Raises OverLimit for what is too large for one unit."""
    if messages > limits.UNIT_MESSAGES:
        raise errors.OverLimit(f"batch of {messages} messages: too large (expected at most {limits.UNIT_MESSAGES})")
    if size > limits.UNIT_BYTES:
        raise errors.OverLimit(f"batch of {size} bytes in the log: too large (expected at most {limits.UNIT_BYTES})")


# ------------------------------------------------------------ staged batch


class Staging:
    """Where the parts of a tree are staged, and what all of them take together and of each user."""

    def __init__(self, store: Store, kept_quotas: KeptQuotas | None, memory: UserLimits) -> None:
        self.store, self.kept_quotas, self.memory = store, kept_quotas, memory
        self.parts = UserLimits("parts", "PARTS")
        self.bytes = UserLimits("bytes in parts of transactions", "STAGED_BYTES" if store.path else "MEMORY_BYTES")

    def take(self, uid: int, size: int, ids: int) -> None:
        """Give a user more: `size` bytes, and memory for that number of ids. Raises OverLimit, OverQuota."""
        self.bytes.check(uid, size)
        self.memory.change(uid, 0, ids * limits.STAGED_ID_BYTES)
        try:
            if self.kept_quotas is not None:
                self.kept_quotas.stage(uid, size)
        except errors.OverQuota:
            self.memory.release(uid, ids * limits.STAGED_ID_BYTES)
            raise
        self.bytes.release(uid, -size)

    def give(self, uid: int, size: int, ids: int, *, charged: bool = True) -> None:
        """Take the same back; `charged`: the user's quota has the bytes."""
        self.bytes.release(uid, size)
        self.memory.release(uid, ids * limits.STAGED_ID_BYTES)
        if charged:
            self.charge(uid, -size)

    def charge(self, uid: int, size: int) -> None:
        """Charge a quota, or give it back where below 0; nothing is refused."""
        if self.kept_quotas is not None:
            self.kept_quotas.restage(uid, size)


Line: TypeAlias = tuple[User, batch.EncodedBatch]  # an unfinished one, of a user


class StagedBatch:
    """One part; `attributes` are its owner and mode. Raises OverLimit where no more can be opened."""

    def __init__(self, host: Group, name: str, attributes: Attributes) -> None:
        self.name, self.attributes = name, attributes
        self._streams, self._staging, self._clock = host.streams, host.staging, host.clock
        staging = self._staging
        staging.parts.acquire(attributes.uid)
        try:
            self.number = staging.store.number()
            self.staged = staging.store.stage(self.number)
        except BaseException:
            staging.parts.release(attributes.uid)
            raise
        self.tallies: dict[str, StreamTotals] = {}  # by the stream's name, in the order of their places
        self.places: dict[bytes, int] = {}  # in the table of streams that its blanks mean
        self._names: list[str] = []
        self._borders = [0]  # of what is read at once
        self.messages = 0
        self.ids: dict[PutId, int] = {}  # of its messages, by their place
        self.expected: dict[str, int] = {}  # the newest message of streams, at the commit
        self.unfinished: dict[object, Callable[[], Line]] = {}  # of open files: what returns their unfinished line
        self.closed: list[Callable[[], None]] = []  # what ends those that were closed while it was committed
        self.ranked = self.committing = self.dropped = False
        self.made_ns = self.mtime_ns = host.clock.wall_ns()
        self.used_ns = host.clock.engine_ns()

    def stream(self, user: User, name: str) -> Stream:
        """A stream to be written to. Raises NotFound, Denied."""
        stream = self._streams.get(name)
        if stream is None:
            raise errors.NotFound(f"no stream {name!r} in the group of part {self.name!r}")
        require(user, stream.state, W, name)
        return stream

    def add(self, user: User, packed: batch.EncodedBatch, *, ranked: bool = False, put_id: PutId | None = None) -> None:
        """Put messages into it, or none. `put_id`: of the first; one that it has makes them a repeat. Raises NotFound,
        Denied, Busy, OverLimit, DiskFull."""
        if self.dropped:
            raise errors.NotFound(f"part {self.name!r}: committed or dropped")
        if self.committing:
            raise errors.Busy(f"part {self.name!r}: being committed")
        names = [*self._names, *packed.fresh] if packed.fresh else self._names
        for row in packed.rows:
            self.stream(user, names[row.place])
        if put_id in self.ids:
            return
        require_fit(self.messages + packed.messages, self.staged.size + len(packed.data))
        expected = dict(self.expected)
        batch_frames.merge_expected(expected, packed.expected)
        fresh_ids = int(put_id is not None)
        self._staging.take(self.attributes.uid, len(packed.data), fresh_ids)
        try:
            self.staged.append(packed.data)
        except OSError as error:
            self._staging.give(self.attributes.uid, len(packed.data), fresh_ids)
            raise errors.DiskFull(f"part {self.name!r}: {error}") from error
        self.expected = expected
        if put_id is not None:
            self.ids[put_id] = self.messages
        self._count(packed)
        self.ranked = self.ranked or ranked
        self.mtime_ns = self._clock.wall_ns()
        self.used_ns = self._clock.engine_ns()

    def _count(self, packed: batch.EncodedBatch) -> None:
        for name in packed.fresh:
            self.places[name.encode()] = len(self._names)
            self._names.append(name)
            self.tallies[name] = StreamTotals()
        for row in packed.rows:
            self.tallies[self._names[row.place]].add(row.messages, row.size, self.messages + row.last)
        self.messages += packed.messages
        if self.staged.size - self._borders[-1] >= limits.UNIT_PIECE_BYTES:
            self._borders.append(self.staged.size)

    def pieces(self) -> Iterator[bytes]:
        """Its messages as blanks, read each time: they may be too many for memory."""
        for begin, end in pairwise([*self._borders, self.staged.size]):
            try:
                data = self.staged.read(begin, end - begin)
            except OSError as error:
                raise errors.DiskFailed(f"part {self.name!r}: cannot be read back: {error}") from error
            if len(data) != end - begin:
                raise errors.DiskFailed(f"part {self.name!r}: cut short on disk")
            yield data
