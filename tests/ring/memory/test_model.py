"""The ring in one process against its semantics in a page: a list of records and a position for each consumer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqfs import errors
from mqfs.records.record import padded
from mqfs.ring import attach, create

pytestmark = pytest.mark.slow

SIZE = 1 << 16
SLACK = SIZE // 16  # what a consumer that releases by itself may hold back
BODIES = st.one_of(st.binary(max_size=40), st.integers(0, 30_000).map(bytes))
NUMBERS = {"s": 7, "t": 2**32 - 1}
STREAMS = st.integers(0, 2**32 - 1)


class Reader:
    def __init__(self, consumer: Any, at: int, gates: bool, hold: bool) -> None:
        self.consumer, self.at, self.gates, self.hold, self.released = consumer, at, gates, hold, at


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rings = [create(SIZE, sequence=5)]
        self.rings.append(attach(self.rings[0].fileno()))
        self.records: list[tuple[int, int, int, bytes, bytes]] = []  # sequence, stream, kind, headers, body
        self.ends = [0]  # position behind each record
        self.sequence = 4
        self.readers: list[Reader] = []

    def room(self, behind: int) -> int:
        gating = [self.ends[reader.released] for reader in self.readers if reader.gates]
        return min(gating, default=1 << 60) + SIZE - behind - self.ends[-1]

    def took(self, drafts: list[tuple[int, int, bytes, bytes]]) -> None:
        for kind, stream, body, headers in drafts:
            self.sequence += kind <= 2
            self.records.append((self.sequence, stream, kind, headers, body))
            self.ends.append(self.ends[-1] + padded(32 + len(body) + len(headers)))

    def publish(self, publish: Any, drafts: list[tuple[int, int, bytes, bytes]]) -> None:
        total = sum(padded(32 + len(body) + len(headers)) for _, _, body, headers in drafts)
        try:
            last = publish()
        except errors.Again:
            assert total > self.room(SLACK)
        except errors.OverLimit:
            assert total > SIZE // 2
        else:
            assert total <= min(self.room(0), SIZE // 2)
            self.took(drafts)
            assert last == (self.sequence if drafts else 0)

    @rule(which=st.integers(0, 1), kind=st.integers(1, 6), stream=STREAMS, body=BODIES, headers=st.binary(max_size=40))
    def publish_one(self, which: int, kind: int, stream: int, body: bytes, headers: bytes) -> None:
        ring = self.rings[which]
        self.publish(lambda: ring.publish(stream, body, headers, kind, 0, 0), [(kind, stream, body, headers)])

    @rule(which=st.integers(0, 1), bodies=st.lists(st.binary(max_size=90), max_size=80), stream=STREAMS)
    def publish_many(self, which: int, bodies: list[bytes], stream: int) -> None:
        ring = self.rings[which]
        self.publish(lambda: ring.publish_many(stream, bodies, 0), [(1, stream, body, b"") for body in bodies])

    @rule(which=st.integers(0, 1), body=BODIES, stream=st.sampled_from(["s", "t", "unknown"]))
    def publish_now(self, which: int, body: bytes, stream: str) -> None:
        last = self.rings[which].publish_now(NUMBERS, stream, body)
        if last is None:
            is_near = any(not reader.gates for reader in self.readers)  # it would wait for that one
            assert not body or stream == "unknown" or is_near or padded(32 + len(body)) > self.room(SLACK)
        else:
            self.publish(lambda: last, [(1, NUMBERS[stream], body, b"")])

    @rule(which=st.integers(0, 1), pairs=st.lists(st.tuples(st.sampled_from(["s", "t"]), st.binary(max_size=90))))
    def publish_pairs(self, which: int, pairs: list[tuple[str, bytes]]) -> None:
        ring = self.rings[which]
        if not all(body for _, body in pairs):
            assert ring.publish_pairs(NUMBERS, pairs, 90, 0) is None
        else:
            drafts = [(1, NUMBERS[stream], body, b"") for stream, body in pairs]
            self.publish(lambda: ring.publish_pairs(NUMBERS, pairs, 90, 0), drafts)

    @rule(
        which=st.integers(0, 1), drafts=st.lists(st.tuples(st.integers(1, 6), STREAMS, BODIES, st.binary(max_size=9)))
    )
    def publish_unit(self, which: int, drafts: list[tuple[int, int, bytes, bytes]]) -> None:
        ring = self.rings[which]
        self.publish(lambda: ring.publish_unit(drafts, 0), drafts)

    @precondition(lambda self: len(self.readers) < 4)
    @rule(which=st.integers(0, 1), gates=st.booleans(), hold=st.booleans(), wait=st.sampled_from(["spin", "block"]))
    def join(self, which: int, gates: bool, hold: bool, wait: Any) -> None:
        consumer = self.rings[which].consumer(gates=gates, hold=hold, wait=wait)
        assert consumer.position == self.ends[-1]
        self.readers.append(Reader(consumer, len(self.records), gates, hold))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), most=st.integers(1, 40), way=st.sampled_from(["records", "bodies", "range"]))
    def read(self, data: st.DataObject, most: int, way: str) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        there = self.records[reader.at :]
        overtaken = self.ends[-1] - self.ends[reader.at] > SIZE
        if overtaken:
            assert not reader.gates
            with pytest.raises(errors.FellBehind):
                reader.consumer.records(1, 0)
            reader.at = reader.released = len(self.records)
            return
        if way == "records":
            found = reader.consumer.records(most, 0)
            assert [(r[0], r[2], r[3], r[5], r[6]) for r in found] == there[:most]
            reader.at += len(found)
        elif way == "bodies":
            messages = [number for number, record in enumerate(there, 1) if record[2] == 1]
            wanted = messages[:most]
            assert reader.consumer.bodies(most, 0) == [there[number - 1][4] for number in wanted]
            reader.at += wanted[-1] if len(wanted) == most else len(there)
        else:
            before, data_there = reader.at, reader.consumer.range(most * 100, 0)
            assert (data_there is None) == (not there)
            reader.at = self.ends.index(self.ends[reader.at] + len(data_there or b""))
            assert len(data_there or b"") <= max(most * 100, self.ends[before + 1] - self.ends[before] if there else 0)
        if not reader.hold:
            reader.released = reader.at

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.consumer.release()
        reader.released = reader.at

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.consumer.skip()
        reader.at = reader.released = len(self.records)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.consumer.close()
        self.readers.remove(reader)

    @invariant()
    def positions(self) -> None:
        assert self.rings[0].tail == self.ends[-1]
        assert len(self.rings[0].slots()) == len(self.readers)
        for reader in self.readers:
            assert reader.consumer.position == self.ends[reader.at]

    def teardown(self) -> None:
        for reader in self.readers:
            with contextlib.suppress(errors.MqfsError):
                reader.consumer.close()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40)
