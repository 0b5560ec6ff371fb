"""Names, permissions, limits, reports: what the tree does beside moving messages."""

from __future__ import annotations

import errno
import json
import os
import queue
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.engine.core.portions import exhaust
from mqfs.engine.files import ctl as actions
from mqfs.engine.files import status
from mqfs.engine.nodes import META_FILES, Folder, Meta, TxnCtl, TxnFolder
from mqfs.engine.publishing import transactions
from mqfs.engine.tree import tree
from mqfs.engine.tree.attributes import attributes
from mqfs.errors import NotPermitted
from mqfs.model import QTDIR, User, Wait
from mqfs.store.disk import Disk
from mqfs.store.store import DiskStore
from mqfs.syntax import names
from mqfs.syntax.lines import quote
from tests.support.batches import Units
from tests.support.clock import ManualClock
from tests.support.eventually import HANG_S
from tests.support.hand import ANNA, BERT, ROOT, Hand
from tests.support.queues import Queues

CONTROL = ["a\x1b[2J", "\r", "a\nb", "\x7f"]
BAD_NAMES = ["ctl", "order", ".x", ".", "..", "", "a/b", "../x", "a\0b", "ä" * 128, "\udc80", *CONTROL]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(hand: Hand, name: str) -> None:
    tree, group = hand.tree, hand.group
    hand.stream("old")
    tree.mkdir(ROOT, group, "old group", 0o777)
    for call in (
        lambda: hand.stream(name),
        lambda: tree.mkdir(ROOT, group, name, 0o777),
        lambda: tree.rename(ROOT, group, "old", group, name),
        lambda: tree.rename(ROOT, group, "old group", group, name),
        lambda: tree.create(ROOT, Folder(group, ".consumers"), name, 0o666),
        lambda: tree.mkdir(ROOT, TxnFolder(group), name, 0o777),
        lambda: hand.ctl(f"consumer {quote(name)}"),
        lambda: hand.ctl(f"consumer c {quote(name or '.')}"),  # '' is the whole group
        lambda: hand.ctl(f"bind {quote(name)} '#'"),
        lambda: hand.ctl(f"dead {quote(name)}"),
    ):
        with pytest.raises((errors.BadName, errors.Exists, errors.BadCommand, UnicodeEncodeError)):
            call()
    assert list(group.streams) == ["old"]
    assert list(group.groups) == ["old group"]
    assert not group.consumers
    assert not group.views
    assert not group.transactions.parts


@pytest.mark.parametrize("name", CONTROL)
def test_producers_have_no_control_characters(hand: Hand, name: str) -> None:
    hand.stream("s")
    commands = hand.tree.open(ROOT, TxnCtl(hand.group), os.O_RDWR)
    with pytest.raises((errors.BadName, errors.BadCommand)):
        commands.write(f"commit {quote(f'{name}.1')}".encode())
    assert not hand.group.state.producers


def test_good_names(hand: Hand) -> None:
    for name in ("a", "a.b.c", "with blank", "ä" * 127, "CTL", "\u202ebidi", "a\\b"):
        assert hand.stream(name).name == name


@pytest.mark.parametrize("name", CONTROL)
def test_a_store_with_such_names_is_served_and_they_can_be_renamed_and_removed(tmp_path: Path, name: str) -> None:
    """Earlier versions took them."""
    q = Queues("replay all", path=tmp_path / "store")
    with pytest.MonkeyPatch.context() as patch:
        for module in (names, tree, actions, transactions):
            patch.setattr(module, "check_name", str, raising=False)
            patch.setattr(module, "check_control", str, raising=False)
        q.stream(name)
        q.mkdir(name)
        q.tree.create(ROOT, Folder(q.group, ".consumers"), name, 0o666)
        if "\n" not in name:  # no command could ever say it
            q.ctl(f"bind {quote(f'view{name}')} x", f"dead {quote(name)}")
            q.tree.open(ROOT, TxnCtl(q.group), os.O_RDWR).write(f"commit {quote(f'{name}.1')}".encode())
    q.write(name, b"kept")
    q.restart()
    root, group = q.tree.root, q.group
    assert name in {node.name for node in exhaust(q.tree.entries(ROOT, group))}
    assert json.loads(q.cursor("format json", "seek first").read(4096))["stream"] == name
    commands = q.tree.open(ROOT, TxnCtl(group), os.O_RDWR)
    assert commands.read(4096).count(b"\n") == ("\n" not in name)
    cursor = q.cursor("seek first")
    cursor.read(64)
    cursor.write(b"info\n")
    assert [line.split()[0] for line in cursor.read(4096).decode().split("\n")[:3]] == ["sequence", "stream", "time"]
    q.ctl("ttl 1h")
    q.tree.rename(ROOT, root, name, root, "other")
    q.tree.rename(ROOT, group, name, group, "other")
    q.tree.unlink(ROOT, Folder(group, ".consumers"), name)
    for view in list(group.views):
        q.tree.unlink(ROOT, group, view)
    q.ctl("dead dead")
    assert not any(name in line for line in exhaust(status.ctl(group, ROOT)).splitlines())


