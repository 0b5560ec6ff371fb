"""Refused input: by which error, shown by the next read of the handle and in `.errors`; nothing is lost by it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from mqfs import errors
from mqfs.errors import MqfsError
from tests.support.hand import ANNA, ROOT
from tests.support.queues import BIG, Queues, drain, read, refusal, say, waits


def group() -> Queues:
    q = Queues("replay all")
    q.consumer()
    q.write("s", b"one", b"two")
    return q


# ------------------------------------------------------------------ a consumer's handle


@pytest.mark.parametrize(
    "line",
    ["ack", "ack 1", "nack", "nack 5s", "nack 1 5s", "release", "release 1", "dead", "dead 1", "dead why", "touch",
     "touch 1"],
)  # fmt: skip
def test_of_what_is_not_claimed(line: str) -> None:
    q = group()
    worker = q.worker()
    error = refusal(worker, line)
    assert error.errno == errno.ESTALE
    assert "claimed" in str(error)
    assert q.errors() == [str(error)]
    assert drain(worker) == [b"one", b"two"]


def test_a_second_ack() -> None:
    q = group()
    worker = q.worker()
    read(worker)
    say(worker, "ack")
    assert isinstance(refusal(worker, "ack"), errors.Stale)
    assert isinstance(refusal(worker, "ack 1"), errors.Stale)
    assert drain(worker) == [b"two"]


@pytest.mark.parametrize("lines", ["ack 1 1", "ack 1\nack 1", "release 1 1", "nack 1\nack 1", "ack 1\ndead 1"])
def test_a_claim_named_twice_in_one_write(lines: str) -> None:
    q = group()
    worker = q.worker()
    read(worker)
    with pytest.raises(errors.Stale):
        worker.write(f"{lines}\n".encode())
    stats = q.stats()
    assert (stats["claimed"], stats["waiting"], stats["acknowledged"], stats["failed"]) == (1, 1, 0, 0)


def test_ack_of_what_another_handle_claimed() -> None:
    q = group()
    mine, other = q.worker(), q.worker()
    assert [read(mine), read(other)] == [b"one", b"two"]
    assert isinstance(refusal(mine, "ack 2"), errors.Stale)
    assert q.stats()["claimed"] == 2
    say(other, "ack")


def test_ack_of_a_claim_that_has_gone_to_another() -> None:
    q = group()
    q.ctl("lease 1s", "backoff 0 0")
    slow, other = q.worker(), q.worker()
    read(slow)
    q.pass_time(1)
    assert read(other) == b"one"
    assert isinstance(refusal(slow, "ack"), errors.Stale)
    say(other, "ack")


@pytest.mark.parametrize(
    "line",
    [
        "bogus", "ACK", "ack x", "ack -1", "ack 1 x", "ack 1s", "nack x", "nack 1 2 3", "nack 5s 1", "nack -5s",
        "release 5s",
        "touch x", "info 1", "seek", "seek nowhere", "seek 1 2", "seek @", "seek @noon", "seek -", "seek -x", "seek +1",
        "until", "until x", "until -1", "format", "format xml", "format raw raw", "select '", "select a.**", "ack 'x",
        "ack 99999999999999999999",
    ],
)  # fmt: skip
def test_commands_that_mean_nothing(line: str) -> None:
    q = group()
    worker = q.worker()
    assert read(worker) == b"one"
    error = refusal(worker, line)
    assert error.errno == errno.EINVAL
    assert error.detail
    assert q.errors() == [str(error)]
    say(worker, "ack")
    assert drain(worker) == [b"two"]


def test_select_of_what_is_not_there() -> None:
    q = group()
    assert refusal(q.worker(), "select nowhere").errno == errno.ENOENT


def test_select_of_what_may_not_be_read() -> None:
    q = group()
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o600)
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o666)
    assert refusal(q.worker(user=ANNA), "select s").errno == errno.EACCES


def test_info_before_anything_was_read() -> None:
    assert refusal(group().worker(), "info").errno == errno.EINVAL


@pytest.mark.parametrize("line", ["ack\nbogus", "bogus\nack", "ack\nack 77", "seek first\nformat xml"])
def test_all_of_a_write_or_nothing(line: str) -> None:
    q = group()
    worker = q.worker()
    assert read(worker) == b"one"
    refusal(worker, line)
    assert q.stats()["claimed"] == 1
    say(worker, "ack")
    assert drain(worker) == [b"two"]


def test_bytes_that_are_no_text() -> None:
    q = group()
    worker = q.worker()
    with pytest.raises(MqfsError) as caught:
        worker.write(b"\xff\xfe\n")
    assert caught.value.errno == errno.EINVAL
    assert read(worker) == f"{caught.value}\n".encode()
    assert read(worker) == b"one"


def test_a_line_without_end() -> None:
    q = group()
    worker = q.worker()
    with pytest.raises(errors.TooLong):
        worker.write(b"x" * (1 << 17))
    read(worker)
    assert read(worker) == b"one"


def test_blank_lines_and_comments_are_no_mistake() -> None:
    q = group()
    worker = q.worker()
    read(worker)
    say(worker, "\n  \nack")
    assert q.stats()["claimed"] == 0


def test_a_refusal_is_read_in_pieces_and_does_not_hide_a_message() -> None:
    q = group()
    worker = q.worker()
    with pytest.raises(MqfsError) as caught:
        worker.write(b"bogus\n")
    text = f"{caught.value}\n".encode()
    assert worker.read(10) == text[:10]
    assert read(worker) == text[10:]
    assert read(worker) == b"one"


def test_opened_for_reading_only_it_takes_no_commands() -> None:
    q = group()
    handle = q.at(".consumers/w")
    with pytest.raises(errors.Denied):
        handle.write(b"seek first\n")


def test_opened_for_writing_only_it_has_no_claims() -> None:
    q = group()
    handle = q.at(".consumers/w", os.O_WRONLY)
    with pytest.raises(errors.Stale):
        handle.write(b"ack\n")
    with pytest.raises(errors.Denied):
        handle.read(BIG)


def test_a_second_handle_on_a_private_consumer() -> None:
    q = group()
    q.consumer("p", "private")
    worker = q.worker("p")
    with pytest.raises(MqfsError) as caught:
        q.worker("p")
    assert caught.value.errno == errno.EBUSY
    assert drain(worker) == [b"one", b"two"]


# ------------------------------------------------------------------ ctl


MEANS_NOTHING = """
deliver some · deliver · ack next · lease soon · lease -1s · retries -1 · retries many · backoff 1s · backoff 5s 1s
backoff x y · dead · dead .hidden · dead ctl · dead a/b · order random · dedup x
consumer · consumer .x · consumer a/b · consumer '' · consumer x backlog · consumer x backlog many · consumer x s t
remove · redrive s x · redrive s 1 2
bind · bind v · bind v 'a.**' · bind v 'a*' · bind .v '#' · bind ctl '#' · bind v prefix:"a" (
bind v exact:"a" (nothing_known()) · bind v prefix:"a" (true() &&) · unbind
"""
REFUSED = {"consumer w s": errno.EEXIST, "bind s '#'": errno.EEXIST, "remove nobody": errno.ENOENT,
           "unbind nothing": errno.ENOENT}  # fmt: skip
REFUSED |= dict.fromkeys(MEANS_NOTHING.strip().replace("\n", " · ").split(" · "), errno.EINVAL)


@pytest.mark.parametrize(("line", "number"), REFUSED.items())
def test_lines_of_ctl(line: str, number: int) -> None:
    q = group()
    before = q.text("ctl")
    handle = q.at("ctl", os.O_RDWR)
    error = refusal(handle, f"ttl 1s\n{line}")
    assert error.errno == number
    assert error.detail
    assert q.errors() == [str(error)]
    assert q.text("ctl") == before
    assert drain(q.worker()) == [b"one", b"two"]


def test_a_program_that_does_not_parse_is_told_by_its_column() -> None:
    q = group()
    error = refusal(q.at("ctl", os.O_RDWR), 'bind v prefix:"http." (true() && nothing_known())')
    assert "column" in str(error)


def test_an_illegal_pattern_is_told() -> None:
    q = group()
    error = refusal(q.at("ctl", os.O_RDWR), "bind v 'stock.u*'")
    assert error.errno == errno.EINVAL
    assert "u*" in str(error)


def test_removing_a_consumer_that_holds_claims() -> None:
    q = group()
    worker = q.worker()
    read(worker)
    error = refusal(q.at("ctl", os.O_RDWR), "remove w")
    assert error.errno == errno.EBUSY
    say(worker, "ack")
    assert drain(worker) == [b"two"]


def test_only_the_owner_says_what_ctl_says() -> None:
    q = group()
    with pytest.raises(errors.Denied):
        q.at("ctl", os.O_RDWR, ANNA)


def test_a_stream_and_a_view_do_not_share_a_name() -> None:
    q = group()
    q.ctl("bind v '#'")
    with pytest.raises(errors.Exists):
        q.stream("v")
    with pytest.raises(errors.Exists):
        q.tree.rename(ROOT, q.group, "s", q.group, "v")


@pytest.mark.parametrize("name", [".x", "a/b", "", "x" * 256])
def test_names_of_consumers(name: str) -> None:
    q = group()
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    with pytest.raises(MqfsError) as caught:
        q.tree.create(ROOT, folder, name, 0o600)
    assert caught.value.errno == errno.EINVAL


def test_errors_are_the_users_own() -> None:
    q = group()
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o666)
    refusal(q.worker(), "bogus")
    hers = refusal(q.worker(user=ANNA), "ack")
    assert q.errors(ANNA) == [str(hers)]
    assert len(q.errors()) == 2


def test_a_poison_message_does_not_block_the_rest() -> None:
    q = Queues("retries 0", "backoff 1h 1h")
    q.consumer()
    q.write("s", b"poison", *[b"%d" % i for i in range(20)])
    worker = q.worker()
    assert read(worker) == b"poison"
    worker.close()
    worker = q.worker()
    assert read(worker) == b"poison"
    say(worker, "nack")
    assert len(drain(worker)) == 20
    assert waits(worker)
