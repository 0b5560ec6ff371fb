"""Retries: how long they last, what ends them, and that clients do not retry in step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from mqfs.client.waiting import Backoff
from mqfs.errors import Busy, Disconnected
from tests.support.eventually import HANG_S


def failing(times: int, error: type[Disconnected | Busy] = Disconnected) -> Callable[[], int]:
    """A call that fails that many times, then returns how often it was made."""
    calls = 0

    def call() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error(f"failure {calls}")
        return calls

    return call


class Pauses(threading.Event):
    """An event that notes how long it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


def test_it_retries_until_the_call_succeeds() -> None:
    assert Backoff(True, Pauses()).retry(failing(5), Disconnected) == 6


def test_without_a_limit_of_time_false_is_one_attempt() -> None:
    with pytest.raises(Disconnected, match="failure 1"):
        Backoff(False, Pauses()).retry(failing(1), Disconnected)


def test_other_errors_are_not_retried() -> None:
    with pytest.raises(Busy, match="failure 1"):
        Backoff(True, Pauses()).retry(failing(1, Busy), Disconnected)


def test_the_limit_counts_from_the_first_failure() -> None:
    began = time.monotonic()
    with pytest.raises(Disconnected):
        Backoff(0.05, threading.Event()).retry(failing(1_000_000), Disconnected)
    assert time.monotonic() - began > 0.05


def test_closing_ends_a_pause() -> None:
    closed = threading.Event()
    raised: list[Disconnected] = []

    def retry() -> None:
        try:
            Backoff(True, closed).retry(failing(1_000_000), Disconnected)
        except Disconnected as error:
            raised.append(error)

    thread = threading.Thread(target=retry, daemon=True)
    thread.start()
    closed.set()
    thread.join(HANG_S)
    assert len(raised) == 1


def test_pauses_grow_to_the_longest_and_differ_between_clients() -> None:
    first, second = Pauses(), Pauses()
    for closed in first, second:
        Backoff(True, closed, longest_s=0.5).retry(failing(12), Disconnected)
        assert closed.pauses[0] <= 0.02
        assert all(0.25 <= pause <= 0.5 for pause in closed.pauses[-6:])
    assert first.pauses != second.pauses
