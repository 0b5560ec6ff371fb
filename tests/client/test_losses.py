"""Losses are reported to a subscription, with a count and not too often; what is kept for it arrives whole.

The same over 9P, through rings and with the engine inside.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import ring
from mqfs.client import Client, Group, Subscription
from mqfs.client.message import Message
from mqfs.client.subscription import CursorSubscription
from mqfs.client.transport import ring_subscription
from mqfs.client.types import read_whole
from mqfs.errors import Disconnected, FellBehind
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server

SETTINGS = ([], ["replay last"], ["replay all"], ["replay all", "depth 20"], ["keep ring"], ["keep ring", "depth 20"])


def drain(reading: Subscription, is_last: Callable[[Message], bool]) -> tuple[list[Message], list[FellBehind]]:
    """All up to the last one, and what was said of losses."""
    found: list[Message] = []
    told: list[FellBehind] = []
    while not found or not is_last(found[-1]):
        try:
            found.append(reading.get(timeout=HANG_S))
        except FellBehind as error:
            told.append(error)
    return found, told


def flood(group: Group, count: int, size: int) -> None:
    group.publish_many(("s", b"%d " % number + bytes(size)) for number in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("lines", SETTINGS, ids=" ".join)
def test_a_reader_that_pauses_gets_all_or_is_told_how_many_it_lost(tree: Client, name: str, lines: list[str]) -> None:
    """The writer does more than a ring holds meanwhile."""
    count, size = 5_000, 4_000
    group = tree.group(name, create=True, ctl=lines)
    group.create("s")
    with group.subscribe("s") as reading:
        group.publish("s", b"first")
        assert reading.get(timeout=HANG_S).body == b"first"
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
        assert "messages of s were lost (expected a larger 'depth'" in str(error)


def test_a_small_depth_is_no_flood_of_errors(tree: Client, name: str) -> None:
    """A reader that is always behind gets a count of its losses once a second, and the messages between."""
    group = tree.group(name, create=True, ctl=["replay all", "depth 4"])
    group.create("s")
    began = time.monotonic()
    found: list[Message] = []
    told: list[FellBehind] = []
    with group.subscribe("s") as reading:
        for turn in range(200):
            group.publish_many(("s", b"%d %d" % (turn, number)) for number in range(10))
            try:
                found.append(reading.get(timeout=HANG_S))
            except FellBehind as error:
                told.append(error)
        group.publish("s", b"last")
        more = drain(reading, lambda message: message.body == b"last")
        found, told = found + more[0], told + more[1]
        while len(found) + sum(error.lost for error in told) < 2_001:  # the rest is reported within a second
            with pytest.raises(FellBehind) as caught:
                reading.get(timeout=HANG_S)
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


@pytest.mark.parametrize("timeout", [HANG_S, 0.0])
def test_a_loss_is_told_where_nothing_comes_behind_it(tree: Client, name: str, timeout: float) -> None:
    """Also by a `get` whose time is over when the report is due."""
    group = tree.group(name, create=True, ctl=["replay all"])
    group.create("s")

    def get() -> FellBehind | None:
        try:
            reading.get(timeout)
        except FellBehind as error:
            return error
        except TimeoutError:
            assert not timeout
        return None

    with group.history(1, pattern="s") as none, group.subscribe("s") as reading:
        assert list(none) == []
        group.publish("s", b"first")
        reading.get(timeout=HANG_S)
        if type(reading) is not CursorSubscription:
            return  # what was cleared is in the ring still
        group.publish_many(("s", b"%d" % number) for number in range(10))
        group.purge("s")
        error = eventually(get, "the loss")
        assert error is not None
        assert error.lost == 10


@pytest.mark.process
@pytest.mark.parametrize("failing", ["CursorSubscription", "_places"])
def test_a_change_of_rings_that_fails_again_and_again_holds_one_seat_and_one_cursor(
    shared: Server, name: str, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Until it succeeds; nothing is lost meanwhile."""
    if ring.MISSING:
        pytest.skip(ring.MISSING)
    where: Any = ring_subscription if failing == "CursorSubscription" else CursorSubscription
    real, failures, slots, cursors = getattr(where, failing), 5, [], []
    with shared.connect(transport="ring") as client, shared.connect(transport="9p") as other:
        group = client.group(name, create=True, ctl=["replay all"])
        with group.subscribe("s") as reading:
            group.publish("s", b"0")
            assert reading.get(timeout=HANG_S).body == b"0"
            other.group(name).ctl("ttl 1h")  # ends the ring
            group.publish_many(("s", b"%d" % number) for number in range(1, 4))

            def fail_at_first(*arguments: Any, **options: Any) -> Any:
                made = group._publisher._direct._attachment.now.ring  # type: ignore[union-attr]
                slots.append(sum(bool(slot and lives) for slot, _, _, _, lives in made.slots()))
                cursors.append(read_whole(other._link, f"{other.group(name).path}/.who").count(b".cursor"))
                if len(slots) <= failures:
                    raise Disconnected("the connection was lost")
                return real(*arguments, **options)

            monkeypatch.setattr(where, failing, fail_at_first)
            assert [reading.get(timeout=HANG_S).body for _ in range(3)] == [b"1", b"2", b"3"]
    assert slots == [1] * (failures + 1)
    assert set(cursors) == {0 if failing == "CursorSubscription" else 1}


