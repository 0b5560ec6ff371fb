"""A group whose log has its bound: `full` decides as at `depth`, whatever way messages come."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.model import Wait
from tests.support.batches import Units, frame
from tests.support.clock import SECOND
from tests.support.eventually import eventually

BOUND = 400_000
BODY = b"x" * 10_000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_BYTES", "MEMORY_BYTES", "RING_BYTES"):
        monkeypatch.setattr(limits, name, BOUND)
    monkeypatch.setattr(limits, "SEGMENT_BYTES", BOUND // 10)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 1_024)
    monkeypatch.setattr(limits, "TRIM_BYTES", 1_024)


def plain(u: Units) -> Any:
    return u.at("s", os.O_WRONLY).write(BODY)


def put(u: Units) -> Any:
    return u.at(".put", os.O_WRONLY).write(json.dumps({"stream": "s"}).encode() + b" " + BODY)


def batch(u: Units) -> Any:
    return u.at(".batch", os.O_WRONLY).write(frame("t", BODY) + frame("s", BODY))


def commit(u: Units) -> Any:
    u.stage("p", "s", BODY)
    return u.at(".txn/ctl", os.O_WRONLY).write(b"commit job.1 p\n")


WAYS = [plain, put, batch, commit]


def written(u: Units) -> int:
    return int(json.loads(u.text(".stats"))["written"])


def full(made: Any, *lines: str) -> Units:
    """A group whose log has no room for one more message."""
    u: Units = made("replay all", *lines)
    handle = u.at("s", os.O_WRONLY)
    while u.group.log.upkeep.size + len(BODY) + 100 < BOUND:
        assert handle.write(BODY) == len(BODY)
    handle.close()
    return u


@pytest.mark.parametrize("keep", ["disk", "ring"])
@pytest.mark.parametrize("way", WAYS)
def test_writers_wait_for_room(made: Any, way: Callable[[Units], Any], keep: str) -> None:
    u = full(made, f"keep {keep}", "full block")
    before = written(u)
    wait, later = way(u), plain(u)
    assert isinstance(wait, Wait)
    assert isinstance(later, Wait)
    u.clock.engine += 9 * SECOND
    u.tree.tick()
    assert not wait.settled
    assert written(u) == before
    u.ctl("clear s")

    def went_on() -> bool:
        u.clock.engine += SECOND
        u.tree.tick()
        return wait.settled and later.settled

    eventually(went_on, "both writers")
    assert written(u) == before + (3 if way is batch else 2)
    assert later.result() == len(BODY)


@pytest.mark.parametrize("way", WAYS)
def test_new_messages_are_discarded(made: Any, way: Callable[[Units], Any]) -> None:
    u = full(made, "full drop-new")
    before = written(u)
    assert way(u) > 0
    stats = json.loads(u.text(".stats"))
    assert (stats["written"], stats["discarded"]) == (before, 2 if way is batch else 1)


@pytest.mark.parametrize("way", WAYS)
def test_writes_are_refused(made: Any, way: Callable[[Units], Any]) -> None:
    u = full(made, "full reject")
    with pytest.raises(errors.StreamFull, match="log is full: 400000 bytes"):
        way(u)


@pytest.mark.parametrize("policy", ["reject", "block", "drop-new"])
def test_lines_of_one_write_hold_all_or_none(made: Any, policy: str) -> None:
    """Also where one of them is a message: an EOF marker."""
    u = full(made, "full reject")
    with contextlib.suppress(errors.StreamFull):
        while True:
            u.write("s", b"")
    u.ctl(f"full {policy}")
    with pytest.raises(errors.StreamFull):
        u.ctl("retries 9", "eof s")
    assert u.group.settings.retries == 5


def test_a_worker_lets_a_writer_go_on(made: Any) -> None:
    u: Units = made("deliver one", "full block")
    wait = None
    while not isinstance(wait, Wait):
        wait = plain(u)
    worker = u.taker("s")
    while not wait.settled:
        assert worker.read(len(BODY)) == BODY
        u.clock.engine += SECOND
        u.tree.tick()
        u.tree.run_timers()