def test_making_what_exists(hand: Hand) -> None:
    hand.stream("s")
    hand.tree.mkdir(ROOT, hand.group, "d", 0o777)
    for name in ("s", "d"):
        with pytest.raises(errors.Exists):
            hand.stream(name)
        with pytest.raises(errors.Exists):
            hand.tree.mkdir(ROOT, hand.group, name, 0o777)


def test_rename(hand: Hand) -> None:
    stream, other = hand.stream("a"), hand.mkdir("other")
    hand.stream("b")
    path = stream.qid.path
    hand.tree.rename(ROOT, hand.group, "a", hand.group, "c")
    assert hand.tree.walk(ROOT, hand.group, "c").qid.path == path
    with pytest.raises(errors.Exists):
        hand.tree.rename(ROOT, hand.group, "c", hand.group, "b")
    with pytest.raises(errors.NotPermitted):
        hand.tree.rename(ROOT, hand.group, "c", other, "c")
    with pytest.raises(errors.NotPermitted):
        hand.tree.rename(ROOT, hand.group, "ctl", hand.group, "x")
    with pytest.raises(errors.BadName):
        hand.tree.rename(ROOT, hand.group, "c", hand.group, ".x")
    hand.tree.rename(ROOT, hand.tree.root, "other", hand.tree.root, "new")
    assert other.name == "new"
    assert hand.tree.parent(hand.tree.find(ROOT, "/new/ctl")) is other


def test_removing(hand: Hand) -> None:
    stream = hand.stream("s")
    reader = hand.open("s")
    step = reader.read(64)
    with pytest.raises(errors.NotEmpty):
        hand.tree.rmdir(ROOT, hand.tree.root, "g")
    hand.tree.unlink(ROOT, hand.group, "s")
    assert step.result() == b"", "end-of-file when the stream is removed"
    assert reader.read(64) == b""
    assert stream.removed
    for name in ("ctl", "order", ".cursor", ".stats", ".who", ".errors"):
        hand.tree.unlink(ROOT, hand.group, name)  # so that rm -r works
    waiting = hand.open("order").read(64)
    hand.tree.rmdir(ROOT, hand.tree.root, "g")
    assert waiting.result() == b""
    with pytest.raises(errors.NotFound):
        hand.tree.find(ROOT, "g")
    with pytest.raises(errors.NotFound):
        hand.tree.open(ROOT, stream, os.O_RDONLY)
    with pytest.raises(errors.NotFound):
        hand.stream("again")


def test_a_number_is_never_shared(hand: Hand) -> None:
    seen = set()
    for _ in range(5):
        stream, group = hand.stream("s"), hand.tree.mkdir(ROOT, hand.group, "d", 0o777)
        for node in (stream, group, *(Meta(group, name) for name in META_FILES)):
            assert node.qid.path not in seen
            seen.add(node.qid.path)
        assert group.qid.type == QTDIR
        hand.tree.unlink(ROOT, hand.group, "s")
        hand.tree.rmdir(ROOT, hand.group, "d")


