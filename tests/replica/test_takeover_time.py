"""A standby on another machine takes over: durations run on as with the primary, whatever its wall clock shows."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from mqfs.clock import Anchor, resumed
from mqfs.replica import takeover
from mqfs.replica.log import Position
from mqfs.replica.takeover import Hearing
from tests.replica.test_servers import Node, wait_until_equal
from tests.ring.memory.build import compiler
from tests.support import ROOT
from tests.support.eventually import eventually
from tests.support.server import short_folder

S = 10**9


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    with short_folder() as one, short_folder() as two:
        yield one, two


@pytest.fixture(scope="module")
def other_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preload") / "wrong_clock.so"
    compiler("-O2", "-shared", "-fPIC", ROOT / "tests/replica/wrong_clock.c", "-o", made)
    return made


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("off_s", [-700, 0, 700, 30 * 86_400])
def test_a_takeover_by_another_clock(
    places: tuple[Path, Path], tmp_path: Path, other_machine: Path, off_s: int
) -> None:
    (clock := tmp_path / "clock").write_bytes(struct.pack("<q", off_s * S))
    (boot := tmp_path / "boot_id").write_text("of-another-machine\n")
    more = {"LD_PRELOAD": str(other_machine), "MQFS_WRONG_CLOCK": str(clock), "MQFS_OTHER_BOOT": str(boot)}
    url = f"file://{tmp_path}/log"
    with (
        Node.of(places[0], url) as primary,
        Node.of(places[1], url, "--standby", "--failover", "2s", **more) as standby,
    ):
        with primary.connect() as client:
            group = client.group("g", create=True, ctl=["replay all", "ttl 10m", "sync replica"])
            group.publish("q", b"short")
            group = client.group("jobs", create=True, ctl=["replay all", "dedup 2m", "sync replica"])
            first = group.publish("q", b"once", id="order-7").sequence
            group.publish("q", b"later", delay="10m")
        wait_until_equal(primary, standby)
        if off_s:
            eventually(lambda: "the primary's clock is" in standby.text(), "a warning")
        primary.kill()
        eventually(standby.is_primary)
        with standby.connect() as client:
            assert [message.body for message in client.group("g").history()] == [b"short"]
            group = client.group("jobs")
            assert group.publish("q", b"once", id="order-7").sequence == first
            assert [message.body for message in group.history()] == [b"once"]
        side = "behind" if off_s > 0 else "ahead of"
        warnings = [line for line in standby.text().splitlines() if "the primary's clock is" in line]
        assert len(warnings) == (off_s != 0)
        assert all(f"s {side} this server's" in line for line in warnings)


class Scene:
    """Frames of a primary, and looks at them, by a clock moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, off_s: float) -> None:
        """`off_s`: seconds that the primary's clock is ahead."""
        self.hearing, self.off_s, self.now = Hearing("log"), off_s, 1_000 * S
        self._at, self._unread, self._has_bytes = Position(), 0, False
        monkeypatch.setattr(takeover.time, "clock_gettime_ns", lambda _: self.now)

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * S)

    def append(self, *, written: bool) -> None:
        self._at = attrs.evolve(self._at, number=self._at.number + 1, time_ns=self.shown(self.now))
        self._unread += 1
        self._has_bytes |= written

    def shown(self, ns: int) -> int:
        """By the primary's wall clock."""
        return 1_700_000_000 * S + ns + int(self.off_s * S)

    def look(self) -> None:
        self.hearing.step(self._at, self._unread, written=self._has_bytes, is_end=lambda: True)
        self._unread, self._has_bytes = 0, False

    def age_s(self, newest_ns: int) -> float:
        """The age of the newest record, written then by this clock, as a server counts it that takes over now."""
        anchor = Anchor(5 * S, self.shown(newest_ns), 0, "of the primary")
        found = resumed([(anchor, self.shown(newest_ns))], self.now, 0, "of this one", self.hearing.newest)
        return (found - 5 * S) / S


@pytest.mark.parametrize("off_s", [-1e7, 0, 1e7])
@pytest.mark.parametrize("is_read", ["when it is written", "at the start", "before a restart", "after a pause"])
def test_the_age_of_the_newest_message(monkeypatch: pytest.MonkeyPatch, off_s: float, is_read: str) -> None:
    """Idle time counts: the primary lives for ten minutes more, and is silent for three seconds."""
    scene = Scene(monkeypatch, off_s)
    if is_read in ("when it is written", "after a pause"):
        scene.append(written=False)
        scene.look()
        scene.append(written=True)
        scene.look()
        if is_read == "after a pause":
            scene.wait(60)
            scene.hearing.begin()
            scene.append(written=True)
            scene.look()
        newest_ns = scene.now
    else:
        newest_ns = scene.now
        scene.append(written=is_read == "at the start")
        scene.wait(100)
        scene.look()
    for _ in range(10):
        scene.wait(60)
        scene.append(written=False)
        scene.look()
    scene.wait(3)
    assert scene.age_s(newest_ns) == (scene.now - newest_ns) / S


def test_a_primary_with_another_clock_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 0)
    scene.append(written=False)
    scene.look()
    scene.append(written=True)
    scene.look()
    newest_ns = scene.now
    shown_ns = scene.shown(newest_ns)
    scene.wait(3)
    scene.off_s = 3_600
    scene.append(written=False)
    scene.look()
    scene.wait(2)
    anchor = Anchor(5 * S, shown_ns, 0, "of the primary")
    assert resumed([(anchor, shown_ns)], scene.now, 0, "", scene.hearing.newest) == 10 * S


def test_what_was_never_heard_goes_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A primary that had ended before the standby began: as with a restart."""
    scene = Scene(monkeypatch, 0)
    scene.append(written=True)
    scene.look()
    scene.look()
    assert scene.hearing.newest is None
