"""Mistakes and faults around a replica: each is one line that a person can act on, and nothing is lost."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica import state
from mqfs.replica.log import NoAnswer, open_log
from mqfs.replica.restore import Point, restore
from mqfs.replica.takeover import Standby, become_primary
from tests.replica.faulty_proxy import FaultyProxy
from tests.replica.primary import LocalPrimary, bodies_of, restored
from tests.replica.servers import NatsServer, url_of
from tests.support.eventually import eventually
from tests.support.ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]
SECRET = "n0t-f0r-l0gs"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", more="authorization { user: shop, password: right }")
    server.start()
    server.wait()
    yield server
    server.kill()


def one_line(url: str) -> str:
    with pytest.raises(BadReplica) as raised:
        open_log(url)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 250
    assert SECRET not in text
    return text


def test_a_wrong_password_of_nats_is_one_line(guarded: NatsServer, tmp_path: Path) -> None:
    where = f"127.0.0.1:{guarded.port}/shop"
    assert "not reachable: 'Authorization Violation'" in one_line(f"nats://shop:{SECRET}@{where}")
    assert "Authorization Violation" in one_line(f"nats://{where}")
    assert "/none': cannot be read" in one_line(f"nats://{where}?credentials={tmp_path}/none")
    open_log(f"nats://shop:right@{where}").close()


def test_what_a_server_said_comes_before_how_it_ended() -> None:
    """It says why on the first connection; the others it resets."""

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for is_first in chain([True], repeat(False)):
                connection, _ = listener.accept()
                if is_first:
                    connection.sendall(b"INFO {}\r\n-ERR 'Authorization Violation'\r\n")
                    while connection.recv(4_096):
                        pass
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        assert "Authorization Violation" in one_line(f"nats://127.0.0.1:{listener.getsockname()[1]}/shop")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_bucket_that_refuses_the_key_is_one_line(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FaultyProxy(s3.removeprefix("http://"), 1, rate=1.0, slow_s=0.0, faults=("403",))
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert "403 Forbidden" in one_line("s3://bucket/shop")
    proxy.close()


def test_parts_of_a_checkpoint_pass_a_slow_line(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer than a frame may."""
    monkeypatch.setattr(limits, "REPLICA_CALL_S", 2.0)
    proxy = FaultyProxy(s3.removeprefix("http://"), 1, rate=0.0, slow_s=0.0, bytes_s=limits.REPLICA_PART_BYTES / 5.0)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    objects, part = open_log("s3://bucket/slow").objects, bytes(limits.REPLICA_PART_BYTES)
    names = ["segment/1/a", "segment/1/b"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: objects.put(name, part), names))
        assert list(threads.map(objects.get, names)) == [part, part]
    with pytest.raises(NoAnswer):
        objects.put("log/1", part)
    proxy.close()


def test_a_bucket_that_does_not_answer_is_one_line(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_CALL_S", 1.0)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "not reachable" in one_line("s3://bucket/shop")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_an_hour_off_stops_nothing_and_is_logged(
    tmp_path: Path, hours: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A primary with a wrong clock, then one with the right one."""
    url, now_ns = f"file://{tmp_path}/replica", time.time_ns
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time_ns", lambda: now_ns() + hours * 3_600_000_000_000)
        first = LocalPrimary(tmp_path / "a", url)
        first.append(1, b"one")
        first.wait(1, 1)
        first.stop()
    second = LocalPrimary(tmp_path / "a", url)
    second.append(1, b"two")
    second.wait(1, 1)
    second.stop()
    warned = "this clock or that of the primary before is wrong" in caplog.text
    assert warned == (hours > 0)
    restored(url, tmp_path / "r")
    assert bodies_of(tmp_path / "r", 1) == [b"one", b"two"]


def test_two_primaries_by_hand_are_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second start takes over; what the first one has alone is set aside when it is started again."""
    url = f"file://{tmp_path}/replica"
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"one")
    first.wait(1, 1)
    second = LocalPrimary(tmp_path / "b", url)
    first.append(1, b"lost")
    first.run(lambda: first.fenced)
    assert first.failed == 1
    assert str(first.why) == "this server is no longer the primary"
    second.append(1, b"two")
    second.wait(1, 1)
    first.kill()
    third = LocalPrimary(tmp_path / "a", url)
    assert "is set aside in" in caplog.text
    third.stop()
    second.run(lambda: second.fenced)
    second.kill()
    assert bodies_of(tmp_path / "a", 1) == [b"one", b"two"]


