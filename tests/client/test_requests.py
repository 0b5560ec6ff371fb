"""Requests and replies: a temporary stream for each, which goes with the requester."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import pytest

from mqfs import Claim, Client, errors
from mqfs.client import Group
from mqfs.client.aio import AsyncClient
from tests.client.opening import Opening
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server


@contextmanager
def adder(group: Group) -> Iterator[list[Claim]]:
    """A service over the stream `sums`; the claims that it had."""
    group.create("sums")
    had: list[Claim] = []

    def add(claim: Claim) -> None:
        had.append(claim)
        group.reply(claim.message, str(sum(map(int, claim.body.split()))), headers={"unit": "m"})

    worker = group.work("adder", add, over="sums")
    try:
        yield had
    finally:
        worker.stop()


def streams(group: Group) -> list[str]:
    return [name for name in group.streams() if name.startswith("reply.")]


@pytest.mark.parametrize("deliver", ["all", "one"])
@pytest.mark.parametrize("replay", ["off", "all"])
def test_a_reply(tree: Client, name: str, deliver: str, replay: str) -> None:
    group = tree.group(name, create=True, ctl=[f"replay {replay}", f"deliver {deliver}"])
    with adder(group) as had:
        for number in range(3):
            reply = group.request("sums", f"{number} 5", headers={"k": "v"}, timeout=patient(10))
            assert reply.body == b"%d" % (number + 5)
            assert reply.headers["unit"] == "m"
            assert "reply-to" not in reply.headers
        assert {claim.message.headers["k"] for claim in had} == {"v"}
        assert len({claim.message.headers["reply-to"] for claim in had}) == 3
    assert streams(group) == []


def test_many_requesters_at_once(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    got: dict[int, bytes] = {}

    def ask(number: int) -> None:
        got[number] = group.request("sums", f"{number} {number}", timeout=patient(20)).body

    with adder(group):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
    assert got == {number: b"%d" % (2 * number) for number in range(8)}
    assert streams(group) == []


def test_a_large_reply(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    body = os.urandom(3_000_000)
    group.create("s")
    worker = group.work("w", lambda claim: group.reply(claim.message, body), over="s")
    assert group.request("s", b"?", timeout=patient(20)).body == body
    worker.stop()
    assert streams(group) == []


def test_without_a_reply(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    group.create("s")
    with pytest.raises(TimeoutError, match=r"no reply from stream 's' in 0\.2 s"):
        group.request("s", b"?", timeout=0.2)
    assert streams(group) == []
    (request,) = eventually(lambda: [row for row in [group.stats().streams["s"]] if row.messages == 0])
    assert request.written == 1  # it lives no longer than its requester waits


@pytest.mark.parametrize("size", [1, 1_500_000])
def test_a_request_waits_for_room_no_longer_than_its_time(tree: Client, name: str, size: int) -> None:
    group = tree.group(name, create=True, ctl=["replay all", "deliver one", "full block", "depth 2"])
    group.publish_many([("s", b"1"), ("s", b"2")])
    with pytest.raises(TimeoutError, match=r"no reply from stream 's' in 0\.2 s"):
        group.request("s", bytes(size), timeout=0.2)
    assert streams(group) == []
    assert [message.body for message in group.history(pattern="s")] == [b"1", b"2"]


def test_a_reply_that_comes_too_late(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    group.create("s")

    def ask() -> None:
        with suppress(TimeoutError):
            group.request("s", b"?", timeout=1)

    with group.subscribe("s") as requests:
        threading.Thread(target=ask).start()
        request = requests.get(HANG_S)
        eventually(lambda: not streams(group))
        with pytest.raises(errors.NotFound, match="reply failed: no stream 'reply"):
            group.reply(request, b"late")
    assert streams(group) == []  # nor did the reply make it


def test_what_is_no_request(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    group.publish("s", b"x")
    (message,) = group.history()
    with pytest.raises(errors.BadRequest, match="message 1 has no header 'reply-to'"):
        group.reply(message, b"y")
    for timeout in (0, -1, 1e6):
        with pytest.raises(errors.BadRequest, match="request failed: timeout"):
            group.request("s", b"x", timeout=timeout)
    with pytest.raises(errors.NotFound):
        group.request("missing", b"x")
    assert group.streams() == ["s"]


def test_a_stream_without_readers_is_said_at_once(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    group.create("s")
    with pytest.raises(errors.NotFound, match="no consumer and no reader"):
        group.request("s", b"x", timeout=HANG_S)
    assert streams(group) == []


def test_replies_that_go_in_a_circle_end(tree: Client, name: str) -> None:
    """A request whose replies go to its own stream: the reply is no request."""
    group = tree.group(name, create=True, ctl=["replay all", "retries 2", "backoff 10ms 10ms"])
    group.create("s")
    worker = group.work("w", lambda claim: group.reply(claim.message, b"again"), over="s", on_error=lambda *_: None)
    group.publish("s", b"first", headers={"reply-to": "s"})
    eventually(lambda: group.stats().dead_letters == 1)
    worker.stop()
    assert group.stats().streams["s"].written == 2


def test_a_schedule(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    receipt = group.schedule("tick", "s", b"tick", every=1, headers={"k": "v"})
    assert 0 < receipt.time_ns - time.time_ns() < 2e9
    assert group.schedule("tick", "s", b"tick", every=1, headers={"k": "v"}).duplicate
    assert group.stats().schedules["tick"].every == "1s"
    with group.subscribe("s", existing=True) as messages:
        assert messages.get(HANG_S).headers["id"].startswith("tick@20")
    group.unschedule("tick")
    assert group.stats().schedules == {}
    with pytest.raises(errors.NotFound):
        group.unschedule("tick")
    for wrong in ({}, {"every": 1, "cron": "* * * * *"}, {"every": 0.1}, {"cron": "x"}):
        with pytest.raises(errors.BadCommand):
            group.schedule("tick", "s", b"x", **wrong)  # type: ignore[arg-type]


def test_from_an_async_program(opening: Opening, backend: str) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with opening() as client:
                await talk(client)

    async def talk(client: AsyncClient) -> None:
        group = await client.group(f"asked-{backend}", create=True)
        await group.create("s")

        async def answer(claim: Any) -> None:
            await group.reply(claim.message, claim.body[::-1])

        worker = await group.work("w", answer, over="s")
        assert (await group.request("s", b"abc", timeout=patient(10))).body == b"cba"
        await worker.stop()

    anyio.run(main, backend=backend)


ASK = """
import mqfs, sys
with mqfs.connect(sys.argv[1]) as client:
    client.group("g").request("s", b"?", timeout=600)
"""


@pytest.mark.process
def test_a_requester_that_is_killed_leaves_nothing(server: Server) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.create("s")
        asking = subprocess.Popen([sys.executable, "-c", ASK, server.address])
        try:
            eventually(lambda: streams(group) and group.stats().streams["s"].messages)
            asking.send_signal(signal.SIGKILL)
            eventually(lambda: not streams(group))
        finally:
            asking.kill()
            asking.wait()


@pytest.mark.process
def test_a_server_that_is_killed_leaves_nothing(server: Server) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.create("s")
        failed: list[Exception] = []

        def ask() -> None:
            try:
                group.request("s", b"?", timeout=600)
            except (errors.Disconnected, errors.NotFound) as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: streams(group))
        server.restart()
        thread.join(HANG_S)
        assert failed
        assert streams(group) == []
