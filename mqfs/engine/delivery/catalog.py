"""A group and its streams, as delivery needs them: Protocols that Group and Stream are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.model import Record

if TYPE_CHECKING:
    from mqfs.engine.group import Group


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
