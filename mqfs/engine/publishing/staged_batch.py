"""A part of `.txn`: what is staged, before it is committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from mqfs import errors, limits
from mqfs.engine.language.permissions import W, require
from mqfs.engine.publishing.admission import Stream
from mqfs.engine.publishing.atomic_batch import StreamTotals, require_fit
from mqfs.engine.publishing.deduplication import PutId
from mqfs.engine.publishing.kept_quotas import KeptQuotas
from mqfs.group_state import Attributes
from mqfs.log import batch
from mqfs.model import User
from mqfs.seams import Clock, Store
from mqfs.shares import Shares


class Staging:
    """Where the parts of a tree are staged, and what all of them take together and of each user."""

    def __init__(self, store: Store, kept_quotas: KeptQuotas | None) -> None:
        self.store, self.kept_quotas = store, kept_quotas
        self.parts = Shares("parts", "PARTS")
        self.bytes = Shares("bytes in parts of transactions", "STAGED_BYTES" if store.path else "MEMORY_BYTES")

    def take(self, uid: int, size: int) -> None:
        """Give a user more. Raises OverLimit, OverQuota."""
        self.bytes.take(uid, size)
        try:
            if self.kept_quotas is not None:
                self.kept_quotas.stage(uid, size)
        except errors.OverQuota:
            self.bytes.give(uid, size)
            raise

    def give(self, uid: int, size: int, *, charged: bool = True) -> None:
        """Take bytes back from a user; `charged`: its quota has them."""
        self.bytes.give(uid, size)
        if charged:
            self.charge(uid, -size)

    def charge(self, uid: int, size: int) -> None:
        """Charge a quota, or give it back where below 0; nothing is refused."""
        if self.kept_quotas is not None:
            self.kept_quotas.restage(uid, size)


class StagedBatch:
    """One part; `attributes` are its owner and mode. Raises OverLimit where no more can be opened."""

    def __init__(
        self, name: str, attributes: Attributes, streams: Mapping[str, Stream], staging: Staging, clock: Clock
    ) -> None:
        self.name, self.attributes = name, attributes
        self._streams, self._staging, self._clock = streams, staging, clock
        staging.parts.take(attributes.uid)
        try:
            self.number = staging.store.number()
            self.staged = staging.store.stage(self.number)
        except BaseException:
            staging.parts.give(attributes.uid)
            raise
        self.tallies: dict[str, StreamTotals] = {}  # by the stream's name, in the order of their places
        self.places: dict[bytes, int] = {}  # in the table of streams that its blanks mean
        self._names: list[str] = []
        self._borders = [0]  # of what is read at once
        self.messages = 0
        self.ids: dict[PutId, int] = {}  # of its messages, by their place
        self.ranked = self.committing = self.dropped = False
        self.made_ns = self.mtime_ns = clock.wall_ns()
        self.used_ns = clock.engine_ns()

    def stream(self, user: User, name: str) -> Stream:
        """A stream to be written to. Raises NotFound, Denied."""
        stream = self._streams.get(name)
        if stream is None:
            raise errors.NotFound(f"no stream {name!r} in this group")
        require(user, stream.state, W, name)
        return stream

    def add(self, user: User, packed: batch.EncodedBatch, *, ranked: bool = False, put_id: PutId | None = None) -> None:
        """Put messages into it, or none. `put_id`: of the first. Raises NotFound, Denied, Busy, OverLimit, DiskFull."""
        if self.dropped:
            raise errors.NotFound(f"part {self.name} was committed or dropped")
        if self.committing:
            raise errors.Busy(f"part {self.name} is being committed")
        names = [*self._names, *packed.fresh] if packed.fresh else self._names
        for row in packed.rows:
            self.stream(user, names[row.place])
        require_fit(self.messages + packed.messages, self.staged.size + len(packed.data))
        self._staging.take(self.attributes.uid, len(packed.data))
        try:
            self.staged.append(packed.data)
        except OSError as error:
            self._staging.give(self.attributes.uid, len(packed.data))
            raise errors.DiskFull(f"part {self.name}: {error}") from error
        if put_id is not None:
            self.ids[put_id] = self.messages
        self._count(packed)
        self.ranked = self.ranked or ranked
        self.mtime_ns = self._clock.wall_ns()
        self.used_ns = self._clock.engine_ns()

    def _count(self, packed: batch.EncodedBatch) -> None:
        for name in packed.fresh:
            self.places[name.encode()] = len(self._names)
            self._names.append(name)
            self.tallies[name] = StreamTotals()
        for row in packed.rows:
            tally = self.tallies[self._names[row.place]]
            tally.messages += row.messages
            tally.size += row.size
            tally.last = self.messages + row.last
        self.messages += packed.messages
        if self.staged.size - self._borders[-1] >= limits.UNIT_PIECE_BYTES:
            self._borders.append(self.staged.size)

    def pieces(self) -> Iterator[bytes]:
        """Its messages as blanks, read each time: they may be too many for memory."""
        for begin, end in pairwise([*self._borders, self.staged.size]):
            try:
                data = self.staged.read(begin, end - begin)
            except OSError as error:
                raise errors.DiskFailed(f"part {self.name} cannot be read back: {error}") from error
            if len(data) != end - begin:
                raise errors.DiskFailed(f"part {self.name} cannot be read back")
            yield data
