"""Reads of Durable Streams beside those who write: no acknowledged message is left out, whoever wrote it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.http.test_durable_streams import JSON, Durable
from tests.http.web import Lines
from tests.support.eventually import eventually
from tests.support.server import short_folder

WRITTEN = 150  # by each of those who write at once


@pytest.fixture(scope="module")
def ds() -> Iterator[Durable]:
    with short_folder() as folder:
        hasty = (sys.executable, "-m", "tests.http.hasty_server")
        it = Durable(folder, program=hasty, HASTE='{"DURABLE_WAIT_S": 4, "HTTP_BEAT_S": 0.2}')
        with it.server:
            yield it


def _read(ds: Durable, path: str, live: str, ended: Event) -> Counter[str]:
    """All messages, in requests that each begin where the one before ended."""
    seen, at, is_last = Counter[str](), "-1", False
    connection = ds.connect()
    try:
        while not is_last:
            has_ended = ended.is_set()
            connection.request("GET", f"{path}?offset={at}" + (f"&live={live}" if live and not has_ended else ""))
            answer = connection.getresponse()
            if live == "sse" and not has_ended:
                for event in iter(Lines(answer).event, {}):
                    if event.get("event") == "data":
                        seen.update(json.loads(event["data"]))
                    elif event.get("event") == "control":
                        at = json.loads(event["data"])["streamNextOffset"]
                        break  # and come back
                connection.close()
                continue
            body = answer.read()
            assert answer.status in (200, 204), body
            seen.update(json.loads(body or "[]"))
            at = str(answer.headers["Stream-Next-Offset"])
            is_last = has_ended and "Stream-Up-To-Date" in answer.headers
    finally:
        connection.close()
    return seen


@pytest.mark.process
@pytest.mark.parametrize("live", ["", "long-poll", "sse"])
def test_readers_by_offset_get_all_that_is_written_meanwhile(ds: Durable, live: str) -> None:
    path, ended = f"/beside/{live or 'pages'}", Event()
    assert ds.create(path, **JSON).status == 201

    def append(writer: str) -> Counter[str]:
        messages = Counter({f"{writer} {n}": 1 + n % 3 for n in range(WRITTEN)})
        for text, times in messages.items():
            assert ds.append(path, json.dumps([text] * times), **JSON).status == 204
        return messages

    def publish() -> Counter[str]:
        messages = Counter(f"program {n}" for n in range(WRITTEN))
        with ds.server.connect() as tree:
            group = tree.group("ds/beside")
            for text in messages:
                group.publish(path.rpartition("/")[2], json.dumps(text).encode())
        return messages

    with ThreadPoolExecutor(6) as threads:
        readers = [threads.submit(_read, ds, path, live, ended) for _ in range(3)]
        try:
            writers = [threads.submit(append, "a"), threads.submit(append, "b"), threads.submit(publish)]
            written = sum((writer.result() for writer in writers), Counter[str]())
        finally:
            ended.set()
        for reader in readers:
            seen = reader.result()
            assert (written - seen, seen - written) == (Counter(), Counter())


@pytest.mark.process
@pytest.mark.parametrize("use", ["program", "long-poll", "sse"])
def test_a_stream_in_use_does_not_expire(ds: Durable, use: str) -> None:
    """Its Stream-TTL is over since it was made, and since the request of the reader began."""
    path, seconds = f"/used/{use}", 2
    assert ds.create(path, Stream_TTL=str(seconds), **JSON).status == 201
    ends = time.monotonic() + seconds + 0.5
    if use == "program":
        eventually(lambda: ds.tree.post(f"/ds{path}", "1").status == 201 and time.monotonic() > ends, "its TTL")
        assert ds.ask("HEAD", path).status == 200
        return
    with ThreadPoolExecutor(1) as threads, ds.raw() as sock:
        reader = threads.submit(ds.get, f"{path}?offset=now&live=long-poll") if use == "long-poll" else None
        if reader is None:
            sock.sendall(f"GET {path}?offset=now&live=sse HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert sock.recv(1) == b"H"
        eventually(lambda: time.monotonic() > ends, "its TTL")
        assert ds.ask("HEAD", path).status == 200
        assert ds.append(path, "[1]", **JSON).status == 204
        if reader is not None:
            assert reader.result().status in (200, 204)


@pytest.mark.process
def test_a_stream_that_readers_left_expires(ds: Durable) -> None:
    path = "/used/left"
    assert ds.create(path, Stream_TTL="1", **JSON).status == 201
    with ds.stream(f"{path}?offset=now&live=sse") as lines:
        assert lines.event()["event"] == "control"
    eventually(lambda: ds.ask("HEAD", path).status == 404, "its end")


@pytest.mark.process
@pytest.mark.parametrize("live", ["", "&live=long-poll", "&live=sse"])
def test_an_offset_beyond_the_end_is_gone(ds: Durable, live: str) -> None:
    """It is one of a group that was there before, or of a memory that is lost: what it counted is not in this one."""
    group = f"/again{len(live)}"
    assert ds.create(f"{group}/s", "[0]", **JSON).status == 201
    for _ in range(9):
        at = ds.append(f"{group}/s", "[0]", **JSON).headers["Stream-Next-Offset"]
    assert ds.get(f"{group}/s?offset={at}").status == 200
    for name in ("s", "__ds", ""):
        assert ds.tree.ask("DELETE", f"/ds{group}/{name}").status == 204
    assert ds.create(f"{group}/s", "[1]", **JSON).status == 201
    assert ds.get(f"{group}/s?offset={at}{live}").status == 410
    assert ds.get(f"{group}/s").json == [1]


# ---------------------------------------------------------------- what appends made of a stream


def _publish(ds: Durable, name: str, count: int) -> None:
    """Messages of another program, among those of another stream of the group."""
    lines = [json.dumps({"stream": stream, "body": '"x"'}) + "\n" for stream in (name, "beside")] * count
    assert ds.tree.post("/ds/.batch", "".join(lines), Content_Type="application/x-ndjson").status == 201


@pytest.mark.process
@pytest.mark.parametrize("way", ["restart", "forgotten"])
@pytest.mark.parametrize("count", [1, 70, 3_000])
def test_other_programs_make_no_append_forgotten(count: int, way: str) -> None:
    """Neither over a restart nor where more streams are used than are remembered: the place of a producer, also in a
    fork, the last Stream-Seq, and a close."""
    with short_folder() as folder:
        hasty = (sys.executable, "-m", "tests.http.hasty_server")
        ds = Durable(folder, program=hasty, HASTE='{"DURABLE_STATES": 1}')
        with ds.server:
            assert ds.create("/beside", **JSON).status == 201
            assert ds.create("/first", "[0]", **JSON).status == 201
            for path in ("/first", "/fork"):
                if path == "/fork":
                    assert ds.create(path, Stream_Forked_From="/first", **JSON).status == 201
                assert ds.produce(path, "[1]", 3, 0, Stream_Seq="b", **JSON).status == 200
                _publish(ds, path[1:], count)
            assert ds.create("/closed", "[0]", **JSON).status == 201
            assert ds.append("/closed", "[1]", Stream_Closed="true", **JSON).status == 204
            _publish(ds, "closed", count)
            assert ds.create("/last", "[0]", **JSON).status == 201
            if way == "restart":
                ds.server.restart()
            for path in ("/first", "/fork"):
                assert ds.produce(path, "[1]", 3, 0, **JSON).status == 204
                assert ds.produce(path, "[1]", 2, 0, **JSON).status == 403
                assert ds.append(path, "[1]", Stream_Seq="a", **JSON).status == 409
                assert ds.produce(path, "[2]", 3, 1, **JSON).status == 200
            assert ds.append("/closed", "[2]", **JSON).status == 409
            assert ds.ask("HEAD", "/closed").headers["Stream-Closed"] == "true"


@pytest.mark.process
def test_each_append_ends_the_look_for_what_appends_made(ds: Durable) -> None:
    """Also one that has nothing to say: else a start would read all of a stream to which no producer appends."""
    assert ds.create("/told/a", "[1, 2]", **JSON).status == 201
    assert ds.append("/told/a", "[3, 4]", **JSON).status == 204
    rows = ds.tree.get("/ds/told/a?format=json").lines
    assert [(row["body"], "durable" in row.get("headers", {})) for row in rows] == [
        ("1", False), ("2", True), ("3", False), ("4", True),
    ]  # fmt: skip
