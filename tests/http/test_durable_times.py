"""When durable streams expire: Stream-TTL by the clock that does not jump, Stream-Expires-At by the wall clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from mqfs.http.dialects.durable_streams import table
from mqfs.store.store import DiskStore
from tests.engine.subject import USER
from tests.http.subject import HttpSubject
from tests.models.pubsub import WAIT
from tests.store.script import PATH
from tests.support.clock import SECOND
from tests.support.lying_disk import LyingDisk

TTL, DAY = 3_600, 86_400
TEXT = {"Content_Type": "text/plain"}


class Scene:
    """A server of durable streams, and its two clocks."""

    def __init__(self, disk: LyingDisk, wall_ns: int = 0) -> None:
        self.subject = HttpSubject(DiskStore(PATH, disk=disk), table("g"))
        self.clock = self.subject.clock
        self.clock.wall = wall_ns or self.clock.wall

    def ask(self, method: str, body: bytes = b"", query: str = "", **headers: str) -> Any:
        return self.subject.ask(1, method, f"../in/s{query}", body, **TEXT, **headers)

    def is_there(self) -> bool:
        """A HEAD is no use."""
        status = self.ask("HEAD").status
        assert status in (200, 404)
        return bool(status == 200)

    def step(self, seconds: int) -> None:
        """The wall clock is set."""
        self.clock.wall += seconds * SECOND

    def publish(self) -> None:
        """Another program writes to it."""

        def write() -> None:
            stream = self.subject.group.groups["in"].streams["s"]
            handle = self.subject.tree.open(USER, stream, os.O_WRONLY)
            handle.write(b"of another program")
            handle.close()

        self.subject.call(write)

    def poll(self) -> None:
        """A long poll that its client leaves after twice the time."""
        assert self.ask("GET", query="?offset=now&live=long-poll") is WAIT
        self.clock.forward(2 * TTL)
        assert self.is_there()
        self.subject.cancel(1)


USES: dict[str, Callable[[Scene], object]] = {
    "none": lambda scene: None,
    "append": lambda scene: scene.ask("POST", b"x"),
    "read": lambda scene: scene.ask("GET"),
    "poll": Scene.poll,
    "publish": Scene.publish,
}


@pytest.fixture
def scene() -> Iterator[Scene]:
    it = Scene(LyingDisk())
    try:
        yield it
    finally:
        it.subject.abandon()


@pytest.mark.parametrize("before_s", [-DAY, 0, DAY])
@pytest.mark.parametrize("after_s", [-DAY, 0, DAY])
@pytest.mark.parametrize("use", USES)
def test_no_step_of_the_wall_clock_moves_the_end_of_a_stream(
    scene: Scene, use: str, before_s: int, after_s: int
) -> None:
    """Before or after its last use."""
    clock = scene.clock
    assert scene.ask("PUT", Stream_TTL=str(TTL)).status == 201
    scene.step(before_s)
    if use != "none":
        clock.forward(TTL - 2)
    assert scene.is_there()
    USES[use](scene)
    scene.step(after_s)
    clock.forward(TTL - 2)
    assert scene.is_there()
    clock.forward(3)
    assert not scene.is_there()


@pytest.mark.parametrize("step_s", [-DAY, 0, DAY])
def test_nor_does_one_over_a_restart(step_s: int) -> None:
    """Which begins the time again."""
    disk = LyingDisk()
    scene = Scene(disk)
    try:
        assert scene.ask("PUT", b"x", Stream_TTL=str(TTL)).status == 201
        scene.clock.forward(TTL - 2)
        scene.publish()
    finally:
        scene.subject.abandon()
    scene = Scene(disk.after_kill(), scene.clock.wall + step_s * SECOND)
    try:
        assert scene.is_there()
        scene.clock.forward(TTL - 2)
        assert scene.is_there()
        scene.clock.forward(3)
        assert not scene.is_there()
    finally:
        scene.subject.abandon()


def test_an_expiry_at_a_time_is_by_the_wall_clock(scene: Scene) -> None:
    at = datetime.fromtimestamp(scene.clock.wall / SECOND + TTL, UTC)
    assert scene.ask("PUT", b"x", Stream_Expires_At=at.isoformat()).status == 201
    scene.clock.engine += DAY * SECOND
    assert scene.is_there()
    scene.step(TTL - 1)
    assert scene.is_there()
    scene.step(2)
    assert not scene.is_there()
