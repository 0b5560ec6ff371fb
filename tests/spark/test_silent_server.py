"""A server that is there and answers nothing: an error of what reads, stages and commits, not for ever; over a slow
link it answers late, which is no error."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pyspark_mqfs import connection, sink
from pyspark_mqfs.batch_encoder import Encoder, Frames
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.sink import SinkError
from pyspark_mqfs.task import Window
from tests.spark.scene import Scene
from tests.spark.test_stream import Readers, reader
from tests.support.eventually import eventually, patient

__all__ = ["reader"]  # the fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.5)


@contextmanager
def silent(scene: Scene) -> Iterator[None]:
    os.kill(scene.server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scene.server.pid, signal.SIGCONT)


def error_of(call: Callable[[], object]) -> BaseException | None:
    """What it raises, if it ends in time."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patient(60))
    return raised[0] if raised else None


def test_a_query(scene: Scene, reader: Readers) -> None:
    scene.group("g")
    scene.stream("g/s", b"1")
    mine = reader(scene, subscribe="g/s")
    start = mine.initialOffset()
    with silent(scene):
        error = error_of(lambda: mine.latestOffset(start, ReadAllAvailable()))
    assert isinstance(error, OptionError)
    assert "option address: no answer from" in str(error)
    assert mine.latestOffset(start, ReadAllAvailable())["streams"] == {"g/s": 2}


@pytest.mark.parametrize("size", [1, 500_000])
def test_a_task_that_writes(scene: Scene, size: int) -> None:
    """Also in the middle of a write that is larger than the buffers of a socket."""
    scene.group("g")
    staging = sink.Staging(Server(scene.address, retry_s=1.0), "spark-q-0-", True)
    staging.put(frames("1"))

    def write() -> None:
        for _ in range(8):
            staging.put(frames("x" * size))
        staging.finish()

    with silent(scene):
        error = error_of(write)
    assert isinstance(error, SinkError)
    assert "no answer in" in str(error)
    staging.drop()


def frames(body: str) -> Frames:
    [found] = Encoder("g/a").encode(pa.record_batch({"value": [body]}))
    return found


def test_a_commit_that_waits_for_room(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it takes: the server answers other requests."""
    scene.group("g", "full block", "depth 5", "replay off", "consumer c", "sync off")
    scene.stream("g/a", b"1", b"2", b"3", b"4")
    server = Server(scene.address, retry_s=0.2)
    staging = sink.Staging(server, "spark-q-0-", True)
    for _ in range(3):
        staging.put(frames("x"))
    asked: list[None] = []
    ask = connection._Watch._ask
    monkeypatch.setattr(connection._Watch, "_ask", lambda watch: (ask(watch), asked.append(None)))
    transaction = sink.Transaction("spark-q", 1, "spark-q-0-", once=True, split=False)
    staged = staging.finish()
    errors: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: errors.append(error_of(lambda: sink.commit(server, transaction, staged))))
    thread.start()
    eventually(lambda: scene.stats("g")["streams"]["a"]["blocked"], "the commit waits")
    before = len(asked)
    eventually(lambda: len(asked) >= before + 3, "it was asked whether it is there")
    assert thread.is_alive()
    scene.ctl("g", "clear a")
    thread.join()
    assert errors == [None]
    assert scene.stats("g")["streams"]["a"]["messages"] == 3


BYTES_S = 500_000.0  # of the slow link: a request or reply of 1 MB takes longer than both pauses of a watch


@pytest.fixture
def slow(scene: Scene, tmp_path: Path) -> Iterator[str]:
    """The address of the server behind a slow link."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "slow"))
        listener.listen()

        def accept() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=connect, args=(near,), daemon=True).start()

        def connect(near: socket.socket) -> None:
            with near, socket.socket(socket.AF_UNIX) as far:
                far.connect(scene.address.removeprefix("unix!"))
                back = threading.Thread(target=carry, args=(far, near), daemon=True)
                back.start()
                carry(near, far)
                back.join()

        threading.Thread(target=accept, daemon=True).start()
        yield f"unix!{tmp_path}/slow"
        listener.shutdown(socket.SHUT_RDWR)


def carry(source: socket.socket, target: socket.socket) -> None:
    """All bytes, as the slow link does."""
    with suppress(OSError):
        while data := source.recv(16_384):
            target.sendall(data)
            time.sleep(len(data) / BYTES_S)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_slow_link(scene: Scene, slow: str) -> None:
    """A stat waits there behind requests, and its answer behind replies, for longer than from a silent server."""
    scene.group("g")
    scene.stream("g/a")
    server = Server(slow, retry_s=1.0)
    staging = sink.Staging(server, "spark-q-0-", True)
    for _ in range(2):
        staging.put(frames("x" * 900_000))
    sink.commit(server, sink.Transaction("spark-q", 1, "spark-q-0-", once=True, split=False), staging.finish())
    with server.link() as link:
        client = link.client()
        with client.open("g/.cursor", "r+") as file:
            file.write(b"select a\nformat record\nseek 1\nuntil 2\n")
            assert sum(map(len, iter(Window(client, file, None).next, b""))) > 1_800_000
        assert link.client() is client
