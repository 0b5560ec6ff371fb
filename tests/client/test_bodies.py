"""Bodies of any size: written as files, read as files, whole or not at all, over every transport."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import random
import resource
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import Client, errors
from mqfs.client import Group, large
from mqfs.client.large import LargeMessage, StagedUploads
from mqfs.client.types import File
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server

LARGEST = 1_044_480


def body_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def kept(tree: Client, name: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all"])


def parts(group: Group) -> list[tuple[str, int]]:
    """(what says which part it is, bytes) of every message of the log."""
    found = []
    for reading in (group.history(),):
        reading._singly = True
        found += [(message.headers.get("part", ""), len(message.body)) for message in reading]
    return found


@pytest.mark.parametrize("size", [1, LARGEST, LARGEST + 1, 2_000_000, 2_000_001, 3_500_000])
def test_publish_of_any_size(tree: Client, name: str, size: int) -> None:
    group, body = kept(tree, name), body_of(size)
    with group.subscribe() as messages:
        group.publish("s", b"before")
        group.publish("s", body, headers={"colour": "blue"})
        group.publish("s", b"after")
        assert [messages.get(HANG_S).body for _ in range(3)] == [b"before", body, b"after"]
    first, long, last = group.history()
    assert (first.body, long.body, last.body) == (b"before", body, b"after")
    assert long.headers["colour"] == "blue"
    assert "part" not in long.headers
    assert long.stream == "s"
    assert long.sequence == first.sequence + 1


@pytest.mark.parametrize("size", [10, 2_500_000])
def test_options_of_a_body_of_any_size(tree: Client, name: str, size: int) -> None:
    """Served by its priority as one, once for its id, gone as one by its ttl."""
    group, body = kept(tree, name), body_of(size)
    group.ctl("dedup 1h", "backoff 1ms 1ms")
    group.publish("s", b"before")
    with group.consume("c") as claims:
        for _ in range(2):
            group.publish("s", body, priority=8, id="first", key="k", headers={"a": "b"})
        with group.writer("s", ttl="1h", id="second") as file:
            file.write(body)
        with group.writer("s", ttl="1h", id="second") as file:
            file.write(b"other")
        messages = [message for message in group.history() if len(message.body) == size]
        assert [message.headers.get("id") for message in messages] == ["first", "second"]
        assert [message.expires_ns is None for message in messages] == [True, False]
        for nacks in (True, False):
            claim = claims.get(HANG_S)
            assert (claim.body, claim.message.headers["a"], claim.message.key) == (body, "b", "k")
            claim.nack(0) if nacks else claim.ack()
        for wanted in (b"before", body):
            with claims.get(HANG_S) as claim:
                assert claim.body == wanted
        with pytest.raises(TimeoutError):
            claims.get(0.05)


def test_a_body_of_any_size_ends_as_one(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("s", body_of(2_500_000), ttl="200ms")
    assert group.stats().streams["s"].messages in (3, 0)
    eventually(lambda: list(group.history()) == [])
    eventually(lambda: group.stats().streams["s"].messages == 0)


def test_parts_are_messages_of_the_stream(tree: Client, name: str) -> None:
    group, body = kept(tree, name), body_of(2_500_000)
    group.publish("s", body)
    assert parts(group) == [("1/3", 1_000_000), ("2", 1_000_000), ("3/3", 500_000)]
    with group.history() as reading:
        reading._singly = True
        assert b"".join(message.body for message in reading) == body


def test_a_writer_is_a_file(tree: Client, name: str, tmp_path: Path) -> None:
    group, body = kept(tree, name), body_of(5_000_000)
    (tmp_path / "source").write_bytes(body)
    with open(tmp_path / "source", "rb") as source, group.writer("s", headers={"name": "source"}) as sink:
        assert sink.writable()
        assert not sink.readable()
        shutil.copyfileobj(source, sink)
        assert list(group.history()) == [], "nothing is seen before the end"
    (message,) = group.history()
    with message.open() as file:
        assert file.read(10) == body[:10]
        file.seek(-5, io.SEEK_END)
        assert file.read() == body[-5:]
        file.seek(0)
        assert hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(body).digest()
    assert message.headers["name"] == "source"
    assert (message.sequence, message.stream, message.time_ns, message.body, message.headers) == tuple(message)
    assert message[3] == body
    assert isinstance(message, LargeMessage)
    assert "5000000 bytes in 5 parts" in repr(message)


def test_a_small_body_is_one_plain_message(tree: Client, name: str) -> None:
    group = kept(tree, name)
    with group.writer("s") as file:
        file.write(b"one, ")
        file.write(bytearray(b"two"))
    (message,) = group.history()
    assert message.body == b"one, two"
    assert message.headers == {}
    assert message.open().read() == b"one, two"


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_an_exception_drops_it(tree: Client, name: str, size: int) -> None:
    group = kept(tree, name)

    def fails() -> None:
        with group.writer("s") as file:
            file.write(bytes(size))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    file = group.writer("s")
    file.write(bytes(size))
    file.abort()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"x")
    assert list(group.history()) == []
    assert group._link.names(f"{group.path}/.txn") == ["ctl"]


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_writer_that_is_forgotten_publishes_nothing(tree: Client, name: str, size: int) -> None:
    group = kept(tree, name)
    file = group.writer("s")
    file.write(bytes(size))
    del file
    gc.collect()
    assert list(group.history()) == []
    group.publish("s", bytes(size))
    group.publish("s", bytes(3_000_000))
    assert group._link.names(f"{group.path}/.txn") == ["ctl"]
    assert [message.size for message in group.history()] == [size, 3_000_000]


def test_a_writer_may_be_collected_while_its_client_is_busy(tree: Client, name: str) -> None:
    """By any thread, with the lock held that a call to the server takes."""
    group, collected = kept(tree, name), threading.Event()
    files = [group.writer("s")]
    files[0].write(bytes(3_000_000))
    link: Any = group._link

    def collect() -> None:
        with link.lock if hasattr(link, "lock") else link.connection()._lock:
            files.clear()
            gc.collect()
        collected.set()

    threading.Thread(target=collect, daemon=True).start()
    assert collected.wait(patient(60)), "it waits for the lock"
    group.close()
    assert group._link.names(f"{group.path}/.txn") == ["ctl"]


@pytest.mark.parametrize("head", [False, True])
def test_a_part_that_cannot_be_opened_is_dropped(
    tree: Client, name: str, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where too many files are open. `head`: the part that is opened last."""
    group, opened = kept(tree, name), list[str]()
    link: Any = group._link
    open_file = link.open

    def refused(path: str, mode: str) -> File:
        if path.endswith("/.put") and "/.txn/" in path:
            opened.append(path)
            if len(opened) == 1 + head:
                raise errors.OverLimit("too many open files")
        file: File = open_file(path, mode)
        return file

    with monkeypatch.context() as full:
        full.setattr(link, "open", refused)
        with pytest.raises(errors.OverLimit):
            group.publish("s", bytes(3_000_000))
    assert len(opened) == 1 + head
    assert group._link.names(f"{group.path}/.txn") == ["ctl"]