@pytest.mark.process
def test_a_reader_that_was_overtaken_and_could_not_catch_up_loses_nothing(
    shared: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, it continues where it was."""
    if ring.MISSING:
        pytest.skip(ring.MISSING)

    def fail(*_: Any, **__: Any) -> Any:
        raise Disconnected("the connection was lost")

    with shared.connect(transport="ring") as client:
        group = client.group(name, create=True, ctl=["replay all"])
        with group.subscribe("s", reconnect=False) as reading:
            flood(group, 5_000, 4_000)
            group.publish("s", b"last")
            with monkeypatch.context() as patched:
                patched.setattr(ring_subscription, "CursorSubscription", fail)
                with pytest.raises(Disconnected):
                    reading.get(timeout=HANG_S)
            found, told = drain(reading, lambda message: message.body == b"last")
    assert [int(message.body.split()[0]) for message in found[:-1]] == list(range(5_000))
    assert told == []


def told(reading: Subscription, is_last: Callable[[Message], bool]) -> tuple[int, int]:
    """How many it gives up to the last one, and how many it says were lost."""
    found, losses = drain(reading, is_last)
    lost = sum(error.lost for error in losses)
    while True:
        try:
            reading.get(timeout=1.5)  # the loss between them is reported within a second
        except FellBehind as error:
            lost += error.lost
        except TimeoutError:
            return len(found), lost


def test_what_is_lost_between_messages_that_are_kept_is_told(tree: Client, name: str) -> None:
    """Two streams: one keeps all it has, of the other `depth` cuts the messages between."""
    group = tree.group(name, create=True, ctl=["replay all", "depth 3"])
    with tree.group(name).subscribe("#") as reading:
        if type(reading) is not CursorSubscription:
            return  # what was cut is in the ring still
        for number in range(3):
            group.publish("kept", b"%d" % number)
            group.publish_many(("cut", b"%d" % number) for number in range(10))
        group.publish("end", b"end")
        given, lost = told(reading, lambda message: message.stream == "end")
    assert given + lost == 34
    assert given == 7


def test_a_loss_before_the_first_message_is_counted(tree: Client, name: str) -> None:
    """A loss among the messages that were kept when it began."""
    group = tree.group(name, create=True, ctl=["replay all", "depth 5"])
    group.publish_many(("s", b"%d" % number) for number in range(20))
    with group.subscribe("s", existing=True) as reading:
        group.publish_many(("s", b"%d" % number) for number in range(20, 27))
        given, lost = told(reading, lambda message: message.body == b"26")
    assert given + lost == 12


@pytest.mark.process
@pytest.mark.parametrize("lines", [[], ["replay all"]], ids=" ".join)
def test_who_begins_when_the_ring_has_just_ended_gets_what_comes(shared: Server, name: str, lines: list[str]) -> None:
    """And nothing that was there before."""
    if ring.MISSING:
        pytest.skip(ring.MISSING)
    with shared.connect(transport="ring") as client, shared.connect(transport="9p") as other:
        group, there = client.group(name, create=True, ctl=lines), other.group(name)
        group.publish("s", b"0")
        there.ctl("ttl 1h")  # ends the ring
        there.publish("s", b"1")
        with group.subscribe("*") as reading:
            there.publish_many(("s", b"%d" % number) for number in range(2, 5))
            assert [reading.get(timeout=HANG_S).body for _ in range(3)] == [b"2", b"3", b"4"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("lines", [[], ["replay last"], ["replay last", "ttl 1h"]], ids=" ".join)
def test_what_a_server_that_was_started_again_has_not_is_told(server: Server, number: int, lines: list[str]) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=lines)
        group.create("s")
        with group.subscribe("*") as reading:
            group.publish("s", b"first")
            assert reading.get(timeout=HANG_S).body == b"first"
            server.restart(number)
            with server.connect() as other:
                other.group("g").publish_many(("s", b"%d" % number) for number in range(200))
                other.group("g").stats()  # looks at what is kept
                given, lost = 0, 0
                try:
                    given += reading.get(timeout=HANG_S).body != b""  # now it is there again
                except FellBehind as error:
                    lost = error.lost
                other.group("g").publish("s", b"last")
                more = told(reading, lambda message: message.body == b"last")
    assert given + lost + sum(more) >= 201


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 3])
def test_the_sequences_that_a_kill_leaves_out_are_no_loss(server: Server, before: int) -> None:
    """Nor where all that was there, and that it had, has outlived its ttl. A pattern is no setting."""
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all", "ttl 1s", "bind v 'a\rreplay off\rb'"])
        group.create("s")
        with group.subscribe("s") as reading:
            group.publish_many(("s", b"%d" % number) for number in range(before))
            assert [reading.get(timeout=HANG_S).body for _ in range(before)] == [b"%d" % n for n in range(before)]
            eventually(lambda: not group.stats().streams["s"].messages)
            server.restart(signal.SIGKILL)
            with server.connect() as other:
                other.group("g").ctl("ttl 1h")
                other.group("g").publish("s", b"last")
                assert reading.get(timeout=HANG_S).body == b"last"


@pytest.mark.slow
def test_the_first_subscription_after_a_restart_finds_the_server(server: Server) -> None:
    with server.connect() as client:
        group = client.group("g", create=True)
        group.publish("s", b"0")
        server.restart()
        try:
            reading = group.subscribe("s")
        except Disconnected:
            assert server.transport == "9p"
            reading = group.subscribe("s")
        with reading, server.connect() as other:
            other.group("g").publish("s", b"1")
            assert reading.get(timeout=HANG_S).body == b"1"
