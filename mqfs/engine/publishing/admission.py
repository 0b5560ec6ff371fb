"""Admission: whether a write is appended now, is discarded, or waits for room, as `depth`, `backlog` and `full` say."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import attrs

from mqfs import errors, limits
from mqfs.clock import Clock
from mqfs.engine.core.log import GroupCounts, GroupLog
from mqfs.engine.language.settings import Settings
from mqfs.engine.retention import retained
from mqfs.model import Draft
from mqfs.quotas import require_share
from mqfs.state.group import ANYONE, Change

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Consumer
    from mqfs.engine.files.handle import OpenFile
    from mqfs.engine.publishing.batch import AtomicBatch
    from mqfs.engine.stream import Stream


class Admission(enum.Enum):
    """Whether a write is appended, discarded or parked."""

    APPEND = enum.auto()
    CUT = enum.auto()  # the oldest messages make room, then it is appended
    DISCARD = enum.auto()
    WAIT = enum.auto()


_WAIT_BYTES = 512  # memory, about, of a write that waits, without its messages
STOPPING = ("reject", "block")  # values of `full` that keep a write from being appended
OnSequence: TypeAlias = Callable[[int, int, bool], None]  # first sequence, its wall ns or 0, whether it is a duplicate


@attrs.define
class WriteRequest:
    """Messages to append to a stream as one batch: of one write(2), `.put`, or the engine itself."""

    kind: int
    bodies: Sequence[bytes]
    total: int  # the result of the write
    undo: Callable[[], None] | None = None  # called if it is cancelled or refused while it waits
    headers: bytes = b""
    id: PutId | None = None  # of a `.put`: the id of all its messages together
    on_sequence: OnSequence | None = None
    unit: AtomicBatch | None = None  # the batch, for this stream and perhaps others, in place of `bodies`
    expect: int | None = None  # the newest message that the stream must have; 0: none
    writer: OpenFile | None = None  # charged with the memory while it waits; `refused` is called if it is then refused
    held: int = 0  # bytes charged

    @property
    def size(self) -> int:
        return sum(map(len, self.bodies))

    def hold(self) -> None:
        """Charge the memory of the request to its user, as it begins to wait for room. Raises OverLimit."""
        if self.writer is not None:
            size = self.size if self.unit is None else self.unit.memory
            self.held = self.writer.group.tree.memory.change(self.writer.user.uid, 0, size + _WAIT_BYTES)

    def release(self) -> None:
        """Release the memory of the request after its wait."""
        if self.writer is not None:
            self.held = self.writer.group.tree.memory.change(self.writer.user.uid, self.held, 0)


def request_of(message: Draft) -> WriteRequest:
    """Make the request to append a message that was accepted before."""
    return WriteRequest(
        message.kind, (message.body,), len(message.body) + len(message.headers), headers=message.headers
    )


def when_full(
    settings: Settings, counts: GroupCounts, messages: int, refusal: Callable[[], errors.StreamFull]
) -> Admission:
    """Return the verdict of `full` on messages without room, and count discarded ones. Raises the result of `refusal`
    under `full reject`."""
    if settings.full == "block":
        return Admission.WAIT
    if settings.full == "drop-new":
        counts.discarded += messages
        return Admission.DISCARD
    if settings.full == "reject":
        raise refusal()
    return Admission.CUT


def depth_reached(stream: Stream) -> errors.StreamFull:
    kept = stream.kept
    return errors.StreamFull(f"stream {stream.name!r}: depth reached with {kept.count} messages, {kept.size} bytes")


def require_fit(settings: Settings, messages: int, size: int) -> None:
    """Check that messages would fit below `depth` in an empty stream. Raises TooLong."""
    depth = settings.depth
    too_large = (depth.size and size > depth.size) or (depth.messages and messages > depth.messages)
    if too_large and (settings.full != "drop-old" or depth.size):
        raise errors.TooLong("message exceeds the stream's depth")


def has_room(stream: Stream, messages: int, size: int, heads: Iterable[bytes]) -> bool:
    """Whether `messages` more of `size` bytes fit below `depth` without an eviction. `heads`: their headers, as under
    `replay key` older messages of their keys are superseded. Dead letters always fit.

    Under `replay key` all messages fit with `full drop-old`, as the cut follows the append, when the superseded ones
    are known; also while the index of keys is incomplete. Raises TooLong for messages that would not fit into an empty
    stream.
    """
    kept, newest = stream.kept, stream.group.retention.newest
    settings = kept.log.settings
    if stream.name == settings.dead:
        return True
    require_fit(settings, messages, size)
    messages, size = messages + kept.held_count, size + kept.held_size
    if not retained.fits(settings.depth, kept, messages, size):
        kept.update_low_watermark()
    if newest is not None:
        if settings.full == "drop-old" or not newest.is_complete:
            return True
        gone, gone_size = newest.replaced_in(stream, heads)
        messages, size = messages - gone, size - gone_size
    return retained.fits_by_now(kept, messages, size)


def lacking_backlog(settings: Settings, messages: Mapping[Stream, int]) -> Stream | None:
    """Return a stream whose write has to wait for room in the `backlog` of a consumer (`full block`), or None.
    `messages`: those of the write, by stream. Raises StreamFull under `full reject`."""
    covered_by: dict[Consumer, list[Stream]] = {}
    for stream in messages:
        for consumer in stream.routes().bounded:
            if (consumer.state.full or settings.full) in STOPPING:
                covered_by.setdefault(consumer, []).append(stream)
    lacking = None
    for consumer, covered in covered_by.items():
        if consumer.backlog.exceeds(sum(messages[stream] + stream.kept.held_count for stream in covered)):
            if (consumer.state.full or settings.full) == "reject":
                raise errors.StreamFull(
                    f"consumer {consumer.name!r}: backlog of {consumer.state.backlog} messages reached"
                )
            lacking = lacking or covered[0]
    return lacking


# ------------------------------------------------------------ deduplication

# Ids of `.put`: a message with an id that the same user used within `dedup` is accepted, but not appended again. The
# ids are in the group's state, up to a number.


_ID_BYTES = 256  # bytes of a change with an id, without its text; more than a reserve record
_ESCAPED = 12  # bytes of one character of the text, at most
_FORGOTTEN = 16_384  # ids forgotten at once: some milliseconds


class PutId(NamedTuple):
    """An id of `.put`: its user and its text."""

    uid: int
    text: str


def bytes_of(ids: Iterable[PutId]) -> int:
    """Return the most bytes that the records of these ids take in the log, with one record of the log's own."""
    return _ID_BYTES + sum(_ID_BYTES + _ESCAPED * len(put_id.text) for put_id in ids)


