"""The first and last position of a query, given by the options of offsets and times.

A position is the next sequence to read, so an end is exclusive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import attrs

from mqfs.ninep.client.connection import Client
from pyspark_mqfs.catalog import ANY, Group, ServerCatalog, Stream, measure
from pyspark_mqfs.options import OptionError, Options, invalid

EARLIEST, LATEST = -2, -1
STRATEGIES = ("error", "latest")
MOST_MS = 10**18  # beyond any clock


@attrs.frozen
class Bound:
    """The start or the end of a read: by stream a sequence, EARLIEST or LATEST; or milliseconds since 1970."""

    option: str
    default: int  # for streams that are not in `by_stream`
    by_stream: Mapping[str, int]
    timed: bool
    strict: bool = False  # whether it is an error if no message is at or after the time
    starts: bool = False

    @classmethod
    def starting(cls, options: Options, default: int) -> Bound:
        option = options.one_of("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
        strategy = options.text("startingOffsetsByTimestampStrategy", "error").lower()
        if strategy not in STRATEGIES:
            raise invalid("startingOffsetsByTimestampStrategy", strategy, " or ".join(STRATEGIES))
        return attrs.evolve(cls._of(options, option, default, strict=strategy == "error"), starts=True)

    @classmethod
    def ending(cls, options: Options) -> Bound:
        option = options.one_of("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
        bound = cls._of(options, option, LATEST, strict=False)
        if bound.default == EARLIEST or EARLIEST in bound.by_stream.values():
            raise invalid(str(option), options.text(str(option)), "latest or sequences")
        return bound

    @classmethod
    def _of(cls, options: Options, option: str | None, default: int, *, strict: bool) -> Bound:
        if option is None:
            return cls("", default, {}, False)
        timed, text = "Timestamp" in option, options.text(option).strip()
        if option.endswith("Timestamp") and "By" not in option:
            return cls(option, _time(option, text), {}, True, strict)
        words = {"earliest": EARLIEST, "latest": LATEST}
        if not timed and text.lower() in words:
            return cls(option, words[text.lower()], {}, False)
        expected = (
            '{"jobs/mail": 1700000000000}' if timed else 'earliest, latest or {"jobs/mail": 23, "jobs/print": -2}'
        )
        by_stream = {
            key.strip("/"): _number(option, text, value, expected) for key, value in _object(option, text, expected)
        }
        if timed and not all(0 <= value < MOST_MS for value in by_stream.values()):
            raise invalid(option, text, expected)
        return cls(option, default, by_stream, timed, strict)

    def may_move(self, paths: Iterable[str]) -> bool:
        """Whether the same options may give another position later, for one of these streams."""
        if self.timed and not self.strict:
            return True
        return any(self.by_stream.get(path, self.default) == LATEST for path in paths)

    def positions(self, client: Client, catalog: ServerCatalog) -> dict[str, int]:
        """Return the position of each stream of the catalog. Raises OptionError."""
        known = {path for path, _, _ in catalog.streams()}
        for path in self.by_stream:
            if path not in known:
                raise OptionError(f"option {self.option}: unknown stream {path!r} (expected a stream of the query)")
        positions, times = {}, dict[tuple[str, int], int]()  # one look-up for each group and time
        for path, group, stream in catalog.streams():
            value = self.by_stream.get(path, self.default)
            if self.timed and (path in self.by_stream or not self.by_stream):
                if (group.path, value) not in times:
                    times[group.path, value] = self._at_time(client, group, value)
                positions[path] = times[group.path, value]
                if self.starts:  # not before the oldest retained message: older ones were not requested by sequence
                    positions[path] = max(positions[path], position_of(EARLIEST, group, stream))
            else:
                positions[path] = position_of(value, group, stream)
        return positions

    def _at_time(self, client: Client, group: Group, ms: int) -> int:
        first = at_time(client, group, ms * 1_000_000)
        if first is None and self.strict:
            raise OptionError(
                f"option {self.option}: group {group.path or '/'} has no message at or after {ms} ms"
                " (expected an earlier time, or option startingOffsetsByTimestampStrategy latest)"
            )
        return group.next if first is None else first


def position_of(value: int, group: Group, stream: Stream) -> int:
    """Return the position of a sequence, EARLIEST or LATEST."""
    if value == EARLIEST:
        return stream.first or max(stream.floor, 0) or group.next
    if value == LATEST:
        return group.next
    return value


def at_time(client: Client, group: Group, time_ns: int) -> int | None:
    """Return the sequence of the first message of the group at or after a time; None if there is none."""
    time_ns = max(time_ns, 0)
    word = f"@{time_ns // 10**9}.{time_ns % 10**9:09d}"
    splits = measure(client, group.path, (), word, ANY, "1")
    return splits[0].end - 1 if splits else None


def _object(name: str, text: str, expected: str) -> list[tuple[str, object]]:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if not isinstance(read, dict) or not read:
        raise invalid(name, text, expected)
    return list(read.items())


def _number(name: str, text: str, value: object, expected: str) -> int:
    """Return a number, given also as {"0": number}, Kafka's form for the only partition."""
    if isinstance(value, dict) and list(value) == ["0"]:
        value = value["0"]
    if isinstance(value, bool) or not isinstance(value, int) or value < EARLIEST:
        raise invalid(name, text, expected)
    return value


def _time(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise invalid(name, text, "milliseconds since 1970, as 1700000000000")
    return int(text)
