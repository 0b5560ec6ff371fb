"""Rows of `mq ls` and `mq top`: the groups, streams, views and consumers of a group, made from `.stats`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from mq_tools.errors import ToolError
from mq_tools.files import stats_of
from mq_tools.tree import subgroups, views_of


@attrs.frozen
class Row:
    """A group, stream, view or consumer."""

    name: str
    kind: str
    waiting: int | None = None  # messages retained, or not acknowledged yet
    claimed: int | None = None
    delayed: int | None = None
    readers: int | None = None
    written: int | None = None  # since the server started
    taken: int | None = None
    failed: int | None = None
    dead: int | None = None
    dropped: int | None = None
    first: int | None = None  # the first retained sequence, where the server does not report `oldest`
    oldest: float | None = None  # when the oldest waiting message was written, UNIX seconds
    over: str = ""  # the source of a view or consumer
    held_back: str | None = None  # the rule that makes the messages of a consumer wait


def rows_of(group: str) -> list[Row]:
    """Return a row for each group, stream, view and consumer in a group. Raises ToolError."""
    stats, views = stats_of(group), views_of(group)
    rows = [_group(group, name) for name in sorted(subgroups(group))]
    rows += streams_of(stats)
    rows += [
        Row(name, "view", readers=row.get("readers"), over=" ".join(views.get(name, [])))
        for name, row in (stats.get("views") or {}).items()
    ]
    return rows + consumers_of(stats)


def _group(group: str, name: str) -> Row:
    try:
        return group_row(f"{name}/", stats_of(os.path.join(group, name)))
    except ToolError:
        return Row(f"{name}/", "group")


def group_row(name: str, stats: Mapping[str, Any]) -> Row:
    """Return a group as one row: the sums of its streams, for deliveries also of its consumers."""
    streams = streams_of(stats)
    receivers = [*streams, *consumers_of(stats)]
    return Row(
        name,
        "group",
        waiting=_sum([row.waiting for row in streams]),
        claimed=_sum([row.claimed for row in receivers]),
        delayed=_sum([row.delayed for row in receivers]) + int(stats.get("held", 0)),
        readers=_sum([row.readers for row in receivers]),
        written=stats.get("written", 0),
        taken=stats.get("read"),
        failed=_sum([row.failed for row in receivers]),
        dead=_sum([row.dead for row in receivers]),
        dropped=drops(stats),
        first=min([row.first for row in streams if row.first], default=None),
    )


def _sum(values: list[int | None]) -> int:
    return sum(value or 0 for value in values)


def drops(stats: Mapping[str, Any]) -> int:
    """Return the number of messages dropped unread since the server started."""
    return int(stats.get("discarded", 0)) + int(stats.get("cut", 0))


def streams_of(stats: Mapping[str, Any]) -> list[Row]:
    return [_stream(name, row) for name, row in stats.get("streams", {}).items()]


def _stream(name: str, row: Mapping[str, Any]) -> Row:
    shared: Mapping[str, Any] = row.get("consumer") or {}
    return Row(
        name,
        "stream",
        waiting=shared.get("waiting", row.get("messages")),
        readers=row.get("readers", 0) + shared.get("handles", 0),
        written=row.get("written"),
        first=row.get("first"),
        **_deliveries(shared),
    )


def _deliveries(consumer: Mapping[str, Any]) -> dict[str, Any]:
    names = ("claimed", "delayed", "failed", "dead", "oldest")
    return {"taken": consumer.get("acknowledged"), **{name: consumer.get(name) for name in names}}


def consumers_of(stats: Mapping[str, Any]) -> list[Row]:
    consumers: Mapping[str, Mapping[str, Any]] = stats.get("consumers") or {}
    return [
        Row(
            f".consumers/{name}",
            "consumer",
            waiting=row.get("waiting"),
            readers=row.get("handles"),
            over=row.get("over") or "",
            held_back=row.get("held_back"),
            **_deliveries(row),
        )
        for name, row in sorted(consumers.items())
    ]
