"""A group: one log, and everything that can be seen in it.

Owns the way of a write (append, hand over, commit), the settings, the streams, views, consumers and groups inside, and
the record of changes. What a stream keeps is the stream's; what a handle shows is the handle's; who gets a message of a
work queue is the consumer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import attrs

from mqfs import errors, group_state, limits
from mqfs.engine.delivery.consumer_registry import Consumers
from mqfs.engine.delivery.priority_index import NEVER, PriorityIndex
from mqfs.engine.language.settings import NO_DEPTH, SYNC_ALWAYS, SYNC_OFF, Settings, parse_settings
from mqfs.engine.log.log_clock import LogClock
from mqfs.engine.publishing.deduplication import DeduplicationWindow
from mqfs.engine.publishing.delayed import DelayedMessages
from mqfs.engine.publishing.transactions import Transactions
from mqfs.engine.routing.view_registry import ViewRegistry
from mqfs.engine.stream import Admission, Cut, Parked, Steps, Stream, WriteRequest, close_waiters, deliver_to_waiters
from mqfs.engine.tree.meta_nodes import FOLDERS, META_FILES, Folder, Meta
from mqfs.engine.tree.refusals import Refusals, Refused
from mqfs.group_state import Change, State
from mqfs.model import QTDIR, Draft, Kind, Qid, Record, User
from mqfs.seams import Bucket, RingPort
from mqfs.wait import Step, Wait

if TYPE_CHECKING:
    from mqfs.engine.files.cursor_file import Cursor
    from mqfs.engine.files.order_file import MergedReader
    from mqfs.engine.tree.tree import Tree

T = TypeVar("T")

MESSAGE = int(Kind.MESSAGE)
_RESHAPE = frozenset({"remove", "rename", "bind", "unbind", "consumer", "forget", "ctl"})  # see Group.shape
_LOOKED_AT = 1_024  # messages looked up in the log at once: some ms
_LAPSED = 1_024  # messages that outlived their ttl, counted out at once: some 3 ms
_STEPS = 64  # looked at between two looks at the clock: 0.1 ms
RECORD_BYTES = 40  # of a message in the log, beside its body


@attrs.define
class Counts:
    """What happened in a group since the server started; shown in `.stats`."""

    written: int = 0  # messages
    written_bytes: int = 0
    read: int = 0  # messages handed to handles
    discarded: int = 0  # by `full drop-new`
    cut: int = 0  # by `full drop-old`
    fell_behind: int = 0  # times a reader was told so
    lost: int = 0  # messages they had not had
    refused: int = 0  # writes


class Resetting(NamedTuple):
    """What new settings come to."""

    changes: list[Change]
    cuts: dict[Stream, Cut]


class Group:
    """A directory. Made and removed by the tree."""

    directory = True

    def __init__(self, tree: Tree, bucket: Bucket, own: State) -> None:
        self.tree, self.bucket, self.state = tree, bucket, own
        self._log = bucket  # as the store has it
        self.number = own.group
        self.parent: Group = self  # set by the tree
        self.removed = False
        self.settings = parse_settings(own.ctl)
        self.groups: dict[str, Group] = {}
        self.streams: dict[str, Stream] = {}
        self.numbers: dict[int, Stream] = {}
        self.metas = {name: Meta(self, name) for name in META_FILES}
        self.folders = {name: Folder(self, name) for name in FOLDERS}
        self.log_readers: set[MergedReader] = set()  # of `order` and views
        self.order_parked: Parked = {}
        self.order_watchers: dict[object, Callable[[], None]] = {}
        self.cursors: set[Cursor] = set()
        self.cursors_parked: dict[Cursor, None] = {}  # in the order in which they began to wait
        self.cursor_watchers: dict[Cursor, Callable[[], None]] = {}
        self.record_being_delivered: Record | None = None  # the newest message, while it is offered
        self.ring: RingPort | None = None  # shared memory in which other processes publish and follow this log
        self.past_rings: set[RingPort] = set()  # that ended, and whose followers have not changed over yet
        self.blocking: set[Stream] = set()  # streams on which writers wait for room
        self.refusals = Refusals()
        self.counts = Counts()
        self.evictions = 0  # grows with every cut, so that cursors look only then
        self.catalog_version = 0  # grows with every change of names and permissions
        self.routing_version = (
            0  # grows when streams that are there may be covered by other views or consumers than before
        )
        self._trimmed_bytes = 0  # the log's size, and what had expired, when it was last trimmed
        self._trimmed_expired = 0
        self._loose = False  # something that was wanted then may not be any more
        self._trimming: Iterator[None] | None = None  # what is left of it
        self.kept_from = 0  # the lowest sequence that any stream keeps, when it was last trimmed
        self._cut_below = 0  # what the log's bound has cut last
        self._room = 0  # bytes that may surely be written before the log's bound is looked at again
        self._cuts_settled = False
        self.times = LogClock(self)
        self.ranks = PriorityIndex(self)
        self.lapsed: dict[int, int] = {}  # messages that outlived their own ttl: sequence -> stream
        self.held = DelayedMessages(self)
        self.ids = DeduplicationWindow(self)
        self.views = ViewRegistry(self)
        self.consumers = Consumers(self)
        self.transactions = Transactions(self)
        self.folders[".txn"] = self.transactions.folder
        self.alarm_ns = 0  # when the tree was last asked to wake this group; 0: not
        for row in own.streams.values():
            self._enter(Stream(self, row))
        self.views.load()
        self.consumers.load()
        bucket.writer.state = self.encode_state
        self._select_storage()

    def _enter(self, stream: Stream) -> None:
        self.streams[stream.name] = stream
        self.numbers[stream.number] = stream

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def group(self) -> Group:
        return self

    @property
    def qid(self) -> Qid:
        return Qid(QTDIR, 0, self.number << 32)

    def _select_storage(self) -> None:
        """The log as `keep` says. It may change while nothing is kept."""
        if self.settings.keep == "ring" and self.bucket is self._log:
            self.bucket = self.tree.store.in_memory(self._log)
        elif self.settings.keep == "disk" and self.ring is None:
            self.bucket = self._log

    def encode_state(self) -> bytes:
        return self.state.encode()

    # ------------------------------------------------------------ what is kept

    def expire_messages(self) -> None:
        """Messages whose own ttl has ended count no more."""
        for sequence, rank in self.ranks.expired(self.tree.clock.engine_ns(), _LAPSED):
            stream = self.numbers.get(rank.stream)
            if stream is not None:
                stream.lapse(sequence)
                self.lapsed[sequence] = rank.stream
                self._loose = True
                self.tree.dirty_groups.add(self)

    def _forget_lapsed(self) -> Iterator[None]:
        """Those at the beginning of their stream need not be remembered: it keeps nothing there. In steps."""
        for number in set(self.lapsed.values()):
            if (stream := self.numbers.get(number)) is not None:
                yield from stream.pass_absent()
        yield from self._forget_absent(self.lapsed)

    def _forget_absent(self, absent: dict[int, int]) -> Iterator[None]:
        """Of messages that are not to be seen: what is below its stream's floor. In steps."""
        for count, (sequence, number) in enumerate(list(absent.items())):
            owner = self.numbers.get(number)
            if owner is None or sequence < owner.state.floor:
                absent.pop(sequence, None)
                self.ranks.remove(sequence)
            if count % _STEPS == 0:
                yield

    def _forget_removed(self) -> None:
        """The log has given back room: messages in the middle may be gone from it, too."""
        for absent in (self.state.dropped, self.lapsed):
            for sequence, number in list(islice(absent.items(), _LOOKED_AT)):
                found = self.bucket.reader.locate(number, sequence)
                if (stream := self.numbers.get(number)) is not None:
                    stream.newest_kept()  # while it is known that this one is not
                del absent[sequence]
                if found is not None and found[0] == sequence:
                    absent[sequence] = number  # behind the others, which are looked at before it is again
                else:
                    self.ranks.remove(sequence)

    def is_expired(self, sequence: int) -> bool:
        """Whether a message has outlived its own ttl."""
        rank = self.ranks.get(sequence)
        return rank is not None and rank.expires_ns <= self.tree.clock.engine_ns()

    def low_watermark(self, stream: Stream) -> int:
        """The lowest sequence of the stream that a reader present now, or a consumer, has not had."""
        low = min(self.bucket.end.next, self.consumers.floor(stream))
        if self.ring is not None:
            low = min(low, self.ring.floor)
        for past in self.past_rings:
            low = min(low, past.floor)
        if len(stream.parked) < len(stream.readers):  # who waits has had everything
            for reader in stream.readers:
                if reader not in stream.parked:
                    low = min(low, reader.position)
        for several in self.log_readers:
            if not several.idle and several.covers(stream):
                low = min(low, several.position)
        if self.cursors:
            slack = self.bucket.end.next - limits.CURSOR_SLACK_MESSAGES
            for cursor in self.cursors:
                low = min(low, max(cursor.position, slack))
        return low

    @property
    def keeps_all(self) -> bool:
        """Whether nothing but time and commands decide what is kept."""
        settings = self.settings
        return settings.replay == "all" and settings.deliver == "all" and settings.depth is NO_DEPTH

    def advance_all(self) -> None:
        """What is not kept any more stays gone, whoever goes back. Where only time decides it does so by itself."""
        if not self.keeps_all:
            for stream in self.numbers.values():
                if stream.count:
                    stream.update_low_watermark()

    def overtake_cursors(self, stream: Stream, old_floor: int) -> None:
        """Messages of the stream went because a cursor may hold back only so many: tell those who had not had them."""
        gone = self.bucket.reader.before(stream.state.floor, stream.number)
        if gone is None or gone < self.times.expired_before():
            return
        for cursor in self.cursors:
            if cursor.position <= gone and stream.number in cursor.streams():
                start = max(cursor.position, old_floor)
                cursor.lost += stream.messages(start, stream.state.floor)

    @property
    def must_retain(self) -> bool:
        """Whether anything written now is promised to someone who is not there yet."""
        return self.settings.replay != "off" or self.settings.deliver == "one" or bool(self.consumers)

    def bound_bytes(self) -> int:
        if self.settings.keep == "ring":
            return limits.RING_BYTES
        return limits.GROUP_BYTES if self.tree.store.path else limits.MEMORY_BYTES

    def trim(self, always: bool = False) -> None:
        """Tell the log what is still wanted, when enough has changed to make it worth the while."""
        if always or self._trimming is None:
            size, expired = self.bucket.upkeep.size, self.times.expired_before()
            grown = abs(size - self._trimmed_bytes) >= limits.TRIM_BYTES
            loose = self._loose and (size > limits.TRIM_BYTES or bool(self.lapsed))
            wanted = always or grown or loose or expired > self._trimmed_expired
            if not (wanted or self.lapsed):
                return
            self._trimming = self._trim(size, expired, wanted)
        self._go_on_trimming(always)

    def _go_on_trimming(self, always: bool = False) -> None:
        """A slice of it, or with `always` all."""
        clock = self.tree.clock
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        try:
            for _ in self._trimming or ():
                if not always and clock.engine_ns() >= until:
                    self.alarm(clock.engine_ns() + 1)
                    return
        except Exception:
            self._loose = True  # to be tried again
            self._trimming = None
            raise
        self._trimming = None

    def _trim(self, size: int, expired: int, wanted: bool) -> Iterator[None]:
        """In steps. Floors only rise: those found first still hold at the end. Of streams made meanwhile all stays."""
        yield from self._forget_lapsed()
        if not wanted:
            return
        self._loose, self._trimmed_expired = False, expired
        floors, kept_from, made = {}, self.bucket.end.next, self.state.next_stream
        for count, stream in enumerate(list(self.numbers.values())):
            stream.update_low_watermark()
            floors[stream.number] = stream.state.floor
            if (kept := self.bucket.reader.locate(stream.number, stream.state.floor)) is not None:
                kept_from = min(kept_from, kept[0])
            if count % _STEPS == 0:
                yield
        for absent in (self.state.dropped, self.lapsed):
            yield from self._forget_absent(absent)
        yield from self.ranks.forget()
        floors.update((number, 0) for number in range(made, self.state.next_stream) if number in self.numbers)
        if self.held.floor:
            floors[group_state.PUT] = self.held.floor
        self.kept_from = kept_from
        self.ids.forget()
        self.bucket.upkeep.trim(floors, self.state.dropped.keys() | self.lapsed.keys())
        if self.bucket.upkeep.size < max(size, self._trimmed_bytes):
            self._forget_removed()
        self._trimmed_bytes = self.bucket.upkeep.size

    def retention_changed(self) -> None:
        """A reader went on or went away: what only it had not had is not kept any more."""
        if self.settings.replay != "all" or self.settings.deliver == "one":
            self._loose = True
            self.tree.dirty_groups.add(self)

    def find_room(self, room: int) -> None:
        """What is left of the log's bound was reckoned to be used up: look. Raises StreamFull."""
        if self.bucket.upkeep.size + room > self.bound_bytes():
            self._evict_oldest(room)
        self._room = max(self.bound_bytes() - self.bucket.upkeep.size - room, 0)

    def _evict_oldest(self, room: int) -> None:
        """The log reached its bound: cut the oldest stretch of it that keeps something."""
        self.trim(always=True)
        beyond = self.bucket.upkeep.size + room - self.bound_bytes()
        if beyond <= 0:
            return
        if self.settings.full != "drop-old":
            raise errors.StreamFull(f"the group's log reached {self.bound_bytes()} bytes")
        if self.bucket.reader.first < self._cut_below and beyond <= limits.SEGMENT_BYTES:
            return  # what was cut is given back as soon as the disk has that
        self._cut_below = self.bucket.metrics.stretch_end(self.kept_from)
        cuts = {stream: cut for stream in self.numbers.values() if (cut := stream.plan_cut_below(self._cut_below))}
        if cuts:
            self.persist_low_watermarks({stream.number: cut.floor for stream, cut in cuts.items()})
        for stream, cut in cuts.items():
            stream.carry_out_cut(cut)
        self._trimmed_bytes = 0
        self.trim(always=True)

    # ------------------------------------------------------------ the way of a write

    def write_message(self, stream: Stream, body: bytes) -> Step[int]:
        """As `write`, of one plain message: the common case where nothing bounds the stream is a straight line."""
        size = len(body)
        bounded = self.settings.depth is not NO_DEPTH or stream.blocked or self.consumers
        if bounded or stream.removed or self.bucket.end.failed is not None:
            return self.write(stream, WriteRequest(MESSAGE, (body,), size))
        self._room -= size + RECORD_BYTES
        if self._room < 0:
            self.find_room(size + RECORD_BYTES)
        self._append_one(stream, MESSAGE, body, self.times.next_ns())
        return self.after_data_sync(size)

    def write(self, stream: Stream, post: WriteRequest) -> Step[int]:
        """Append messages as one unit, or do with them what `full` says. The step comes to `post.total`.

        A Wait that is cancelled before there was room has appended nothing, and `post.undo` is called; afterwards it
        cannot be cancelled.
        """
        if stream.removed:
            raise errors.NotFound(f"{stream.name} was removed")
        if self.bucket.end.failed is not None:
            raise errors.ReadOnly(f"the disk failed: {self.bucket.end.failed}")
        if post.kind != MESSAGE and self.settings.deliver == "one":
            return post.total  # an end mark is for all readers: here is none who could get it
        if not (post.id and self.ids.find_duplicate(post.id)):  # a repeat needs no room
            self.reserve_room(post.total + RECORD_BYTES * len(post.bodies))
        verdict = self.admit(stream, post)
        if verdict is Admission.WAIT:
            return self.park_writer(stream, post)
        if verdict is Admission.DISCARD:
            return post.total
        return self.append_admitted(stream, post)

    def reserve_room(self, size: int) -> None:
        """So many bytes are to be appended. Raises StreamFull where the log has reached its bound."""
        self._room -= size
        if self._room < 0:
            self.find_room(size)

    def admit(self, stream: Stream, post: WriteRequest) -> Admission:
        """What `depth`, and the bounds of consumers, say of a write. Raises StreamFull, TooLong."""
        if post.unit is not None:
            return post.unit.verdict()
        if post.kind != MESSAGE or (post.id and self.ids.find_duplicate(post.id)):
            return Admission.APPEND
        verdict = Admission.APPEND
        if self.settings.depth is not NO_DEPTH or stream.blocked:
            verdict = stream.verdict(len(post.bodies), post.size)
        if self.consumers and verdict is Admission.APPEND:
            verdict = self.consumers.verdict(stream, len(post.bodies))
        return verdict

    def park_writer(self, stream: Stream, post: WriteRequest) -> Wait[int]:
        """It waits for room there."""

        def cancel(wait: Wait[int]) -> bool:
            place = stream if post.unit is None else post.unit.lacking
            first = place is not None and next(iter(place.blocked), None) is wait
            if place is None or place.blocked.pop(wait, None) is None:
                return False
            if post.undo is not None:
                post.undo()
            if first:
                self.unblock()  # it stood before others for whom there may be room
            return True

        wait: Wait[int] = Wait(cancel)
        stream.blocked[wait] = post
        self.blocking.add(stream)
        return wait

    def append_admitted(self, stream: Stream, post: WriteRequest) -> Step[int]:
        """Append and hand over; the step comes to `post.total` when the group's `sync` is kept."""
        if post.unit is not None:
            return post.unit.carry_out()
        if post.id and (known := self.ids.find_duplicate(post.id)):
            if post.on_sequence is not None:
                post.on_sequence(known)
            return self.after_data_sync(post.total)
        time_ns = self.times.next_ns()
        if post.headers:
            self._append_with_headers(stream, post, time_ns)
        elif len(post.bodies) == 1:
            self._append_one(stream, post.kind, post.bodies[0], time_ns)
        else:
            self._append_unit(stream, post.kind, post.bodies, time_ns)
        depth = self.settings.depth.messages
        if depth and stream.count > depth and self.settings.full == "drop-old":
            self.bound_depth(stream)
        return self.after_data_sync(post.total)

    def bound_depth(self, stream: Stream) -> None:
        """What was accepted earlier was appended whatever `depth` says: with `full drop-old` the oldest go."""
        settings = self.settings
        if settings.full == "drop-old" and settings.depth is not NO_DEPTH and stream.name != settings.dead:
            stream.update_low_watermark()
            stream.cut_to_depth()

    def _append_one(self, stream: Stream, kind: int, body: bytes, time_ns: int) -> None:
        if not self.must_retain and self.ring is None and not self.past_rings and self._all_wait(stream):
            sequence = self.bucket.writer.skip()
            stream.trimmed_count += 1  # had by its readers, as what they count
        else:
            try:
                sequence = self.bucket.writer.append(kind, stream.number, time_ns, body)
            except OSError as error:
                raise errors.DiskFailed(str(error)) from error
            stream.appended(sequence, kind, len(body))
        self._announce(stream, sequence, time_ns, kind, body)

    def _append_unit(self, stream: Stream, kind: int, bodies: Sequence[bytes], time_ns: int) -> None:
        first = self.append_drafts([Draft(kind, stream.number, body) for body in bodies], time_ns)
        for sequence, body in enumerate(bodies, first):
            stream.appended(sequence, kind, len(body))
        for sequence, body in enumerate(bodies, first):
            self._announce(stream, sequence, time_ns, kind, body)

    def _append_with_headers(self, stream: Stream, post: WriteRequest, time_ns: int) -> None:
        """One message of `.put`, and with it that its id is known."""
        body = post.bodies[0]
        also: list[Draft] = []
        if post.id:
            change = self.ids.note(post.id, self.bucket.end.next)
            also.append(Draft(Kind.CHANGE, 0, group_state.encode_change(change)))
        sequence = self.append_message(stream, body, post.headers, also, time_ns)
        if post.id:
            self.state.apply(change)
        if post.on_sequence is not None:
            post.on_sequence(sequence)
        self._announce(stream, sequence, time_ns, MESSAGE, body, post.headers)

    def append_message(
        self, stream: Stream, body: bytes, head: bytes, also: Sequence[Draft] = (), time_ns: int = 0
    ) -> int:
        """Append one message, and other records in the same unit; nobody is told yet. Returns its sequence."""
        drafts = [Draft(MESSAGE, stream.number, body, head), *also]
        sequence = self.append_drafts(drafts, time_ns or self.times.next_ns())
        stream.appended(sequence, MESSAGE, len(body))
        return sequence

    def announce(self, stream: Stream, sequence: int, body: bytes, head: bytes) -> None:
        """Tell everyone of a message that was appended with `append_message`."""
        self._announce(stream, sequence, self.bucket.end.last_ns, MESSAGE, body, head)

    def append_drafts(self, drafts: Sequence[Draft], time_ns: int) -> int:
        try:
            return self.bucket.writer.append_batch(drafts, time_ns)
        except OSError as error:
            raise errors.DiskFailed(str(error)) from error

    def _all_wait(self, stream: Stream) -> bool:
        """Whether everyone present who is to see a message of the stream waits for it: then it need not be kept."""
        return (
            len(stream.parked) == len(stream.readers)
            and len(self.order_parked) == len(self.log_readers)
            and len(self.cursors_parked) == len(self.cursors)
        )

    def _announce(self, stream: Stream, sequence: int, time_ns: int, kind: int, body: bytes, head: bytes = b"") -> None:
        """Everyone who waits is answered before the write is."""
        if kind == MESSAGE:
            counts = self.counts
            stream.mtime_ns = time_ns
            stream.written += 1
            counts.written += 1
            counts.written_bytes += len(body)
        self.tree.dirty_groups.add(self)
        self.deliver(stream, Record(sequence, time_ns, stream.number, kind, 0, head, body))

    def deliver(self, stream: Stream, record: Record) -> None:
        """Everyone who waits is told of a message, which was counted."""
        kind, head = record.kind, record.headers
        rank = self.ranks.note(record) if head else None
        if stream.parked or self.order_parked or self.cursors_parked:
            if stream.parked:
                deliver_to_waiters(stream.parked, record)
            if self.order_parked and kind == MESSAGE:
                deliver_to_waiters(self.order_parked, record)
            for cursor in list(self.cursors_parked):
                cursor.offer(record)
        if self.views:
            self.views.offer(stream, record)
        consumers = self.consumers
        if head or consumers or stream.default_consumer is not None or record.sequence + 1 >= consumers.next_end:
            self.record_being_delivered = record
            try:
                consumers.offer(stream, record, rank)
            finally:
                self.record_being_delivered = None
        if stream.watchers:
            stream.wake_pollers()
        if self.order_watchers or self.cursor_watchers:
            self.wake_pollers()

    def wake_pollers(self) -> None:
        """Those of `order`, views and cursors."""
        watchers = [*self.order_watchers.values(), *self.cursor_watchers.values()]
        self.order_watchers, self.cursor_watchers = {}, {}
        for then in watchers:
            then()

    def after_data_sync(self, value: T) -> Step[T]:
        """`value` at once, or when the log is on disk as `sync` says."""
        sync = self.settings.sync
        if sync == SYNC_OFF or not self.must_retain:
            return value
        if sync:
            self.bucket.upkeep.sync(None, sync / 1e9)
            return value
        return self.after_sync(value)

    def after_sync(self, value: T) -> Step[T]:
        """`value`, once everything appended so far is on disk."""
        wait: Wait[T] = Wait()

        def then(error: OSError | None) -> None:
            if error is None:
                wait.settle(value)
            else:
                wait.fail(errors.DiskFailed(f"the disk failed: {error}"))

        self.bucket.upkeep.sync(then)
        return wait.result() if wait.settled else wait

    # ------------------------------------------------------------ changes

    def change(self, *changes: Change, steps: Sequence[Steps] = ()) -> None:
        """Write changes, and steps of consumers, to the log as one unit and carry them out."""
        if self.bucket.end.failed is not None:
            raise errors.ReadOnly(f"the disk failed: {self.bucket.end.failed}")
        time_ns = self.times.next_ns()
        drafts = [Draft(Kind.CHANGE, c.get("stream", 0), group_state.encode_change(c)) for c in changes]
        drafts += [Draft(Kind.ACK, own.number, body) for own, body in steps]
        self.append_drafts(drafts, time_ns)
        for c in changes:
            self.state.apply(c)
            self._loose = self._loose or c["do"] in ("remove", "floor", "drop", "ctl", "forget")
            self.routing_version += c["do"] in _RESHAPE
        for own, body in steps:
            self.consumers.progressed(own, body)
        if self.ring is not None:
            self.ring.changed(changes)
        self.catalog_version += 1
        self.tree.dirty_groups.add(self)

    def persist_low_watermarks(self, floors: Mapping[int, int]) -> None:
        """Have the log say what these streams will not keep any more. Raises DiskFailed."""
        if self.settings.keep == "ring":
            return
        change: Change = {"do": "floor", "floors": [[number, floor] for number, floor in floors.items()]}
        self.append_drafts([Draft(Kind.CHANGE, 0, group_state.encode_change(change))], self.times.next_ns())

    def apply_depth_after_recovery(self) -> None:
        """What `depth` had cut before the start is not offered to anyone again."""
        if self.settings.depth is not NO_DEPTH and not self._cuts_settled:
            for stream in self.numbers.values():
                stream.update_low_watermark()
        self._cuts_settled = True

    def after_metadata_sync(self, value: T) -> Step[T]:
        """`value`, when a change of names, modes or settings is as safe as `sync` says."""
        sync = self.settings.sync
        if sync > 0:
            self.bucket.upkeep.sync(None, sync / 1e9)
        return self.after_sync(value) if sync == SYNC_ALWAYS else value

    def make_stream(self, name: str, mode: int, user: User) -> Stream:
        if len(self.streams) >= limits.STREAMS:
            raise errors.OverLimit(f"a group has at most {limits.STREAMS} streams")
        if name in self.views:
            raise errors.Exists(f"{name} is a view")
        number = self.state.next_stream
        self.change(
            {
                "do": "make",
                "stream": number,
                "name": name,
                "mode": mode & 0o777,
                "uid": user.uid,
                "gid": user.gid,
                "time": self.tree.clock.wall_ns(),
            }
        )
        stream = Stream(self, self.state.streams[number])
        stream.count = stream.newest = 0
        self._enter(stream)
        return stream

    def remove_stream(self, stream: Stream) -> None:
        self.change({"do": "remove", "stream": stream.number})
        del self.streams[stream.name], self.numbers[stream.number]
        stream.end()
        for cursor in [cursor for cursor in self.cursors if cursor.over]:
            cursor.end()
        for consumer in self.consumers.all_waiting():
            consumer.serve()
        self.consumers.on_routing_changed()

    def rename_stream(self, stream: Stream, name: str) -> None:
        old = stream.name
        self.change({"do": "rename", "stream": stream.number, "name": name})
        del self.streams[old]
        self.streams[name] = stream
        self.consumers.renamed(old, name)
        self.consumers.on_routing_changed()

    def plan_settings(self, settings: Settings, *, cut: bool) -> Resetting:
        """What the log has to say, and, with `cut`, what a new `depth` cuts, when settings are put in force."""
        now, floors = self.settings, dict[int, int]()
        if (settings.replay, settings.ttl, settings.depth, settings.full) != (now.replay, now.ttl, now.depth, now.full):
            # What the old settings did not keep any more must not come back under the new ones.
            for stream in self.numbers.values():
                stream.update_low_watermark()
                floors[stream.number] = stream.state.floor
        cuts: dict[Stream, Cut] = {}
        if cut and (settings.depth, settings.full) != (now.depth, now.full) and settings.full == "drop-old":
            mine = [stream for stream in self.numbers.values() if stream.name != settings.dead]
            cuts = {stream: stream.plan_cut(settings.depth) for stream in mine}
            floors.update({stream.number: cut.floor for stream, cut in cuts.items()})
        changes: list[Change] = [{"do": "ctl", "lines": settings.lines(given=True)}]
        if kept_from := [[number, floor] for number, floor in floors.items() if floor]:
            changes.insert(0, {"do": "floor", "floors": kept_from})
        return Resetting(changes, cuts)

    def put_in_force(self, settings: Settings, cuts: Mapping[Stream, Cut]) -> None:
        """The log says so."""
        self.settings = settings
        self._select_storage()
        for stream, cut in cuts.items():
            stream.carry_out_cut(cut)
        self.consumers.invalidate_order()

    def lines(self) -> list[str]:
        """What `ctl` prints: settings, views, consumers."""
        return self.settings.lines() + self.views.lines() + self.consumers.lines()

    # ------------------------------------------------------------ what is to be done at some time

    def alarm(self, due_ns: int) -> None:
        """Have the tree wake this group then."""
        if not self.alarm_ns or due_ns < self.alarm_ns:
            self.alarm_ns = due_ns
            self.tree.schedule(self, due_ns)

    def wake(self, now_ns: int) -> None:
        """Delays and leases that are over."""
        self.alarm_ns = 0
        for what, call in (
            ("expiring messages", self._wake_expiry),
            ("appending what is due", partial(self.held.wake, now_ns)),
            ("ending leases and delays", partial(self.consumers.wake, now_ns)),
            ("dropping idle parts", partial(self.transactions.wake, now_ns)),
            ("letting writers go on", self.unblock),
            ("giving back room", self._go_on_trimming),
        ):
            if not self.tree.faults.contain(self, what, call):
                self.alarm(now_ns + 10**9)

    def _wake_expiry(self) -> None:
        self.expire_messages()
        if self.ranks.next_expiry_ns != NEVER:
            self.alarm(max(self.ranks.next_expiry_ns, self.tree.clock.engine_ns() + 1))  # the rest after others

    def start(self) -> None:
        """After the log was read: time goes on for what waits for it."""
        self.tree.faults.contain(self, "finding delayed messages", self.held.start)
        self.tree.faults.contain(self, "starting its consumers", self.consumers.start)

    def refuse(self, user: User, file: str, text: str) -> None:
        """Remember why a write was refused."""
        self.counts.refused += 1
        self.refusals.add(Refused(self.tree.clock.wall_ns(), user.uid, user.pid, file, text))

    def unblock(self) -> None:
        """Something may have made room: let blocked writers go on."""
        if not self.blocking:
            return
        for stream in sorted(self.blocking, key=lambda stream: stream.number):
            stream.unblock()
            if not stream.blocked:
                self.blocking.discard(stream)

    def end(self) -> None:
        """The group is gone, or the server stops: whoever waits is answered."""
        close_waiters(self.order_parked)
        watchers, self.order_watchers = self.order_watchers, {}
        for then in watchers.values():
            then()
        for cursor in list(self.cursors):
            cursor.end()
        for view in self.views.values():
            close_waiters(view.parked)
        for consumer in self.consumers.every():
            consumer.end()
        self.transactions.end()
        self.wake_pollers()
