"""The table of locks against a plain model: for every byte, who holds it and how."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import OverLimit
from mqfs.model import Wait
from mqfs.state.file_locks import END, Held, Key, Locks
from tests.support.campaign import seed, size

BYTES = 12
KEY = Key(5, False)
OWNERS = [(connection, "host", process) for connection in (1, 2) for process in (7, 8)]


class Model:
    """The holders of each byte."""

    def __init__(self) -> None:
        self.held: list[dict[tuple[int, str, int], tuple[bool, Any]]] = [{} for _ in range(BYTES)]

    def take(self, lock: Any) -> bool:
        for byte in range(lock.start, lock.end):
            for owner, (exclusive, _) in self.held[byte].items():
                if owner != lock.owner and (exclusive or lock.exclusive):
                    return False
        for byte in range(lock.start, lock.end):
            self.held[byte][lock.owner] = (lock.exclusive, lock.through)
        return True

    def release(self, owner: tuple[int, str, int], start: int, end: int) -> None:
        for byte in range(start, end):
            self.held[byte].pop(owner, None)

    def release_through(self, through: tuple[int, int]) -> None:
        for holders in self.held:
            for owner in [owner for owner, (_, by) in holders.items() if by == through]:
                del holders[owner]


def test_against_the_model() -> None:
    chance = random.Random(seed())
    for _ in range(size(200)):
        locks, model = Locks(), Model()
        for _ in range(60):
            start = chance.randrange(BYTES)
            end = chance.randrange(start + 1, BYTES + 1)
            owner = chance.choice(OWNERS)
            through = (owner[0], chance.randrange(2))
            what = chance.random()
            if what < 0.6:
                wanted = Held(owner, chance.random() < 0.5, start, end, through=through)
                free = locks.conflict(KEY, wanted) is None
                assert (locks.take(KEY, wanted, wait=False) is None) == free == model.take(wanted)
            elif what < 0.9:
                locks.release(KEY, owner, start, end)
                model.release(owner, start, end)
            else:
                locks.release_through(KEY, through)
                model.release_through(through)
        for owner in OWNERS:
            locks.release(KEY, owner)
        assert len(locks) == 0


def test_files_and_kinds_are_apart() -> None:
    locks = Locks()
    all_of_it = Held(OWNERS[0], True, 0, END)
    assert locks.take(Key(1, False), all_of_it, wait=False) is None
    assert locks.take(Key(2, False), all_of_it._replace(owner=OWNERS[2]), wait=False) is None
    assert locks.take(Key(1, True), all_of_it._replace(owner=OWNERS[2]), wait=False) is None
    assert locks.take(Key(1, False), Held(OWNERS[2], True, 5, 6), wait=False) is False


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for each user, whichever of its processes has the locks; those that wait count, too."""
    monkeypatch.setattr(limits, "LOCKS", 4)
    locks = Locks()
    mine, others = (Held(OWNERS[0], True, 0, 1, user=user) for user in (1001, 1002))
    assert locks.take(KEY, mine, wait=False) is None
    waits = locks.take(KEY, mine._replace(owner=OWNERS[1]), wait=True)
    assert isinstance(waits, Wait)
    for wait in (False, True):
        with pytest.raises(OverLimit, match=r"too many locks \(expected at most 2 a user, 4 in all"):
            locks.take(KEY, mine._replace(owner=OWNERS[2], start=4, end=5), wait=wait)
    assert locks.take(KEY, others._replace(start=4, end=5), wait=False) is None
    assert waits.cancel()
    assert locks.take(KEY, mine._replace(start=6, end=7), wait=False) is None
    locks.release(KEY, OWNERS[0])
    assert len(locks) == 0


def test_a_lock_is_not_split_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOCKS", 8)
    locks = Locks()
    assert locks.take(KEY, Held(OWNERS[0], True, 0, END, user=1001), wait=False) is None
    for start in (10, 20, 30):
        locks.release(KEY, OWNERS[0], start, start + 1)
    with pytest.raises(OverLimit):
        locks.release(KEY, OWNERS[0], 40, 41)
    assert locks.conflict(KEY, Held(OWNERS[1], True, 40, 41)) is not None
    locks.release(KEY, OWNERS[0], 0, 41)
    assert locks.conflict(KEY, Held(OWNERS[1], True, 40, 41)) is None


def test_who_waits_gets_it_in_order_and_with_it_what_it_waits_for_besides() -> None:
    locks, got = Locks(), []
    first, second, third = ((1, "host", process) for process in (1, 2, 3))
    assert locks.take(KEY, Held(first, True, 0, END), wait=True) is None
    for owner, start, end in ((second, 0, END), (third, 0, END), (second, 5, 6), (third, 5, 6)):
        step = locks.take(KEY, Held(owner, True, start, end), wait=True)
        step.subscribe(lambda _, told=(owner, start): got.append(told))  # type: ignore[union-attr, misc]
    locks.release(KEY, first)
    assert got == [(second, 0), (second, 5)]
    locks.release(KEY, second)
    assert got[2:] == [(third, 0), (third, 5)]
    locks.release(KEY, third)
    assert len(locks) == 0


@pytest.mark.parametrize("kind", ["ranges of one owner", "ranges of many", "shared flocks", "flocks that wait"])
def test_many_locks_of_a_file_take_no_longer_each(kind: str) -> None:
    locks, count = Locks(), 10_000
    key = Key(5, "flock" in kind)
    began = time.process_time()
    for number in range(count):
        owner = 0 if kind == "ranges of one owner" else number
        start, end = (0, END) if key.flock else (10 * number, 10 * number + 5)
        locks.take(key, Held(owner, kind != "shared flocks", start, end, through=7), wait=True)
    if kind == "ranges of one owner":
        locks.release_through(key, 7)
    for number in range(count):
        locks.release(key, number)
    assert len(locks) == 0
    assert time.process_time() - began < 2  # some 0.1 s; it was 8 to 38
