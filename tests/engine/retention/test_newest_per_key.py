"""`replay key`: whoever comes later gets the newest message of each key, over restarts, kills and compaction too."""

from __future__ import annotations

import json
import os
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import DiskFailed, DiskFull, Exists, Interrupted, StreamFull, TooLong
from mqfs.model import Wait
from mqfs.store import compaction
from mqfs.store.segment.liveness import Liveness
from mqfs.store.store import DiskStore, folder_of
from tests.store.script import PATH
from tests.support.batches import frame
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk
from tests.support.queues import Queues, drain, read, say
from tests.support.temp_store import SMALL, lowered

BIG = 1 << 20


@pytest.fixture
def queues(tmp_path: Path) -> Queues:
    return Queues("replay key", path=tmp_path / "store")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queues:
    """One whose segments are small, and go or are rewritten as soon as they may."""
    monkeypatch.setattr(limits, "TRIM_BYTES", 0)
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 8_192)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 4_096)
    monkeypatch.setattr(compaction, "_LOOKS", 1_000)
    return Queues("replay key", path=tmp_path / "store")


def shown(queues: Queues, name: str = "s") -> list[bytes]:
    """What a reader gets that comes now."""
    handle, bodies, offset = queues.at(name), list[bytes](), 0
    while not isinstance(step := handle.read(BIG, offset), Wait):
        bodies.append(step)
        offset += len(step)
    step.cancel()
    handle.close()
    return bodies


def fill(queues: Queues, keys: int, rounds: int, size: int = 100) -> None:
    for number in range(keys * rounds):
        queues.put(f"{number:0{size}}".encode(), key=str(number % keys))


def row(queues: Queues) -> dict[str, Any]:
    return queues.row("s")


def test_the_newest_of_each_key_of_each_stream_oldest_first(queues: Queues) -> None:
    queues.stream("t")
    queues.put(b"s1", key="a")
    queues.put(b"t1", "t", key="a")
    queues.put(b"s2", key="b")
    queues.put(b"s3", key="a")
    assert shown(queues) == [b"s2", b"s3"]
    assert shown(queues, "t") == [b"t1"]
    assert shown(queues, "order") == [b"t\0", b"s\0", b"s\0"]
    assert drain(queues.cursor("format raw"), ack=False) == [b"t1", b"s2", b"s3"]
    assert drain(queues.cursor("format record"), ack=False) != []
    assert read(queues.at(".kept/s")) == b"s2s3"


def test_messages_without_a_key_are_one_key_and_an_end_mark_stays_while_it_is_the_last(queues: Queues) -> None:
    queues.write("s", b"1")
    queues.put(b"k", key="k")
    queues.write("s", b"2")
    queues.ctl("eof s")
    assert shown(queues)[:3] == [b"k", b"2", b""]
    queues.write("s", b"3")
    assert shown(queues) == [b"k", b"3"]


def test_an_empty_message_removes_its_key_and_is_had_by_those_who_are_there(queues: Queues) -> None:
    queues.put(b"1", key="k")
    queues.put(b"2", key="l")
    there = queues.at("s")
    assert [there.read(BIG, 0), there.read(BIG, 1)] == [b"1", b"2"]
    queues.put(b"", key="k")
    assert there.read(BIG, 2) == b""
    assert shown(queues) == [b"2"]
    queues.put(b"3", key="k")
    assert shown(queues) == [b"2", b"3"]


@pytest.mark.parametrize("name", ["s", "order", ".cursor", "v"])
def test_poll_knows_what_is_left_out(queues: Queues, name: str) -> None:
    queues.ctl("bind v #")
    queues.put(b"1", key="k")
    there = queues.at("s")
    queues.put(b"2", key="l")
    queues.put(b"", key="l")
    late = queues.at(name, os.O_RDWR if name == ".cursor" else os.O_RDONLY)
    assert late.readable
    first = read(late)
    assert not late.readable, f"{first!r} was all"
    queues.put(b"3", key="k")
    assert late.readable
    there.close()


