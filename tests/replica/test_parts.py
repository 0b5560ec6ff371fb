"""Parts of checkpoints that were not made: they go, and no checkpoint that is there or comes loses one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.model import Record
from mqfs.replica import checkpoint
from mqfs.replica.checkpoint import Checkpoint, Checkpointer
from mqfs.replica.log import NoAnswer, Position, ReplicatedLog, Stopped, open_log
from mqfs.replica.restore import Point, restore
from mqfs.replica.state import Have
from mqfs.store.check import check
from mqfs.store.store import DiskBucket
from tests.replica.primary import LocalPrimary, bodies_of
from tests.support.eventually import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]
EACH = pytest.mark.parametrize("url", ["file", "nats", "s3"], indirect=True)


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are small, and the keepers make no checkpoints themselves."""
    for name, value in (("REPLICA_BEAT_S", 0.2), ("REPLICA_STATE_S", 3_600.0), ("SEGMENT_BYTES", 20_000)):
        monkeypatch.setattr(limits, name, value)


@pytest.fixture
def log(url: str) -> Iterator[ReplicatedLog]:
    with closing(open_log(url)) as log:
        yield log


def parts_of(log: ReplicatedLog) -> set[str]:
    return set(log.objects.list("segment/"))


def names_of(made: Checkpoint) -> set[str]:
    return {part.name for segment in made.segments for part in segment.parts}


def grow(primary: LocalPrimary, first: int, count: int) -> None:
    for number in range(first, first + count):
        primary.append(1, b"%d." % number + b"x" * 15_000)
        primary.wait(1, len(primary.acknowledged.get(1, ())) + 1)


def copied(primary: LocalPrimary) -> tuple[Position, Have]:
    position, have, _ = primary.replicator._keeper._take()
    return position, have


def killed() -> int:
    """In place of a frame after all parts: none comes any more."""
    raise Stopped


def send_parts(primary: LocalPrimary, maker: Checkpointer) -> None:
    """All parts of a checkpoint that is not made."""
    with pytest.raises(Stopped):
        maker.make(*copied(primary), killed)


def make(primary: LocalPrimary, keep_s: float = 0) -> Checkpoint:
    """A checkpoint by the keeper, and what is to go then."""
    keeper = primary.replicator._keeper
    keeper._keep_s = keep_s
    making = threading.Thread(target=keeper._make_checkpoint, args=copied(primary))
    making.start()
    primary.run(lambda: not making.is_alive())
    made = checkpoint.newest(primary.primary.log)
    assert made is not None
    return made


def check_restored(log: ReplicatedLog, primary: LocalPrimary, to: Path) -> None:
    restore(log, str(to), Point())
    assert bodies_of(to, 1) == bodies_of(primary.path, 1)
    assert check(str(to), report=print) == 0


@EACH
def test_parts_of_a_primary_that_was_killed_go_when_the_next_one_has_a_checkpoint(
    tmp_path: Path, url: str, log: ReplicatedLog
) -> None:
    for number in range(3):
        primary = LocalPrimary(tmp_path / "a", url)
        grow(primary, 10 * number, 6)
        send_parts(primary, Checkpointer(log, str(primary.path)))
        primary.kill()
    assert len(parts_of(log)) > 5
    primary = LocalPrimary(tmp_path / "a", url)
    grow(primary, 30, 1)
    made = make(primary)
    assert parts_of(log) == names_of(made)
    primary.stop()
    check_restored(log, primary, tmp_path / "r")


@EACH
def test_what_a_primary_sent_in_vain_goes_when_it_makes_a_checkpoint(
    tmp_path: Path, url: str, log: ReplicatedLog
) -> None:
    primary = LocalPrimary(tmp_path / "a", url)
    grow(primary, 0, 7)
    send_parts(primary, primary.replicator._keeper._checkpoints)  # the newest segment has more bytes later
    sent = parts_of(log)
    grow(primary, 10, 1)
    made = make(primary, keep_s=3_600)
    assert parts_of(log) == names_of(made) != sent
    assert parts_of(log) & sent  # what is the same is not sent again
    primary.stop()
    check_restored(log, primary, tmp_path / "r")


