"""The same of every engine: one number is one record, under the condition of the owner; what is confirmed is read."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from mqfs import limits
from mqfs.errors import BadConfig, BadReplica
from mqfs.replica import objects
from mqfs.replica.engines import open_log
from mqfs.replica.frame import Run
from mqfs.replica.log import Append, LogRecord, Look, NoAnswer, Position, Reader, Refused, ReplicatedLog, Report, Writer
from mqfs.replica.objects import ObjectLog
from tests.replica.model import payloads
from tests.replica.servers import NatsServer
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]
ENGINES = ["file", "s3", "nats", "cluster"]
STORE = uuid.UUID(int=5)


@pytest.fixture
def log(url: str) -> Iterator[ReplicatedLog]:
    log = open_log(url)
    yield log
    log.close()


def step(log: ReplicatedLog, writer: Writer) -> None:
    """Do what it asks for, and say how that ended."""
    request = writer.request
    if isinstance(request, Append):
        try:
            log.append(request.data, request.after, request.own, takeover=request.takeover)
        except (Refused, NoAnswer):
            writer.on_unclear()
        else:
            writer.on_appended()
    elif isinstance(request, Look):
        data = log.get(request.number)
        writer.on_found(data, later=log.newest(request.number) is not None)


def finish(log: ReplicatedLog, writer: Writer) -> Writer:
    while writer.request is not None:
        step(log, writer)
    return writer


def owner(log: ReplicatedLog, position: Position | None = None) -> Writer:
    writer = Writer(position or Position(), STORE, uuid.uuid4())
    writer.take_over("tcp!a!5640", 1)
    return finish(log, writer)


def append(log: ReplicatedLog, writer: Writer, data: bytes) -> None:
    writer.append([Run(1, 1, 0, data)], 2, more=False)
    finish(log, writer)


def everything(log: ReplicatedLog) -> list[LogRecord]:
    found: list[LogRecord] = []
    while records := log.read(found[-1].number if found else 0, 0.2):
        found += records
    return found


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_a_log_has_what_was_appended_in_its_order(log: ReplicatedLog) -> None:
    assert log.newest(0) is None
    assert log.read(0, 0.0) == []
    writer = owner(log)
    for number in range(20):
        append(log, writer, b"%d" % number)
    records = everything(log)
    reader = Reader(Position())
    bodies = [body for record in records for body in payloads(reader.feed(record))]
    assert bodies == [b"%d" % number for number in range(20)]
    assert log.newest(0) == log.newest(20) == records[-1]
    assert log.newest(21) is None
    assert log.get(7) == records[6].data
    assert log.get(22) is None
    assert reader.position.address == "tcp!a!5640"


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_a_number_is_given_once_and_the_old_owner_is_fenced(log: ReplicatedLog) -> None:
    first = owner(log)
    append(log, first, b"one")
    reader = Reader(Position())
    for record in everything(log):
        reader.feed(record)
    second = owner(log, reader.position)
    assert second.is_owner
    append(log, second, b"two")
    append(log, first, b"behind")
    assert first.fenced
    assert [record.number for record in everything(log)] == [1, 2, 3, 4]


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_of_many_that_take_over_one_wins(log: ReplicatedLog, url: str) -> None:
    writers = [Writer(Position(), STORE, uuid.uuid4()) for _ in range(4)]
    logs = [open_log(url) for _ in writers]
    barrier = threading.Barrier(len(writers))

    def race(log: ReplicatedLog, writer: Writer) -> None:
        writer.take_over("", 1)
        barrier.wait()
        finish(log, writer)

    threads = [threading.Thread(target=race, args=pair) for pair in zip(logs, writers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in logs:
        one.close()
    assert sorted(writer.is_owner for writer in writers) == [False, False, False, True]
    assert len(everything(log)) == 1


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_frames_are_trimmed_and_takeovers_stay(log: ReplicatedLog) -> None:
    writer = owner(log)
    for _ in range(3):
        append(log, writer, b"x")
    log.trim(4)
    assert [log.get(number) is not None for number in range(1, 5)] == [True, False, False, True]
    append(log, writer, b"y")
    assert writer.is_owner
    assert [record.number for record in log.read(1, 0.5)][:1] == [4]  # a reader sees that frames are missing


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_objects_are_put_listed_and_deleted(log: ReplicatedLog) -> None:
    objects = log.objects
    assert objects.list("checkpoint/") == []
    large = bytes(range(256)) * 4096
    for name, data in [("checkpoint/2", large), ("checkpoint/10", b""), ("segment/1", b"s")]:
        objects.put(name, data)
    objects.put("segment/1", b"another")
    assert objects.list("checkpoint/") == ["checkpoint/10", "checkpoint/2"]
    assert objects.list("checkpoint/", "checkpoint/10") == ["checkpoint/2"]
    assert [objects.get(name) for name in ("checkpoint/2", "checkpoint/10", "segment/1", "no")] == [
        large, b"", b"another", None,
    ]  # fmt: skip
    for _ in range(2):
        objects.delete("checkpoint/2")
    assert objects.list("checkpoint/") == ["checkpoint/10"]


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_a_standby_reports_how_far_it_is(log: ReplicatedLog, url: str) -> None:
    standby = open_log(url)
    for report in (Report(3, 0xFFFFFFFF), Report(4, 0)):

        def is_heard(report: Report = report) -> bool:
            standby.report("b", report)  # again: one may be left out
            return log.reports() == {"b": report}

        eventually(is_heard)
    standby.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nats://127.0.0.1:{free}/shop", "not reachable"),
        ("nats://127.0.0.1:{nats}/", "invalid name ''"),
        ("nats://127.0.0.1:{nats}/a.b", "invalid name 'a.b'"),
        ("nats://127.0.0.1:{nats},:1/shop", "invalid server"),
        ("nats://127.0.0.1:{nats}/shop?replicas=2", "replicas=1, 3 or 5"),
        ("nats://127.0.0.1:{nats}/shop?replica=3", "invalid options"),
        ("nats://127.0.0.1:{nats}/shop?replicas=3", "JetStream not usable: replicas"),
        ("file:///", "not an absolute directory"),
        ("file://a/b", "not an absolute directory"),
        ("file:///proc/no/where", "expected a directory that can be made"),
        ("s3://bucket", "no bucket and name"),
        ("s3://user:secret@bucket/name", "no bucket and name"),
        ("redis://a/b", "unknown engine"),
        ("shop", "unknown engine"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_clear_line(url: str, words: str, nats_server: NatsServer) -> None:
    with pytest.raises((BadReplica, BadConfig), match=words) as raised:
        open_log(url.format(free=free_port(), nats=nats_server.port))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 250
    assert "secret" not in str(raised.value)


def test_a_bucket_that_does_not_exist_is_said_at_once(s3: str) -> None:
    with pytest.raises(BadReplica, match=r"bucket|not reachable"):
        open_log("s3://no-such-bucket/shop")


def test_a_bucket_without_conditional_writes_is_refused(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put

    def overwrite(store: Any, path: str, data: bytes, *, mode: str = "", **more: Any) -> Any:
        """As a server that does not know If-None-Match."""
        return put(store, path, data, **more)

    monkeypatch.setattr(objects.obstore, "put", overwrite)
    with pytest.raises(BadReplica, match="cannot fence: no conditional writes"):
        open_log("s3://bucket/old")
    assert ObjectLog("s3://bucket/old", create=False).objects.list("") == []


OLD_NATS = next(filter(os.path.exists, ("/usr/sbin/nats-server", "/usr/bin/nats-server")), "")


@pytest.mark.skipif(not OLD_NATS, reason="no nats-server of the system: apt install nats-server")
def test_a_nats_server_that_cannot_fence_is_refused(tmp_path: Path) -> None:
    """Debian's is 2.9.10, which does not know the condition."""
    version = subprocess.run([OLD_NATS, "--version"], capture_output=True, text=True, check=True).stdout
    if "v2.9." not in version:
        pytest.skip(f"{version.strip()} can fence")
    port = free_port()
    with subprocess.Popen(
        [OLD_NATS, "-js", "-sd", str(tmp_path), "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    ) as server:
        try:
            eventually(lambda: is_open(port))
            with pytest.raises(BadReplica, match=r"nats-server 2\.9\.\d+ cannot fence \(expected 2\.11\.0 or newer\)"):
                open_log(f"nats://127.0.0.1:{port}/shop")
        finally:
            server.kill()


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_without_room_for_a_frame_is_refused(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "n1", more="max_payload: 256KB")
    server.start()
    server.wait()
    with pytest.raises(BadReplica, match=r"max_payload 262144 \(expected 9\d+ or more\)"):
        open_log(f"nats://127.0.0.1:{server.port}/shop")
    server.kill()


def test_of_many_standbys_the_newest_are_heard(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_REPORTS", 4)
    log = open_log(f"nats://127.0.0.1:{nats_server.port}/heard")
    for number in range(1, 9):

        def is_heard(number: int = number) -> bool:
            log.report(f"standby{number}", Report(number, 0))
            return f"standby{number}" in log.reports()

        eventually(is_heard)
    assert len(log.reports()) == 4
    log.close()


def test_a_foreign_object_is_refused(tmp_path: Path) -> None:
    log = open_log(f"file://{tmp_path}/replica")
    owner(log)
    (tmp_path / "replica/log/readme").write_text("hello")
    with pytest.raises(BadReplica, match="foreign object"):
        log.newest(0)


def test_what_is_appended_survives_a_killed_engine(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "n1")
    server.start()
    server.wait()
    log = open_log(f"nats://127.0.0.1:{server.port}/shop")
    writer = owner(log)
    append(log, writer, b"one")
    server.kill()
    writer.append([Run(1, 1, 0, b"two")], 2, more=False)
    step(log, writer)
    assert isinstance(writer.request, Look)  # no answer is no answer
    server.start()
    server.wait()
    while writer.request is not None:
        try:
            step(log, writer)
        except NoAnswer:
            pass
    assert writer.is_owner
    assert [record.number for record in everything(log)] == [1, 2, 3]
    log.close()
    server.kill()


@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_a_reader_that_pauses_while_much_is_appended_misses_nothing(log: ReplicatedLog, url: str) -> None:
    """The engine keeps what the reader has no room for."""
    reader, data = open_log(url), bytes(limits.REPLICA_FRAME_BYTES)
    log.append(data, 0, 0, takeover=False)
    numbers = [record.number for record in reader.read(0, HANG_S)]
    for number in range(1, 120):
        log.append(data, number, 0, takeover=False)
    while len(numbers) < 120:
        numbers += [record.number for record in reader.read(numbers[-1], HANG_S)]
    assert numbers == [*range(1, 121)]
    reader.close()