def test_an_empty_message_with_a_ttl_is_kept_so_long(queues: Queues) -> None:
    """For a reader that comes back and continues where it was."""
    following = queues.put(b"1", key="k") + 1
    queues.put(b"", key="k", ttl="1h")
    assert shown(queues) == [b""]
    cursor = queues.cursor(f"seek {following}", "format json")
    assert json.loads(read(cursor))["headers"]["key"] == "k"
    queues.pass_time(1)
    queues.clock.forward(3_600)
    queues.tree.tick()
    assert shown(queues) == []
    queues.restart()
    assert shown(queues) == []


def test_an_empty_message_without_a_key_removes_nothing(queues: Queues) -> None:
    queues.put(b"1")
    queues.put(b"", priority=5)
    assert shown(queues) == [b""]


def test_a_reader_that_is_there_gets_all(queues: Queues) -> None:
    queues.put(b"old", key="k")
    there = queues.at("s")
    for number in range(3):
        queues.put(b"%d" % number, key="k")
    assert [there.read(BIG, place) for place in range(3)] == [b"0", b"1", b"2"], "the old one was replaced before"
    assert shown(queues) == [b"2"]
    assert row(queues)["messages"] == 1


def test_a_slow_reader_holds_back_what_it_has_not_had(queues: Queues) -> None:
    there = queues.at("s")
    for number in range(3):
        queues.put(b"%d" % number, key="k")
    assert row(queues)["messages"] == 3
    assert shown(queues) == [b"2"], "and those who come now do not get it"
    there.close()
    assert row(queues)["messages"] == 1


def test_a_consumer_gets_what_came_since_and_a_new_one_the_newest(queues: Queues) -> None:
    queues.put(b"0", key="k")
    queues.put(b"l", key="l")
    queues.consumer("w", "s")
    for number in range(1, 4):
        queues.put(b"%d" % number, key="k")
    queues.consumer("v", "s")
    queues.restart()
    assert drain(queues.worker("v")) == [b"l", b"3"]
    assert drain(queues.worker("w"))[-4:] == [b"l", b"1", b"2", b"3"], "0 may come before: it was there, too"
    assert row(queues)["messages"] == 2
    queues.put(b"4", key="k")
    assert (drain(queues.worker("v")), drain(queues.worker("w"))) == ([b"4"], [b"4"])


def test_a_claimed_message_stays_with_its_receiver(queues: Queues) -> None:
    queues.consumer("w", "s")
    queues.put(b"1", key="k")
    worker = queues.worker("w")
    assert read(worker) == b"1"
    queues.put(b"2", key="k")
    say(worker, "nack 0ms")
    assert drain(worker) == [b"1", b"2"]


def test_a_consumer_in_memory_begins_again_with_the_newest(queues: Queues) -> None:
    queues.consumer("w", "s", "memory")
    for number in range(3):
        queues.put(b"%d" % number, key="k")
    queues.restart()
    assert drain(queues.worker("w")) == [b"2"]


def test_a_body_in_parts_goes_whole(queues: Queues) -> None:
    def body(*parts: bytes) -> None:
        frames = b""
        for number, part in enumerate(parts, 1):
            place = f"{number}/{len(parts)}" if number in (1, len(parts)) else str(number)
            head = b"\x03key\x01\x00k" + b"\x04part" + len(place).to_bytes(2, "little") + place.encode()
            frames += (9 + len(head) + len(part)).to_bytes(4, "little") + b"\1\0" + len(head).to_bytes(2, "little")
            frames += b"s" + head + part
        handle = queues.at(".batch", os.O_WRONLY)
        handle.write(frames)
        handle.close()

    body(b"a", b"b", b"c")
    queues.put(b"-", key="other")
    assert shown(queues) == [b"a", b"b", b"c", b"-"]
    body(b"d", b"e")
    assert shown(queues) == [b"-", b"d", b"e"]
    queues.consumer("w", "s")
    assert drain(queues.worker("w")) == [b"-", b"de"]
    queues.put(b"", key="k")
    assert shown(queues) == [b"-"]


