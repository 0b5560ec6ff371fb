"""Open streams of a group with `deliver one`: a read claims."""

from __future__ import annotations

from collections.abc import Callable

from mqfs.engine.delivery import catalog
from mqfs.engine.delivery.claims import InFlight
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.files.claiming_handle import ClaimingHandle
from mqfs.engine.files.stream_file import Writer
from mqfs.engine.log import multipart
from mqfs.engine.stream import Stream


class WorkStreamHandle(ClaimingHandle, Writer):
    """A stream of a `deliver one` group, opened for reading and writing."""

    node: Stream
    pending: InFlight | None = None  # `ack next`: what the next read acks

    def _consumer(self) -> Consumer:
        return self.node.own_consumer()

    def may_receive(self, stream: catalog.Stream, sequence: int) -> bool:
        return True

    @property
    def auto_ack(self) -> bool:  # type: ignore[override]
        return self.group.settings.ack == "read"

    @property
    def acks_next(self) -> int:  # type: ignore[override]
        return int(self.pending is not None and self.pending.sequence in self.claims)

    def fetch(self, count: int, offset: int) -> bytes | None:
        done, consumer = self.pending, self.consumer
        if done is not None and done.sequence not in self.claims:
            done = self.pending = None  # its lease ran out
        record = consumer.claim_next(self, done=done)
        self.pending = None
        if record is None and done is not None:
            self.group.unblock()  # the ack may have made room for a writer that waits
            record = consumer.claim_next(self)
        if record is None:
            return None
        self.pending = self.claims.get(record.sequence)  # none under `ack read`
        if record.headers:
            first = self.pending.entry.first if self.pending is not None else consumer.unconfirmed[self][1]
            if (long := multipart.whole(self.group.log, record, first)) is not None:
                return self.last.first_of_many(long, count, offset)
        return self.last.first(record.body, count, offset)

    def watch(self, then: Callable[[], None] | None) -> None:
        ClaimingHandle.watch(self, then)
        Writer.watch(self, then)
