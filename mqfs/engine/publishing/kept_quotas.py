"""Quotas of the bytes that a user keeps: in its streams, whoever writes to them, and in its parts of transactions.

A message is charged with its body, its headers, and KEPT_MESSAGE_BYTES. A write is charged when it is admitted. Removal
has many causes, so it is not followed: streams are measured again, in portions, each second and before a write is
refused. Then the count of bodies and messages is the stream's own. Headers are counted only here, by stretches of the
log; a stretch is charged until the stream retains no message of it:

    stretches   (end 400: 9,000) (end 900: 0) (end 1200: 700)
    floor       550: the first is forgotten, the second and third are charged
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from mqfs import limits
from mqfs.errors import OverQuota
from mqfs.quotas import Quotas

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

PORTION = 256  # streams measured in a row: about a millisecond
_TICK = 8 * PORTION  # streams of all owners measured in a second; the owners take turns
STRETCHES = 64  # stretches of one stream; above it neighbours are joined


def stored(messages: int, size: int) -> int:
    """Return the charge for messages with `size` bytes of bodies and headers."""
    return size + messages * limits.KEPT_MESSAGE_BYTES


class HeaderBytes:
    """The bytes of the headers that a stream retains, by stretches of the log."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[int, int]] = deque()  # the end of each, and its bytes
        self._counted = 0  # messages below this sequence are in the stretches

    def look(self, stream: Stream) -> int:
        """Return the bytes of the stream's headers now, after counting the new messages."""
        kept, log = stream.kept, stream.kept.log
        floor, end = kept.state.floor, log.end.next
        while self._stretches and self._stretches[0][0] <= floor:
            self._stretches.popleft()
        at = max(self._counted, floor)
        step = end - at
        if not self._counted:  # messages from before the start; most streams have no headers at all
            if log.metrics.header_bytes(stream.number, at, end):
                step = step // min(STRETCHES, kept.count) + 1
            else:
                at = end
        while at < end:
            begin, at = at, min(at + step, end)
            if size := log.metrics.header_bytes(stream.number, begin, at):
                self._stretches.append((at, size))
        self._counted = end
        while len(self._stretches) > STRETCHES:
            self._join()
        return sum(size for _, size in self._stretches)

    def _join(self) -> None:
        """Join every two neighbouring stretches."""
        rows = list(self._stretches)
        pairs = [rows[n : n + 2] for n in range(0, len(rows), 2)]
        self._stretches = deque((pair[-1][0], sum(size for _, size in pair)) for pair in pairs)


class KeptBytes:
    """The bytes that the streams of one owner keep."""

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[Stream, int] = {}  # bytes as last measured plus writes since; the last measured at the end
        self._removed: dict[tuple[Group, int], int] = {}  # bytes of removed streams, in the same order
        self._headers: dict[Stream, HeaderBytes] = {}

    def charge(self, stream: Stream, size: int) -> None:
        """Charge `size` more bytes for a stream."""
        self._sizes[stream] = self._sizes.get(stream, 0) + size
        self.total += size

    def charge_removed(self, group: Group, number: int) -> None:
        """Charge the delayed messages of a removed stream, which are kept until they are due."""
        self.total -= self._removed.pop((group, number), 0)
        if not group.removed and (size := group.held.bytes_of(number)):
            self._removed[group, number] = size
            self.total += size

    def measure(self, stream: Stream) -> None:
        """Measure a stream that is not charged yet, and charge its bytes."""
        stream.kept.update_low_watermark()
        if count := stream.kept.count:
            # Stretches also cover acked messages above the floor. So retained ones are charged at most their maximum.
            size = min(self._headers.setdefault(stream, HeaderBytes()).look(stream), count * limits.HEADER_BYTES)
            size += stream.kept.size
        else:
            self._headers.pop(stream, None)
            size = 0
        self.charge(stream, stored(stream.kept.count, size) + stream.group.held.bytes_of(stream.number))

    def look(self, owner: int, first: Iterable[Stream] = ()) -> int:
        """Measure the streams in `first`, then the PORTION not measured for the longest time. Returns how many."""
        streams = [stream for stream in first if stream in self._sizes]
        streams += islice(self._sizes, PORTION)
        for stream in dict.fromkeys(streams):
            self.total -= self._sizes.pop(stream)
            if stream.state.uid == owner and not stream.removed:
                self.measure(stream)
                continue
            self._headers.pop(stream, None)
            if stream.removed:
                self.charge_removed(stream.group, stream.number)
        removed = list(islice(self._removed, PORTION))
        for group, number in removed:
            self.charge_removed(group, number)
        return len(streams) + len(removed)


