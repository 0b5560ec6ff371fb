"""Filters pushed down to a batch read: by stream, by sequence, by time.

Owns their effect on the positions of a batch. Spark applies the filters that are not fully handled here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from mqfs.ninep.blocking import Client
from pyspark_mqfs.catalog import ServerCatalog
from pyspark_mqfs.positions import at_time

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NEVER_NULL = ("value", "topic", "partition", "offset", "timestamp", "timestampType")


class Narrowed:
    """The pushed filters of a batch."""

    def __init__(self) -> None:
        self._paths: list[Callable[[str], bool]] = []
        self._low, self._high = 0, 1 << 63
        self._from_ns: int | None = None
        self._below_ns: int | None = None

    def take(self, one: Filter) -> bool:
        """Add a filter. True if it is fully handled, so that Spark need not apply it."""
        column = ".".join(getattr(one, "attribute", ()))  # absent in Not
        if isinstance(one, IsNotNull):
            return column in _NEVER_NULL
        if column == "topic":
            return self._by_path(one)
        if column == "offset":
            return self._by_sequence(one)
        if column == "timestamp":
            self._by_time(one)
        return False

    def _by_path(self, one: Filter) -> bool:
        if isinstance(one, EqualTo):
            self._paths.append(lambda path, value=one.value: path == value)  # type: ignore[misc]
        elif isinstance(one, In):
            self._paths.append(lambda path, values=frozenset(one.value): path in values)  # type: ignore[misc]
        elif isinstance(one, StringStartsWith):
            self._paths.append(lambda path, value=one.value: path.startswith(value))  # type: ignore[misc]
        else:
            return False
        return True

    def _by_sequence(self, one: Filter) -> bool:
        value: Any = getattr(one, "value", None)
        if isinstance(one, EqualTo):
            self._between(value, value + 1)
        elif isinstance(one, GreaterThan):
            self._between(value + 1, self._high)
        elif isinstance(one, GreaterThanOrEqual):
            self._between(value, self._high)
        elif isinstance(one, LessThan):
            self._between(self._low, value)
        elif isinstance(one, LessThanOrEqual):
            self._between(self._low, value + 1)
        else:
            return False
        return True

    def _between(self, low: int, high: int) -> None:
        self._low, self._high = max(self._low, low), min(self._high, high)

    def _by_time(self, one: Filter) -> None:
        """Narrow only: the column has microseconds, the log nanoseconds."""
        value: Any = getattr(one, "value", None)
        if not isinstance(value, datetime.datetime):
            return
        aware = value.astimezone(datetime.UTC) if value.tzinfo is None else value
        micros = (aware - _EPOCH) // datetime.timedelta(microseconds=1)
        if isinstance(one, (GreaterThan, GreaterThanOrEqual, EqualTo)):
            self._from_ns = max(self._from_ns or 0, micros * 1_000)
        if isinstance(one, (LessThan, LessThanOrEqual, EqualTo)):
            below = (micros + 1) * 1_000
            self._below_ns = below if self._below_ns is None else min(self._below_ns, below)

    def apply(self, client: Client, survey: ServerCatalog, start: dict[str, int], end: dict[str, int]) -> None:
        """Narrow the positions in place; an excluded stream gets an empty range."""
        times = {group.path: self._times(client, group) for group in survey.groups.values()}
        for path, group, _ in list(survey.streams()):
            low, high = times[group.path]
            start[path] = max(start[path], self._low, low)
            end[path] = max(start[path], min(end[path], self._high, high))
            if not all(wants(path) for wants in self._paths):
                end[path] = start[path]

    def _times(self, client: Client, group: Any) -> tuple[int, int]:
        low, high = 0, group.next
        if self._from_ns is not None:
            found = at_time(client, group, self._from_ns)
            low = group.next if found is None else found
        if self._below_ns is not None:
            found = at_time(client, group, self._below_ns)
            high = group.next if found is None else found
        return low, high


__all__ = ["Narrowed"]
