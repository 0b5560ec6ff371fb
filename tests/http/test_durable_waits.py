"""Writes of Durable Streams that lack room, or are beyond the rate of their user: they wait, but hold no lock then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from mqfs import limits
from mqfs.http.dialects.durable_streams import table
from mqfs.model import Step, Wait
from mqfs.quotas import Quota, Quotas
from mqfs.store.store import DiskStore
from tests.engine.subject import USER
from tests.http.subject import HttpSubject
from tests.models.pubsub import WAIT
from tests.store.script import PATH
from tests.support.clock import SECOND
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import lowered

RATE = 100  # messages a second


class Scene:
    """A server of durable streams: `s` and `ends` have forks, and `ends` an expiry."""

    def __init__(self, why: str) -> None:
        quotas = Quotas({os.geteuid(): Quota(messages=RATE)}) if why == "rate" else None
        self.subject = HttpSubject(DiskStore(PATH, disk=LyingDisk()), table("g"), quotas)
        self.why, self.clock = why, self.subject.clock
        at = datetime.fromtimestamp(self.clock.wall / SECOND + 1_000, UTC).isoformat()
        assert self.ask("PUT", "s", b"old") == self.ask("PUT", "ends", Stream_Expires_At=at) == 201
        assert self.ask("PUT", "f", Stream_Forked_From="/in/s") == 201
        assert self.ask("PUT", "of-ends", Stream_Forked_From="/in/ends", Stream_TTL="9999") == 201
        assert self.ask("PUT", "big") == 201

    def ask(self, method: str, name: str, body: bytes = b"", **more: str) -> int:
        """The status; 0: it waits."""
        reply = self.subject.ask(1, method, f"../in/{name}", body, **{"Content_Type": "text/plain", **more})
        return 0 if reply is WAIT else int(reply.status)

    def body(self, name: str) -> bytes:
        return bytes(self.subject.ask(1, "GET", f"../in/{name}").body)

    def write(self, name: str, data: bytes) -> Step[int]:
        """What a write by another program comes to, to a file of the group."""
        steps = list[Step[int]]()

        def write() -> None:
            tree, group = self.subject.tree, self.subject.group.groups["in"]
            handle = tree.open(USER, tree.walk(USER, group, name), os.O_WRONLY)
            steps.append(handle.write(data))
            if name == "ctl":
                handle.close()

        self.subject.call(write)
        return steps[0]

    def sizes(self) -> list[int]:
        """Bytes of the logs of all groups."""
        return [group.log.upkeep.size for group in self.subject.tree.groups.values()]

    def pass_time(self) -> None:
        """More than a client waits for its turn."""
        self.subject.call(lambda: cast(MockClock, trio.lowlevel.current_clock()).jump(limits.DURABLE_WAIT_S + 1))

    def exhaust(self) -> None:
        """Let writes have to wait from now on."""
        if self.why == "rate":
            self.clock.forward(10)
            many = b"[%s]" % b",".join([b"1"] * 10 * RATE)
            assert self.ask("PUT", "many", many, Content_Type="application/json") == 201
            return
        self.write("ctl", b"full block\n")
        for size in (10_000, 100, 1):
            while (status := self.ask("POST", "big", bytes(size))) == 204:
                pass
            assert status == 503

    def relieve(self) -> None:
        if self.why == "rate":
            self.clock.forward(20)
        else:
            limits.GROUP_BYTES *= 2


@contextmanager
def serving(why: str) -> Iterator[Scene]:
    with lowered(GROUP_BYTES=256 << 10):
        scene = Scene(why)
        try:
            scene.exhaust()
            yield scene
        finally:
            scene.subject.abandon()


WRITES: dict[str, tuple[Callable[[Scene], int], int]] = {
    "make": (lambda scene: scene.ask("PUT", "new", b"x"), 201),
    "make in a new group": (lambda scene: scene.ask("PUT", "new/in/s", b"x"), 201),
    "append": (lambda scene: scene.ask("POST", "s", b"x"), 204),
    "close": (lambda scene: scene.ask("POST", "s", Stream_Closed="true"), 204),
    "delete": (lambda scene: scene.ask("DELETE", "s"), 204),
}
IN_FULL = ["make", "append", "close", "delete"]  # a new group has room


def has_done_nothing(scene: Scene) -> bool:
    there = [scene.ask("HEAD", name) for name in ("new", "new/in/s")]
    return scene.body("s") == scene.body("f") == b"old" and there == [404, 404]


@pytest.mark.parametrize("write", IN_FULL)
def test_a_write_without_room_is_refused_at_once(write: str) -> None:
    """It has done nothing then, and can be repeated."""
    ask, done = WRITES[write]
    with serving("room") as scene:
        for _ in range(2):
            assert ask(scene) == 503
        assert has_done_nothing(scene)
        scene.relieve()
        assert ask(scene) == done


@pytest.mark.parametrize("write", WRITES)
def test_a_write_beyond_the_rate_waits_for_its_turn_without_a_lock(write: str) -> None:
    """Its user's other writes have theirs before and after it."""
    ask, done = WRITES[write]
    with serving("rate") as scene:
        steps = [scene.write("many", b"1")]
        assert ask(scene) == 0
        steps.append(scene.write("many", b"2"))
        assert has_done_nothing(scene)
        assert scene.ask("PUT", "s") == 200  # the lock of who makes streams is free
        assert scene.ask("POST", "s", b"1", Content_Type="application/json") == 409  # that of who appends, too
        scene.subject.tick(20)
        scene.subject.settle()
        assert [(wait, reply.status) for wait, reply in scene.subject.answers] == [(1, done)]
        assert [isinstance(step, Wait) and step.settled for step in steps] == [True, True]


@pytest.mark.parametrize("write", WRITES)
def test_a_turn_that_does_not_come_in_time_is_given_up(write: str) -> None:
    ask, done = WRITES[write]
    with serving("rate") as scene:
        before = scene.sizes()
        for count in (1, 2):
            assert ask(scene) == 0
            scene.pass_time()
            scene.subject.settle()
            assert [reply.status for _, reply in scene.subject.answers] == [503] * count
        assert has_done_nothing(scene)
        assert scene.sizes() == before
        scene.relieve()
        assert ask(scene) == done


@pytest.mark.parametrize("full", ["block", "reject", "drop-new"])
def test_a_stream_that_is_refused_adds_nothing_to_the_log(full: str) -> None:
    """Nothing bounds how often it is tried."""
    with serving("room") as scene:
        scene.write("ctl", f"full {full}\n".encode())
        before = scene.sizes()
        for body in (b"", b"x", bytes(1_000)):
            assert scene.ask("PUT", "new", body) in (503, 507)
        assert scene.sizes() == before


@pytest.mark.parametrize("why", ["rate", "room"])
def test_an_end_that_cannot_be_noted_yet_is_one(why: str) -> None:
    """The stream stays for its fork."""
    with serving(why) as scene:
        scene.clock.wall += 2_000 * SECOND
        for method in ("HEAD", "GET", "POST"):
            assert scene.ask(method, "ends", b"x" if method == "POST" else b"") == 404
        assert scene.ask("GET", "of-ends") == 200
        scene.relieve()
        assert scene.ask("HEAD", "ends") == 404
        assert scene.ask("HEAD", "ends") == 410
        assert scene.ask("GET", "of-ends") == 200
