"""A group and its streams, as delivery needs them: Protocols that Group and Stream are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mqfs import errors
from mqfs.clock import Clock
from mqfs.engine.core.log import GroupLog
from mqfs.engine.delivery.exclusive_messages import ExclusiveMessages
from mqfs.engine.retention.retained import KeptRange
from mqfs.engine.retention.retention import Retention
from mqfs.engine.routing.filter import WithViews
from mqfs.engine.routing.views import NamedStream
from mqfs.model import Record
from mqfs.state.group import StreamState


class Stream(NamedStream, Protocol):
    """A stream: its number and name, and what it keeps."""

    state: StreamState
    kept: KeptRange
    exclusives: ExclusiveMessages


class Group(WithViews, Protocol):
    """A group: its streams, its log, and what is kept of that."""

    clock: Clock
    log: GroupLog

    @property
    def retention(self) -> Retention: ...

    @property
    def streams(self) -> Mapping[str, Stream]: ...

    @property
    def numbers(self) -> Mapping[int, Stream]: ...


def visible_record(group: Group, sequence: int) -> Record | None:
    """The message of that sequence; None where it is damaged, expired, evicted, dropped, or its stream was removed."""
    try:
        record = group.log.reader.scan(sequence)
    except errors.Damaged:
        return None
    if record is None or record.sequence != sequence:
        return None
    stream = group.numbers.get(record.stream)
    return record if stream is not None and stream.kept.visible(record) else None
