"""Damage to what is no message: no intact message is lost by it; what cannot be known is read-only until a repair."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest

from mqfs.engine.group import Group
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadStore, Damaged, ReadOnly
from mqfs.model import Kind, Wait
from mqfs.records.record import INNER, SETTLED, Row, padded, row_at
from mqfs.state.acks import AckState
from mqfs.state.group import GroupState
from mqfs.store.check import check
from mqfs.store.segment.index import decode_part
from mqfs.store.store import DiskStore
from tests.support.batches import Units, frame
from tests.support.campaign import size, tree_seed
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.queues import read, say
from tests.support.temp_store import SMALL, lowered

Messages = dict[tuple[int, int], tuple[int, bytes]]  # (group, sequence) -> stream, body


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    for name in ("mqfs.store", "mqfs.engine"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with lowered(**SMALL):
        yield
    for name in ("mqfs.store", "mqfs.engine"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one: a campaign syncs often."""
    memory = "/dev/shm"
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield path
    shutil.rmtree(path)


class Stores:
    """A store after a clean stop and after a kill, with every kind of record, and what it holds."""

    def __init__(self, place: Path) -> None:
        self.clean, self.killed = place / "clean", place / "killed"
        units = Units("consumer w", "consumer v s backlog 30", "bind some s.#", "retries 2", path=self.clean)
        _use(units)
        many = units.mkdir("many")
        _ctl(units.tree, "many/ctl", b"replay all\nsync off\n")
        for name in ("a", "b", "c"):
            units.tree.create(ROOT, many, name, 0o600)
            for number in range(25):
                _write(units.tree, f"many/{name}", b"%d of %s " % (number, name.encode()) * (number % 7 + 1))
        units.tree.sync(many)
        for number in range(3):
            _write(units.tree, "many/b", b"late %d" % number)
        shutil.copytree(self.clean, self.killed)
        units.close()
        self.good = {path: _found(path) for path in (self.clean, self.killed)}


def _use(units: Units) -> None:
    for number in range(12):
        units.batch(frame("s", b"one %d" % number), frame("t", b"two", color="red"), frame("t", b"three"))
        _write(units.tree, "g/s", b"a message %d" % number)
    units.put(b"with an id", id="a")
    units.put(b"later", delay="9h")
    worker = units.worker()
    for _ in range(4):
        read(worker)
        say(worker, "ack")
    for word in ("nack", "release", "dead broken"):
        read(worker)
        say(worker, word)
    units.stage("p", "t", b"staged")
    units.say("commit app.7 p\n")
    units.ctl("drop s 5", "unbind some", "consumer v s backlog 4", "remove v", "depth 500", "ttl 9h")
    units.stream("gone")
    units.write("gone", b"of a removed stream")
    units.tree.unlink(ROOT, units.group, "gone")
    units.tree.rename(ROOT, units.group, "t", units.group, "u")
    units.tree.setattr(ROOT, units.group.streams["u"], mode=0o600)
    units.tree.sync(units.group)
    units.write("u", b"the last")


def _write(tree: Tree, path: str, body: bytes) -> None:
    handle = tree.open(ROOT, tree.find(ROOT, path), os.O_WRONLY)
    assert not isinstance(handle.write(body), Wait)
    handle.close()


def _ctl(tree: Tree, path: str, lines: bytes) -> None:
    handle = tree.open(ROOT, tree.find(ROOT, path), os.O_WRONLY)
    handle.write(lines)
    handle.close()


@attrs.define
class Found:
    """What a start finds."""

    messages: Messages = attrs.Factory(dict)
    states: dict[int, bytes] = attrs.Factory(dict)
    read_only: dict[int, str] = attrs.Factory(dict)


def _found(path: Path, *, use: bool = False) -> Found:
    """Start a store in a copy of its own, unless it is used: then it is served for some minutes and stopped."""
    here = path if use else path.with_name("looked-at")
    if not use:
        shutil.copytree(path, here)
    store = DiskStore(str(here))
    try:
        clock = ManualClock()
        tree = Tree(store, clock, owner=ROOT)
        found = Found()
        for group in tree.groups.values():
            found.states[group.number] = _state(group)
            if group.log.end.failed is not None:
                found.read_only[group.number] = str(group.log.end.failed)
            for stream in group.streams.values():
                for sequence, body in _kept(group, stream):
                    found.messages[group.number, sequence] = stream.number, body
        if use:
            for _ in range(5):
                clock.forward(60)
                tree.tick()
            _write_all(tree, found)
        tree.close()
    finally:
        store.close()
        if not use:
            shutil.rmtree(here)
    return found


