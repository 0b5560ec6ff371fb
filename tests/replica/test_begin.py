"""A store that has messages already gets a log: no one follows, restores or takes over without its older segments."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica import checkpoint, state
from mqfs.replica.following import open_follower
from mqfs.replica.frame import decode
from mqfs.replica.log import NoAnswer, Position, ReplicatedLog, Stopped, Writer, open_log
from mqfs.replica.objects import FileObjects
from mqfs.replica.restore import Point, restore
from mqfs.replica.state import ReplicaState
from mqfs.replica.takeover import Primary, _append_takeover, become_primary
from mqfs.store.disk import Disk
from mqfs.store.replication import Replication
from mqfs.store.standby import StandbyStore
from mqfs.store.store import read_label
from tests.replica.primary import LocalPrimary, LocalStandby, bodies_of, restored
from tests.replica.test_copies import EACH, are_equal
from tests.support.eventually import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]
BODIES = [b"%d" % number + b"x" * 3_000 for number in range(30)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPLICA_BEAT_S", 0.2), ("REPLICA_STATE_S", 0.1), ("SEGMENT_BYTES", 20_000)):
        monkeypatch.setattr(limits, name, value)


def older_store(tmp_path: Path, name: str = "a", bodies: list[bytes] = BODIES) -> Path:
    """A store of several segments, without a log."""
    path = tmp_path / name
    first = LocalPrimary(path, f"file://{tmp_path}/other-{name}")
    for body in bodies:
        first.append(1, body)
    first.wait(1, len(bodies))
    first.stop()
    state.remove(str(path))
    return path


def ends_of(path: Path) -> tuple[uuid.UUID, dict[int, tuple[int, int]]]:
    """The number of a store, and the newest segment of each group."""
    number = uuid.UUID(read_label(Disk(), str(path))[0])
    holder = StandbyStore(str(path), str(number))
    found = {group: (first, 0) for group, (first, _) in holder.positions().items()}
    holder.close()
    return number, found


def on_each_part(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Call that before a part of a checkpoint is sent."""
    put = FileObjects.put

    def put_later(self: FileObjects, name: str, data: bytes) -> None:
        if name.startswith("segment/"):
            do()
        put(self, name, data)

    monkeypatch.setattr(FileObjects, "put", put_later)