@EACH
def test_parts_of_a_checkpoint_that_is_kept_or_may_still_come_stay(
    tmp_path: Path, url: str, log: ReplicatedLog
) -> None:
    first = LocalPrimary(tmp_path / "a", url)
    grow(first, 0, 7)
    kept = make(first)
    eventually(lambda: time.time() > kept.time_s)
    grow(first, 10, 2)
    send_parts(first, Checkpointer(log, str(first.path)))
    first.kill()
    second = LocalPrimary(tmp_path / "a", url)
    sent = parts_of(log)
    grow(second, 20, 2)
    made = make(second, keep_s=3_600)  # the first one stays the oldest: none is that old
    assert parts_of(log) == sent | names_of(made)
    keeper = second.replicator._keeper
    keeper._checkpoints.prune(made.time_s - kept.time_s, made.time_s)  # the first one is the oldest: by its time
    assert checkpoint.load(log, kept.name) == kept
    assert parts_of(log) == sent | names_of(made)
    keeper._checkpoints.prune(0, made.time_s)
    assert parts_of(log) == names_of(made)
    second.stop()
    check_restored(log, second, tmp_path / "r")


@EACH
def test_a_checkpoint_of_an_old_primary_that_comes_late_breaks_nothing(
    tmp_path: Path, url: str, log: ReplicatedLog
) -> None:
    """It had all parts and its frame, then stood still until its successor had made one."""
    first = LocalPrimary(tmp_path / "a", url)
    grow(first, 0, 7)
    late = make(first, keep_s=3_600)  # no frame goes
    data = log.objects.get(late.name)
    assert data is not None
    log.objects.delete(late.name)
    first.kill()
    second = LocalPrimary(tmp_path / "a", url)
    grow(second, 20, 2)
    made = make(second)
    assert not names_of(late) & parts_of(log)
    log.objects.put(late.name, data)
    assert checkpoint.newest(log) == made
    check_restored_to_time(log, second, tmp_path / "r")
    grow(second, 30, 1)
    made = make(second)
    assert checkpoint.list_names(log) == [made.name]
    assert parts_of(log) == names_of(made)
    second.stop()
    check_restored(log, second, tmp_path / "s")


def check_restored_to_time(log: ReplicatedLog, primary: LocalPrimary, to: Path) -> None:
    restore(log, str(to), Point(primary.primary.writer.position.time_ns))
    assert len(bodies_of(to, 1)) == 9


@EACH
def test_a_primary_removes_nothing_before_a_frame_after_its_checkpoint(
    tmp_path: Path, url: str, log: ReplicatedLog
) -> None:
    """Else a successor that has not seen it begins with parts of the one before it, which go."""
    first = LocalPrimary(tmp_path / "a", url)
    grow(first, 0, 7)
    before = make(first)
    grow(first, 10, 4)
    keeper = first.replicator._keeper
    position, have = copied(first)
    frames = iter([position.number])

    def follow() -> int:
        """A frame after the parts; before the next one another server takes over."""
        if (number := next(frames, None)) is None:
            raise Stopped
        return number

    with pytest.raises(Stopped):
        keeper._checkpoints.make(position, have, follow)
    newest = checkpoint.newest(log)
    assert newest is not None
    assert newest.name > before.name
    assert names_of(before) <= parts_of(log)
    first.kill()


