"""Atomic batches: messages for one stream or several that become visible together or not at all.

Every check that could refuse a batch is done before any change; then follow one append and the delivery. The messages
come from files/put.py and transactions.py.
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
_DELIVERED = 64  # messages delivered between two checks whether any reader still waits
_ROUNDS = 16  # evictions of the log's oldest segment for one batch, at most


@attrs.define
class StreamTotals:
    """The totals of a batch's messages for one stream."""

    messages: int = 0
    size: int = 0  # bytes of their bodies
    last: int = 0  # position in the batch of the last of them

    def add(self, messages: int, size: int, last: int) -> None:
        self.messages += messages
        self.size += size
        self.last = last


@attrs.define(eq=False)
class AtomicBatch:
    """Messages, and the changes that are recorded with them. `value`: the result of the write."""

    publisher: Publisher
    sources: Sequence[BatchSource]
    tallies: dict[Stream, StreamTotals]
    value: int
    ranked: bool = False  # whether some messages have headers that say how they are delivered
    commit: Callable[[], Sequence[Change]] | None = None  # returns its changes; none: it was committed already
    ids: Mapping[PutId, int] = attrs.Factory(dict)  # position by id; one known id makes the whole batch a repeat
    expected: Mapping[Stream, int] = attrs.Factory(dict)  # the newest message that each stream must have before it
    done: Callable[[AtomicBatch], None] | None = None  # called when the batch is appended or discarded
    undo: Callable[[], None] | None = None  # called when it is refused or cancelled
    writer: OpenFile | None = None  # see WriteRequest
    first: int = 0  # sequence of the first message, once the batch is appended
    discarded: bool = False
    changes: Sequence[Change] = ()  # returned by `commit`
    lacking: Stream | None = None  # the stream on which it waits for room
    size: int = attrs.field(init=False)  # bytes of the messages in the log
    messages: int = attrs.field(init=False)
    _waited: bool = False
    _looked: int = -1  # `log.changes` at the last check for a repeat
    _repeats: bool = False
    _found_heads: defaultdict[int, set[bytes]] | None = None

    def __attrs_post_init__(self) -> None:
        self.size = sum(source.stored_bytes for source in self.sources)
        self.messages = sum(source.messages for source in self.sources)

    @property
    def memory(self) -> int:
        """Bytes of its messages in memory: staged messages are on disk."""
        return self.size if self.commit is None else 0

    # ------------------------------------------------------------ admission

    def write(self) -> Step[int]:
        """Append the batch, or treat it as `full` says; see Publisher.write."""
        self.lacking = self._guarded(self._admit)
        if self.lacking is None:
            return self._guarded(self._append)
        self._waited = True
        request = WriteRequest(MESSAGE, (), self.value, self.undo, unit=self, writer=self.writer)
        return self._guarded(partial(self.publisher.blocked.park, self.lacking, request))

    def admit(self) -> Admission:
        """Return the verdict on a batch that waited: APPEND or WAIT. Raises StreamFull and the other refusals."""
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
        """Check everything that the batch needs. Returns the stream on which it has to wait; None: it can be appended
        or discarded. Changes nothing if it raises or waits."""
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
        return None  # messages beyond `depth` are evicted after the append: the disk may refuse the batch

    def _kept(self) -> tuple[dict[Stream, int], int]:
        """Return the bytes to charge to quotas: by stream, and of the headers of all streams together."""
        sizes = {stream: stored(tally.messages, tally.size) for stream, tally in self.tallies.items()}
        plain = sum(HEAD_BYTES * tally.messages + tally.size for tally in self.tallies.values())
        return sizes, max(self.size - plain, 0)

    def _is_repeat(self) -> bool:
        """Whether the batch was committed, or one of its ids written, before or while it waited. Checked again only
        after a change of the group. Raises OverLimit if there is no room to remember its ids."""
        if self._looked != self.publisher.log.changes:
            ids, self.changes = self.publisher.ids, self.commit() if self.commit is not None else ()
            is_committed = self.commit is not None and not self.changes
            self._repeats = is_committed or any(map(ids.find_duplicate, self.ids))
            if self.ids and not self._repeats:
                ids.require_room(Counter(put_id.uid for put_id in self.ids))
            self._looked = self.publisher.log.changes
        return self._repeats

    def _stopped(self) -> Stream | None:
        """Return a stream with earlier writers or due messages, or without room in a consumer's backlog; else None."""
        if not self._waited and (first := next((stream for stream in self.tallies if stream.blocked), None)):
            return first
        publisher = self.publisher
        overdue = publisher.overdue
        if self._waited and overdue and (due := next((s for s in self.tallies if s.number in overdue), None)):
            return due  # due messages come before blocked writes
        if not publisher.consumers.bounded:
            return None
        return lacking_backlog(publisher.log.settings, {s: tally.messages for s, tally in self.tallies.items()})

    def _without_room(self) -> list[Stream]:
        """Return the streams in which `depth` leaves no room for the batch."""
        if self.publisher.log.settings.depth is NO_DEPTH:
            return []
        heads, all_of = self._heads(), self.tallies.items()
        return [s for s, tally in all_of if not has_room(s, tally.messages, tally.size, heads.get(s.number, ()))]

    def _heads(self) -> Mapping[int, Set[bytes]]:
        """Return the headers of the messages by stream number under `replay key`, where they decide what is
        superseded; else nothing."""
        if self._found_heads is None and self.publisher.retention.newest is not None:
            self._found_heads = defaultdict(set)
            for draft in RecordBatch(self.sources).messages():
                self._found_heads[draft.stream].add(draft.headers)
        return self._found_heads or {}

    def _takes_room(self) -> bool:
        """Take room of the log for the batch. False: there is none. Under `full drop-old` the oldest messages are
        evicted for it."""
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
        """Return the changes that record the ids of the messages."""
        others = sum(len(encode_change(change)) + RECORD_BYTES for change in self.changes)
        end = self.publisher.log.next_sequence(self.size + others + bytes_of(self.ids))
        return [self.publisher.ids.change(put_id, end + place) for put_id, place in self.ids.items()]

    def _deliver_or_hold(self, first: int) -> None:
        publisher, time_ns = self.publisher, self.publisher.log.end.last_ns
        if publisher.log.shown is None:
            self._deliver(first, iter(enumerate(RecordBatch(self.sources).messages(), first)), time_ns)
            return
        self.sources = []  # the staged data may be removed: the log has the messages
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
        """Deliver messages one by one while a reader waits for them. Returns the totals of the remaining ones."""
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
        """Count messages for which no reader waits, and wake pollers."""
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
    """Check the size of a batch. Raises OverLimit."""
    if messages > limits.UNIT_MESSAGES:
        raise errors.OverLimit(f"batch of {messages} messages: too large (expected at most {limits.UNIT_MESSAGES})")
    if size > limits.UNIT_BYTES:
        raise errors.OverLimit(f"batch of {size} bytes in the log: too large (expected at most {limits.UNIT_BYTES})")


