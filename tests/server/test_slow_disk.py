"""A disk whose syncs take long: only the maker of a group waits for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mqfs.errors import Exists, NotFound
from mqfs.ninep.client.connection import Client, connect
from tests.support.eventually import eventually
from tests.support.server import Server

pytestmark = [pytest.mark.process, pytest.mark.slow]
SYNC_S = 0.8  # much longer than a busy machine keeps a round trip waiting
SLOW_DISK = f"""
import os, time
def slow(real):
    def call(fd):
        time.sleep({SYNC_S})
        real(fd)
    return call
os.fsync, os.fdatasync = slow(os.fsync), slow(os.fdatasync)
from mqfs.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server.at(tmp_path_factory.mktemp("slow"), program=[sys.executable, "-c", SLOW_DISK, "serve"]) as made:
        yield made


@pytest.fixture
def other(server: Server) -> Iterator[Client]:
    with connect(server.address) as client:
        yield client


def remove(server: Server, path: str) -> None:
    with connect(server.address) as client:
        client.remove(path)


def refuses(client: Client, path: str) -> bool:
    """Whether there is nothing at that path."""
    try:
        client.stat(path)
    except NotFound:
        return True
    return False


class Beside:
    """The longest of another user's round trips while `act` runs."""

    def __init__(self, other: Client) -> None:
        self.longest, self.trips = 0.0, 0
        self._other, self._over = other, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            self._other.stat("")
            self.longest, self.trips = max(self.longest, time.monotonic() - begun), self.trips + 1

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_others_do_not_wait_for_the_disk_under_a_new_group(server: Server, other: Client) -> None:
    other.mkdir("first")  # which reserves numbers
    with connect(server.address) as client, Beside(other) as beside:
        begun = time.monotonic()
        client.mkdir("a")
        took = time.monotonic() - begun
        assert "a" in other.list("")
    assert took > 3 * SYNC_S, "it is on disk before it is answered"
    assert beside.trips > 20
    assert beside.longest < SYNC_S


def test_others_do_not_wait_for_the_disk_under_a_removed_group(server: Server, other: Client) -> None:
    other.mkdir("gone")
    with connect(server.address) as client, Beside(other) as beside:
        begun = time.monotonic()
        client.remove("gone")
        took = time.monotonic() - begun
        assert "gone" not in other.list("")
    assert took > SYNC_S, "the removal is on disk before it is answered"
    assert beside.trips > 20
    assert beside.longest < SYNC_S


def test_a_group_that_is_being_removed_takes_nothing_new(server: Server, other: Client) -> None:
    other.mkdir("going")
    removing = threading.Thread(target=lambda: remove(server, "going"))
    removing.start()
    eventually(lambda: refuses(other, "going/.put"), "the removal has begun")
    with pytest.raises(Exists):
        other.mkdir("going")
    with pytest.raises(NotFound):
        other.remove("going")
    removing.join()
    assert "going" not in other.list("")
    other.mkdir("going")


def test_a_group_that_is_being_made_is_there_once_and_not_before(server: Server, other: Client) -> None:
    results: list[object] = []

    def make() -> None:
        with connect(server.address) as client:
            try:
                client.mkdir("twice")
                results.append("made")
            except Exists:
                results.append("exists")
            results.append(client.stat("twice").name)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: "twice" in other.list(""), "the group")
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["exists"] * 3 + ["made"] + ["twice"] * 4
