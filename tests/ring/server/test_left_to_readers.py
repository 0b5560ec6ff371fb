"""Where nothing is promised to later readers, records stay in the ring until its readers have passed them.

So they are never written; but whoever else may want one finds it in the log, in its place.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from mqfs import errors, ring
from mqfs.ring.server import intake
from tests.ring.server.rig import Client, Rig
from tests.ring.server.story import SMALL_RINGS, small
from tests.support.campaign import seed, size
from tests.support.eventually import eventually
from tests.support.hand import finished
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import lowered

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.usefixtures("quiet", "keeper")]
STILL_S = 1.0  # longer than any reader is waited for


class Clock:
    """The time that the server's wait for readers goes by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(intake, "time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Follower:
    """A reader of the ring, which reads in the log what it missed. It gets every message from its begin on."""

    def __init__(self, rig: Rig, client: Client) -> None:
        self.rig, self.client, self.next = rig, client, client.ring.next
        self.consumer = client.ring.consumer(hold=True)
        self.got: list[tuple[int, bytes]] = []

    def read(self, most: int) -> int:
        self.consumer.release()
        try:
            rows = self.consumer.records(most, 0)
        except errors.FellBehind:
            self._read_log()
            return 1
        self._take([(row[0], row[6]) for row in rows])
        return len(rows)

    def _read_log(self) -> None:
        """As `RingSubscription` does: all up to the end of the ring, once that is committed."""
        end = self.client.ring.next
        self.rig.pump()
        self._take([(sequence, body) for sequence, _, body in self.rig.log() if sequence < end])

    def _take(self, rows: list[tuple[int, bytes]]) -> None:
        for sequence, body in rows:
            if sequence >= self.next:
                self.got.append((sequence, body))
                self.next = sequence + 1


def begin(*lines: str, disk: LyingDisk | None = None) -> tuple[Rig, Client]:
    """A group with a ring, of which the server knows that only the ring's readers read."""
    rig = Rig("sync off", *lines, disk=disk or LyingDisk())
    client = rig.attach()
    client.ring.publish(client.number("s"), b"first")
    rig.pump()
    return rig, client


def take(rig: Rig) -> bool:
    """As the ring's thread has it done; whether something was left."""
    rig.own.ring_log.pump(may_leave=True)
    return bool(rig.own.ring_log.intake.leaves)


def bodies(rig: Rig) -> list[bytes]:
    return [body for _, _, body in rig.log()]


def test_messages_that_all_readers_have_passed_are_counted_and_not_written(clock: Clock) -> None:
    rig, client = begin()
    one, other = Follower(rig, client), Follower(rig, rig.attach())
    number = client.number("s")
    for n in range(10):
        client.ring.publish(number, b"%d" % n)
    assert take(rig)
    assert one.read(99) == 10
    one.read(0)
    assert take(rig)
    assert client.ring.committed < client.ring.next - 1
    assert other.read(99) == 10
    other.read(0)
    assert not take(rig)
    assert client.ring.committed == client.ring.next - 1
    assert bodies(rig) == []
    assert rig.group.streams["s"].written == 11
    assert [body for _, body in one.got] == [body for _, body in other.got] == [b"%d" % n for n in range(10)]
    rig.write("s", b"after")
    assert rig.group.log.end.next == client.ring.next
    rig.stop()


