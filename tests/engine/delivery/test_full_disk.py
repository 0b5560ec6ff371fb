"""What a consumer cannot record on a full disk is done once there is room."""

from __future__ import annotations

import errno
import os

import pytest

from mqfs.errors import MqfsError
from mqfs.model import Wait
from tests.engine.publishing.test_crash import Lying
from tests.support.lying_disk import LyingDisk
from tests.support.queues import BIG, drain, say, waits


def scene(disk: LyingDisk, *lines: str) -> Lying:
    q = Lying(disk)
    q.stream("s")
    q.ctl("sync off", *lines)
    return q


def fail(disk: LyingDisk, call: int = 1) -> None:
    """There is no room for one of the next writes."""
    disk.failed.clear()
    disk.fail_at, disk.fail_with = disk.calls + call, errno.ENOSPC


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("after", [0, 2])
def test_a_message_that_nobody_read_is_not_acked(times: int, retries: int, after: int) -> None:
    """With `ack read`, where its reader is lost before it has it. `after`: messages that others read meanwhile."""
    disk = LyingDisk()
    q = scene(disk, "deliver one", "ack read", f"retries {retries}")
    lost = q.taker()
    parked = lost.read(BIG)
    q.write("s", b"first")
    assert parked.result() == b"first"
    lost.push_back(b"first")
    fail(disk)
    lost.close()
    assert disk.failed
    other = q.taker()
    for number in range(after):
        q.write("s", b"%d" % number)
        assert other.read(BIG) == b"%d" % number
    for _ in range(times - 1):
        fail(disk)
        q.pass_time(1)
        assert disk.failed
    q.group.retention.trim(always=True)
    assert waits(other)
    step = other.read(BIG)
    assert isinstance(step, Wait)
    q.pass_time(1)
    if retries:
        assert step.cancel()
        assert q.taker("dead").read(BIG) == b"first"
    else:
        assert step.result() == b"first"
    assert q.queue()["waiting"] == q.queue()["claimed"] == 0


def test_transient_consumers_of_before_are_all_removed() -> None:
    disk, names = LyingDisk(), ["t1", "t2", "t3"]
    q = scene(disk, "replay off", "consumer k", *(f"consumer {name} transient" for name in names))
    q.write("s", b"1")
    disk, refused, at = disk.after_kill(), list[str](), 0
    while True:
        again, at = disk.copy(), at + 1
        fail(again, at)
        try:
            p = Lying(again)
        except MqfsError:  # before: the server does not start
            continue
        if not again.failed:
            break
        left = [name for name in p.group.consumers if name != "k"]
        refused += left
        assert len(left) == 1
        p.pass_time(2)
        assert list(p.group.consumers) == ["k"]
        assert drain(p.worker("k")) == [b"1"]
        p.group.retention.trim(always=True)
        assert p.row()["messages"] == 0  # they hold back none
    assert refused == names


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("state", ["in flight", "failed"])
@pytest.mark.parametrize("kind", ["memory", "transient", "view", ""])
def test_a_start_loses_no_exclusive_message(kind: str, state: str, clean: bool) -> None:
    disk = LyingDisk()
    q = scene(disk, "replay off", "bind view s", f"consumer a {kind}", "consumer b")
    for body in (b"x", b"y"):
        q.put(body, single=True)
    worker = q.worker("a")
    assert [worker.read(BIG), worker.read(BIG)] == [b"x", b"y"]
    if state == "failed":
        say(worker, "nack 1 1s\nnack 2 1s")
    if kind == "view":
        q.ctl("unbind view")
    if clean:
        q.close()
    disk, at, refused = disk.after_kill(), 0, True
    while refused:
        again, at = disk.copy(), at + 1
        fail(again, at)
        try:
            p = Lying(again)
        except MqfsError:
            continue
        refused = bool(again.failed)
        again.fail_at = 0
        p.pass_time(2)
        p.group.retention.trim(always=True)
        found = [body for name in list(p.group.consumers) for body in drain(p.worker(name))]
        assert sorted(found + drain(p.at(".consumers/.s", os.O_RDWR))) == [b"x", b"y"]
