"""Read the ACK records of a log directly from its files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mqfs.model import Kind
from mqfs.records.record import padded, row_at
from mqfs.state.acks import Op

_STEP = struct.Struct("<BxxxIQQq")


class Step(NamedTuple):
    """One step of a consumer, for the message `last`."""

    consumer: int
    op: Op
    last: int


def ack_steps(bucket: Path) -> Iterator[Step]:
    """Yield the steps in all present segments, in order."""
    for log in sorted(bucket.glob("*.log")):
        data, at = log.read_bytes(), 0
        while (row := row_at(data, at)) is not None:
            if row.kind == Kind.ACK:
                for op, _, _, last, _ in _STEP.iter_unpack(data[at + row.size - row.body : at + row.size]):
                    yield Step(row.stream, Op(op), last)
            at += padded(row.size)
