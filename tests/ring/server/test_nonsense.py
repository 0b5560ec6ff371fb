"""An attached client writes nonsense into the ring: the server keeps running, valid records of others are kept.

What a client may not publish but can, words of the head, and noise over the records. Seeded; each story on a store in
memory or on a disk in memory. The server's time and what it keeps are bounded.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import errors, limits, ring
from mqfs.model import Draft
from tests.ring.server.rig import Client, Rig
from tests.ring.server.story import small
from tests.store.script import PATH
from tests.support.campaign import seed, size
from tests.support.lying_disk import LyingDisk

pytestmark = [
    pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING),
    pytest.mark.usefixtures("quiet"),
]

HEAD = struct.Struct("<IIQqIBBH")
# Words of mqfs/ring/ring.h, by their place.
WORDS = {
    "retired": 56, "final": 64, "lock": 128, "recovered": 132, "joined": 136, "bound": 144, "state0.tail": 152,
    "state0.sequence": 160, "state0.time": 168, "state1.tail": 176, "state1.sequence": 184, "state1.time": 192,
    "tail": 256, "reserved": 264, "data": 384, "space": 512, "committed": 640, "commit": 648, "seat0.state": 768,
    "seat0.position": 776, "seat1.state": 896, "seat1.position": 904,
}  # fmt: skip
SHORT = ("retired", "lock", "recovered", "joined", "seat0.state", "seat1.state")
WORST_S = 8.0  # of the processor, that one call of the server may take


class Spoiler:
    """The memory of a ring, and what one may do to it."""

    def __init__(self, client: Client, dice: random.Random) -> None:
        self.client, self.ring, self.dice = client, client.ring, dice
        self.memory = mmap.mmap(client.ring.fileno(), ring.HEAD_BYTES + client.ring.size)

    def close(self) -> None:
        self.memory.close()

    # ------------------------------------------------------------ records that a client may not publish

    def refusable(self, stream: int) -> None:
        """Whole records, one of them wrong."""
        dice, ours = self.dice, self.ring
        act: Callable[[], object] = dice.choice([
            lambda: ours.publish(stream, b"!kind", b"", dice.randint(2, 6), 0, 0),
            lambda: ours.publish(stream, b"!headers", b"\x01abc", 1, 0, 0),
            lambda: ours.publish(dice.choice([0, 1, 15, 999, 2**32 - 1]), b"!stream", b"", 1, 0, 0),
            lambda: ours.publish(stream, b"!own", b"", 1, 8, 0),
            lambda: ours.publish(stream, b"!flags", b"", 1, dice.choice([4, 16, 128, 255]), 0),
            lambda: ours.publish(stream, b"", b"", 1, 0, 0),
            lambda: ours.publish_unit([Draft(1, stream, b"!unit"), Draft(2, stream, b"")], 0, 8),
        ])  # fmt: skip
        act()

    def changed(self, stream: int) -> None:
        """A whole record with another head, its CRC right or wrong. Not with the number of another's record: that were
        as good as overwriting it."""
        at = self.ring.tail
        self.ring.publish(stream, b"!changed" + bytes(self.dice.randint(0, 40)), b"", 1, 0, 0)
        place = ring.HEAD_BYTES + (at & (self.ring.size - 1))
        parts = list(HEAD.unpack_from(self.memory, place))
        which = self.dice.choice([0, 1, 2, 2, 3, 4, 5, 6, 7])
        now = time.time_ns()
        moment = self.dice.choice([now + 10**18, now - 10**12, 1, 0, -1, -(2**63), 2**63 - 1])
        wild = {0: 31, 1: 0, 2: parts[2] + self.dice.choice([-1, 10**6, 2**62]), 3: moment}
        parts[which] = wild.get(which, self.dice.getrandbits((8, 8, 16)[max(which - 5, 0)]))
        if which:
            size = parts[0]
            whole = bytearray(HEAD.pack(*parts) + self.memory[place + 32 : place + size])
            crc = ring.crc32c(bytes(whole[:4]) + bytes(whole[8:]))
            parts[1] = crc if which != 1 else crc ^ 1
        self.memory[place : place + 32] = HEAD.pack(*parts)

    # ------------------------------------------------------------ worse

    def word(self) -> None:
        name = self.dice.choice(sorted(WORDS))
        old = int.from_bytes(self.memory[WORDS[name] : WORDS[name] + 8], "little")
        new = self.dice.choice([0, 1, 7, 8, old + 8, old - 8, old + (1 << 20), 2**63, 2**64 - 1, 2**64 - 8])
        size = 4 if name in SHORT else 8
        self.memory[WORDS[name] : WORDS[name] + size] = (new % (1 << (8 * size))).to_bytes(size, "little")

    def noise(self) -> None:
        begin = ring.HEAD_BYTES + self.dice.randrange(self.ring.size)
        count = min(self.dice.choice([1, 8, 100, 5_000, self.ring.size]), len(self.memory) - begin)
        self.memory[begin : begin + count] = self.dice.choice(
            [bytes(count), self.dice.randbytes(count), b"\xff" * count, self.look_alike(count)]
        )

    def look_alike(self, count: int) -> bytes:
        """Everywhere what looks like the head of a large record."""
        head = HEAD.pack(60_000, 0, self.ring.next or 1, time.time_ns(), 16, 1, 0, 0)
        return (head[:24] * (count // 24 + 1))[:count]

    def head_noise(self) -> None:
        self.memory[56:2_000] = self.dice.randbytes(1_944)


def assert_times(rig: Rig) -> None:
    """No record of the log is before the one before it, or ahead of the clock by more than may be."""
    bucket, at, last = rig.group.log.bucket, 0, 0
    while (record := bucket.reader.scan(at)) is not None:
        assert last <= record.time_ns <= time.time_ns() + 10**9
        at, last = record.sequence + 1, record.time_ns


def made(number: int) -> Rig:
    return Rig("replay all", disk=LyingDisk() if number % 2 else None)


def timed(rig: Rig, act: Callable[..., object], *arguments: Any) -> None:
    began = time.process_time()
    act(*arguments)
    rig.run()
    assert time.process_time() - began < WORST_S


@pytest.mark.slow
def test_records_that_may_not_be_published(keeper: Any) -> None:
    """Nobody else loses anything, in the ring or by files; sequences stay as they were given."""
    spoilt = 0
    with small():
        for number in range(seed() * 1_000, seed() * 1_000 + size(1_500)):
            dice = random.Random(number)
            rig = made(number)
            good, bad = rig.attach(), rig.attach()
            stream = good.number("s")
            spoiler = Spoiler(bad, dice)
            told: dict[int, tuple[str, bytes]] = {}
            written = []
            for turn in range(dice.randint(1, 40)):
                row = "s", b"good %d" % turn
                what = dice.random()
                try:
                    if what < 0.5:
                        told[good.ring.publish(stream, row[1], b"", 1, 0, 0)] = row
                    elif what < 0.6:
                        rig.write(*row)
                        written.append(row)
                    elif what < 0.8:
                        timed(rig, rig.pump)
                    elif what < 0.95:
                        spoiler.refusable(stream)
                    else:
                        if dice.random() < 0.5:
                            rig.pump()
                        spoiler.changed(stream)
                        if dice.random() < 0.3:  # it is all that is looked at; others publish behind it, unaware
                            rig.own.ring_log.intake.take()
                except errors.Stale:
                    break
            timed(rig, rig.pump)
            timed(rig, rig.tick)
            rows = rig.log()
            found = {sequence: (name, body) for sequence, name, body in rows}
            assert_times(rig)
            lost = {sequence: row for sequence, row in told.items() if found.get(sequence) != row}
            assert not lost, f"story {number}: {lost}"
            bodies = [body for _, _, body in rows]
            assert all(body in bodies for _, body in written), f"story {number}"
            assert len(set(bodies)) == len(bodies) or b"!changed" in b"".join(bodies)
            spoilt += rig.own is None
            rig.write("s", b"and on")
            assert rig.log()[-1][1:] == ("s", b"and on")
            spoiler.close()
            rig.stop()
            keeper("").quit()
    assert spoilt > size(1_500) // 4


@pytest.mark.slow
def test_words_and_noise(keeper: Any) -> None:
    """Whatever is in the ring, the server answers in time, and the group is as good as new with the next one."""
    with small():
        for number in range(seed() * 1_000, seed() * 1_000 + size(800)):
            dice = random.Random(number)
            rig = made(number)
            good, bad = rig.attach(), rig.attach()
            stream = good.number("s")
            spoiler = Spoiler(bad, dice)
            follower = bad.ring.consumer()
            written = []
            try:
                for turn in range(dice.randint(1, 30)):
                    act = dice.random()
                    try:
                        if act < 0.3 and not good.ring.retired:
                            good.ring.publish(
                                stream, b"g %d" % turn + bytes(dice.choice([1, 1_000, 9_000])), b"", 1, 0, 0
                            )
                        elif act < 0.4:
                            body = b"w %d" % turn
                            timed(rig, rig.write, "s", body)
                            written.append(body)
                        elif act < 0.6:
                            timed(rig, rig.pump)
                        elif act < 0.7:
                            timed(rig, rig.tick)
                        else:
                            dice.choices([spoiler.word, spoiler.noise, spoiler.head_noise], [6, 3, 1])[0]()
                    except (errors.Stale, errors.Again, errors.BadRing, errors.Disconnected):
                        pass
                timed(rig, rig.pump)
                timed(rig, rig.tick)
                bodies = [body for _, _, body in rig.log()]
                assert all(body in bodies for body in written)
                assert rig.group.log.end.next < 1 << 32, "the group's sequences were burnt"
                rig.write("s", b"and on")
                assert rig.log()[-1][1:] == ("s", b"and on")
                if rig.own is not None:
                    timed(rig, rig.own.ring_log.retire, "the test is over")
                again = rig.attach()
                rig.rings._cooldown.clear()
                again.ring.publish(stream, b"again", b"", 1, 0, 1.0)
                rig.pump()
                assert rig.log()[-1][1:] == ("s", b"again")
            except BaseException as error:
                if isinstance(error, errors.Unsupported):
                    continue
                raise AssertionError(f"story {number}: {type(error).__name__}: {error}") from error
            finally:
                del follower
                spoiler.close()
                timed(rig, rig.stop)
                keeper("").quit()


@pytest.mark.parametrize("moment", [1, 0, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", ["first", "behind another", "state"])
def test_a_forged_time_is_no_other_messages(keeper: Any, moment: int, place: str) -> None:
    """In a group with a `ttl` nothing expires by it, and nothing lives longer."""
    rig = Rig("replay all", "ttl 1h", disk=LyingDisk())
    rig.write("s", b"before")
    client = rig.attach()
    spoiler = Spoiler(client, random.Random(0))
    if place == "state":
        for name in ("state0.time", "state1.time"):
            spoiler.memory[WORDS[name] : WORDS[name] + 8] = struct.pack("<q", moment)
        rig.write("s", b"own")
    else:
        if place == "behind another":
            client.ring.publish(16, b"another's")
        at = ring.HEAD_BYTES + client.ring.tail
        client.ring.publish(16, b"forged")
        whole = bytearray(spoiler.memory[at : at + 38])
        whole[16:24] = struct.pack("<q", moment)
        whole[4:8] = ring.crc32c(bytes(whole[:4] + whole[8:])).to_bytes(4, "little")
        spoiler.memory[at : at + 38] = whole
        client.ring.publish(16, b"behind it", b"", 1, 0, 0)
    rig.pump()
    rig.write("s", b"after")
    assert_times(rig)
    shown = rig.cursor("seek first", "until end", "format each", "select s")
    bodies = [body for _ in range(12) if (body := shown.read(4_096))]
    wanted = {
        "state": [b"own"],
        "first": [b"forged", b"behind it"],
        "behind another": [b"another's", b"forged", b"behind it"],
    }[place]
    if moment > 0 and b"forged" in wanted and moment > 2**60:
        wanted.remove(b"forged")
    assert bodies == [b"before", *wanted, b"after"]
    spoiler.close()
    shown.close()
    rig.stop()


def test_quarantine_and_the_rest(keeper: Any) -> None:
    """Bytes go to quarantine; after a number of times the group has no ring for a while."""
    disk = LyingDisk()
    rig = Rig("replay all", disk=disk)
    for turn in range(limits.RING_CORRUPT):
        client = rig.attach()
        client.ring.publish(16, b"nonsense %d" % turn, b"headers", 1, 0, 0)
        client.ring.publish(16, b"good", b"", 1, 0, 0)
        rig.pump()
    with pytest.raises(errors.Unsupported, match="corrupt"):
        rig.attach()
    rig.write("s", b"by file")
    assert [body for _, _, body in rig.log()] == [b"good"] * 3 + [b"by file"]
    kept = b"".join(disk.view(f"{PATH}/quarantine/{name}") for name in disk.listdir(f"{PATH}/quarantine"))
    assert all(b"nonsense %d" % turn in kept for turn in range(limits.RING_CORRUPT))
    rig.stop()


@pytest.mark.slow
def test_a_flood_of_nonsense(keeper: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A whole ring of records that may not be, and of what looks like heads: time, log and quarantine stay small."""
    logging.disable(logging.NOTSET)
    for number in range(3):
        disk = LyingDisk()
        rig = Rig("replay all", disk=disk)
        client = rig.attach()
        spoiler = Spoiler(client, random.Random(number))
        if number == 0:
            client.ring.publish_many(999, [b"x"] * 300_000, 0)
        elif number == 1:
            client.ring.publish_many(16, [bytes(1_000_000)] * 15, 0)
            spoiler.memory[ring.HEAD_BYTES :] = spoiler.look_alike(client.ring.size)
        else:
            client.ring.publish_many(16, [bytes(1_000_000)] * 15, 0)
            spoiler.memory[ring.HEAD_BYTES :] = os.urandom(client.ring.size)
        caplog.clear()
        timed(rig, rig.pump)
        assert len(caplog.records) < 40
        sizes = [len(disk.view(f"{PATH}/quarantine/{name}")) for name in disk.listdir(f"{PATH}/quarantine")]
        assert 0 < sum(sizes) <= limits.RING_RANGE_BYTES
        assert len(sizes) < 40
        spoiler.close()
        rig.stop()
        keeper("").quit()


@pytest.mark.parametrize("sequence", [1, 2**40, 2**62, 2**64 - 2])
def test_numbers_that_nobody_may_give(keeper: Any, sequence: int) -> None:
    """The server's own write gets the number that is next, whatever the ring says."""
    rig = Rig("replay all")
    client = rig.attach()
    for turn in range(3):
        client.ring.publish(16, b"good %d" % turn)
    rig.pump()
    spoiler = Spoiler(client, random.Random(0))
    for name in ("state0.sequence", "state1.sequence"):
        spoiler.memory[WORDS[name] : WORDS[name] + 8] = sequence.to_bytes(8, "little")
    rig.write("s", b"own")
    rig.write("s", b"and on")
    assert [sequence for sequence, _, _ in rig.log()] == [1, 2, 3, 4, 5]
    assert rig.log()[-2][2] == b"own"
    spoiler.close()
    rig.stop()
