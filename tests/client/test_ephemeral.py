"""Messages with `ephemeral`: to who subscribes in shared memory, in order with the others, and never in the log.

They may be lost. The others are not.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqfs
from mqfs import Receipt, errors, ring
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, environment, short_folder

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)]


@pytest.fixture
def server() -> Iterator[Server]:
    with short_folder() as folder, Server.at(folder, transport="ring") as server:
        yield server


def is_part(some: list[bytes], all_in_order: list[bytes]) -> bool:
    """Whether they are some of them, in their order."""
    rest = iter(all_in_order)
    return all(body in rest for body in some)


def in_log(bodies: list[bytes]) -> list[bytes]:
    return [body for body in bodies if body.startswith((b"log", b"end"))]


def test_subscribers_in_shared_memory_get_it_in_order(server: Server) -> None:
    with server.connect() as writer, server.connect() as reader, server.connect(transport="9p") as other:
        group = writer.group("g", create=True, ctl=["replay all"])
        group.create("s")
        got: list[bytes] = []
        done = threading.Event()

        def handler(message: mqfs.Message) -> None:
            got.append(message.body)
            if message.body == b"end":
                done.set()

        reader.group("g").on("#", handler)
        with reader.group("g").subscribe() as messages, other.group("g").subscribe() as logged:
            for number in range(100):
                assert group.publish("s", b"log %d" % number).sequence
                for way in ("a", "b"):
                    assert group.publish("s", f"{way} {number}", ephemeral=True) == Receipt(retained=False)
            group.publish("s", b"end")
            wanted = [f"{way} {number}".encode() for number in range(100) for way in ("log", "a", "b")] + [b"end"]
            stored = in_log(wanted)
            received = [messages.get(HANG_S).body]
            while received[-1] != b"end":
                received.append(messages.get(HANG_S).body)
            assert [logged.get(HANG_S).body for _ in stored] == stored
        assert done.wait(HANG_S)
        for bodies in (received, got):
            assert is_part(bodies, wanted)
            assert in_log(bodies) == stored
        assert [message.body for message in group.history()] == stored
        assert group.stats().streams["s"].messages == len(stored)


LISTEN = """
import sys, mqfs
with mqfs.connect(sys.argv[1], transport="ring") as client:
    with client.group("g").subscribe("s") as messages:
        print("ready", flush=True)
        for message in messages:
            print(message.body.decode(), flush=True)
"""


def test_it_reaches_another_process_and_no_disk(server: Server) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.create("s")
        group.publish("s", b"kept")
        command = [sys.executable, "-c", LISTEN, server.address]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            while not select.select([process.stdout], [], [], 0)[0]:
                group.publish("s", "secret", ephemeral=True)
            assert process.stdout.readline() == "secret\n"
            process.kill()
        group.publish("s", b"last")
        consumer = group.consume("c")
        with consumer:
            assert [consumer.get(HANG_S).body for _ in range(2)] == [b"kept", b"last"]
    server.stop()
    files = [file for file in Path(server.folder / "store").rglob("*") if file.is_file()]
    assert not any(b"secret" in file.read_bytes() for file in files)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_shows_none(server: Server, number: int) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all", "sync always"])
        group.create("s")
        with group.subscribe() as messages:
            for round in range(3):
                group.publish("s", f"log {round}".encode())
                group.publish("s", b"gone", ephemeral=True)
                assert next_of_log(messages) == b"log %d" % round
                os.kill(server.pid, number)
                server.restart()
                assert [m.body for m in group.history()] == [b"log %d" % n for n in range(round + 1)]
            group.publish("s", b"end")
            assert next_of_log(messages) == b"end"


def next_of_log(messages: mqfs.client.Subscription) -> bytes:
    return next(body for message in messages if (body := message.body) != b"gone")


def test_what_it_takes(server: Server) -> None:
    with server.connect() as client, server.connect(transport="9p") as by_9p:
        group = client.group("g", create=True)
        for options in ({"ttl": 5}, {"id": "x"}, {"single": True}, {"headers": {"a": "b"}}):
            with pytest.raises(errors.BadRequest, match=f"ephemeral with {next(iter(options))}"):
                group.publish("s", b"x", ephemeral=True, **options)  # type: ignore[arg-type]
        with pytest.raises(errors.BadRequest, match="with wait_s"):
            group.publish("s", b"x", ephemeral=True, wait_s=1)
        with pytest.raises(errors.BadRequest, match="with no shared memory"):
            by_9p.group("g").publish("s", b"x", ephemeral=True)
        with pytest.raises(errors.BadRequest, match="with an empty body"):
            group.publish("s", b"", ephemeral=True)
        with pytest.raises(errors.TooLong):
            group.publish("s", bytes(1_044_481), ephemeral=True)
        with pytest.raises(errors.NotFound):
            group.publish("s", b"x", ephemeral=True, create=False)
        group.publish("s", b"x", ephemeral=True)
        work = client.group("w", create=True, ctl=["deliver one"])
        work.create("s")
        with pytest.raises(errors.MqfsError):
            work.publish("s", b"x", ephemeral=True)


def test_without_a_server(tmp_path: Path) -> None:
    with mqfs.open(tmp_path) as client, pytest.raises(errors.BadRequest, match="no shared memory"):
        client.group("g", create=True).publish("s", b"x", ephemeral=True)


def test_many_of_them_hold_up_nothing(server: Server) -> None:
    """More than the ring holds, and no client reads: others are stored all the same."""
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all", "sync off"])
        group.create("s")
        body = bytes(60_000)
        for number in range(2_000):
            group.publish("s", body, ephemeral=True)
            if number % 100 == 0:
                group.publish("s", b"%d" % number)
        eventually(lambda: stored(group) == 20)
        assert [message.body for message in group.history()] == [b"%d" % n for n in range(0, 2_000, 100)]


def stored(group: mqfs.client.Group) -> int:
    return int(group.stats().streams["s"].messages)
