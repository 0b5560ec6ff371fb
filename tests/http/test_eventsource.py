"""Clients of Node that are not ours: EventSource of npm, and fetch."""

from __future__ import annotations

import json
import signal

import pytest

from tests.http.node.run import Events, node
from tests.http.web import Web
from tests.support.ports import free_port
from tests.support.server import short_folder

pytestmark = pytest.mark.process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_leaves_neither_gap_nor_double(number: int) -> None:
    with short_folder() as folder:
        web = Web(folder, at=free_port())
        with web.server:
            group = web.group()
            web.put(f"{group}/s")
            with node("events.mjs", f"{web.url}{group}/s") as process:
                events, sent = Events(process), 0
                for _ in range(2):
                    for _ in range(5):
                        sent += 1
                        assert web.post(f"{group}/s", str(sent)).status == 201
                    received = [events.message() for _ in range(5)]
                    bodies = [json.loads(event["data"])["body"] for event in received]
                    assert bodies == [str(n) for n in range(sent - 4, sent + 1)]
                    web.server.restart(number)
                    sent += 1
                    web.post(f"{group}/s", str(sent))  # perhaps before it is back
                    assert json.loads(events.message()["data"])["body"] == str(sent)
                assert len(events.errors) >= 2


def test_the_end_of_a_stream_and_what_was_lost(web: Web) -> None:
    group = web.group("depth 1")
    for n in range(1, 4):
        web.post(f"{group}/s", str(n))
    with node("events.mjs", f"{web.url}{group}/s?last_event_id=1", "lost", "end") as process:
        events = Events(process)
        assert events.next() == {"type": "lost", "id": "", "data": "[2, 2]"}
        assert events.next()["id"] == "3"
        web.ask("DELETE", f"{group}/s")
        assert events.next()["type"] == "end"
        assert events.next()["type"] == "error"  # the connection ended
        refused = events.next()  # it came back, and is not to come again
        assert (refused["type"], "204" in refused["data"]) == ("error", True)
        assert process.wait() == 0


def test_fetch_streams(web: Web, group: str) -> None:
    web.post(f"{group}/s", "one")
    with node("stream.mjs", f"{web.url}{group}/s?follow&format=line") as process:
        events = Events(process)
        assert events.next() == {"type": "200", "data": "one"}
        web.post(f"{group}/s", "zwölf")
        assert events.next()["data"] == "zwölf"
        web.eventually_open(group, ".cursor", 1)
    web.post(f"{group}/s", "to a client that is gone")
    web.eventually_open(group, ".cursor", 0)


def test_fetch_reads_events(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    with node("stream.mjs", f"{web.url}{group}/s?data=raw", "accept", "text/event-stream") as process:
        events = Events(process)
        assert [events.next()["data"] for _ in range(2)] == ["retry: 2000", ""]
        web.post(f"{group}/s", "a\nb")
        assert [events.next()["data"] for _ in range(4)] == ["id: 1", "data: a", "data: b", ""]
        web.ask("DELETE", f"{group}/s")
        assert [events.next() for _ in range(4)][-1] == {"type": "end", "data": ""}
