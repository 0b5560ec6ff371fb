"""Records that pass their check and make no sense: the group they are of is not served or read-only, all others are."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs.client.large import MultipartAssembler
from mqfs.client.message import Message
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadCommand, BadStore, MqfsError, ReadOnly
from mqfs.model import Kind, Wait
from mqfs.records import batch, headers
from mqfs.state.group import PUT
from mqfs.store.memory import MemoryStore
from mqfs.syntax.names import check_name
from tests.support.batches import frame
from tests.support.campaign import seed, size
from tests.support.clock import SECOND
from tests.support.hand import ROOT, Hand

VALUES = [None, -1, 0, 7, 1 << 70, 1.5, True, "", "\ud800", "x/\0", [], [[]], [1], [[1, 2, 3]], {}, {"a": 1}]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("mqfs.engine").setLevel(logging.CRITICAL + 1)
    yield
    logging.getLogger("mqfs.engine").setLevel(logging.NOTSET)


def busy() -> Hand:
    """A group whose log has every kind of change, and beside it `other` with one message."""
    hand = Hand("replay all", "consumer w", "consumer v s backlog 3", "bind view s.#", "depth 9", "ttl 1h")
    for name in ("s", "t"):
        hand.stream(name)
    hand.write("s", b"one", b"two")
    hand.clock.wall += 60 * SECOND  # set by hand: the log says so
    hand.write("s", b"six")
    put = hand.open(".put", os.O_WRONLY)
    for keys in ('"id":"a"', '"delay":"9s"', '"priority":9,"ttl":"5s"'):
        put.write(b'{"stream":"s",%s} x' % keys.encode())
    worker = hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.consumers/w"), os.O_RDWR)
    for command in (b"ack\n", b"nack 1h\n", b"release\n", b""):
        worker.read(64)
        worker.write(command)
    hand.tree.mkdir(ROOT, hand.tree.walk(ROOT, hand.group, ".txn"), "p", 0o755)  # type: ignore[arg-type]
    commit = hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.txn/ctl"), os.O_WRONLY)
    commit.write(b"commit job.1 p")
    commit.write(b"forget job")
    hand.ctl("drop s 2", "unbind view", "consumer v s backlog 4", "remove v", "clear t")
    hand.tree.rename(ROOT, hand.group, "t", hand.group, "u")
    hand.tree.setattr(ROOT, hand.group.streams["u"], mode=0o600)
    hand.tree.unlink(ROOT, hand.group, "u")
    other = hand.mkdir("other")
    hand.tree.open(ROOT, hand.tree.find(ROOT, "other/ctl"), os.O_WRONLY).write(b"replay all\n")
    hand.tree.open(ROOT, hand.tree.create(ROOT, other, "s", 0o644), os.O_WRONLY).write(b"sound")  # type: ignore[arg-type]
    return hand


def mutations(value: Any) -> Iterator[Any]:
    """The value with one thing in it replaced or left out."""
    yield from VALUES
    if isinstance(value, dict | list):
        places = list(value) if isinstance(value, dict) else range(len(value))
        for place in places:
            for changed in mutations(value[place]):
                other = copy.copy(value)
                other[place] = changed
                yield other
            yield {k: v for k, v in value.items() if k != place} if isinstance(value, dict) else value[:place]


def bodies(kind: Kind, body: bytes) -> Iterator[bytes]:
    """Bodies near to a valid one."""
    yield from (b"", b"\xff", b"[" * 100_000, b"9" * 5_000, body[:-1], body + b"x")
    if kind == Kind.ACK:
        for op in (0, 5, 255):
            yield struct.pack("<BxxxIQQq", op, 0, 1, 1, 0)
        for first, last in ((5, 4), (0, (1 << 64) - 1), ((1 << 64) - 1, (1 << 64) - 1), (1 << 63, 1 << 63)):
            for op in (1, 2, 3, 4):
                yield struct.pack("<BxxxIQQq", op, (1 << 32) - 1, first, last, -1)
        return
    for value in mutations(json.loads(body)):
        yield json.dumps(value).encode()


def malformed() -> list[tuple[Kind, int, bytes]]:
    hand = busy()
    _, records = hand.group.log.upkeep.history()
    rows = [(Kind(r.kind), r.stream, body) for r in records for body in bodies(Kind(r.kind), r.body)]
    rows += [(Kind.STATE, 0, body) for body in bodies(Kind.STATE, hand.group.state.encode())]
    assert {kind for kind, _, _ in rows} == {Kind.CHANGE, Kind.ACK, Kind.CLOCK, Kind.STATE}
    return random.Random(seed()).sample(rows, size(len(rows)))


def use(tree: Tree, name: str) -> None:
    """What a client may do with a group; a refusal is an answer."""
    for path, flags in (("ctl", os.O_RDONLY), (".stats", os.O_RDONLY), ("s", os.O_WRONLY), (".cursor", os.O_RDWR)):
        try:
            handle = tree.open(ROOT, tree.find(ROOT, f"{name}/{path}"), flags)
            step = handle.write(b"new") if path == "s" else handle.read(4_096)
            if isinstance(step, Wait):
                step.cancel()
            handle.close()
        except MqfsError:
            pass


@pytest.mark.slow
def test_a_malformed_record_is_the_fault_of_its_group_alone() -> None:
    for kind, stream, body in malformed():
        hand = busy()
        store: MemoryStore = hand.tree.store  # type: ignore[assignment]
        hand.group.log.bucket.writer.append(kind, stream, hand.clock.wall_ns(), body)
        tree = Tree(store, hand.clock, owner=ROOT)
        reader = tree.open(ROOT, tree.find(ROOT, "other/s"), os.O_RDONLY)
        assert reader.read(64) == b"sound", (kind, body)
        if hand.group.number in tree.groups:
            use(tree, tree.groups[hand.group.number].name)
        for _ in range(20):
            hand.clock.forward(1)
            tree.tick()
        tree.close()


def test_a_group_in_one_that_is_not_served_is_not_served() -> None:
    hand = busy()
    inner = hand.tree.mkdir(ROOT, hand.group, "inner", 0o755)
    hand.group.log.bucket.writer.append(Kind.CHANGE, 0, 0, b"{}[]")
    tree = Tree(hand.tree.store, hand.clock, owner=ROOT)
    assert sorted(tree.root.groups) == ["other"]
    assert inner.number not in tree.groups  # type: ignore[union-attr]


def test_a_root_that_makes_no_sense_is_told_in_one_line() -> None:
    hand = busy()
    hand.tree.root.log.bucket.writer.append(Kind.CHANGE, 0, 0, b'{"do":"ctl","lines":["nonsense"]}')
    with pytest.raises(BadStore, match=r"root group: .*nonsense"):
        Tree(hand.tree.store, hand.clock, owner=ROOT)


@pytest.mark.parametrize("name", ["n" * 255, "\u00e9" * 127, "\u20ac" * 85, "x" + "\U0001f600" * 63])
def test_of_two_groups_of_one_name_both_have_a_legal_one(name: str) -> None:
    hand = Hand()
    hand.mkdir(name)
    hand.group.log.bucket.writer.append(
        Kind.CHANGE, 0, 0, json.dumps({"do": "rename", "stream": 0, "name": name}).encode()
    )
    tree = Tree(hand.tree.store, hand.clock, owner=ROOT)
    names = sorted(tree.root.groups, key=len)
    assert len(names) == 2
    for adopted in names:
        assert len(adopted.encode()) <= 255
        assert check_name(adopted) == adopted
    assert any(f".lost-{number}" in adopted for adopted in names for number in tree.groups)


def test_a_group_is_not_put_under_the_name_of_a_view() -> None:
    hand = Hand()
    ctl = hand.tree.open(ROOT, hand.tree.find(ROOT, "ctl"), os.O_WRONLY)
    ctl.write(b"bind view a.#\n")
    hand.group.log.bucket.writer.append(Kind.CHANGE, 0, 0, b'{"do":"rename","stream":0,"name":"view"}')
    tree = Tree(hand.tree.store, hand.clock, owner=ROOT)
    assert list(tree.root.groups) == [f"view.lost-{hand.group.number}"]
    assert list(tree.root.views) == ["view"]


PARTS = ["1" * 5_000 + "/2", "1/" + "2" * 5_000, "\u00b2/2", "\u0662/\u0662", "2/1", "0/3", "3/", "/3", "1/2/3", ""]
RANKS = [{"priority": "9" * 5_000}, {"priority": "high"}, {"ttl": "1" * 5_000 + "s"}, {"ttl": "soon"}, {"ttl": ""}]


@pytest.mark.parametrize("texts", [*({"part": part} for part in PARTS), *RANKS], ids=lambda t: str(t)[:24])
def test_headers_that_make_no_sense_stop_nobody(texts: dict[str, str]) -> None:
    """They may stand in an older log, or come through a ring: then they are text like any other."""
    hand = Hand("replay all", "consumer w", "consumer j", "consumer b backlog 1")
    hand.group.log.bucket.writer.append(Kind.MESSAGE, hand.stream().number, 0, b"odd", headers.encode(texts))
    hand.write("s", b"plain")
    tree = Tree(hand.tree.store, hand.clock, owner=ROOT)
    for path in (".consumers/w", ".consumers/j", ".consumers/b", ".cursor"):
        handle = tree.open(ROOT, tree.find(ROOT, f"g/{path}"), os.O_RDWR)
        handle.write(b"format json\nseek first\n" if path.endswith("j") else b"seek first\n")
        read = [handle.read(1 << 20), handle.read(1 << 20)]
        assert [b"odd" in read[0], b"plain" in read[1]] == [True, True], path
        if path.endswith("w"):
            handle.write(b"dead 1\n")
    tree.open(ROOT, tree.find(ROOT, "g/ctl"), os.O_WRONLY).write(b"redrive\n")
    tree.open(ROOT, tree.find(ROOT, "g/.stats"), os.O_RDONLY).read(1 << 20)
    tree.tick()
    tree.close()
    message = Message(1, "s", 0, b"odd", texts)
    assert MultipartAssembler().add_part(message) == message


@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part)[:24])
@pytest.mark.parametrize("into", [".put", ".batch"])
@pytest.mark.parametrize("native", [True, False], ids=["c", "python"])
def test_a_part_that_makes_no_sense_is_refused_where_it_is_written(
    part: str, into: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(batch, "MISSING", "left out")
    hand = Hand("replay all")
    hand.stream()
    handle = hand.open(into, os.O_WRONLY)
    for text, fits in ((part, False), ("3", True), ("1/2", True), ("17/17", True)):
        data = json.dumps({"stream": "s", "headers": {"part": text}}).encode() + b" x"
        data = data if into == ".put" else frame("s", b"x", part=text)
        if fits:
            assert handle.write(data) == len(data)
        else:
            with pytest.raises(BadCommand, match=r"header 'part': invalid place .* \(expected "):
                handle.write(data)
    assert hand.group.streams["s"].written == 3


@pytest.mark.parametrize("native", [True, False], ids=["c", "python"])
def test_a_key_has_1_to_255_bytes(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(batch, "MISSING", "left out")
    hand = Hand("replay all")
    hand.stream()
    handle = hand.open(".batch", os.O_WRONLY)
    for text, fits in (("", False), ("k", True), ("ü" * 127, True), ("k" * 255, True), ("k" * 256, False)):
        data = frame("s", b"x", key=text)
        if fits:
            assert handle.write(data) == len(data)
        else:
            with pytest.raises(BadCommand, match=r"header 'key': .* bytes \(expected 1 to 255\)"):
                handle.write(data)
    assert hand.group.streams["s"].written == 3


@pytest.mark.parametrize(
    "texts", [{}, {"to": "16"}, {"to": "x", "due": "1"}, {"to": "16", "due": "9" * 5_000}], ids=lambda t: str(t)[:24]
)
def test_a_group_that_cannot_be_started_is_read_only_and_the_log_has_a_line(
    texts: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A delayed message in the log that does not say for which stream, or until when."""
    logging.getLogger("mqfs.engine").setLevel(logging.NOTSET)
    hand = busy()
    hand.group.log.bucket.writer.append(Kind.MESSAGE, PUT, 0, b"odd", headers.encode(texts))
    tree = Tree(hand.tree.store, hand.clock, owner=ROOT)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"group {hand.group.number}: finding delayed messages failed: ")
    stats = json.loads(tree.open(ROOT, tree.find(ROOT, "g/.stats"), os.O_RDONLY).read(1 << 20))  # type: ignore[arg-type]
    assert stats["read_only"]
    with pytest.raises(ReadOnly):
        tree.open(ROOT, tree.find(ROOT, "g/s"), os.O_WRONLY).write(b"no")
    assert tree.open(ROOT, tree.find(ROOT, "g/.kept/s"), os.O_RDONLY).read(3) == b"one"
    assert tree.open(ROOT, tree.find(ROOT, "other/s"), os.O_WRONLY).write(b"yes") == 3
    for _ in range(180):
        hand.clock.forward(1)
        tree.tick()
    tree.close()
    assert len(caplog.records) <= 4, "at most one a minute"
