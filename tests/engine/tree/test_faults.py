"""What one group raises in maintenance stays its own: it is logged once, and what can be tried again is."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mqfs.errors import DiskFailed, ReadOnly
from tests.support.hand import Hand


def failing(monkeypatch: pytest.MonkeyPatch, hand: Hand, error: Exception) -> list[int]:
    """The bucket's `trim` raises; returns the list that its calls are added to."""
    calls: list[int] = []

    def trim(*args: Any) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(type(hand.group.log.upkeep), "trim", trim)
    return calls


def test_a_bug_is_logged_with_its_traceback(
    hand: Hand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mqfs.limits.TRIM_BYTES", 8)
    calls = failing(monkeypatch, hand, ZeroDivisionError("by nothing"))
    hand.stream()
    hand.write("s", b"x")
    with caplog.at_level(logging.INFO, "mqfs.engine"):
        hand.tree.faults.report(hand.group.number, "something else, a moment ago")
        hand.tree.tick()
        hand.tree.tick()
    assert calls == [1]
    assert [record.exc_info is not None for record in caplog.records] == [False, True]
    assert "maintenance failed" in caplog.records[1].message
    with pytest.raises(ReadOnly):
        hand.write("s", b"y")


def test_maintenance_that_failed_is_tried_again(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqfs.limits.TRIM_BYTES", 8)
    calls = failing(monkeypatch, hand, DiskFailed("for a moment"))
    hand.stream()
    hand.write("s", b"x")
    hand.tree.tick()
    hand.tree.tick()
    assert calls == [1, 1]


def test_what_was_dropped_is_given_back_by_another_try(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    hand.stream()
    hand.write("s", b"x", b"y" * 64)
    with monkeypatch.context() as patch:
        patch.setattr("mqfs.limits.TRIM_BYTES", 8)
        hand.tree.tick()
        size = hand.group.log.upkeep.size
        hand.ctl("drop s 2")
        patch.setattr("mqfs.limits.TRIM_BYTES", size - 8)  # it has not grown by so much
        calls = failing(patch, hand, DiskFailed("for a moment"))
        hand.tree.tick()
        hand.tree.tick()
    assert calls == [1, 1]
