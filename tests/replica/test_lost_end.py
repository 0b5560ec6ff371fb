"""An engine that lost the end of what it confirmed, at any frame, also across takeovers: both servers start again after
a power cut, and nothing that was answered with `--confirm 1` is lost or set aside.

    log      1 own a | 2 3 4 | 5 own b | 6 7 | 8 own a | 9 10      cut after each of them, or all of it gone
    start    a first, or b first; each as a standby whose time is up, as a unit of systemd does
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica import replicator
from mqfs.replica.following import has_groups
from mqfs.replica.frame import decode
from mqfs.replica.log import open_log
from mqfs.replica.takeover import Primary, Standby, become_primary
from tests.replica.history import segments
from tests.replica.primary import LocalPrimary, LocalStandby, bodies_of
from tests.replica.test_copies import are_equal
from tests.support.eventually import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]
LOST = ("the engine lost what it confirmed", "empty, but had frame")


class Cut(NamedTuple):
    """The disks at the moment of a power cut, and what was answered before it."""

    folder: Path
    frames: list[Path]
    answered: set[bytes]


@pytest.fixture(scope="module", params=[0.05, 10.0], ids=["state noted often", "state noted rarely"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "REPLICA_STATE_S", request.param)
        patch.setattr(limits, "REPLICA_BEAT_S", 60.0)  # else frames come between
        yield make_cut(tmp_path_factory.mktemp("cut"), list[bytes]())


def make_cut(folder: Path, answered: list[bytes]) -> Cut:
    live, url = folder / "live", f"file://{folder}/live/log"
    live.mkdir()
    primary, standby = LocalPrimary(live / "a", url, standbys=1), LocalStandby(live / "b", url)
    for round_ in range(3):
        for number in range(3):
            primary.append(1, b"%d.%d" % (round_, number))
            primary.wait(1, number + 1)
        answered += primary.acknowledged[1]
        if round_ < 2:
            promoted = standby.promote(url)
            primary.kill()
            standby, primary = LocalStandby(primary.path, url), promoted
            primary.replicator._standbys = 1
    eventually(lambda: are_equal(live / "a", live / "b"))
    shutil.copytree(live, folder / "cut")
    standby.stop()
    primary.stop()
    frames = sorted((folder / "cut/log/log").iterdir())
    return Cut(folder / "cut", frames, set(answered))


class Start:
    """A server that starts, as a standby for which the primary is silent."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self.primary: Primary | None = None
        self.refused = ""
        self._standby = Standby(open_log(url), str(path), f"tcp!{path.name}!5640", 0.2)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._thread.join(10)  # one that waits for what never comes
        self._standby.stop()
        self._thread.join(HANG_S)

    def _run(self) -> None:
        try:
            self.primary = self._standby.run()
        except BadReplica as error:
            self.refused = str(error)


def outcome(start: Start, cut: Cut) -> str:
    """What became of it: "" where it serves all that was answered, or refuses to serve and has it."""
    if start.primary is not None:
        LocalPrimary(start.path, start.url, start.primary).stop()
    elif not any(words in start.refused for words in LOST):
        return f"neither serves nor says why: {start.refused!r}"
    missing = cut.answered.difference(bodies_of(start.path, 1) if has_groups(str(start.path)) else ())
    return f"{'serves' if start.primary is not None else 'refuses'} without {sorted(missing)}" if missing else ""


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_log_that_lost_its_end_costs_nothing_that_was_answered(cut: Cut, order: str, tmp_path: Path) -> None:
    found = {}
    for left in range(len(cut.frames) + 1):
        folder = tmp_path / f"{left}"
        shutil.copytree(cut.folder, folder)
        for frame in cut.frames[left:]:
            (folder / "log/log" / frame.name).unlink()
        lines = []
        for letter in order:
            start = Start(folder / letter, f"file://{folder}/log")
            if line := outcome(start, cut):
                lines.append(f"{letter} {line}")
            if start.primary is not None:
                break  # the other one follows it
        if lines:
            found[left] = lines
    assert not found, "\n".join(f"{left} of {len(cut.frames)} frames left: {lines}" for left, lines in found.items())


def lose_end(url: str, left: int) -> None:
    """The engine has no frame after that number any more."""
    log = open_log(url)
    records, own = list(log.read(0, 1.0)), 0
    while more := log.read(records[-1].number, 0.0):
        records += more
    if url.startswith("file:"):
        for record in records[left:]:
            Path(url.removeprefix("file://"), f"log/{record.number:020d}").unlink()
    else:
        log._loop.call(log._js.delete_stream(log._stream))  # type: ignore[attr-defined]
        log.close()
        log = open_log(url)
        for record in records[:left]:
            takeover = decode(record.data).owner is not None
            log.append(record.data, record.number - 1, own, takeover=takeover)
            own = record.number if takeover else own
    log.close()


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_a_confirmation_of_a_frame_that_was_lost_counts_for_no_other(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A third server takes over what is left; the standby that confirmed later frames is away."""
    monkeypatch.setattr(limits, "REPLICA_BEAT_S", 60.0)  # else frames come between
    monkeypatch.setattr(replicator, "_CONFIRM_WARNING_S", 0.2)
    first, standby = LocalPrimary(tmp_path / "a", url, standbys=1), LocalStandby(tmp_path / "b", url)
    third = open_log(url)
    for number in range(8):
        first.append(1, b"%d" % number)
        first.wait(1, number + 1)
    last = first.primary.writer.position.number
    eventually(lambda: [report.number for report in third.reports().values()] == [last])
    standby.stop()
    first.kill()
    lose_end(url, last - 6)
    second = LocalPrimary(tmp_path / "c", url, become_primary(third, str(tmp_path / "c"), "tcp!c!5640"), standbys=1)
    second.append(1, b"other")
    second.run(lambda: bool(second.acknowledged) or "no standby confirms frame" in caplog.text)
    assert not second.acknowledged, "no standby has it"
    assert second.primary.writer.position.number < last
    standby = LocalStandby(tmp_path / "d", url)
    second.wait(1, 1)
    assert b"other" in b"".join(segments(tmp_path / "d").values())
    standby.stop()
    second.stop()
