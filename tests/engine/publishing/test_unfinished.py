"""`data line` in a part of a transaction: a line without its newline is in the commit, or there is no commit."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.model import Wait
from tests.support.batches import Units
from tests.support.hand import ANNA, ROOT


def take_right(u: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    u.tree.setattr(ROOT, u.group.streams["open"], mode=0o644)


def bound_messages(u: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNIT_MESSAGES", 1)


def bound_bytes(u: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STAGED_BYTES", 1)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 1)


def remove_stream(u: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    u.tree.unlink(ROOT, u.group, "open")


REFUSALS = {
    take_right: errors.Denied,
    bound_messages: errors.OverLimit,
    bound_bytes: errors.OverLimit,
    remove_stream: errors.NotFound,
}


def staged(made: Any) -> tuple[Units, Any]:
    """A part of Anna's with a whole line, and a file of it that is open with an unfinished one."""
    u = made("data line")
    u.stream("open", mode=0o666)
    u.stage("p", "open", b"whole\n", user=ANNA)
    writer = u.at(".txn/p/open", os.O_WRONLY, ANNA)
    assert writer.write(b"unfinished") == 10
    return u, writer


@pytest.mark.parametrize("refuse", REFUSALS)
def test_one_that_is_refused_at_its_close_is_not_committed_without(
    made: Any, refuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, writer = staged(made)
    with monkeypatch.context() as patched:
        refuse(u, patched)
        writer.close()
    with pytest.raises(errors.NotFound, match="no part 'p'"):
        u.say("commit job.1 p", ANNA)
    assert u.parts() == []
    assert u.committed(ANNA) == {}
    assert any("part 'p' dropped: last, unfinished line of 'open' not staged: " in text for text in u.errors())


@pytest.mark.parametrize("refuse", REFUSALS)
def test_one_that_is_refused_at_the_commit_refuses_that(
    made: Any, refuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    u, writer = staged(made)
    with monkeypatch.context() as patched:
        refuse(u, patched)
        with pytest.raises(REFUSALS[refuse]):
            u.say("commit job.1 p", ANNA)
    assert u.parts() == ["p"]
    if refuse not in (take_right, remove_stream):
        u.say("commit job.1 p", ANNA)
        assert u.log() == [("open", "whole\n"), ("open", "unfinished")]
    writer.close()


def test_one_whose_file_is_open_is_committed(made: Any) -> None:
    u, writer = staged(made)
    other = u.at(".txn/p/open", os.O_WRONLY, ANNA)
    other.write(b"second")
    closed = u.at(".txn/p/open", os.O_WRONLY, ANNA)
    closed.write(b"closed")
    closed.close()
    u.say("commit job.1 p", ANNA)
    assert u.log() == [("open", text) for text in ("whole\n", "closed", "unfinished", "second")]
    with pytest.raises(errors.NotFound):
        writer.write(b" more\n")
    writer.close()
    other.close()
    assert u.tree.memory.of(ANNA.uid) == 0
    assert len(u.log()) == 4


def test_one_that_was_continued_is_committed_as_a_whole(made: Any) -> None:
    u, writer = staged(made)
    writer.write(b" and more")
    writer.write(b" and an end\n")
    u.say("commit job.1 p", ANNA)
    assert u.log() == [("open", "whole\n"), ("open", "unfinished and more and an end\n")]


# ------------------------------------------------------------------ a commit that is refused


FULL = {"reject": errors.StreamFull, "block": None}  # a commit that waits is cancelled


@pytest.mark.parametrize("later", [False, True], ids=["first part", "earlier part"])
@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("rest", [b" row\n", b" row", b""], ids=["ended", "continued", "closed"])
def test_a_refused_commit_cuts_no_line(made: Any, full: str, rest: bytes, later: bool) -> None:
    u = made("data line", "depth 3", f"full {full}")
    u.stream("open", mode=0o666)
    for _ in range(3):
        u.write("t" if later else "open", b"old\n")
    u.tree.setattr(ROOT, u.group.streams["t"], mode=0o666)
    u.stage("q", "t", b"other\n", user=ANNA)
    u.stage("p", "open", b"whole\n", user=ANNA)
    writer = u.at(".txn/p/open", os.O_WRONLY, ANNA)
    writer.write(b"INSERT one")
    if full == "reject":
        with pytest.raises(errors.StreamFull):
            u.say("commit job.1 p q", ANNA)
    else:
        waiting = u.say("commit job.1 p q", ANNA)
        assert isinstance(waiting, Wait)
        with pytest.raises(errors.Busy):
            writer.write(b"not now\n")
        assert waiting.cancel()
    u.ctl("depth 100")
    if rest:
        writer.write(rest)
    else:
        writer.close()
    u.say("commit job.1 p q", ANNA)
    line = (b"INSERT one" + rest).decode()
    assert [row for row in u.log() if row[1] != "old\n"] == [("open", "whole\n"), ("open", line), ("t", "other\n")]
    writer.close()
    assert u.tree.memory.of(ANNA.uid) == 0


@pytest.mark.parametrize("done", [False, True], ids=["cancelled", "done"])
def test_a_file_that_is_closed_while_a_commit_waits(made: Any, done: bool) -> None:
    u = made("data line", "depth 2", "full block")
    u.stream("open", mode=0o666)
    u.write("open", b"old\n")
    u.stage("p", "open", b"whole\n", user=ANNA)
    writer = u.at(".txn/p/open", os.O_WRONLY, ANNA)
    writer.write(b"unfinished")
    waiting = u.say("commit job.1 p", ANNA)
    assert isinstance(waiting, Wait)
    writer.close()
    if not done:
        assert waiting.cancel()
        assert u.parts() == ["p"]
    u.ctl("depth 3")
    if done:
        assert waiting.settled
    else:
        u.say("commit job.1 p", ANNA)
    assert u.log() == [("open", text) for text in ("old\n", "whole\n", "unfinished")]
    assert u.parts() == []
    assert u.tree.memory.of(ANNA.uid) == 0
