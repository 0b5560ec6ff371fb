"""A seeded story: clients publish in a group's ring, the server writes, streams come and go, the disk stops or fails.

And what must hold of the log after it, whatever happened.

A client that got a sequence has its message there; one that got Stale or Again has not. What the server was
writing when it was stopped may be there or not. Nothing is there twice or without a sender, and sequences are as given.
"""

from __future__ import annotations

import json
import random
from typing import Any

from mqfs import errors
from mqfs.model import Draft
from tests.ring.server.rig import ME, Client, Rig
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import SMALL, lowered

SMALL_RINGS = {
    **SMALL,
    "SEGMENT_BYTES": 8_192,
    "RING_BYTES": 1 << 16,
    "RING_RANGE_BYTES": 2_048,
    "RING_TURN_BYTES": 8_192,
    "RING_SEQUENCE_BLOCK": 64,
}
REFUSED = (errors.DiskFull, errors.DiskFailed, errors.ReadOnly, errors.StreamFull)


def small() -> Any:
    return lowered(**SMALL_RINGS)


class Watched:
    """A native object whose calls are moments at which the server may be stopped."""

    def __init__(self, real: Any, disk: LyingDisk) -> None:
        self._real, self._disk = real, disk

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if callable(found) and self._disk.stop_at:
            self._disk._count(name)
        return found


