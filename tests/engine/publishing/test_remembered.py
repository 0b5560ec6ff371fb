"""What a group remembers of producers and ids: while a commit waits for room, and where no more can be remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.model import User, Wait
from tests.support.batches import Units
from tests.support.calls import calls
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.temp_store import SMALL, lowered

OLD = "old" * 200


def put(u: Units, id: str, body: str = "new", part: str = "", user: User = ROOT) -> None:
    """One message with an id to the stream `s`, or to that of a part."""
    handle = u.at(f".txn/{part}/.put" if part else ".put", os.O_WRONLY, user)
    try:
        assert not isinstance(handle.write(json.dumps({"stream": "s", "id": id}).encode() + b" " + body.encode()), Wait)
    finally:
        handle.close()


def waiting(u: Units, command: str) -> Wait[int]:
    wait = u.say(command)
    assert isinstance(wait, Wait)
    return wait


# ---------------------------------------------------------------- commits that wait


@pytest.mark.parametrize("first", range(1, 4))
@pytest.mark.parametrize("second", range(1, 4))
def test_a_commit_that_waits_while_another_of_its_producer_is_appended(made: Any, first: int, second: int) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.stage("p", "s", b"waited")
    u.stage("q", "t", b"passed")
    wait = waiting(u, f"commit job.{first} p")
    u.say(f"commit job.{second} q")
    u.ctl("clear s")
    assert wait.settled
    assert u.log() == [("t", "passed"), *([("s", "waited")] if first > second else [])]
    assert u.committed() == {"job": max(first, second)}
    for number in (first, second):
        u.stage("r", "s", b"again")
        u.say(f"commit job.{number} r")
    assert "again" not in [body for _, body in u.log()]
    assert u.parts() == []
    if u.path:
        u.restart(clean=False)
        assert u.committed() == {"job": max(first, second)}


def test_a_commit_that_waited_forgets_no_producer_that_committed_since(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PRODUCERS", 4)
    monkeypatch.setattr(limits, "PRODUCER_KEPT_S", 5)
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.say("commit a.1")
    u.say("commit b.1")
    u.pass_time(6)
    u.stage("p", "s", b"waited")
    wait = waiting(u, "commit c.1 p")
    u.say("commit a.2")
    u.ctl("clear s")
    assert wait.settled
    assert u.committed() == {"a": 2, "c": 1}


def test_commits_that_waited_make_no_more_producers_than_are_remembered(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PRODUCERS", 4)
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.write("t", b"x")
    u.say("commit a.1")
    u.stage("p", "s", b"1")
    u.stage("q", "t", b"2")
    waits = [waiting(u, f"commit {producer}.1 {part}") for producer, part in (("b", "p"), ("c", "q"))]
    u.ctl("clear s")
    assert waits[0].result() == len("commit b.1 p")
    u.ctl("clear t")
    with pytest.raises(errors.OverLimit, match="producers that are not forgotten"):
        waits[1].result()
    assert u.committed() == {"a": 1, "b": 1}
    assert u.parts() == ["q"]


def looks(u: Units, ids: int) -> int:
    """The calls of a retry of a commit with that number of ids, which waits."""
    u.part("p")
    for number in range(ids):
        put(u, str(number), part="p")
    wait = waiting(u, "commit job.1 p")
    cost = calls(u.group.unblock)
    assert wait.cancel()
    return cost


def test_a_retry_looks_up_no_id_again() -> None:
    costs = []
    for ids in (2, 200):
        u = Units(f"depth {ids}", "full block")
        u.write("s", b"x")
        costs.append(looks(u, ids))
    assert costs[0] == costs[1]


# ---------------------------------------------------------------- where there is no room for ids


def put_new(u: Units) -> None:
    put(u, "new", "new", user=ANNA)


def commit_new(u: Units) -> None:
    u.say("commit job.1 p", ANNA)


def commit_too_many(u: Units) -> None:
    u.say("commit job.1 q", ANNA)


def at_its_share(u: Units) -> None:
    """Anna has all ids but one, and parts with one and with two more than may be remembered."""
    for name in "st":
        u.tree.setattr(ROOT, u.group.streams[name], mode=0o666)
    for part, ids in (("p", 2), ("q", 3)):
        u.part(part, ANNA)
        for number in range(ids):
            put(u, f"{part}{number}", part=part, user=ANNA)
    for id in "01":
        put(u, id, OLD, user=ANNA)


@pytest.mark.parametrize("bound", ["depth", "log"])
@pytest.mark.parametrize("write", [put_new, commit_new, commit_too_many])
def test_what_is_refused_for_its_ids_evicts_nothing(
    made: Any, monkeypatch: pytest.MonkeyPatch, write: Callable[[Units], None], bound: str
) -> None:
    monkeypatch.setattr(limits, "DEDUP_IDS", 4)
    u = made("dedup 1h", "full drop-old", *(["depth 2"] if bound == "depth" else []))
    at_its_share(u)
    before = u.log()
    if bound == "log":
        for name in ("GROUP_BYTES", "MEMORY_BYTES"):
            monkeypatch.setattr(limits, name, u.group.log.upkeep.size + 50)
        u.group.retention.room = 0
    with pytest.raises(errors.OverLimit, match="too many ids within 'dedup'"):
        write(u)
    assert u.log() == before == [("s", OLD), ("s", OLD)]
    assert sorted(u.parts()) == ["p", "q"]
    monkeypatch.setattr(limits, "DEDUP_IDS", 16)
    write(u)
    assert ("s", "new") in u.log()


@pytest.mark.parametrize(("ids", "total"), [(1, 2), (2, 3), (2, 4), (3, 4), (5, 4), (4, 8), (5, 8)])
def test_no_commit_has_more_ids_than_the_share_of_its_user(
    monkeypatch: pytest.MonkeyPatch, ids: int, total: int
) -> None:
    monkeypatch.setattr(limits, "DEDUP_IDS", total)
    u = Units("dedup 1h")
    u.part("p")
    for number in range(ids):
        put(u, str(number), part="p")
    if ids <= total // 2:
        u.say("commit job.1 p")
        assert len(u.log()) == ids
        return
    with pytest.raises(errors.OverLimit, match="too many ids within 'dedup'"):
        u.say("commit job.1 p")
    assert (u.log(), u.parts(), u.committed()) == ([], ["p"], {})


def test_ids_whose_time_is_over_make_room_for_a_commit(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEDUP_IDS", 4)
    u = made("dedup 10s")
    for number in range(2):
        put(u, str(number))
    u.part("p")
    for number in range(2):
        put(u, str(number), "again", part="p")
    u.pass_time(11)
    u.say("commit job.1 p")
    assert [body for _, body in u.log()] == ["new", "new", "again", "again"]


# ---------------------------------------------------------------- ids in a part


def with_ids(u: Units, count: int = 3) -> None:
    u.part("p", ANNA)
    for number in (0, *range(count)):
        put(u, str(number), part="p", user=ANNA)


ENDS: dict[str, Callable[[Units], Any]] = {
    "commit": lambda u: u.say("commit job.1 p", ANNA),
    "abort": lambda u: u.say("abort p", ANNA),
    "idle": lambda u: u.pass_time(limits.TRANSACTION_IDLE_S + 1),
    "end": lambda u: u.tree.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_ids_in_a_part_take_memory_of_its_owner(made: Any, end: str) -> None:
    u = made()
    for name in "st":
        u.tree.setattr(ROOT, u.group.streams[name], mode=0o666)
    before = u.tree.memory.used
    with_ids(u)
    assert u.tree.memory.of(ANNA.uid) == u.tree.memory.used - before == 3 * limits.STAGED_ID_BYTES
    ENDS[end](u)
    assert u.tree.memory.of(ANNA.uid) == u.tree.staging.bytes.used == 0


def test_memory_bounds_the_ids_in_parts(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    u = made()
    u.tree.setattr(ROOT, u.group.streams["s"], mode=0o666)
    monkeypatch.setattr(limits, "HELD_BYTES", 6 * limits.STAGED_ID_BYTES)
    with_ids(u)
    staged = u.tree.staging.bytes.used
    with pytest.raises(errors.OverLimit, match="bytes in the server's memory"):
        put(u, "more", part="p", user=ANNA)
    assert u.tree.staging.bytes.used == staged
    u.part("q", BERT)
    put(u, "other", part="q", user=BERT)
    u.say("commit job.1 p", ANNA)
    assert len(u.log()) == 3, "the repeat in the part is none of them"


# ---------------------------------------------------------------- the sequence of a repeated id


def asked(u: Units, id: str, **keys: str) -> int:
    return u.put(b"body", id=id, **keys)


def committed(u: Units, id: str) -> int:
    """The sequence of a message with an id in a part that is committed; its repeat is asked for like any other."""
    put(u, id, "body", part=u.part("p").name)
    u.say(f"commit {id.replace(' ', '.')} p")
    return int(u.kept()[-1]["sequence"])


IDS: dict[str, Callable[[Units, str], int]] = {
    "put": asked,
    "put with headers": lambda u, id: asked(u, id, key="k" * 90),
    "delayed": lambda u, id: asked(u, id, delay="9h"),
    "commit": committed,
}


@pytest.mark.parametrize("how", IDS)
def test_a_repeat_is_answered_with_the_sequence_of_the_message(tmp_path: Path, how: str) -> None:
    """Also where its append began a segment behind one with changes only, which uses up a number."""
    with lowered(**SMALL):
        u = Units("consumer w", path=tmp_path / "store")
        wrong = []
        for number in range(60):
            for _ in range(number):
                u.ctl("consumer w backlog 5")
                u.ctl("consumer w")
            id = f"id {number}"
            sequence = IDS[how](u, id)
            if (again := asked(u, id)) != sequence:
                wrong.append((id, sequence, again))
        assert wrong == []
        u.restart()
        assert asked(u, id) == sequence
