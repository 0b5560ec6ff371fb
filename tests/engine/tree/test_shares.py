"""UserLimits of what is bounded: no user takes more than half, and the last places are kept."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs import limits
from mqfs.errors import OverLimit
from mqfs.quotas import UserLimits, block_of

ROOT, ANN, BERT, CARL = 0, 1001, 1002, 1003
USERS = st.sampled_from([ROOT, ANN, BERT, CARL, "192.0.2.7"])
STEPS = st.lists(st.tuples(USERS, st.integers(-40, 40)), max_size=60)


def fill(shares: UserLimits, user: object) -> int:
    """Take one after another until refused; how many there were."""
    for number in range(limits.HANDLES + 1):
        try:
            shares.acquire(user)
        except OverLimit:
            return number
    raise AssertionError("never refused")


def test_one_user_has_at_most_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDLES", 160)
    shares = UserLimits("open files", "HANDLES")
    assert fill(shares, ANN) == 80
    with pytest.raises(OverLimit, match=r"too many open files \(expected at most 80 a user, 160 in all"):
        shares.acquire(ANN)
    assert fill(shares, BERT) == 70  # ten are kept
    assert fill(shares, CARL) == 0
    assert fill(shares, ROOT) == 10


def test_neighbours_over_tcp_are_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many addresses one has of them; the last places are for users whom the kernel names."""
    monkeypatch.setattr(limits, "HANDLES", 160)
    shares = UserLimits("open files", "HANDLES")
    assert [fill(shares, f"127.{n}.0.{n}") for n in range(20)] == [80] + [0] * 19
    assert fill(shares, "::1") == 0
    assert fill(shares, "192.0.2.1") == 60
    assert [fill(shares, host) for host in ("192.0.2.7", "::ffff:192.0.2.9", "198.51.100.1")] == [0, 0, 0]
    assert fill(shares, ANN) == 10
    assert fill(shares, ROOT) == 10
    assert shares.of("127.0.0.9") == 80
    shares.release("127.0.0.3", 80)
    assert fill(shares, "2001:db8::1") == 60
    shares.release("2001:db8::ffff", 60)
    shares.release("192.0.2.99", 60)
    assert shares.used == 20
    assert {block_of(f"fe80::{n}%eth0") for n in range(9)} == {"fe80::/64"}


def test_the_servers_user_has_the_kept_places_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDLES", 160)
    monkeypatch.setattr(os, "geteuid", lambda: CARL)
    shares = UserLimits("open files", "HANDLES")
    assert fill(shares, ANN) + fill(shares, BERT) == 150
    assert fill(shares, CARL) == 10


@given(STEPS)
def test_what_is_refused_changes_nothing(steps: list[tuple[object, int]]) -> None:
    shares, has = UserLimits("bytes", "ERRORS"), {}
    for user, size in steps:
        before = has.get(user, 0)
        after = max(before + size, 0)
        kept = 0 if user in (ROOT, os.geteuid()) else 2 if isinstance(user, str) else 1
        free = limits.ERRORS - kept * (limits.ERRORS // limits.SHARE_KEPT)
        fits = after <= before or (after <= limits.ERRORS // 2 and sum(has.values()) - before + after <= free)
        try:
            has[user] = shares.change(user, before, after)
            assert fits
        except OverLimit:
            assert not fits
        assert (shares.of(user), shares.used) == (has.get(user, 0), sum(has.values()))
