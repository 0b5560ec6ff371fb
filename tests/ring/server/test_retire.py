"""Rings that end, again and again, under those who publish: what raised Stale was not taken, and all else was, once."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits, ring
from mqfs.model import Draft
from mqfs.ring import Ring
from mqfs.ring.server.keeper_link import KeeperLink
from tests.ring.memory.stops import HALF, HOLDING, PUBLISHED, PUBLISHING
from tests.ring.server import crowd
from tests.ring.server.rig import ME, Client, Rig
from tests.support.campaign import seed, size, whole
from tests.support.eventually import eventually, patient
from tests.support.forks import child, ended, stopped
from tests.support.lying_disk import LyingDisk
from tests.support.server import Server
from tests.support.temp_store import lowered

pytestmark = [
    pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING),
    pytest.mark.usefixtures("quiet"),
]

STALE, GONE = 7, 8  # exit statuses
MODES = {
    "p1": ("own", "published"),
    "p2": ("shared", "published"),
    "c1": ("shared", "committed"),
    "m1": ("own", "many"),
    "d1": ("own", "drafts"),
    "u1": ("shared", "put"),
    "f1": ("", "follow"),
}


def act(kind: str, ways: Any) -> Any:
    """What a stopped publisher does; `ways` is how it stops."""
    from mqfs.ring import _native

    def publish(again: Ring) -> None:
        _native._stop_at(*ways)
        try:
            if kind == "one":
                again.publish(16, b"victim 0")
            elif kind == "unit":
                again.publish_unit([Draft(1, 16, b"victim %d" % n) for n in range(3)])
            else:
                again.publish_many(16, [b"victim %d" % n + bytes(90_000) for n in range(6)])
        except errors.Stale as error:
            os._exit(STALE + 10 * getattr(error, "published", 0))
        except errors.Disconnected:
            os._exit(GONE)

    return publish


CASES = [
    (point, kind)
    for point in PUBLISHING
    for kind in ("one", "unit", "many")
    if whole() or kind == "one" or point == HALF
]


@pytest.mark.process
@pytest.mark.parametrize(("point", "kind"), CASES)
def test_a_publisher_that_stands_still(point: int, kind: str) -> None:
    """With the lock it has the ring taken from it within a second; others go on. Later it learns what was taken."""
    rig = Rig("replay all", "sync off")
    client = rig.attach()
    client.ring.publish(16, b"before")
    ring_log = rig.own.ring_log
    with child(ring_log.ring, act(kind, (point, signal.SIGSTOP))) as pid:
        stopped(pid)
        began = time.monotonic()
        if point in HOLDING:
            rig.until(lambda: ring_log.why)
            assert time.monotonic() - began < patient(30)
        else:
            ring_log.retire("test")
        rig.until(lambda: ring_log.ended)
        with pytest.raises(errors.Stale):
            client.ring.publish(16, b"late", b"", 1, 0, 0)
        again = rig.attach()
        assert again.ring.generation > client.ring.generation
        again.ring.publish(16, b"other", b"", 1, 0, 0)
        rig.write("s", b"file")
        taken = [body for _, _, body in rig.log()]
        os.kill(pid, signal.SIGCONT)
        status = ended(pid)
    bodies = [body.rstrip(b"\0") for _, _, body in rig.log()]
    assert bodies == [body.rstrip(b"\0") for body in taken], "something was taken after the end"
    victims = [body for body in bodies if body.startswith(b"victim")]
    assert bodies == [b"before", *victims, b"other", b"file"]
    if kind == "many":
        assert status % 10 == STALE
        assert victims == [b"victim %d" % n for n in range(status // 10)]
    elif point >= PUBLISHED:
        assert status == 0
        assert len(victims) == (1 if kind == "one" else 3)
    else:
        assert status == STALE
        assert victims == []
    rig.stop()


@pytest.mark.process
def test_nobody_waits_for_long_while_somebody_stands_still() -> None:
    """The server's own writes go on, too."""
    rig = Rig("replay all", "sync off")
    client = rig.attach()
    with child(client.ring, act("one", (HALF, signal.SIGSTOP))) as pid:
        stopped(pid)
        began = time.monotonic()
        rig.write("s", b"file")
        assert time.monotonic() - began < patient(30)
        assert [body for _, _, body in rig.log()] == [b"file"]
        os.kill(pid, signal.SIGCONT)
        assert ended(pid) == STALE
    rig.stop()


