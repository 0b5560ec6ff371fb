"""`.txn`: parts no one reads, and commits that append them once, as one unit, or change nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.engine.core.portions import exhaust
from mqfs.engine.nodes import TxnFolder
from mqfs.model import Wait
from mqfs.store.disk import Disk, DiskStaged
from mqfs.store.memory import MemoryStaged
from tests.support.batches import Units, frame
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import read, say

MORE, INNER = 1, 2


def refused(kind: type[errors.MqfsError], text: str, u: Units, command: str, user: Any = ROOT) -> None:
    with pytest.raises(kind, match=text):
        u.say(command, user)


def test_parts_are_appended_in_the_order_of_the_commit(made: Any) -> None:
    u = made()
    u.stage("one", "s", b"1", b"2")
    u.stage("two", "t", b"3")
    u.stage("one", "t", b"4")
    u.stage("left", "s", b"5")
    u.write("s", b"before")
    assert u.log() == [("s", "before")], "no one reads a part"
    u.say("commit job.1 two one\n")
    assert u.log() == [("s", "before"), ("t", "3"), ("s", "1"), ("s", "2"), ("t", "4")]
    assert u.parts() == ["left"]
    flags = [u.group.log.reader.scan(sequence).flags & (MORE | INNER) for sequence in (2, 3, 4, 5)]
    assert flags == [MORE, MORE | INNER, MORE | INNER, MORE | INNER], "the commit is the end of the unit"


def test_a_repeat_succeeds_and_appends_nothing(made: Any) -> None:
    u = made()
    for _ in range(3):
        u.stage("p", "s", b"once")
        u.say("commit job.7 p\n")
    u.stage("p", "s", b"older")
    u.say("commit job.3 p\n")
    u.say("commit job.7 gone")
    assert u.log() == [("s", "once")]
    assert u.parts() == []
    u.stage("p", "s", b"next")
    u.say("commit job.8 p\n")
    assert u.log() == [("s", "once"), ("s", "next")]


def test_the_list_of_commits_and_parts(made: Any) -> None:
    u = made()
    u.stage("p", "s", b"x")
    u.say("commit a.b.12 p")
    u.stage("q", "s", b"123")
    handle = u.at(".txn/ctl")
    assert handle.read(4096) == b"committed a.b.12\npart q 0 1 40\n"
    assert handle.read(4096, 31) == b""


def test_what_is_written_in_a_part_in_other_ways(made: Any) -> None:
    u = made()
    u.part("p")
    batch = u.at(".txn/p/.batch", os.O_RDWR)
    batch.write(frame("s", b"1") + frame("t", b"2", colour="red"))
    with pytest.raises(errors.NotFound):
        batch.write(frame("s", b"x") + frame("nowhere", b"y"))
    assert b"nowhere" in batch.read(4096)
    put = u.at(".txn/p/.put", os.O_RDWR)
    put.write(b'{"stream":"s","priority":7,"headers":{"a":"b"}} 3')
    for key in ('"delay":"1s"', '"at":1'):
        with pytest.raises(errors.BadCommand, match="not in a part"):
            put.write(f'{{"stream":"s",{key}}} no'.encode())
    u.say("commit job.1 p")
    assert u.log() == [("s", "1"), ("t", "2"), ("s", "3")]
    assert [row.get("headers") for row in u.kept("t") + u.kept("s")] == [
        {"sender": "0", "colour": "red"}, None, {"sender": "0", "priority": "7", "a": "b"},
    ]  # fmt: skip


def put_in_part(u: Any, part: str, *bodies: str, id: str) -> None:
    """The first of them with an id."""
    u.part(part)
    put = u.at(f".txn/{part}/.put", os.O_WRONLY)
    for number, body in enumerate(bodies):
        put.write(json.dumps({"stream": "s", **({} if number else {"id": id})}).encode() + b" " + body.encode())
    put.close()


@pytest.mark.parametrize("line", ["dedup 1h", "dedup 0"])
def test_an_id_makes_a_commit_a_repeat(made: Any, line: str) -> None:
    u = made(line)
    for number, (part, id) in enumerate([("p", "x"), ("q", "x"), ("r", "y")], 1):
        put_in_part(u, part, f"{part}1", f"{part}2", id=id)
        u.say(f"commit job.{number} {part}")
        assert u.parts() == []
        assert u.committed() == {"job": number}
    wanted = ["p1", "p2", "r1", "r2"] if line == "dedup 1h" else ["p1", "p2", "q1", "q2", "r1", "r2"]
    assert [body for _, body in u.log()] == wanted
    put = u.at(".put", os.O_RDWR)
    put.write(b'{"stream":"s","id":"y"} again')
    if line == "dedup 1h":
        assert put.read(100) == b"3\n", "the message of that id"


@pytest.mark.parametrize("line", ["dedup 1h", "dedup 0"])
def test_an_id_comes_once_in_a_part(made: Any, line: str) -> None:
    u = made(line)
    u.part("p", mode=0o777)
    for user, body in ((ROOT, b"1"), (ROOT, b"2"), (ANNA, b"3"), (ROOT, b"4")):
        put = u.at(".txn/p/.put", os.O_WRONLY, user)
        data = b'{"stream":"s","id":"x"} ' + body
        assert put.write(data) == len(data)
        put.close()
    u.stage("p", "s", b"end")
    u.say("commit job.1 p")
    wanted = ["1", "3", "end"] if line == "dedup 1h" else ["1", "2", "3", "4", "end"]
    assert [body for _, body in u.log()] == wanted
    assert u.tree.memory.of(ROOT.uid) == 0
    put = u.at(".put", os.O_RDWR)
    put.write(b'{"stream":"s","id":"x"} again')
    assert put.read(100) == (b"1\n" if line == "dedup 1h" else b"6\n")


def test_an_id_in_two_parts_of_a_commit_is_refused(made: Any) -> None:
    u = made("dedup 1h")
    put_in_part(u, "p", "1", id="x")
    put_in_part(u, "q", "2", id="x")
    put_in_part(u, "r", "3", id="y")
    refused(errors.BadCommand, "id 'x' is in two parts", u, "commit job.1 p r q")
    assert u.log() == []
    u.say("commit job.1 r q")
    assert [body for _, body in u.log()] == ["3", "2"]
    u.say("commit job.2 p")
    assert len(u.log()) == 2


def test_an_id_of_a_commit_is_known_after_a_kill(tmp_path: Path) -> None:
    u = Units("dedup 1h", path=tmp_path / "store")
    put_in_part(u, "p", "1", "2", id="x")
    u.say("commit job.1 p")
    u.restart(clean=False)
    put_in_part(u, "p", "1", "2", id="x")
    u.say("commit other.1 p")
    assert [body for _, body in u.log()] == ["1", "2"]


@pytest.mark.parametrize("full", ["block", "reject", "drop-old"])
def test_a_repeat_needs_no_room(made: Any, full: str) -> None:
    u = made("dedup 1h", "depth 2", f"full {full}")
    put_in_part(u, "p", "1", "2", id="x")
    u.say("commit job.1 p")
    put_in_part(u, "q", "1", "2", id="x")
    assert u.say("commit job.2 q") is None
    assert [body for _, body in u.log()] == ["1", "2"]


def test_of_two_that_wait_for_room_one_is_a_repeat(made: Any) -> None:
    u = made("dedup 1h", "depth 2", "full block", "replay off")
    u.consumer("w")
    u.write("s", b"a")
    u.write("s", b"b")
    waits = []
    for number, part in enumerate(["p", "q"], 1):
        put_in_part(u, part, "1", "2", id="x")
        waits.append(u.say(f"commit job.{number} {part}"))
    worker = u.worker("w")
    got = [read(worker) for _ in range(2)]
    say(worker, "ack 1 2")
    got += [read(worker) for _ in range(2)]
    say(worker, "ack 3 4")
    assert got == [b"a", b"b", b"1", b"2"]
    assert all(wait.settled for wait in waits if wait is not None)
    assert isinstance(worker.read(100), Wait)


def test_lines(made: Any) -> None:
    u = made("data line")
    u.stage("p", "s", b"one\ntw", b"o\nrest")
    u.say("commit job.1 p")
    assert u.log() == [("s", "one\n"), ("s", "two\n"), ("s", "rest")]


def test_readers_that_wait(made: Any) -> None:
    u = made("deliver one")
    waits = [u.taker("s").read(100) for _ in range(3)]
    u.stage("p", "s", b"1", b"2")
    u.say("commit job.1 p")
    assert [wait.result() for wait in waits[:2]] == [b"1", b"2"]
    assert not waits[2].settled


def test_what_put_says_in_a_part_holds_from_the_commit_on(made: Any) -> None:
    u = made("deliver one", "ack next")
    u.consumer("w")
    u.part("p")
    u.at(".txn/p/.batch", os.O_WRONLY).write(frame("s", b"first", a="b") + frame("t", b"second"))
    u.at(".txn/p/.put", os.O_WRONLY).write(b'{"stream":"s","priority":9} urgent')
    u.say("commit job.1 p")
    worker, taker = u.worker("w"), u.taker("s")
    assert [read(worker) for _ in range(3)] == [b"urgent", b"first", b"second"]
    assert [taker.read(100) for _ in range(2)] == [b"urgent", b"first"]


def test_where_messages_are_in_memory_only(made: Any) -> None:
    u = made("keep ring")
    u.batch(frame("t", b"1", a="b"), frame("s", b"2"))
    u.stage("p", "s", b"3", b"4")
    u.stage("p", "t", b"5")
    u.say("commit job.1 p")
    assert u.log() == [("t", "1"), ("s", "2"), ("s", "3"), ("s", "4"), ("t", "5")]


# ---------------------------------------------------------------- refusals change nothing


COMMANDS = {
    "commit: nothing named (expected commit PRODUCER.NUMBER PART...)": ["commit"],
    "abort: nothing named (expected abort PART...)": ["abort"],
    "forget: nothing named": ["forget"],
    "unknown command 'comit' (expected one of commit abort forget; did you mean 'commit'?)": ["comit x.1 p"],
    "unknown command 'p' (expected one of commit abort forget)": ["p"],
    "(expected PRODUCER.NUMBER": [
        "commit x p", "commit .1 p", "commit x. p", "commit x.-1 p", "commit x.1e3 p",
                                 "commit x.9223372036854775808 p", "commit x.\u0661 p"],
    "2 commands in one write (expected one)": ["commit x.1 p\nabort p\n"],
    "named twice": ["commit x.1 p p"],
    "no part 'q'": ["commit x.1 p q", "abort p q"],
    "quote not closed": ["commit x.1 'p"],
    "no producer 'y'": ["forget y"],
    "at most 255 bytes": [f"commit {'x' * 256}.1 p"],
}  # fmt: skip


@pytest.mark.parametrize(("text", "command"), [(text, c) for text, cs in COMMANDS.items() for c in cs])
def test_bad_commands(made: Any, text: str, command: str) -> None:
    u = made()
    u.stage("p", "s", b"kept")
    handle = u.at(".txn/ctl", os.O_RDWR)
    with pytest.raises(errors.MqfsError, match=re.escape(text)):
        handle.write(command.encode())
    assert text.encode() in handle.read(4096)
    assert u.parts() == ["p"]
    assert u.log() == []
    u.say("commit x.1 p")
    assert u.log() == [("s", "kept")]


def test_no_bytes_are_no_command(made: Any) -> None:
    u = made()
    assert u.say("  \n# nothing\n") is None
    with pytest.raises(errors.BadCommand, match="UTF-8"):
        u.at(".txn/ctl", os.O_WRONLY).write(b"abort \xff")


def test_a_stream_that_is_missing_at_the_commit(made: Any) -> None:
    u = made()
    u.stage("p", "s", b"1")
    u.stage("p", "t", b"2")
    u.tree.unlink(ROOT, u.group, "t")
    refused(errors.NotFound, "no stream 't'", u, "commit x.1 p")
    assert u.log() == []
    u.stream("t")
    u.say("commit x.1 p")
    assert u.log() == [("s", "1"), ("t", "2")]


def test_in_a_part_there_are_only_the_groups_streams(made: Any) -> None:
    u = made()
    part = u.part("p")
    with pytest.raises(errors.NotFound, match=r"no stream 'new' in group 'g' \(create it there"):
        u.tree.create(ROOT, part, "new", 0o644)
    with pytest.raises(errors.Exists):
        u.tree.create(ROOT, part, "s", 0o644)
    with pytest.raises(errors.NotFound):
        u.at(".txn/p/new", os.O_WRONLY)
    with pytest.raises(errors.NotPermitted):
        u.tree.mkdir(ROOT, part, "d", 0o755)
    with pytest.raises(errors.NotPermitted):
        u.tree.create(ROOT, u.tree.find(ROOT, "g/.txn"), "file", 0o644)
    with pytest.raises(errors.Denied, match="cannot be read"):
        u.at(".txn/p/s", os.O_RDWR)
    with pytest.raises(errors.Denied):
        u.at(".txn/p/s", os.O_RDONLY)
    handle = u.at(".txn/p/s", os.O_WRONLY)
    with pytest.raises(errors.BadRequest):
        handle.write(b"")
    with pytest.raises(errors.TooLong):
        handle.write(b"x" * (limits.MESSAGE_BYTES + 1))


@pytest.mark.parametrize("name", ["ctl", ".p", "order", "a\0b", "x" * 256])
def test_names_of_parts(made: Any, name: str) -> None:
    with pytest.raises((errors.BadName, errors.Exists)):
        made().part(name)


def test_a_part_is_there_once(made: Any) -> None:
    u = made()
    u.part("p")
    with pytest.raises(errors.Exists):
        u.part("p")


def test_after_the_end_of_a_part_its_handles_are_told(made: Any) -> None:
    u = made()
    u.stage("p", "s", b"1")
    handle = u.at(".txn/p/s", os.O_WRONLY)
    u.say("abort p")
    with pytest.raises(errors.NotFound, match="committed or dropped"):
        handle.write(b"2")
    u.stage("p", "s", b"new")
    with pytest.raises(errors.NotFound):
        handle.write(b"3")
    u.say("commit x.1 p")
    assert u.log() == [("s", "new")]


# ---------------------------------------------------------------- who may


def test_a_part_is_its_makers(made: Any) -> None:
    u = made()
    u.stream("open", mode=0o666)
    u.stage("p", "open", b"anna's", user=ANNA)
    refused(errors.NotPermitted, "part p: owned by uid", u, "commit bert.1 p", BERT)
    refused(errors.NotPermitted, "part p: owned by uid", u, "abort p", BERT)
    with pytest.raises(errors.Denied):
        u.at(".txn/p/open", os.O_WRONLY, BERT)
    with pytest.raises(errors.Denied):
        u.at(".txn/p/.batch", os.O_WRONLY, BERT)
    with pytest.raises(errors.NotPermitted):
        u.tree.rmdir(BERT, u.tree.find(BERT, "g/.txn"), "p")
    u.say("commit anna.1 p", ANNA)
    assert u.log() == [("open", "anna's")]


def test_a_commit_needs_permission_for_every_stream(made: Any) -> None:
    u = made()
    u.stream("a", mode=0o666)
    u.stream("b", mode=0o666)
    u.stage("p", "a", b"1", user=ANNA)
    u.stage("p", "b", b"2", user=ANNA)
    u.tree.setattr(ROOT, u.group.streams["b"], mode=0o644)
    refused(errors.Denied, "cannot write 'b': mode 644 of uid", u, "commit x.1 p", ANNA)
    assert u.log() == []
    with pytest.raises(errors.Denied):
        u.at(".txn/p/b", os.O_WRONLY, ANNA)


def test_each_user_has_producers_of_its_own(tmp_path: Path) -> None:
    u = Units(path=tmp_path / "store")
    u.stream("open", mode=0o666)
    for user, name, word in ((ANNA, "a", "x.9223372036854775807"), (BERT, "b", "x.1"), (ROOT, "r", "x.3")):
        u.stage(name, "open", name.encode(), user=user)
        u.say(f"commit {word} {name}", user)
    assert [body for _, body in u.log()] == ["a", "b", "r"], "no commit of another makes one's own done"
    for _ in range(2):
        assert [u.committed(user) for user in (ANNA, BERT, ROOT)] == [{"x": (1 << 63) - 1}, {"x": 1}, {"x": 3}]
        u.restart(clean=False)
    assert u.at(".txn/ctl", user=BERT).read(999) == b"committed x.1\n"
    assert u.at(".txn/ctl").read(999).count(b"committed x.") == 3
    u.say("forget x", BERT)
    assert [u.committed(user) for user in (ANNA, BERT)] == [{"x": (1 << 63) - 1}, {}]
    refused(errors.NotPermitted, "another user's", u, "forget x", BERT)
    u.say("forget x")
    u.say("forget x")
    u.restart(clean=False)
    assert u.group.state.producers == {}, "who owns the group forgets its own first, then anybody's"


def test_who_may_write_nothing_commits_nothing(made: Any) -> None:
    """A commit without parts takes a producer's name, too."""
    u = made()
    u.tree.setattr(ROOT, u.group.streams["s"], mode=0o644)
    u.tree.setattr(ROOT, u.group.streams["t"], mode=0o644)
    refused(errors.Denied, "no stream that the user may write to", u, "commit x.1", ANNA)
    u.part("p", ANNA)
    u.say("commit x.1 p", ANNA)
    u.tree.setattr(ROOT, u.group.streams["t"], mode=0o646)
    u.say("commit x.2", ANNA)
    assert u.committed(ANNA) == {"x": 2}