def _state(group: Group) -> bytes:
    """What must not change unseen. The floors in memory may be ahead of what the log says."""
    state = GroupState.decode(group.state.encode())
    for stream in state.streams.values():
        stream.floor = 0
    state.dropped.clear()
    for consumer in list(state.consumers.values()):
        if not consumer.name and consumer.progress.encode() == AckState().encode():
            del state.consumers[consumer.number]  # it is made when it is looked at
    return state.encode()


def _kept(group: Group, stream: Any) -> Iterator[tuple[int, bytes]]:
    """What the stream keeps, as a reader that begins at its first message gets it."""
    sequence = stream.kept.first_kept()
    while sequence and sequence < group.log.end.next:
        try:
            record = group.log.reader.find(stream.number, sequence)
        except Damaged as error:
            sequence = error.sequence + 1
            continue
        if record is None:
            return
        if record.kind == Kind.MESSAGE and record.sequence not in group.state.dropped:
            yield record.sequence, record.body
        sequence = record.sequence + 1


def _write_all(tree: Tree, found: Found) -> None:
    """Each stream takes a message, or says why not and what helps."""
    for group in tree.groups.values():
        for stream in list(group.streams.values()):
            handle = tree.open(ROOT, stream, os.O_WRONLY)
            if group.number in found.read_only:
                with pytest.raises(ReadOnly, match="mqfs check --fix"):
                    handle.write(b"more")
            else:
                assert handle.write(b"more") == 4
            handle.close()


class Hit(NamedTuple):
    """Where a store is damaged."""

    log: Path
    row: Row
    data: bytes  # from then on
    rows: list[Row]
    group: int


def records(log: Path) -> list[Row]:
    data, at, rows = log.read_bytes(), 0, []
    while (row := row_at(data, at)) is not None:
        rows.append(row)
        at += padded(row.size)
    return rows


def hit(luck: random.Random, store: Path) -> Hit:
    """Flip one bit of a record that is no message, or of a message's size; sometimes damage more of it."""
    log = luck.choice(sorted(store.glob("buckets/*/*/*.log")))
    rows = records(log)
    some = [row for row in rows if row.kind > Kind.END]
    row = luck.choice(some if luck.random() < 0.8 or len(some) == len(rows) else [r for r in rows if r not in some])
    data = bytearray(log.read_bytes())
    at = row.position + luck.randrange(4 if row.kind <= Kind.END else row.size)
    kind = luck.random() if row.kind > Kind.END else 0.0
    if kind < 0.9:
        data[at] ^= 1 << luck.randrange(8)
    elif kind < 0.95:
        data[row.position : row.position + row.size] = bytes(row.size)
    else:
        data[row.position : row.position + row.size] = luck.randbytes(row.size)
    return Hit(log, row, bytes(data), rows, int(log.parent.name))


def intact(hit: Hit, good: Messages, *, index: bool) -> Messages:
    """The messages that are known to be whole: those that an index covers, and what is before a record that says so.
    Elsewhere the damage looks like a power cut, which costs the batch, and in the newest segment what follows; in each,
    where the rest of a sector is zeros, as the body of a torn message may hold what follows."""
    lost = {hit.row.sequence} if hit.row.kind <= Kind.END else set()
    torn = is_torn(hit, index=index)
    settled = [row.position for row in hit.rows if row.flags & SETTLED and row is not hit.row and not torn]
    if hit.row.position >= max([0, *settled, _covered(hit, index)]):
        begin = max(n for n, row in enumerate(hit.rows) if row.position <= hit.row.position and not row.flags & INNER)
        is_newest = hit.log == max(hit.log.parent.glob("*.log"))
        inner = itertools.takewhile(lambda row: is_newest or torn or row.flags & INNER, hit.rows[begin + 1 :])
        lost |= {row.sequence for row in (hit.rows[begin], *inner) if row.kind <= Kind.END}
    return {key: value for key, value in good.items() if key[0] != hit.group or key[1] not in lost}


def is_torn(hit: Hit, *, index: bool) -> bool:
    """Whether it looks as if a sector never had been written, for all that is known."""
    at = hit.row.position
    return at >= _covered(hit, index) and not any(hit.data[at : at + 512 - at % 512])


def _covered(hit: Hit, index: bool) -> int:
    path, at, to = hit.log.with_suffix(".idx"), 0, 0
    data = path.read_bytes() if index and path.exists() else b""
    while (part := decode_part(data, at, at)) is not None:
        at, to = at + part.size, part.to
    return to


def run(path: Path, *, fix: bool = False) -> list[str]:
    lines: list[str] = []
    check(str(path), fix, lines.append)
    return [line for line in lines if not line.startswith("note: ")]


