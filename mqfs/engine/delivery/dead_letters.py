"""Dead letters: messages that failed too often, put aside in a stream of their group, and sent back from there.

Owns what a dead letter looks like. When a message becomes one is the consumer's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from mqfs import errors, limits
from mqfs.ack_state import ACK, step
from mqfs.engine.delivery.catalog import Group, Stream
from mqfs.engine.delivery.priority_index import PriorityIndex
from mqfs.engine.log import multipart
from mqfs.engine.log.group_log import AckSteps, GroupLog
from mqfs.group_state import Attributes, Change, ConsumerState
from mqfs.log import batch, headers
from mqfs.log.record_batch import RecordBatch, Source
from mqfs.model import Kind, Record, User

_RECORD_BYTES = 100  # of the records, beside body and headers


class Publisher(Protocol):
    def append_message(
        self, stream: Any, body: bytes, head: bytes, changes: Sequence[Change] = (), acks: Sequence[AckSteps] = ()
    ) -> int:
        """Append one message, and with it changes and steps. Returns its sequence."""
        ...

    def deliver(self, stream: Any, sequence: int, body: bytes, head: bytes) -> None:
        """Count and deliver a message that was appended."""
        ...


class Letters(Group, Protocol):
    """A group, as one that has dead letters."""

    @property
    def ranks(self) -> PriorityIndex: ...

    @property
    def publisher(self) -> Publisher: ...

    def make_stream(self, name: str, mode: int, user: User) -> Stream: ...


def append_dead_letter(
    group: Letters, own: ConsumerState, record: Record, slot: int, deliveries: int, reason: str
) -> None:
    """Append a dead letter and the ack of its message as one batch. `slot`: where the message's begins; the parts of a
    body are all copied. Raises StreamFull, DiskFailed, ReadOnly and others."""
    acks = [(own, step(ACK, slot, record.sequence))]
    origin = group.numbers[record.stream]
    stream = _stream_for(group, origin)
    texts = headers.decode(record.headers)
    texts.pop(headers.TTL, None)  # the letter is to outlive it
    texts.update(
        {
            headers.STREAM: origin.name,
            headers.SEQUENCE: str(record.sequence),
            headers.DELIVERIES: str(deliveries),
            headers.REASON: reason,
        }
    )
    if own.name:
        texts[headers.CONSUMER] = own.name
    head = headers.encode(texts)
    first = multipart.first_of(group.log, record)
    if slot <= first < record.sequence:
        copies, size = _copies(group.log, record.stream, first, record.sequence, stream, {**texts, headers.PART: ""})
        sequence = _append_parts(group, stream, copies, size, acks=acks)
        _deliver_parts(group, stream, copies, sequence)
        return
    group.retention.reserve_room(len(record.body) + len(head) + _RECORD_BYTES)
    sequence = group.publisher.append_message(stream, record.body, head, acks=acks)
    group.publisher.deliver(stream, sequence, record.body, head)


def _stream_for(group: Letters, origin: Stream) -> Stream:
    """The dead-letter stream, made if it is not there, and narrowed to users who may open the origin."""
    name, own = group.log.settings.dead, origin.state
    stream = group.streams.get(name)
    if stream is None:
        return group.make_stream(name, own.mode & 0o666, User(own.uid, own.gid))
    narrow = stream.state.mode & _open_to(own, stream.state)
    if narrow != stream.state.mode:
        now = stream.state
        group.log.change({"do": "attributes", "file": stream.number, "mode": narrow, "uid": now.uid, "gid": now.gid})
    return stream


def _open_to(origin: Attributes, letters: Attributes) -> int:
    """The mode that opens the letters' stream only to users who may open the origin. Where owner or group differ, the
    users of one class here may be of several there."""
    user, group, other = origin.mode >> 6 & 7, origin.mode >> 3 & 7, origin.mode & 7
    if letters.gid != origin.gid:
        group = other = group & other
    if letters.uid != origin.uid:
        user, group, other = group & other, group & user, other & user
    return user << 6 | group << 3 | other


def _copies(
    log: GroupLog, number: int, first: int, last: int, to: Stream, texts: Mapping[str, str]
) -> tuple[RecordBatch, int]:
    """The parts of a body, copied to another stream, and the bytes of the body. `texts`: their headers; `part` is each
    one's own."""

    def pieces() -> Iterator[bytes]:
        for record in multipart.parts(log, number, first, last):
            part = headers.decode(record.headers).get(headers.PART, "")
            head = headers.encode({**texts, headers.PART: part})
            yield batch.concatenate([("", head, record.body)], {}).data

    source = Source(last - first + 1, sum(map(len, pieces())), array("I", [to.number]), pieces)
    return RecordBatch([source]), log.metrics.count(number, first, last + 1)[1]


