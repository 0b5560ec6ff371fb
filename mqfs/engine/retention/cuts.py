"""Cuts: what `depth`, a full log or `clear` takes from the beginning of a stream, planned before it is done.

The log has a cut before memory does; between the two more may be appended.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import attrs

from mqfs.engine.language.settings import Depth
from mqfs.engine.log.group_log import GroupLog
from mqfs.engine.log.portions import Work
from mqfs.group_state import StreamState

_STEPS = 64  # messages between two looks at the clock: 0.1 ms


class Range(Protocol):
    """What a stream keeps."""

    log: GroupLog
    state: StreamState
    number: int
    count: int
    size: int
    trimmed_count: int

    def counted(self, first: int, end: int | None = None) -> tuple[int, int]: ...

    def update_low_watermark(self) -> None: ...

    def newest_kept(self) -> int: ...

    def is_deleted(self, sequence: int) -> bool: ...


@attrs.define
class Cut:
    """Messages to remove from the beginning of a stream: the new floor, and the counts behind it."""

    floor: int
    count: int
    size: int
    gone: int = 0  # what is taken
    gone_size: int = 0
    lost: int = 0  # messages among them
    last_lost: int = 0
    before: int = 0  # `trimmed_count` when it was planned


class Clearing(NamedTuple):
    """A stream of which all is to go."""

    newest: int  # message that goes; 0: none
    cut: Cut


def plan_cut(kept: Range, depth: Depth, messages: int = 0, size: int = 0) -> Cut:
    """The oldest, until the rest and so much more fits."""
    cut = begin_cut(kept)
    while cut.count > 0 and not fits(depth, cut, messages, size):
        extend_cut(kept, cut)
    return cut


def cut_in_steps(kept: Range, depth: Depth) -> Work[Cut]:
    """As `plan_cut`."""
    cut, steps = begin_cut(kept), 0
    while cut.count > 0 and not fits(depth, cut, 0, 0):
        extend_cut(kept, cut)
        steps += 1
        if steps % _STEPS == 0:
            yield
    return cut


def plan_cut_below(kept: Range, target: int) -> Cut | None:
    """All below that sequence; None where nothing is."""
    bucket, floor = kept.log.bucket, kept.state.floor
    found = bucket.reader.locate(kept.number, floor)
    if found is None or found[0] >= target:
        return None
    count, size = kept.counted(floor, target)
    lost = max(count - bucket.metrics.count_eof_markers(kept.number, floor, target), 0)
    newest = bucket.reader.before(target, kept.number) or 0
    while (
        lost
        and newest >= floor
        and (kept.is_deleted(newest) or bucket.metrics.count_eof_markers(kept.number, newest, newest + 1))
    ):
        newest = bucket.reader.before(newest, kept.number) or 0
    return Cut(target, kept.count - count, kept.size - size, count, size, lost, newest, kept.trimmed_count)


def plan_clear(kept: Range, end: int) -> Clearing:
    """All that is kept below that sequence."""
    kept.update_low_watermark()
    before, floor = kept.log.reader.before, kept.state.floor
    last = before(end, kept.number) or 0
    gone, size, newest = kept.count, kept.size, kept.newest_kept()
    if kept.log.end.next > end and (before(kept.log.end.next, kept.number) or 0) > last:
        gone, size = kept.counted(floor, end)
        newest = last if last >= floor else 0
    cut = Cut(max(floor, last + 1 if last else 0), kept.count - gone, kept.size - size, gone, size)
    cut.before = kept.trimmed_count
    return Clearing(newest, cut)


def begin_cut(kept: Range) -> Cut:
    """Nothing of it yet."""
    return Cut(kept.state.floor, kept.count, kept.size, before=kept.trimmed_count)


def extend_cut(kept: Range, cut: Cut) -> None:
    """By the oldest message that would be left."""
    found = kept.log.reader.locate(kept.number, cut.floor)
    if found is None:
        cut.gone_size += cut.size
        cut.gone += cut.count
        cut.count = cut.size = 0
        return
    sequence, size = found
    cut.floor = sequence + 1
    if not kept.is_deleted(sequence):
        cut.count -= 1
        cut.size -= size
        cut.gone += 1
        cut.gone_size += size
        if size:  # an end mark is no loss to anyone
            cut.lost += 1
            cut.last_lost = sequence


def fits(depth: Depth, kept: Range | Cut, messages: int, size: int) -> bool:
    """Whether so much more fits below `depth`; not where it was not counted."""
    if kept.count < 0:
        return False
    if depth.messages and kept.count + messages > depth.messages:
        return False
    return not (depth.size and kept.size + size > depth.size)