def test_dead_letters_are_all_kept(queues: Queues) -> None:
    queues.ctl("retries 1")
    queues.consumer("w", "s")
    for number in range(3):
        queues.put(b"%d" % number, key="k")
        worker = queues.worker("w")
        assert read(worker) == b"%d" % number
        say(worker, "nack 0ms")
        worker.close()
    assert shown(queues, "dead") == [b"0", b"1", b"2"]
    queues.consumer("d", "dead")
    assert drain(queues.worker("d")) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart(queues: Queues, clean: bool) -> None:
    fill(queues, keys=5, rounds=3)
    queues.put(b"", key="2")
    queues.ctl(f"drop s {queues.put(b'dropped', key='3')}")
    before = shown(queues), row(queues), json.loads(queues.text(".stats"))["keys"]
    assert len(before[0]) == before[2] == 3
    queues.restart(clean=clean)
    assert shown(queues) == before[0]
    after = row(queues)
    assert {key: after[key] for key in ("messages", "bytes", "first", "newest")} == {
        key: before[1][key] for key in ("messages", "bytes", "first", "newest")
    }
    assert json.loads(queues.text(".stats"))["keys"] == 3


def test_names_change_and_keys_stay(queues: Queues) -> None:
    fill(queues, keys=2, rounds=2, size=1)
    queues.tree.rename(ROOT, queues.group, "s", queues.group, "t")
    queues.put(b"new", "t", key="0")
    queues.restart()
    assert shown(queues, "t") == [b"3", b"new"]
    queues.stream("s")
    queues.put(b"other", key="1")
    queues.tree.unlink(ROOT, queues.group, "t")
    assert (shown(queues), json.loads(queues.text(".stats"))["keys"]) == ([b"other"], 1)


def test_a_dropped_or_outlived_message_takes_its_key_with_it(queues: Queues) -> None:
    queues.put(b"1", key="k")
    queues.ctl(f"drop s {queues.put(b'2', key='k')}")
    assert shown(queues) == []
    queues.put(b"3", key="k")
    queues.put(b"4", key="k", ttl="5s")
    assert shown(queues) == [b"4"]
    queues.pass_time(6)
    assert shown(queues) == []
    assert json.loads(queues.text(".stats"))["keys"] == 0


@pytest.mark.parametrize("clean", [True, False])
def test_the_log_gives_back_what_was_replaced_and_nothing_comes_back(small: Queues, clean: bool) -> None:
    """`old` holds the first segment; messages that removed a key go when those that they removed cannot come back."""
    small.put(b"old", key="old")
    for round_ in range(20):
        fill(small, keys=20, rounds=1)
        for number in range(15):
            small.put(b"", key=str(number))
        small.ctl(f"drop s {small.put(b'x', key='15')}")
        small.put(b"x", key="16", ttl="1s")
        small.pass_time(2)
        if round_ % 5 == 4:
            before = shown(small)
            small.restart(clean=clean)
            assert shown(small) == before
    left = [b"old", *(f"{number:0100}".encode() for number in range(17, 20))]
    assert shown(small) == left
    small.pass_time(20)
    assert small.group.log.upkeep.size < 40_000, "of some 100,000 bytes that were written"
    small.restart(clean=clean)
    assert shown(small) == left


def test_with_a_depth_a_message_takes_the_place_of_its_key(queues: Queues) -> None:
    queues.ctl("depth 3", "full reject")
    for key in "abc":
        queues.put(b"1", key=key)
    queues.put(b"2", key="b")
    with pytest.raises(StreamFull):
        queues.put(b"1", key="d")
    queues.put(b"", key="a")
    queues.put(b"1", key="d")
    assert shown(queues) == [b"1", b"2", b"1"]
    queues.ctl("full drop-old")
    queues.put(b"2", key="d")
    queues.put(b"1", key="e")
    assert shown(queues) == [b"2", b"2", b"1"], "the oldest key went: c"


