"""The path of a write: admission, the append, the count, delivery, and the sync that the writer waits for.

mqfs/ring/server/ring_log.py appends the messages that other processes published to a group's ring. This module counts
them, applies `depth` and delivers them in order; without a waiting reader they are only counted, all at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.engine.core.log import record_at
from mqfs.engine.language.settings import NO_DEPTH
from mqfs.engine.publishing import admission
from mqfs.engine.publishing.admission import Admission, OnSequence, WriteRequest, bytes_of
from mqfs.engine.publishing.kept_quotas import stored
from mqfs.engine.retention.retained import newest_written
from mqfs.model import Buffer, Draft, Kind, Record, RecordColumns, Step, Wait
from mqfs.records.batch import tally
from mqfs.records.record import HEAD_BYTES

if TYPE_CHECKING:
    from mqfs.engine.files.handle import OpenFile
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

MESSAGE = int(Kind.MESSAGE)
RECORD_BYTES = 40  # most bytes of a message in the log, without headers and body


class Publisher:
    """Writes messages to one group: admission, append, count, deliver, sync."""

    def __init__(self, host: Group) -> None:
        self._host, self.log, self.retention, self.consumers = host, host.log, host.retention, host.consumers
        self.counts, self.fanout, self.mark_dirty = host.counts, host.fanout, host.mark_dirty
        self._waiting, self.ids, self.kept_quotas = host.waiting, host.ids, host.kept_quotas
        self.overdue = host.held.overdue
        self.blocked = BlockedWriters(host)

    def write_plain(self, stream: Stream, body: bytes, writer: OpenFile) -> Step[int]:
        """Write one message without headers, as `write` does; `writer`: as in WriteRequest. The code is inlined for
        the case without bounds and waiting readers, as every message pays for every call here."""
        size, log, consumers = len(body), self.log, self.consumers
        bounded = log.settings.depth is not NO_DEPTH or stream.blocked or consumers.bounded or self.kept_quotas
        if bounded or log.shown is not None or stream.removed or log.end.failed is not None:
            return self.write(stream, WriteRequest(MESSAGE, (body,), size, writer=writer))
        retention = self.retention
        retention.room -= size + RECORD_BYTES
        if retention.room < 0:
            return self.write(stream, WriteRequest(MESSAGE, (body,), size, writer=writer))
        if not log.must_retain or self._waiting.readers:
            self._append_one(stream, MESSAGE, body)
            return log.after_data_sync(size)
        time_ns = log.times.next_ns()
        sequence = log.append(MESSAGE, stream.number, body, time_ns)
        stream.kept.appended(sequence, MESSAGE, size)
        stream.kept.mtime_ns = time_ns
        stream.written += 1
        counts = self.counts
        counts.written += 1
        counts.written_bytes += size
        self.mark_dirty()
        if sequence + 1 >= consumers.read_ends.next:
            self.fanout.deliver(stream, Record(sequence, time_ns, stream.number, MESSAGE, 0, b"", body))
        return log.after_data_sync(size)

    def write(self, stream: Stream, request: WriteRequest) -> Step[int]:
        """Append messages as one batch, or treat them as `full` says. The step resolves to `request.total`.

        A Wait that is cancelled while it waits for room appends nothing and calls `request.undo`; later it cannot be
        cancelled. Raises NotFound, ReadOnly, DiskFailed, StreamFull, TooLong, OverQuota.
        """
        if stream.removed:
            raise errors.NotFound(f"stream {stream.name!r}: removed")
        self.log.require_writable(messages=True)
        if request.kind != MESSAGE and self.log.settings.deliver == "one":
            return request.total  # an EOF marker is for readers of every message; `deliver one` has none
        verdict = self.admit_in_quota(stream, request)
        if verdict is Admission.WAIT:
            return self.blocked.park(stream, request)
        if verdict is Admission.DISCARD:
            return request.total
        return self.append_admitted(stream, request, verdict)

    def _is_duplicate(self, request: WriteRequest) -> bool:
        return request.id is not None and self.ids.find_duplicate(request.id) > 0

    def admit_in_quota(self, stream: Stream, request: WriteRequest) -> Admission:
        """Admit a write within the quota of the stream's owner. The quota is charged when the write is admitted; one
        that waits is checked again then. Raises what `admit` raises, and OverQuota."""
        quotas = self.kept_quotas
        if quotas is None or request.unit is not None or self._is_duplicate(request):  # a duplicate needs no room
            return self.admit(stream, request)
        messages, heads = len(request.bodies), len(request.bodies) * len(request.headers)
        sizes = {stream: stored(messages, request.size + heads)}
        quotas.require(sizes)
        verdict = self.admit(stream, request)
        if verdict in (Admission.APPEND, Admission.CUT):
            quotas.charge(sizes)
        return verdict

    def admit(self, stream: Stream, request: WriteRequest) -> Admission:
        """Return the verdict of `depth`, the bounds of consumers and the log's bound on a write. Raises StreamFull and
        the other refusals; then no message was evicted for it."""
        if request.unit is not None:
            return request.unit.admit()
        if self._is_duplicate(request):
            return Admission.APPEND
        if request.expect is not None:
            self.require_expected({stream: request.expect})
        if request.id is not None:
            self.ids.require_room({request.id.uid: 1})
        settings, verdict, messages = self.log.settings, Admission.APPEND, len(request.bodies)
        need = request.total + RECORD_BYTES * messages
        if request.kind != MESSAGE:
            self.retention.reserve_room(need)
            return verdict
        if stream.blocked:
            return Admission.WAIT  # earlier writers wait already
        heads = (request.headers,)
        if settings.depth is not NO_DEPTH and not admission.has_room(stream, messages, request.size, heads):
            verdict = admission.when_full(settings, self.counts, messages, partial(admission.depth_reached, stream))
        if verdict not in (Admission.APPEND, Admission.CUT):
            return verdict
        if self.consumers.bounded and admission.lacking_backlog(settings, {stream: messages}) is not None:
            return Admission.WAIT
        if not self.retention.take_room(need):
            return admission.when_full(settings, self.counts, messages, self.retention.bound_reached)
        return verdict

    def admit_due(self, stream: Stream, request: WriteRequest, *, charged: bool) -> Admission:
        """Admit a due message that was accepted before, ahead of the blocked writers. `charged`: the owner's quota
        includes it already."""
        writers, stream.blocked = stream.blocked, OrderedDict()
        try:
            return self.admit(stream, request) if charged else self.admit_in_quota(stream, request)
        finally:
            stream.blocked = writers

    def has_room(self, totals: Mapping[Stream, int], size: int) -> bool:
        """Whether a batch would be appended now, without regard to `depth`. Not for `full drop-old`, where the log
        would be cut. `totals`: its messages by stream; `size`: its bytes in the log. Raises StreamFull."""
        if any(stream.blocked for stream in totals):
            return False
        if self.consumers.bounded and admission.lacking_backlog(self.log.settings, totals) is not None:
            return False
        is_found = self.retention.take_room(size)
        self.retention.room += size  # give it back: this is only a query
        return is_found

    def require_expected(self, expected: Mapping[Stream, int]) -> None:
        """Check the newest message of streams: `expected` are their sequences. The group's ring is retired first, as
        others could publish to it before the append. Raises Conflict, and DiskFull if the ring cannot be retired."""
        if expected and (ring := self._host.ring) is not None:
            ring.retire("a conditional append")
            if self._host.ring is not None:
                raise errors.DiskFull("expect: messages of the ring are not in the log yet (repeat the write)")
        for stream, sequence in expected.items():
            if (newest := newest_written(stream.kept)) != sequence:
                raise errors.Conflict(f"expect: newest message {newest} of {stream.name!r} (expected {sequence})")

    def append_admitted(self, stream: Stream, request: WriteRequest, verdict: Admission) -> Step[int]:
        """Append and deliver. The step resolves to `request.total` when `sync` is satisfied. `verdict`: APPEND or CUT.
        The cut follows the append, so a write that the disk refuses evicts no message."""
        if request.unit is not None:
            return request.unit.append()
        if request.id is not None and (known := self.ids.find_duplicate(request.id)):
            if request.on_sequence is not None:
                request.on_sequence(known, 0, True)
            return self.log.after_data_sync(request.total)
        if len(request.bodies) > 1 or request.headers or request.id is not None:
            self._append_batch(stream, request)
        else:
            self._append_one(stream, request.kind, request.bodies[0], request.on_sequence)
        if self.log.settings.depth is not NO_DEPTH:
            # Several messages are counted again: waiting readers may have had some, whose eviction is not a loss.
            is_counted = verdict is Admission.CUT and len(request.bodies) == 1
            self.retention.bound_depth(stream, is_counted=is_counted)
        return self.log.after_data_sync(request.total)

    def _append_one(self, stream: Stream, kind: int, body: bytes, on_sequence: OnSequence | None = None) -> None:
        host, log, time_ns = self._host, self.log, self.log.times.next_ns()
        is_stored = log.must_retain or log.shown is not None or host.ring is not None or host.past_rings
        if not is_stored and self.fanout.all_wait(stream):
            sequence = log.skip()
            stream.kept.trimmed_count += 1  # like a trimmed message: all readers have it
        else:
            sequence = log.append(kind, stream.number, body, time_ns)
            if log.shown is None:
                stream.kept.appended(sequence, kind, len(body))
        if on_sequence is not None:
            on_sequence(sequence, time_ns, False)
        record = Record(sequence, time_ns, stream.number, kind, 0, b"", body)
        if log.shown is None:
            self.deliver(stream, record)
        else:
            self.hold(sequence, {stream: (1, len(body))}, partial(self._show_one, stream, record))

    def _append_batch(self, stream: Stream, request: WriteRequest) -> None:
        """Append messages with headers, or several, and with them the id of a `.put`."""
        drafts = [Draft(request.kind, stream.number, body, request.headers) for body in request.bodies]
        changes = []
        if request.id is not None:
            size = request.size + len(drafts) * (len(request.headers) + RECORD_BYTES)
            changes = [self.ids.change(request.id, self.log.next_sequence(size + bytes_of([request.id])))]
        first = self.log.append_batch(drafts, changes)
        if request.on_sequence is not None:
            request.on_sequence(first, self.log.end.last_ns, False)
        self.deliver_all(stream, first, drafts, request.size)

    def deliver_all(self, stream: Stream, first: int, messages: Sequence[Draft], size: int) -> None:
        """Count and deliver the batch appended last, now or when the copy has it. `size`: bytes of its bodies."""
        if self.log.shown is not None:
            count = len(messages)
            self.hold(first, {stream: (count, size)}, partial(self._show_all, stream, first, count, size))
            return
        time_ns = self.log.end.last_ns  # read once: a delivery to a claim appends a record with another time
        stream.kept.appended_many(first + len(messages) - 1, len(messages), size)
        for sequence, draft in enumerate(messages, first):
            self.deliver(stream, Record(sequence, time_ns, draft.stream, draft.kind, 0, draft.headers, draft.body))

    # ------------------------------------------------------------ messages that wait for the copy

    def hold(self, first: int, totals: Mapping[Stream, tuple[int, int]], show: Callable[[], None]) -> None:
        """Call `show` when the copy has the messages appended last, of which `first` is the first. Until then they
        count against `depth` only. `totals`: their messages and bytes by stream."""
        host = self._host
        for stream, (messages, size) in totals.items():
            stream.kept.held_count += messages
            stream.kept.held_size += size

        def then(_: OSError | None) -> None:
            for stream, (messages, size) in totals.items():
                stream.kept.held_count -= messages
                stream.kept.held_size -= size
            host.faults.contain(host, "delivering what is replicated", show)
            host.unblock()

        self.log.hold(first, then)

    def _show_one(self, stream: Stream, record: Record) -> None:
        if not stream.removed:
            stream.kept.appended(record.sequence, record.kind, len(record.body))
            self.deliver(stream, record, is_expired=self.is_expired(record))
            self.retention.bound_depth(stream)

    def _show_all(self, stream: Stream, first: int, count: int, size: int) -> None:
        if stream.removed:
            return
        stream.kept.appended_many(first + count - 1, count, size)
        for record in self.appended(first, count):
            self.deliver(stream, record, is_expired=self.is_expired(record))
        self.retention.bound_depth(stream)

    def appended(self, first: int, count: int) -> Iterator[Record]:
        """Yield the messages of a batch from the log, without damaged ones."""
        for sequence in range(first, first + count):
            if (record := record_at(self.log.stored.reader, sequence)) is not None:
                yield record._replace(flags=0)

    def is_expired(self, record: Record) -> bool:
        """Whether a message expired by a ttl before it was shown."""
        if self.retention.expiry.is_expired(record):
            return True
        ranked = bool(record.headers) and self._host.ranks.note(record) is not None
        return ranked and self.retention.is_expired(record)

    def deliver(self, stream: Stream, record: Record, *, is_expired: bool = False) -> None:
        """Count a message, and serve all waiting reads before its writer is answered. An expired one is only
        counted."""
        if record.kind == MESSAGE:
            counts = self.counts
            stream.kept.mtime_ns = record.time_ns
            stream.written += 1
            counts.written += 1
            counts.written_bytes += len(record.body)
        self.mark_dirty()
        if not is_expired:
            self.fanout.deliver(stream, record)


# ------------------------------------------------------------ blocked writers


class BlockedWriters:
    """The writers of a group that wait for room (`full block`). `stream.blocked` has those of a stream, in order."""

    def __init__(self, host: Group) -> None:
        self._host = host
        self.streams: set[Stream] = set()  # streams with blocked writers

    def park(self, stream: Stream, request: WriteRequest) -> Wait[int]:
        """Block a request until its stream has room. A Wait that is cancelled before that appends nothing. Raises
        OverLimit."""

        request.hold()

        def cancel(wait: Wait[int]) -> bool:
            place = _place(stream, request)
            first = place is not None and next(iter(place.blocked), None) is wait
            if place is None or place.blocked.pop(wait, None) is None:
                return False
            request.release()
            if request.undo is not None:
                request.undo()
            if first:
                self._host.unblock()  # it was the first in line, and there may be room for later writers
            return True

        wait: Wait[int] = Wait(cancel)
        stream.blocked[wait] = request
        self.streams.add(stream)
        return wait

    def of_batches(self) -> set[Stream]:
        """Return the streams for which a waiting batch has messages; some may be empty, so they must not be removed."""
        requests = [request for stream in self.streams for request in stream.blocked.values()]
        return {stream for request in requests if request.unit is not None for stream in request.unit.tallies}

    def retry(self, due: Container[int]) -> None:
        """Append the blocked writes that are admitted now, as there may be room. `due`: numbers of streams in which
        due messages come first."""
        if not self.streams:
            return
        for stream in sorted(self.streams, key=lambda stream: stream.number):
            if stream.number not in due:
                self._settle(stream)
            if not stream.blocked:
                self.streams.discard(stream)

    def _settle(self, stream: Stream) -> None:
        blocked = stream.blocked
        while blocked:
            wait, request = blocked.popitem(last=False)
            rest, stream.blocked = blocked, OrderedDict()  # else admission would let it wait for the writers behind it
            try:
                step = self._try(stream, request)
            except Exception as error:
                stream.blocked = blocked = rest
                _refuse(wait, request, error)
                continue
            if step is None:
                place = _place(stream, request)
                if place is None or place is stream:
                    rest[wait], stream.blocked = request, rest
                    rest.move_to_end(wait, last=False)
                    return
                stream.blocked = blocked = rest  # a batch waits on the stream without room
                place.blocked[wait] = request
                self.streams.add(place)
                continue
            stream.blocked = blocked = rest
            request.release()
            wait.follow(step)
        stream.pollers.wake()

    def _try(self, stream: Stream, request: WriteRequest) -> Step[int] | None:
        """Append a blocked write, or discard it as `full` says. None: there is no room yet."""
        publisher = self._host.publisher
        admission = publisher.admit_in_quota(stream, request)
        if admission is Admission.WAIT:
            return None
        if admission is Admission.DISCARD:
            return request.total
        return publisher.append_admitted(stream, request, admission)


def refuse_all(stream: Stream, error: errors.MqfsError) -> None:
    """Fail the blocked writers of a stream that is removed, or whose server stops."""
    for wait in list(stream.blocked):
        _refuse(wait, stream.blocked.pop(wait), error)


def _place(stream: Stream, request: WriteRequest) -> Stream | None:
    """Return the stream on which a request waits: for a batch the first without room."""
    return stream if request.unit is None else request.unit.lacking


def _refuse(wait: Wait[int], request: WriteRequest, error: Exception) -> None:
    request.release()
    if request.undo is not None:
        request.undo()
    if request.writer is not None and isinstance(error, errors.MqfsError):
        request.writer.refused(error)
    wait.fail(error)


# ------------------------------------------------------------ messages of a ring


_ASKED_AGAIN = 64  # messages between two checks whether any reader still waits


def ingest(group: Group, data: Buffer, base: int, rows: RecordColumns) -> None:
    """Count and deliver plain messages that were just appended. `data` has their records; its first byte is at position
    `base` of the log."""
    numbers = group.numbers  # streams that were removed since the write are not in it
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
    """Count plain messages without a present reader: they are not stored."""
    for number, messages, size, _ in tally(rows):
        stream = group.numbers.get(number)
        if stream is not None:
            stream.written += messages
            stream.kept.mtime_ns = rows.times[-1]
        group.publisher.counts.written += messages
        group.publisher.counts.written_bytes += size


def _deliver(group: Group, streams: list[Stream], data: Buffer, base: int, rows: RecordColumns) -> None:
    """Deliver messages one by one while readers of `streams` wait. A served reader has left the wait list, and cannot
    rejoin before this returns."""
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
    """Whether a reader of live messages is present on a stream of these records, waiting or not."""
    streams = [stream for row in tally(rows) if (stream := group.numbers.get(row.place)) is not None]
    return bool(group.publisher.fanout.has_live_readers(streams))
