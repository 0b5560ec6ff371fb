"""A group with a ring is the same group: whatever is published in the ring, every file shows what it would show had the
same messages been written to the files, in the same order.

Two trees are led through the same seeded story. In one some messages are published in a ring; in the other all are
written when the first takes them. All readers, sequences and counts must be equal, step by step.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import errors, ring
from mqfs.model import Draft, Wait
from tests.ring.server.rig import ME, Client, Rig
from tests.support.campaign import seed, size
from tests.support.hand import finished
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import lowered

pytestmark = [
    pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING),
    pytest.mark.usefixtures("quiet"),
    pytest.mark.slow,
]

BIG = 1_044_480
KINDS: list[list[str]] = [
    [], ["replay all"], ["replay last"], ["replay all", "depth 7"], ["replay all", "depth 8K", "full drop-old"],
    ["deliver one", "full drop-old"], ["deliver one", "full drop-old", "depth 9"], ["replay last", "depth 3"],
    ["replay off", "depth 5"], ["replay all", "consumer c"], ["replay off", "consumer c", "consumer d t"],
    ["replay all", "ttl 1h", "bind v s"], ["bind v s", "bind w s", "bind w t"],
    ["keep ring", "replay all"], ["keep ring"], ["keep ring", "replay all", "depth 6"],
]  # fmt: skip


class Reader:
    """An open file, and what was read of it."""

    def __init__(self, handle: Any, is_json: bool) -> None:
        self.handle, self.is_json = handle, is_json
        self.wait: Wait[bytes] | None = None
        self.got: list[Any] = []

    def read(self) -> None:
        if self.wait is not None:
            return
        try:
            step = self.handle.read(2 << 20, 0)
        except errors.MqfsError as error:
            self.got.append(type(error).__name__)
            return
        if isinstance(step, Wait):
            self.wait = step
        self.collect(step)

    def collect(self, step: Any = None) -> None:
        """What a read came to."""
        if self.wait is not None:
            if not self.wait.settled:
                return
            step, self.wait = self.wait, None
        if step is None:
            return
        try:
            data = step.result() if isinstance(step, Wait) else step
        except errors.MqfsError as error:
            self.got.append(type(error).__name__)
            return
        if self.is_json and data:
            row = json.loads(data)
            self.got.append([row[name] for name in ("sequence", "stream", "body") if name in row])
        else:
            self.got.append(data[:40])

    def close(self) -> None:
        self.handle.close()


class Twins:
    """The two trees."""

    def __init__(self, number: int, lines: list[str]) -> None:
        self.dice = random.Random(number)
        first, second = (LyingDisk(), LyingDisk()) if number % 2 else (None, None)
        self.ringed, self.plain = Rig(*lines, disk=first), Rig(*lines, disk=second)
        self.lines = lines
        self.deliver_one = "deliver one" in lines
        self.clients: list[Client] = []
        self.pending: list[Callable[[], None]] = []  # what the plain tree has still to write
        self.readers: list[tuple[Reader, Reader]] = []
        self.number = 0
        self.in_ring = 0
        self.attach()

    def attach(self) -> None:
        while len(self.clients) < 2:
            self.clients.append(self.ringed.attach())

    def body(self) -> bytes:
        self.number += 1
        return b"%d " % self.number + b"x" * self.dice.choice([0, 1, 5, 30, 200])

    # ------------------------------------------------------------ steps of both

    def settle(self) -> None:
        self.ringed.pump()
        for write in self.pending:
            write()
        self.pending.clear()
        self.compare()

    def both(self, act: Callable[[Rig], Any]) -> list[Any]:
        """The same call on both, with all published before it taken."""
        self.settle()
        results = []
        for rig in (self.ringed, self.plain):
            try:
                results.append(act(rig))
            except errors.MqfsError as error:
                results.append(type(error).__name__)
            rig.run()
        self.compare()
        return results

    def compare(self) -> None:
        for rig in (self.ringed, self.plain):
            while rig.group.portions._queue:  # on a busy machine what takes long by the clock is done in portions
                rig.tree.run_timers()
        for one, other in self.readers:
            one.collect()
            other.collect()
            assert one.got == other.got, f"in the ring's tree {one.got[-3:]}, in the other {other.got[-3:]}"

    def publish(self) -> None:
        client = self.dice.choice(self.clients)
        stream = self.dice.choice(sorted(self.ringed.group.streams))
        bodies = [self.body() for _ in range(self.dice.choice([1, 1, 1, 2, 3, 20]))]
        if self.dice.random() < 0.02 and "depth 8K" not in self.lines:
            bodies = [self.body() + b"b" * (BIG - 300)]
        number = client.number(stream)
        if len(bodies) > 1 and self.dice.random() < 0.5:
            client.ring.publish_unit([Draft(1, number, body) for body in bodies], 0)
            self.pending.append(lambda: batch(self.plain, [(stream, body) for body in bodies]))
        else:
            client.ring.publish_many(number, bodies, 0)
            self.pending.append(lambda: self.plain.write(stream, *bodies))
        self.in_ring += len(bodies)
        if self.dice.random() < 0.5:
            self.settle()

    def write(self) -> None:
        stream = self.dice.choice(sorted(self.ringed.group.streams))
        body = b"" if self.dice.random() < 0.1 else self.body()  # an end mark counts as no message
        self.both(lambda rig: rig.write(stream, body))

    def put(self) -> None:
        stream, body = self.dice.choice(sorted(self.ringed.group.streams)), self.body()
        said: dict[str, Any] = {"stream": stream}
        said |= self.dice.choice([{"headers": {"a": "b"}}, {"id": f"i{self.number // 3}"}, {"priority": 3}, {}])
        self.both(lambda rig: rig.write(".put", json.dumps(said).encode() + b"\n" + body))

    def batch(self) -> None:
        streams = sorted(self.ringed.group.streams)
        rows = [(self.dice.choice(streams), self.body()) for _ in range(self.dice.randint(1, 4))]
        self.both(lambda rig: batch(rig, rows))

    def open(self) -> None:
        name = self.dice.choice(
            ["s", "s", "t", "order", ".cursor", *self.ringed.group.views, *self.ringed.group.consumers]
        )
        if self.deliver_one and name == ".cursor":
            return
        if name in self.ringed.group.consumers:
            name = f".consumers/{name}"
        if len(self.readers) > 8:
            return
        start = self.dice.choice(["first", "end", "-3"])

        def make(rig: Rig) -> Reader:
            if name == ".cursor":
                return Reader(rig.cursor(f"seek {start}", "format json"), True)
            return Reader(rig.open(name, os.O_RDONLY), False)

        one, other = self.both(make)
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
            return
        self.readers.append((one, other))

    def read(self) -> None:
        if not self.readers:
            self.open()
            return
        pair = self.dice.choice(self.readers)
        for _ in range(self.dice.choice([1, 1, 2, 30])):
            if self.dice.random() < 0.7:
                self.settle()
            for reader in pair:
                reader.read()
            self.compare()
            if pair[0].wait is not None or pair[0].got[-1:] == [b""]:
                return

    def close(self) -> None:
        if self.readers:
            pair = self.readers.pop(self.dice.randrange(len(self.readers)))
            self.settle()
            for reader in pair:
                reader.close()
            self.compare()

    def make(self) -> None:
        self.number += 1
        self.both(lambda rig: rig.create(f"new{self.number}"))

    def remove(self) -> None:
        new = [name for name in self.ringed.group.streams if name.startswith("new")]
        if new:
            name = self.dice.choice(new)
            self.both(lambda rig: rig.result(rig.tree.unlink(ME, rig.group, name)))
            self.clients.clear()
            self.ringed.until(lambda: self.ringed.own is None)
            self.attach()

    def tick(self) -> None:
        self.both(lambda rig: rig.tick())

    def step(self) -> None:
        acts = [
            (self.publish, 30), (self.write, 8), (self.put, 4), (self.batch, 4), (self.open, 8), (self.read, 30),
            (self.close, 3), (self.make, 1), (self.remove, 1), (self.tick, 3),
        ]  # fmt: skip
        self.dice.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        self.settle()
        for pair in self.readers:
            for _ in range(400):
                for reader in pair:
                    reader.read()
                if pair[0].wait is not None or pair[0].got[-1:] == [b""]:
                    break
            self.compare()
        stats = [counts(rig) for rig in (self.ringed, self.plain)]
        if "replay last" in self.lines:  # which message is not kept anyway depends on when it is looked
            for row in (*stats, *stats[0]["streams"].values(), *stats[1]["streams"].values()):
                row.pop("cut", None)
        assert stats[0] == stats[1], [(k, v, stats[1][k]) for k, v in stats[0].items() if v != stats[1][k]]
        for pair in self.readers:
            for reader in pair:
                reader.close()
        self.readers.clear()
        logs = [rig.log() for rig in (self.ringed, self.plain)]
        if len(logs[1]) and "replay off" not in self.ringed.group.settings.lines():
            kept = {sequence for sequence, _, _ in logs[0]} & {sequence for sequence, _, _ in logs[1]}
            assert [row for row in logs[0] if row[0] in kept] == [row for row in logs[1] if row[0] in kept]
        for rig in (self.ringed, self.plain):
            rig.stop()


def batch(rig: Rig, rows: list[tuple[str, bytes]]) -> None:
    frames = []
    for stream, body in rows:
        name = stream.encode()
        head = (8 + len(name) + len(body)).to_bytes(4, "little") + len(name).to_bytes(2, "little") + bytes(2)
        frames.append(head + name + body)
    rig.write(".batch", b"".join(frames))


def counts(rig: Rig) -> dict[str, Any]:
    """What `.stats` says, but for what two runs cannot share."""
    handle = rig.open(".stats")
    stats: dict[str, Any] = json.loads(finished(rig.tree, handle.read(1 << 20)))
    handle.close()
    for name in ("log_bytes", "group", "store"):
        stats.pop(name, None)
    for row in stats["consumers"].values():
        del row["oldest"]
    for row in stats["streams"].values():
        row.get("consumer", {}).pop("oldest", None)
    return stats


def test_one_order(keeper: Any) -> None:
    published = 0
    with lowered(RING_BYTES=4 << 20):
        for number in range(seed() * 10_000, seed() * 10_000 + size(2_000)):
            lines = KINDS[number // 2 % len(KINDS)]
            try:
                twins = Twins(number, lines)
                for _ in range(60):
                    twins.step()
                twins.end()
            except Exception as error:
                raise AssertionError(f"story {number} {lines}: {type(error).__name__}: {error}") from error
            finally:
                keeper("").quit()
            published += twins.in_ring
    assert published > 20 * size(2_000)
    print(f"{size(2_000)} stories, {published} messages in rings")