def verify(stores: Stores, store: Path, where: Hit, *, clean: bool, index: bool, first: str) -> bool:
    """Whether the state could not be known."""
    source = stores.clean if clean else stores.killed
    good = stores.good[source]
    whole, torn = intact(where, good.messages, index=index), is_torn(where, index=index)
    unknown = False
    if first == "start":
        try:
            found = _found(store, use=True)
        except BadStore as error:
            if where.group != 1 or "mqfs check --fix" not in str(error):
                raise
            unknown = True
        else:
            assert whole.items() <= found.messages.items(), "an intact message is not served"
            differs = {n for n in good.states if found.states.get(n) != good.states[n]}
            unseen = differs - found.read_only.keys()
            assert not clean or torn or not unseen, "the state is another, and the group is not read-only"
            assert found.read_only.keys() <= {where.group}
            unknown = bool(found.read_only)
            again = _found(store)
            assert whole.items() <= again.messages.items(), "an intact message was deleted"
            assert again.read_only == found.read_only
    before = run(store)
    assert before or not unknown, "a check finds nothing"
    unknown = unknown or any("its state is damaged" in line or "no state is whole" in line for line in before)
    run(store, fix=True)
    left = run(store)
    assert not left, left
    fixed = _found(store, use=True)
    assert not fixed.read_only
    assert whole.items() <= fixed.messages.items(), "a repair lost an intact message"
    if not unknown and clean and not torn:
        assert fixed.states[where.group] == good.states[where.group] or first == "start"
    return unknown


def _flip(log: Path, part: bytes) -> None:
    """One bit of the record that holds those bytes."""
    data = bytearray(log.read_bytes())
    data[data.index(part)] ^= 1
    log.write_bytes(data)


@pytest.mark.parametrize("part", [b'"do":"make"', b'"lines":["data message","replay all"', b'"group":2'])
def test_a_damaged_record_of_the_state(place: Path, part: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The record that made a stream, that set `replay all`, and the only state: the group is read-only, says why, and
    is mended by a check."""
    path = place / "store"
    with lowered(SEGMENT_BYTES=64 << 20, SEGMENT_RECORDS=1 << 20, STATE_RECORD_BYTES=1 << 20):
        units = Units(path=path)
        for number in range(2_000):
            units.write("s", b"message %d" % number)
        units.close()
        (log,) = (path / "buckets/02/2").glob("*.log")
        _flip(log, part)
        for name in ("mqfs.store", "mqfs.engine"):
            logging.getLogger(name).setLevel(logging.ERROR)
        for _ in range(2):
            caplog.clear()
            found = _found(path, use=True)
            assert len(found.messages) == 2_000
            assert (b'"recovered-16"' in found.states[2]) == (b"make" in part)
            said = [record.getMessage() for record in caplog.records if "group 2" in record.getMessage()]
            assert [line for line in said if "mqfs check --fix" in line] == said, said
            assert len(said) == 1
            assert run(path)[0].startswith("group 2: ")
            assert any("is damaged" in line or "no state" in line for line in run(path))
        _require_told(path)
        assert run(path, fix=True)
        assert run(path) == []
        fixed = _found(path, use=True)
        assert fixed.read_only == {}
        assert found.messages.items() <= fixed.messages.items()


def _require_told(path: Path) -> None:
    """`.stats` and `.errors` say it."""
    store = DiskStore(str(path))
    tree = Tree(store, ManualClock(), owner=ROOT)
    (group,) = tree.root.groups.values()
    stats = json.loads(_text(tree, group, ".stats"))
    assert stats["read_only"]
    assert "mqfs check --fix" in stats["failure"]
    assert "mqfs check --fix" in _text(tree, group, ".errors")
    tree.close()
    store.close()


def _text(tree: Tree, group: Group, name: str) -> str:
    handle = tree.open(ROOT, tree.walk(ROOT, group, name), os.O_RDONLY)
    data = handle.read(1 << 20)
    handle.close()
    assert isinstance(data, bytes)
    return data.decode()


@pytest.mark.timeout(3 * 3_600)
def test_no_intact_message_is_lost(place: Path) -> None:
    stores, luck = Stores(place), random.Random(tree_seed())
    assert len(records(max(stores.clean.glob("buckets/*/2/*.log")))) > 5
    count = unknown = 0
    for number in range(size(20_000, 200)):
        clean, index = luck.random() < 0.7, luck.random() < 0.5
        first = luck.choice(["start", "fix"])
        store = place / "store"
        shutil.copytree(stores.clean if clean else stores.killed, store)
        where = hit(luck, store)
        where.log.write_bytes(where.data)
        if not index:
            for path in where.log.parent.glob("*.idx"):
                path.unlink()
        try:
            unknown += verify(stores, store, where, clean=clean, index=index, first=first)
        except BaseException as error:
            error.add_note(f"{number}: {where.log.relative_to(store)}, {where.row}, {clean=}, {index=}, {first=}")
            raise
        shutil.rmtree(store)
        count += 1
    print(f"{count} damaged stores: the state of {unknown} could not be known")
    assert 0 < unknown < count