class DeduplicationWindow:
    """The ids that a group remembers."""

    def __init__(self, log: GroupLog, clock: Clock) -> None:
        self._log, self._clock = log, clock

    def find_duplicate(self, put_id: PutId) -> int:
        """Return the sequence of the message written under that id within `dedup`; 0: none."""
        ids, now = self._log.state.ids, self._clock.engine_ns()
        for uid in (put_id.uid, ANYONE):
            known = mine.get(put_id.text) if (mine := ids.get(uid)) is not None else None
            if known is not None and known.until_ns > now:
                return known.sequence
        return 0

    def note(self, put_id: PutId, sequence: int) -> Change:
        """Return the change that records an id, after a check for room. Raises OverLimit."""
        self.require_room({put_id.uid: 1})
        return self.change(put_id, sequence)

    def change(self, put_id: PutId, sequence: int) -> Change:
        """Return the change that records an id until `dedup` is over."""
        until = self._clock.engine_ns() + self._log.settings.dedup
        return {"do": "id", "id": put_id.text, "uid": put_id.uid, "until": until, "sequence": sequence}

    def require_room(self, more: Mapping[int, int]) -> None:
        """Make room for more ids; `more`: their number by user. Raises OverLimit."""
        try:
            self._require_room(more)
        except errors.OverLimit:
            self.forget(sum(more.values()))
            self._require_room(more)

    def _require_room(self, more: Mapping[int, int]) -> None:
        ids = self._log.state.ids
        used = sum(map(len, ids.values())) + sum(more.values())
        for uid, count in more.items():
            require_share("ids within 'dedup'", limits.DEDUP_IDS, uid, len(ids.get(uid, ())) + count, used)

    def forget(self, least: int = 0) -> None:
        """Forget expired ids, the oldest first: of each user at most _FORGOTTEN, or `least` if that is more."""
        now, ids, most = self._clock.engine_ns(), self._log.state.ids, max(least, _FORGOTTEN)
        for uid, mine in list(ids.items()):
            for _ in range(most):
                if not mine or next(iter(mine.values())).until_ns > now:
                    break
                mine.popitem(last=False)
            if not mine:
                del ids[uid]
