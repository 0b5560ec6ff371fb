"""The reason of a refused write: in few bytes, by whatever file, and to each user only its own."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from mqfs import limits
from mqfs.errors import MqfsError
from mqfs.model import User
from tests.support.batches import Units, frame
from tests.support.hand import ANNA, BERT, ROOT

FILES = ("ctl", ".cursor", ".put", ".batch", ".txn/ctl", ".txn/p/.batch", ".txn/p/.put", ".consumers/w", ".consumers/w")
LONG = 60_000
VERBS = (
    "",
    "abort ",
    "commit ",
    "forget ",
    "select ",
    "seek ",
    "ack ",
    "consumer ",
    "bind v ",
    "drop s ",
    "eof ",
    "ttl ",
)
JUNK = ("\x01" * LONG, "\u20ac" * (LONG // 3), "'" + "\x07 " * (LONG // 2), '{"' + "k" * LONG + '":1} x', "9" * 4_000)


def refuse(u: Units, path: str, data: bytes) -> tuple[str, bytes]:
    """The error, and what the next read tells."""
    handle = u.at(path, os.O_RDWR)
    try:
        handle.write(data)
    except MqfsError as error:
        return str(error), handle.read(1 << 20)
    finally:
        handle.close()
    return "", b""


@pytest.mark.parametrize("path", dict.fromkeys(FILES))
def test_a_refusal_is_short(path: str) -> None:
    u = Units("consumer w")
    u.part("p")
    refused = 0
    for junk in JUNK:
        frames = [frame(junk[:9_000], b"x"), frame("s", b"x", **{junk[:50]: "y", "sender": "z"})]
        for data in [*(f"{verb}{junk}\n".encode() for verb in VERBS), *frames]:
            error, told = refuse(u, path, data)
            refused += bool(error)
            assert len(error.encode()) <= limits.ERROR_BYTES + 40, "its condition stands before it"
            assert len(told) <= limits.ERROR_BYTES + 1
            if error:
                assert told.decode().endswith("\n")
    assert refused > 50
    lines = u.text(".errors").splitlines()
    assert 50 < len(lines) <= limits.ERRORS
    assert all(len(json.loads(line)["text"].encode()) <= limits.ERROR_BYTES for line in lines)


@pytest.mark.parametrize("path", [".put", ".batch"])
@pytest.mark.parametrize("waited", [False, True], ids=["at once", "after a wait"])
def test_what_is_read_after_a_write_is_of_that_write(path: str, waited: bool) -> None:
    """Also where the reason of one that was refused before was not read."""
    u = Units("depth 1", "full block") if waited else Units()

    def message(stream: str) -> bytes:
        return b'{"stream": "%b"} x' % stream.encode() if path == ".put" else frame(stream, b"x")

    handle = u.at(path, os.O_RDWR)
    refused = partial(handle.write, message("t"))
    if waited:
        refused()
        refused = refused().result
    u.tree.unlink(ROOT, u.group, "t")
    with pytest.raises(MqfsError):
        refused()
    handle.write(message("s"))
    assert handle.read(100) == b"%d\n" % (u.group.log.end.next - 1)


def texts(u: Units, user: User) -> list[str]:
    return [json.loads(line)["text"] for line in u.text(".errors", user).splitlines()]


def test_no_user_pushes_out_what_another_was_refused() -> None:
    u = Units()
    u.group.refuse(ANNA, "s", "anna's first")
    for number in range(100):
        u.clock.forward(1)
        u.group.refuse(BERT, "s", f"bert's {number}")
    u.clock.forward(1)
    u.group.refuse(ANNA, "s", "anna's last")
    assert texts(u, ANNA) == ["anna's first", "anna's last"]
    assert texts(u, BERT) == [f"bert's {number}" for number in range(36, 100)]
    assert texts(u, ROOT) == ["anna's first", *texts(u, BERT), "anna's last"]


def test_users_of_whom_refusals_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ERROR_USERS", 3)
    u = Units()
    for uid in (1, 2, 3, 1, 4):
        u.group.refuse(User(uid, uid), "s", str(uid))
    assert sorted(texts(u, ROOT)) == ["1", "1", "3", "4"], "who was refused longest ago is forgotten"
