"""Where `seek` leads: from a place in words to a sequence.

Owns that search. Moves nothing; the caller says which messages may be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mqfs import errors, limits
from mqfs.engine.group import Group
from mqfs.engine.language.message_formats import parse_seek
from mqfs.engine.routing.filter import MessageFilter
from mqfs.engine.stream import Stream
from mqfs.model import NEVER, Kind, Record


def position(
    group: Group,
    selection: MessageFilter,
    word: str,
    selected: Callable[[], Collection[Stream]],
    shows: Callable[[Record], bool],
) -> int:
    """The sequence that `seek word` goes to. `selected`: those which the user may read; `shows`: whether a message
    counts."""
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
    if kind == "back" and selection.is_sparse() is None:  # as a rule they are near
        near = _walk_back(group, selection, value, shows, limits.PASSED_MESSAGES)
        if near is not None:
            return near
    streams = selected()
    if kind == "first" and len(streams) == len(group.numbers):  # without a look at each stream
        below = min(max(bucket.reader.first, group.retention.kept_from), bucket.end.next)
        if group.retention.keeps_all:
            return below  # a little before it
        near = _first_kept(group, below)
        if near is not None:
            return near
    if kind == "first":
        return min((s.kept.first_kept() or bucket.end.next for s in streams), default=bucket.end.next)
    if kind == "last":
        return max((s.kept.newest_kept() for s in streams), default=0) or bucket.end.next
    if selection.by_stream and not any(s.kept.acked_by_all(s.state.floor, None) for s in streams):
        return _back(group, value, streams, shows)
    return _walk_back(group, selection, value, shows) or bucket.end.next


def _first_kept(group: Group, below: int) -> int | None:
    """The first message that is kept. None: it is not among the next ones, or one is damaged."""
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
    """The sequence of the count-th message before the end; only those of which the log does not tell are read."""
    expired = group.retention.expiry.expired_before()
    floors = {stream.number: max(stream.state.floor, expired) for stream in streams}
    gone, exclusives = group.state.dropped.keys() | group.retention.lapsed.keys(), group.ranks.all_exclusives()
    first = group.log.end.next
    if not count:
        return first
    for portion in group.log.metrics.listing(floors, first):
        here = portion.messages
        if gone or exclusives:
            found = (s for s in portion.columns(here)[0] if s not in gone)
            there: Sequence[int] = [s for s in found if s not in exclusives or _is_shown(group, s, shows)]
            here = len(there)
        else:
            there = portion.columns(min(count, here))[0] if count <= here else ()
        if count <= here:
            return there[-count]
        count -= here
    oldest = [s.kept.first_kept() for s in streams]
    return min((sequence for sequence in oldest if sequence), default=first)


def _is_shown(group: Group, sequence: int, shows: Callable[[Record], bool]) -> bool:
    try:
        record = group.log.reader.scan(sequence)
    except errors.Damaged:
        return False
    return record is not None and record.sequence == sequence and shows(record)


def _walk_back(
    group: Group, selection: MessageFilter, count: int, shows: Callable[[Record], bool], most: int = NEVER
) -> int | None:
    """The same where each message has to be looked at. None: it is not among the newest `most`, or one is damaged."""
    bucket = group.log.bucket
    at = found_at = bucket.end.next
    while count > 0:
        found = selection.before(at)
        if found is None:
            break
        if not most:
            return None
        at, most = found, most - 1
        try:
            record = bucket.reader.scan(at)
        except errors.Damaged:
            if most < limits.PASSED_MESSAGES:
                return None
            continue
        if record is not None and record.kind == Kind.MESSAGE and shows(record):
            count, found_at = count - 1, at
    return found_at
