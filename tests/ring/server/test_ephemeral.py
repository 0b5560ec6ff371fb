"""Messages for readers of the ring alone, among those for the log: the log has the others, in their places."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from mqfs import ring
from tests.ring.server.rig import Rig
from tests.support.calls import calls_once
from tests.support.campaign import seed, size
from tests.support.lying_disk import LyingDisk

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.usefixtures("quiet", "keeper")]
CALLS = 2_000  # of functions of Python, in which a turn of the ring is taken


def test_both_by_turns_take_the_server_no_longer() -> None:
    """As many as one turn may have: other users wait for the end of it."""
    taken: dict[str, int] = {}
    for kind in ("plain", "by turns", "ephemeral"):
        rig = Rig("replay all", disk=LyingDisk())
        client = rig.attach()
        rig.own.follower.stop()
        for number in range(20_000):
            flags = ring.EPHEMERAL if kind == "ephemeral" or (kind == "by turns" and number % 2) else 0
            client.ring.publish(16, b"x", b"", 1, flags)
        taken[kind] = calls_once(rig.own.ring_log.pump)
        assert rig.group.log.end.next == 20_001
        rig.stop()
    assert max(taken.values()) < CALLS, taken


@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_the_log_has_the_others_in_their_places(kept: str) -> None:
    dice = random.Random(seed())
    for _ in range(size(60)):
        rig = Rig("replay all", disk=LyingDisk()) if kept == "disk" else Rig("replay all")
        client, bodies = rig.attach(), (b"%d" % number + bytes(number % 9) for number in count())
        rig.own.follower.stop()
        wanted: list[tuple[int, str, bytes]] = []
        written = {"s": 0, "t": 0}

        def note(stream: str, body: bytes, last: int, wanted: Any = wanted, written: Any = written) -> None:
            written[stream] += 1
            wanted.append((last, stream, body))

        for _ in range(dice.randint(1, 40)):
            what, stream, body = dice.random(), dice.choice("st"), next(bodies)
            if what < 0.5:
                client.ring.publish(client.number(stream), body, b"", 1, ring.EPHEMERAL)
                written[stream] += 1
            elif what < 0.75:
                note(stream, body, client.ring.publish(client.number(stream), body))
            elif what < 0.85:
                batch = [(stream, next(bodies)) for stream in dice.choices("st", k=dice.randint(2, 4))]
                last = client.ring.publish_unit([(1, client.number(stream), body) for stream, body in batch])
                for number, (stream, body) in enumerate(batch, last - len(batch) + 1):
                    note(stream, body, number)
            elif what < 0.95:
                rig.write(stream, body)
                note(stream, body, client.ring.next - 1)
            else:
                rig.pump()
        rig.pump()
        assert rig.log() == wanted
        assert {name: stream.written for name, stream in rig.group.streams.items()} == written
        assert rig.group.log.end.next == client.ring.next
        rig.stop()