def test_what_is_refused(tree: Client, name: str) -> None:
    group = kept(tree, name)
    big = bytes(LARGEST + 1)
    for options in ({"delay": 5}, {"at": 5.0}, {"single": True}):
        with pytest.raises(errors.TooLong, match=rf"with {next(iter(options))} \(expected at most {LARGEST}"):
            group.publish("s", big, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.BadRequest, match="'part'"):
        group.writer("s", headers={"part": "1"})
    with pytest.raises(errors.MqfsError, match="sender"):
        group.publish("s", big, headers={"sender": "me"})
    with pytest.raises(errors.NotFound, match="no stream 'missing'"):
        group.publish("missing", big, create=False)
    assert list(group.history()) == []
    assert group._link.names(f"{group.path}/.txn") == ["ctl"]


def test_a_depth_it_does_not_fit(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all", "depth 2000000B", "full reject"])
    with pytest.raises(errors.TooLong):
        group.publish("s", bytes(2_500_000))
    group.publish("s", bytes(1_500_000))
    assert [len(message.body) for message in group.history()] == [1_500_000]
    assert group._link.names(f"{group.path}/.txn") == ["ctl"]


def test_among_many(tree: Client, name: str) -> None:
    group, body = kept(tree, name), body_of(1_500_000)
    assert group.publish_many([("s", b"1"), ("t", body), mqfs.Outgoing("s", body), ("s", "x" * LARGEST)]) == 4
    assert [(m.stream, m.body) for m in group.history()] == [
        ("s", b"1"), ("t", body), ("s", body), ("s", b"x" * LARGEST),
    ]  # fmt: skip


def test_writers_at_once(tree: Client, name: str) -> None:
    group = kept(tree, name)

    def write(number: int) -> None:
        for n in range(3):
            group.publish("s", bytes([number]) * (1_100_000 + n))

    with group.subscribe() as messages:
        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        seen = [messages.get(HANG_S).body for _ in range(9)]
        for thread in threads:
            thread.join()
    for number in range(3):
        mine = [body for body in seen if body[0] == number]
        assert [len(body) for body in mine] == [1_100_000, 1_100_001, 1_100_002]
        assert all(body == bytes([number]) * len(body) for body in mine)


def test_handlers_and_filters(tree: Client, name: str) -> None:
    group, body = kept(tree, name), body_of(1_200_000)
    got: list[bytes] = []
    done = threading.Event()

    def handler(message: mqfs.Message) -> None:
        with message.open() as file:
            got.append(file.read())
        done.set()

    group.on("s", handler, filters=lambda message: message.body[:1] != b"\0", concurrency=2)
    group.publish("s", bytes(1_200_000))
    group.publish("s", body)
    assert done.wait(HANG_S)
    assert got == [body]


def test_a_part_without_its_first_is_a_message(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("s", bytes(2_500_000))
    sequence = next(iter(group.history())).sequence
    assert [m.headers.get("part") for m in group.history(sequence + 1)] == ["2", "3/3"]


def test_a_body_is_not_held_in_memory(tree: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "SPOOLED_BYTES", 1_000_000)
    group, piece = kept(tree, name), body_of(1_000_000)
    with group.writer("s") as file:
        for _ in range(20):
            file.write(piece)
    (message,) = group.history()
    assert isinstance(message, LargeMessage)
    assert message._spool._rolled  # type: ignore[attr-defined]
    with message.open() as body:
        for _ in range(20):
            assert body.read(1_000_000) == piece
        assert body.read() == b""


def test_a_body_that_the_temporary_folder_does_not_take(
    tree: Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscribers get an error and what follows: its parts are no messages. A consumer gets it later."""
    monkeypatch.setattr(large, "SPOOLED_BYTES", 1_500_000)
    group, body = kept(tree, name), body_of(2_500_000)
    group.ctl("backoff 1ms 1ms", "retries 0")
    seen, claimed, failed = list[int](), list[int](), list[Exception]()
    with monkeypatch.context() as full, group.subscribe("s") as messages:
        full.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        handler = group.on(
            "s", lambda message: seen.append(message.size), on_error=lambda error, _: failed.append(error)
        )
        worker = group.work(
            "c", lambda claim: claimed.append(claim.size), on_error=lambda error, _: failed.append(error)
        )
        group.publish("s", body)
        group.publish("s", b"after")
        with pytest.raises(errors.DiskFull, match="left out: temporary file"):
            messages.get(HANG_S)
        assert messages.get(HANG_S).body == b"after"
        eventually(lambda: seen == [5] and len(failed) > 1)
        assert handler.active
    eventually(lambda: len(body) in claimed)
    worker.stop()
    assert {type(error) for error in failed} == {errors.DiskFull}


@pytest.mark.parametrize("missing", [1, 600, 500_000])
def test_a_body_whose_last_bytes_the_temporary_folder_does_not_take(
    shared: Server, name: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a buffer would hold until the body is read."""
    monkeypatch.setattr(large, "SPOOLED_BYTES", 1_500_000)
    with shared.connect(transport="9p") as tree:
        group, body = kept(tree, name), body_of(2_000_600)
        group.publish("s", body)
        group.publish("s", b"after")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(body) - missing, before[1]))
        try:
            with group.subscribe("s", existing=True) as messages:
                with pytest.raises(errors.DiskFull, match="left out: temporary file"):
                    messages.get(HANG_S)
                assert messages.get(HANG_S).body == b"after"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_server_that_is_killed(server: Server) -> None:
    body = body_of(3_000_000)
    with server.connect() as tree:
        group = kept(tree, "g")
        with group.subscribe(existing=True) as messages:
            group.publish("s", b"before")
            assert messages.get(HANG_S).body == b"before"
            file = group.writer("s")
            file.write(body)
            server.restart()
            with pytest.raises(errors.MqfsError):
                file.close()
            group.publish("s", body)
            assert messages.get(HANG_S).body == body
        assert [len(message.body) for message in group.history()] == [6, len(body)]
        stats = json.loads(tree._link.open("g/.stats", "r").receive())
        assert stats["next"] > 3


def test_a_write_that_failed_is_not_left_out(tree: Client, name: str) -> None:
    """Whoever writes on, or closes it all the same, has the error again: without that part the body would be short."""
    group = kept(tree, name)
    file = group.writer("s", create=False)
    file.write(body_of(2_000_000))
    with pytest.raises(errors.NotFound) as refused:
        file.write(body_of(1_000_000))
    group.create("s")
    for again in (lambda: file.write(b"x"), file.close):
        with pytest.raises(errors.NotFound) as raised:
            again()
        assert raised.value is refused.value
    assert file.closed
    file.close()
    assert parts(group) == []


def test_a_writer_whose_server_was_away_publishes_nothing(server: Server) -> None:
    with server.connect(transport="9p") as client:
        group = kept(client, "g")
        file = group.writer("s")
        file.write(body_of(2_000_000))
        server.restart()
        with pytest.raises(errors.Disconnected):
            file.write(b"x")
        with pytest.raises(errors.Disconnected):
            file.close()
        assert parts(group) == []


def test_a_commit_whose_parts_went_with_the_server_fails(server: Server) -> None:
    with server.connect() as tree:
        group = kept(tree, "g")
        group.publish("s", b"before")
        uploads = StagedUploads(tree._link, "g")
        uploads.open("p").write(b'{"stream":"s"} body')
        server.restart()
        with pytest.raises((errors.Disconnected, errors.NotFound)):  # that there is a new server may be known already
            uploads.commit("p")
        assert [message.body for message in group.history()] == [b"before"]


def test_what_was_committed_is_remembered_no_longer_than_it_must(server: Server) -> None:
    with server.connect() as tree:
        group = kept(tree, "g")
        group.publish("s", bytes(2_000_000))
        group.publish("s", bytes(2_000_000))
        assert tree._link.open("g/.txn/ctl", "r").receive().startswith(b"committed library-")
    with server.connect() as tree:
        assert tree._link.open("g/.txn/ctl", "r").receive() == b""


# ---------------------------------------------------------------- consumers


def test_claims(tree: Client, name: str) -> None:
    group, body = kept(tree, name), body_of(2_500_000)
    with group.consume("w") as one, group.consume("w") as two:
        group.publish("s", body, headers={"colour": "blue"})
        group.publish("s", b"next")
        claim, other = one.get(HANG_S), two.get(HANG_S)
        assert other.body == b"next"
        with claim.message.open() as file:
            assert file.read() == body
        assert claim.body == body
        assert claim.headers["colour"] == "blue"
        claim.nack(0)
        again = two.get(HANG_S)
        assert again.deliveries == 2
        assert again.body == body
        again.touch()
        again.ack()
        other.ack()
        assert group.stats().consumers["w"].waiting == 0


@pytest.mark.slow
def test_a_worker_and_dead_letters(tree: Client, name: str) -> None:
    group, body = kept(tree, name), body_of(1_500_000)
    group.ctl("retries 1")
    tried = []

    def work(claim: mqfs.Claim) -> None:
        assert claim.body == body
        tried.append(claim.sequence)
        raise ValueError("no")

    def dead() -> list[int]:
        return [len(message.body) for message in group.history(pattern="dead")]

    with group.work("w", work, concurrency=2):
        group.publish("s", body)
        eventually(lambda: dead() == [len(body)])
        group.redrive()
        eventually(lambda: len(tried) == 2 and dead() == [len(body)])


BODY = b"A" * 1_000_000 + b"B" * 1_000_000 + b"TAIL"


@pytest.mark.parametrize("prefetch", [1, 8])
@pytest.mark.parametrize("how", ["expired", "purged", "removed", "cut"])
def test_what_is_left_of_a_body_that_is_gone_is_given_to_no_one(
    tree: Client, name: str, how: str, prefetch: int
) -> None:
    """It may have been claimed ahead: then its last part is here, and the others can not be read any more."""
    group = kept(tree, name)
    group.ctl("depth 5", "retries 3", "protect off")
    group.create("s")
    with group.consume("w", prefetch=prefetch) as claims:
        group.publish("s", b"small")
        group.publish("s", BODY, ttl=0.5 if how == "expired" else None)
        with claims.get(HANG_S) as claim:
            assert claim.body == b"small"
            if how == "expired":
                eventually(lambda: not [m for m in group.history() if m.size > 5])
            elif how == "purged":
                group.purge("s")
            elif how == "removed":
                group.remove("s")
            for number in range(5):
                group.publish("s", str(number))
        for number in range(5):
            with claims.get(HANG_S) as claim:
                assert (claim.body, claim.deliveries) == (b"%d" % number, 1)
    assert group.stats().consumers["w"].waiting == group.stats().consumers["w"].claimed == 0
    assert "dead" not in group.streams()


def test_a_last_part_without_the_others_is_a_dead_letter(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.ctl("retries 3")
    group.publish("s", b"TAIL", headers={"part": "3/3"})
    group.publish("s", b"next")
    with group.consume("w") as claims, claims.get(HANG_S) as claim:
        assert claim.body == b"next"
    (dead,) = group.history(pattern="dead")
    assert (dead.body, dead.headers["reason"]) == (b"TAIL", "parts are missing")
