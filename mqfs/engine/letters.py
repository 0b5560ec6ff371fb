"""Dead letters: messages that could not be dealt with, put aside in a stream of their group, and sent back from there.

Owns what a dead letter looks like. When a message becomes one, its consumer decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs import errors, headers, limits, state
from mqfs.state import Change, ConsumerState
from mqfs.types import Draft, Kind, Record, User

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

_RECORD_BYTES = 100  # of the records, beside body and headers


def bury(group: Group, own: ConsumerState, record: Record, steps: bytes, reason: str, deliveries: int) -> None:
    """Append a dead letter, and that its message was dealt with, as one unit."""
    settings = group.settings
    stream = group.streams.get(settings.dead)
    if stream is None:
        owner = User(group.state.uid, group.state.gid)
        stream = group.make_stream(settings.dead, 0o664, owner)
    texts = headers.decode(record.headers)
    texts.pop(headers.TTL, None)  # it is over, or would end what is to be looked at
    origin = group.numbers.get(record.stream)
    texts.update(
        {
            headers.STREAM: origin.name if origin is not None else "",
            headers.SEQUENCE: str(record.sequence),
            headers.DELIVERIES: str(deliveries),
            headers.REASON: reason,
        }
    )
    if own.name:
        texts[headers.CONSUMER] = own.name
    head = headers.encode(texts)
    group.reserve_room(len(record.body) + len(head) + _RECORD_BYTES)
    sequence = group.append_message(stream, record.body, head, [Draft(Kind.ACK, own.number, steps)])
    group.consumers.progressed(own, steps)
    group.announce(stream, sequence, record.body, head)


def redrive(group: Group, name: str | None, most: int | None) -> int:
    """Dead letters back to the streams they came from, the oldest first; returns how many went."""
    dead = group.streams.get(group.settings.dead)
    if dead is None:
        return 0
    dead.advance()
    moved, position = 0, dead.state.floor
    while (most is None or moved < most) and len(group.state.dropped) < limits.DROPPED:
        record = _next_letter(group, dead, position)
        if record is None:
            break
        position = record.sequence + 1
        texts = headers.decode(record.headers)
        origin = group.streams.get(texts.get(headers.STREAM, ""))
        if origin is not None and origin is not dead and name in (None, origin.name):
            _send_back(group, dead, record, origin, texts)
            moved += 1
    return moved


def _next_letter(group: Group, dead: Stream, position: int) -> Record | None:
    while True:
        try:
            record = group.bucket.find(dead.number, position)
        except errors.Damaged as error:
            position = error.sequence + 1
            continue
        claimed = record is not None and dead.nameless is not None and record.sequence in dead.nameless.claims
        if record is None or (record.kind == Kind.MESSAGE and dead.visible(record) and not claimed):
            return record
        position = record.sequence + 1


def _send_back(group: Group, dead: Stream, record: Record, origin: Stream, texts: dict[str, str]) -> None:
    head = headers.encode({key: value for key, value in texts.items() if key not in headers.LETTER})
    group.reserve_room(len(record.body) + len(head) + _RECORD_BYTES)
    change: Change = {"do": "drop", "stream": dead.number, "sequences": [record.sequence]}
    if dead.first_kept() == record.sequence:
        change = {"do": "floor", "floors": [[dead.number, record.sequence + 1]]}
    also = [Draft(Kind.CHANGE, dead.number, state.encode_change(change))]
    sequence = group.append_message(origin, record.body, head, also)
    group.state.apply(change)
    group.loosened()
    dead.gave_up(len(record.body))
    group.announce(origin, sequence, record.body, head)
