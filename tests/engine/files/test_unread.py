"""The messages that open files keep, read in part or to their end, are memory of the files' user: see PartialRead."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import OverLimit
from mqfs.model import User
from tests.support.queues import Queues, say

SIZE, FILES = 256 << 10, 64
SHARE = 8 * SIZE  # of a user
MINE, OTHER = User(1_001, 1_001), User(1_002, 1_002)
BOTH, READ = os.O_RDWR, os.O_RDONLY

Open = Callable[[Queues, int, User], Any]
PLAIN = ["replay all"]
WORK = ["replay all", "deliver one"]


def cursor(queues: Queues, number: int, user: User) -> Any:
    handle = queues.at(".cursor", BOTH, user)
    say(handle, "seek first")
    return handle


KINDS: dict[str, tuple[list[str], Open]] = {
    "read": (PLAIN, lambda queues, _, user: queues.at("s", READ, user)),
    "read and write": (PLAIN, lambda queues, _, user: queues.at("s", BOTH, user)),
    "order of": (PLAIN, cursor),
    "peek": (WORK, lambda queues, _, user: queues.at("s", READ, user)),
    "claim": (WORK, lambda queues, _, user: queues.at("s", BOTH, user)),
    "consumer": (PLAIN, lambda queues, _, user: queues.at(".consumers/w", BOTH, user)),
    "look at a consumer": (PLAIN, lambda queues, _, user: queues.at(".consumers/w", READ, user)),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[list[str], Open]:
    return KINDS[request.param]


def made(path: Path, ctl: list[str]) -> Queues:
    queues = Queues(*ctl, path=path / "store")
    queues.consumer()
    for name in ("g", "g/s", "g/.consumers/w"):
        node = queues.tree.find(User(0, 0), name)
        queues.tree.setattr(User(0, 0), node, mode=0o777 if name == "g" else 0o666)
    for number in range(FILES):
        queues.write("s", b"%d" % number + bytes(SIZE))
    return queues


def read_all(queues: Queues, open_one: Open, count: int, user: User) -> tuple[list[Any], int, int]:
    """The files that were opened, how many of their reads were refused, and the memory that was taken."""
    files = [open_one(queues, number, user) for number in range(FILES)]
    refused = 0
    tracemalloc.start()
    try:
        for handle in files:
            try:
                data = handle.read(count, 0)
                assert 0 < len(data) <= count
            except OverLimit:
                refused += 1
        return files, refused, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_what_is_read_in_part_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[list[str], Open]
) -> None:
    ctl, open_one = kind
    queues = made(tmp_path, ctl)
    before = queues.tree.memory.used
    monkeypatch.setattr(limits, "HELD_BYTES", 2 * (SHARE + before))
    files, refused, taken = read_all(queues, open_one, 1, MINE)
    assert refused > FILES // 2
    assert SHARE <= queues.tree.memory.used <= SHARE + before + 2 * SIZE
    assert taken < SHARE + 4 * SIZE
    assert len(open_one(queues, 0, OTHER).read(1, 0)) == 1  # others have a share of their own
    for handle in files[: FILES // 2]:
        handle.close()
    assert len(files[-1].read(1, 0)) == 1  # and so has the user again
    for handle in files[FILES // 2 :]:
        handle.close()
    assert queues.tree.memory.of(MINE.uid) == 0


@pytest.mark.parametrize("count", [2 * SIZE, SIZE // 4 + 100], ids=["whole", "in pieces"])
def test_what_is_read_out_is_no_burden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[list[str], Open], count: int
) -> None:
    """To any file of the user, with something to read or not."""
    ctl, open_one = kind
    queues = made(tmp_path, ctl)
    before = queues.tree.memory.used
    monkeypatch.setattr(limits, "HELD_BYTES", 2 * (SHARE + before))
    files = [open_one(queues, number, MINE) for number in range(FILES)]
    tracemalloc.start()
    for turn in range(2):
        for number in range(FILES if turn else 0):
            queues.write("s", b"%d" % number + bytes(SIZE))
        for handle in files:
            size = 0
            while size < SIZE:
                size += len(handle.read(count, 0))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert queues.tree.memory.of(MINE.uid) <= SHARE // 2 + SIZE
    assert taken < SHARE + 4 * SIZE
    open_one(queues, 0, MINE).read(1, 0)  # it is not refused
    for handle in files:
        handle.close()
        handle.push_back(bytes(SIZE))
    assert queues.tree.memory.of(MINE.uid) <= SIZE + 2


@pytest.mark.parametrize("pieces", [1, 4])
def test_what_was_not_delivered_is_given_again(tmp_path: Path, kind: tuple[list[str], Open], pieces: int) -> None:
    """Though it was read out: all of it, or its last pieces."""
    ctl, open_one = kind
    queues = made(tmp_path, ctl)
    handle = open_one(queues, 0, MINE)
    count = SIZE // pieces + 100
    given = [handle.read(count, number * count) for number in range(pieces)]
    for lost in range(1, pieces + 1):
        for piece in given[: -lost - 1 : -1]:
            handle.push_back(piece)
        again = [handle.read(count, number * count) for number in range(pieces - lost, pieces)]
        assert again == given[-lost:]
    assert queues.tree.memory.of(MINE.uid) <= SIZE + 2
    for piece in reversed(given):
        handle.push_back(piece)
    assert queues.tree.memory.of(MINE.uid) >= SIZE
    handle.close()
    assert queues.tree.memory.of(MINE.uid) == 0


@pytest.mark.parametrize("lost", range(5))
def test_a_message_acked_by_reading_comes_again_if_none_of_it_was_delivered(tmp_path: Path, lost: int) -> None:
    queues = made(tmp_path, WORK)
    handle = queues.at("s", BOTH, MINE)
    given = [handle.read(SIZE // 4 + 100) for _ in range(4)]
    for piece in given[: -lost - 1 : -1]:
        handle.push_back(piece)
    handle.close()
    assert queues.at("s", BOTH, MINE).read(2 * SIZE)[:1] == (b"0" if lost == 4 else b"1")


@pytest.mark.parametrize("offset", [0, 9 * SIZE], ids=["before", "after"])
@pytest.mark.parametrize("name", ["read", "read and write", "order of", "claim", "consumer"])
def test_a_read_outside_of_the_last_message_gets_its_rest(tmp_path: Path, name: str, offset: int) -> None:
    ctl, open_one = KINDS[name]
    handle = open_one(made(tmp_path, ctl), 0, MINE)
    body = handle.read(4, 2 * SIZE) + handle.read(100, offset)
    body += handle.read(SIZE, offset + 100)
    number = body.rstrip(b"\0")
    assert number.isdigit()
    assert body == number + bytes(SIZE)
    assert handle.read(9, 90 * SIZE)[:1] not in (b"", b"\0")
