"""Positions for `seek`: from the word of the command to a sequence.

The search moves no reader. The caller says which messages may be shown. Where each message must be examined, the caller
gets a WalkBack to continue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mqfs import errors, limits
from mqfs.engine.core.log import record_at
from mqfs.engine.group import Group
from mqfs.engine.language.message_formats import parse_seek
from mqfs.engine.retention.retained import bound_after_start
from mqfs.engine.routing import MessageFilter
from mqfs.engine.stream import Stream
from mqfs.model import Kind, Listed, Record


def position(
    group: Group,
    selection: MessageFilter,
    word: str,
    selected: Callable[[], Collection[Stream]],
    shows: Callable[[Record], bool],
) -> int | WalkBack:
    """Return the sequence that `seek word` goes to, or a walk there. `selected` returns the streams that the user may
    read; `shows`: whether a message counts."""
    kind, value = parse_seek(word)
    bucket = group.log.bucket
    if kind == "end":
        return bucket.end.next
    group.retention.advance_all()
    if kind == "sequence":
        return value
    if kind == "time":
        return bucket.reader.first_at_time(value)
    if kind == "ago":
        return bucket.reader.first_at_time(group.tree.clock.wall_ns() - value)
    walk = WalkBack(group, selection, 1 if kind == "last" else value, shows)
    if group.retention.newest is not None and kind in ("back", "last"):
        return walk.found if walk.go_on(limits.PASSED_MESSAGES) else walk
    # Usually the messages are near the end.
    if kind == "back" and selection.is_sparse() is None and walk.go_on(limits.PASSED_MESSAGES) and not walk.damaged:
        return walk.found
    streams = selected()
    if kind == "first" and len(streams) == len(group.numbers):  # without a look at each stream
        below = min(max(bucket.reader.first, group.retention.kept_from), bucket.end.next)
        if group.retention.keeps_all:
            return below  # perhaps a little before the first message
        near = _first_kept(group, below)
        if near is not None:
            return near
    if kind == "first":
        return min((s.kept.first_kept() or bucket.end.next for s in streams), default=bucket.end.next)
    if kind == "last":
        return max((s.kept.newest_kept() for s in streams), default=0) or bucket.end.next
    if selection.by_stream and not any(s.kept.acked_by_all(s.state.floor, None) for s in streams):
        return _back(group, value, streams, shows)
    return walk


def _first_kept(group: Group, below: int) -> int | None:
    """Return the sequence of the first retained message from `below` on, or the end of the log. None: it is not among
    the next messages, or one of these is damaged."""
    for _ in range(limits.PASSED_MESSAGES):
        try:
            record = group.log.reader.scan(below)
        except errors.Damaged:
            return None
        if record is None:
            return group.log.end.next
        stream, below = group.numbers.get(record.stream), record.sequence + 1
        if stream and record.sequence >= stream.state.floor and not stream.kept.is_deleted(record.sequence):
            return record.sequence
    return None


def _back(group: Group, count: int, streams: Collection[Stream], shows: Callable[[Record], bool]) -> int:
    """Return the sequence of the count-th message before the end, or of the oldest. Only messages that the index does
    not decide (exclusive ones) are read."""
    expired = group.retention.expiry.expired_before()
    for stream in streams:
        bound_after_start(stream.kept)
    floors = {stream.number: max(stream.state.floor, expired) for stream in streams}
    gone, exclusives = group.state.dropped.keys() | group.retention.lapsed.keys(), group.ranks.all_exclusives()
    first = oldest = group.log.end.next
    earliest: Listed | None = None  # a portion with messages, all of which count
    if not count:
        return first
    for portion in group.log.metrics.listing(floors, first):
        here = portion.messages
        if gone or exclusives:
            found = (s for s in portion.columns(here)[0] if s not in gone)
            there: Sequence[int] = [s for s in found if s not in exclusives or _is_shown(group, s, shows)]
            here = len(there)
        else:
            there = portion.columns(count)[0] if count <= here else ()
            earliest = portion if here else earliest
        if count <= here:
            return there[-count]
        oldest = there[0] if there else oldest
        count -= here
    return oldest if earliest is None else earliest.columns(earliest.messages)[0][0]


def _is_shown(group: Group, sequence: int, shows: Callable[[Record], bool]) -> bool:
    record = record_at(group.log.reader, sequence)
    return record is not None and shows(record)


class WalkBack:
    """A walk to the count-th message before the end that examines each message."""

    def __init__(self, group: Group, selection: MessageFilter, count: int, shows: Callable[[Record], bool]) -> None:
        self._reader, self._selection, self._count, self._shows = group.log.bucket.reader, selection, count, shows
        self._retention = group.retention
        self._at = self.found = group.log.end.next  # the sequence of the oldest message so far
        self.damaged = False  # whether a message on the way is damaged; it does not count

    def go_on(self, most: int) -> bool:
        """Continue past at most `most` messages; return whether the walk has ended. Raises DiskFailed."""
        if (newest := self._retention.newest) is not None and not newest.follow(most):
            return False
        while self._count > 0 and (at := self._selection.before(self._at)) is not None:
            if most <= 0:
                return False
            most -= 1
            try:
                record = self._reader.scan(at)
            except errors.Damaged:
                self._at, self.damaged = at, True
                continue
            self._at = at
            if record is not None and record.kind == Kind.MESSAGE and self._shows(record):
                self._count, self.found = self._count - 1, at
            if record is not None:
                most -= len(record.body) // limits.PASSED_BYTES
        return True