class KeptQuotas:
    """The `kept` quotas of a tree, by owner."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.owners: dict[int, KeptBytes] = {}
        self._turn: list[int] = []  # owners whose streams are still to be measured

    def total_of(self, owner: int) -> int:
        """Return the bytes charged to a user, about what it keeps."""
        kept = self.owners.get(owner)
        return kept.total if kept is not None else 0

    def begin(self, group: Group) -> None:
        """Measure all streams of a group, once at its start."""
        for stream in group.streams.values():
            if self._is_bound(stream.state.uid):
                self.owners.setdefault(stream.state.uid, KeptBytes()).measure(stream)
        for number, owner in group.state.removed.items():
            if self._is_bound(owner):
                self.owners.setdefault(owner, KeptBytes()).charge_removed(group, number)

    def _is_bound(self, owner: int) -> bool:
        quota = self.quotas.of(owner)
        return quota is not None and bool(quota.kept)

    def require(self, sizes: Mapping[Stream, int], of_all: int = 0) -> None:
        """Check that the owners may keep a write. `sizes`: its bytes by stream; `of_all`: bytes that belong to all its
        streams together, checked for each owner in full. Raises OverQuota."""
        for owner, mine in _by_owner(sizes, of_all).items():
            self._check(owner, sum(mine.values()), mine)

    def charge(self, sizes: Mapping[Stream, int], of_all: int = 0) -> None:
        """Charge a write after `require` with the same arguments."""
        for owner, mine in _by_owner(sizes, of_all).items():
            for stream, size in mine.items():
                if owner in self.owners:
                    self.owners[owner].charge(stream, size)

    def stage(self, owner: int, size: int) -> None:
        """Charge bytes of a part of a transaction to its owner. Raises OverQuota."""
        self._check(owner, size, ())
        self.restage(owner, size)

    def restage(self, owner: int, size: int) -> None:
        """Charge bytes of a part without a check; below 0: release them."""
        if owner in self.owners:
            self.owners[owner].total += size

    def _check(self, owner: int, more: int, first: Iterable[Stream]) -> None:
        quota = self.quotas.of(owner)
        if quota is None or not quota.kept or not more:
            return
        kept = self.owners.setdefault(owner, KeptBytes())
        if kept.total + more > quota.kept:
            kept.look(owner, first)
        if kept.total + more > quota.kept:
            what = f"uid {owner} keeps {kept.total} bytes in its streams and parts, and would keep {more} more"
            raise OverQuota(f"{what} (expected at most {quota.kept})")

    def tick(self) -> None:
        """Measure the next streams. Called once a second."""
        self._turn, looked = self._turn or list(self.owners), 0
        while self._turn and looked < _TICK:
            owner = self._turn.pop()
            looked += self.owners[owner].look(owner) + 1


def _by_owner(sizes: Mapping[Stream, int], of_all: int) -> dict[int, dict[Stream, int]]:
    owners: dict[int, dict[Stream, int]] = {}
    for stream, size in sizes.items():
        mine = owners.setdefault(stream.state.uid, {})
        mine[stream] = size + (0 if mine else of_all)
    return owners