# ------------------------------------------------------------ staged batch


class Staging:
    """The store of the staged parts of a tree, and the user limits that they count against."""

    def __init__(self, store: Store, kept_quotas: KeptQuotas | None, memory: UserLimits) -> None:
        self.store, self.kept_quotas, self.memory = store, kept_quotas, memory
        self.parts = UserLimits("parts", "PARTS")
        self.bytes = UserLimits("bytes in parts of transactions", "STAGED_BYTES" if store.path else "MEMORY_BYTES")

    def take(self, uid: int, size: int, ids: int) -> None:
        """Charge a user for `size` more bytes, and the memory of `ids` more ids. Raises OverLimit, OverQuota."""
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
        """Release bytes and ids of a user. `charged`: the user's quota includes the bytes."""
        self.bytes.release(uid, size)
        self.memory.release(uid, ids * limits.STAGED_ID_BYTES)
        if charged:
            self.charge(uid, -size)

    def charge(self, uid: int, size: int) -> None:
        """Charge `size` bytes to the user's quota without a check; below 0: release them."""
        if self.kept_quotas is not None:
            self.kept_quotas.restage(uid, size)


Line: TypeAlias = tuple[User, batch.EncodedBatch]  # an unfinished line and its writer


class StagedBatch:
    """One part of a transaction. `attributes`: its owner and mode. Raises OverLimit if the user has too many."""

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
        self.tallies: dict[str, StreamTotals] = {}  # by stream name, in the order of `places`
        self.places: dict[bytes, int] = {}  # by stream name: the index that its unsequenced records carry
        self._names: list[str] = []  # stream names by that index
        self._borders = [0]  # offsets between the pieces that are read at once
        self.messages = 0
        self.ids: dict[PutId, int] = {}  # of its messages: their position by id
        self.expected: dict[str, int] = {}  # by stream: the newest message that the commit requires
        self.unfinished: dict[object, Callable[[], Line]] = {}  # by open file: returns its unfinished line
        self.closed: list[Callable[[], None]] = []  # end the files that were closed during the commit
        self.ranked = self.committing = self.dropped = False
        self.made_ns = self.mtime_ns = host.clock.wall_ns()
        self.used_ns = host.clock.engine_ns()

    def stream(self, user: User, name: str) -> Stream:
        """Return a stream that the user may write to. Raises NotFound, Denied."""
        stream = self._streams.get(name)
        if stream is None:
            raise errors.NotFound(f"no stream {name!r} in the group of part {self.name!r}")
        require(user, stream.state, W, name)
        return stream

    def add(self, user: User, packed: batch.EncodedBatch, *, ranked: bool = False, put_id: PutId | None = None) -> None:
        """Stage messages, all or none. `put_id`: the id of the first; if the part has it already, all are ignored.
        Raises NotFound, Denied, Busy, OverLimit, OverQuota, DiskFull."""
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
        """Yield the messages as unsequenced records, read again each time, as they may exceed memory."""
        for begin, end in pairwise([*self._borders, self.staged.size]):
            try:
                data = self.staged.read(begin, end - begin)
            except OSError as error:
                raise errors.DiskFailed(f"part {self.name!r}: cannot be read back: {error}") from error
            if len(data) != end - begin:
                raise errors.DiskFailed(f"part {self.name!r}: cut short on disk")
            yield data
