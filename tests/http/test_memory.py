"""A user whose requests have all the memory that it may have: what was done for it is answered all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.web import Web
from tests.support.eventually import eventually
from tests.support.server import COMMAND, short_folder

BODY_BYTES = 1_000_000  # of a request that does not end
LEFT_BYTES = 130_000  # of its user's share


@pytest.fixture
def tight() -> Iterator[Web]:
    program: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
    with short_folder() as folder:
        web = Web(folder, program=program, HASTE=json.dumps({"HELD_BYTES": 2 * (BODY_BYTES + LEFT_BYTES)}))
        with web.server:
            assert web.put("/g/").status == web.put("/g/.consumers/c?over=s").status == 201
            assert web.put("/g/s").status == web.post("/g/large", b"x" * 2 * LEFT_BYTES).status == 201
            with web.raw() as sock:
                head = f"POST /g/never HTTP/1.0\r\nContent-Length: {BODY_BYTES + 1}\r\n\r\n"
                sock.sendall(head.encode() + bytes(BODY_BYTES))
                eventually(lambda: web.get("/g/large?seq=1").status == 429)
                yield web


@pytest.mark.parametrize("verb", ["ack", "nack?after=1h", "release", "dead", "touch"])
def test_what_was_settled_is_answered(tight: Web, verb: str) -> None:
    assert tight.post("/g/s", "job").status == 201
    token = tight.post("/g/.consumers/c/claim").lines[0]["token"]
    others = [f"9.9.{number}.{'0' * 90}" for number in range(999)]
    answer = tight.post(f"/g/.consumers/c/{verb}", "\n".join([token, *others]))
    assert (answer.status, answer.body.decode().split()) == (410, others)


def test_a_reply_is_answered(tight: Web) -> None:
    with tight.server.connect() as client:
        there = client.group("g")
        worker = there.work("c", lambda claim: there.reply(claim.message, bytes(2 * LEFT_BYTES)), over="s")
        answer = tight.post("/g/s?reply=60s", "job")
        worker.stop()
    assert (answer.status, len(answer.body)) == (200, 2 * LEFT_BYTES)


def test_what_was_not_done_is_refused(tight: Web) -> None:
    """The messages of a claim are given back."""
    with tight.server.connect() as client:
        client.group("g").publish("s", bytes(2 * LEFT_BYTES))
    assert tight.post("/g/.consumers/c/claim").status == 429
    assert tight.get("/g/.stats").json["consumers"]["c"]["claimed"] == 0
