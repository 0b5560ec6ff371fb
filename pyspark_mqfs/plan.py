"""The messages of a batch and their distribution over tasks: positions, ranges, slices.

A position is the next sequence to read. The streams of a group move together: a group is one log,
and a task reads ranges of it. The only request to the server is `measure` of a cursor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import attrs
from pyspark.sql.datasource import InputPartition

from mqfs.ninep.client.connection import Client
from pyspark_mqfs.catalog import Group, ServerCatalog, Split, measure, path_of
from pyspark_mqfs.options import OptionError, Options

MOST_BYTES = 192 << 20  # of one task by default; with an eighth of it the speed was a third
LEAST_BYTES = 32 << 20  # a task costs tens of milliseconds
TASKS = 100_000  # of one batch


@attrs.frozen
class Range:
    """[low, high) of the log of a group, narrowed to streams, each with its own range."""

    group: str
    low: int
    high: int
    streams: Mapping[str, tuple[int, int]]
    is_whole: bool  # whether these are all streams of the group
    bucket: int  # number of the group
    numbers: Mapping[str, tuple[int, int]]  # by stream: (number, floor)
    plain: bool  # whether segments can be read
    messages: int = 0
    size: int = 0  # bytes in the log, approximately

    def subrange(self, low: int, high: int, messages: int, size: int) -> Range:
        return attrs.evolve(self, low=low, high=high, messages=messages, size=size)

    def bounds(self) -> Mapping[str, tuple[int, int]] | None:
        """Return the wanted range by stream; None: everything in [low, high)."""
        if self.is_whole and all(low <= self.low and high >= self.high for low, high in self.streams.values()):
            return None
        return self.streams


@attrs.frozen
class Slice(InputPartition):
    """The input of one task."""

    ranges: tuple[Range, ...]
    store: str  # its uuid

    @property
    def value(self) -> str:
        return ", ".join(f"{item.group or '/'} {item.low}..{item.high}" for item in self.ranges)


def ranges(catalog: ServerCatalog, start: Mapping[str, int], end: Mapping[str, int]) -> list[Range]:
    """Return the ranges between two positions, by group. A stream missing in `start` is read from its oldest
    message."""
    result = []
    for path, group in catalog.groups.items():
        starts = [start[key] for name in group.streams if (key := path_of(path, name)) in start]
        low = min(starts, default=0)
        streams = {}
        for name in group.streams:
            key = path_of(path, name)
            begin, stop = start.get(key, group.streams[name].oldest or low), end.get(key, 0)
            if begin < stop:
                streams[name] = (begin, stop)
        if streams:
            is_whole = group.is_whole and len(streams) == len(group.streams)
            low, high = min(b for b, _ in streams.values()), max(e for _, e in streams.values())
            numbers = {name: (group.streams[name].number, group.streams[name].floor) for name in streams}
            result.append(Range(path, low, high, streams, is_whole, group.number, numbers, group.plain))
    return result


@attrs.frozen
class PartitionLimits:
    """The limits of one task."""

    partitions: int  # the least number of tasks, given enough messages
    messages: int  # at most
    size: int  # bytes in the log, approximately at most; 0: computed from the total
    cores: int = attrs.field(factory=lambda: os.cpu_count() or 1)  # for a size computed from the total

    @classmethod
    def of(cls, options: Options) -> PartitionLimits:
        partitions = options.number("minPartitions", 0) or 0
        if partitions > TASKS:
            raise OptionError(f"option minPartitions: invalid value {str(partitions)!r} (expected at most {TASKS})")
        messages = options.number("maxRecordsPerPartition", 0) or 0
        return cls(partitions, messages, options.size("maxBytesPerPartition", 0) or 0)

    def slices(self, client: Client, wanted: Iterable[Range], store: str) -> list[Slice]:
        """Split the ranges, and pack them into slices; the result is the same for an unchanged log."""
        wanted = list(wanted)
        sizes = {item.group: _measure(client, item) for item in wanted}
        total = sum(size for _, size in sizes.values())
        most = self.size or _default_task_bytes(total, self.cores)
        messages = self.messages or (1 << 62)
        if self.partitions:
            most = min(most, max(1, -(-total // self.partitions)))
            count = sum(count for count, _ in sizes.values())
            messages = min(messages, max(1, -(-count // self.partitions)))
        pieces = [piece for item in wanted for piece in _split(client, item, sizes[item.group], messages, most)]
        return _pack(pieces, messages, most, self.partitions, store)


def _default_task_bytes(total: int, cores: int) -> int:
    """Return the bytes of one task that give all processors of a machine equal work."""
    tasks = -(-total // MOST_BYTES)
    tasks = -(-tasks // cores) * cores
    return max(LEAST_BYTES, -(-total // max(tasks, 1)))


def _measure(client: Client, item: Range) -> tuple[int, int]:
    splits = measure(client, item.group, item.streams, str(item.low), item.high, "0")
    return sum(f.messages for f in splits), sum(f.size for f in splits)


def _split(client: Client, item: Range, total: tuple[int, int], messages: int, size: int) -> list[Range]:
    count, weight = total
    if count <= messages and weight <= size * 5 // 4:
        return [item.subrange(item.low, item.high, count, weight)]
    step = max(size, 1)
    parts = max(-(-weight // step), 1)
    if messages < 1 << 62:
        parts = max(parts, -(-count // messages))
        splits = measure(client, item.group, item.streams, str(item.low), item.high, str(max(1, -(-count // parts))))
    else:
        each = max(1, -(-weight // parts))
        splits = measure(client, item.group, item.streams, str(item.low), item.high, f"{each}B")
        splits = _merge_small(splits, each, parts)
    if not splits:
        return [item]
    cuts = [f.end for f in splits[:-1]]
    borders = zip([item.low, *cuts], [*cuts, item.high], splits, strict=True)
    return [item.subrange(low, high, f.messages, f.size) for low, high, f in borders]


def _merge_small(splits: list[Split], size: int, parts: int) -> list[Split]:
    """Merge small splits. A server may split at the end of its answer, and splits are not quite full, so that a small
    rest remains: as a task of its own it would keep the other processors waiting."""
    joined: list[Split] = []
    for item in splits:
        rest = len(joined) == parts and item.size <= size // 4
        if joined and (rest or joined[-1].size + item.size <= size + size // 16):
            last = joined.pop()
            item = Split(item.end, last.messages + item.messages, last.size + item.size)
        joined.append(item)
    return joined


def _pack(pieces: list[Range], messages: int, size: int, partitions: int, store: str) -> list[Slice]:
    """Pack small pieces into slices, in order."""
    slices: list[list[Range]] = []
    count = weight = 0
    spare = max(len(pieces) - partitions, 0)  # pieces that may be joined to others
    for piece in pieces:
        fits = slices and count + piece.messages <= messages and weight + piece.size <= size
        if fits and (spare or not partitions):
            slices[-1].append(piece)
            count, weight, spare = count + piece.messages, weight + piece.size, max(spare - 1, 0)
        else:
            slices.append([piece])
            count, weight = piece.messages, piece.size
    return [Slice(tuple(packed), store) for packed in slices]


def count_messages(client: Client, wanted: Iterable[Range]) -> int:
    """Return the number of messages in the ranges."""
    return sum(_measure(client, item)[0] for item in wanted)


def limit_end(
    client: Client,
    catalog: ServerCatalog,
    start: Mapping[str, int],
    end: dict[str, int],
    messages: int | None,
    size: int | None,
    turn: int,
) -> dict[str, int]:
    """Return `end`, reduced to the limits and never below `start`; each group gets a share of the limits. `turn`:
    another number for each batch, so that all groups are served, however few messages a batch may have."""
    if messages is None and size is None:
        return end
    wanted = ranges(catalog, start, end)
    weights = [_measure(client, item) for item in wanted]
    shares = _shares([count for count, _ in weights], messages, turn)
    size_shares = _shares([weight for _, weight in weights], size, turn)
    for item, (count, weight), most, most_size in zip(wanted, weights, shares, size_shares, strict=True):
        high = item.high
        if most is not None and count > most:
            high = min(high, _first_cut(client, item, str(most)) if most else item.low)
        if most_size is not None and weight > most_size:
            high = min(high, _first_cut(client, item, f"{most_size}B") if most_size else item.low)
        for name, (begin, stop) in item.streams.items():
            end[path_of(item.group, name)] = max(begin, min(stop, high))
        _limit_group(catalog.groups[item.group], start, end, high)
    return end


def _limit_group(group: Group, start: Mapping[str, int], end: dict[str, int], high: int) -> None:
    """Limit the other streams of the group to the same end."""
    for name in group.streams:
        key = path_of(group.path, name)
        if key in end:
            end[key] = max(start.get(key, 0), min(end[key], high))


def _first_cut(client: Client, item: Range, step: str) -> int:
    """Return the end of the first split of that size."""
    splits = measure(client, item.group, item.streams, str(item.low), item.high, step, first=True)
    return splits[0].end if splits else item.high


def _shares(wanted: list[int], most: int | None, turn: int) -> list[int | None]:
    """Divide `most` into shares. Each entry that wants any gets 1, so that a small one need not wait for large ones;
    the rest is in proportion. The remainder, and a bound too small for all, go to other entries with each `turn`."""
    total = sum(wanted)
    if most is None or total <= most:
        return [None] * len(wanted)
    order = [number for number, item in enumerate(wanted) if item]
    order = order[turn % len(order) :] + order[: turn % len(order)]
    shares = [0] * len(wanted)
    for number in order[:most]:
        shares[number] = 1
    spare, rest = most - sum(shares), max(total - len(order), 1)
    for number in order:
        shares[number] += spare * (wanted[number] - 1) // rest
    left = most - sum(shares)
    for number in [number for number in order if 0 < shares[number] < wanted[number]][:left]:
        shares[number] += 1
    return list(shares)
