"""Bodies in parts: what consumers and workers have of them is one message, to be had whole by one of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.model import Wait
from tests.support.batches import Units, frame
from tests.support.queues import drain, read, say

PIECES = [b"one ", b"two two ", b"three"]
WHOLE = b"".join(PIECES)


def body(stream: str = "s", pieces: list[bytes] | None = None, **more: str) -> list[bytes]:
    """The frames of a body in parts."""
    some = PIECES if pieces is None else pieces
    total = len(some)
    places = [f"1/{total}", *map(str, range(2, total)), f"{total}/{total}"]
    return [frame(stream, piece, **more, part=place) for piece, place in zip(some, places, strict=True)]


def whole(handle: Any, count: int = 5) -> bytes:
    """All of one message, in small reads; what follows is still there."""
    data = b""
    while len(data) < len(WHOLE):
        data += handle.read(min(count, len(WHOLE) - len(data)))
    return data


def test_plain_readers_see_parts_in_order(made: Any) -> None:
    u = made()
    u.batch(*body())
    assert [row["body"] for row in u.kept()] == [piece.decode() for piece in PIECES]
    assert [row["headers"]["part"] for row in u.kept()] == ["1/3", "2", "3/3"]


@pytest.mark.parametrize("count", [1, 4, 7, 17, 1_000])
def test_a_consumer_has_it_as_one_message(made: Any, count: int) -> None:
    u = made()
    u.consumer("w")
    u.write("s", b"before")
    u.batch(*body())
    u.write("s", b"after")
    one, two = u.worker(), u.worker()
    assert read(one) == b"before"
    assert whole(one, count) == WHOLE
    assert read(two) == b"after", "no other has a part of it"
    assert len(u.group.consumers["w"].claims) == 3
    say(one, "ack")
    say(one, "ack 1")
    say(two, "ack")
    assert isinstance(one.read(100), Wait)
    assert u.stats()["low"] == 6
    assert u.stats()["waiting"] == 0


def test_what_stands_before_a_last_part_without_a_first_is_not_its_body(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.write("s", b"one", b"two")
    u.put(b"three", priority=9, headers={"part": "3/3"})
    worker = u.worker()
    assert read(worker) == b"three"
    say(worker, "ack")
    assert drain(worker) == [b"one", b"two"]


def test_one_read_that_is_large_enough(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    assert read(u.worker()) == WHOLE


@pytest.mark.parametrize(("form", "end"), [("raw", b""), ("line", b"\n"), ("nul", b"\0"), ("each", b"")])
def test_formats(made: Any, form: str, end: bytes) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    u.batch(*body(pieces=[b"x", b"y\n"]))
    worker = u.worker("w", f"format {form}")
    assert read(worker) == WHOLE + end
    if form == "each":
        assert worker.read(100) == b""
    assert read(worker) == (b"xy\n" if form in ("line", "raw", "each") else b"xy\n\0")


def test_json_has_the_last_part(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    row = json.loads(read(u.worker("w", "format json")))
    assert (row["sequence"], row["body"], row["headers"]["part"]) == (3, "three", "3/3")


def test_a_worker_that_waits(made: Any) -> None:
    u = made()
    u.consumer("w")
    one, two = u.worker(), u.worker()
    waits = [one.read(6), two.read(100)]
    u.batch(*body())
    assert waits[0].result() == b"one tw"
    assert not waits[1].settled
    assert one.read(100) == b"o two three"
    u.write("s", b"next")
    assert waits[1].result() == b"next"


def test_given_back_and_had_again(made: Any) -> None:
    u = made("retries 0", "backoff 0 0")
    u.consumer("w")
    u.batch(*body())
    u.write("s", b"next")
    one, two = u.worker(), u.worker("w")
    assert one.read(5) == b"one t"
    say(one, "release")
    assert read(two) == WHOLE
    say(two, "nack 0s")
    assert read(one) == WHOLE
    one.close()
    assert read(two) == WHOLE
    say(two, "ack")
    assert read(two) == b"next"


def test_the_rest_is_passed_over_when_it_is_spoken_of(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    u.write("s", b"next")
    worker = u.worker()
    assert worker.read(2) == b"on"
    say(worker, "ack")
    assert read(worker) == b"next"


def test_who_only_looks_sees_the_parts_until_they_are_claimed(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    assert u.shows(".consumers/w") == PIECES
    worker = u.worker()
    read(worker)
    assert u.shows(".consumers/w") == []
    say(worker, "release")
    assert u.shows(".consumers/w") == PIECES


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_restart(tmp_path: Path, clean: bool) -> None:
    u = Units("retries 0", path=tmp_path / "store")
    u.consumer("w")
    u.batch(*body())
    u.batch(*body("t"))
    worker = u.worker()
    assert worker.read(3) == b"one"
    u.restart(clean=clean)
    worker = u.worker()
    assert sorted([read(worker), read(worker)]) == [WHOLE, WHOLE]
    say(worker, "ack 3")
    u.restart(clean=clean)
    worker = u.worker()
    assert read(worker) == WHOLE
    say(worker, "ack")
    u.restart(clean=clean)
    assert isinstance(u.worker().read(100), Wait)


@pytest.mark.parametrize("ack", ["read", "next"])
def test_streams_that_are_taken_from(made: Any, ack: str) -> None:
    u = made("deliver one", f"ack {ack}")
    u.batch(*body(), frame("s", b"next"))
    one, two = u.taker(), u.taker()
    assert one.read(6) == b"one tw"
    assert two.read(100) == b"next"
    u.group.retention.trim(always=True)
    assert one.read(100) == b"o two three"
    assert isinstance(one.read(100), Wait)
    assert isinstance(two.read(100), Wait)
    u.group.streams["s"].kept.update_low_watermark()
    assert u.group.streams["s"].kept.count == 0


def test_what_is_kept_is_counted(made: Any) -> None:
    u = made("deliver one", "ack next")
    u.batch(*body(), frame("s", b"next"))
    taker = u.taker()
    assert taker.read(100) == WHOLE
    stream = u.group.streams["s"]
    assert stream.kept.count == 4
    assert taker.read(100) == b"next"
    stream.kept.update_low_watermark()
    assert (stream.kept.count, stream.kept.size) == (1, 4)


def test_dead_letters_go_and_come_back_whole(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body(colour="blue"))
    u.write("t", b"next")
    worker = u.worker()
    assert read(worker) == WHOLE
    say(worker, "dead not now")
    rows = u.kept("dead")
    assert [row["body"] for row in rows] == [piece.decode() for piece in PIECES]
    assert [row["headers"]["part"] for row in rows] == ["1/3", "2", "3/3"]
    assert rows[2]["headers"].items() >= {"reason": "not now", "sequence": "3", "colour": "blue"}.items()
    assert read(worker) == b"next"
    u.ctl("redrive")
    assert u.kept("dead") == []
    assert json.loads(u.text(".stats"))["streams"]["dead"]["messages"] == 0
    assert read(worker) == WHOLE
    assert [row["headers"] for row in u.kept("s")[-3:]] == [
        {"sender": "0", "colour": "blue", "part": place} for place in ("1/3", "2", "3/3")
    ]


def test_retries_run_out(made: Any) -> None:
    u = made("retries 2", "backoff 0 0", "deliver one", "ack next")
    u.batch(*body())
    for _ in range(2):
        taker = u.taker()
        assert taker.read(100) == WHOLE
        taker.close()
    assert u.shows("s") == []
    assert u.shows("dead") == PIECES
    assert u.taker("dead").read(100) == WHOLE


def test_redrive_so_many(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body(), *body(), frame("s", b"x"))
    worker = u.worker()
    for _ in range(3):
        read(worker)
        say(worker, "dead")
    u.ctl("redrive s 2")
    assert [row["body"] for row in u.kept("dead")] == ["x"]
    assert [read(worker), read(worker)] == [WHOLE, WHOLE]


BROKEN = {
    "the last is missing": lambda: body()[:2] + [frame("s", b"x")],
    "the first is missing": lambda: body()[1:] + [frame("s", b"x")],
    "another in the place of the first": lambda: [frame("s", b"x"), *body()[1:]],
    "another message in between": lambda: [body()[0], frame("t", b"x"), *body()[1:]],
    "other numbers": lambda: [body()[0], frame("s", b"x"), frame("s", b"y")],
    "places of no body": lambda: [frame("s", b"x", part=p) for p in ("1/1", "7", "01/01", "1/999999999")],
    "more than there is": lambda: [frame("s", b"x", part="9/9"), frame("s", b"y", part="1/9")],
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_body_in_parts_is_messages(made: Any, what: str) -> None:
    u = made()
    u.consumer("w")
    frames = BROKEN[what]()
    u.batch(*frames)
    worker = u.worker()
    got = []
    while not isinstance(data := worker.read(1_000), Wait):
        got.append(data)
    assert len(got) == len(frames), "nothing is passed over"
    data.cancel()
    say(worker, f"ack {' '.join(map(str, range(1, len(frames) + 1)))}")
    assert u.stats()["waiting"] == 0


def test_a_part_that_was_dropped(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    u.ctl("drop s 2")
    worker = u.worker()
    assert [read(worker), read(worker)] == [b"one ", b"three"]


@pytest.mark.parametrize("cut", ["drop s 1", "depth 2"])
def test_a_beginning_that_was_cut(made: Any, cut: str) -> None:
    """It lies in the log still, below what the stream keeps."""
    u = made()
    u.consumer("w")
    u.batch(*body())
    u.ctl(cut)
    u.group.retention.trim(always=True)  # in time it comes by itself
    assert u.row()["floor"] == 2
    worker = u.worker()
    assert [read(worker), read(worker)] == [b"two two ", b"three"]


def test_seek_into_the_middle(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body())
    worker = u.worker("w", "seek 2")
    assert [read(worker), read(worker)] == [b"two two ", b"three"]


@pytest.mark.parametrize("full", ["drop-old", "drop-new"])
def test_a_backlog_skips_it_whole(made: Any, full: str) -> None:
    u = made(f"full {full}")
    u.ctl("consumer w backlog 4")
    u.batch(*body())
    u.batch(*body(pieces=[b"n", b"e", b"w"]))
    worker = u.worker()
    assert read(worker) == (b"new" if full == "drop-old" else WHOLE)
    assert isinstance(worker.read(100), Wait)


def test_for_whom_only_some_streams_are(made: Any) -> None:
    u = made()
    u.consumer("w")
    u.batch(*body("t"), *body("s"), frame("t", b"x"))
    picky, other = u.worker("w", "select s"), u.worker("w")
    assert read(picky) == WHOLE
    assert isinstance(picky.read(100), Wait)
    say(picky, "ack")
    assert [read(other), read(other)] == [WHOLE, b"x"]
    say(other, "ack 3 7")
    assert u.stats()["low"] == 8


def test_a_part_that_cannot_be_read(tmp_path: Path) -> None:
    u = Units(path=tmp_path / "store")
    u.consumer("w")
    u.batch(*body(pieces=[b"a" * 1_000, b"b" * 1_000, b"c" * 1_000]))
    u.restart()
    (log,) = (tmp_path / "store" / "buckets").glob(f"*/{u.group.number}/*.log")
    data = log.read_bytes()
    fd = os.open(log, os.O_WRONLY)
    os.pwrite(fd, b"X", data.index(b"b" * 1_000) + 10)
    os.close(fd)
    worker = u.worker()
    assert worker.read(1_000) == b"a" * 1_000
    with pytest.raises(errors.DiskFailed):
        worker.read(1_000)
    say(worker, "ack")


def test_what_is_claimed_stays_kept_after_a_restart(tmp_path: Path) -> None:
    u = Units("retries 0", path=tmp_path / "store")
    u.consumer("w")
    u.batch(*body(), frame("s", b"next"))
    read(u.worker())
    u.restart(clean=False)
    worker = u.worker()
    assert [read(worker), read(worker)] == [WHOLE, b"next"]
    say(worker, "ack")
    assert u.stats()["low"] == 1
    assert u.group.state.consumers[u.group.consumers["w"].number].progress.is_acked(2) is False


# ---------------------------------------------------------------- with options


def put(u: Any, pieces: list[bytes] | None = None, stream: str = "s", **fields: Any) -> None:
    """A body in parts, each with the same options, as the library stages it."""
    some = PIECES if pieces is None else pieces
    u.part("p")
    file = u.at(".txn/p/.put", os.O_WRONLY)
    for number, piece in enumerate(some, 1):
        place = f"{number}/{len(some)}" if number in (1, len(some)) else str(number)
        file.write(json.dumps({"stream": stream, "headers": {"part": place}, **fields}).encode() + b" " + piece)
    file.close()
    u.say(f"commit job.{u.group.log.end.next} p")


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("fields", [{"ttl": "1h"}, {"priority": 2}, {"ttl": "1h", "priority": 9}], ids=str)
@pytest.mark.parametrize("by", ["consumer", "deliver one"])
def test_a_body_with_options_is_one_message(made: Any, by: str, fields: dict[str, Any], opened: str) -> None:
    u = made("deliver one", "ack next") if by == "deliver one" else made()
    u.consumer("w")
    reader = (u.taker("s") if by == "deliver one" else u.worker()) if opened == "before" else None
    u.write("s", b"before")
    put(u, **fields)
    u.write("s", b"after")
    reader = reader or (u.taker("s") if by == "deliver one" else u.worker())
    order = sorted([(-5, b"before"), (-fields.get("priority", 5), WHOLE), (-5, b"after")], key=lambda pair: pair[0])
    for _, body in order:
        assert (whole(reader) if body == WHOLE else reader.read(100)) == body
        if by == "consumer":
            say(reader, "ack")
    assert isinstance(reader.read(100), Wait)


@pytest.mark.parametrize("file", [".put", ".txn/p/.put"])
@pytest.mark.parametrize("place", ["1/3", "2", "3/3"])
def test_a_part_is_no_single(made: Any, file: str, place: str) -> None:
    """A claim would take the last part alone, and leave the others to later consumers, each as a message."""
    u = made()
    u.part("p")
    handle = u.at(file, os.O_RDWR)
    keys = {"stream": "s", "headers": {"part": place}}
    with pytest.raises(errors.BadCommand, match="single"):
        handle.write(json.dumps({**keys, "single": True}).encode() + b" x")
    assert b"part" in read(handle)
    assert handle.write(json.dumps({**keys, "single": False}).encode() + b" x")
    handle.close()
    u.say("commit job.1 p")
    assert len(u.kept()) == 1


@pytest.mark.parametrize("taken", [False, True])
def test_a_body_expires_whole(made: Any, taken: bool) -> None:
    u = made()
    u.consumer("w")
    put(u, ttl="10s", priority=7)
    worker = u.worker()
    if taken:
        assert whole(worker) == WHOLE
        say(worker, "nack 1m")
    u.clock.forward(11)
    u.tree.tick()
    assert u.kept() == []
    u.write("s", b"after")
    assert worker.read(100) == b"after"
    u.clock.forward(100)
    u.tree.tick()
    assert isinstance(worker.read(100), Wait)


def test_a_body_with_options_that_failed_comes_again_whole(made: Any) -> None:
    u = made("backoff 1s 1s")
    u.consumer("w")
    put(u, priority=8)
    u.write("s", b"after")
    worker = u.worker()
    assert whole(worker) == WHOLE
    say(worker, "nack")
    assert read(worker) == b"after"
    u.clock.forward(2)
    u.tree.tick()
    assert whole(worker) == WHOLE
    say(worker, "ack")
    assert isinstance(worker.read(100), Wait)


def test_what_is_left_of_a_body_with_options_is_messages(made: Any) -> None:
    u = made()
    u.consumer("w")
    put(u, priority=8)
    u.ctl("drop s 2")
    worker = u.worker()
    assert [read(worker) for _ in range(2)] == [PIECES[2], PIECES[0]]
    assert isinstance(worker.read(100), Wait)


def test_a_body_with_options_after_a_restart(tmp_path: Path) -> None:
    u = Units(path=tmp_path / "store")
    u.consumer("w")
    u.write("s", b"before")
    put(u, priority=8, ttl="1h")
    u.restart(clean=False)
    worker = u.worker()
    assert whole(worker) == WHOLE
    say(worker, "ack")
    assert read(worker) == b"before"
