"""`lines` of `.put`: each line of the body is a message, all of them one unit under one id."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.model import Wait
from tests.support.hand import ROOT
from tests.support.queues import Queues

FULL = ("drop-old", "drop-new", "reject", "block")


@pytest.fixture(params=["memory", "disk"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "store" if request.param == "disk" else None


def request(body: bytes, **keys: Any) -> bytes:
    return json.dumps({"stream": "s", "lines": True, **keys}).encode() + b" " + body


def bodies(q: Queues) -> list[str]:
    return [row["body"] for row in q.kept()]


@pytest.mark.parametrize("sender", ["off", "on"])
@pytest.mark.parametrize("body", [b"one\n", b"one\n\n two\r\n"], ids=["one", "three"])
def test_a_repeat_answers_with_the_first_sequence_and_appends_nothing(
    path: Path | None, body: bytes, sender: str
) -> None:
    q = Queues("replay all", f"sender {sender}", path=path)
    wanted = [line + "\n" for line in body.decode().split("\n")[:-1]]
    first = q.put(body, lines=True, id="a")
    row = q.kept()[0]
    assert (bodies(q), row["sequence"]) == (wanted, first)
    assert row.get("headers", {}) == ({"sender": "0"} if sender == "on" else {}), "those of a plain write"
    for clean in (True, False):
        assert q.put(body, lines=True, id="a") == q.put(b"another", id="a") == first
        if path:
            q.restart(clean=clean)
    assert q.put(b"x\n", lines=True, id="b") > first
    assert bodies(q) == [*wanted, "x\n"]


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("bound", ["depth 3", "depth 8B", "depth 2"])
@pytest.mark.parametrize("consumer", [(), ("consumer w s backlog 3",)], ids=["", "backlog"])
@pytest.mark.parametrize("before", [b"1\n", b"1\n2\n"])
def test_its_limits_are_those_of_the_same_lines_written_to_the_stream(
    full: str, bound: str, consumer: tuple[str, ...], before: bytes
) -> None:
    def run(name: str, data: bytes) -> Any:
        q = Queues("replay all", "data line", f"full {full}", bound, *consumer)
        q.write("s", before)
        try:
            step = q.at(name, os.O_WRONLY).write(data)
        except errors.MqfsError as error:
            step = str(error)
        found = isinstance(step, Wait) or (step if isinstance(step, str) else step == len(data)), bodies(q)
        stats = json.loads(q.text(".stats"))
        q.ctl("clear s")
        return found, bodies(q), stats["streams"]["s"], stats["discarded"]

    assert run(".put", request(b"3\n4\n5\n", id="a")) == run("s", b"3\n4\n5\n")


def test_one_that_waits_for_room_is_appended_once_however_often_it_is_repeated(path: Path | None) -> None:
    q = Queues("replay all", "depth 3", "full block", path=path)
    q.write("s", b"old", b"older")
    waits = [q.at(".put", os.O_WRONLY).write(request(b"1\n2\n", id="a")) for _ in range(3)]
    assert not any(wait.settled for wait in waits)
    q.ctl("clear s")
    assert all(wait.settled for wait in waits)
    assert bodies(q) == ["1\n", "2\n"]


def test_a_receipt_and_a_condition_are_of_all_of_them() -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_RDWR)
    with pytest.raises(errors.Conflict):
        handle.write(request(b"1\n2\n", expect=7))
    handle.read(200)
    handle.write(request(b"1\n2\n", expect=0, kept=True, id="a"))
    sequence, _, _, known, is_there = map(int, handle.read(200).split())
    assert (sequence, known, is_there) == (q.kept()[0]["sequence"], 0, 1)
    handle.write(request(b"1\n2\n", expect=0, kept=True, id="a"))
    assert int(handle.read(200).split()[3]) == 1
    assert bodies(q) == ["1\n", "2\n"]


REFUSED: dict[str, tuple[dict[str, Any], bytes]] = {
    "no newline": ({}, b"one\ntwo"), "nothing": ({}, b""), "no boolean": ({"lines": 1}, b"one\n"),
    **{key: ({key: value}, b"one\n") for key, value in {
        "delay": "1s", "at": 1, "ttl": "1s", "priority": 7, "key": "k", "single": True, "headers": {"a": "b"}}.items()},
    "every": ({"every": "1h", "id": "a"}, b"one\n"), "cron": ({"cron": "0 3 * * *", "id": "a"}, b"one\n"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "body"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_take(keys: dict[str, Any], body: bytes) -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_WRONLY)
    with pytest.raises(errors.BadCommand, match=r"lines|schedule"):
        handle.write(request(body, **keys))
    assert bodies(q) == []


def test_without_it_the_body_is_one_message() -> None:
    q = Queues("replay all")
    q.put(b"one\ntwo", lines=False, priority=7)
    assert bodies(q) == ["one\ntwo"]


def test_not_in_a_part() -> None:
    q = Queues("replay all")
    q.tree.mkdir(ROOT, q.tree.find(ROOT, "g/.txn"), "p", 0o700)
    with pytest.raises(errors.BadCommand, match="lines: not in a part"):
        q.at(".txn/p/.put", os.O_WRONLY).write(request(b"one\n"))
