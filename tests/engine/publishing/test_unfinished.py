"""`data line` in a part of a transaction: a line without its newline is in the commit, or there is no commit."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mqfs import errors, limits
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