@pytest.mark.parametrize("how", ["still", "file", "parked", "commit", "setting", "stop"])
def test_whoever_else_may_want_them_has_them_written(clock: Clock, how: str) -> None:
    rig, client = begin()
    follower = Follower(rig, client)
    client.ring.publish(client.number("s"), b"left")
    assert take(rig)
    assert bodies(rig) == []
    if how == "still":
        clock.now += STILL_S
        assert not take(rig)
        assert bodies(rig) == [b"left"]
    elif how == "file":
        handle = rig.open("s")
        assert bodies(rig) == [b"left"]  # where the file begins
        client.ring.publish(client.number("s"), b"next")
        assert not take(rig)
        assert finished(rig.tree, handle.read(100, 0)) == b"next"
    elif how == "parked":
        handle = rig.open("t")
        waits = handle.read(100, 0)
        assert not take(rig)
        client.ring.publish(client.number("t"), b"now")
        assert not take(rig)
        assert waits.result() == b"now"
    elif how == "commit":
        waiter = threading.Thread(target=client.ring.wait_committed, args=(client.ring.next - 1, 60.0))
        waiter.start()
        eventually(lambda: client.ring.awaited)
        assert not take(rig)
        waiter.join(60)
        assert bodies(rig) == [b"left"]
    elif how == "setting":
        rig.ctl("replay all")
        assert not take(rig)
        assert bodies(rig) == [b"left"]
    else:
        rig.own.ring_log.retire("the test says so")
        assert bodies(rig) == [b"left"]
    assert follower.got == []
    follower.consumer.close()
    rig.stop()


def test_a_slow_reader_of_a_full_ring_finds_them_in_the_log(clock: Clock) -> None:
    """It moves all the time, and passes less than an eighth of the ring in the time that it is waited for."""
    with lowered(**{**SMALL_RINGS, "RING_SEQUENCE_BLOCK": 4_096}):
        rig, client = begin()
        follower, number, count = Follower(rig, client), client.number("s"), 0
        while count < 3_000:
            try:
                client.ring.publish(number, b"%d" % count, b"", 1, 0, 0)
                count += 1
            except errors.Again:  # full
                clock.now += 0.009  # less than a reader that stands still is waited for
                follower.read(1)
                take(rig)
        assert len(rig.log()) > 0
        while follower.read(1_000):
            pass
        assert [body for _, body in follower.got] == [b"%d" % n for n in range(count)]
        rig.stop()


@pytest.mark.slow
def test_every_reader_gets_all_in_order_whatever_happens(clock: Clock, keeper: Any) -> None:
    written = published = 0
    with small():
        for number in range(seed() * 10_000, seed() * 10_000 + size(2_000)):
            dice, disk = random.Random(number), LyingDisk()
            rig, client = begin(disk=disk)
            told: dict[int, bytes] = {}
            followers: list[Follower] = []
            handle: Any = None
            for step in range(80):
                what = dice.random()
                clock.now += dice.choice([0.0, 0.0, 0.001, 0.02])
                if what < 0.4:
                    body = b"%d.%d " % (number, step) + bytes(dice.choice([0, 50, 900, 9_000]))
                    try:
                        told[client.ring.publish(client.number(dice.choice("st")), body, b"", 1, 0, 0)] = body
                    except errors.Again:
                        take(rig)
                elif what < 0.5:
                    bodies_ = [b"%d.%d.%d" % (number, step, n) for n in range(30)]
                    try:
                        last = client.ring.publish_many(client.number("s"), bodies_, 0)
                    except errors.Again as error:
                        last, bodies_ = client.ring.next - 1, bodies_[: getattr(error, "published", 0)]
                    told.update(zip(range(last - len(bodies_) + 1, last + 1), bodies_, strict=True))
                elif what < 0.7 and followers:
                    dice.choice(followers).read(dice.choice([1, 5, 100]))
                elif what < 0.85:
                    take(rig)
                elif what < 0.88 and len(followers) < 4:
                    followers.append(Follower(rig, rig.attach()))
                elif what < 0.92:
                    body = b"own %d.%d" % (number, step)
                    rig.write("s", body)
                    told[client.ring.next - 1] = body
                elif what < 0.95:
                    if handle is None:
                        handle = rig.open("s")
                    else:
                        handle.close()
                        handle = None
                else:
                    rig.tick()
            written += len(rig.log())
            published += len(told)
            for follower in followers:
                begun = follower.got[0][0] if follower.got else client.ring.next
                while follower.read(1_000):
                    pass
                if follower.got:
                    begun = min(begun, follower.got[0][0])
                assert follower.got == [(at, told[at]) for at in sorted(told) if at >= begun], f"story {number}"
            if handle is not None:
                handle.close()
            rig.stop()
            keeper("").quit()
    assert 0 < written < published