@pytest.mark.parametrize("looked", [True, False])
def test_the_last_message_may_be_one_that_removed_a_key(queues: Queues, looked: bool) -> None:
    """Whoever had looked at what is kept: the message before it, too, was seen under `replay last` then."""
    queues.put(b"1")
    queues.put(b"", key="k")
    if looked:
        assert shown(queues) == [b"1"]
    queues.ctl("replay last")
    assert shown(queues) == [b""]


def test_a_batch_takes_the_places_of_its_keys(queues: Queues) -> None:
    queues.ctl("depth 3", "full reject")
    batch = queues.at(".batch", os.O_WRONLY)
    for key in "abc":
        queues.put(b"1", key=key)
    batch.write(frame("s", b"2", key="b") + frame("s", b"2", key="a"))
    with pytest.raises(StreamFull):
        batch.write(frame("s", b"3", key="b") + frame("s", b"1", key="d"))
    with pytest.raises(StreamFull):
        batch.write(frame("s", b"3", key="b") + frame("s", b"4", key="b"))
    assert shown(queues) == [b"1", b"2", b"2"]
    queues.ctl("full block")
    wait = batch.write(frame("s", b"1", key="d"))
    assert isinstance(wait, Wait)
    queues.ctl("clear s")
    assert wait.settled
    assert shown(queues) == [b"1"]


def test_a_message_in_the_place_of_another_counts_for_a_backlog(queues: Queues) -> None:
    queues.ctl("depth 3", "full reject")
    queues.put(b"1", key="a")
    queues.consumer("w", "backlog", "1")
    assert drain(queues.at(".consumers/w", os.O_RDWR)) == [b"1"]
    queues.put(b"1", key="b")
    with pytest.raises(StreamFull):
        queues.put(b"2", key="a")
    assert shown(queues) == [b"1", b"1"]


@pytest.mark.parametrize("full", ["drop-old", "reject"])
def test_a_message_above_the_depth_is_refused_whatever_it_replaces(queues: Queues, full: str) -> None:
    """It was accepted, and cut at once, where the bytes of the message before made up for what was too much."""
    queues.ctl("depth 10B", f"full {full}")
    queues.put(b"xx", key="k")
    with pytest.raises(TooLong):
        queues.put(b"eleven byte", key="k")
    assert shown(queues) == [b"xx"]


@pytest.mark.parametrize("clean", [True, False])
def test_a_depth_cuts_no_key_for_messages_that_were_replaced(queues: Queues, clean: bool) -> None:
    queues.ctl("depth 5")
    fill(queues, keys=6, rounds=100, size=3)
    left = [b"595", b"596", b"597", b"598", b"599"]
    assert shown(queues) == left
    queues.restart(clean=clean)
    assert (shown(queues), row(queues)["messages"]) == (left, 5)


