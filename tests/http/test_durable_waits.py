"""Writes of Durable Streams that would wait, for room or for the rate of their user, while they hold a lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from mqfs import limits
from mqfs.http.dialects.durable_streams import table
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

    def block(self) -> None:
        """Where the group is full, writes wait."""

        def write() -> None:
            tree, group = self.subject.tree, self.subject.group.groups["in"]
            ctl = tree.open(USER, tree.walk(USER, group, "ctl"), os.O_WRONLY)
            ctl.write(b"full block\n")
            ctl.close()

        self.subject.call(write)

    def exhaust(self) -> None:
        """Let writes have to wait from now on."""
        if self.why == "rate":
            self.clock.forward(10)
            many = b"[%s]" % b",".join([b"1"] * 10 * RATE)
            assert self.ask("PUT", "many", many, Content_Type="application/json") == 201
            return
        self.block()
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


NEW = "make in a new group"
WRITES: dict[str, tuple[Callable[[Scene], int], int]] = {
    "make": (lambda scene: scene.ask("PUT", "new"), 201),
    NEW: (lambda scene: scene.ask("PUT", "new/in/s", b"x"), 201),
    "append": (lambda scene: scene.ask("POST", "s", b"x"), 204),
    "close": (lambda scene: scene.ask("POST", "s", Stream_Closed="true"), 204),
    "delete": (lambda scene: scene.ask("DELETE", "s"), 204),
}
CASES = [("rate", write) for write in WRITES] + [("room", write) for write in WRITES if write != NEW]  # it has room


@pytest.mark.parametrize(("why", "write"), CASES)
def test_a_write_that_would_wait_is_refused_at_once(why: str, write: str) -> None:
    """It has done nothing then, and can be repeated."""
    ask, done = WRITES[write]
    with serving(why) as scene:
        for _ in range(2):
            assert ask(scene) == 503
        assert scene.body("s") == scene.body("f") == b"old"
        assert scene.ask("HEAD", "new") == scene.ask("HEAD", "new/in/s") == 404
        scene.relieve()
        assert ask(scene) == done


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
