"""Writes that wait for room (`full block`) take memory of their user, one has at most half, and none stays behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import OverLimit
from mqfs.model import Wait
from tests.support.batches import frame
from tests.support.hand import ANNA, ROOT
from tests.support.queues import Queues

SIZE, MOST = 1_000, 20_000
WAYS: dict[str, tuple[str, str, bytes]] = {  # a setting, a file, and what is written to it
    "plain": ("data message", "s", b"x" * SIZE),
    "with a sender": ("sender on", "s", b"x" * SIZE),
    "lines": ("data line", "s", b"x" * SIZE + b"\n"),
    "put": ("data message", ".put", b'{"stream":"s"} ' + b"x" * SIZE),
    "batch": ("data message", ".batch", frame("s", b"x" * SIZE)),
}


def full(setting: str) -> Queues:
    queues = Queues("replay all", "full block", "depth 1", setting)
    queues.tree.root.state.mode = queues.group.state.mode = 0o777
    queues.group.streams["s"].state.mode = 0o666
    queues.write("s", b"there\n")
    return queues


def room(queues: Queues, steps: list[Any]) -> None:
    queues.ctl("depth 0")


def cancelled(queues: Queues, steps: list[Any]) -> None:
    assert all(step.cancel() for step in steps)


def removed(queues: Queues, steps: list[Any]) -> None:
    queues.tree.unlink(ROOT, queues.group, "s")


def rejected(queues: Queues, steps: list[Any]) -> None:
    queues.ctl("full reject")


@pytest.mark.parametrize("end", [room, cancelled, removed, rejected])
@pytest.mark.parametrize("way", WAYS)
def test_they_take_memory_of_their_user_until_they_end(
    way: str, end: Callable[[Queues, list[Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_BYTES", 2 * MOST)
    setting, path, data = WAYS[way]
    queues = full(setting)
    before = queues.tree.memory.of(ANNA.uid)
    steps: list[Any] = []
    writers = [queues.at(path, os.O_WRONLY, ANNA) for _ in range(MOST // SIZE + 1)]
    with pytest.raises(OverLimit):
        steps.extend(writer.write(data) for writer in writers)
    assert len(steps) > MOST // SIZE // 2
    assert all(isinstance(step, Wait) and not step.settled for step in steps)
    assert len(steps) * SIZE <= queues.tree.memory.of(ANNA.uid) - before <= MOST
    end(queues, steps)
    assert queues.tree.memory.of(ANNA.uid) == before


def test_an_unfinished_line_whose_file_is_closed_waits_as_memory_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELD_BYTES", 2 * MOST)
    queues = full("data line")
    for _ in range(MOST // SIZE + 1):
        writer = queues.at("s", os.O_WRONLY, ANNA)
        assert writer.write(b"x" * SIZE) == SIZE
        writer.close()
    blocked = queues.row()["blocked"]
    assert MOST // SIZE // 2 < blocked <= MOST // SIZE
    assert blocked * SIZE <= queues.tree.memory.of(ANNA.uid) <= MOST
    refused = [json.loads(row) for row in queues.text(".errors").splitlines()]
    assert len(refused) == MOST // SIZE + 1 - blocked
    assert all(row["text"].startswith("last, unfinished line not written: ") for row in refused)
