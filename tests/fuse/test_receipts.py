"""The receipt of a write to `.put`: it says what becomes of the message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuse.served_by import Served
from tests.fuse.test_data import drain
from tests.support.eventually import eventually

SECOND_NS = 10**9


def receipt(group: Path, keys: str = "", body: bytes = b"x") -> list[int]:
    """Sequence, time, end, whether the id was known, whether it is there for anyone."""
    fd = os.open(group / ".put", os.O_RDWR)
    try:
        os.write(fd, b'{"stream":"s","kept":true%b} %b' % (f",{keys}".encode() if keys else b"", body))
        return [int(word) for word in os.read(fd, 100).split()]
    finally:
        os.close(fd)


@pytest.mark.parametrize("delay", ["", '"delay":"1h"'])
@pytest.mark.parametrize(
    ("of_group", "own", "seconds"),
    [("0", "", 0), ("0", "7s", 7), ("9s", "", 9), ("9s", "1h", 9), ("1h", "7s", 7), ("7s", "7s", 7)],
)
def test_the_end_is_that_of_the_shorter_ttl(mq: Path, of_group: str, own: str, seconds: int, delay: str) -> None:
    (mq / "ctl").write_text(f"ttl {of_group}\n")
    (mq / "s").touch()
    keys = [key for key in (f'"ttl":"{own}"' if own else "", delay) if key]
    _, written, ends, known, retained = receipt(mq, ",".join(keys))
    assert ends == (written + seconds * SECOND_NS if seconds else 0)
    assert (known, retained) == (0, 1)


def test_at_its_end_a_message_is_gone(mq: Path) -> None:
    (mq / "ctl").write_text("ttl 1s\n")
    (mq / "s").touch()
    _, _, ends, _, _ = receipt(mq, '"ttl":"1h"')
    eventually(lambda: drain(mq / "s") == [], "it expires")
    assert ends <= time.time_ns() < ends + 600 * SECOND_NS


def test_an_id_whose_message_is_still_there(mq: Path) -> None:
    (mq / "s").touch()
    first = receipt(mq, '"id":"i"')
    assert receipt(mq, '"id":"i"') == [*first[:3], 1, 1]


@pytest.mark.parametrize("ttl", ["", '"ttl":"1h"'])
@pytest.mark.parametrize("how", ["ttl 1h", "replay all", "deliver one", "consumer c"])
def test_a_memory_group_forgets_its_ids_with_its_messages(serve: Callable[..., Served], how: str, ttl: str) -> None:
    server = serve()
    group = server.path / "g"
    group.mkdir()
    (group / "ctl").write_text(f"replay all\nkeep ring\n{how}\n")
    (group / "s").touch()
    keys = ",".join(filter(None, ('"id":"i"', ttl)))
    assert receipt(group, keys)[3:] == [0, 1]
    assert receipt(group, keys)[3:] == [1, 1]
    assert server.stop() == 0
    serve()
    sequence, written, _, known, retained = receipt(group, keys)
    assert (known, retained) == (0, 1)
    assert sequence
    assert written
    if "deliver" not in how:
        assert drain(group / "s") == [b"x"]


@pytest.mark.parametrize("ttl", ["", '"ttl":"1h"'])
def test_an_id_whose_message_is_gone(mq: Path, ttl: str) -> None:
    (mq / "ctl").write_text("keep ring\n")
    (mq / "s").touch()
    keys = ",".join(filter(None, ('"id":"i"', ttl)))
    first = receipt(mq, keys)
    for _ in range(40):  # it has room for 16 of them
        (mq / "s").write_bytes(bytes(1_000_000))
    assert receipt(mq, keys) == [first[0], 0, 0, 1, 0]
