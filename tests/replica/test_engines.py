"""The same of every engine: one number is one record, under the condition of the owner; what is confirmed is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import nats.errors
import obstore
import pytest
from nats.js.client import JetStreamContext
from nats.js.object_store import ObjectStore

from mqfs import limits
from mqfs.errors import BadConfig, BadReplica
from mqfs.replica import objects
from mqfs.replica.frame import decode
from mqfs.replica.jetstream import JetStreamLog
from mqfs.replica.log import (
    Append,
    LogRecord,
    Look,
    NoAnswer,
    Position,
    Reader,
    Refused,
    ReplicatedLog,
    Report,
    Writer,
    open_log,
)
from mqfs.replica.objects import ObjectLog
from mqfs.store.replication import LogBytes
from tests.replica.faulty_proxy import FaultyProxy
from tests.replica.model import payloads
from tests.replica.servers import NatsServer
from tests.support.campaign import seed
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]
ENGINES = ["file", "s3", "nats", "cluster"]
STORE = uuid.UUID(int=5)


@pytest.fixture
def log(url: str) -> Iterator[ReplicatedLog]:
    found: list[ReplicatedLog] = []

    def opened() -> bool:
        with contextlib.suppress(BadReplica):  # a cluster that was just started has no leader yet
            found.append(open_log(url))
        return bool(found)

    eventually(opened, "the log")
    yield found[0]
    found[0].close()


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
    writer.append([LogBytes(1, 1, 0, data)], 2, more=False)
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
def test_a_takeover_that_comes_where_frames_were_trimmed_is_none(log: ReplicatedLog) -> None:
    """Its server stood still between its last look at the log and the request, for longer than frames are kept."""
    first = owner(log)
    position = attrs.evolve(first.position)
    for number in range(4):
        append(log, first, b"%d" % number)
    log.trim(5)
    late = owner(log, position)
    assert late.fenced
    assert not late.is_owner
    append(log, first, b"more")
    assert not first.fenced
    newest = log.newest(0)
    assert newest is not None
    assert payloads([decode(newest.data)]) == [b"more"]


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
    writer.append([LogBytes(1, 1, 0, b"two")], 2, more=False)
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


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_reader_that_is_behind_gets_many_frames_at_once(log: ReplicatedLog, url: str) -> None:
    """For a standby that syncs its disk after each frame falls behind a primary that does so before each."""
    for number in range(200):
        log.append(b"%d" % number, number, 0, takeover=False)
    reader, parts = open_log(url), list[list[int]]()
    while sum(map(len, parts)) < 200:
        parts.append([record.number for record in reader.read(parts[-1][-1] if parts else 0, HANG_S)])
    assert [number for part in parts for number in part] == [*range(1, 201)]
    assert len(parts) < 50
    reader.close()


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


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_many_objects_are_listed_in_pages_and_deleted_at_once(log: ReplicatedLog) -> None:
    names = [f"segment/{number:02d}" for number in range(30)]
    for name in names:
        log.objects.put(name, b"x")
    pages, after = list[str](), ""
    while page := log.objects.list("segment/", after, 8):
        assert len(page) <= 8
        pages, after = [*pages, *page], page[-1]
    assert pages == names
    log.objects.delete(*names[:20], "segment/no")
    log.objects.delete()
    assert log.objects.list("segment/") == names[20:]


@pytest.mark.parametrize("url", ENGINES, indirect=True)
def test_of_many_takeovers_all_stay_whoever_trims(log: ReplicatedLog, url: str) -> None:
    writer, pick, takeovers = owner(log), random.Random(seed()), [1]
    for _ in range(8):
        for _ in range(pick.randrange(4)):
            append(log, writer, b"x")
        writer = owner(log, writer.position)
        takeovers.append(writer.position.number)
    for _ in range(5):
        append(log, writer, b"x")
    last = writer.position.number
    others = [open_log(url) for _ in range(3)]
    trims = [threading.Thread(target=other.trim, args=(last - number,)) for number, other in enumerate(others)]
    log.trim(last // 2)
    for thread in trims:
        thread.start()
    for thread in trims:
        thread.join()
    for other in others:
        other.close()
    log.trim(last)
    assert [record.number for record in everything(log)] == [*takeovers, last]


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
@pytest.mark.parametrize("damage", ["empty", "first epoch", "epochs of all between", "no frame"])
def test_a_damaged_frame_takes_no_takeover_with_it(log: ReplicatedLog, damage: str) -> None:
    assert isinstance(log, ObjectLog)
    writer, takeovers = owner(log), [1]
    for _ in range(3):
        for _ in range(4):
            append(log, writer, b"x")
        writer = owner(log, writer.position)
        takeovers.append(writer.position.number)
    append(log, writer, b"x")
    last = writer.position.number
    hit = [2] if damage == "first epoch" else [number for number in range(2, last) if number not in takeovers]
    for number in hit:
        name = f"log/{number:020d}"
        data = log.objects.get(name) or b""
        wrong = {"empty": b"", "no frame": b"x" * len(data)}
        epoch = 99 if damage == "first epoch" else number % 7
        log.objects.put(name, wrong.get(damage, data[:24] + epoch.to_bytes(8, "little") + data[32:]))
    for before in (last // 2, last):
        log.trim(before)
    numbers = [int(name[4:]) for name in log.objects.list("log/")]
    assert set(takeovers) <= set(numbers)
    assert set(numbers) <= {*takeovers, *hit, last}


@pytest.mark.parametrize("takeovers", [1, 4])
def test_a_trim_asks_for_few_of_the_frames_and_removes_many_at_once(
    s3: str, monkeypatch: pytest.MonkeyPatch, takeovers: int
) -> None:
    proxy = FaultyProxy(s3.removeprefix("http://"), seed(), rate=0, slow_s=0)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    log = open_log(f"s3://bucket/trim{takeovers}")
    position = Position()
    for _ in range(takeovers):
        writer = owner(log, position)
        position = writer.position
        for _ in range(200 // takeovers):
            append(log, writer, b"x")
    before = proxy.count.total()
    log.trim(position.number)
    used = proxy.count.total() - before
    print(f"{used} requests for {position.number} frames, {takeovers} takeovers")
    assert used <= 4 + 10 * (takeovers - 1)
    assert len(log.objects.list("log/")) == takeovers + 1
    for _ in range(50):
        append(log, writer, b"x")
    before = proxy.count.total()
    log.trim(position.number)
    assert proxy.count.total() - before <= 4
    log.close()
    proxy.close()


def test_a_store_without_bulk_deletion_removes_each_by_itself(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = obstore.delete

    def delete_one(store: Any, paths: Any) -> None:
        """As a server that does not know the request, or ends at a name that is gone."""
        if not isinstance(paths, str):
            raise obstore.exceptions.NotSupportedError("DeleteObjects")
        delete(store, paths)

    monkeypatch.setattr(objects.obstore, "delete", delete_one)
    log = open_log("s3://bucket/singles")
    log.objects.put("segment/1", b"")
    log.objects.put("segment/2", b"")
    log.objects.delete("segment/1", "segment/no", "segment/2")
    assert log.objects.list("") == []
    log.close()


def test_files_that_were_not_given_their_name_are_swept_when_they_are_old(tmp_path: Path) -> None:
    log = open_log(f"file://{tmp_path}/replica")
    old, new = tmp_path / "replica/staging/old", tmp_path / "replica/staging/new"
    for path in (old, new):
        path.write_bytes(b"x")
    then = time.time() - limits.REPLICA_UPLOAD_S - 1
    os.utime(old, (then, then))
    log.objects.remove_stale_uploads()
    assert (old.exists(), new.exists()) == (False, True)
    log.close()


def chunks_of(log: ReplicatedLog) -> dict[str, int]:
    """How many each upload has in JetStream's object store."""
    assert isinstance(log, JetStreamLog)
    info = log._loop.call(log._js.stream_info(f"OBJ_{log.objects._bucket}", "$O.*.C.>"))
    return dict(info.state.subjects or {})


