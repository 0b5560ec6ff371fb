"""Messages with an empty body: by `.put` and `.batch`, and to every kind of reader."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import pytest

from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadCommand
from mqfs.model import Wait
from tests.support.hand import ROOT, Hand

NOTHING = b'{"stream":"s"} '


@pytest.fixture
def one(hand: Hand) -> Hand:
    hand.stream()
    return hand


def put(hand: Hand, data: bytes = NOTHING) -> None:
    assert not isinstance(hand.open(".put", os.O_WRONLY).write(data), Wait)


def consumer(hand: Hand) -> Any:
    hand.ctl("consumer w")
    tree: Tree = hand.tree
    return tree.open(ROOT, tree.find(ROOT, "g/.consumers/w"), os.O_RDWR)


def test_raw_readers_see_one_read_of_no_byte(one: Hand) -> None:
    early, late = one.open("s"), one.open("s")
    step = early.read(64)
    put(one)
    one.write("s", b"next")
    assert step.result() == b""
    for reader in (early, late):
        if reader is late:
            assert reader.read(64) == b""
        assert reader.read(64) == b"next"
        assert isinstance(reader.read(64), Wait)


@pytest.mark.parametrize(
    ("form", "read"),
    [("raw", [b"", b"x"]), ("line", [b"\n", b"x\n"]), ("nul", [b"\0", b"x\0"]), ("each", [b"", b"", b"x", b""])],
)
def test_every_format_has_it(one: Hand, form: str, read: list[bytes]) -> None:
    put(one)
    one.write("s", b"x")
    worker = consumer(one)
    worker.write(f"format {form}\n".encode())
    cursor = one.cursor(f"format {form}", "seek first")
    assert [cursor.read(64) for _ in read] == read
    assert [worker.read(64) for _ in read] == read
    assert isinstance(worker.read(64), Wait)


def test_json_and_records(one: Hand) -> None:
    put(one)
    one.write("s", b"x")
    lines = one.cursor("format json", "seek first")
    assert [json.loads(lines.read(4096))["body"] for _ in range(2)] == ["", "x"]
    assert json.loads(one.text(".stats"))["streams"]["s"]["messages"] == 2
    worker = consumer(one)
    worker.write(b"format json\n")
    assert json.loads(worker.read(4096))["body"] == ""
    worker.write(b"nack\n")
    one.clock.forward(2)
    one.tree.tick()
    assert json.loads(worker.read(4096))["deliveries"] == 2
    worker.write(b"ack\n")
    assert json.loads(worker.read(4096))["body"] == "x"


@pytest.mark.parametrize("head", [b"", b"\x01k\x01\x00v"])
def test_a_batch_with_empty_bodies(one: Hand, head: bytes) -> None:
    frames = b"".join(
        struct.pack("<IHH", 9 + len(head) + len(b), 1, len(head)) + b"s" + head + b for b in (b"", b"x", b"")
    )
    assert one.open(".batch", os.O_WRONLY).write(frames) == len(frames)
    lines = one.cursor("format json", "seek first")
    assert [json.loads(lines.read(4096))["body"] for _ in range(3)] == ["", "x", ""]
    for wrong in (struct.pack("<IHH", 8, 1, 0) + b"s", struct.pack("<IHH", 9, 1, 1) + b"s"):
        with pytest.raises(BadCommand):
            one.open(".batch", os.O_WRONLY).write(wrong)


@pytest.mark.parametrize("lines", [["data line"], ["deliver one"], ["depth 2"], ["keep ring"]], ids=str)
def test_in_groups_of_every_kind(lines: list[str]) -> None:
    hand = Hand("replay all", *lines)
    hand.stream()
    put(hand)
    put(hand, b'{"stream":"s","delay":"1s"} ')
    hand.clock.forward(2)
    hand.tree.tick()
    worker = consumer(hand)
    worker.write(b"format json\n")
    for _ in range(2):
        assert json.loads(worker.read(4096))["body"] == ""
        worker.write(b"ack\n")