def test_a_standby_does_not_take_over_while_an_older_store_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, path = f"file://{tmp_path}/replica", older_store(tmp_path)
    sending, sent, found = threading.Event(), threading.Event(), list[Primary]()

    def wait() -> None:
        sending.set()
        sent.wait()

    on_each_part(monkeypatch, wait)
    starting = threading.Thread(target=lambda: found.append(become_primary(open_log(url), str(path), "tcp!a!5640")))
    starting.start()
    sending.wait(HANG_S)
    standby = LocalStandby(tmp_path / "b", url, failover_s=1.5)
    standby.thread.join(4.0)
    took_over = not standby.thread.is_alive()
    sent.set()
    starting.join()
    assert not took_over, standby.failed
    primary = LocalPrimary(path, url, found[0])
    assert eventually(lambda: are_equal(path, tmp_path / "b"))
    standby.stop()
    primary.stop()
    assert bodies_of(tmp_path / "b", 1) == BODIES


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_an_older_store_is_whole_after_a_start_that_ended_while_it_was_copied(
    tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLICA_PART_BYTES", 10_000)
    url, path = f"file://{tmp_path}/replica", older_store(tmp_path)
    left = [parts]

    def fail() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise NoAnswer("the server is gone")

    with monkeypatch.context() as failing:
        on_each_part(failing, fail)
        with closing(open_log(url)) as log, pytest.raises(NoAnswer):
            become_primary(log, str(path), "")
    LocalPrimary(path, url).stop()
    check_restored(tmp_path, url)


def check_restored(tmp_path: Path, url: str, bodies: list[bytes] = BODIES) -> None:
    restored(url, tmp_path / "r")
    assert bodies_of(tmp_path / "r", 1) == bodies


@EACH
def test_a_log_that_began_without_its_older_segments_gets_a_checkpoint(tmp_path: Path, url: str) -> None:
    """As by a server that was killed before it had made one: it appended its takeover first."""
    path = older_store(tmp_path)
    number, have = ends_of(path)
    log = open_log(url)
    writer = Writer(Position(), number, uuid.uuid4())
    begun = ReplicaState(Position(store=number), have, [writer.run], True)
    state.write(str(path), begun)
    assert _append_takeover(log, writer, "", None)
    primary = LocalPrimary(path, url)
    assert eventually(lambda: checkpoint.newest(log) is not None)
    primary.stop()
    log.close()
    check_restored(tmp_path, url)


@EACH
def test_the_checkpoints_of_those_that_began_a_log_in_vain_count_for_nothing(tmp_path: Path, url: str) -> None:
    path, other = older_store(tmp_path), older_store(tmp_path, "other", BODIES[::-1])
    number, have = ends_of(other)
    log = open_log(url)
    for position in range(8):  # also of the same second: none replaces that of the winner
        late = {group: (first, position * 8) for group, (first, _) in have.items()}
        checkpoint.Checkpointer(log, str(other)).make(Position(store=number), late)
    primary = LocalPrimary(path, url)
    checkpoint.Checkpointer(log, str(other)).make(Position(store=number), have)
    standby = LocalStandby(tmp_path / "b", url)
    assert eventually(lambda: are_equal(path, tmp_path / "b"))
    standby.stop()
    keeper = primary.replicator._keeper
    assert len(log.objects.list("checkpoint/")) == 9
    keeper._make_checkpoint(*keeper._take()[:2])
    assert len(log.objects.list("checkpoint/")) == 1
    primary.append(1, b"last")
    primary.wait(1, 1)
    primary.stop()
    log.close()
    check_restored(tmp_path, url, [*BODIES, b"last"])


@EACH
def test_a_log_whose_first_checkpoint_is_gone_is_not_followed_without_it(tmp_path: Path, url: str) -> None:
    path, log = older_store(tmp_path), open_log(url)
    LocalPrimary(path, url).stop()
    for name in log.objects.list("checkpoint/"):
        log.objects.delete(name)
    with pytest.raises(BadReplica, match="follows frame 0, not 0"):
        restore(log, str(tmp_path / "r"), Point())
    standby = LocalStandby(tmp_path / "b", url, failover_s=0.5)
    standby.thread.join(2.0)
    assert standby.thread.is_alive()
    assert not (tmp_path / "b/replica").exists()
    standby.stop()
    log.close()


def test_a_start_that_copies_an_older_store_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_PART_BYTES", 1_000)
    url, path = f"file://{tmp_path}/replica", older_store(tmp_path)
    stop, sent = threading.Event(), list[Any]()

    def end() -> None:
        sent.append(None)
        stop.set()

    on_each_part(monkeypatch, end)
    with closing(open_log(url)) as log:
        with pytest.raises(Stopped):
            become_primary(log, str(path), "", stop)
        assert len(sent) == 1
        assert log.newest(0) is None


@EACH
def test_empty_frames_are_appended_while_the_logs_are_opened(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a standby takes over from a primary that has many of them, and opens them as long."""
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"one")
    first.wait(1, 1)
    first.stop_copying()
    first.append(1, b"two")
    first.bucket(1).upkeep.sync()
    first.kill()
    log, opened, open_all = open_log(url), list[bool](), Replication.open_all
    before = log.newest(0)
    assert before is not None

    def open_late(self: Replication) -> Iterator[None]:
        eventually(lambda: log.newest(before.number + 3) is not None, "frames while no log is open")
        records = [log.get(before.number + number) for number in range(2, 5)]
        opened.extend(bool(data is not None and decode(data).entries) for data in records)
        return open_all(self)

    monkeypatch.setattr(Replication, "open_all", open_late)
    second = LocalPrimary(tmp_path / "a", url)
    second.stop()
    log.close()
    assert opened == [False] * 3
    check_restored(tmp_path, url, [b"one", b"two"])


def grown(tmp_path: Path, url: str) -> tuple[ReplicatedLog, uuid.UUID, str]:
    """A log of two servers on one store, with a checkpoint between them: its number, and the checkpoint's name."""
    log = open_log(url)
    for part in range(2):
        primary = LocalPrimary(tmp_path / "a", url)
        for number in range(8):
            primary.append(1, b"%d.%d" % (part, number) + b"x" * 1_000)
            primary.wait(1, number + 1)
        primary.stop()
        if not part:
            made = make_checkpoint(log, tmp_path / "a")
    assert made.position.store is not None
    return log, made.position.store, made.name


def make_checkpoint(log: ReplicatedLog, path: Path) -> checkpoint.Checkpoint:
    found = state.read(str(path))
    assert found is not None
    return checkpoint.Checkpointer(log, str(path)).make(found.position, found.have)


@EACH
def test_a_copy_begins_again_where_a_newer_checkpoint_replaced_its_own(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parts go while it reads them, as it takes longer than --replica-keep."""
    log, store, older = grown(tmp_path, url)
    made, get, asked = list[str](), type(log.objects).get, threading.RLock()

    def replace(objects: Any, name: str) -> bytes | None:
        with asked:
            if name.startswith("segment/") and not made:
                made.append("")
                old, other = checkpoint.load(log, older), open_log(url)
                made[0] = make_checkpoint(other, tmp_path / "a").name
                new = checkpoint.load(other, made[0])
                assert old is not None
                assert new is not None
                parts = [{part.name for one in each.segments for part in one.parts} for each in (old, new)]
                other.objects.delete(older, *(parts[0] - parts[1]))
                other.close()
        return get(objects, name)

    monkeypatch.setattr(type(log.objects), "get", replace)
    with closing(open_follower(log, str(tmp_path / "b"), store)) as follower:
        follower.catch_up()
    log.close()
    assert made[0] > older
    assert f"longer than --replica-keep: {made[0]} is newer" in caplog.text
    assert are_equal(tmp_path / "a", tmp_path / "b")


def test_a_copy_of_a_damaged_checkpoint_that_is_the_newest_ends(tmp_path: Path) -> None:
    log, store, name = grown(tmp_path, f"file://{tmp_path}/replica")
    made = checkpoint.load(log, name)
    assert made is not None
    log.objects.delete(made.segments[0].parts[0].name)
    with pytest.raises(BadReplica, match=r"missing \(expected"):
        open_follower(log, str(tmp_path / "b"), store)
    log.close()