@pytest.mark.parametrize("url", ["nats", "cluster"], indirect=True)
def test_an_upload_that_passes_its_time_leaves_no_chunks(log: ReplicatedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is still on its way may arrive behind the purge: the third here is never sent."""
    assert isinstance(log, JetStreamLog)
    log.objects.put("segment/1", b"x" * 300_000)
    before, publish, sent = chunks_of(log), log._js.publish, list[str]()

    async def stalled(subject: str, payload: bytes = b"", **more: Any) -> Any:
        sent.append(subject)
        return await (asyncio.Event().wait() if len(sent) == 3 else publish(subject, payload, **more))

    monkeypatch.setattr(log._js, "publish", stalled)
    monkeypatch.setattr(limits, "REPLICA_CALL_S", 0.5)
    with pytest.raises(NoAnswer, match="no answer"):
        log.objects.put("segment/2", bytes(1 << 20))
    monkeypatch.undo()
    eventually(lambda: chunks_of(log) == before)
    assert log.objects.get("segment/1") == b"x" * 300_000
    assert log.objects.list("segment/") == ["segment/1"]


@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_an_object_that_is_replaced_leaves_no_chunks(log: ReplicatedLog) -> None:
    for size in (300_000, 0, 200_000):
        log.objects.put("segment/1", b"x" * size)
        assert log.objects.get("segment/1") == b"x" * size
        assert len(chunks_of(log)) == (size > 0)
    log.objects.delete("segment/1")
    assert chunks_of(log) == {}


@pytest.mark.parametrize("url", ["nats", "cluster"], indirect=True)
def test_chunks_without_a_name_are_swept_when_they_are_old(log: ReplicatedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(log, JetStreamLog)
    log.objects.put("segment/1", b"x" * 300_000)
    before = chunks_of(log)
    log._loop.call(log._js.publish(f"{log.objects._chunks}c2VnbWVudC8x.of-a-server-that-was-killed", b"x"))
    log.objects.remove_stale_uploads()
    assert len(chunks_of(log)) == 2
    monkeypatch.setattr(limits, "REPLICA_UPLOAD_S", 0.0)
    log.objects.remove_stale_uploads()
    assert chunks_of(log) == before
    assert log.objects.get("segment/1") == b"x" * 300_000


@pytest.mark.parametrize("url", ["nats", "cluster"], indirect=True)
@pytest.mark.parametrize("loses", ["chunks", "answer"])
def test_an_object_has_its_name_only_while_it_has_its_chunks(
    log: ReplicatedLog, monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
    """A server that stood still continues when its chunks were swept; or the name has no answer, and is there."""
    assert isinstance(log, JetStreamLog)
    publish = log._js.publish

    async def interrupted(subject: str, payload: bytes = b"", **more: Any) -> Any:
        if ".M." in subject and loses == "chunks":
            await log._js.purge_stream(f"OBJ_{log.objects._bucket}", subject=f"{log.objects._chunks}>")
        answer = await publish(subject, payload, **more)
        if ".M." in subject and loses == "answer":
            raise nats.errors.TimeoutError
        return answer

    monkeypatch.setattr(log._js, "publish", interrupted)
    with pytest.raises(NoAnswer):
        log.objects.put("segment/1", b"x" * 300_000)
    assert log.objects.get("segment/1") == (None if loses == "chunks" else b"x" * 300_000)
    assert log.objects.list("segment/") == ([] if loses == "chunks" else ["segment/1"])


@pytest.mark.parametrize("url", ["nats", "cluster"], indirect=True)
def test_an_object_whose_chunks_are_gone_is_missing(log: ReplicatedLog) -> None:
    """At once: no later attempt finds them."""
    assert isinstance(log, JetStreamLog)
    for lost in ("all", "one"):
        log.objects.put("segment/1", b"x" * 300_000)
        keep = 1 if lost == "one" else 0
        log._loop.call(log._js.purge_stream(f"OBJ_{log.objects._bucket}", subject=f"{log.objects._chunks}>", keep=keep))
        started = time.monotonic()
        assert log.objects.get("segment/1") is None
        assert time.monotonic() - started < limits.REPLICA_CALL_S
    log.objects.put("segment/1", b"y" * 300_000)
    assert log.objects.get("segment/1") == b"y" * 300_000


@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_an_object_with_other_bytes_is_named(log: ReplicatedLog) -> None:
    assert isinstance(log, JetStreamLog)
    log.objects.put("segment/1", b"x" * 1_000)
    chunks = next(iter(chunks_of(log)))
    log._loop.call(log._js.purge_stream(f"OBJ_{log.objects._bucket}", subject=chunks))
    log._loop.call(log._js.publish(chunks, b"y" * 1_000))
    with pytest.raises(BadReplica, match="segment/1: wrong check sum"):
        log.objects.get("segment/1")


@pytest.mark.parametrize("url", ["nats"], indirect=True)
@pytest.mark.parametrize("work", ["get", "list"])
def test_a_call_that_passes_its_time_leaves_no_consumer(
    log: ReplicatedLog, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(log, JetStreamLog)
    stream = f"OBJ_{log.objects._bucket}"
    log.objects.put("segment/1", b"x" * 3_000_000)

    def count() -> int:
        return log._loop.call(log._js.stream_info(stream)).state.consumer_count

    async def held(*arguments: Any, **more: Any) -> Any:
        """Its messages come late."""
        await asyncio.sleep(HANG_S)

    monkeypatch.setattr(JetStreamContext.PushSubscription, "next_msg", held)
    monkeypatch.setattr(ObjectStore.ObjectWatcher, "__anext__", held)
    monkeypatch.setattr(limits, "REPLICA_CALL_S", 0.2)
    if work == "get":
        with pytest.raises(NoAnswer, match="no answer"):
            log.objects.get("segment/1")
    else:
        assert log.objects.list("") == ["segment/1"]
    eventually(lambda: count() == 0)


@pytest.mark.parametrize("url", ["nats"], indirect=True)
@pytest.mark.parametrize("loses", ["request", "answer"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_deletion_without_an_answer_is_done_again(
    log: ReplicatedLog, loses: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ended, nothing is left then."""
    assert isinstance(log, JetStreamLog)
    stream, purge, calls = f"OBJ_{log.objects._bucket}", log._js.purge_stream, list[str]()
    log.objects.put("segment/1", b"x" * 300_000)

    async def interrupted(name: str, subject: str) -> bool:
        calls.append(subject)
        if len(calls) == number and loses == "request":
            raise nats.errors.TimeoutError
        is_purged = await purge(name, subject=subject)
        if len(calls) == number:
            raise nats.errors.TimeoutError
        return is_purged

    monkeypatch.setattr(log._js, "purge_stream", interrupted)
    with pytest.raises(NoAnswer):
        log.objects.delete("segment/1")
    log.objects.delete("segment/1")
    assert log._loop.call(log._js.stream_info(stream)).state.messages == 0


@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_a_list_in_several_answers_is_whole_or_none(log: ReplicatedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gives 100000 names in one; here it gives two."""
    assert isinstance(log, JetStreamLog)
    names = [f"segment/{number}" for number in range(7)]
    for name in names:
        log.objects.put(name, b"x")
    request, changes = log._js._api_request, list[str]()

    async def paged(subject: str, data: bytes, **more: Any) -> Any:
        answer = await request(subject, json.dumps({**json.loads(data), "offset": 0}).encode(), **more)
        if "subjects" in answer["state"]:
            offset = json.loads(data)["offset"]
            answer["state"]["subjects"] = dict(sorted(answer["state"]["subjects"].items())[offset : offset + 2])
            while changes:
                await log._js.publish(f"{log.objects._chunks}{changes.pop()}", b"x")
        return answer

    monkeypatch.setattr(log._js, "_api_request", paged)
    assert log.objects.list("segment/") == names
    changes.append("new")
    with pytest.raises(NoAnswer, match="objects changed while they were listed"):
        log.objects.list("segment/")
    assert log.objects.list("segment/") == names


@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_what_another_client_deleted_is_missing_and_can_be_deleted(log: ReplicatedLog) -> None:
    assert isinstance(log, JetStreamLog)
    log.objects.put("segment/1", b"x")
    store = log._loop.call(log._js.object_store(log.objects._bucket))
    assert log._loop.call(store.get("segment/1")).data == b"x"
    log._loop.call(store.delete("segment/1"))
    assert log.objects.get("segment/1") is None
    log.objects.delete("segment/1")
    assert log.objects.list("") == []
