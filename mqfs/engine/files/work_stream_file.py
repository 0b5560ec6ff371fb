"""Open streams of a group with `deliver one`: a read takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs.engine.delivery.consumer import Claim, Consumer
from mqfs.engine.files.claiming_handle import ClaimingHandle
from mqfs.engine.files.stream_file import Writer
from mqfs.engine.log import multipart

if TYPE_CHECKING:
    from mqfs.engine.stream import Stream


class WorkStreamHandle(ClaimingHandle, Writer):
    """A stream of a `deliver one` group, opened for reading and writing."""

    node: Stream
    pending: Claim | None = None  # `ack next`: what the next read acknowledges

    def _consumer(self) -> Consumer:
        return self.node.own_consumer()

    def admits(self, stream: Stream, sequence: int) -> bool:
        return True

    @property
    def acks_at_once(self) -> bool:  # type: ignore[override]
        return self.group.settings.ack == "read"

    def fetch(self, count: int, offset: int) -> bytes | None:
        done, consumer = self.pending, self.consumer
        if done is not None and done.sequence not in self.claims:
            done = self.pending = None  # its lease ran out
        record = consumer.claim_next(self, consumer.ack_step(done) if done is not None else b"")
        if done is not None:
            self.pending = None
            consumer.acknowledged(done)
        if record is None and done is not None:
            self.group.unblock()  # what it acknowledged may have made room for a writer that waits
            record = consumer.claim_next(self)
        if record is None:
            return None
        if not self.acks_at_once:
            self.pending = self.claims[record.sequence]
        if record.headers:
            entry = self.had[1] if self.acks_at_once and self.had is not None else self.claims[record.sequence].entry
            if (long := multipart.whole(self.group.log, record, entry.first)) is not None:
                return self.last.first_of_many(long, count, offset)
        return self.last.first(record.body, count, offset)

    def watch(self, then: Callable[[], None] | None) -> None:
        ClaimingHandle.watch(self, then)
        Writer.watch(self, then)
