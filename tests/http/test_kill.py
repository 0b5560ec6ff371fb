"""kill -9 of the server under publishers with idempotency keys, workers that claim, and readers of events.

Every client does what a careful one does: it repeats a publish under the same key until it is answered, acknowledges a
job when it is done, and continues after the last event it has seen. Then each message is there once, each reader has
each once, in order, and each job was done.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.web import Web
from tests.support import campaign
from tests.support.eventually import HANG_S, eventually
from tests.support.server import mqfs, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
GONE = (OSError, http.client.HTTPException)
JOBS = "/g/.consumers/jobs"
PROGRESS = 40  # messages published between two kills, at least


class Connection(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=HANG_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        self.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        reply = self.getresponse()
        return reply.status, reply.read()


class Client(threading.Thread):
    """Does one thing after another until it is asked to stop, over as many connections as that takes."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(daemon=True)
        self.number, self._path, self.stopping = number, path, threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self.over():
                connection = Connection(self._path)
                with contextlib.suppress(*GONE), contextlib.closing(connection):
                    while not self.over():
                        self.step(connection)
        except BaseException as error:
            self.error = error

    def over(self) -> bool:
        return self.stopping.is_set()

    def step(self, connection: Connection) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopping.set()
        self.join(HANG_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


class Publisher(Client):
    """`published`: what was answered. It leaves nothing unanswered."""

    def __init__(self, path: Path, number: int) -> None:
        self.published: list[str] = []
        self._open = False
        super().__init__(path, number)

    def over(self) -> bool:
        return super().over() and not self._open

    def step(self, connection: Connection) -> None:
        self._open = True
        body = f"{self.number}-{len(self.published)}"
        status, text = connection.ask("POST", "/g/s", body.encode(), Idempotency_Key=body)
        assert status == 201, text
        self.published.append(body)
        self._open = False


class Worker(Client):
    """`done`: the jobs that it did."""

    def __init__(self, path: Path, number: int) -> None:
        self.done: list[str] = []
        super().__init__(path, number)

    def step(self, connection: Connection) -> None:
        status, text = connection.ask("POST", f"{JOBS}/claim?max=5&wait=100ms")
        assert status in (200, 204), text
        jobs = [json.loads(line) for line in text.splitlines()]
        self.done += [job["body"] for job in jobs]
        if jobs:
            status, text = connection.ask("POST", f"{JOBS}/ack", "\n".join(job["token"] for job in jobs).encode())
            assert status in (204, 410), text


class Reader(Client):
    """`events`: what it has of the stream; a connection that was cut continues after the last one."""

    def __init__(self, path: Path, number: int) -> None:
        self.events: list[tuple[int, str]] = []
        super().__init__(path, number)

    def step(self, connection: Connection) -> None:
        last = {"Last-Event-ID": str(self.events[-1][0])} if self.events else {}
        connection.request("GET", "/g/s?format=sse", headers=last)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        fields: dict[str, str] = {}
        while not self.over() and (line := reply.readline()):
            name, _, text = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = text
            elif "data" in fields:  # whole: the empty line behind it has come
                assert "event" not in fields, fields
                self.events.append((int(fields["id"]), json.loads(fields["data"])["body"]))
                fields = {}


@pytest.fixture
def web() -> Iterator[Web]:
    with short_folder() as folder:
        web = Web(folder, "--default", "retries 0", "--default", "dedup 1h")
        with web.server:
            yield web


def scaled(whole: int) -> int:
    return whole if campaign.whole() else max(2, whole // 5)


def test_killed_at_random_under_all_kinds_of_clients(web: Web) -> None:
    choose = random.Random(campaign.seed())
    web.put("/g/")
    web.put(JOBS)
    publishers = [Publisher(web.unix, number) for number in range(scaled(16))]
    workers = [Worker(web.unix, number) for number in range(scaled(20))]
    readers = [Reader(web.unix, number) for number in range(scaled(50))]

    def published() -> int:
        return sum(len(publisher.published) for publisher in publishers)

    for _ in range(campaign.size(200)):
        enough = published() + PROGRESS + choose.randrange(PROGRESS)
        eventually(lambda: published() >= enough, "publishes")  # noqa: B023
        web.server.restart()
    for publisher in publishers:
        publisher.stop()
    messages = Counter(body for publisher in publishers for body in publisher.published)
    assert max(messages.values()) == 1
    eventually(lambda: {body for worker in workers for body in worker.done} == messages.keys(), "the jobs")
    kept = [(line["sequence"], line["body"]) for line in web.get("/g/s?format=json").lines]
    assert Counter(body for _, body in kept) == messages
    for reader in readers:
        eventually(lambda: len(reader.events) >= len(kept), "the events")  # noqa: B023
    eventually(lambda: web.get("/g/.stats").json["consumers"]["jobs"]["waiting"] == 0, "no job is left")
    for worker in workers:
        worker.stop()
    web.server.stop()  # which ends the events
    for reader in readers:
        reader.stop()
        assert reader.events == kept
    assert mqfs("check", str(web.server.store), cwd=web.server.folder).returncode == 0
