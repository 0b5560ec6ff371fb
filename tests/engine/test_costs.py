"""What positions and looks cost, in calls: nothing is walked that can be searched."""

from __future__ import annotations

import os
from typing import Any

from tests.calls import calls
from tests.engine.conftest import Hand


def selecting(streams: int, patterns: int) -> Any:
    """The calls of a `select`, and of the look for what it may show."""
    hand = Hand("replay all")
    for number in range(streams):
        hand.stream(f"a{number}.b.c")
    cursor = hand.open(".cursor", os.O_RDWR)
    line = "select " + " ".join(f"#.x{number}.*" for number in range(patterns)) + "\n"

    def do() -> None:
        cursor.write(line.encode())
        assert cursor.streams() == {}

    return calls(do)


def test_patterns_are_matched_with_a_name_all_at_once() -> None:
    few = selecting(200, 4) - selecting(100, 4)
    assert selecting(200, 400) - selecting(100, 400) <= 2 * few