@EACH
@pytest.mark.parametrize("comes", ["at once", "late"])
def test_a_checkpoint_without_an_answer_keeps_its_parts(
    tmp_path: Path, url: str, log: ReplicatedLog, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, or comes when the next one was made and old parts were removed."""
    primary = LocalPrimary(tmp_path / "a", url)
    grow(primary, 0, 7)
    objects, sent = primary.primary.log.objects, list[tuple[str, bytes]]()

    def lose_answer(name: str, data: bytes) -> None:
        if name.startswith("checkpoint/"):
            sent.append((name, data))
            if comes == "late":
                raise NoAnswer("lost")
        type(objects).put(objects, name, data)
        if sent:
            raise NoAnswer("lost")

    with monkeypatch.context() as faulty:
        faulty.setattr(objects, "put", lose_answer)
        with pytest.raises(NoAnswer):
            primary.replicator._keeper._checkpoints.make(*copied(primary))
    until = Point(primary.primary.writer.position.time_ns)
    grow(primary, 10, 3)
    make(primary, keep_s=3_600)
    name, data = sent[0]
    if comes == "late":
        log.objects.put(name, data)
    unanswered = checkpoint.load(log, name)
    assert unanswered is not None
    assert names_of(unanswered) <= parts_of(log)
    restore(log, str(tmp_path / "r"), until)
    assert len(bodies_of(tmp_path / "r", 1)) == 7
    made = make(primary, keep_s=-1)  # the restores to it are over
    assert checkpoint.list_names(log) == [made.name]
    assert parts_of(log) == names_of(made)
    primary.stop()
    check_restored(log, primary, tmp_path / "s")


def test_parts_of_long_ago_are_not_sent_again(tmp_path: Path) -> None:
    """Each start of a primary is an epoch."""
    url = f"file://{tmp_path}/replica"
    primary = LocalPrimary(tmp_path / "a", url)
    grow(primary, 0, 5)
    before = make(primary)
    for _ in range(10):
        primary.stop()
        primary = LocalPrimary(tmp_path / "a", url)
    made = make(primary)
    assert made.position.epoch == 11
    assert before.segments[0] in made.segments
    assert names_of(made) == parts_of(primary.primary.log)
    primary.stop()


def test_checkpoints_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each has is known then; and nothing is removed while one that is listed cannot be read."""
    url = f"file://{tmp_path}/replica"
    first = LocalPrimary(tmp_path / "a", url)
    grow(first, 0, 3)
    hidden = make(first, keep_s=3_600).name
    first.stop()
    primary = LocalPrimary(tmp_path / "a", url)
    objects, read = primary.primary.log.objects, list[str]()
    lost = "segment/2/1-9-0-1-00000000"
    objects.put(lost, b"x")

    def get(name: str) -> bytes | None:
        read.append(name)
        return None if name == hidden else type(objects).get(objects, name)

    monkeypatch.setattr(objects, "get", get)
    make(primary, keep_s=3_600)
    assert lost in parts_of(primary.primary.log)
    hidden = ""
    make(primary, keep_s=3_600)
    assert lost not in parts_of(primary.primary.log)
    for _ in range(3):
        grow(primary, 10, 1)
        read.clear()
        made = make(primary, keep_s=3_600)  # which reads that one
        assert [name for name in read if name.startswith("checkpoint/")] == [made.name]
    monkeypatch.undo()
    primary.stop()


def test_a_prune_that_fails_is_no_failed_checkpoint_and_frames_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    primary = LocalPrimary(tmp_path / "a", f"file://{tmp_path}/replica")
    grow(primary, 0, 5)

    def fail() -> None:
        raise NoAnswer("no disk")

    monkeypatch.setattr(primary.primary.log.objects, "remove_stale_uploads", fail)
    before = primary.primary.writer.position.number
    made = make(primary)
    assert made.position.number >= before
    numbers = [int(name[4:]) for name in primary.primary.log.objects.list("log/")]
    assert [number for number in numbers if number < made.position.number] == [1]
    assert "old frames and checkpoints not all removed: no disk" in caplog.text
    assert "no checkpoint:" not in caplog.text
    primary.stop()


def test_a_list_without_the_newest_checkpoint_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    primary = LocalPrimary(tmp_path / "a", f"file://{tmp_path}/replica")
    grow(primary, 0, 3)
    before = make(primary, keep_s=3_600)
    grow(primary, 10, 3)
    objects = primary.primary.log.objects
    monkeypatch.setattr(objects, "list", lambda *rest: type(objects).list(objects, *rest)[:1])
    make(primary)
    monkeypatch.undo()
    names = objects.list("")
    assert before.name in names
    assert names_of(before) <= set(names)
    primary.stop()


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_many_parts_are_listed_and_removed_some_at_a_time(
    tmp_path: Path, url: str, log: ReplicatedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = LocalPrimary(tmp_path / "a", url)
    grow(primary, 0, 2)
    useless = {f"segment/0/1-{number}-0-1-00000000" for number in range(50)}
    foreign = {"segment/0/x/y", "segment/readme"}
    for name in useless | foreign:
        log.objects.put(name, b"x")
    monkeypatch.setattr(limits, "REPLICA_REMOVED_PARTS", 8)
    monkeypatch.setattr(limits, "REPLICA_PAGE", 20)
    left = [len(useless)]
    made = make(primary)
    left.append(len(parts_of(log) & useless))
    for _ in range(20):
        primary.replicator._keeper._checkpoints.prune(0, made.time_s)
        left.append(len(parts_of(log) & useless))
    assert left[1] == 42
    assert all(0 <= one - other <= 8 for one, other in pairwise(left))
    assert parts_of(log) == names_of(made) | foreign
    primary.stop()


@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_the_prune_removes_chunks_of_an_upload_that_ended_early(
    tmp_path: Path, url: str, log: ReplicatedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLICA_UPLOAD_S", 0.0)
    primary = LocalPrimary(tmp_path / "a", url)
    grow(primary, 0, 2)
    lost = f"{log.objects._chunks}c2VnbWVudC85.lost"  # type: ignore[attr-defined]
    send = log._loop.call  # type: ignore[attr-defined]
    send(log._js.publish(lost, b"x" * 100))  # type: ignore[attr-defined]
    make(primary)

    def chunks() -> dict[str, int]:
        found = send(log._js.stream_info(f"OBJ_{log.objects._bucket}", "$O.*.C.>"))  # type: ignore[attr-defined]
        return dict(found.state.subjects or {})

    eventually(lambda: lost not in chunks())
    assert chunks()
    primary.stop()
    check_restored(log, primary, tmp_path / "r")


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_the_newest_segment_of_a_checkpoint_is_not_compacted_meanwhile(
    tmp_path: Path, url: str, log: ReplicatedLog
) -> None:
    """It has the first bytes of that, and the frames after it add the others: they are to fit."""

    def append(*bodies: bytes) -> None:
        primary.append(2, *bodies)
        primary.wait(2, len(primary.acknowledged.get(2, ())) + 1)

    def is_looked_through() -> bool:
        primary.store.tick()
        return bucket.upkeep.compaction._work is None

    def is_compacted() -> bool:
        primary.store.tick()
        return Path(first.path).stat().st_ino != inode

    primary = LocalPrimary(tmp_path / "a", url)
    bucket, keeper = primary.bucket(2), primary.replicator._keeper
    first = bucket.chain.segments[0]
    append(*[b"gone" + b"." * 100] * 10)
    position, have, _ = keeper._take()
    append(b"kept" + b"." * 2_600, *[b"kept" + b"." * 60] * 8)
    while len(bucket.chain.segments) < 3:
        append(b"gone" + b"." * 1_000)
    bucket.upkeep.trim({16: 1}, {record.sequence for record in records_of(bucket) if record.body.startswith(b"gone")})
    inode = Path(first.path).stat().st_ino
    primary.run(is_looked_through)
    making = threading.Thread(target=keeper._make_checkpoint, args=(position, have))
    making.start()
    primary.run(lambda: not making.is_alive())
    assert (made := checkpoint.newest(log)) is not None
    assert made.position.number == position.number
    keeper._release()
    primary.run(is_compacted)
    primary.stop()
    restore(log, str(tmp_path / "r"), Point())
    kept = [body for body in bodies_of(tmp_path / "r", 2) if body.startswith(b"kept")]
    assert list(map(len, kept)) == [2_604] + [64] * 8
    assert check(str(tmp_path / "r"), report=print) == 0


def records_of(bucket: DiskBucket) -> Iterator[Record]:
    at = 0
    while (record := bucket.reader.scan(at)) is not None:
        yield record
        at = record.sequence + 1
