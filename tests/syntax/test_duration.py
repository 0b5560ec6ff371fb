"""Durations as the library writes them for the server."""

from __future__ import annotations

from datetime import timedelta

import pytest

from mqfs.errors import BadRequest
from mqfs.syntax.duration import format_duration, parse_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.0, "0"), (timedelta(0), "0"), (1, "1000ms"), (0.25, "250ms"), (timedelta(minutes=1), "60000ms"),
        (1e-7, "1ms"), (0.0004, "1ms"), (0.0012, "2ms"), (timedelta(microseconds=1_001), "2ms"), (0.001, "1ms"),
        (1.001, "1001ms"), ("5m", "5m"),
    ],
)  # fmt: skip
def test_what_is_not_0_stays_so(value: float | str | timedelta, text: str) -> None:
    assert format_duration(value) == text
    assert (parse_duration(text) == 0) == (text == "0")


@pytest.mark.parametrize("value", [-1, -0.001, timedelta(seconds=-1), 1e9, float("inf"), float("nan")])
def test_no_durations(value: float | timedelta) -> None:
    with pytest.raises(BadRequest):
        format_duration(value)
