"""Taking from a stream: the same over all transports, beside those who read its file, and what a death gives back."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import mqfs
from mqfs import Client, errors, limits
from mqfs.client import Claims, Group, Singles, aio
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, environment, short_folder, start


def work(tree: Client, name: str, *ctl: str, deliver: str = "one") -> Group:
    return tree.group(name, create=True, ctl=[f"deliver {deliver}", "sync off", "backoff 1ms 1ms", *ctl])


def waiting(group: Group, stream: str = "s") -> tuple[int, int]:
    row = group.stats().streams[stream].consumer
    assert row is not None
    return row.waiting, row.claimed


def drained(claims: Claims) -> list[bytes]:
    """The messages that are there now: published by this very client before."""
    bodies = []
    try:
        while True:
            claim = claims.get(0.1)
            claim.ack()
            bodies.append(claim.body)
    except TimeoutError:
        return bodies


@pytest.mark.parametrize("ack", ["ack read", "ack next"])
def test_a_clean_exit_acknowledges(tree: Client, name: str, ack: str) -> None:
    group = work(tree, name, ack)
    group.publish_many([("s", b"1"), ("t", b"no"), ("s", bytes(range(256)) * 3_000)])
    group.publish("s", "ünï", priority=9, headers={"a": "b"})
    got = []
    with group.take("s") as claims:
        for claim in claims:
            with claim:
                assert waiting(group)[1] == 1
                got.append((claim.stream, claim.body, claim.headers.get("a"), claim.deliveries))
            if len(got) == 3:
                break
    assert got == [("s", "ünï".encode(), "b", 1), ("s", b"1", None, 1), ("s", bytes(range(256)) * 3_000, None, 1)]
    assert waiting(group) == (0, 0)
    assert [message.stream for message in group.history()] == ["t"]


def test_each_message_is_for_one_of_many(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.create("s")
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def run() -> None:
        with group.take("s") as claims:
            for claim in claims:
                with claim:
                    if claim.body == b"end":
                        return
                    got.put(claim.body)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    group.publish_many(("s", str(number)) for number in range(300))
    group.publish_many(("s", b"end") for _ in threads)
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(int(got.get(timeout=1)) for _ in range(300)) == list(range(300))
    assert got.empty()


def test_a_body_of_any_size_is_one_message(tree: Client, name: str) -> None:
    group = work(tree, name)
    body = os.urandom(2_500_000)
    group.publish("s", body)
    group.publish("s", b"after")
    with group.take("s") as claims, group.take("s") as others, claims.get(HANG_S) as claim:
        assert claim.body == body
        assert others.get(HANG_S).body == b"after"
    assert waiting(group) == (1, 0)


def test_what_a_taker_leaves_comes_again(tree: Client, name: str) -> None:
    """At the end of its block uncounted, after an exception counted."""
    group = work(tree, name)
    group.publish("s", b"x")
    with group.take("s") as claims:
        assert claims.get(HANG_S).deliveries == 1
    claims = group.take("s")
    assert claims.get(HANG_S).deliveries == 1
    with pytest.raises(ZeroDivisionError), claims:
        1 / 0  # noqa: B018
    with group.take("s") as claims, claims.get(HANG_S) as claim:
        assert claim.deliveries == 2
    assert waiting(group) == (0, 0)


def test_retries_and_dead_letters(tree: Client, name: str) -> None:
    group = work(tree, name, "retries 3")
    group.publish("s", b"poison")
    seen = []
    with group.take("s") as claims:
        for _ in range(3):
            claim = claims.get(HANG_S)
            seen.append(claim.deliveries)
            with pytest.raises(ZeroDivisionError), claim:
                1 / 0  # noqa: B018
        assert seen == [1, 2, 3]
        (dead,) = group.history(pattern="dead")
        assert (dead.body, dead.headers["stream"], dead.headers["deliveries"]) == (b"poison", "s", "3")
        with group.take("dead") as letters, letters.get(HANG_S) as letter:
            assert letter.body == b"poison"
        assert waiting(group, "dead") == (0, 0)
        group.publish("s", b"worse")
        claims.get(HANG_S).dead("no good")
        group.redrive("s")
        with claims.get(HANG_S) as claim:
            assert (claim.body, claim.deliveries) == (b"worse", 1)


def test_every_word_about_a_claim(tree: Client, name: str) -> None:
    group = work(tree, name, "lease 1h")
    group.publish_many(("s", str(number)) for number in range(3))
    with group.take("s") as claims:
        first = claims.get(HANG_S)
        first.touch()
        first.release()
        assert (claims.get(HANG_S).body, first.settled) == (b"0", True)
        claims.get(HANG_S).nack(delay=3_600)
        claims.get(HANG_S).ack()
        with pytest.raises(errors.Stale):
            first.ack()
        with pytest.raises(TimeoutError):
            claims.get(0.01)
    row = group.stats().streams["s"].consumer
    assert row is not None
    assert (row.waiting, row.delayed) == (2, 1)


def test_a_lease_that_ran_out_and_one_that_is_renewed(tree: Client, name: str) -> None:
    group = work(tree, name, "lease 1500ms")  # short and yet long enough for a machine that is busy
    group.publish("s", b"x")
    with group.take("s") as claims, group.take("s") as others:
        claim, again = claims.get(HANG_S), others.get(HANG_S)
        assert (again.sequence, again.deliveries) == (claim.sequence, 2)
        with pytest.raises(errors.Stale, match="or no longer"):
            claim.ack()
        again.ack()
        group.publish("s", b"y")
        assert claims.get(HANG_S).body == b"y"  # the refusal's text is no message
    with group.take("s", renew=True) as claims, group.take("s") as others, claims.get(HANG_S):
        with pytest.raises(TimeoutError):
            others.get(2.5)
        assert waiting(group) == (0, 1)
    assert waiting(group) == (0, 0)


def test_a_stream_that_is_missing(tree: Client, name: str) -> None:
    group = work(tree, name)
    with pytest.raises(errors.NotFound):
        group.take("s", create=False)
    assert group.streams() == []
    with group.take("s") as claims:
        group.publish("s", b"1", create=False)
        claims.get(HANG_S).ack()
        group.remove("s")
        assert list(claims) == []
    assert group.streams() == []
    with pytest.raises(errors.NotFound):
        group.take("s", create=False)
    with pytest.raises(errors.NotFound):
        tree.group(f"{name}-2", create=True).take("s", create=False)


def test_it_is_no_consumer(tree: Client, name: str) -> None:
    """It stands in no list, and a name of one cannot stand for it."""
    group = work(tree, name)
    group.create("s")
    with group.take("s"):
        assert group.consumers() == []
        for call in (group.consume, group.remove_consumer, group.take):
            with pytest.raises(errors.BadName):
                call(".s")
    with group.consume("s") as claims, group.take("s") as takes:
        group.publish("s", b"for both")
        assert claims.get(HANG_S).body == takes.get(HANG_S).body == b"for both"


def test_a_group_that_delivers_to_all_has_what_is_for_one(tree: Client, name: str) -> None:
    group = work(tree, name, "replay all", deliver="all")
    group.publish("s", b"before")
    group.publish("s", b"first", single=True)
    with group.take("s") as claims, group.take("s") as others, group.subscribe() as reading:
        assert claims.get(HANG_S).body == b"first"
        group.publish("s", b"between")
        group.publish("s", b"second", single=True)
        assert others.get(HANG_S).body == b"second"
        for takes in (claims, others):
            with pytest.raises(TimeoutError):
                takes.get(0.05)
        assert reading.get(HANG_S).body == b"between"
    assert [message.body for message in group.history()] == [b"before", b"between"]
    with group.take("s") as claims:
        assert drained(claims) == [b"first", b"second"]
    with group.take("s") as claims, pytest.raises(TimeoutError):
        claims.get(0.05)


@pytest.mark.parametrize("replay", ["off", "all"])
def test_one_for_one_goes_to_one_of_takers_consumers_and_handlers(tree: Client, name: str, replay: str) -> None:
    """Handlers of `on` have what is for all."""
    group = work(tree, name, f"replay {replay}", deliver="all")
    group.create("s")
    handled: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    taken: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with group.take("s") as one, group.take("s") as two, group.consume("c") as named:

        def run(claims: Claims) -> None:
            for claim in claims:
                with claim:
                    taken.put(claim.body)

        def first(message: mqfs.Message) -> None:
            handled.put(message.body)

        def second(message: mqfs.Message) -> None:
            handled.put(message.body)

        group.on("s", first)
        group.on("#", second)
        threads = [threading.Thread(target=run, args=(claims,), daemon=True) for claims in (one, two, named)]
        for thread in threads:
            thread.start()
        for number in range(100):
            group.publish("s", str(number), single=True)
        group.publish("s", b"all")
        got = [taken.get(timeout=HANG_S) for _ in range(101)]
        assert sorted(got) == sorted([b"all", *(b"%d" % number for number in range(100))])
        assert [handled.get(timeout=HANG_S) for _ in range(2)] == [b"all"] * 2
        group.unsubscribe()
        for claims in (one, two, named):
            claims.finish()
        for thread in threads:
            thread.join(HANG_S)
    assert handled.empty()
    assert taken.empty()


def test_one_for_one_that_failed_is_taken_again(tree: Client, name: str) -> None:
    """By whoever takes from the stream; with the last retry it is a dead letter."""
    group = work(tree, name, "retries 2", deliver="all")
    with group.consume("c") as named, group.take("s", create=True) as claims:
        group.publish("s", b"x", single=True)
        claim = claims.get(HANG_S)
        with pytest.raises(TimeoutError):
            named.get(0.05)
        claim.nack()
        group.publish("s", b"for all")
        assert named.get(HANG_S).body == b"for all"
        with group.take("s") as others:
            again = others.get(HANG_S)
            assert (again.body, again.deliveries) == (b"x", 2)
            again.nack()
        with group.take("dead") as letters, letters.get(HANG_S) as letter:
            assert (letter.body, letter.headers["deliveries"]) == (b"x", "2")
        assert list(group.history(pattern="dead")) == []


# ---------------------------------------------------------------- handlers


@pytest.mark.parametrize("deliver", ["one", "all"])
def test_one_for_one_goes_to_one_handler(tree: Client, name: str, deliver: str) -> None:
    group = work(tree, name, deliver=deliver)
    group.create("s")
    calls: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def handler(number: int, message: mqfs.Message) -> None:
        calls.put((number, message.body))

    handlers = [partial(handler, number) for number in range(3)]
    working = [group.on("s", each, single=True, concurrency=2) for each in handlers]
    assert group.on("s", handlers[0], single=True, concurrency=2) is working[0]
    for number in range(100):
        group.publish("s", str(number), single=True)
    got = [calls.get(timeout=HANG_S) for _ in range(100)]
    assert sorted(body for _, body in got) == sorted(b"%d" % number for number in range(100))
    eventually(lambda: waiting_singles(group, deliver) == 0)
    assert group.unsubscribe("s") == 3
    assert not any(registration.active for registration in working)
    group.publish("s", b"later", single=True)
    with group.take("s") as claims:
        assert drained(claims) == [b"later"]
    assert calls.empty()


def waiting_singles(group: Group, deliver: str) -> int:
    if deliver == "one":
        return sum(waiting(group))
    return int((group.stats().streams["s"].singles or Singles()).first)


def test_a_handler_that_was_too_slow_is_called_again(tree: Client, name: str) -> None:
    group = work(tree, name, "lease 600ms", "retries 0")  # never a dead letter, however slow this machine is
    seen: list[bytes] = []
    lost: list[Exception] = []

    def handler(message: mqfs.Message) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            group.ctl("lease 1ms")  # it renews three times in 600 ms
            eventually(lambda: failed(group) >= 1)
            group.ctl("lease 1h")

    def failed(group: Group) -> int:
        row = group.stats().streams["s"].consumer
        return row.failed if row is not None else 0

    group.on("s", handler, single=True, on_error=lambda error, message: lost.append(error))
    group.publish("s", b"x")
    eventually(lambda: seen[1:2] == [b"x"] and waiting(group) == (0, 0))
    assert isinstance(lost[0], errors.Stale)


def test_a_handler_that_fails_is_called_again(tree: Client, name: str) -> None:
    group = work(tree, name, deliver="all")
    group.create("s")
    deliveries: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    errors_seen: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def handler(message: mqfs.Message) -> None:
        deliveries.put(message.body)
        if deliveries.qsize() == 1:
            raise ValueError("once")

    group.on("s", handler, single=True, on_error=lambda error, message: errors_seen.put(error))
    group.publish("s", b"x", single=True)
    assert isinstance(errors_seen.get(timeout=HANG_S), ValueError)
    eventually(lambda: deliveries.qsize() == 2)


def test_a_handler_for_one_message_leaves_the_others(tree: Client, name: str) -> None:
    group = work(tree, name, deliver="all")
    group.create("s")
    for number in range(5):
        group.publish("s", str(number), single=True)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    group.on("s", lambda message: got.put(message.body), single=True, once=True, concurrency=3).join(HANG_S)
    first = got.get(timeout=HANG_S)
    with group.take("s") as claims:
        assert sorted([first, *drained(claims)]) == [b"0", b"1", b"2", b"3", b"4"]
    assert got.empty()


def test_a_handler_ends_its_own_registration(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.create("s")
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    group.on("s", lambda _: ended.put(group.unsubscribe("s")), single=True)
    group.publish("s", b"x")
    assert ended.get(timeout=HANG_S) == 1
    eventually(lambda: sum(waiting(group)) == 0)


@pytest.mark.parametrize("deliver", ["one", "all"])
def test_a_handler_for_streams_to_come(tree: Client, name: str, deliver: str) -> None:
    """As in qlobber-fsq, it waits for its streams, and may name a pattern; each message is for one handler."""
    group = work(tree, name, deliver=deliver)
    group.create("log.a")
    calls: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for who in "one", "two":
        group.on("log.*", lambda message, who=who: calls.put((who, message.stream)), single=True)
        group.on(["none", "some"], lambda message, who=who: calls.put((who, message.stream)), single=True)
    wanted = [stream for stream in ("log.a", "log.b", "none", "some") for _ in range(10)]
    for stream in wanted:
        group.publish(stream, "x", single=deliver == "all")
    group.publish("other", "x", single=deliver == "all")
    assert sorted(calls.get(timeout=HANG_S)[1] for _ in wanted) == wanted
    group.remove("log.b")
    group.publish("log.b", "again", single=deliver == "all")
    assert calls.get(timeout=HANG_S)[1] == "log.b"
    assert group.unsubscribe() == 4
    assert calls.empty()
    group.publish("log.c", "x", single=deliver == "all")
    with group.take("log.c") as claims:
        assert claims.get(HANG_S).body == b"x"


def test_a_handler_ends_with_the_streams_that_it_names(tree: Client, name: str) -> None:
    group = work(tree, name)
    called: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    registration = group.on("s", lambda message: called.put(message.body), single=True)
    every = group.on("t.*", lambda message: None, single=True)
    group.publish("s", "x")
    assert called.get(timeout=HANG_S) == b"x"
    group.remove("s")
    registration.join(HANG_S)
    assert (registration.active, every.active) == (False, True)


def test_streams_of_a_handler_are_bounded(tree: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond the bound is reported once, and has its turn when another goes."""
    monkeypatch.setattr(limits, "HANDLER_THREADS", 4)
    group = work(tree, name)
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    reported: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    registration = group.on(
        "log.*", lambda message: called.put(message.stream), single=True, concurrency=2,
        on_error=lambda error, message: reported.put(error),
    )  # fmt: skip
    for stream in ("log.a", "log.b"):
        group.publish(stream, "x")
    assert {called.get(timeout=HANG_S) for _ in range(2)} == {"log.a", "log.b"}
    group.publish("log.c", "x")
    error = reported.get(timeout=HANG_S)
    assert isinstance(error, errors.OverLimit)
    assert "at most 4 threads of a handler, 2 for each stream" in str(error)
    with pytest.raises(errors.OverLimit):
        group.on("#", print, single=True, concurrency=2)
    group.remove("log.a")
    assert called.get(timeout=HANG_S) == "log.c"
    assert (registration.active, reported.empty()) == (True, True)


