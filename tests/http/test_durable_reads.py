"""Reads of Durable Streams beside those who write: no acknowledged message is left out, whoever wrote it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.http.test_durable_streams import JSON, Durable
from tests.http.web import Lines
from tests.support.server import short_folder

WRITTEN = 150  # by each of those who write at once


@pytest.fixture(scope="module")
def ds() -> Iterator[Durable]:
    with short_folder() as folder:
        hasty = (sys.executable, "-m", "tests.http.hasty_server")
        it = Durable(folder, program=hasty, HASTE='{"DURABLE_WAIT_S": 1}')
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
