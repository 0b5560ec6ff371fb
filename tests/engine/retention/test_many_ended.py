"""Messages that outlived their ttl are counted out in portions, and no live one is taken away or refused meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqfs import errors
from mqfs.engine.retention import retention
from tests.support.batches import Units, frame
from tests.support.calls import calls_once, lines

LIVE, ENDED = 5, 30


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_LAPSED", 4)


def keeps(u: Units) -> list[str]:
    return [row["body"] for row in u.kept()]


def made(tmp_path: Path, *lines: str, more: int = 0) -> Units:
    """Live messages, then as many with a ttl as fit, all of which end; then `more` live ones, before any is counted
    out."""
    u = Units(f"depth {LIVE + ENDED}", *lines, path=tmp_path / "store")
    for number in range(LIVE):
        u.put(b"live%d" % number)
    for _ in range(ENDED):
        u.put(b"ends", ttl="1s")
    u.clock.forward(2)
    if more:
        u.batch(*(frame("s", b"more%d" % number) for number in range(more)))
    return u


ALL = [f"live{number}" for number in range(LIVE)] + [f"more{number}" for number in range(ENDED)]

FIRST: dict[str, Callable[[Units], object]] = {
    "look": lambda u: u.row(),
    "read": keeps,
    "timers": lambda u: u.tree.run_timers(),
    "tick": lambda u: u.pass_time(1),
}


@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
@pytest.mark.parametrize("first", FIRST)
def test_a_start_takes_no_live_message_for_those_that_ended(tmp_path: Path, first: str, clean: bool) -> None:
    u = made(tmp_path, more=ENDED)
    u.restart(clean=clean)
    FIRST[first](u)
    u.pass_time(3)
    assert keeps(u) == ALL
    assert u.row()["messages"] == len(ALL)


@pytest.mark.parametrize("full", ["drop-old", "drop-new", "reject"])
def test_a_write_finds_the_room_of_those_that_ended(tmp_path: Path, full: str) -> None:
    u = made(tmp_path, f"full {full}", more=ENDED)
    assert keeps(u) == ALL
    if full == "reject":
        with pytest.raises(errors.StreamFull):
            u.write("s", b"one more")
    else:
        u.write("s", b"one more")
        assert keeps(u) == ([*ALL[1:], "one more"] if full == "drop-old" else ALL)


def test_what_comes_due_finds_the_room_of_those_that_ended(tmp_path: Path) -> None:
    u = made(tmp_path)
    for number in range(ENDED):
        u.put(b"more%d" % number, delay="1s")
    u.clock.forward(1)
    u.tree.run_timers()
    u.pass_time(2)
    assert keeps(u) == ALL


def test_what_is_beyond_the_depth_after_a_start_is_cut(tmp_path: Path) -> None:
    u = made(tmp_path, more=ENDED)
    u.write("s", *(b"new%d" % number for number in range(3)))
    expected = [*ALL[3:], "new0", "new1", "new2"]
    assert keeps(u) == expected
    u.restart(clean=False)
    assert keeps(u) == expected


@pytest.mark.parametrize("full", ["drop-old", "drop-new"])
def test_a_write_does_not_count_out_those_of_other_streams(full: str) -> None:
    costs = []
    for ended in (ENDED, 10 * ENDED):
        u = Units(f"depth {ended}", f"full {full}")
        u.write("t", *[b"x"] * ended)
        for _ in range(ended):
            u.put(b"ends", ttl="1s")
        u.clock.forward(2)
        costs.append(calls_once(lambda u=u: u.write("t", b"one more")))
    assert costs[1] <= costs[0] + 100


@pytest.mark.parametrize("live", [0, 1], ids=["none_is_left", "the_newest_is_left"])
def test_the_first_and_the_newest_are_found_without_passing_all_that_ended(live: int) -> None:
    """Though none of them is trimmed yet."""
    costs = []
    for ended in (ENDED, 10 * ENDED):
        u = Units()
        for _ in range(ended):
            u.put(b"ends", ttl="1s")
        u.write("s", *[b"live"] * live)
        u.clock.forward(2)
        for _ in range(ended):
            u.group.retention.expire_messages()
        assert len(u.group.retention.lapsed) == ended
        kept = u.group.streams["s"].kept
        costs.append(calls_once(lambda kept=kept: (kept.first_kept(), kept.newest_kept())))
    assert costs[1] == costs[0]


def test_an_expiry_in_many_streams_does_not_count_all_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each behind a live message."""
    monkeypatch.setattr(retention, "_LAPSED", 16)
    costs = []
    for count in (100, 400):
        u = Units()
        for number in range(count):
            u.stream(f"x{number}")
            u.write(f"x{number}", b"live")
            u.put(b"ends", f"x{number}", ttl="1s")
        u.clock.forward(2)
        costs.append(max(lines(u.group.retention.expire_messages) for _ in range(count // 16)))
        assert len(u.group.retention.lapsed) > 0.9 * count
    assert costs[1] < 1.5 * costs[0]
