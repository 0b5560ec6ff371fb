"""Room is given back by the watermarks of the last trim: what was written since stays, whatever it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs import limits
from tests.engine.retention.test_newest_per_key import FullDisk, Lying
from tests.support.queues import Queues
from tests.support.temp_store import lowered

Given = Callable[[], list[bytes]]  # what is there of the message


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(SEGMENT_BYTES=32_768, SEGMENT_FIRST_BYTES=1_024):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def fill(q: Queues) -> None:
    """Write what is not kept until the open segment, the third one, has room for little more."""
    chain, writer = q.store.open(q.group.number).chain, q.at("s", os.O_WRONLY)
    while len(chain.segments) < 3 or limits.SEGMENT_BYTES - chain.open.used > 4_000:
        writer.write(b"x" * 1_000)
    writer.close()


def roll(q: Queues) -> None:
    """Write until it is a sealed one."""
    chain, writer = q.store.open(q.group.number).chain, q.at("s", os.O_WRONLY)
    segment = chain.open
    while chain.open is segment:
        writer.write(b"x" * 1_000)
    writer.close()


def new_stream(q: Queues) -> Given:
    q.stream("new")
    q.write("new", b"precious")
    return lambda: q.shows(".kept/new")


def delayed(q: Queues) -> Given:
    sequence = q.put(b"precious", delay="1h")

    def due() -> list[bytes]:
        record = q.group.held.record(sequence)
        return [record.body] if record is not None else []

    return due


def on_disk_again(q: Queues) -> Given:
    """With `keep ring` the log on disk has no messages, and so no watermarks."""
    q.ctl("clear")
    q.ctl("keep ring")
    q.pass_time(1)
    q.group.retention.trim(always=True)
    q.ctl("clear")
    q.ctl("keep disk")
    q.stream("new")
    q.write("new", b"precious")
    return lambda: q.shows(".kept/new")


WRITTEN = {"stream": new_stream, "delayed": delayed, "keep": on_disk_again}
SETTINGS = [("replay all", "depth 2"), ("replay last",), ("replay key", "depth 2")]


@pytest.mark.parametrize("lines", SETTINGS, ids=" ".join)
@pytest.mark.parametrize("what", WRITTEN)
def test_a_compaction_keeps_what_was_written_since_the_trim(tmp_path: Path, what: str, lines: tuple[str, ...]) -> None:
    q = Queues(*lines, path=tmp_path / "store")
    fill(q)
    q.pass_time(2)
    q.group.retention.trim(always=True)
    given = WRITTEN[what](q)
    roll(q)
    with lowered(TRIM_BYTES=1 << 30):
        for _ in range(5):
            q.store.tick()
    assert given() == [b"precious"]
    q.restart(clean=False)
    if what == "delayed":
        assert len(q.group.held) == 1
        q.clock.forward(3_600)
        q.tree.run_timers()
        assert b"precious" in b"".join(q.shows(".kept/s"))
    else:
        assert given() == [b"precious"]


@pytest.mark.parametrize("what", ["stream", "delayed"])
def test_a_trim_that_is_repeated_keeps_what_was_written_since(what: str) -> None:
    disk = FullDisk()
    q = Lying(disk)
    q.ctl("replay all", "depth 1", "sync off")
    q.stream("s")
    fill(q)
    q.ctl("clear")
    disk.is_full = True
    q.group.retention.trim(always=True)  # a roll, for which there is no room
    given = WRITTEN[what](q)
    disk.is_full = False
    for _ in range(5):
        q.store.tick()
    assert given() == [b"precious"]
    again = Lying(disk.after_kill())
    assert len(again.group.held) == 1 if what == "delayed" else again.shows(".kept/new") == [b"precious"]