def test_no_user_takes_all_producers(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PRODUCERS", 4)
    u = made()
    for name in ("a", "b"):
        u.say(f"commit {name}.1", ANNA)
    refused(
        errors.OverLimit,
        "too many producers that are not forgotten",
        u,
        "commit c.1",
        ANNA,
    )
    u.say("commit c.1", BERT)
    u.say("commit a.2", ANNA)
    monkeypatch.setattr(limits, "PRODUCER_KEPT_S", 5)
    u.pass_time(6)
    u.say("commit c.1", ANNA)
    assert [u.committed(user) for user in (ANNA, BERT)] == [{"c": 1}, {}]


def test_who_may_not_enter_the_group_opens_no_part(made: Any) -> None:
    u = made()
    u.tree.setattr(ROOT, u.group, mode=0o700)
    with pytest.raises(errors.Denied):
        u.part("p", ANNA)
    with pytest.raises(errors.Denied):
        u.tree.mkdir(ANNA, TxnFolder(u.group), "p", 0o755)


def test_who_owns_the_group_drops_anybodys_part(made: Any) -> None:
    u = made()
    u.part("p", ANNA)
    u.tree.rmdir(ROOT, u.tree.find(ROOT, "g/.txn"), "p")
    assert u.parts() == []


# ---------------------------------------------------------------- bounds


def test_a_commit_waits_for_room_and_holds_its_parts(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    wait = u.say("commit x.1 p")
    assert isinstance(wait, Wait)
    refused(errors.Busy, "being committed", u, "commit x.1 p")
    refused(errors.Busy, "being committed", u, "abort p")
    with pytest.raises(errors.Busy):
        u.at(".txn/p/s", os.O_WRONLY).write(b"late")
    u.ctl("clear s")
    assert wait.settled
    assert u.log() == [("s", "1")]


def test_a_commit_that_is_given_up_can_be_repeated(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    assert u.say("commit x.1 p").cancel()
    u.stage("p", "t", b"2")
    u.ctl("clear s")
    u.say("commit x.1 p")
    assert u.log() == [("s", "1"), ("t", "2")]


def test_a_stream_removed_under_a_commit_that_waits(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    wait = u.say("commit x.1 p")
    u.tree.unlink(ROOT, u.group, "s")
    with pytest.raises(errors.NotFound):
        wait.result()
    u.stream("s")
    u.say("commit x.1 p")
    assert u.log() == [("s", "1")]


def test_full_reject_keeps_the_part(made: Any) -> None:
    u = made("depth 1", "full reject")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    refused(errors.StreamFull, "'s': depth reached with 1", u, "commit x.1 p")
    u.ctl("clear s")
    u.say("commit x.1 p")
    assert u.log() == [("s", "1")]


def test_full_drop_new_discards_the_unit_and_remembers_the_commit(made: Any) -> None:
    u = made("depth 1", "full drop-new")
    u.write("s", b"x")
    for _ in range(2):
        u.stage("p", "s", b"1")
        u.stage("p", "t", b"1")
        u.say("commit x.1 p")
        assert u.log() == [("s", "x")]
    assert u.parts() == []


def test_an_empty_commit_is_remembered(made: Any) -> None:
    u = made()
    u.part("p")
    u.say("commit x.1 p")
    u.say("commit y.1")
    assert u.log() == []
    u.stage("p", "s", b"1")
    u.say("commit x.1 p")
    u.stage("p", "s", b"1")
    u.say("commit y.1 p")
    assert u.log() == []


LIMITS = [
    ("UNIT_MESSAGES", 2, "batch of 3 messages: too large .expected at most 2"),
    ("UNIT_BYTES", 100, "bytes in the log: too large .expected at most 100"),
    ("STAGED_BYTES", 120, "too many bytes in parts of transactions .expected at most 60 a user, 120 in all"),
    ("PARTS", 1, "at most"),
    ("PARTS", 2, "too many parts .expected at most 1 a user"),
]


@pytest.mark.parametrize(("name", "value", "text"), LIMITS)
def test_limits(made: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: int, text: str) -> None:
    u = made()
    monkeypatch.setattr(limits, "MEMORY_BYTES" if name == "STAGED_BYTES" and not u.tree.store.path else name, value)

    def too_much() -> None:
        u.stage("p", "s", b"1", b"2", b"3", b"4")
        u.part("q")

    with pytest.raises(errors.OverLimit, match=text):
        too_much()
    monkeypatch.undo()
    u.say("commit x.1 p")
    assert 0 < len(u.log()) <= 4
    assert u.tree.staging.bytes.used == 0
    u.part("q")


def test_two_parts_that_are_too_large_together(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    u = made()
    u.stage("p", "s", b"1", b"2")
    u.stage("q", "s", b"3")
    monkeypatch.setattr(limits, "UNIT_MESSAGES", 2)
    refused(errors.OverLimit, "3 messages", u, "commit x.1 p q")
    u.say("commit x.1 p")
    u.say("commit x.2 q")
    assert len(u.log()) == 3


def test_producers_are_bounded(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PRODUCERS", 4)
    u = made()
    u.say("commit a.1")
    u.pass_time(10)
    u.say("commit b.1")
    refused(
        errors.OverLimit,
        "too many producers that are not forgotten",
        u,
        "commit c.1",
    )
    u.say("commit a.2")
    monkeypatch.setattr(limits, "PRODUCER_KEPT_S", 5)
    u.pass_time(3)
    u.say("commit b.2")
    u.pass_time(3)
    u.say("commit c.1")
    assert list(u.committed()) == ["b", "c"], "the one that committed longest ago is forgotten"


def test_idle_parts_are_dropped(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_IDLE_S", 10)
    u = made()
    u.stage("idle", "s", b"1")
    u.stage("used", "s", b"2")
    u.pass_time(6)
    u.stage("used", "s", b"3")
    u.pass_time(6)
    assert u.parts() == ["used"]
    assert any("part 'idle' dropped: no write" in text for text in u.errors())
    refused(errors.NotFound, "no part 'idle'", u, "commit x.1 idle")
    u.say("commit x.1 used")
    assert len(u.log()) == 2


# ---------------------------------------------------------------- as files


def test_removing_the_group_drops_its_parts(made: Any) -> None:
    u = made()
    u.stage("p", "s", b"x" * 100_000)
    handle = u.at(".txn/p/s", os.O_WRONLY)
    for name in ("s", "t"):
        u.tree.unlink(ROOT, u.group, name)
    u.tree.rmdir(ROOT, u.tree.root, "g")
    assert u.tree.staging.bytes.used == 0
    with pytest.raises(errors.MqfsError):
        handle.write(b"y")
    handle.close()


def test_stat(made: Any) -> None:
    u = made()
    u.stage("p", "s", b"12345")
    numbers = set()
    for path in (".txn", ".txn/ctl", ".txn/p", ".txn/p/s", ".txn/p/.batch", ".txn/p/.put", ".batch", "s", "t"):
        found = u.tree.stat(u.tree.find(ROOT, f"g/{path}"))
        numbers.add(found.qid.path)
    assert len(numbers) == 9, "no two files have one number"
    found = u.tree.stat(u.tree.find(ROOT, "g/.txn/p/s"))
    assert (found.size, found.kept_bytes, found.mode & 0o777) == (0, 5, 0o200)
    assert u.tree.stat(u.tree.find(ROOT, "g/.txn")).nlink == 3
    part: Any = u.tree.find(ROOT, "g/.txn/p")
    assert [node.name for node in exhaust(u.tree.entries(ROOT, part))] == [".batch", ".put", "s"]
    with pytest.raises(errors.NotPermitted):
        u.tree.setattr(ROOT, part, mode=0o777)


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize("clean", [True, False])
def test_commits_are_remembered_and_parts_are_gone_after_a_restart(tmp_path: Path, clean: bool) -> None:
    u = Units(path=tmp_path / "store")
    u.stage("p", "s", b"1")
    u.say("commit x.5 p")
    u.stage("q", "s", b"x" * 200_000)
    u.restart(clean=clean)
    assert u.log() == [("s", "1")]
    assert u.parts() == []
    refused(errors.NotFound, "or the server was restarted", u, "commit x.6 q")
    u.stage("q", "s", b"again")
    u.say("commit x.5 q")
    assert u.log() == [("s", "1")]
    assert os.listdir(tmp_path / "store" / "staging") == []


def test_producers_are_in_a_new_segments_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 10_000)
    u = Units("replay last", path=tmp_path / "store")
    u.say("commit x.5")
    for _ in range(10):
        u.write("s", b"x" * 5_000)
    u.group.retention.trim(always=True)
    u.restart(clean=False)
    assert u.committed()["x"] == 5


def test_a_unit_larger_than_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 300_000)
    u = Units(path=tmp_path / "store")
    u.write("s", b"before")
    bodies = [bytes([n]) * 100_000 for n in range(1, 41)]
    u.stage("p", "s", *bodies)
    u.say("commit x.1 p")
    u.write("s", b"after")
    for clean in (False, True):
        u.restart(clean=clean)
        assert [row["body"].encode() for row in u.kept("s")] == [b"before", *bodies, b"after"]


def test_a_discarded_commit_is_remembered_after_a_restart(tmp_path: Path) -> None:
    u = Units("depth 1", "full drop-new", path=tmp_path / "store")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    u.say("commit x.1 p")
    u.restart(clean=False)
    assert u.committed()["x"] == 1


# ---------------------------------------------------------------- what is counted


def test_the_newest_of_several_parts(made: Any) -> None:
    u = made("replay last")
    u.stage("p", "s", b"1", b"2")
    u.stage("q", "t", b"3")
    u.stage("q", "s", b"4")
    u.say("commit x.1 p q")
    assert u.open("s").read(100) == b"4"
    assert u.open("t").read(100) == b"3"


def test_who_committed_last_stands_last(made: Any) -> None:
    u = made()
    for word in ("a.1", "b.1", "a.2"):
        u.say(f"commit {word}")
    assert list(u.committed()) == ["b", "a"]


def test_parts_that_are_gone_count_no_more(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARTS", 2)
    u = made()
    for number in range(3):
        u.stage("p", "s", b"1")
        u.say(f"commit x.{number} p")
        u.part("q")
        u.say("abort q")
    with pytest.raises(errors.BadName):
        u.part(".hidden")
    u.part("p")


def test_a_part_that_is_being_committed_is_not_idle(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_IDLE_S", 5)
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    wait = u.say("commit x.1 p")
    u.pass_time(20)
    u.ctl("clear s")
    assert wait.settled
    assert u.log() == [("s", "1")]


@pytest.mark.parametrize("others", [False, True])
def test_a_part_whose_commit_was_given_up_is_idle_again(
    made: Any, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    monkeypatch.setattr(limits, "TRANSACTION_IDLE_S", 5)
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.stage("p", "s", b"1")
    if others:
        u.part("q")
    wait = u.say("commit x.1 p")
    u.pass_time(8)
    assert u.parts() == ["p"]
    wait.cancel()
    u.pass_time(1)
    assert u.parts() == ["p"], "its commit can be tried again"
    u.pass_time(9)
    assert u.parts() == []


def test_permission_that_was_taken_away(made: Any) -> None:
    u = made()
    u.stream("open", mode=0o666)
    u.part("p", ANNA)
    handle = u.at(".txn/p/open", os.O_WRONLY, ANNA)
    handle.write(b"1")
    u.tree.setattr(ROOT, u.group.streams["open"], mode=0o644)
    with pytest.raises(errors.Denied):
        handle.write(b"2")


@pytest.mark.parametrize("buffer", [1, 10, 1_000])
def test_what_is_staged_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(limits, "PART_BUFFER_BYTES", buffer)
    whole = bytes(range(200))
    for staged in (MemoryStaged(), DiskStaged(Disk(), str(tmp_path / "part"))):
        for at in range(0, 200, 8):
            staged.append(whole[at : at + 8])
        assert staged.size == 200
        for at in range(0, 210, 3):
            for count in (0, 1, 7, 50, 300):
                assert staged.read(at, count) == whole[at : at + count]
        staged.close()
    assert list(tmp_path.iterdir()) == []


def test_no_part_is_taken_for_another_file(made: Any) -> None:
    """The mount knows a node by what it equals; a part's number may be that of a file of the group."""
    u = made()
    for number in range(20):
        u.part(f"p{number}")
    group = u.tree.find(ROOT, "g")
    nodes = [node for folder in (group, u.tree.find(ROOT, "g/.txn")) for node in exhaust(u.tree.entries(ROOT, folder))]
    assert len(set(nodes)) == len(nodes)
    assert u.tree.find(ROOT, "g/.txn/p3") == u.tree.find(ROOT, "g/.txn/p3")
