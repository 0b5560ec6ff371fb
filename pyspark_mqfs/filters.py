"""Filters pushed down to a batch read: by stream, by sequence, by time.

They narrow the positions of a batch. Spark applies the filters that are not fully handled here.
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

from mqfs.ninep.client.connection import Client
from pyspark_mqfs.catalog import ServerCatalog
from pyspark_mqfs.positions import at_time

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NEVER_NULL = ("value", "topic", "partition", "offset", "timestamp", "timestampType")


class PushedFilters:
    """The pushed filters of a batch."""

    def __init__(self) -> None:
        self._paths: list[Callable[[str], bool]] = []
        self._low, self._high = 0, 1 << 63
        self._from_ns: int | None = None
        self._below_ns: int | None = None

    def add(self, pushed: Filter) -> bool:
        """Add a filter. Return whether it is fully handled, so that Spark need not apply it."""
        column = ".".join(getattr(pushed, "attribute", ()))  # absent in Not
        if isinstance(pushed, IsNotNull):
            return column in _NEVER_NULL
        if column == "topic":
            return self._by_path(pushed)
        if column == "offset":
            return self._by_sequence(pushed)
        if column == "timestamp":
            self._by_time(pushed)
        return False

    def _by_path(self, pushed: Filter) -> bool:
        if isinstance(pushed, EqualTo):
            self._paths.append(lambda path, value=pushed.value: path == value)  # type: ignore[misc]
        elif isinstance(pushed, In):
            self._paths.append(lambda path, values=frozenset(pushed.value): path in values)  # type: ignore[misc]
        elif isinstance(pushed, StringStartsWith):
            self._paths.append(lambda path, value=pushed.value: path.startswith(value))  # type: ignore[misc]
        else:
            return False
        return True

    def _by_sequence(self, pushed: Filter) -> bool:
        value: Any = getattr(pushed, "value", None)
        if isinstance(pushed, EqualTo):
            self._between(value, value + 1)
        elif isinstance(pushed, GreaterThan):
            self._between(value + 1, self._high)
        elif isinstance(pushed, GreaterThanOrEqual):
            self._between(value, self._high)
        elif isinstance(pushed, LessThan):
            self._between(self._low, value)
        elif isinstance(pushed, LessThanOrEqual):
            self._between(self._low, value + 1)
        else:
            return False
        return True

    def _between(self, low: int, high: int) -> None:
        self._low, self._high = max(self._low, low), min(self._high, high)

    def _by_time(self, pushed: Filter) -> None:
        """Narrow the times, without handling the filter fully: the column has microseconds, the log nanoseconds."""
        value: Any = getattr(pushed, "value", None)
        if not isinstance(value, datetime.datetime):
            return
        aware = value.astimezone(datetime.UTC) if value.tzinfo is None else value
        micros = (aware - _EPOCH) // datetime.timedelta(microseconds=1)
        if isinstance(pushed, (GreaterThan, GreaterThanOrEqual, EqualTo)):
            self._from_ns = max(self._from_ns or 0, micros * 1_000)
        if isinstance(pushed, (LessThan, LessThanOrEqual, EqualTo)):
            below = (micros + 1) * 1_000
            self._below_ns = below if self._below_ns is None else min(self._below_ns, below)

    def apply(self, client: Client, catalog: ServerCatalog, start: dict[str, int], end: dict[str, int]) -> None:
        """Narrow the positions in place; an excluded stream gets an empty range."""
        times = {group.path: self._times(client, group) for group in catalog.groups.values()}
        for path, group, _ in list(catalog.streams()):
            low, high = times[group.path]
            start[path] = max(start[path], self._low, low)
            end[path] = max(start[path], min(end[path], self._high, high))
            if not all(wants(path) for wants in self._paths):
                end[path] = start[path]

    def _times(self, client: Client, group: Any) -> tuple[int, int]:
        low, high = 0, group.next
        if self._from_ns is not None:
            sequence = at_time(client, group, self._from_ns)
            low = group.next if sequence is None else sequence
        if self._below_ns is not None:
            sequence = at_time(client, group, self._below_ns)
            high = group.next if sequence is None else sequence
        return low, high
