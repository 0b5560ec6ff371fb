"""Reads that a mount of a server elsewhere continues after a restart: mqfs/ninep/server/resumable.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs.ninep.client import connection
from mqfs.ninep.client.connection import Client
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import Dialect
from mqfs.ninep.server.resumable import CLOSED, PARKABLE, POSITION, POSITIONED, READABLE, STATE, TAKES
from tests.support.eventually import HANG_S
from tests.support.server import Server, short_folder

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with short_folder() as folder, Server.at(folder) as server:
        dialect = Dialect.LINUX
        with connection.connect(server.address, aname=",mount", dialect=dialect, timeout=HANG_S) as client:
            yield client
        assert server.stop() == 0


def group(client: Client, name: str, *ctl: str) -> str:
    client.mkdir(name)
    with client.open(f"{name}/ctl", "w") as file:
        file.write("".join(f"{line}\n" for line in ctl).encode())
    client.create(f"{name}/s").close()
    return name


def write(client: Client, path: str, *bodies: bytes) -> None:
    with client.open(path, "w") as file:
        for body in bodies:
            file.write(body)


def read(client: Client, fid: int, offset: int = 0) -> tuple[int, bytes]:
    (slot,) = client.send([m.Tread(0, fid, offset, 4096)])
    data: Any = client.answer(slot, None)
    return POSITION.unpack_from(data.data)[0], data.data[POSITION.size :]


def state(client: Client, fid: int) -> tuple[int, int]:
    """Position and flags."""
    (slot,) = client.send([m.Tread(0, fid, 0, 0)])
    data: Any = client.answer(slot)
    position, _, flags = STATE.unpack(data.data)
    return position, flags


@pytest.mark.parametrize("file", ["s", "order"])
def test_a_read_begins_with_the_position_after_it_and_another_open_file_continues_there(
    client: Client, file: str
) -> None:
    name = group(client, f"positions-{file}", "replay all")
    write(client, f"{name}/s", b"one", b"two", b"three")
    bodies = [b"s\0"] * 3 if file == "order" else [b"one", b"two", b"three"]
    with client.open(f"{name}/{file}") as first, client.open(f"{name}/{file}") as second:
        position, body = read(client, first.channel.fid)
        assert body == bodies[0]
        assert read(client, second.channel.fid, position) == (position + 1, bodies[1])
        assert read(client, second.channel.fid)[1] == bodies[2]
        assert state(client, first.channel.fid)[0] == position


def test_the_state_tells_what_poll_tells_and_takes_nothing(client: Client) -> None:
    name = group(client, "state", "replay all")
    client.create(f"{name}/.consumers/w").close()
    with client.open(f"{name}/.consumers/w", "r+") as file:
        fid = file.channel.fid
        assert state(client, fid)[1] & (READABLE | TAKES | PARKABLE | POSITIONED) == TAKES | PARKABLE
        (changed,) = client.send([m.Tread(0, fid, 1, 0)])
        write(client, f"{name}/s", b"job")
        client.answer(changed)
        assert state(client, fid)[1] & (READABLE | CLOSED) == READABLE
        (slot,) = client.send([m.Tread(0, fid, 0, 4096)])
        reply: Any = client.answer(slot)
        assert reply.data == b"job", "a claim has no position before it"
        write(client, f"{name}/s", b"more")
        (slot,) = client.send([m.Tread(0, fid, len(b"job"), 4096)])
        reply = client.answer(slot)
        assert reply.data == b"more", "no end-of-file as for Linux v9fs, which reads until its buffer is full"


@pytest.mark.parametrize(("file", "mode"), [("s", "r"), ("order", "r"), (".cursor", "r+"), (".consumers/w", "r+")])
@pytest.mark.parametrize("flushed", [0, 1], ids=["the first", "a middle one"])
def test_the_newest_wait_for_the_state_outlives_the_flush_of_an_older_one(
    client: Client, file: str, mode: str, flushed: int
) -> None:
    name = group(client, f"waits-{file.rpartition('/')[2]}-{mode}-{flushed}", "replay all")
    client.create(f"{name}/.consumers/w").close()
    with client.open(f"{name}/{file}", mode) as opened:
        *older, newest = client.send([m.Tread(0, opened.channel.fid, 1, 0) for _ in range(flushed + 2)])
        client.flush(older[flushed])
        assert client.wait(older[flushed], time.monotonic() + HANG_S) is None
        write(client, f"{name}/s", b"job")
        reply: Any = client.answer(newest, time.monotonic() + HANG_S)
        assert STATE.unpack(reply.data)[2] & READABLE
        for slot in older:
            client.flush(slot)
            assert client.wait(slot, time.monotonic() + HANG_S) is None
