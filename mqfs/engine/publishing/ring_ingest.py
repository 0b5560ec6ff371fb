"""Messages that other processes published to a group's ring, once the log holds them.

Counts them, bounds them by `depth` and delivers them in their order; without a waiting reader all of them at once.
mqfs/ring/server/ring_log.py appends them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs.engine.language.settings import NO_DEPTH
from mqfs.model import Buffer, Kind, Record, RecordColumns
from mqfs.records.batch import tally
from mqfs.records.record import HEAD_BYTES

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

_ASKED_AGAIN = 64  # messages, whether any reader waits still


def ingest(group: Group, data: Buffer, base: int, rows: RecordColumns) -> None:
    """Plain messages, appended just now. `data` has their records, the first byte at position `base`."""
    numbers = group.numbers  # without those that were removed since they were written to
    found = [(numbers[row.place], row) for row in tally(rows) if row.place in numbers]
    for stream, (_, messages, size, last) in found:
        stream.kept.newest, stream.kept.mtime_ns = rows.sequences[last], rows.times[last]
        if stream.kept.count >= 0:
            stream.kept.count += messages
            stream.kept.size += size
        stream.written += messages
        group.publisher.counts.written += messages
        group.publisher.counts.written_bytes += size
    group.publisher.mark_dirty()
    streams = [stream for stream, _ in found]
    _deliver(group, streams.copy(), data, base, rows)
    if group.publisher.log.settings.depth is not NO_DEPTH:
        for stream in streams:
            group.publisher.retention.bound_depth(stream)


def count_unstored(group: Group, rows: RecordColumns) -> None:
    """Count plain messages that no reader is present for: they are not stored."""
    for number, messages, size, _ in tally(rows):
        stream = group.numbers.get(number)
        if stream is not None:
            stream.written += messages
            stream.kept.mtime_ns = rows.times[-1]
        group.publisher.counts.written += messages
        group.publisher.counts.written_bytes += size


def _deliver(group: Group, streams: list[Stream], data: Buffer, base: int, rows: RecordColumns) -> None:
    """Deliver those of these streams one by one. A served reader has left the wait list, and cannot rejoin before this
    returns."""
    for n, number in enumerate(rows.streams):
        if not n % _ASKED_AGAIN and not group.publisher.fanout.is_awaited(streams):
            break
        stream = group.numbers.get(number)
        if stream is None:
            continue
        begin = rows.positions[n] - base + HEAD_BYTES + rows.headers[n]
        body = bytes(data[begin : begin + rows.bodies[n]])
        group.publisher.fanout.deliver(
            stream, Record(rows.sequences[n], rows.times[n], number, int(Kind.MESSAGE), 0, b"", body)
        )


def has_live_readers(group: Group, rows: RecordColumns) -> bool:
    """Whether a reader of live messages is present on one of their streams, waiting or not."""
    streams = [stream for row in tally(rows) if (stream := group.numbers.get(row.place)) is not None]
    return bool(group.publisher.fanout.has_live_readers(streams))
