"""Trimming: whole segments without a live message go.

Owns the choice of those segments, a few at each call. Segments with live messages are compaction.py's.
"""

from __future__ import annotations

from mqfs import limits
from mqfs.store.appender import Appender
from mqfs.store.chain import Chain
from mqfs.store.removal import SegmentRemoval
from mqfs.store.segment.file import Segment
from mqfs.store.segment.liveness import Liveness

_LOOKS = 4  # segments of which one trim reads the index


def trim(chain: Chain, liveness: Liveness, removal: SegmentRemoval, appender: Appender) -> None:
    """Remove segments without a live message. Raises OSError, MqfsError."""
    opened, looks, unwanted = chain.open, _LOOKS, []
    for segment in chain.segments:
        if segment is opened or liveness.confirms(segment.liveness):
            continue
        looks -= 1
        if looks >= 0 and not liveness.has_live(segment.liveness, segment.load()):
            unwanted.append(segment)
    if opened is not None and _is_worth_a_roll(opened, appender) and chain.end.failed is None:
        opened.liveness.cursor = 0
        are_others_unwanted = len(unwanted) == len(chain.segments) - 1
        if are_others_unwanted and not _has_live(liveness, opened):
            appender.roll_for_removal()
            unwanted.append(opened)
    if chain.open is None:
        unwanted = [
            segment for segment in unwanted if segment is not chain.segments[-1]
        ]  # the last holds the newest state
    if unwanted and not removal.paused and chain.end.failed is None:
        removal.remove(unwanted)


def _has_live(liveness: Liveness, segment: Segment) -> bool:
    return liveness.confirms(segment.liveness) or liveness.has_live(segment.liveness, segment.load())


def _is_worth_a_roll(segment: Segment, appender: Appender) -> bool:
    """Whether a new segment, which begins with the state, takes less than this one gives back."""
    grown = segment.used - segment.head
    return grown > max(limits.SEGMENT_FIRST_BYTES * 16, segment.head) and not appender.would_use_up_a_number(segment)


__all__ = ["trim"]