def test_an_engine_that_lost_what_it_confirmed_is_reported_and_the_store_stays(
    engine: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLICA_STATE_S", 0.1)
    url = url_of([engine], "shop")
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"old")
    first.wait(1, 1)
    engine.kill()
    shutil.copytree(engine.folder, tmp_path / "before")
    engine.start()
    engine.wait()
    for number in range(5):
        first.append(1, b"%d" % number)
    first.wait(1, 6)
    at = first.primary.writer.position.number
    eventually(lambda: (found := state.read(str(tmp_path / "a"))) and found.position.number >= at)
    engine.kill()
    shutil.rmtree(engine.folder)
    shutil.copytree(tmp_path / "before", engine.folder)
    engine.start()
    engine.wait()
    first.append(1, b"more")
    eventually(lambda: "the engine lost what it confirmed" in caplog.text)
    first.kill()
    log = open_log(url)
    with pytest.raises(BadReplica, match=r"ends at frame \d+, and had frame \d+: the engine lost .*another name"):
        become_primary(log, str(tmp_path / "a"), "tcp!a!5640")
    log.close()
    (tmp_path / "a/replica").unlink()  # as the line says
    again = LocalPrimary(tmp_path / "a", url_of([engine], "shop2"))
    again.stop()
    assert bodies_of(tmp_path / "a", 1) == [b"old", *(b"%d" % number for number in range(5)), b"more"]
    assert not list((tmp_path / "a/quarantine").iterdir())


def test_a_stream_that_is_gone_ends_a_standby_with_the_reason(engine: NatsServer, tmp_path: Path) -> None:
    url = url_of([engine], "shop")
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"one")
    first.wait(1, 1)
    at = first.primary.writer.position.number
    log = open_log(url)
    standby = Standby(log, str(tmp_path / "b"), "", 60.0)
    ended = list[BaseException]()

    def follow() -> None:
        try:
            standby.run()
        except BadReplica as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: (found := state.read(str(tmp_path / "b"))) and found.position.number >= at)
    engine.kill()
    shutil.rmtree(engine.folder)
    engine.start()
    engine.wait()
    eventually(lambda: ended)
    assert str(ended[0]).endswith("no stream: the engine lost what it confirmed")
    first.kill()
    log.close()
    for path in ("a", "b"):  # as a unit of systemd starts it
        log = open_log(url)
        with pytest.raises(BadReplica, match=r"empty, but had frame \d+ \(expected the log, or .*/replica moved away"):
            Standby(log, str(tmp_path / path), "", 60.0).run()
        log.close()
        assert bodies_of(tmp_path / path, 1) == [b"one"]


def test_deleted_objects_leave_nothing_in_jetstream(engine: NatsServer) -> None:
    log = open_log(url_of([engine], "shop"))
    for number in range(5):
        log.objects.put(f"segment/{number}", b"x" * 300_000)
        log.objects.put(f"segment/{number}", b"y" * 300_000)
        log.objects.delete(f"segment/{number}")
    loop, js = log._loop, log._js  # type: ignore[attr-defined]
    assert loop.call(js.stream_info("OBJ_mqfs-shop")).state.messages == 0
    log.close()


def test_foreign_objects_are_left_alone_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    url, folder = f"file://{tmp_path}/replica", tmp_path / "replica"
    primary = LocalPrimary(tmp_path / "a", url)
    for name in ("checkpoint/notes.txt", "segment/notes.txt", "standby/notes.txt", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("hello")
    primary.append(1, b"one")
    primary.wait(1, 1)
    primary.stop()
    log = open_log(url)
    restore(log, str(tmp_path / "r"), Point())
    assert log.reports() == {}
    assert bodies_of(tmp_path / "r", 1) == [b"one"]
    (folder / "log/notes.txt").write_text("hello")
    with pytest.raises(BadReplica, match=r"'log/notes.txt': foreign object \(expected log/ and 20 digits\)"):
        LocalPrimary(tmp_path / "a", url)
    log.close()
