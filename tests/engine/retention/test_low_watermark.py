"""The least of many numbers, beside a dict that is searched."""

from __future__ import annotations

import random

from mqfs.engine.retention.low_watermark import LowWatermark
from mqfs.model import NEVER


def test_it_is_the_least_however_numbers_move() -> None:
    chance = random.Random(7)
    low, all_of_them = LowWatermark(), dict[int, int]()
    for _ in range(5_000):
        name = chance.randrange(5)
        if chance.random() < 0.1:
            low.remove(name)
            all_of_them.pop(name, None)
        else:
            value = all_of_them.get(name, 0) + chance.choice([-3, 1, 1, 2])
            low.set(name, value)
            all_of_them[name] = value
        if chance.random() < 0.5:
            assert low.value == min(all_of_them.values(), default=NEVER)
            assert low.name is None or all_of_them[low.name] == low.value
            assert (low.name is None) == (not all_of_them)


def test_its_rows_stay_as_few_as_its_numbers() -> None:
    low = LowWatermark()
    for value in range(1_000):
        low.set(value % 2, value)
        low.set(2, -value)
        low.remove(3)
        low.set(3, value)
    assert len(low._heap) <= 2 * 4 + 17
