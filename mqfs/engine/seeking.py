"""Where `seek` leads: from a place in words to a sequence.

Owns that search. Moves nothing; what may be shown is told by who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mqfs import errors
from mqfs.engine.format import parse_seek
from mqfs.engine.selection import Selection
from mqfs.engine.stream import Stream
from mqfs.types import Record


def position(selection: Selection, word: str, streams: Collection[Stream], shows: Callable[[Record], bool]) -> int:
    """The sequence that `seek word` goes to. `streams`: which the user may read; `shows`: whether a message counts."""
    kind, value = parse_seek(word)
    group = selection.group
    bucket = group.bucket
    for stream in group.numbers.values():  # what was not kept any more stays gone, whoever seeks back
        if stream.count:
            stream.advance()
    if kind == "end":
        return bucket.next
    if kind == "first":
        return min((s.first_kept() or bucket.next for s in streams), default=bucket.next)
    if kind == "last":
        return max((s.newest_kept() for s in streams), default=0) or bucket.next
    if kind == "sequence":
        return value
    if kind == "time":
        return bucket.at(value)
    if kind == "ago":
        return bucket.at(group.tree.clock.wall_ns() - value)
    return _back(selection, value, shows)


def _back(selection: Selection, count: int, shows: Callable[[Record], bool]) -> int:
    """The sequence of the count-th message before the end."""
    bucket = selection.group.bucket
    at = found_at = bucket.next
    while count > 0:
        found = selection.before(at)
        if found is None:
            break
        at = found
        try:
            record = bucket.scan(at)
        except errors.Damaged:
            continue
        if record is not None and shows(record):
            count, found_at = count - 1, at
    return found_at


__all__ = ["position"]
