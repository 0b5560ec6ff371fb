"""`sender on`: every message has its writer's number, however it was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqfs import errors, ring
from tests.ring.server.rig import Rig
from tests.support.batches import frame
from tests.support.hand import ANNA, ROOT
from tests.support.queues import Queues


def senders(q: Queues, stream: str = "s") -> list[tuple[str, str | None]]:
    """(body, sender) of each message, in order."""
    return [(message["body"], message.get("headers", {}).get("sender")) for message in q.kept(stream)]


def write_all(q: Queues) -> None:
    """As Anna, each way there is, to a stream `a`."""
    q.tree.create(ROOT, q.group, "a", 0o666)
    for body in (b"plain", b"second"):
        write(q, "a", body)
    write(q, ".put", b'{"stream":"a"} put')
    write(q, ".batch", frame("a", b"framed") + frame("a", b"headed", k="v"))
    q.tree.mkdir(ANNA, q.tree.find(ANNA, "g/.txn"), "p", 0o700)
    write(q, ".txn/p/a", b"staged")
    write(q, ".txn/p/.batch", frame("a", b"staged in a batch"))
    write(q, ".txn/ctl", b"commit anna.1 p\n")


def write(q: Queues, path: str, data: bytes) -> None:
    handle = q.at(path, os.O_WRONLY, ANNA)
    handle.write(data)
    handle.close()


BODIES = ["plain", "second", "put", "framed", "headed", "staged", "staged in a batch"]


def test_every_way(tmp_path: Path) -> None:
    q = Queues("replay all", "sender on", path=tmp_path / "store")
    write_all(q)
    assert senders(q, "a") == [(body, str(ANNA.uid)) for body in BODIES]
    q.restart(clean=False)
    assert senders(q, "a") == [(body, str(ANNA.uid)) for body in BODIES]
    assert "sender on" in q.text("ctl").splitlines()


def test_without_it_only_those_with_headers() -> None:
    q = Queues("replay all")
    write_all(q)
    assert [body for body, sender in senders(q, "a") if sender] == ["put", "headed"]


def test_lines() -> None:
    q = Queues("replay all", "data line", "sender on")
    writer = q.open("s", os.O_WRONLY)
    writer.write(b"one\ntwo\nthr")
    writer.write(b"ee\nfour")
    writer.close()
    me = str(ROOT.uid)
    assert senders(q) == [("one\n", me), ("two\n", me), ("three\n", me), ("four", me)]


def test_it_survives_a_wait_for_room() -> None:
    q = Queues("replay all", "sender on", "depth 1", "full block")
    q.write("s", b"one")
    q.open("s", os.O_WRONLY).write(b"two")
    q.ctl("clear s")
    assert senders(q) == [("two", str(ROOT.uid))]


@pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)
def test_there_is_no_ring() -> None:
    rig = Rig("sender on")
    with pytest.raises(errors.Unsupported, match="rings: not with 'sender on'"):
        rig.attach()
    rig.stop()
