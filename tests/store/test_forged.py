"""Messages whose bodies hold valid records, torn by power cuts: no body's content is served as a record."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.model import Kind
from mqfs.records.record import HEAD_BYTES, SETTLED, encode
from mqfs.store.check import check
from mqfs.store.store import DiskStore
from tests.support.temp_store import abandon, lowered

STATE, FORGED = b'{"group":1}', b'{"do":"chmod","mode":511}'
PAGE = 4_096
PAGES = 6  # of the body


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def forged(kind: Kind, sequence: int) -> bytes:
    """A body that is nothing but records, the size of which divides a page's."""
    one = encode(sequence, 0, 16 if kind is Kind.MESSAGE else 0, kind, SETTLED, b"", FORGED.ljust(32))
    return one * (PAGES * PAGE // len(one))


def fill(path: Path, kind: Kind, first: int, *, rolled: bool, later: bool) -> Path:
    """A store after a power cut, but that all is on disk; returns the log that holds the message."""
    with lowered(SEGMENT_BYTES=64 << 10):
        store = DiskStore(str(path))
        bucket = store.make(store.number(), STATE)
        bucket.writer.state = lambda: STATE
        for number in range(4):
            bucket.writer.append(Kind.MESSAGE, 16, 0, b"message %d" % number)
        bucket.upkeep.sync()
        body = forged(kind, bucket.end.next + first)
        bucket.writer.append(Kind.MESSAGE, 16, 0, body)
        if later:
            bucket.writer.append(Kind.MESSAGE, 16, 0, b"later")
        if rolled:
            for _ in range(4):
                bucket.writer.append(Kind.MESSAGE, 17, 0, bytes(20_000))
        abandon(store)
    (log,) = (log for log in path.glob("buckets/*/*/*.log") if body in log.read_bytes())
    for index in path.glob("buckets/*/*/*.idx"):
        index.unlink()
    return log


def tear(log: Path, page: int) -> None:
    """The page of the message with that number never reached the disk; -1: its last one."""
    data = bytearray(log.read_bytes())
    begin = data.index(FORGED) - 2 * HEAD_BYTES
    pages = [begin, *range((begin // PAGE + 1) * PAGE, begin + PAGES * PAGE, PAGE)]
    at = pages[page]
    end = (at // PAGE + 1) * PAGE
    data[at:end] = bytes(end - at)
    log.write_bytes(data)


def found(path: Path) -> tuple[set[bytes], list[bytes], int]:
    """Bodies, changes, and how much is damaged."""
    store = DiskStore(str(path))
    bucket = store.open(1)
    bodies, sequence = set(), 0
    while (record := bucket.reader.scan(sequence)) is not None:
        bodies.add(record.body)
        sequence = record.sequence + 1
    changes = [record.body for record in bucket.upkeep.history()[1]]
    damaged = bucket.upkeep.damaged
    abandon(store)
    return bodies, changes, damaged


@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("page", [0, 1, -1])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [Kind.MESSAGE, Kind.CHANGE])
def test_a_torn_message(tmp_path: Path, kind: Kind, first: int, page: int, later: bool, rolled: bool) -> None:
    path, other = tmp_path / "store", tmp_path / "other"
    tear(fill(path, kind, first, rolled=rolled, later=later), page)
    shutil.copytree(path, other)
    before = {b"message %d" % number for number in range(4)}
    bodies, changes, damaged = found(path)
    assert before <= bodies
    assert FORGED.ljust(32) not in bodies | set(changes)
    assert damaged <= 1
    lines: list[str] = []
    check(str(other), False, lines.append)
    check(str(other), True, lines.append)
    bodies, changes, _ = found(other)
    assert before <= bodies
    assert FORGED.ljust(32) not in bodies | set(changes)


@pytest.mark.parametrize("near", [False, True])
def test_a_page_of_zeros_before_a_sync(tmp_path: Path, near: bool) -> None:
    """Further behind than a message may reach it is known to be damage: only what was there is missing. Nearer by it
    may be a tear, and what says otherwise a part of a message."""
    path = tmp_path / "store"
    with lowered(MESSAGE_BYTES=8_192):
        store = DiskStore(str(path))
        bucket = store.make(store.number(), STATE)
        for number in range(20 if near else 100):
            bucket.writer.append(Kind.MESSAGE, 16, 0, b"%02d" % number * 1_000)
        bucket.upkeep.sync()
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"synced")
        abandon(store)
        (log,) = path.glob("buckets/*/*/*.log")
        data = bytearray(log.read_bytes())
        data[PAGE : 2 * PAGE] = bytes(PAGE)
        log.write_bytes(data)
        for index in path.glob("buckets/*/*/*.idx"):
            index.unlink()
        bodies, _, damaged = found(path)
    assert damaged == 1
    assert (b"synced" in bodies) == (not near)
    assert len(bodies) == (1 if near else 98)
