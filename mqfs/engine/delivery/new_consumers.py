"""New consumers: the change of a group that makes one, and where in the log it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from mqfs.engine.delivery.catalog import Group, Stream
from mqfs.engine.delivery.priority_index import PriorityIndex
from mqfs.engine.language.permissions import bits_for_writers
from mqfs.group_state import Change
from mqfs.model import User


class PlanningGroup(Group, Protocol):
    """The group."""

    @property
    def ranks(self) -> PriorityIndex: ...


def streams_over(group: Group, *overs: str) -> list[Stream]:
    """Those that consumers over streams, views or the whole group ("") cover."""
    named = {group.streams[over]: None for over in overs if over in group.streams}
    if len(named) == len(overs):
        return list(named)
    views = group.views.keys() & set(overs)
    streams = [stream for stream in group.streams.values() if stream.name != group.log.settings.dead]
    if len(named) + len(views) == len(overs):
        streams = [stream for stream in streams if not views.isdisjoint(group.views.of(stream))]
    return list(dict.fromkeys([*named, *streams]))


def plan(
    group: PlanningGroup,
    number: int,
    name: str,
    over: str,
    user: User,
    mode: int,
    replay: str,
    streams: Sequence[Stream],
) -> Change:
    """The change that makes one; `streams`: those it will cover. The caller has checked that there is room."""
    return {
        "do": "consumer", "number": number, "name": name, "over": over, "transient": False, "private": False,
        "backlog": 0, "mode": mode & bits_for_writers(group.log.state.mode), "uid": user.uid, "gid": user.gid,
        "time": group.clock.wall_ns(), "low": beginning(group, replay, streams), "open": unclaimed(group, streams),
    }  # fmt: skip


def beginning(group: Group, replay: str, streams: Iterable[Stream]) -> int:
    """Where `replay` lets a reader begin."""
    if replay == "off":
        return group.log.end.next
    group.retention.advance_all()
    if replay == "all":
        return group.log.reader.first
    return max((stream.kept.newest_kept() for stream in streams), default=0) or group.log.end.next


def unclaimed(group: PlanningGroup, streams: Iterable[Stream]) -> list[int]:
    """Exclusive messages that were not claimed: a new consumer may claim them, wherever it begins."""
    numbers = group.ranks.streams_with_exclusives()
    mine = [stream for stream in streams if stream.number in numbers] if numbers else []
    return sorted(sequence for stream in mine for sequence in stream.exclusives.all_unclaimed())
