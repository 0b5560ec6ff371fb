"""What a subscription misses it is told, with a count and not too often; and what is kept for it arrives whole.

The same over 9P, through rings and with the engine inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import ring
from mqfs.client import Client, Group, Reading, ring_reading
from mqfs.client.link import read_whole
from mqfs.errors import Disconnected, FellBehind
from mqfs.types import Message
from tests.client.conftest import Away

SETTINGS = ([], ["replay last"], ["replay all"], ["replay all", "depth 20"], ["keep ring"], ["keep ring", "depth 20"])


def drain(reading: Reading, is_last: Callable[[Message], bool]) -> tuple[list[Message], list[FellBehind]]:
    """All up to the last one, and what was said of losses."""
    found: list[Message] = []
    told: list[FellBehind] = []
    while not found or not is_last(found[-1]):
        try:
            found.append(reading.get(timeout=30))
        except FellBehind as error:
            told.append(error)
    return found, told


def flood(group: Group, count: int, size: int) -> None:
    group.publish_many(("s", b"%d " % number + bytes(size)) for number in range(count))


@pytest.mark.parametrize("lines", SETTINGS, ids=" ".join)
def test_a_reader_that_pauses_gets_all_or_is_told_how_many_it_lost(tree: Client, name: str, lines: list[str]) -> None:
    """The writer does more than a ring holds meanwhile."""
    count, size = 5_000, 4_000
    group = tree.group(name, create=True, ctl=lines)
    group.create("s")
    with group.subscribe("s") as reading:
        group.publish("s", b"first")
        assert reading.get(timeout=10).body == b"first"
        flood(group, count, size)
        group.publish("s", b"last")
        began = time.monotonic()
        found, told = drain(reading, lambda message: message.body == b"last")
    numbers = [int(message.body.split()[0]) for message in found[:-1]]
    assert numbers == sorted(set(numbers))
    lost = count - len(numbers)
    assert sum(error.lost for error in told) >= lost
    assert len(told) <= 1 + (time.monotonic() - began)
    if not lost:
        assert told == []
    for error in told:
        assert "messages of s were lost (a larger 'depth'" in str(error)


def test_a_small_depth_is_no_flood_of_errors(tree: Client, name: str) -> None:
    """A reader that is always behind is told once a second how many it lost since, and gets the messages between."""
    group = tree.group(name, create=True, ctl=["replay all", "depth 4"])
    group.create("s")
    began = time.monotonic()
    found: list[Message] = []
    told: list[FellBehind] = []
    with group.subscribe("s") as reading:
        for turn in range(200):
            group.publish_many(("s", b"%d %d" % (turn, number)) for number in range(10))
            try:
                found.append(reading.get(timeout=10))
            except FellBehind as error:
                told.append(error)
        group.publish("s", b"last")
        more = drain(reading, lambda message: message.body == b"last")
        found, told = found + more[0], told + more[1]
        while len(found) + sum(error.lost for error in told) < 2_001:  # the rest is told within a second
            with pytest.raises(FellBehind) as caught:
                reading.get(timeout=10)
            told.append(caught.value)
    assert len(told) <= 2 + (time.monotonic() - began)


@pytest.mark.parametrize("lines", [[], ["replay last"], ["keep ring"]], ids=" ".join)
@pytest.mark.parametrize("size", [8_000_000, 8_600_000, 14_000_000])
def test_large_bodies_arrive(tree: Client, name: str, lines: list[str], size: int) -> None:
    """More of them than half a ring, which ends it: who follows changes over, and has missed nothing."""
    group = tree.group(name, create=True, ctl=lines)
    group.create("s")
    with group.subscribe("s") as one, group.subscribe("#") as other:
        group.publish("s", b"before")
        group.publish("s", bytes(size))
        group.publish("s", b"after")
        for reading in one, other:
            found, told = drain(reading, lambda message: message.body == b"after")
            assert [len(message.body) for message in found] == [6, size, 5]
            assert told == []


def test_a_loss_is_told_where_nothing_comes_behind_it(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    group.create("s")
    with group.history(1, pattern="s") as none, group.subscribe("s") as reading:
        assert list(none) == []
        group.publish("s", b"first")
        reading.get(timeout=10)
        if type(reading) is not Reading:
            return  # what was cleared is in the ring still
        group.publish_many(("s", b"%d" % number) for number in range(10))
        group.purge("s")
        with pytest.raises(FellBehind) as caught:
            reading.get(timeout=10)
        assert caught.value.lost == 10


@pytest.mark.parametrize("failing", ["Reading", "_places"])
def test_a_change_of_rings_that_fails_again_and_again_holds_one_seat_and_one_cursor(
    shared: Away, name: str, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Until it succeeds; nothing is lost meanwhile."""
    if ring.MISSING:
        pytest.skip(ring.MISSING)
    where: Any = ring_reading if failing == "Reading" else Reading
    real, failures, seats, cursors = getattr(where, failing), 5, [], []
    with shared.connect(transport="ring") as client, shared.connect(transport="9p") as other:
        group = client.group(name, create=True, ctl=["replay all"])
        with group.subscribe("s") as reading:
            group.publish("s", b"0")
            assert reading.get(timeout=10).body == b"0"
            other.group(name).ctl("ttl 1h")  # ends the ring
            group.publish_many(("s", b"%d" % number) for number in range(1, 4))

            def fail_at_first(*arguments: Any, **options: Any) -> Any:
                made = group._publisher._direct._now.ring  # type: ignore[union-attr]
                seats.append(sum(bool(seat and lives) for seat, _, _, _, lives in made.seats()))
                cursors.append(read_whole(other._link, f"{other.group(name).path}/.who").count(b".cursor"))
                if len(seats) <= failures:
                    raise Disconnected("the connection was lost")
                return real(*arguments, **options)

            monkeypatch.setattr(where, failing, fail_at_first)
            assert [reading.get(timeout=20).body for _ in range(3)] == [b"1", b"2", b"3"]
    assert seats == [1] * (failures + 1)
    assert set(cursors) == {0 if failing == "Reading" else 1}


def test_a_reader_that_was_overtaken_and_could_not_catch_up_loses_nothing(
    shared: Away, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, it goes on where it was."""
    if ring.MISSING:
        pytest.skip(ring.MISSING)

    def fail(*_: Any, **__: Any) -> Any:
        raise Disconnected("the connection was lost")

    with shared.connect(transport="ring") as client:
        group = client.group(name, create=True, ctl=["replay all"])
        with group.subscribe("s") as reading:
            flood(group, 5_000, 4_000)
            group.publish("s", b"last")
            with monkeypatch.context() as patched:
                patched.setattr(ring_reading, "Reading", fail)
                with pytest.raises(Disconnected):
                    reading.get(timeout=10)
            found, told = drain(reading, lambda message: message.body == b"last")
    assert [int(message.body.split()[0]) for message in found[:-1]] == list(range(5_000))
    assert told == []
