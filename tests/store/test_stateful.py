"""Any steps give the same answers from the memory store and the disk store, over stops and kills too.

Numbers may differ after a kill (a new block is begun), so sequences are compared by the message they belong to.
"""

from __future__ import annotations

import logging
import shutil
import tempfile

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mqfs.model import Draft, Kind, Record
from mqfs.store.api import Bucket
from mqfs.store.memory import MemoryBucket, MemoryStore
from mqfs.store.store import DiskStore
from tests.support import campaign
from tests.support.temp_store import SMALL, abandon, lowered

pytestmark = pytest.mark.slow

STREAMS = st.integers(16, 19)
BODIES = st.binary(max_size=40) | st.integers(0, 700).map(bytes)
HEADERS = st.sampled_from([b"", b"\x01k\x02\x00vv", b"\x01w\x01\x00v"])
NONE = -1


def with_header(bucket: Bucket, sequence: int, most: int) -> list[int]:
    found: list[int] = []
    while sequence < bucket.end.next:
        some, sequence = bucket.reader.search_headers(sequence, most, (b"\x01k",))
        found += some
    return found


class Stores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.small = lowered(**SMALL)
        self.small.__enter__()
        logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
        self.path = tempfile.mkdtemp()
        self.memory: MemoryBucket = MemoryStore().make(1, b"0")
        self.store = DiskStore(f"{self.path}/store")
        self.disk: Bucket = self.store.make(self.store.number(), b"0")
        self.pairs: list[tuple[int, int, int]] = []  # the sequence in memory, on disk, the stream
        self.floors: dict[int, int] = {}  # in memory's sequences
        self.dropped: set[int] = set()
        self.trimmed = False
        self.changes = self.base = 0
        self.now = 0
        self._set_state()

    def _set_state(self) -> None:
        self.memory.writer.state = self.disk.writer.state = lambda: b"%d" % self.changes

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)
        self.small.__exit__(None, None, None)
        logging.getLogger("mqfs.store").setLevel(logging.NOTSET)

    # ------------------------------------------------------------ steps

    @initialize(count=st.integers(0, 60), body=BODIES)
    def begin(self, count: int, body: bytes) -> None:
        for number in range(count):
            self.append(16 + number % 4, body, b"", Kind.MESSAGE, 1)

    @rule(
        stream=STREAMS,
        body=BODIES,
        headers=HEADERS,
        kind=st.sampled_from([Kind.MESSAGE, Kind.END]),
        later=st.integers(-1, 3),
    )
    def append(self, stream: int, body: bytes, headers: bytes, kind: Kind, later: int) -> None:
        self.now = max(0, self.now + later)
        body = body if kind == Kind.MESSAGE else b""
        ours, theirs = (b.writer.append(kind, stream, self.now, body, headers) for b in (self.memory, self.disk))
        self.pairs.append((ours, theirs, stream))

    @rule(drafts=st.lists(st.tuples(STREAMS, BODIES, HEADERS), min_size=1, max_size=5), change=st.booleans())
    def append_unit(self, drafts: list[tuple[int, bytes, bytes]], change: bool) -> None:
        unit = [Draft(Kind.MESSAGE, stream, body, headers) for stream, body, headers in drafts]
        if change:
            unit.append(Draft(Kind.CHANGE, 0, b"%d" % self.changes))
        ours, theirs = (b.writer.append_batch(unit, self.now) for b in (self.memory, self.disk))
        self.changes += change
        self.pairs += [(ours + n, theirs + n, stream) for n, (stream, _, _) in enumerate(drafts)]

    @rule(count=st.integers(1, 30), kind=st.sampled_from([Kind.CHANGE, Kind.ACK]))
    def change(self, count: int, kind: Kind) -> None:
        for _ in range(count):
            for bucket in (self.memory, self.disk):
                bucket.writer.append(kind, 0 if kind == Kind.CHANGE else 1, self.now, b"%024d" % self.changes)
            self.changes += 1

    @rule()
    def skip(self) -> None:
        self.memory.writer.skip()
        self.disk.writer.skip()

    @rule()
    def sync(self) -> None:
        told: list[OSError | None] = []
        self.disk.upkeep.sync(told.append)
        assert told == [None]

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), streams=st.sets(STREAMS))
    def trim(self, data: st.DataObject, streams: set[int]) -> None:
        self.trimmed = True
        for stream in streams:
            at = data.draw(st.integers(0, len(self.pairs)))
            floor = self.pairs[at][0] if at < len(self.pairs) else self.memory.end.next
            self.floors[stream] = max(self.floors.get(stream, 0), floor)
        self.dropped.add(data.draw(st.sampled_from(self.pairs))[0])
        self._trim()
        self.store.tick()

    @rule()
    def tick(self) -> None:
        self.store.tick()

    def _trim(self) -> None:
        floors = {stream: self.floors.get(stream, 0) for stream in range(16, 20)}
        for _ in self.memory.upkeep.trim(floors, self.dropped):
            pass
        self.disk.upkeep.trim(
            {s: self._on_disk(f) for s, f in floors.items()}, {d for m, d, _ in self.pairs if m in self.dropped}
        )

    @rule()
    def stop(self) -> None:
        expected = self.disk.end.next
        self.store.close()
        self._start()
        assert self.disk.end.next == expected
        assert self.disk.upkeep.damaged == 0

    @rule()
    def kill(self) -> None:
        """The page cache stays; the lock goes with the process."""
        expected, last_ns = self.disk.end.next, self.disk.end.last_ns
        abandon(self.store)
        self._start()
        assert self.disk.end.next >= expected
        assert self.disk.end.last_ns == last_ns
        assert self.disk.upkeep.damaged == 0

    def _start(self) -> None:
        self.store = DiskStore(f"{self.path}/store")
        self.disk = self.store.open(1)
        self._set_state()
        if self.trimmed:
            self._trim()

    # ------------------------------------------------------------ answers

    def _on_disk(self, sequence: int) -> int:
        """The disk's sequence that stands where that one does in memory."""
        return next((theirs for ours, theirs, _ in self.pairs if ours >= sequence), self.disk.end.next)

    def _wanted(self, ours: int, stream: int) -> bool:
        return ours >= self.floors.get(stream, 0) and ours not in self.dropped

    def _next_wanted(self, sequence: int, stream: int | None) -> int:
        for ours, _, where in self.pairs:
            if ours >= sequence and stream in (None, where) and self._wanted(ours, where):
                return ours
        return NONE

    def _both(self, sequence: int, stream: int | None) -> tuple[Record | None, Record | None]:
        """The first wanted message in each, which must be the same."""
        ours = self._next_wanted(sequence, stream)
        if ours == NONE:
            return None, None
        theirs = self._on_disk(ours)
        if stream is None:
            return self.memory.reader.scan(ours), self.disk.reader.scan(theirs)
        return self.memory.reader.find(stream, ours), self.disk.reader.find(stream, theirs)

    @invariant()
    def the_newest_agree(self) -> None:
        if self.pairs:
            self._compare(self.pairs[-1][0], None)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), stream=st.none() | STREAMS)
    def find(self, data: st.DataObject, stream: int | None) -> None:
        sequence = data.draw(st.sampled_from(self.pairs))[0]
        self._compare(sequence, stream)
        for ours, _, where in self.pairs:  # and all, in order
            if self._wanted(ours, where):
                self._compare(ours, where)

    def _compare(self, sequence: int, stream: int | None) -> None:
        mine, theirs = self._both(sequence, stream)
        if mine is None or theirs is None:
            assert mine is None
            assert theirs is None
            return
        assert (mine.stream, mine.kind, mine.body, mine.headers) == (
            theirs.stream,
            theirs.kind,
            theirs.body,
            theirs.headers,
        )
        assert mine.time_ns == theirs.time_ns
        assert self.disk.reader.locate(theirs.stream, theirs.sequence) == (theirs.sequence, len(theirs.body))
        assert self.disk.reader.first <= theirs.sequence < self.disk.end.next

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), stream=st.none() | STREAMS)
    def look_back(self, data: st.DataObject, stream: int | None) -> None:
        """Before the first unwanted one only: what is not wanted may be found or not."""
        sequence = data.draw(st.sampled_from(self.pairs))[0]
        found = self.disk.reader.before(self._on_disk(sequence), stream)
        wanted = [d for m, d, s in self.pairs if m < sequence and stream in (None, s) and self._wanted(m, s)]
        if wanted:
            assert found is not None
            assert found >= wanted[-1]
        if found is not None:
            assert found in [d for m, d, s in self.pairs if m < sequence and stream in (None, s)]

    @rule(stream=STREAMS)
    def tally(self, stream: int) -> None:
        if not self.trimmed and self.pairs:
            at = self.pairs[len(self.pairs) // 2]
            to = self.pairs[len(self.pairs) * 3 // 4]
            assert self.memory.metrics.count(stream, at[0]) == self.disk.metrics.count(stream, at[1])
            assert self.memory.metrics.count(stream, at[0], to[0]) == self.disk.metrics.count(stream, at[1], to[1])

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), most=st.sampled_from([1, 3, 100]))
    def headed(self, data: st.DataObject, most: int) -> None:
        """The messages with certain headers: the same wanted ones; some unwanted ones may be found."""
        ours, theirs, _ = data.draw(st.sampled_from(self.pairs))
        wanted = {d for m, d, s in self.pairs if self._wanted(m, s)}
        same = {m: d for m, d, _ in self.pairs}
        mine = [same[sequence] for sequence in with_header(self.memory, ours, most)]
        told = with_header(self.disk, theirs, most)
        assert told == sorted(told)
        assert [d for d in told if d in wanted] == [d for d in mine if d in wanted]

    @rule(time_ns=st.integers(0, 60))
    def at(self, time_ns: int) -> None:
        if not self.trimmed:
            ours, theirs = self.memory.reader.first_at_time(time_ns), self.disk.reader.first_at_time(time_ns)
            assert (ours, theirs) in [(m, d) for m, d, _ in self.pairs] + [(self.memory.end.next, self.disk.end.next)]

    @rule()
    def history(self) -> None:
        for bucket in (self.memory, self.disk):
            state, behind = bucket.upkeep.history()
            assert state is not None
            assert [int(r.body) for r in behind] == list(range(int(state), self.changes))

    @invariant()
    def room_is_bounded(self) -> None:
        assert self.disk.upkeep.size >= 0
        assert self.disk.end.failed is None


TestStores = seed(campaign.tree_seed())(Stores).TestCase
TestStores.settings = settings(max_examples=campaign.size(500), stateful_step_count=60, database=None)