class Publisher:
    """One that attaches again where its ring is over, and counts."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.name, self.number = rig, name, 0
        self.client: Client | None = None
        self.told: list[bytes] = []
        self.stale = 0

    def go(self, dice: random.Random) -> None:
        if self.client is None:
            try:
                self.client = self.rig.attach()
            except errors.Busy:
                return
        bodies = []
        for _ in range(dice.choice([1, 1, 5, 200])):
            bodies.append(b"%s %d" % (self.name.encode(), self.number))
            self.number += 1
        done, how = 0, dice.choice(["many", "unit", "drafts", "one"])
        while done < len(bodies):
            rest = bodies[done:]
            try:
                if self.client is None:
                    self.client = self.rig.attach()
                number = self.client.number("s")
                if how == "many":
                    self.client.ring.publish_many(number, rest, 0)
                elif how == "one":
                    rest = rest[:1]
                    self.client.ring.publish(number, rest[0], b"", 1, 0, 0)
                elif how == "unit":
                    self.client.ring.publish_unit([Draft(1, number, body) for body in rest], 0)
                else:
                    self.client.ring.publish_pairs({"s": number}, [("s", body) for body in rest], 2**32 - 1, 0)
                done += len(rest)
            except errors.Stale as error:
                done += getattr(error, "published", 0)
                self.stale += 1
                self.client = None
            except (errors.Again, errors.Busy) as error:
                done += getattr(error, "published", 0)
                self.rig.tick()
                self.rig.pump()
        self.told += bodies


@pytest.mark.slow
def test_ends_of_all_kinds() -> None:
    """In one process: every kind of change that ends a ring, between any two publishes."""
    stale = 0
    with lowered(RING_BYTES=1 << 17, RING_IDLE_S=0):
        for number in range(seed() * 100, seed() * 100 + size(300)):
            dice = random.Random(number)
            rig = Rig("replay all", "sync off")
            publishers = [Publisher(rig, name) for name in "abc"]
            names: list[str] = []
            for turn in range(60):
                what = dice.random()
                if what < 0.6:
                    dice.choice(publishers).go(dice)
                elif what < 0.65:
                    rig.tree.setattr(ME, rig.group.streams["s"], mode=dice.choice([0o600, 0o666]))
                elif what < 0.7:
                    rig.ctl(f"ttl {dice.randint(1, 9)}h")
                elif what < 0.75:
                    names.append(f"new{turn}")
                    rig.create(names[-1])
                elif what < 0.8 and names:
                    rig.tree.unlink(ME, rig.group, names.pop())
                elif what < 0.85:
                    for publisher in publishers:  # all leave: it is idle
                        if publisher.client is not None:
                            publisher.client.attachment.close()
                            publisher.client = None
                    rig.tick()
                elif what < 0.9:
                    rig.tree.rename(ME, rig.group, "t", rig.group, "u")
                    rig.tree.rename(ME, rig.group, "u", rig.group, "t")
                else:
                    rig.pump()
            rig.pump()
            bodies = [body for _, _, body in rig.log()]
            for publisher in publishers:
                mine = [body for body in bodies if body.startswith(publisher.name.encode())]
                assert mine == publisher.told, f"story {number}"
            stale += sum(publisher.stale for publisher in publishers)
            rig.stop()
    assert stale > size(300)


@pytest.mark.parametrize("goes", ["it leaves", "its time is over"])
def test_an_ended_ring_keeps_for_its_followers(goes: str) -> None:
    """In a group that keeps nothing for those who are not there: until they have left their seats, or for so long."""
    rig = Rig("sync off")
    follower = rig.attach().ring.consumer(hold=True)
    rig.write("s", b"0")
    rig.own.ring_log.retire("the test wants it")
    rig.write("s", b"1", b"2")
    rig.group.retention.trim(always=True)
    assert [body for _, _, body in rig.log()] == [b"0", b"1", b"2"]
    newer = rig.attach()
    newer.ring.publish(16, b"3")  # no server follows that one yet
    rig.tick()
    assert [body for _, _, body in rig.log()] == [b"0", b"1", b"2", b"3"]
    with lowered(RING_CHANGE_S=0 if goes == "its time is over" else 60):
        if goes == "it leaves":
            follower.close()
        rig.tick()
    assert not rig.group.past_rings
    rig.group.retention.trim(always=True)
    newer.ring.publish(16, b"4")
    rig.pump()
    assert b"4" not in [body for _, _, body in rig.log()]
    assert rig.group.streams["s"].kept.kept_from() == rig.group.log.end.next
    rig.stop()


def is_enough(server: Server, members: list[crowd.Member], seconds: float) -> bool:
    """Whether a ring has ended for each second, and 200 messages were confirmed: a busy machine takes longer."""
    told = sum(member.file.read_text().count("told ") for member in members)
    return told > 200 * seconds and server.text().count("retired") > seconds


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_load(tmp_path: Path) -> None:
    """Processes publish flat out while rings are retired by everything that does."""
    dice, mount = random.Random(seed()), tmp_path / "mq"
    mount.mkdir()
    address = f"unix!{tmp_path / 's'}"
    seconds = max(3.0, size(30))
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path, mount=mount) as server:
        group = mount / "a"
        group.mkdir()
        (group / "ctl").write_text("replay all\nsync 10ms\n")
        for name in ("own", "shared", "other"):
            (group / name).touch()
        with crowd.crowd(tmp_path, address, "a", MODES) as members:
            end = time.monotonic() + seconds
            number = 0
            while time.monotonic() < end or not is_enough(server, members, seconds):
                number += 1
                what = dice.randrange(5)
                if what == 0:
                    os.chmod(group / "other", dice.choice([0o644, 0o664]))
                elif what == 1:
                    (group / f"new{number}").touch()
                    (group / f"new{number}").unlink()
                elif what == 2:
                    (group / "ctl").write_text(f"ttl {number % 50 + 1}h\n")
                elif what == 3:
                    (group / "other").rename(group / "renamed")
                    (group / "renamed").rename(group / "other")
                else:
                    (group / f"kept{number}").touch()
                time.sleep(dice.uniform(0, 0.05))
            for member in members:
                if member.mode != "follow":
                    member.end()
            log = crowd.log_of(address, "a")
            follower = next(member for member in members if member.mode == "follow")
            eventually(lambda: follower.newest() >= max(log), "the follower")
            follower.end()
        retired = server.text().count("retired")
        told = crowd.check(log, members)
        crowd.check_followers(log, members)
    KeeperLink(str(tmp_path / "store")).quit()
    print(f"{retired} rings ended in {seconds:.0f} s, {told} messages confirmed")


@pytest.mark.slow
def test_a_ring_that_was_taken_over_leaves_no_descriptor(keeper: Any) -> None:
    disk, before = LyingDisk(), len(os.listdir("/proc/self/fd"))
    rig = Rig("replay all", disk=disk)
    for _ in range(5):
        client = rig.attach()
        client.ring.publish(client.number("s"), b"x")
        client.ring.close()
        rig.kill()
        rig = Rig(disk=disk)
    rig.stop()
    del rig, client
    gc.collect()
    keeper("").quit()
    assert len(os.listdir("/proc/self/fd")) <= before


class Faulty:
    """A ring with a bug in what maintenance asks of it."""

    def __init__(self, real: Ring) -> None:
        self._real = real

    @property
    def retired(self) -> bool:
        raise ValueError("a bug")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_bug_in_a_rings_maintenance_is_one_line_and_a_group_that_takes_no_more(
    keeper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The published messages are in the ring still, for the next start."""
    logging.disable(logging.NOTSET)
    disk = LyingDisk()
    rig = Rig("replay all", disk=disk)
    client = rig.attach()
    client.ring.publish(16, b"published", b"", 1, 0, 0)
    rig.own.ring_log.ring = Faulty(rig.own.ring_log.ring)
    caplog.set_level(logging.ERROR)
    for _ in range(5):
        rig.rings.tick()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "group 2: maintaining its ring failed: ValueError('a bug'); the group is read-only until the next start",
        "group 2 is read-only: [Errno 5] maintaining its ring failed: ValueError('a bug')",
    ]
    assert [record.exc_info is not None for record in caplog.records] == [True, False]  # one traceback
    with pytest.raises(errors.ReadOnly):
        rig.attach()
    rig.kill()
    rig = Rig(disk=disk.after_kill())
    assert b"published" in [body for _, _, body in rig.log()]
    rig.stop()


@pytest.mark.parametrize("end", ["retired", "never made"])
def test_the_room_of_a_ring_is_given_back(tmp_path: Path, keeper: Any, end: str) -> None:
    rig = Rig("replay all", path=str(tmp_path / "store"))
    allocated = log_bytes(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if end == "retired":
        rig.attach()
        assert log_bytes(tmp_path) > limits.RING_BYTES
        rig.own.ring_log.retire("test")
        rig.tick()
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            with pytest.raises((OSError, errors.MqfsError)):
                rig.attach()
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert log_bytes(tmp_path) <= allocated
    rig.write("s", b"goes on")
    assert [body for _, _, body in rig.log()] == [b"goes on"]
    rig.stop()


def log_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*.log"))
