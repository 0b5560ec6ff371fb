"""The messages of a batch and their distribution over tasks: positions, ranges, slices.

Owns the arithmetic. A position is the next sequence to read. The streams of a group move together: a group is one log,
and a task reads ranges of it. Asks the server only for `measure` of a cursor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import attrs
from pyspark.sql.datasource import InputPartition

from mqfs.ninep.blocking import Client
from pyspark_mqfs.catalog import Group, ServerCatalog, Split, measure, path_of, split
from pyspark_mqfs.options import OptionError, Options

MOST_BYTES = 192 << 20  # of one task by default; an eighth of it had a third of the speed
LEAST_BYTES = 32 << 20  # a task costs tens of milliseconds
TASKS = 100_000  # of one batch


@attrs.frozen
class Range:
    """[low, high) of the log of a group, narrowed to streams, each with its own range."""

    group: str
    low: int
    high: int
    streams: Mapping[str, tuple[int, int]]
    whole: bool  # these are all streams of the group
    bucket: int = 0  # number of the group
    numbers: Mapping[str, tuple[int, int]] = {}  # by stream: (number, floor), where segments can be read
    messages: int = 0
    size: int = 0  # bytes in the log, approximately

    def part(self, low: int, high: int, messages: int, size: int) -> Range:
        return attrs.evolve(self, low=low, high=high, messages=messages, size=size)

    def bounds(self) -> Mapping[str, tuple[int, int]] | None:
        """The wanted range by stream; None: everything."""
        if self.whole and all(low <= self.low and high >= self.high for low, high in self.streams.values()):
            return None
        return self.streams


@attrs.frozen
class Slice(InputPartition):
    """The input of one task."""

    ranges: tuple[Range, ...]
    store: str  # its uuid

    @property
    def value(self) -> str:
        return ", ".join(f"{one.group or '/'} {one.low}..{one.high}" for one in self.ranges)


def ranges(survey: ServerCatalog, start: Mapping[str, int], end: Mapping[str, int]) -> list[Range]:
    """The ranges between two positions, by group. A stream missing in `start` is read from its oldest message."""
    found = []
    for path, group in survey.groups.items():
        stood = [start[key] for name in group.streams if (key := path_of(path, name)) in start]
        low = min(stood, default=0)
        streams = {}
        for name in group.streams:
            key = path_of(path, name)
            begin, stop = start.get(key, group.streams[name].oldest or low), end.get(key, 0)
            if begin < stop:
                streams[name] = (begin, stop)
        if streams:
            whole = group.whole and len(streams) == len(group.streams)
            low, high = min(b for b, _ in streams.values()), max(e for _, e in streams.values())
            numbers = {n: (group.streams[n].number, group.streams[n].floor) for n in streams} if group.plain else {}
            found.append(Range(path, low, high, streams, whole, group.number, numbers))
    return found


@attrs.frozen
class Shares:
    """The limits of one task."""

    partitions: int  # at least, given enough messages
    messages: int  # at most
    size: int  # of bytes in the log, approximately at most; 0: by the total

    @classmethod
    def of(cls, options: Options) -> Shares:
        partitions = options.number("minPartitions", 0) or 0
        if partitions > TASKS:
            raise OptionError(f"option minPartitions: invalid value {str(partitions)!r} (expected at most {TASKS})")
        messages = options.number("maxRecordsPerPartition", 0) or 0
        return cls(partitions, messages, options.size("maxBytesPerPartition", 0) or 0)

    def slices(self, client: Client, wanted: Iterable[Range], store: str) -> list[Slice]:
        """The ranges, split and packed into slices; deterministic for an unchanged log."""
        wanted = list(wanted)
        sizes = {one.group: _weighed(client, one) for one in wanted}
        total = sum(size for _, size in sizes.values())
        most = self.size or _even(total)
        messages = self.messages or (1 << 62)
        if self.partitions:
            most = min(most, max(1, -(-total // self.partitions)))
            count = sum(count for count, _ in sizes.values())
            messages = min(messages, max(1, -(-count // self.partitions)))
        pieces = [piece for one in wanted for piece in _cut(client, one, sizes[one.group], messages, most)]
        return _packed(pieces, messages, most, self.partitions, store)


def _even(total: int) -> int:
    """Bytes of one task: equal work for all processors of this machine."""
    cores = max(os.cpu_count() or 1, 1)
    tasks = -(-total // MOST_BYTES)
    tasks = -(-tasks // cores) * cores
    return max(LEAST_BYTES, -(-total // max(tasks, 1)))


def _weighed(client: Client, one: Range) -> tuple[int, int]:
    found = measure(client, one.group, one.streams, str(one.low), one.high, "0")
    return sum(f.messages for f in found), sum(f.size for f in found)


def _cut(client: Client, one: Range, whole: tuple[int, int], messages: int, size: int) -> list[Range]:
    count, weight = whole
    if count <= messages and weight <= size * 5 // 4:
        return [one.part(one.low, one.high, count, weight)]
    step = max(size, 1)
    parts = max(-(-weight // step), 1)
    if messages < 1 << 62:
        parts = max(parts, -(-count // messages))
        found = measure(client, one.group, one.streams, str(one.low), one.high, str(max(1, -(-count // parts))))
    else:
        each = max(1, -(-weight // parts))
        found = measure(client, one.group, one.streams, str(one.low), one.high, f"{each}B")
        found = _rejoined(found, each, parts)
    if not found:
        return [one]
    cuts = [f.end for f in found[:-1]]
    borders = zip([one.low, *cuts], [*cuts, one.high], found, strict=True)
    return [one.part(low, high, f.messages, f.size) for low, high, f in borders]


def _rejoined(found: list[Split], size: int, parts: int) -> list[Split]:
    """Merge small splits. A server may split at the end of its answer, and splits are not quite full, which leaves a
    small rest: as a task of its own it would keep the other processors waiting."""
    joined: list[Split] = []
    for one in found:
        rest = len(joined) == parts and one.size <= size // 4
        if joined and (rest or joined[-1].size + one.size <= size + size // 16):
            last = joined.pop()
            one = Split(one.end, last.messages + one.messages, last.size + one.size)
        joined.append(one)
    return joined


def _packed(pieces: list[Range], messages: int, size: int, partitions: int, store: str) -> list[Slice]:
    """Pack small pieces into slices, in order."""
    slices: list[list[Range]] = []
    count = weight = 0
    spare = max(len(pieces) - partitions, 0)  # pieces that may be joined to another
    for piece in pieces:
        fits = slices and count + piece.messages <= messages and weight + piece.size <= size
        if fits and (spare or not partitions):
            slices[-1].append(piece)
            count, weight, spare = count + piece.messages, weight + piece.size, max(spare - 1, 0)
        else:
            slices.append([piece])
            count, weight = piece.messages, piece.size
    return [Slice(tuple(some), store) for some in slices]


def waiting(client: Client, wanted: Iterable[Range]) -> int:
    """The number of messages in the ranges."""
    return sum(_weighed(client, one)[0] for one in wanted)


def limited(
    client: Client,
    survey: ServerCatalog,
    start: Mapping[str, int],
    end: dict[str, int],
    messages: int | None,
    size: int | None,
) -> dict[str, int]:
    """`end`, reduced to the limits, of which each group gets its share; never below `start`."""
    if messages is None and size is None:
        return end
    wanted = ranges(survey, start, end)
    weights = [_weighed(client, one) for one in wanted]
    shares = _shares([count for count, _ in weights], messages)
    size_shares = _shares([weight for _, weight in weights], size)
    for one, (count, weight), most, most_size in zip(wanted, weights, shares, size_shares, strict=True):
        high = one.high
        if most is not None and count > most:
            high = min(high, _first_cut(client, one, str(most)) if most else one.low)
        if most_size is not None and weight > most_size:
            high = min(high, _first_cut(client, one, f"{most_size}B") if most_size else one.low)
        for name, (begin, stop) in one.streams.items():
            end[path_of(one.group, name)] = max(begin, min(stop, high))
        _draw_back(survey.groups[one.group], start, end, high)
    return end


def _draw_back(group: Group, start: Mapping[str, int], end: dict[str, int], high: int) -> None:
    """Limit the other streams of the group to the same end."""
    for name in group.streams:
        key = path_of(group.path, name)
        if key in end:
            end[key] = max(start.get(key, 0), min(end[key], high))


def _first_cut(client: Client, one: Range, step: str) -> int:
    """The end of the first split of that size."""
    found = measure(client, one.group, one.streams, str(one.low), one.high, step)
    return found[0].end if found else one.high


def _shares(wanted: list[int], most: int | None) -> list[int | None]:
    """Shares of `most` in proportion; the remainder goes to the first below their demand."""
    total = sum(wanted)
    if most is None or total <= most:
        return [None] * len(wanted)
    given = [most * one // total for one in wanted]
    left = most - sum(given)
    for n, one in enumerate(wanted):
        more = min(left, max(one - given[n], 0), 1 if left < len(wanted) else left)
        given[n], left = given[n] + more, left - more
    return list(given)


__all__ = ["Range", "Shares", "Slice", "limited", "ranges", "split", "waiting"]
