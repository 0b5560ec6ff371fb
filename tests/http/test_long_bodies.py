"""Bodies of which many messages are made: what the server holds of them stays within the memory of their user."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.http.test_durable_streams import Durable
from tests.support.server import short_folder

pytestmark = pytest.mark.process
SHARE = 4 << 20  # of their user
NAME = "x" * 250
EVENT = b'{"specversion":"1.0","id":"1","source":"s","type":"t"}'
LINE = b'{"stream":"s","body":"' + b"x" * 1_000 + b'"}\n'
WAYS = {  # a request, its type, and of many messages a prefix, one and the end
    "a batch": ("POST /ds/g/.batch", "application/x-ndjson", b"", LINE, b"", 3_000),
    "lines": (f"POST /ds/lines/{NAME}", "text/plain", b"", b"\n", b"", 20_000),
    "lines of a new stream": (f"POST /ds/lines/{NAME[1:]}", "text/plain", b"", b"\n", b"", 20_000),
    "emitted": (f"POST /.qpubs/ds/lines/emit?name={NAME}", "text/plain", b"", b"\n", b"", 20_000),
    "events": (f"POST /ds/g/{NAME}", "application/cloudevents-batch+json", b"[", EVENT + b",", EVENT + b"]", 15_000),
    "durable": (f"PUT /g/{NAME[1:]}", "application/json", b"[", b"0,", b"0]", 20_000),
}


@pytest.fixture(scope="module")
def ds() -> Iterator[Durable]:
    with short_folder() as folder:
        program = (sys.executable, "-m", "tests.server.lowered_server")
        it = Durable(folder, "--http-qpubs", program=program, MQFS_LIMITS=f"HELD_BYTES={2 * SHARE}")
        with it.server:
            assert it.create("/g/s").status == 201
            assert it.tree.put("/ds/lines/").status == 201
            assert it.tree.post("/ds/lines/ctl", "data line").status == 204
            assert it.tree.put(f"/ds/lines/{NAME}").status == 201
            yield it


@pytest.mark.parametrize("way", WAYS)
def test_the_messages_of_a_body_take_memory_of_their_user(ds: Durable, way: str) -> None:
    """With the body they would be more than the user's share; a tenth of them is published after that."""
    request, kind, begin, one, end, count = WAYS[way]
    method, path = request.split()
    web = ds if way == "durable" else ds.tree
    for number, expected in ((count, 429), (count // 10, 201)):
        body = begin + number * one + end
        assert len(body) < SHARE
        reply = web.ask(method, path, body, Content_Type=kind)
        assert reply.status == expected, reply.body
        if expected == 429:
            assert b"bytes in the server's memory" in reply.body