class Story:
    """`told`: sequence -> (stream, body) of what must be there; `perhaps`: bodies of which it is not known."""

    def __init__(self, seed: int, *lines: str) -> None:
        self.dice, self.lines = random.Random(seed), lines
        self.told: dict[int, tuple[str, bytes]] = {}
        self.unnumbered: list[tuple[str, bytes]] = []
        self.perhaps: set[bytes] = set()
        self.gone: set[str] = set()  # streams that were removed, or perhaps
        self.began: set[bytes] = set()
        self.number = 0
        self.refused: set[bytes] = set()
        self.clients: list[Client] = []
        self.rig: Rig | None = None

    # ------------------------------------------------------------ a server

    def start(self, disk: LyingDisk) -> None:
        self.rig = Rig("replay all", *self.lines, disk=disk)
        for client in self.clients:
            self._attach_again(client)
        if not self.clients:
            self.clients = [self.rig.attach() for _ in range(2)]
        self._watch(disk)

    def _watch(self, disk: LyingDisk) -> None:
        own = self.rig.own if self.rig is not None else None
        if own is not None and not isinstance(own.ring_log.ring, Watched):
            own.ring_log.ring = own.ring_log.intake._ring = Watched(own.ring_log.ring, disk)
            own.ring_log.intake._consumer = Watched(own.ring_log.intake._consumer, disk)

    def _attach_again(self, client: Client) -> None:
        """What a client does whose ring is over, or whose server went away."""
        assert self.rig is not None
        try:
            again = self.rig.attach()
        except (errors.ReadOnly, errors.DiskFull, errors.Unsupported, errors.Busy):
            return
        client.attachment = again.attachment
        if again.ring.generation != client.ring.generation:
            client.ring = again.ring

    # ------------------------------------------------------------ what happens

    def run(self, steps: int) -> None:
        """May end by liar.Stopped."""
        assert self.rig is not None
        for _ in range(steps):
            self.step()
            assert self.rig.disk is not None
            self._watch(self.rig.disk)  # type: ignore[arg-type]

    def step(self) -> None:
        acts = [
            (self.publish, 30), (self.unit, 8), (self.many, 8), (self.big, 3), (self.write, 14), (self.put, 5),
            (self.batch, 5), (self.pump, 15), (self.tick, 5), (self.make, 1), (self.remove, 1), (self.mode, 1),
        ]  # fmt: skip
        act = self.dice.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
        act()

    def body(self, size: int = -1) -> bytes:
        self.number += 1
        body = b"%d " % self.number + b"x" * (self.dice.randint(0, 120) if size < 0 else size)
        self.began.add(body)
        return body

    def stream(self) -> str:
        assert self.rig is not None
        return self.dice.choice(sorted(self.rig.group.streams))

    def _in_ring(self, publish: Any, rows: list[tuple[str, bytes]], *, partly: bool = False) -> None:
        """`publish(client, numbers)` returns the last one's sequence."""
        client = self.dice.choice(self.clients)
        assert self.rig is not None
        try:
            numbers = [client.number(stream) for stream, _ in rows]
            last = publish(client.ring, numbers)
        except (errors.Stale, errors.NotFound) as error:
            done = getattr(error, "published", 0)
            self.unnumbered += rows[:done]
            self._attach_again(client)
        except errors.Again as error:  # full, or no sequences: both end when the server takes
            self.unnumbered += rows[: getattr(error, "published", 0)]
        except (errors.DiskFailed, errors.DiskFull, errors.Denied):
            pass
        else:
            if partly:
                self.unnumbered += rows
            else:
                for sequence, row in enumerate(rows, last - len(rows) + 1):
                    assert sequence not in self.told, f"{sequence} was given twice"
                    self.told[sequence] = row

    def publish(self) -> None:
        row = self.stream(), self.body()
        self._in_ring(lambda ring, numbers: ring.publish(numbers[0], row[1], b"", 1, 0, 0), [row])

    def big(self) -> None:
        row = self.stream(), self.body(20_000)
        self._in_ring(lambda ring, numbers: ring.publish(numbers[0], row[1], b"", 1, 0, 0), [row])

    def unit(self) -> None:
        rows = [(self.stream(), self.body()) for _ in range(self.dice.randint(2, 5))]
        self._in_ring(
            lambda ring, numbers: ring.publish_unit(
                [Draft(1, n, body) for n, (_, body) in zip(numbers, rows, strict=True)], 0
            ),
            rows,
        )

    def many(self) -> None:
        rows = [(self.stream(), self.body()) for _ in range(self.dice.randint(2, 60))]
        self._in_ring(
            lambda ring, numbers: ring.publish_pairs(
                {row[0]: number for row, number in zip(rows, numbers, strict=True)}, rows, 1 << 20, 0
            ),
            rows,
            partly=True,
        )

    def _by_server(self, file: str, data: bytes, rows: list[tuple[str, bytes]]) -> None:
        assert self.rig is not None
        bodies = {body for _, body in rows}
        self.perhaps |= bodies
        try:
            self.rig.write(file, data)
        except REFUSED:
            self.refused |= bodies  # then it is not there
        else:
            self.unnumbered += rows
        self.perhaps -= bodies

    def write(self) -> None:
        row = self.stream(), self.body()
        self._by_server(*row, [row])

    def put(self) -> None:
        row = self.stream(), self.body()
        said = {
            "stream": row[0],
            "headers": {"a": "b"},
            **({"id": f"i{self.number}"} if self.dice.random() < 0.5 else {}),
        }
        self._by_server(".put", json.dumps(said).encode() + b"\n" + row[1], [row])

    def batch(self) -> None:
        rows = [(self.stream(), self.body()) for _ in range(self.dice.randint(2, 4))]
        frames = []
        for stream, body in rows:
            name = stream.encode()
            size = 8 + len(name) + len(body)
            frames.append(size.to_bytes(4, "little") + len(name).to_bytes(2, "little") + bytes(2) + name + body)
        self._by_server(".batch", b"".join(frames), rows)

    def pump(self) -> None:
        assert self.rig is not None
        self.rig.pump()

    def tick(self) -> None:
        assert self.rig is not None
        self.rig.tick()

    def make(self) -> None:
        assert self.rig is not None
        try:
            self.number += 1
            self.rig.create(f"new{self.number}")
        except REFUSED:
            pass

    def remove(self) -> None:
        assert self.rig is not None
        new = [name for name in self.rig.group.streams if name.startswith("new")]
        if new:
            name = self.dice.choice(new)
            self.gone.add(name)
            try:
                self.rig.result(self.rig.tree.unlink(ME, self.rig.group, name))
            except REFUSED:
                pass

    def mode(self) -> None:
        assert self.rig is not None
        try:
            node = self.rig.group.streams[self.stream()]
            self.rig.result(self.rig.tree.setattr(ME, node, mode=self.dice.choice([0o666, 0o660])))
        except REFUSED:
            pass

    # ------------------------------------------------------------ what must hold

    def kill(self) -> None:
        """The server is gone. Nothing it held stays."""
        assert self.rig is not None
        disk = self.rig.disk
        assert isinstance(disk, LyingDisk)
        disk.stop_at = disk.fail_at = 0
        self.perhaps |= self.refused  # it may be in the ring, and who knew that it was refused is gone
        self.rig.kill()

    def check(self) -> None:
        """With all taken."""
        assert self.rig is not None
        self.rig.pump()
        self.rig.tick()
        rows = self.rig.log()
        own = self.rig.own
        if own is not None and not own.ring_log.why:
            assert own.ring_log.ring.slots()[0][2] == own.ring_log.ring.tail, "its room is not given back"
        assert self.rig.group.log.upkeep.damaged == 0
        assert self.rig.rings._cooldown == {}, "no client wrote nonsense"
        bodies = [body for _, _, body in rows]
        assert len(set(bodies)) == len(bodies), f"twice: {[b for b in set(bodies) if bodies.count(b) > 1][:5]}"
        assert set(bodies) <= self.began
        found = {sequence: (stream, body) for sequence, stream, body in rows}
        for sequence, row in self.told.items():
            if row[0] not in self.gone:
                assert found.get(sequence) == row, (
                    f"{sequence}: given to {short(row)}, the log has {short(found.get(sequence))}"
                )
        there = {(stream, body) for _, stream, body in rows}
        lost = [short(row) for row in self.unnumbered if row[0] not in self.gone and row not in there]
        assert not lost, f"lost: {lost[:5]}"
        known = {body for _, body in self.told.values()} | {body for _, body in self.unnumbered} | self.perhaps
        strange = [body[:20] for body in bodies if body not in known]
        assert not strange, f"they were refused, yet there they are: {strange[:5]}"


def short(row: tuple[str, bytes] | None) -> Any:
    return row and (row[0], row[1][:12])
