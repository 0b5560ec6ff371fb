"""`sync replica`: a message is shown when the replica has it, wherever one looks, and its writer is answered then."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.store.memory import MemoryStore
from mqfs.store.standby import StandbyStore
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.copied import follow
from tests.support.hand import ROOT
from tests.support.queues import BIG, Queues, drain, read, say, waits

REPLICA = "replay all", "sync replica"


class Copied(Queues):
    """Queues whose store has a replica, which is made to follow by hand."""

    def __init__(self, path: Path, *lines: str) -> None:
        self.clock, self.path = ManualClock(), path
        self.store = DiskStore(str(path / "store"), replica=lambda: None)
        self.standby = StandbyStore(str(path / "standby"), self.store.uuid)
        self.tree = Tree(self.store, self.clock, owner=ROOT)
        self.group = self.mkdir("g")
        self.ctl("sync off", *lines)
        self.stream("s")
        self.confirm()

    def confirm(self) -> None:
        """The replica has all that was written until now."""
        self.standby.apply(follow(self.store.replication))

    def send(self, body: bytes, name: str = "s") -> Wait[int]:
        """A write that waits for the replica."""
        step = self.at(name, os.O_WRONLY).write(body)
        assert isinstance(step, Wait)
        assert not step.cancel()
        return step

    def taken_over(self) -> Queues:
        """The store of the standby, served; it must not follow any more."""
        self.standby.close()
        new = Queues.__new__(Queues)
        new.clock, new.path = self.clock, self.path / "standby"
        new.store = DiskStore(str(new.path))
        new.tree = Tree(new.store, new.clock, owner=ROOT)
        new.group = new.tree.root.groups["g"]
        return new

    def close(self) -> None:
        with suppress(errors.MqfsError):
            self.standby.close()
        super().close()


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Callable[..., Copied]]:
    made: list[Copied] = []

    def make(*lines: str) -> Copied:
        made.append(Copied(tmp_path / str(len(made)), *(lines or REPLICA)))
        (tmp_path / str(len(made))).mkdir()
        return made[-1]

    (tmp_path / "0").mkdir()
    yield make
    for each in made:
        each.tree.close()
        each.store.close()


Look = Callable[[Copied], Any]


def by_cursor(*commands: str) -> Look:
    def look(u: Copied) -> Any:
        return drain(u.cursor(*commands), ack=False)

    return look


def snapshot(u: Copied) -> Any:
    node = u.tree.find(ROOT, "g/.kept/s")
    return u.tree.open(ROOT, node, os.O_RDONLY).read(BIG, 0)


def stats(u: Copied) -> Any:
    found = json.loads(u.text(".stats"))
    row = found["streams"]["s"]
    return found["next"], found["written"], row["messages"], row["newest"], row["bytes"]


def readable(u: Copied) -> Any:
    return u.at("s").readable, u.at("order").readable


def consumed(u: Copied) -> Any:
    return u.stats()["waiting"], waits(u.at(".consumers/w", os.O_RDWR))


LOOKS: dict[str, Look] = {
    "a stream": lambda u: waits(u.at("s")),
    "order": lambda u: waits(u.at("order")),
    "a view": lambda u: waits(u.at("v")),
    "poll": readable,
    ".kept": snapshot,
    ".stats": stats,
    "a consumer": consumed,
    "a consumer that is looked at": lambda u: u.shows(".consumers/w"),
    "a cursor": by_cursor("seek first"),
    "a cursor by time": by_cursor("seek @1"),
    "a cursor's last": by_cursor("seek last"),
    "json": by_cursor("seek first", "format json"),
    "record": by_cursor("seek first", "format record"),
    "until the end": by_cursor("seek first", "until end"),
    "from the end": by_cursor("seek -3"),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_message_is_shown_when_the_replica_has_it(copied: Callable[..., Copied], look: Look) -> None:
    u = copied(*REPLICA, "bind v #", "consumer w")
    before = look(u)
    sent = [u.send(b"%d" % number) for number in range(40)]
    assert look(u) == before
    assert not any(step.settled for step in sent)
    u.confirm()
    assert look(u) != before
    assert [step.result() for step in sent] == [1] * 10 + [2] * 30


def test_readers_that_wait_get_it_before_its_writer_is_answered(copied: Callable[..., Copied]) -> None:
    u = copied(*REPLICA, "consumer w")
    order: list[str] = []
    for name in ("s", "order", ".cursor", ".consumers/w"):
        handle = u.at(name, os.O_RDWR if name.startswith(".") else os.O_RDONLY)
        handle.read(64).subscribe(lambda step, name=name: order.append(name))  # type: ignore[misc]
    handle = u.at("s")
    handle.watch(lambda: order.append("poll"))
    u.send(b"x").subscribe(lambda step: order.append("writer"))
    assert order == []
    u.confirm()
    assert sorted(order[:-1]) == [".consumers/w", ".cursor", "order", "poll", "s"]
    assert order[-1] == "writer"


def test_a_batch_a_transaction_and_an_id_wait_as_one(copied: Callable[..., Copied]) -> None:
    u = copied()
    put = u.at(".put", os.O_RDWR)
    again = [put.write(b'{"stream":"s","id":"a"} one') for _ in range(2)]
    u.tree.mkdir(ROOT, u.tree.find(ROOT, "g/.txn"), "p", 0o755)
    for body in (b"two", b"three"):
        u.at(".txn/p/s", os.O_WRONLY).write(body)
    commit = u.at(".txn/ctl", os.O_WRONLY).write(b"commit me.1 p\n")
    assert not any(step.settled for step in (*again, commit))
    reader = u.at("s")
    assert waits(reader)
    u.confirm()
    assert all(step.settled for step in (*again, commit))
    assert drain(reader, ack=False) == [b"one", b"two", b"three"]
    assert [row["body"] for row in u.kept()] == ["one", "two", "three"]


def test_work_is_offered_acked_and_buried_in_the_replica_first(copied: Callable[..., Copied]) -> None:
    u = copied("deliver one", "sync replica", "retries 1", "backoff 0 0")
    job = u.send(b"job")
    worker = u.at(".consumers/.s", os.O_RDWR)
    step = worker.read(64)
    assert isinstance(step, Wait)
    u.confirm()
    assert (job.result(), step.result()) == (3, b"job")
    nacked = worker.write(b"nack\n")
    assert not nacked.settled
    assert "dead" in u.group.streams
    assert u.row("dead")["messages"] == 0
    u.confirm()
    assert nacked.settled
    assert u.row("dead")["messages"] == 1
    second = u.send(b"more")
    u.confirm()
    assert second.settled
    assert read(worker) == b"more"
    acked = worker.write(b"ack\n")
    assert not acked.settled
    u.confirm()
    assert acked.result() == 4


def test_delayed_messages_come_when_they_are_due_and_replicated(copied: Callable[..., Copied]) -> None:
    u = copied()
    put = u.at(".put", os.O_RDWR).write(b'{"stream":"s","delay":"5s"} late')
    other = u.at(".put", os.O_RDWR).write(b'{"stream":"s","delay":"9s"} later')
    assert not put.settled
    u.pass_time(6)
    assert waits(u.at("s")), "due, and not replicated"
    u.confirm()
    assert put.settled
    assert other.settled
    assert [row["body"] for row in u.kept()] == ["late"]
    u.pass_time(6)
    u.confirm()
    assert [row["body"] for row in u.kept()] == ["late", "later"]


def test_what_waits_counts_against_depth(copied: Callable[..., Copied]) -> None:
    u = copied(*REPLICA, "depth 2", "full reject")
    sent = [u.send(b"a"), u.send(b"b")]
    with pytest.raises(errors.StreamFull):
        u.at("s", os.O_WRONLY).write(b"c")
    u.confirm()
    assert all(step.settled for step in sent)
    with pytest.raises(errors.StreamFull):
        u.at("s", os.O_WRONLY).write(b"c")


def test_a_takeover_has_all_that_was_shown_and_all_that_was_answered(copied: Callable[..., Copied]) -> None:
    u = copied(*REPLICA, "consumer w")
    answered = []
    for number in range(30):
        step = u.send(b"%d" % number)
        if number % 7 == 3:
            u.confirm()
            answered.append(number)
        del step
    shown = [row["body"] for row in u.kept()]
    new = u.taken_over()
    assert [row["body"] for row in new.kept()] == shown == [str(number) for number in range(answered[-1] + 1)]
    assert drain(new.worker("w")) == [body.encode() for body in shown]
    new.close()


def test_another_sync_shows_what_waits(copied: Callable[..., Copied]) -> None:
    u = copied()
    sent = [u.send(b"a"), u.send(b"b")]
    u.ctl("sync always")
    assert [step.result() for step in sent] == [1, 1]
    assert [row["body"] for row in u.kept()] == ["a", "b"]
    u.write("s", b"c")
    assert [row["body"] for row in u.kept()] == ["a", "b", "c"]
    u.confirm()
    assert [row["body"] for row in u.kept()] == ["a", "b", "c"]
    assert u.group.log.shown is None


def test_a_fenced_server_shows_and_acknowledges_nothing_more(copied: Callable[..., Copied]) -> None:
    u = copied()
    reader = u.at("s")
    parked = reader.read(64)
    sent = u.send(b"x")
    u.store.replication.fail(OSError(5, "this server is no longer the primary"))
    with pytest.raises(errors.DiskFailed, match="not replicated: this server is no longer the primary"):
        sent.result()
    assert not parked.settled
    assert u.kept() == []
    with pytest.raises(errors.ReadOnly, match="no longer the primary"):
        u.at("s", os.O_WRONLY).write(b"y")
    parked.cancel()


def test_a_removed_stream_and_a_removed_group_are_answered_by_the_replica(copied: Callable[..., Copied]) -> None:
    u = copied()
    sent = u.send(b"x")
    gone = u.tree.unlink(ROOT, u.group, "s")
    u.confirm()
    assert (sent.result(), gone.result()) == (1, None)
    assert u.store.open(u.group.number).end.next == 2
    group = u.tree.rmdir(ROOT, u.tree.root, "g")
    assert isinstance(group, Wait)
    assert not group.settled
    u.confirm()
    assert group.result() is None
    assert u.standby.positions().keys() == {1}


def test_it_is_refused_where_there_is_no_replica(tmp_path: Path, copied: Callable[..., Copied]) -> None:
    u = Queues(path=tmp_path / "plain")
    with pytest.raises(errors.BadCommand, match="the server has no replica"):
        u.at("ctl", os.O_WRONLY).write(b"sync replica\n")
    with pytest.raises(errors.BadCommand, match="the server has no replica"):
        Tree(MemoryStore(), ManualClock(), owner=ROOT, defaults=["sync replica"])
    v = copied()
    for line in (b"keep ring\n", b"sync off\nkeep ring\nsync replica\n"):
        with pytest.raises(errors.BadCommand, match="sync replica"):
            v.at("ctl", os.O_WRONLY).write(line)


def test_a_server_without_a_replica_takes_no_messages_into_such_a_group(copied: Callable[..., Copied]) -> None:
    u = copied(*REPLICA, "consumer w")
    u.send(b"kept")
    u.confirm()
    new = u.taken_over()
    worker = new.worker("w")
    assert read(worker) == b"kept"
    say(worker, "ack")
    for write in (
        lambda: new.at("s", os.O_WRONLY).write(b"x"),
        lambda: new.at(".put", os.O_WRONLY).write(b'{"stream":"s"} x'),
        lambda: new.at(".put", os.O_WRONLY).write(b'{"stream":"s","delay":"1s"} x'),
    ):
        with pytest.raises(errors.ReadOnly, match="the server has no replica"):
            write()
    new.ctl("sync always")
    new.write("s", b"x")
    assert [row["body"] for row in new.kept()] == ["kept", "x"]
    new.close()


def test_new_groups_wait_for_the_replica_where_that_is_their_default(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path / "store"), replica=lambda: None)
    tree = Tree(store, ManualClock(), owner=ROOT, defaults=["sync replica"])
    step = tree.mkdir(ROOT, tree.root, "g", 0o755)
    assert isinstance(step, Wait)
    assert store.replication is not None
    list(follow(store.replication))
    assert step.result().name == "g"  # type: ignore[union-attr]
    tree.close()
    store.close()


def test_the_lag_is_in_stats(copied: Callable[..., Copied]) -> None:
    u = copied()
    assert [json.loads(u.text(".stats"))[key] for key in ("replica_lag_bytes", "replica_lag_seconds")] == [0, 0]
    u.send(b"x" * 1000)
    lag = json.loads(u.text(".stats"))
    assert lag["replica_lag_bytes"] == 1032
    assert lag["replica_lag_seconds"] >= 0
    assert u.store.replication.lag_bytes == 1032
    u.confirm()
    assert json.loads(u.text(".stats"))["replica_lag_bytes"] == 0


def test_a_server_that_stops_answers_its_writers(copied: Callable[..., Copied]) -> None:
    u = copied()
    sent = u.send(b"x")
    u.tree.close()
    with pytest.raises(errors.DiskFailed, match="not replicated: the server stops"):
        sent.result()


def test_a_kill_keeps_what_was_written_and_not_shown(copied: Callable[..., Copied]) -> None:
    """It is on this disk: the server that starts on it has to bring the replica up to date before it shows it."""
    u = copied()
    u.send(b"x")
    path = u.path / "killed"
    shutil.copytree(u.path / "store", path)
    store = DiskStore(str(path), replica=lambda: None)
    copies: Any = store.replication
    copies.begin(u.standby.positions())
    list(copies.open_all())
    u.standby.apply(follow(copies))
    new = u.taken_over()
    assert [row["body"] for row in new.kept()] == ["x"]
    new.close()
    store.close()


def test_a_group_whose_message_waits_is_not_empty(copied: Callable[..., Copied]) -> None:
    u = copied()
    sent = u.send(b"x")
    with pytest.raises(errors.Busy, match="'s' has 1 messages"):
        u.ctl("deliver one")
    u.confirm()
    assert sent.result() == 1
    assert snapshot(u) == b"x"
