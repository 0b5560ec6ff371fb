"""Every refused write is one line of `.errors` and counts as refused, whatever the file; and dead letters are bound by
no depth."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqfs import limits
from tests.fuse.test_data import drain
from tests.support.eventually import HANG_S, eventually


def write(path: Path, data: bytes) -> int:
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def commit(mq: Path, stream: str, body: bytes) -> int:
    (mq / ".txn/part").mkdir(exist_ok=True)
    write(mq / ".txn/part" / stream, body)
    return write(mq / ".txn/ctl", b"commit me.1 part")


def frame(stream: str, body: bytes) -> bytes:
    name = stream.encode()
    return b"%b%b\0\0%b%b" % ((8 + len(name) + len(body)).to_bytes(4, "little"), bytes([len(name), 0]), name, body)


WAYS: dict[str, Callable[[Path, str, bytes], int]] = {
    "stream": lambda mq, stream, body: write(mq / stream, body),
    ".put": lambda mq, stream, body: write(mq / ".put", b'{"stream":"%b"} %b' % (stream.encode(), body)),
    ".batch": lambda mq, stream, body: write(mq / ".batch", frame(stream, body)),
    ".txn": commit,
}
MODES = {"plain": "", "line": "data line\n", "sender": "sender on\n"}


def refusals(mq: Path) -> list[tuple[str, str]]:
    """The file and the text of each refused write. They count."""
    rows = [json.loads(line) for line in (mq / ".errors").read_text().splitlines()]
    assert json.loads((mq / ".stats").read_text())["refused"] == len(rows)
    return [(row["file"], row["text"]) for row in rows]


def file_of(way: str) -> str:
    return {"stream": "s", ".txn": "ctl"}.get(way, way)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_without_room_leaves_its_reason(mq: Path, way: str, mode: str) -> None:
    (mq / "ctl").write_text(MODES[mode] + "depth 1\nfull reject\n")
    (mq / "s").write_text("first\n")
    assert refusals(mq) == []
    with pytest.raises(OSError) as caught:
        WAYS[way](mq, "s", b"second\n")
    assert caught.value.errno == errno.ENOSPC
    assert refusals(mq) == [(file_of(way), "stream 's': depth reached with 1 messages, 6 bytes")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("folder", ["", ".txn/part"])
def test_a_message_that_is_too_long_leaves_its_reason(mq: Path, folder: str, mode: str) -> None:
    (mq / "ctl").write_text(MODES[mode])
    (mq / "s").touch()
    if folder:
        (mq / folder).mkdir()
    with pytest.raises(OSError) as caught:
        write(mq / folder / "s", bytes(1_500_000))
    assert caught.value.errno == errno.EMSGSIZE
    ((file, text),) = refusals(mq)
    assert (file, f"expected at most {limits.MESSAGE_BYTES}" in text) == ("s", True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_that_waited_and_is_then_refused_leaves_its_reason(mq: Path, way: str, mode: str) -> None:
    (mq / "ctl").write_text(MODES[mode] + "depth 1\nfull block\n")
    (mq / "s").write_text("first\n")
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(WAYS[way], mq, "s", b"second\n")
        eventually(lambda: json.loads((mq / ".stats").read_text())["streams"]["s"]["blocked"] == 1, "it waits")
        assert refusals(mq) == []
        (mq / "ctl").write_text("full reject\n")
        with pytest.raises(OSError) as caught:
            written.result(HANG_S)
    assert caught.value.errno == errno.ENOSPC
    assert refusals(mq) == [(file_of(way), "stream 's': depth reached with 1 messages, 6 bytes")]


@pytest.mark.parametrize("full", ["drop-old", "drop-new", "reject", "block"])
@pytest.mark.parametrize("way", WAYS)
def test_no_depth_bounds_dead_letters(mq: Path, way: str, full: str) -> None:
    (mq / "ctl").write_text(f"full {full}\nconsumer c\n")
    bodies = [b"m%d\n" % number for number in range(4)]
    for body in bodies:
        (mq / "s").write_bytes(body)
    fd = os.open(mq / ".consumers/c", os.O_RDWR)
    try:
        for _ in bodies:
            os.read(fd, 100)
            os.write(fd, b"dead\n")
    finally:
        os.close(fd)
    (mq / "ctl").write_text("depth 2\n")
    assert drain(mq / "dead") == bodies
    WAYS[way](mq, "dead", b"x\n")
    assert drain(mq / "dead") == [*bodies, b"x\n"]
    (mq / "ctl").write_text("depth 20B\n")
    WAYS[way](mq, "dead", bytes(30)) if way != ".txn" else write(mq / "dead", bytes(30))
    assert drain(mq / "dead") == [*bodies, b"x\n", bytes(30)]
