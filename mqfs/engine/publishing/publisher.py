"""The way of a write: admission, the append, the count, delivery, and the sync that the writer waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.engine.language.settings import NO_DEPTH
from mqfs.engine.log.group_log import AckSteps
from mqfs.engine.publishing import admission
from mqfs.engine.publishing.admission import Admission, WriteRequest
from mqfs.engine.publishing.blocked_writers import BlockedWriters
from mqfs.group_state import Change
from mqfs.model import Draft, Kind, Record
from mqfs.wait import Step

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

MESSAGE = int(Kind.MESSAGE)
RECORD_BYTES = 40  # of a message in the log, beside its body


class Publisher:
    """Of one group."""

    def __init__(self, group: Group) -> None:
        self._group, self._log = group, group.log
        self.blocked = BlockedWriters(self.admit, self.append_admitted)

    def write_plain(self, stream: Stream, body: bytes) -> Step[int]:
        """As `write`, of one message without headers. Where nothing bounds the stream and nobody waits it is a straight
        line: every call here is paid by every message."""
        size, group, log, consumers = len(body), self._group, self._log, self._group.consumers
        bounded = log.settings.depth is not NO_DEPTH or stream.blocked or consumers.bounded
        if bounded or stream.removed or log.end.failed is not None:
            return self.write(stream, WriteRequest(MESSAGE, (body,), size))
        retention = group.retention
        retention.room -= size + RECORD_BYTES
        if retention.room < 0:
            retention.find_room(size + RECORD_BYTES)
        if not log.must_retain or group.waiting.readers:
            self._append_one(stream, MESSAGE, body)
            return log.after_data_sync(size)
        time_ns = log.times.next_ns()
        sequence = log.append(MESSAGE, stream.number, body, time_ns)
        stream.kept.appended(sequence, MESSAGE, size)
        stream.kept.mtime_ns = time_ns
        stream.written += 1
        counts = group.counts
        counts.written += 1
        counts.written_bytes += size
        group.tree.dirty_groups.add(group)
        if sequence + 1 >= consumers.next_end:
            group.fanout.deliver(stream, Record(sequence, time_ns, stream.number, MESSAGE, 0, b"", body))
        return log.after_data_sync(size)

    def write(self, stream: Stream, request: WriteRequest) -> Step[int]:
        """Append messages as one batch, or do with them what `full` says. The step comes to `request.total`.

        A Wait that is cancelled before there was room has appended nothing, and `request.undo` is called; afterwards
        it cannot be cancelled. Raises NotFound, ReadOnly, DiskFailed, StreamFull, TooLong.
        """
        if stream.removed:
            raise errors.NotFound(f"{stream.name} was removed")
        self._log.require_writable()
        if request.kind != MESSAGE and self._log.settings.deliver == "one":
            return request.total  # an EOF marker is for all readers: here is none who could get it
        if not self._is_duplicate(request):  # which needs no room
            self._group.retention.reserve_room(request.total + RECORD_BYTES * len(request.bodies))
        verdict = self.admit(stream, request)
        if verdict is Admission.WAIT:
            return self.blocked.park(stream, request)
        if verdict is Admission.DISCARD:
            return request.total
        return self.append_admitted(stream, request)

    def _is_duplicate(self, request: WriteRequest) -> bool:
        return request.id is not None and self._group.ids.find_duplicate(request.id) > 0

    def admit(self, stream: Stream, request: WriteRequest) -> Admission:
        """What `depth`, and the bounds of consumers, say of a write. Raises StreamFull, TooLong."""
        if request.unit is not None:
            return request.unit.verdict()
        if request.kind != MESSAGE or self._is_duplicate(request):
            return Admission.APPEND
        group, settings = self._group, self._log.settings
        verdict, messages = Admission.APPEND, len(request.bodies)
        if settings.depth is not NO_DEPTH or stream.blocked:
            verdict = admission.by_depth(stream, settings, group.counts, messages, request.size)
        if group.consumers.bounded and verdict is Admission.APPEND:
            lacking = admission.lacking_backlog(settings, {stream: messages})
            verdict = Admission.APPEND if lacking is None else Admission.WAIT
        return verdict

    def append_admitted(self, stream: Stream, request: WriteRequest) -> Step[int]:
        """Append and deliver; the step comes to `request.total` when the group's `sync` is kept."""
        if request.unit is not None:
            return request.unit.carry_out()
        if request.id is not None and (known := self._group.ids.find_duplicate(request.id)):
            if request.on_sequence is not None:
                request.on_sequence(known)
            return self._log.after_data_sync(request.total)
        if request.headers:
            self._append_with_headers(stream, request)
        elif len(request.bodies) == 1:
            self._append_one(stream, request.kind, request.bodies[0])
        else:
            self._append_batch(stream, request.kind, request.bodies)
        settings = self._log.settings
        if settings.depth.messages and settings.full == "drop-old" and stream.kept.count > settings.depth.messages:
            self._group.retention.bound_depth(stream)
        return self._log.after_data_sync(request.total)

    def _append_one(self, stream: Stream, kind: int, body: bytes) -> None:
        group, log, time_ns = self._group, self._log, self._log.times.next_ns()
        if not (log.must_retain or group.ring is not None or group.past_rings) and group.fanout.all_wait(stream):
            sequence = log.skip()
            stream.kept.trimmed_count += 1  # had by its readers, as what they count
        else:
            sequence = log.append(kind, stream.number, body, time_ns)
            stream.kept.appended(sequence, kind, len(body))
        self._deliver(stream, sequence, time_ns, kind, body)

    def _append_batch(self, stream: Stream, kind: int, bodies: Sequence[bytes]) -> None:
        first = self._log.append_batch([Draft(kind, stream.number, body) for body in bodies])
        time_ns = self._log.end.last_ns
        for sequence, body in enumerate(bodies, first):
            stream.kept.appended(sequence, kind, len(body))
        for sequence, body in enumerate(bodies, first):
            self._deliver(stream, sequence, time_ns, kind, body)

    def _append_with_headers(self, stream: Stream, request: WriteRequest) -> None:
        """One message of `.put`, and with it that its id is known."""
        body = request.bodies[0]
        changes = [self._group.ids.note(request.id, self._log.end.next)] if request.id is not None else []
        sequence = self.append_message(stream, body, request.headers, changes)
        if request.on_sequence is not None:
            request.on_sequence(sequence)
        self.deliver(stream, sequence, body, request.headers)

    def append_message(
        self,
        stream: Stream,
        body: bytes,
        head: bytes,
        changes: Sequence[Change] = (),
        acks: Sequence[AckSteps] = (),
    ) -> int:
        """Append one message, and with it changes and steps; `deliver` it afterwards. Returns its sequence."""
        sequence = self._log.append_batch([Draft(MESSAGE, stream.number, body, head)], changes, acks)
        stream.kept.appended(sequence, MESSAGE, len(body))
        return sequence

    def deliver(self, stream: Stream, sequence: int, body: bytes, head: bytes) -> None:
        """Deliver a message of the batch that was appended last."""
        self._deliver(stream, sequence, self._log.end.last_ns, MESSAGE, body, head)

    def _deliver(self, stream: Stream, sequence: int, time_ns: int, kind: int, body: bytes, head: bytes = b"") -> None:
        """Count it, and serve all who wait before the writer is answered."""
        group = self._group
        if kind == MESSAGE:
            counts = group.counts
            stream.kept.mtime_ns = time_ns
            stream.written += 1
            counts.written += 1
            counts.written_bytes += len(body)
        group.tree.dirty_groups.add(group)
        group.fanout.deliver(stream, Record(sequence, time_ns, stream.number, kind, 0, head, body))
