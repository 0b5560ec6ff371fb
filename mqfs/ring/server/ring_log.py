"""A group's log while the group has a ring: the server's writes go through the ring, too, so that there is one order.

A RingLog handles one ring: the server's writes to it, its commits and its end. intake.py copies its records into the
log; registry.py decides which groups have rings, and who may attach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits
from mqfs.engine.group import Group
from mqfs.engine.language.settings import SYNC_ALWAYS
from mqfs.model import Draft, Kind
from mqfs.records.batch import RecordBatch
from mqfs.records.record import HEAD_BYTES, padded
from mqfs.ring import OWN
from mqfs.ring.server.ingest_checks import is_plausible
from mqfs.ring.server.intake import UNWRITABLE, RingIntake

if TYPE_CHECKING:
    from mqfs.ring import Ring

log = logging.getLogger("mqfs.ring")

_END = int(Kind.END)
_UNPUBLISHED = (errors.Again, errors.Stale, errors.OverLimit, errors.BadRing, errors.Busy, errors.Disconnected)


class RingLog:
    """A group's ring, as a `Bucket` and as a `RingPort` (mqfs/store/api.py).

    `judge` returns why a change of the group ends the ring, or "". `on_end` is called once, when the ring has ended and
    the records ingested from it are committed.
    """

    def __init__(
        self,
        group: Group,
        made: Ring,
        judge: Callable[[Mapping[str, Any]], str],
        on_end: Callable[[RingLog], None],
    ) -> None:
        self.group, self.ring, self.inner = group, made, group.log.bucket
        self._judge, self._on_end = judge, on_end
        self.why = ""  # why it is being retired
        self.ended = False
        self.held_up = False  # a client held the lock for longer than the server waits
        self._unsound: int | None = None  # the tail at the last tick, if the ring's state did not fit it
        inner = self.inner
        self.intake = RingIntake(group, made, inner, self.retire)
        self.id, self.end, self.upkeep, self.ranges = inner.id, inner.end, inner.upkeep, inner.ranges
        self.reader, self.metrics = inner.reader, inner.metrics
        self.writer = self
        inner.ranges.on_sequences_reserved(made.grant)
        group.log.use(self)
        group.ring = self

    @property
    def corrupt(self) -> str:
        """The first thing found in the ring that no client may write, or ""."""
        return self.intake.checks.corrupt

    # ------------------------------------------------------------ as a bucket

    @property
    def state(self) -> Callable[[], bytes]:
        return self.inner.writer.state

    @state.setter
    def state(self, state: Callable[[], bytes]) -> None:
        self.inner.writer.state = state

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        if kind > _END:
            return self.inner.writer.append(kind, stream, self._before_pending(time_ns), body, headers)
        published = self._publish([Draft(kind, stream, body, headers)], OWN if headers or kind == _END else 0)
        try:
            sequence = self.inner.writer.append(kind, stream, published or time_ns, body, headers)
        except BaseException:
            self.intake.own_refused()
            raise
        self._appended()
        return sequence

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        if isinstance(drafts, RecordBatch) and drafts.stored_bytes > self.ring.size // 2:
            self.retire("an atomic batch larger than half of it is written")
            self._without_ring()
            return self.inner.writer.append_batch(drafts, time_ns)
        messages = [draft for draft in drafts if draft.kind <= _END]
        if not messages:
            return self.inner.writer.append_batch(drafts, self._before_pending(time_ns))
        published = self._publish(messages, OWN)
        try:
            sequence = self.inner.writer.append_batch(drafts, published or time_ns)
        except BaseException:
            self.intake.own_refused()
            raise
        self._appended()
        return sequence

    def skip(self) -> int:
        raise AssertionError("a group with a ring keeps what is written")

    def _before_pending(self, time_ns: int) -> int:
        """Return the time for a record appended directly to the log: not after the time of a pending message in the
        ring."""
        return time_ns if self.intake.is_empty else self.end.last_ns

    # ------------------------------------------------------------ the server's own messages

    def _publish(self, drafts: Sequence[Draft], flags: int) -> int:
        """Publish to the ring, and ingest the records before. Returns the time of the messages. 0: use the caller's
        time, since the ring failed and was retired, or its time is in the future. Raises DiskFull and other errors of
        the log; then none of the messages counts, even if it is in the ring."""
        intake, checks = self.intake, self.intake.checks
        assert not intake.taking
        if self.why:
            return self._without_ring()
        intake.take()
        if intake.blocked:
            raise errors.DiskFull(intake.blocked)
        self.inner.ranges.reserve_space(sum(padded(HEAD_BYTES + len(d.headers) + len(d.body)) for d in drafts), 0)
        try:
            last = self.ring.publish_unit(drafts, limits.RING_PATIENCE_S, flags)
        except _UNPUBLISHED as error:
            self.held_up = self.held_up or isinstance(error, errors.Again)
            self.retire(f"the server could not write to it ({error})")
            return self._without_ring()
        own = range(last - len(drafts) + 1, last + 1)
        if not 0 <= own.start - self.inner.end.next <= checks.capacity:
            checks.corrupt = "a state that no client may write"
            self._retire_corrupt()
            return self._without_ring()
        time_ns = intake.take_before_own(own)
        if time_ns is not None:
            if is_plausible(time_ns):
                return time_ns
            checks.report("a time in the future")
            return 0
        intake.own_refused()
        if intake.blocked:
            raise errors.DiskFull(intake.blocked)
        self.retire("the server's own message was not found in it")
        return self._without_ring()

    def _without_ring(self) -> int:
        """End the ring first: its messages must precede those that are appended to the log alone. Raises DiskFull."""
        self._finish()
        if not self.ended:
            raise errors.DiskFull(f"messages published before were not written: {self.intake.blocked}")
        return 0

    def _appended(self) -> None:
        """Note that the server's own messages are in the log, and commit them if they were in the ring."""
        if self.intake.own_appended():
            self.commit()
        self._retire_unfit()

    # ------------------------------------------------------------ ingesting

    def drain(self) -> None:
        if not self.intake.is_empty:
            self.pump()
        self.intake.expect_reader()

    def pump(self, most_bytes: int | None = None, *, may_leave: bool = False) -> None:
        """Ingest all records, or about `most_bytes`, and commit them as `sync` says. `may_leave`: see
        `RingIntake.take`."""
        if self.ended:
            return
        before = self.inner.end.next
        self.intake.take(None, most_bytes, may_leave=may_leave)
        if self.inner.end.next != before:
            self.commit()
        self._retire_unfit()
        if self.inner.end.failed is not None and not self.why:
            self.retire(f"the disk failed: {self.inner.end.failed}")

    def commit(self) -> None:
        """Commit all ingested records as `sync` says, and wake waiting publishers."""
        if self.ended:
            return
        sync, last = self.group.settings.sync, self.inner.end.next - 1
        if sync == SYNC_ALWAYS and self.group.log.must_retain:
            self.inner.upkeep.sync(lambda error: self._committed(last, error))
            return
        if sync > 0:
            self.inner.upkeep.sync(None, sync / 1e9)
        self.ring.commit(last)

    def _committed(self, last: int, error: OSError | None) -> None:
        if error is not None:
            self.retire(f"the disk failed: {error}")
        elif not self.ended and last > self.ring.committed:
            self.ring.commit(last)

    @property
    def floor(self) -> int:
        """See `RingPort`."""
        return self.intake.readers.floor

    # ------------------------------------------------------------ its end

    def changed(self, changes: Sequence[Mapping[str, Any]]) -> None:
        for change in changes:
            if why := self._judge(change):
                self.retire(why)
                return

    def retire(self, why: str) -> None:
        """End publishing in the ring; its clients attach to the next generation."""
        if self.ended:
            return
        if not self.why:
            log.info("ring of group %d retired: %s", self.group.number, why)
        self.why = self.why or why
        self.ring.retire(limits.RING_PATIENCE_S)
        if not self.intake.taking:
            self._finish()

    def _retire_corrupt(self) -> None:
        """Retire the ring if something was found in it that no client may write."""
        if self.corrupt:
            self.retire(f"corrupt data: {self.corrupt}")

    def _retire_unfit(self) -> None:
        """Retire the ring if it is corrupt, or if the log has no room for more. Published messages are still ingested
        then, and clients use the files, which refuse a message before it is published."""
        self._retire_corrupt()
        if self.intake.no_room:
            self.retire(f"no room for more in the log: {self.intake.no_room}")

    def _finish(self) -> None:
        """Ingest the remaining records, and end the ring. If the log has no room for them now, `tick` tries again."""
        if self.ended:
            return
        self.intake.take()
        end = self.intake.final_position
        if end is None:
            return
        self.ring.end(end)
        self.ended = True
        if self.intake.readers.update():
            self.group.past_rings.add(self)
        self._restore_bucket()
        last = self.inner.end.next - 1
        self.inner.upkeep.sync(lambda error: self._end_committed(last, error))

    def _restore_bucket(self) -> None:
        self.group.log.use(self.inner)
        self.group.ring = None
        self.inner.ranges.on_sequences_reserved(None)
        self.inner.ranges.hold_room(0)

    def detach(self) -> None:
        """Detach the group from the ring before anything was ingested, and leave the ring as it is."""
        self._restore_bucket()
        self.intake.close()

    def _end_committed(self, last: int, error: OSError | None) -> None:
        if error is None:
            self.ring.commit(last)
        self._on_end(self)

    def tick(self) -> None:
        """Maintain the ring; called once a second."""
        # If the ring's state does not fit its tail, publishers are refused, and a server that writes nothing would not
        # notice. While a client publishes, state and tail may be read at different moments; but then the tail moves
        # between two ticks.
        unsound = None if self.ring.next else self.ring.tail
        if not self.why and (self.ring.retired or (unsound is not None and unsound == self._unsound)):
            self.intake.checks.corrupt = "an end that no client may write"
            self._retire_corrupt()
        self._unsound = unsound
        if self.why:
            self._finish()
        elif not self.ended:
            self.pump(limits.RING_TURN_BYTES)
            self._grant_more()
            self.intake.readers.refresh()

    def _grant_more(self) -> None:
        """Reserve sequences for which there was no room before: publishers wait for them, and nothing else would
        retry."""
        try:
            self.inner.ranges.reserve_space(0, 1)
        except UNWRITABLE as error:
            self.intake.blocked = error.detail

    def release(self) -> None:
        """Close the ring after its end, when this process does not use it any more."""
        self.group.past_rings.discard(self)
        self.group.retention.note_change()
        self.intake.close()
        self.ring.close()