def _append_parts(
    group: Letters,
    stream: Stream,
    copies: RecordBatch,
    size: int,
    changes: Sequence[Change] = (),
    acks: Sequence[AckSteps] = (),
) -> int:
    """Append them, and with them changes and steps, without delivery. Returns the first one's sequence."""
    group.retention.reserve_room(copies.stored_bytes + _RECORD_BYTES)
    first = group.log.append_batch(copies, changes, acks)
    stream.kept.appended_many(first + len(copies) - 1, len(copies), size)
    return first


def _deliver_parts(group: Letters, stream: Stream, copies: RecordBatch, first: int) -> None:
    for sequence, draft in enumerate(copies.messages(), first):
        group.publisher.deliver(stream, sequence, draft.body, draft.headers)


def redrive(group: Letters, name: str | None, most: int | None) -> int:
    """Send dead letters back to the streams they came from (`name`: of that one alone), the oldest first. `most`: None,
    or how many at most. Returns their number."""
    dead = group.streams.get(group.log.settings.dead)
    if dead is None:
        return 0
    dead.kept.update_low_watermark()
    moved, position = 0, dead.state.floor
    while (most is None or moved < most) and len(group.log.state.dropped) < limits.DROPPED:
        record = _next_letter(group, dead, position)
        if record is None:
            break
        last = multipart.last_of(group.log, record) or record
        position = last.sequence + 1
        texts = headers.decode(record.headers)
        origin = group.streams.get(texts.get(headers.STREAM, ""))
        if origin is not None and origin is not dead and name in (None, origin.name):
            if last is not record:
                _send_parts_back(group, dead, record, last, origin, texts)
            else:
                _send_back(group, dead, record, origin, texts)
            moved += 1
    return moved


def _next_letter(group: Letters, dead: Stream, position: int) -> Record | None:
    while True:
        try:
            record = group.log.reader.find(dead.number, position)
        except errors.Damaged as error:
            position = error.sequence + 1
            continue
        if record is None:
            return None
        if record.kind == Kind.MESSAGE and dead.kept.visible(record) and not _is_claimed(group, dead, record):
            return record
        position = record.sequence + 1


def _is_claimed(group: Letters, dead: Stream, record: Record) -> bool:
    """Whether a receiver of the stream's default consumer has it."""
    own = group.log.state.consumers.get(dead.number)
    if own is None or not own.progress.in_flight:
        return False
    last = multipart.last_of(group.log, record) or record
    entry = own.progress.in_flight.get(last.sequence)
    return entry is not None and entry.claimed


def _send_parts_back(
    group: Letters, dead: Stream, record: Record, last: Record, origin: Stream, texts: dict[str, str]
) -> None:
    more = {key: value for key, value in texts.items() if key not in headers.LETTER}
    copies, size = _copies(group.log, dead.number, record.sequence, last.sequence, origin, more)
    sequences = list(range(record.sequence, last.sequence + 1))
    change: Change = {"do": "drop", "stream": dead.number, "sequences": sequences}
    if dead.kept.first_kept() == record.sequence:
        change = {"do": "floor", "floors": [[dead.number, last.sequence + 1]]}
    sequence = _append_parts(group, origin, copies, size, [change])
    _deliver_parts(group, origin, copies, sequence)
    group.retention.note_change()
    dead.kept.recount()


def _send_back(group: Letters, dead: Stream, record: Record, origin: Stream, texts: dict[str, str]) -> None:
    head = headers.encode({key: value for key, value in texts.items() if key not in headers.LETTER})
    group.retention.reserve_room(len(record.body) + len(head) + _RECORD_BYTES)
    change: Change = {"do": "drop", "stream": dead.number, "sequences": [record.sequence]}
    if dead.kept.first_kept() == record.sequence:
        change = {"do": "floor", "floors": [[dead.number, record.sequence + 1]]}
    sequence = group.publisher.append_message(origin, record.body, head, [change])
    group.retention.note_change()
    dead.kept.on_deleted(len(record.body))
    group.publisher.deliver(origin, sequence, record.body, head)
