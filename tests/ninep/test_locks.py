"""The table of locks against a plain model: for every byte, who holds it and how."""

from __future__ import annotations

import random

import pytest

from mqfs import limits
from mqfs.errors import OverLimit
from mqfs.ninep.locks import END, Lock, Locks, range_of
from tests.campaign import seed, size

BYTES = 12
OWNERS = [(connection, "host", process) for connection in (1, 2) for process in (7, 8)]


class Model:
    """Of each byte, its holders."""

    def __init__(self) -> None:
        self.held: list[dict[tuple[int, str, int], tuple[bool, int]]] = [{} for _ in range(BYTES)]

    def take(self, lock: Lock) -> bool:
        for byte in range(lock.start, lock.end):
            for owner, (exclusive, _) in self.held[byte].items():
                if owner != lock.owner and (exclusive or lock.exclusive):
                    return False
        for byte in range(lock.start, lock.end):
            self.held[byte][lock.owner] = (lock.exclusive, lock.fid)
        return True

    def release(self, owner: tuple[int, str, int], start: int, end: int) -> None:
        for byte in range(start, end):
            self.held[byte].pop(owner, None)

    def release_fid(self, connection: int, fid: int) -> None:
        for holders in self.held:
            for owner in [owner for owner, (_, by) in holders.items() if (owner[0], by) == (connection, fid)]:
                del holders[owner]


def test_against_the_model() -> None:
    chance = random.Random(seed())
    for _ in range(size(200)):
        locks, model = Locks(), Model()
        for _ in range(60):
            start = chance.randrange(BYTES)
            end = chance.randrange(start + 1, BYTES + 1)
            owner, fid = chance.choice(OWNERS), chance.randrange(2)
            what = chance.random()
            if what < 0.6:
                wanted = Lock(owner, fid, chance.random() < 0.5, start, end)
                free = locks.conflict(5, wanted) is None
                assert locks.take(5, wanted) == free == model.take(wanted)
            elif what < 0.9:
                locks.release(5, owner, start, end)
                model.release(owner, start, end)
            else:
                locks.release_fid(5, owner[0], fid)
                model.release_fid(owner[0], fid)
        for owner in OWNERS:
            locks.release(5, owner, 0, END)
        assert len(locks) == 0


def test_files_are_apart() -> None:
    locks = Locks()
    assert locks.take(1, Lock(OWNERS[0], 1, True, 0, END))
    assert locks.take(2, Lock(OWNERS[2], 1, True, 0, END))
    assert not locks.take(1, Lock(OWNERS[2], 1, True, 5, 6))


def test_ranges() -> None:
    assert range_of(5, 0) == (5, END)
    assert range_of(5, 3) == (5, 8)
    assert range_of(5, END - 1) == (5, END)


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOCKS", 2)
    locks = Locks()
    for start in (0, 2):
        assert locks.take(1, Lock(OWNERS[0], 1, True, start, start + 1))
    with pytest.raises(OverLimit):
        locks.take(1, Lock(OWNERS[0], 1, True, 4, 5))