def test_protect(hand: Hand) -> None:
    hand.stream("s")
    hand.ctl("protect on")
    for call in (
        lambda: hand.tree.unlink(ROOT, hand.group, "s"),
        lambda: hand.tree.rename(ROOT, hand.group, "s", hand.group, "t"),
        lambda: hand.tree.rmdir(ROOT, hand.tree.root, "g"),
        lambda: hand.tree.rename(ROOT, hand.tree.root, "g", hand.tree.root, "h"),
        lambda: hand.ctl("clear"),
        lambda: hand.ctl("drop s 1"),
    ):
        with pytest.raises(errors.NotPermitted):
            call()
    hand.ctl("protect off")
    hand.tree.unlink(ROOT, hand.group, "s")


def test_permissions_on_every_operation(hand: Hand) -> None:
    hand.tree.setattr(ROOT, hand.group, mode=0o755)
    stream = hand.stream("s", mode=0o640)
    hand.tree.setattr(ROOT, stream, gid=1001)
    assert hand.open("s", user=BERT).read(1).cancel(), "by the group's bits"
    with pytest.raises(errors.Denied):
        hand.open("s", os.O_WRONLY, user=BERT)
    for call in (
        lambda: hand.stream("t", user=ANNA),
        lambda: hand.tree.mkdir(ANNA, hand.group, "d", 0o777),
        lambda: hand.tree.unlink(ANNA, hand.group, "s"),
        lambda: hand.tree.unlink(ANNA, hand.group, "ctl"),
        lambda: hand.tree.rename(ANNA, hand.group, "s", hand.group, "t"),
    ):
        with pytest.raises(errors.Denied):
            call()
    with pytest.raises(errors.NotPermitted):
        hand.tree.setattr(ANNA, stream, mode=0o777)
    hand.tree.setattr(ROOT, stream, mode=0o606, uid=1001)
    with pytest.raises(errors.Denied):
        hand.tree.open(BERT, stream, os.O_RDONLY)  # in the group: its bits decide, though others may
    with pytest.raises(errors.NotPermitted):
        hand.tree.setattr(ANNA, stream, uid=1002)
    with pytest.raises(errors.NotPermitted):
        hand.tree.setattr(ANNA, stream, gid=4)
    hand.tree.setattr(ROOT, hand.group, mode=0o700)
    with pytest.raises(errors.Denied):
        hand.tree.walk(ANNA, hand.group, "s")
    with pytest.raises(errors.Denied):
        hand.tree.entries(ANNA, hand.group)


def test_in_a_sticky_group_files_are_removed_and_renamed_by_their_owner_or_the_groups(hand: Hand) -> None:
    tree, group = hand.tree, hand.mkdir("sticky", ROOT, 0o1777)
    tree.setattr(ROOT, group, uid=BERT.uid)
    calls = {
        "stream": lambda user: tree.unlink(user, group, "stream"),
        "consumer": lambda user: tree.unlink(user, Folder(group, ".consumers"), "consumer"),
        "inner": lambda user: tree.rmdir(user, group, "inner"),
        "renamed": lambda user: tree.rename(user, group, "renamed", group, "other"),
        "renamed group": lambda user: tree.rename(user, group, "renamed group", group, "another"),
    }

    def make(user: User) -> None:
        for name in ("stream", "renamed"):
            tree.create(user, group, name, 0o666)
        tree.create(user, Folder(group, ".consumers"), "consumer", 0o666)
        for name in ("inner", "renamed group"):
            tree.mkdir(user, group, name, 0o777)

    make(ANNA)
    for name, call in calls.items():
        with pytest.raises(errors.NotPermitted, match=name):
            call(User(1003, 1003))
    for user in (ANNA, BERT, ROOT):
        for call in calls.values():
            call(user)
        tree.unlink(ROOT, group, "other")
        tree.rmdir(ROOT, group, "another")
        make(ANNA)
    tree.setattr(ROOT, group, mode=0o777)
    for call in calls.values():
        call(User(1003, 1003))


def test_attributes_of_meta_files(hand: Hand) -> None:
    ctl = Meta(hand.group, "ctl")
    assert hand.tree.stat(ctl).mode & 0o777 == 0o644
    hand.tree.setattr(ROOT, ctl, mode=0o664, gid=1001)
    assert hand.tree.stat(ctl).mode & 0o777 == 0o664
    hand.ctl("ttl 5s", user=BERT)
    with pytest.raises(errors.Denied):
        hand.open("order", os.O_WRONLY)