def test_of_more_keys_than_a_group_has_the_oldest_goes(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEYS", 3)
    queues.stream("t")
    queues.put(b"t", "t", key="t")
    for number in range(5):
        queues.put(b"%d" % number, key=str(number))
    assert (shown(queues), shown(queues, "t")) == ([b"3", b"4"], [b"t"])
    stats = json.loads(queues.text(".stats"))
    assert (stats["keys"], stats["cut"]) == (3, 3)


def test_a_group_that_is_changed_to_it(queues: Queues) -> None:
    queues.ctl("replay all")
    fill(queues, keys=2, rounds=3, size=1)
    assert len(shown(queues)) == 6
    queues.ctl("replay key")
    assert shown(queues) == [b"4", b"5"]
    assert row(queues)["messages"] == 2
    queues.ctl("replay last")
    assert shown(queues) == [b"5"]
    queues.ctl("replay off")
    assert shown(queues) == []


@pytest.fixture
def started(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> Queues:
    """Just after a start, which looked a portion of the keys up."""
    fill(queues, keys=1_000, rounds=2, size=4)
    monkeypatch.setattr(limits, "LOOKING_S", 0)
    monkeypatch.setattr(limits, "PIECE_S", 0)
    queues.restart()
    newest = queues.group.retention.newest
    assert newest is not None
    assert not newest.is_complete
    return queues


def portion(queues: Queues) -> None:
    queues.clock.forward(0.001)
    queues.tree.run_timers()


def after_portions(queues: Queues, step: Any) -> Any:
    """What a step gives, in whose midst others are served."""
    assert isinstance(step, Wait)
    assert not step.settled
    before = queues.group.portions.count
    while not step.settled:
        portion(queues)
    assert queues.group.portions.count > before + 1
    return step.result()


NEWEST = [b"%d" % number for number in range(1_000, 2_000)]


def test_it_is_looked_up_in_portions_after_a_start(started: Queues) -> None:
    assert after_portions(started, started.at("s").read(BIG, 0)) == NEWEST[0]
    assert shown(started) == NEWEST


def test_the_retained_file_is_made_in_portions_after_a_start(started: Queues) -> None:
    handle, closed = started.at(".kept/s"), started.at(".kept/s")
    assert handle.size is None
    unanswered = closed.read(BIG, 0)
    closed.close()
    with pytest.raises(Interrupted):
        unanswered.result()
    first, second = handle.read(8, 0), handle.read(BIG, 8)
    after_portions(started, handle.opening)
    assert (first.result(), second.result()) == (b"10001001", b"".join(NEWEST[2:]))
    assert handle.size == 4_000
    assert started.at(".kept/s").size == 4_000, "known by now: at once"


def test_a_retained_file_that_the_disk_refuses(started: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = started.at(".kept/s")
    step = handle.read(BIG, 0)
    with monkeypatch.context() as patch:
        patch.setattr(started.group.log.reader.__class__, "heads", failing)
        while not step.settled:
            portion(started)
    with pytest.raises(DiskFailed):
        step.result()
    with pytest.raises(DiskFailed):
        handle.read(BIG, 0)
    handle.close()
    assert after_portions(started, started.at(".kept/s").read(BIG, 0)) == b"".join(NEWEST)


def failing(*_: object) -> Any:
    raise DiskFailed("the test")


def test_a_consumer_is_made_in_portions_after_a_start(started: Queues) -> None:
    folder: Any = started.tree.find(ROOT, "g/.consumers")
    one, again = (started.tree.create(ROOT, folder, "w", 0o600) for _ in range(2))
    assert after_portions(started, one).name == "w"
    while not again.settled:
        portion(started)
    with pytest.raises(Exists):
        again.result()
    assert after_portions(started, started.worker("w").read(BIG, 0)) == NEWEST[0]


@pytest.mark.parametrize(("command", "left"), [("seek last", NEWEST[-1:]), ("seek -3", NEWEST[-3:])])
def test_a_cursor_seeks_in_portions_after_a_start(started: Queues, command: str, left: list[bytes]) -> None:
    cursor = started.cursor("format raw", command)
    assert after_portions(started, cursor.read(BIG, 0)) == left[0]
    assert drain(cursor, ack=False) == left[1:]


def test_a_look_up_ends_with_its_setting(queues: Queues) -> None:
    """One that is under way adds nothing to the keys of the next one."""
    before = queues.group.retention.newest
    assert before is not None
    queues.ctl("replay all")
    queues.ctl("replay key")
    queues.put(b"1", key="k")
    assert before.follow()
    assert queues.group.streams["s"].kept.rows.count == 0


def test_writes_meanwhile_are_in_it(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queues, keys=1_000, rounds=1, size=4)
    monkeypatch.setattr(limits, "LOOKING_S", 0)
    monkeypatch.setattr(limits, "PIECE_S", 0)
    queues.ctl("depth 1001")
    queues.restart()
    queues.put(b"new", key="0")
    queues.put(b"more", key="more")
    while (step := queues.tree.timers.next_due_ns) is not None and step <= queues.clock.engine_ns() + 1_000:
        queues.clock.forward(0.001)
        queues.tree.run_timers()
    assert shown(queues) == [*(f"{number:04}".encode() for number in range(1, 1_000)), b"new", b"more"]


def test_a_cursor_that_seeks_comes_anew(queues: Queues) -> None:
    cursor = queues.cursor("seek end", "format raw")
    for number in range(4):
        queues.put(b"%d" % number, key="k")
    queues.put(b"l", key="l")
    assert drain(cursor, ack=False) == [b"0", b"1", b"2", b"3", b"l"]
    say(cursor, "seek first")
    assert drain(cursor, ack=False) == [b"3", b"l"]
    say(cursor, "seek -5")
    assert drain(cursor, ack=False) == [b"3", b"l"]
    say(cursor, "seek last")
    assert drain(cursor, ack=False) == [b"l"]


def test_what_removed_a_key_stays_while_the_disk_has_no_room_for_a_state_that_says_so() -> None:
    """A kill just then must not bring back what the segment before it still holds."""
    disk = FullDisk()
    with lowered(**SMALL, TRIM_BYTES=0):
        lying = Lying(disk)
        lying.ctl("replay key", "sync off")
        lying.stream("s")
        lying.put(b"live" * 200, key="live")
        lying.put(b"removed", key="removed")
        lying.roll()
        lying.put(b"", key="removed")
        lying.roll()
        assert len(shown(lying)) == 2
        disk.is_full = True
        with pytest.raises(DiskFull):
            lying.roll()
        lying.group.retention.trim(always=True)
        lying.pass_time(5)
        left = shown(Lying(disk.after_kill()))
    assert b"removed" not in left
    assert left[0] == b"live" * 200


class FullDisk(LyingDisk):
    """One that has no room for more files, at times."""

    is_full = False

    def open(self, path: str, flags: int) -> int:
        if self.is_full and flags & os.O_CREAT and not self.exists(path):
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return super().open(path, flags)


class Lying(Queues):
    """A tree on a disk that lies."""

    def __init__(self, disk: LyingDisk) -> None:
        self.clock, self.path, self.disk = ManualClock(), None, disk
        self.store = DiskStore(PATH, disk=disk)
        self.tree = Tree(self.store, self.clock, owner=ROOT)
        self.group = self.tree.root.groups.get("g") or self.mkdir("g")

    def segments(self) -> int:
        """How many of its group there are."""
        folder = folder_of(PATH, self.group.number)
        return sum(name.endswith(".log") for name in self.disk.listdir(folder))

    def roll(self) -> None:
        before = self.segments()
        while self.segments() == before:
            self.put(b"filler" * 20, key="filler")


def test_without_it_nothing_is_kept_in_memory() -> None:
    queues = Queues("replay all")
    queues.put(b"1", key="k")
    assert queues.group.retention.newest is None
    assert "keys" not in json.loads(queues.text(".stats"))


def test_the_search_for_live_messages_does_not_look_at_each() -> None:
    """The live one of a million messages with one key is found by a search."""

    class Index:
        sequences = range(1, 1_000_001)

        def posting(self, stream: int) -> range:
            return range(1_000_000)

    asked: list[int] = []

    def wanted(stream: int, sequence: int) -> int:
        asked.append(sequence)
        return sequence if sequence == 77 or sequence > 1_000_000 else 77 if sequence > 77 else 0

    liveness = Liveness()
    liveness.update({16: 0}, frozenset(), wanted, 1_000_001)
    index: Any = Index()
    assert list(liveness.live(index, 16, index.posting(16))) == [76]
    assert len(asked) == 3