def test_a_handler_that_cannot_open_all_it_needs_leaves_nothing_open(
    tree: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = work(tree, name)
    group.create("s")
    opened: list[Claims] = []
    real = group._take

    def take(stream: str, **options: Any) -> Claims:
        if opened:
            raise errors.OverLimit("no more files")
        opened.append(real(stream, **options))
        return opened[0]

    monkeypatch.setattr(group, "_take", take)
    with pytest.raises(errors.OverLimit):
        group.on("s", print, single=True, concurrency=2)
    with pytest.raises(EOFError):
        opened[0].get(0.0)
    group.publish("s", b"x")
    monkeypatch.undo()
    with group.take("s") as claims, claims.get(HANG_S) as claim:
        assert claim.deliveries == 1


def test_what_no_handler_can_take(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.create("s")
    group.bind("view", "s")
    with pytest.raises(
        errors.BadRequest, match=r"single over the view 'view' \(expected streams, or a consumer over it"
    ):
        group.on(["s", "view"], print, single=True)
    with pytest.raises(errors.BadRequest, match="single with filters"):
        group.on("s", print, single=True, filters=[bool])
    assert group.unsubscribe() == 0


# ---------------------------------------------------------------- what only a server can do


TAKE = """
import sys, mqfs
with mqfs.connect(sys.argv[1], transport=sys.argv[2]) as client:
    with client.group("g").take("s") as claims:
        claim = claims.get()
        print(claim.body.decode(), claim.deliveries, flush=True)
        sys.stdin.read()
"""


def test_a_taker_that_is_killed_gives_back(server: Server) -> None:
    with server.connect() as client:
        group = work(client, "g", "retries 3")
        group.publish("s", b"x")
        for delivery in (1, 2):
            command = [sys.executable, "-c", TAKE, server.address, server.transport]
            with start(
                command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as taker:
                assert taker.stdout is not None
                assert taker.stdout.readline() == f"x {delivery}\n"
                assert waiting(group) == (0, 1)
                taker.kill()
        with group.take("s") as claims, claims.get(HANG_S) as claim:
            assert claim.deliveries == 3
        assert waiting(group) == (0, 0)


@pytest.mark.parametrize("deliver", ["one", "all"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_goes_on_when_the_server_comes_back(server: Server, number: int, deliver: str) -> None:
    """Claimed messages are delivered again; a kill counts it as a failed delivery."""
    with server.connect() as client:
        group = work(client, "g", "sync always", deliver=deliver)
        with group.take("s", create=True) as claims, group.take("s") as waits:
            group.publish("s", b"1", single=True)
            group.publish("s", b"2", single=True)
            held = claims.get(HANG_S)
            waits.get(HANG_S).ack()
            server.restart(number)
            with server.connect() as other:
                other.group("g").publish("s", b"3", single=True)
            again = waits.get(HANG_S)
            assert (again.body, again.deliveries) == (held.body, 1 + (number == signal.SIGKILL))
            again.ack()
            with pytest.raises((errors.Stale, errors.Disconnected)):
                held.ack()
            assert drained(claims) == [b"3"]


@pytest.mark.fuse
@pytest.mark.process
def test_beside_readers_of_the_file_on_the_mount(tmp_path: Path) -> None:
    with short_folder() as folder, Server.at(folder, mount=True) as server:
        beside_readers(server.address, server.path / "g")


def beside_readers(address: str, path: Path) -> None:
    with mqfs.connect(address) as client:
        group = work(client, "g")
        group.create("s")
        assert os.listdir(path / ".consumers") == []
        assert (path / ".consumers" / ".s").stat().st_ino != (path / "s").stat().st_ino
        output = path.parent.parent / "output"
        cats = []
        for _ in range(2):
            with open(path / "s", "r+b", buffering=0) as stream, open(output, "ab") as into:
                cats.append(subprocess.Popen(["cat"], stdin=stream, stdout=into))
        mine: list[bytes] = []
        with contextlib.ExitStack() as stack, group.take("s") as claims:
            for cat in cats:
                stack.callback(cat.wait)
                stack.callback(cat.kill)
            thread = threading.Thread(target=took, args=(claims, mine), daemon=True)
            thread.start()
            wanted = sorted(b"%d\n" % number for number in range(300))
            group.publish_many(("s", body) for body in wanted)
            eventually(
                lambda: sorted([*mine, *output.read_bytes().splitlines(keepends=True)]) == wanted, "all were had"
            )
            claims.finish()
            thread.join(HANG_S)
        assert mine
        assert output.stat().st_size


def took(claims: Claims, into: list[bytes]) -> None:
    for claim in claims:
        with claim:
            into.append(claim.body)


@pytest.mark.root
def test_who_may_not_read_the_stream_may_not_take(server: Server) -> None:
    with server.connect() as client, server.connect(user="nobody", transport="9p") as nobody:
        group = work(client, "g")
        group.publish("s", b"secret")
        with pytest.raises(errors.Denied):
            nobody.group("g").take("s")
        with group.take("s") as claims:
            assert claims.get(HANG_S).body == b"secret"


# ---------------------------------------------------------------- awaited


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize("how", ["9p", "auto", "inside"])
def test_awaited(request: pytest.FixtureRequest, tmp_path: Path, name: str, how: str, backend: str) -> None:
    opening = partial(aio.open, tmp_path / "store")
    if how != "inside":
        opening = partial(aio.connect, request.getfixturevalue("shared").address, transport=how)  # type: ignore[assignment]

    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["deliver one", "sync off"])
            with pytest.raises(errors.NotFound):
                async with group.take("s", create=False):
                    pass
            async with group.take("s", renew=False) as claims:
                await group.publish_many([("s", b"1"), ("s", b"2")])
                async with await claims.get() as claim:
                    assert claim.body == b"1"
                with anyio.move_on_after(0) as scope:
                    async with await claims.get():
                        await anyio.sleep_forever()
                assert scope.cancelled_caught
                async for claim in claims:
                    async with claim:
                        assert (claim.body, claim.deliveries) == (b"2", 1)
                    break
            assert waiting(group.sync) == (0, 0)

    anyio.run(main, backend=backend)