@pytest.mark.parametrize("count", [64, 3, 2])
def test_a_read_at_the_same_offset_again_means_what_comes_next(hand: Hand, count: int) -> None:
    hand.stream("s")
    hand.write("s", b"first", b"second")
    reader = hand.open("s")
    assert b"".join(reader.read(count, 0) for _ in range(-(-5 // count) + -(-6 // count))) == b"firstsecond"
    step = reader.read(count, 0)
    assert isinstance(step, Wait)
    assert step.cancel()
    hand.write("s", b"third")
    assert reader.read(64, 100) == b"third"
    assert reader.read(64, 102) == b"ird", "programs read ahead and seek back"


def test_limits(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAMS", 1)
    hand.stream("one")
    with pytest.raises(errors.OverLimit):
        hand.stream("two")
    monkeypatch.setattr(limits, "GROUPS", 2)
    with pytest.raises(errors.OverLimit):
        hand.mkdir("h")
    monkeypatch.setattr(limits, "HANDLES", 1)
    held = hand.open("one")
    with pytest.raises(errors.OverLimit):
        hand.open("one")
    held.close()


def test_no_user_makes_all_groups(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    hand.tree.setattr(ROOT, hand.tree.root, mode=0o777)
    monkeypatch.setattr(limits, "GROUPS", 8)
    for name in "abcd":
        hand.mkdir(name, ANNA)
    with pytest.raises(errors.OverLimit, match=r"too many groups \(expected at most 4 a user, 8 in all"):
        hand.mkdir("e", ANNA)
    hand.mkdir("e", BERT)
    hand.tree.rmdir(ANNA, hand.tree.root, "a")
    hand.mkdir("a", ANNA)
    hand.tree.setattr(ROOT, hand.tree.root.groups["a"], uid=BERT.uid)
    hand.mkdir("f", ANNA)
    with pytest.raises(errors.OverLimit):
        hand.mkdir("h", BERT)  # there are eight


def test_depth_of_nesting(hand: Hand) -> None:
    group = hand.tree.root
    for _ in range(limits.PATH_GROUPS):
        group = hand.tree.mkdir(ROOT, group, "d", 0o777)
    with pytest.raises(errors.OverLimit):
        hand.tree.mkdir(ROOT, group, "d", 0o777)


def test_the_log_of_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", 100_000)
    hand = Hand("replay all")
    hand.stream("s")
    hand.write("s", *[b"x" * 1000 for _ in range(1000)])
    assert hand.group.log.upkeep.size <= 101_100
    assert hand.group.counts.cut > 800
    hand.ctl("full reject")
    with pytest.raises(errors.StreamFull):
        hand.write("s", *[b"x" * 1000 for _ in range(1000)])


def test_too_long(hand: Hand) -> None:
    hand.stream("s")
    hand.write("s", b"x" * limits.MESSAGE_BYTES)
    with pytest.raises(errors.TooLong):
        hand.write("s", b"x" * (limits.MESSAGE_BYTES + 1))
    assert json.loads(hand.text(".stats"))["streams"]["s"]["messages"] == 1


def test_stats_and_who(hand: Hand) -> None:
    hand.stream("s")
    hand.write("s", b"12345", b"678")
    reader = hand.open("s", user=ANNA)
    reader.read(64)
    stats = json.loads(hand.text(".stats"))
    assert stats["written"] == 2
    assert stats["read"] == 1
    assert stats["streams"]["s"] == {
        "number": 16, "messages": 2, "bytes": 8, "floor": 0, "cut": 0, "first": 1, "newest": 2,
        "written": 2, "readers": 1, "waiting": 0, "blocked": 0,
    }  # fmt: skip
    who = [json.loads(line) for line in hand.text(".who").splitlines()]
    assert [(row["file"], row["mode"], row["uid"]) for row in who if row["file"] == "s"] == [("s", "r", 1001)]


def test_who_may_enter_a_group_and_not_list_it_sees_only_streams_that_he_may_read(hand: Hand) -> None:
    for name in ("open", "secret"):
        hand.stream(name)
    hand.tree.setattr(ROOT, hand.group.streams["secret"], mode=0o600)
    hand.tree.setattr(ROOT, hand.group, mode=0o711, uid=BERT.uid)
    hand.ctl("consumer plain", "consumer narrow secret")
    paths = ("open", "secret", ".consumers/narrow", ".kept/secret")
    held = [hand.tree.open(ROOT, hand.tree.find(ROOT, f"g/{path}"), os.O_RDONLY) for path in paths]
    hand.tree.mkdir(ROOT, TxnFolder(hand.group), "part", 0o755)
    held.append(hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.txn/part/secret"), os.O_WRONLY))
    ordered, waiting, every = (hand.open("order", user=user) for user in (ANNA, ANNA, ROOT))
    wait = waiting.read(64)
    hand.write("secret", b"1")
    assert not wait.settled
    assert not ordered.readable
    hand.write("open", b"2")
    assert (wait.result(), ordered.read(64), every.read(64)) == (b"open\0", b"open\0", b"secret\0")
    cursor = hand.cursor("streams", user=ANNA)
    shown = [hand.text(name, ANNA) for name in (".stats", ".who", "ctl")] + [cursor.read(1 << 20).decode()]
    assert not any("secret" in text for text in shown), shown
    assert "open" in shown[0]
    assert "open" in shown[1]
    for user in (ROOT, BERT):
        assert all("secret" in hand.text(name, user) for name in (".stats", ".who", "ctl"))
    hand.tree.setattr(ROOT, hand.group, mode=0o755)
    assert all("secret" in hand.text(name, ANNA) for name in (".stats", ".who", "ctl")), "he may list it"
    for handle in held:
        handle.close()


def test_errors_shows_ones_own_or_all_to_the_owner(hand: Hand) -> None:
    for user in (ANNA, BERT):
        cursor = hand.open(".cursor", os.O_RDWR, user)
        with pytest.raises(errors.BadCommand):
            cursor.write(b"nonsense\n")
    assert len(hand.text(".errors").splitlines()) == 2
    (line,) = hand.text(".errors", user=ANNA).splitlines()
    row = json.loads(line)
    assert (row["uid"], row["file"]) == (1001, ".cursor")
    for _ in range(100):
        with pytest.raises(errors.BadCommand):
            hand.ctl("nonsense")
    assert len(hand.text(".errors").splitlines()) == limits.ERRORS + 2, "and one of each of the others"


def test_idle_streams_are_removed(hand: Hand) -> None:
    for name in ("unused", "open", "full"):
        hand.stream(name)
    held = hand.open("open")
    hand.write("full", b"x")
    hand.ctl("idle 10s")
    hand.clock.forward(9)
    hand.tree.tick()
    assert len(hand.group.streams) == 3
    hand.clock.forward(1)
    hand.tree.tick()
    assert sorted(hand.group.streams) == ["full", "open"]
    held.close()
    hand.clock.forward(9)
    hand.tree.tick()
    assert "open" in hand.group.streams, "idle counts from the last close"
    hand.clock.forward(1)
    hand.tree.tick()
    assert sorted(hand.group.streams) == ["full"]


def test_expiry_ignores_steps_of_the_wall_clock(hand: Hand) -> None:
    hand.ctl("ttl 60s")
    hand.stream("s")
    hand.write("s", b"one")
    hand.clock.wall += 10 * 365 * 86400 * 10**9
    hand.clock.forward(30)
    hand.write("s", b"two")
    hand.clock.wall -= 20 * 365 * 86400 * 10**9
    hand.write("s", b"three")
    times = [json.loads(line)["time"] for line in read_all(hand, "format json")]
    assert times == sorted(times), "record times never go back"
    assert read_all(hand) == [b"one", b"two", b"three"]
    hand.clock.forward(31)
    assert read_all(hand) == [b"two", b"three"]
    hand.tree.tick()
    assert json.loads(hand.text(".stats"))["streams"]["s"]["messages"] == 2
    hand.clock.forward(30)
    hand.tree.tick()
    assert json.loads(hand.text(".stats"))["streams"]["s"]["messages"] == 0


def read_all(hand: Hand, *commands: str) -> list[bytes]:
    cursor = hand.cursor("seek first", "until end", *commands)
    got = []
    while data := cursor.read(4096):
        got.append(data)
    cursor.close()
    return got


def test_closing_answers_everyone(hand: Hand) -> None:
    hand.ctl("depth 1", "full block")
    hand.stream("s")
    hand.stream("t")
    hand.write("s", b"x")
    waits = [hand.open("t").read(64), hand.open("order").read(64), hand.cursor("seek end").read(64)]
    waits[1] = hand.cursor("seek end").read(64)
    blocked = hand.open("s", os.O_WRONLY).write(b"y")
    assert isinstance(blocked, Wait)
    hand.tree.close()
    assert [wait.result() for wait in waits] == [b"", b"", b""]
    with pytest.raises(errors.Interrupted):
        blocked.result()
    assert hand.tree.open_files.count == 0


def test_the_offset_rule(hand: Hand) -> None:
    hand.stream("s")
    hand.write("s", b"one\ntwo\n", b"three\n")
    reader = hand.open("s")
    assert reader.read(128, 0) == b"one\ntwo\n"
    assert reader.read(128, 4) == b"two\n", "a program that read ahead and seeks back"
    assert reader.read(128, 8) == b"three\n"
    both = hand.open("s", os.O_RDWR)
    assert both.sequential
    assert [both.read(4, 0) for _ in range(3)] == [b"one\n", b"two\n", b"thre"]


def test_what_could_not_be_delivered_is_next(hand: Hand) -> None:
    hand.stream("s")
    hand.write("s", b"one", b"two")
    reader = hand.open("s")
    assert reader.read(64, 0) == b"one"
    reader.push_back(b"one")
    assert reader.read(64, 0) == b"one"
    assert reader.read(64, 3) == b"two"
    step = reader.read(64, 6)
    hand.write("s", b"three")
    reader.push_back(step.result())
    assert reader.readable
    assert reader.read(2, 99) == b"th"
    assert reader.read(64, 101) == b"ree"


def test_poll_is_told(hand: Hand) -> None:
    hand.stream("s")
    told = []
    for name, flags in (("s", os.O_RDONLY), ("order", os.O_RDONLY), (".cursor", os.O_RDWR)):
        handle = hand.open(name, flags)
        if name == ".cursor":
            handle.write(b"seek end\n")
        assert not handle.readable
        handle.watch(lambda name=name: told.append(name))  # type: ignore[misc]
    hand.write("s", b"x")
    assert sorted(told) == [".cursor", "order", "s"]


def fill(hand: Hand, count: int = 600) -> int:
    hand.stream("s")
    held = hand.open("s")
    hand.write("s", *[b"x" * 1000] * count)
    assert hand.group.log.upkeep.size > 1000 * count
    held.close()
    return int(hand.group.log.upkeep.size)


def test_what_expired_is_gone_from_the_log_though_nobody_writes_or_reads(hand: Hand) -> None:
    hand.ctl("ttl 10s")
    fill(hand, 5)
    hand.tree.tick()
    hand.clock.forward(11)
    hand.tree.tick()
    assert hand.group.log.upkeep.size < 1000


@pytest.mark.slow
@pytest.mark.parametrize("line", ["clear", "depth 1", "replay off"])
def test_what_ctl_takes_away_is_gone_from_the_log(hand: Hand, line: str) -> None:
    fill(hand)
    hand.tree.tick()
    hand.ctl(line)
    if line == "depth 1":
        hand.write("s", b"y")
    hand.tree.tick()
    assert hand.group.log.upkeep.size < 10_000


def test_what_only_a_reader_held_back_goes_when_it_has_had_it_or_goes() -> None:
    for reads in (True, False):
        hand = Hand("replay off")
        hand.stream("s")
        reader = hand.open("s", os.O_RDWR)
        hand.write("s", *[b"x" * 1000] * 600)
        hand.tree.tick()
        assert hand.group.log.upkeep.size > 600_000
        if reads:
            for _ in range(600):
                reader.read(4096)
        else:
            reader.close()
        hand.tree.tick()
        assert hand.group.log.upkeep.size < 10_000


def test_a_writer_that_gives_up_lets_those_behind_it_go_on(hand: Hand) -> None:
    hand.ctl("replay all\nfull block\ndepth 10B")
    hand.stream("s")
    hand.write("s", b"123456")
    writers = [hand.open("s", os.O_WRONLY) for _ in range(2)]
    first, second = writers[0].write(b"too long now"[:8]), writers[1].write(b"fits")
    assert not first.settled
    assert not second.settled
    assert first.cancel()
    assert second.settled
    assert second.result() == 4


def test_nothing_is_written_to_the_log_of_a_removed_group() -> None:
    """Not by its last readers, nor by what holds its folders."""
    q = Queues()
    q.consumer("w", "transient")
    worker, consumers, log = q.worker(), q.tree.walk(ROOT, q.group, ".consumers"), q.group.log
    q.tree.unlink(ROOT, q.group, "s")
    q.tree.rmdir(ROOT, q.tree.root, "g")
    written: list[object] = []
    log.change = written.append
    worker.close()
    with pytest.raises(errors.NotFound):
        q.tree.create(ROOT, consumers, "new", 0o666)
    assert written == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("v", "a view has mode 444"),
        (".kept", "it has its group's mode"),
        (".consumers", "it has its group's mode"),
        (".kept/s", "it has its stream's mode"),
        (".consumers/.s", "it has its stream's mode"),
        (".txn", "it has mode 1777"),
        (".txn/p", "a part keeps the mode with which it was made"),
        (".txn/p/s", "it has its part's mode"),
        (".txn/p/.put", "it has its part's mode"),
    ],
)
def test_a_file_whose_mode_is_fixed_says_why(path: str, why: str) -> None:
    u = Units("bind v #")
    u.part("p", mode=0o750)
    node: Any = u.tree.find(ROOT, f"g/{path}")
    before = attributes(node)
    with pytest.raises(NotPermitted, match=f"{re.escape(why)}$"):
        u.tree.setattr(ROOT, node, mode=0o600)
    assert attributes(node) == before


class RefusingDisk(Disk):
    refuses = False

    def sync_folder(self, path: str) -> None:
        if self.refuses:
            raise OSError(errno.EIO, "broken")
        super().sync_folder(path)


def test_a_group_that_the_disk_does_not_remove_is_there_again(tmp_path: Path) -> None:
    """Meanwhile there is none, though others are served; it takes names and messages after that."""
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    disk = RefusingDisk()
    store = DiskStore(str(tmp_path / "store"), calls.put, disk)
    files = tree.Tree(store, ManualClock(), owner=ROOT)

    def done(step: Any) -> Any:
        while isinstance(step, Wait) and not step.settled:
            calls.get(timeout=HANG_S)()
        return step.result() if isinstance(step, Wait) else step

    group = done(files.mkdir(ROOT, files.root, "g", 0o777))
    ctl = files.open(ROOT, files.find(ROOT, "g/ctl"), os.O_WRONLY)
    disk.refuses = True
    step = files.rmdir(ROOT, files.root, "g")
    for call in (
        lambda: files.find(ROOT, "g/.put"),
        lambda: files.create(ROOT, group, "s", 0o666),
        lambda: files.mkdir(ROOT, group, "inner", 0o777),
        lambda: files.create(ROOT, Folder(group, ".consumers"), "c", 0o666),
        lambda: files.mkdir(ROOT, TxnFolder(group), "part", 0o777),
        lambda: files.setattr(ROOT, group, mode=0o700),
        lambda: files.rename(ROOT, files.root, "g", files.root, "h"),
        lambda: files.rmdir(ROOT, files.root, "g"),
        lambda: ctl.write(b"replay all\n"),
    ):
        with pytest.raises(errors.NotFound):
            call()
    with pytest.raises(errors.DiskFailed):
        done(step)
    disk.refuses = False
    assert files.find(ROOT, "g") is group
    stream = done(files.create(ROOT, group, "s", 0o666))
    assert done(files.open(ROOT, stream, os.O_WRONLY).write(b"x")) == 1
    done(files.unlink(ROOT, group, "s"))
    done(files.rmdir(ROOT, files.root, "g"))
    assert "g" not in files.root.groups
    files.close()
    store.close()
