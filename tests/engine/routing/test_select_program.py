"""`select program PROGRAM`: a reader brings a program of its own, without a view."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.model import User, Wait
from tests.support.calls import calls_once
from tests.support.hand import ANNA, BERT, ROOT, Hand
from tests.support.queues import Queues

ERRORS = 'prefix:log. (payload_contains("error # 7") && route_contains("m"))'
WRITTEN = [("log.mail", b"an error # 7"), ("log.web", b"an error # 7"), ("log.mail", b"fine"), ("mail", b"error # 7")]


@pytest.fixture
def full(hand: Hand) -> Hand:
    for name in ("log.mail", "log.web", "mail"):
        hand.stream(name)
    for name, body in WRITTEN:
        hand.write(name, body)
    return hand


def read(handle: Any) -> list[bytes]:
    got: list[bytes] = []
    while not isinstance(step := handle.read(4096), Wait):
        got.append(step)
        if isinstance(handle.node.name, str) and handle.node.name == "w":
            handle.write(b"ack\n")
    assert step.cancel()
    return got


@pytest.mark.parametrize(
    "line",
    [f"select program {ERRORS}", f"select program {ERRORS} # said so", f"  select\tprogram '{ERRORS}' # so"],
)
def test_as_it_stands_or_quoted(full: Hand, line: str) -> None:
    assert read(full.cursor(line, "seek first")) == [b"an error # 7"]


def test_it_sees_what_a_view_of_it_sees(full: Hand) -> None:
    full.ctl(f"bind v {ERRORS}")
    cursors = [full.cursor(f"select {what}", "seek first") for what in ("v", f"program {ERRORS}")]
    assert read(cursors[0]) == read(cursors[1])
    full.stream("log.m")
    full.write("log.m", b"error # 7")
    assert read(cursors[0]) == read(cursors[1]) == [b"error # 7"], "streams that come later, too"
    cursors[1].write(b"select\nseek first\n")
    assert len(read(cursors[1])) == 5


def test_names_are_names(full: Hand) -> None:
    """`program` is a name where no program follows."""
    full.stream("program")
    full.write("program", b"x")
    assert read(full.cursor("select program", "seek first")) == [b"x"]
    assert read(full.cursor("select program mail", "seek first")) == [b"error # 7", b"x"]


@pytest.mark.parametrize("program", ["prefix:a (", "exact:a (nosuch())", "prefix:" + "a" * 5_000])
def test_a_bad_program_is_refused_and_changes_nothing(full: Hand, program: str) -> None:
    cursor = full.cursor("select mail", "seek first")
    with pytest.raises(errors.BadCommand, match="program"):
        cursor.write(f"select program {program}\n".encode())
    cursor.read(4096)
    assert read(cursor) == [b"error # 7"]


def test_only_what_the_reader_may_read(full: Hand) -> None:
    full.tree.setattr(ROOT, full.group.streams["log.mail"], mode=0o600)
    assert read(full.cursor("select program prefix:log.", "seek first", user=ANNA)) == [b"an error # 7"]


@pytest.mark.parametrize("what", [f"program {ERRORS}", "v"])
def test_a_handle_of_a_consumer(full: Hand, what: str) -> None:
    """The others stay for the handles that have selected nothing."""
    full.ctl(f"bind v {ERRORS}", "consumer w")
    node = full.tree.find(ROOT, "g/.consumers/w")
    one, other = (full.tree.open(ROOT, node, os.O_RDWR) for _ in range(2))
    one.write(f"select {what}\n".encode())
    assert read(one) == [b"an error # 7"]
    assert read(other) == [body for _, body in WRITTEN[1:]]
    step = one.read(64)
    full.write("log.mail", b"no")
    assert isinstance(step, Wait)
    assert not step.settled
    full.write("log.mail", b"error # 7")
    assert step.result() == b"error # 7"


@pytest.mark.parametrize("path", ["g/.cursor", "g/.consumers/w"])
def test_the_programs_of_open_files_search_a_bounded_part_of_a_message_together(full: Hand, path: str) -> None:
    """A write asks them all: each sees its share, and those over the limit are refused until others are closed."""

    def selecting(user: User = ANNA) -> Any:
        file = full.tree.open(user, full.tree.find(ROOT, path), os.O_RDWR)
        file.write(line)
        return file

    full.ctl("consumer w")
    calls = " || ".join(f'payload_contains("{number} at the end")' for number in range(64))
    line = f'select program prefix:"" {calls}\n'.encode()
    files = [selecting() for _ in range(limits.PROGRAM_SEARCHES // 2 // 64)]
    for file in files[1:]:
        with pytest.raises(errors.OverLimit, match=r"expected at most 256 a user, 512 in all"):
            selecting()
        file.close()
        files[0].write(line)
        selecting()
    share = limits.PROGRAM_SEARCH_BYTES // (limits.PROGRAM_SEARCHES // 2)
    full.write("mail", b"0 at the end".rjust(share + 1))
    assert isinstance(step := files[0].read(100_000), Wait)
    full.write("mail", b"0 at the end".rjust(share))
    assert step.settled
    files[0].write(b"select\n")
    selecting()


def test_a_users_searches_leave_each_other_user_its_share_of_a_message(full: Hand) -> None:
    least, half = limits.PROGRAM_SEARCH_BYTES // limits.PROGRAM_SEARCHES, limits.PROGRAM_SEARCHES // 2
    calls = " || ".join(f'payload_contains("{number} at the end")' for number in range(64))
    mine, greedy = full.cursor(f'select program prefix:"" {calls}', user=BERT), []
    for _ in range(half // 64):
        greedy.append(full.cursor(f'select program prefix:"" {calls}', user=ANNA))
    with pytest.raises(errors.OverLimit):
        full.cursor(f'select program prefix:"" {calls}', user=ANNA)
    left = (limits.PROGRAM_SEARCH_BYTES - (half + 64) * least) // 2  # for each of the two
    for readers, share in ((greedy, least + left // half), ([mine], least + left // 64)):
        assert all(reader.write(b"seek end\n") for reader in readers)
        steps = [reader.read(1 << 20) for reader in readers]
        full.write("mail", b"0 at the end".rjust(share + 1))
        assert not any(step.settled for step in steps)
        full.write("mail", b"0 at the end".rjust(share))
        assert all(step.settled for step in steps)
    mine.close()
    full.write("mail", b"0 at the end".rjust(limits.PROGRAM_SEARCH_BYTES // half))
    assert all(reader.read(1 << 20) for reader in greedy)


def test_binding_more_programs_hides_no_message_of_32_kib() -> None:
    queues = Queues("replay all")
    queues.ctl('bind found prefix:"" payload_contains("needle")', "consumer w found")
    queues.write("s", b"-" * (32_768 - 6) + b"needle")
    calls = " || ".join(f'payload_contains("{n}")' for n in range(7))
    queues.ctl(*[f'bind other prefix:"{n}" {calls}' for n in range(73)])
    with pytest.raises(errors.OverLimit, match="expected at most 512 in all programs"):
        queues.ctl(f'bind other prefix:"one" {calls}')
    assert queues.worker("w").read(40_000).endswith(b"needle")


def test_a_view_asks_its_programs_once_a_message() -> None:
    """Whatever the number of readers that wait."""

    def cost(functions: int, readers: int) -> int:
        queues = Queues()
        calls_of = " || ".join(f'payload_contains("y{number}")' for number in range(functions - 1))
        queues.ctl(f'bind view prefix:"" {calls_of} || payload_contains("x")')
        waits = [queues.at("view").read(10) for _ in range(readers)]
        found = calls_once(lambda: queues.write("s", b"x"))
        assert [wait.result() for wait in waits] == [b"x"] * readers
        return found

    assert cost(50, 20) - cost(50, 1) == cost(2, 20) - cost(2, 1)
