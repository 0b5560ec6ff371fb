"""Changes of a group while messages lie in its ring that the log does not have yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import errors, ring
from mqfs.clock import SystemClock
from tests.ring.server.rig import ME, Rig
from tests.support.lying_disk import LyingDisk

pytestmark = pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)


@pytest.mark.parametrize("end", [[], ["ring off"], ["ttl 1h"]], ids=lambda lines: "".join(lines) or "goes on")
@pytest.mark.parametrize(
    "change", ["clear s", "depth 2", "depth 6", "consumer w backlog 9", "consumer w backlog 9 full drop-old"]
)
@pytest.mark.parametrize("depth", ["0", "4"])
@pytest.mark.parametrize("before", [0, 3])
def test_what_a_stream_counts_is_what_its_log_keeps(depth: str, change: str, end: list[str], before: int) -> None:
    rig = Rig("replay all", "sync off", f"depth {depth}")
    client = rig.attach()
    ctl, stream = rig.open("ctl", os.O_WRONLY), rig.group.streams["s"]
    client.ring.publish_many(stream.number, [b"old"] * before)
    rig.pump()
    floor = stream.state.floor
    client.ring.publish_many(stream.number, [b"new"] * 5)
    rig.result(ctl.write("".join(f"{line}\n" for line in ["full drop-old", change, *end]).encode()))
    ctl.close()
    rig.pump()
    assert stream.state.floor >= floor
    stream.kept.update_low_watermark()
    assert (stream.kept.count, stream.kept.size) == rig.group.log.metrics.count(stream.number, stream.state.floor)[:2]
    rig.stop()


def test_a_consumer_whose_own_policy_checks_writes_ends_the_ring() -> None:
    rig = Rig("full reject", "consumer w backlog 9 full drop-old")
    rig.attach()
    ctl = rig.open("ctl", os.O_WRONLY)
    rig.result(ctl.write(b"consumer v backlog 9 full drop-old\n"))
    rig.pump()
    rig.attach()
    rig.result(ctl.write(b"consumer v backlog 9 full block\n"))
    ctl.close()
    rig.pump()
    with pytest.raises(errors.Unsupported, match="a consumer's 'backlog' and 'full block'"):
        rig.attach()
    rig.stop()


def test_a_group_that_waits_for_its_replica_has_no_ring() -> None:
    """Whoever follows a ring sees what is published at once."""
    rig = Rig("replay all", disk=LyingDisk(), replica=True)
    client = rig.attach()
    client.ring.publish_many(client.number("s"), [b"x"])
    ctl = rig.open("ctl", os.O_WRONLY)
    ctl.write(b"sync replica\n")
    ctl.close()
    rig.pump()
    assert rig.own is None
    with pytest.raises(errors.MqfsError, match="not with 'sync replica'"):
        rig.attach()
    assert [body for *_, body in rig.log()] == [b"x"]
    rig.stop()


@pytest.mark.parametrize("number", [1, 200])
def test_no_idle_stream_is_removed_for_which_a_message_lies_in_the_ring(number: int) -> None:
    rig = Rig("replay all", "sync off", "idle 1ms")
    client = rig.attach()
    rig.until(lambda: SystemClock().engine_ns() > rig.group.streams["s"].unused_since_ns + 2_000_000)
    client.ring.publish_many(client.number("s"), [b"x"] * number)
    rig.tree.tick()
    rig.until(lambda: "t" not in rig.group.streams)
    assert list(rig.group.streams) == ["s"]
    rig.pump()
    assert [body for *_, body in rig.log()] == [b"x"] * number
    rig.stop()


@pytest.mark.parametrize("line", ["deliver one", "keep ring"])
def test_a_group_of_which_a_message_lies_in_the_ring_is_not_empty(line: str) -> None:
    rig = Rig("replay all", "sync off")
    client, ctl = rig.attach(), rig.open("ctl", os.O_WRONLY)
    client.ring.publish_many(client.number("s"), [b"x"])
    with pytest.raises(errors.Busy, match="'s' has 1 messages"):
        rig.result(ctl.write(f"{line}\n".encode()))
    ctl.close()
    rig.stop()


def rename_dead(rig: Rig, ctl: Any) -> None:
    rig.tree.rename(ME, rig.group, "dead", rig.group, "other")


def dead_elsewhere(rig: Rig, ctl: Any) -> None:
    rig.result(ctl.write(b"dead other\n"))


@pytest.mark.parametrize("change", [rename_dead, dead_elsewhere])
def test_dead_letters_that_lie_in_the_ring_are_not_left(change: Callable[[Rig, Any], None]) -> None:
    rig = Rig("replay last", "sync off", streams="dead")
    client, ctl = rig.attach(), rig.open("ctl", os.O_WRONLY)
    client.ring.publish_many(client.number("dead"), [b"x", b"y"])
    with pytest.raises(errors.Busy, match="'dead' has 2 dead letters"):
        change(rig, ctl)
    ctl.close()
    rig.stop()
