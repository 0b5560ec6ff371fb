"""A store and its copies: whoever is killed when, what was acknowledged is there once, and copies are equal."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from mqfs import errors, limits
from mqfs.model import Draft, Kind
from mqfs.replica import checkpoint, state
from mqfs.replica.following import Outdated, discard, open_follower, store_of
from mqfs.replica.log import Report, open_log
from mqfs.replica.restore import Point, restore
from mqfs.replica.takeover import become_primary
from mqfs.store.check import check
from mqfs.store.disk import Disk
from mqfs.store.sequences import removal_body
from mqfs.store.store import DiskStore, folder_of, read_label
from tests.replica.history import segments
from tests.replica.primary import LocalPrimary, LocalStandby, bodies_of, restored
from tests.replica.servers import NatsServer, url_of
from tests.support.campaign import seed, size
from tests.support.eventually import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]
EACH = pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
FAULTY = pytest.mark.parametrize("url", ["file", "nats", "faulty s3"], indirect=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_BEAT_S", 0.2)
    monkeypatch.setattr(limits, "REPLICA_STATE_S", 0.1)


def are_equal(one: Path, two: Path) -> bool:
    return segments(one) == segments(two) != {}


@EACH
def test_a_standby_has_the_same_bytes(tmp_path: Path, url: str, standbys: list[LocalStandby]) -> None:
    primary = LocalPrimary(tmp_path / "a", url)
    primary.append(1, b"before")
    standbys.append(LocalStandby(tmp_path / "b", url))
    for number in range(50):
        primary.append(1 + number % 3, b"%d" % number, b"x" * 3_000)
    primary.append(2, b"y" * 3_000_000)  # of several frames
    primary.wait(2, 35)
    primary.store.remove(3)
    primary.append(1, b"last")
    primary.wait(1, 36)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    primary.stop()


def test_a_standby_keeps_no_descriptor_of_what_it_has_on_disk(tmp_path: Path, standbys: list[LocalStandby]) -> None:
    url = f"file://{tmp_path}/replica"
    primary = LocalPrimary(tmp_path / "a", url)
    standbys.append(LocalStandby(tmp_path / "b", url))
    for number in range(30):
        primary.append(1 + number % 3, b"%d" % number)
        primary.wait(1 + number % 3, number // 3 + 1)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    eventually(lambda: len(open_files(tmp_path / "b")) <= 1, "files to be closed, but for the lock")
    primary.stop()


def open_files(path: Path) -> list[str]:
    """Those below a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(f"{path}/")]


@EACH
def test_a_promoted_standby_has_all_and_the_old_primary_is_fenced(
    tmp_path: Path, url: str, standbys: list[LocalStandby]
) -> None:
    first = LocalPrimary(tmp_path / "a", url)
    standbys.append(LocalStandby(tmp_path / "b", url))
    for number in range(20):
        first.append(1, b"%d" % number)
    first.wait(1, 20)
    second = standbys[0].promote(url)
    first.append(1, b"lost")
    first.run(lambda: first.fenced)
    assert first.failed == 1
    assert first.acknowledged[1] == [b"%d" % number for number in range(20)]
    second.append(1, b"new")
    second.wait(1, 1)
    first.kill()
    again = LocalStandby(tmp_path / "a", url)  # what it has alone is set aside
    standbys.append(again)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    assert list((tmp_path / "a/quarantine").glob("fenced-*"))
    second.stop()
    third = again.promote(url)
    third.stop()
    assert bodies_of(tmp_path / "a", 1) == [*(b"%d" % number for number in range(20)), b"new"]


@EACH
@pytest.mark.parametrize("has_more", [False, True], ids=["as much as the log", "more than the log"])
def test_an_old_primary_that_follows_already_when_another_takes_over(
    tmp_path: Path, url: str, standbys: list[LocalStandby], has_more: bool
) -> None:
    """As after a power cut of both: no other had taken over when it began to follow."""
    first = LocalPrimary(tmp_path / "a", url)
    standbys.append(LocalStandby(tmp_path / "b", url))
    for number in range(20):
        first.append(1, b"%d" % number)
    first.wait(1, 20)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    first.stop_copying()
    if has_more:
        first.append(1, b"only here" * 50)
    first.kill()
    again = LocalStandby(tmp_path / "a", url)
    standbys.append(again)
    eventually(lambda: again.standby.primary == "tcp!a!5640", "it follows")
    second = standbys[0].promote(url)
    second.append(1, b"new")
    second.wait(1, 1)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    assert has_more == bool(list((tmp_path / "a/quarantine").glob("fenced-*")))
    second.stop()
    third = again.promote(url)
    third.stop()
    assert bodies_of(tmp_path / "a", 1) == [*(b"%d" % number for number in range(20)), b"new"]


@EACH
def test_what_a_power_cut_took_from_the_disk_is_fetched(tmp_path: Path, url: str) -> None:
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"old")
    first.wait(1, 1)
    assert eventually(lambda: (found := state.read(str(tmp_path / "a"))) and found.have.get(1, (0, 0))[1] > 0)
    monkey = segments(tmp_path / "a")
    for number in range(10):
        first.append(1, b"%d" % number)
    first.append(7, b"group")
    first.wait(1, 11)
    first.wait(7, 1)
    stale = state.read(str(tmp_path / "a"))
    first.kill()
    for name, data in monkey.items():  # the disk is as it was before
        (tmp_path / "a" / name).write_bytes(data)
    assert stale is not None
    set_back(tmp_path / "a", url)
    second = LocalPrimary(tmp_path / "a", url)
    second.append(1, b"after")
    second.wait(1, 1)
    second.stop()
    assert bodies_of(tmp_path / "a", 1) == [b"old", *(b"%d" % number for number in range(10)), b"after"]
    assert bodies_of(tmp_path / "a", 7) == [b"group"]


def set_back(path: Path, url: str) -> None:
    """Have the state say what is true of the disk: nothing but the first takeover."""
    found = state.read(str(path))
    assert found is not None
    log = open_log(url)
    found.position.number = found.position.crc = found.position.epoch = found.position.own = 0
    found.have = {}
    log.close()
    state.write(str(path), found)


@EACH
def test_what_the_log_lacks_is_appended_at_the_next_start(tmp_path: Path, url: str) -> None:
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"old")
    first.wait(1, 1)
    first.replicator._stop.set()  # it copies nothing more
    first.replicator._wake.set()
    first.replicator._thread.join()
    first.append(1, b"disk alone")
    first.bucket(1).upkeep.sync()
    first.kill()
    second = LocalPrimary(tmp_path / "a", url)
    second.stop()
    done = restored(url, tmp_path / "r")
    assert done.groups == 1
    assert bodies_of(tmp_path / "r", 1) == [b"old", b"disk alone"]


@EACH
def test_an_older_store_is_copied_whole_when_it_gets_a_log(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 20_000)
    older = f"file://{tmp_path}/other"
    first = LocalPrimary(tmp_path / "a", older)
    for number in range(30):
        first.append(1, b"%d" % number + b"x" * 3_000)
    first.wait(1, 30)
    first.stop()
    state.remove(str(tmp_path / "a"))
    second = LocalPrimary(tmp_path / "a", url)
    log = open_log(url)
    made = checkpoint.newest(log)
    assert made is not None
    assert len(made.segments) == 2
    second.stop()
    restore(log, str(tmp_path / "r"), Point())
    assert bodies_of(tmp_path / "r", 1) == bodies_of(tmp_path / "a", 1)
    assert len(bodies_of(tmp_path / "r", 1)) == 30
    log.close()


@EACH
def test_a_standby_that_was_away_begins_at_a_checkpoint(
    tmp_path: Path, url: str, standbys: list[LocalStandby], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 20_000)
    monkeypatch.setattr(limits, "REPLICA_CHECKPOINT_BYTES", 50_000)
    primary = LocalPrimary(tmp_path / "a", url)
    standby = LocalStandby(tmp_path / "b", url)
    primary.append(1, b"first")
    primary.wait(1, 1)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    standby.stop()
    log = open_log(url)
    for number in range(60):
        primary.append(1 + number % 2, b"%d" % number + b"x" * 5_000)
    primary.wait(1, 31)
    assert eventually(lambda: log.get(2) is None)  # trimmed
    standbys.append(LocalStandby(tmp_path / "b", url))
    primary.append(1, b"last")
    primary.wait(1, 32)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    assert list((tmp_path / "b/quarantine").iterdir()) == []  # it had nothing that the log has not
    primary.stop()
    log.close()


@pytest.mark.parametrize("url", ["file"], indirect=True)  # NATS hands over frames ahead
def test_a_copy_whose_next_frames_are_trimmed_as_it_reads_is_outdated(tmp_path: Path, url: str) -> None:
    """Not another history: it has nothing that the log has not, and is copied again."""
    primary = LocalPrimary(tmp_path / "a", url)
    primary.append(1, b"first")
    primary.wait(1, 1)
    log = open_log(url)
    store, newest = store_of(log), log.newest(0)
    assert store is not None
    assert newest is not None
    with contextlib.closing(open_follower(log, str(tmp_path / "b"), store)) as follower:
        while follower.reader.position.number < newest.number:
            follower.step(0.1)
        for number in range(2, 5):
            primary.append(1, b"%d" % number)
            primary.wait(1, number)
        primary.stop()
        newest = log.newest(0)
        assert newest is not None
        log.trim(newest.number)
        with pytest.raises(Outdated, match="frames are missing") as why:
            follower.step(0.1)
    discard(str(tmp_path / "b"), why.value, primary=False)
    found = state.read(str(tmp_path / "a"))
    assert found is not None
    checkpoint.Checkpointer(log, str(tmp_path / "a")).make(found.position, found.have)
    with contextlib.closing(open_follower(log, str(tmp_path / "b"), store)) as follower:  # from there on
        assert follower.state.position.number == newest.number
        assert are_equal(tmp_path / "a", tmp_path / "b")
    log.close()


@EACH
def test_the_log_of_an_idle_store_stays_short(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_BEAT_S", 0.01)
    monkeypatch.setattr(limits, "REPLICA_CHECKPOINT_FRAMES", 20)
    primary = LocalPrimary(tmp_path / "a", url)
    primary.append(1, b"all there is")
    primary.wait(1, 1)
    log = open_log(url)
    assert eventually(lambda: len(log.objects.list("checkpoint/")) == 1 and log.newest(100) is not None)
    assert eventually(lambda: log.get(60) is None)
    primary.stop()
    restore(log, str(tmp_path / "r"), Point())
    log.close()
    assert bodies_of(tmp_path / "r", 1) == [b"all there is"]


@EACH
def test_a_restore_to_a_time_has_what_was_there_then(tmp_path: Path, url: str) -> None:
    primary = LocalPrimary(tmp_path / "a", url)
    times = [time.time_ns()]
    for number in range(12):
        primary.append(1, b"%d" % number)
        primary.wait(1, number + 1)
        times.append(time.time_ns())
    primary.stop()
    log = open_log(url)
    for number in (1, 6, 12):
        done = restore(log, str(tmp_path / f"r{number}"), Point(times[number]))
        assert done.time_ns <= times[number]
        assert bodies_of(tmp_path / f"r{number}", 1) == [b"%d" % n for n in range(number)]
        assert check(str(tmp_path / f"r{number}"), report=print) == 0
        assert read_label(Disk(), str(tmp_path / f"r{number}"))[0] != primary.store.uuid
    with pytest.raises(errors.BadStore, match="not empty"):
        restore(log, str(tmp_path / "r1"), Point())
    log.close()


def test_a_group_that_is_removed_while_a_checkpoint_is_made_is_in_a_restore_to_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the checkpoint would lack what its frame had, and a restore to a time after that, too."""
    monkeypatch.setattr(limits, "REPLICA_STATE_S", 3_600.0)  # the keeper makes none itself
    url = f"file://{tmp_path}/replica"
    primary = LocalPrimary(tmp_path / "a", url, keep_s=3_600)
    for group in (1, 2):
        primary.append(group, b"%d" % group)
        primary.wait(group, 1)
    keeper = primary.replicator._keeper
    position, have, _ = keeper._take()
    before = position.time_ns
    primary.store.remove(2)
    primary.append(1, b"last")
    primary.wait(1, 2)
    primary.run(lambda: not Path(folder_of(str(tmp_path / "a"), 2)).exists())
    with pytest.raises(checkpoint.Overtaken):
        keeper._make_checkpoint(position, have)  # which was taken before
    keeper._make_checkpoint(*keeper._take()[:2])
    primary.stop()
    log = open_log(url)
    for time_ns, groups in ((before, 2), (None, 1)):
        assert restore(log, str(tmp_path / f"r{groups}"), Point(time_ns)).groups == groups
    log.close()


@EACH
def test_a_restore_between_the_two_records_of_a_removal_is_without_the_group(tmp_path: Path, url: str) -> None:
    """The log of a group says that it is removed before a frame does."""
    primary = LocalPrimary(tmp_path / "a", url)
    for group in (1, 2):
        primary.append(group, b"%d" % group)
        primary.wait(group, 1)
    now_ns = time.time_ns()
    primary.bucket(2).writer.append(Kind.CHANGE, 0, now_ns, removal_body(now_ns))
    primary.append(1, b"last")
    primary.wait(1, 2)
    primary.kill()
    done = restored(url, tmp_path / "r")
    assert done.groups == 1
    assert bodies_of(tmp_path / "r", 1) == [b"1", b"last"]
    assert check(str(tmp_path / "r"), report=print) == 0


class Moment(NamedTuple):
    """What a primary had at a frame: its messages by group, with their sequences, and from which on they are wanted.
    `group` and `sequence`: the last message."""

    time_ns: int
    groups: dict[int, list[tuple[int, bytes]]]
    floors: dict[int, int]
    group: int
    sequence: int


def messages_of(store: DiskStore) -> dict[int, list[tuple[int, bytes]]]:
    found: dict[int, list[tuple[int, bytes]]] = {}
    for number in store.groups():
        bucket, at = store.open(number), 0
        rows = found[number] = []
        while (record := bucket.reader.scan(at)) is not None:
            rows.append((record.sequence, bytes(record.body)))
            at = record.sequence + 1
    return found


def live(primary: LocalPrimary, pick: random.Random, count: int) -> list[Moment]:
    """Appends, large batches, trims and removals, and what was there after each."""
    moments, groups, floors = list[Moment](), [1, 2, 3], dict[int, int]()
    for number in range(count):
        place = pick.randrange(3)
        group = groups[place]
        rows = messages_of(primary.store).get(group, [])
        if rows and pick.random() < 0.05:
            primary.store.remove(group)
            floors.pop(group, None)
            group = groups[place] = max(groups) + 1
        elif rows and pick.random() < 0.1:
            floors[group] = max(floors.get(group, 0), pick.choice(rows)[0])
            primary.bucket(group).upkeep.trim({16: floors[group]}, set())
        body = b"%d." % number + b"x" * pick.choice([10, 3_000, 3_000, 1_200_000 if number % 20 == 0 else 20])
        primary.append(group, body, b"second of %d" % number)
        primary.run(lambda body=body, group=group: body in primary.acknowledged.get(group, ()))  # type: ignore[misc]
        position = primary.primary.writer.position
        rows_now = messages_of(primary.store)
        moments.append(Moment(position.time_ns, rows_now, dict(floors), group, rows_now[group][-1][0]))
    return moments


def point_of(moments: list[Moment], number: int, form: str) -> tuple[Point, Moment] | None:
    """Where a restore ends with the last message of a moment, and what it is to have; None: the log ends before."""
    moment = moments[number]
    if form == "time":
        return Point(moment.time_ns), moment
    later = next((at for at in range(number + 1, len(moments)) if moments[at].group == moment.group), 0)
    name = f"g{moment.group}" if moment.group > 1 else ""  # of the root
    point = Point(group=name, sequence=moment.sequence)
    return (point, moments[later - 1]._replace(floors=moments[later].floors)) if later else None


@EACH
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("form", ["time", "message"])
def test_a_restore_has_what_the_primary_had_at_a_frame(
    tmp_path: Path, url: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SEGMENT_BYTES", 20_000), ("REPLICA_CHECKPOINT_BYTES", 500_000)):
        monkeypatch.setattr(limits, name, value)
    pick, count = random.Random(seed()), size(500, 25)
    primary = LocalPrimary(tmp_path / "a", url, keep_s=3_600)
    moments = live(primary, pick, max(60, count + 60))
    log = open_log(url)
    primary.run(lambda: checkpoint.newest(log) is not None)  # the end of the store gives up one that is being made
    primary.stop()
    points = [found for number in range(len(moments)) if (found := point_of(moments, number, form)) is not None]
    for number, (point, moment) in enumerate(pick.sample(points, count)):
        path = tmp_path / f"r{number}"
        done = restore(log, str(path), point)
        assert form == "message" or done.time_ns == moment.time_ns
        assert check(str(path), report=print) == 0
        store = DiskStore(str(path))
        found = messages_of(store)
        store.close()
        for group in found.keys() | moment.groups.keys():
            floor = moment.floors.get(group, 0)  # below it they may be there or not
            theirs, ours = ([row for row in rows.get(group, []) if row[0] >= floor] for rows in (found, moment.groups))
            assert theirs == ours, f"group {group} at {point}, seed {seed()}"
        shutil.rmtree(path)
    log.close()
    print(f"{url}, {form}: {count} of {len(points)} points, {len(moments)} appends, seed {seed()}")


@EACH
@pytest.mark.parametrize("form", ["time", "message"])
def test_a_restore_has_what_was_trimmed_after_its_end_while_a_checkpoint_was_made(
    tmp_path: Path, url: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 20_000)
    monkeypatch.setattr(limits, "REPLICA_STATE_S", 3_600.0)  # the keeper makes none itself
    primary = LocalPrimary(tmp_path / "a", url, keep_s=3_600)
    for number in range(1, 21):
        primary.append(2, b"%d." % number + b"x" * 10_000)
        primary.wait(2, number)
    keeper = primary.replicator._keeper
    position, have, _ = keeper._take()
    primary.append(2, b"last")
    primary.wait(2, 21)
    end_ns, rows = primary.primary.writer.position.time_ns, messages_of(primary.store)[2]
    primary.append(2, b"after")
    primary.wait(2, 22)
    primary.bucket(2).upkeep.trim({16: rows[15][0]}, set())
    primary.run(lambda: len(messages_of(primary.store)[2]) < 22)
    making = threading.Thread(target=keeper._make_checkpoint, args=(position, have))
    making.start()
    primary.run(lambda: not making.is_alive())
    primary.stop()
    log = open_log(url)
    assert len(log.objects.list("checkpoint/")) == 1
    restore(log, str(tmp_path / "r"), Point(end_ns) if form == "time" else Point(group="g2", sequence=rows[-1][0]))
    log.close()
    assert bodies_of(tmp_path / "r", 2) == [body for _, body in rows]


@EACH
def test_with_a_standby_to_confirm_nothing_counts_without_it(
    tmp_path: Path, url: str, standbys: list[LocalStandby]
) -> None:
    standbys.append(LocalStandby(tmp_path / "b", url))
    primary = LocalPrimary(tmp_path / "a", url, standbys=1)
    standbys[0].stop()
    primary.append(1, b"one")
    end = time.monotonic() + 1
    primary.run(lambda: time.monotonic() > end)
    assert not primary.acknowledged
    standbys.append(LocalStandby(tmp_path / "b", url))
    primary.wait(1, 1)
    assert segments(tmp_path / "b")
    primary.stop()


@EACH
def test_a_primary_that_waits_for_a_standby_is_fenced_by_one_that_takes_over(tmp_path: Path, url: str) -> None:
    first = LocalPrimary(tmp_path / "a", url, standbys=1)
    first.append(1, b"one")
    first.run(lambda: first.primary.writer.position.number == 2)
    second = LocalPrimary(tmp_path / "b", url)
    first.run(lambda: first.fenced)
    assert not first.acknowledged
    first.kill()
    second.stop()


def test_a_standby_reports_again_what_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standbys: list[LocalStandby]
) -> None:
    """Else a primary that waits for its report appends nothing, and the standby takes over from it."""
    monkeypatch.setattr(limits, "REPLICA_BEAT_S", 60.0)
    url = f"file://{tmp_path}/replica"
    primary, log = LocalPrimary(tmp_path / "a", url), open_log(url)
    standbys.append(LocalStandby(tmp_path / "b", url))
    primary.append(1, b"one")
    primary.wait(1, 1)
    last = primary.primary.writer.position
    for _ in range(2):
        eventually(lambda: list(log.reports().values()) == [Report(last.number, last.crc)])
        for name in log.objects.list("standby/"):
            log.objects.delete(name)
    primary.stop()
    log.close()


def test_a_log_that_is_gone_is_begun_again_with_the_whole_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/replica"
    first = LocalPrimary(tmp_path / "a", url)
    first.append(1, b"one")
    first.wait(1, 1)
    first.stop()
    shutil.rmtree(tmp_path / "replica")
    with pytest.raises(errors.BadReplica, match=r"empty, but had frame \d+ \(expected the log, or .*/replica moved"):
        LocalPrimary(tmp_path / "a", url)
    state.remove(str(tmp_path / "a"))
    second = LocalPrimary(tmp_path / "a", url)
    second.append(1, b"two")
    second.wait(1, 1)
    second.stop()
    restored(url, tmp_path / "r")
    assert bodies_of(tmp_path / "r", 1) == [b"one", b"two"]


@pytest.mark.parametrize("url", ["file", "nats", "s3"], indirect=True)
def test_what_no_writer_waits_for_comes_in_few_frames(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPLICA_PACE_S", "REPLICA_OBJECT_S"):
        monkeypatch.setattr(limits, name, 3600.0)
    primary = LocalPrimary(tmp_path / "a", url)
    at, bucket = primary.primary.writer.position, primary.bucket(1)
    before, bodies = at.number, [b"%d" % number for number in range(200)]
    for body in bodies[:150]:
        bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, body, b"")], time.time_ns())
        synced = list[object]()
        bucket.upkeep.sync(synced.append)
        primary.run(lambda synced=synced: bool(synced))  # type: ignore[misc]
    primary.append(1, b"awaited")
    primary.wait(1, 1)  # and it does not wait for an hour
    assert at.number - before <= 2
    for body in bodies[150:]:
        bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, body, b"")], time.time_ns())
    primary.stop()  # nor is the rest left behind
    restored(url, tmp_path / "r")
    assert bodies_of(tmp_path / "r", 1) == [*bodies[:150], b"awaited", *bodies[150:]]


def test_an_engine_that_is_away_holds_nothing_up_and_gets_the_rest_later(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "n")
    server.start()
    server.wait()
    url = url_of([server], "shop")
    primary = LocalPrimary(tmp_path / "a", url)
    server.kill()
    primary.append(1, b"one")
    synced: list[object] = []
    primary.bucket(1).upkeep.sync(synced.append)
    primary.run(lambda: bool(synced))  # what asks for the disk alone does not wait
    assert synced == [None]
    assert not primary.acknowledged
    server.start()
    primary.wait(1, 1)
    primary.stop()
    restored(url, tmp_path / "r")
    server.kill()
    assert bodies_of(tmp_path / "r", 1) == [b"one"]


class ShortDisk(Disk):
    """It cannot open a file for one of the reads of the replicator: the one of that number from now on."""

    fails_at, number = -1, 0

    def open(self, path: str, flags: int) -> int:
        if threading.current_thread().name == "replicator" and self.fails_at >= 0:
            self.fails_at -= 1
            if self.fails_at < 0:
                raise OSError(self.number, os.strerror(self.number))
        return super().open(path, flags)


def written_while_a_read_fails(path: Path, url: str, position: int, number: int) -> LocalPrimary:
    """Four groups with two messages each; the read of one of the second ones fails with that error, once."""
    disk = ShortDisk()
    primary = LocalPrimary(path, url, disk=disk)
    for group in range(1, 5):
        primary.append(group, b"before")
        primary.wait(group, 1)
    disk.fails_at, disk.number = position, number
    for group in range(1, 5):
        primary.append(group, b"%d" % group)
    return primary


def check_restored(tmp_path: Path, url: str, primary: LocalPrimary) -> None:
    restored(url, tmp_path / "r")
    for group in range(1, 5):
        assert bodies_of(tmp_path / "r", group) == bodies_of(tmp_path / "a", group)
        assert set(primary.acknowledged[group]) <= set(bodies_of(tmp_path / "r", group))


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_series_that_cannot_be_read_ends_the_primary_and_loses_nothing(tmp_path: Path, position: int) -> None:
    url = f"file://{tmp_path}/replica"
    primary = written_while_a_read_fails(tmp_path / "a", url, position, errno.EIO)
    primary.run(lambda: primary.fenced)
    assert re.fullmatch(r"not replicated: .*\.log: Input/output error \(run mqfs check\)", str(primary.why))
    primary.kill()
    again = LocalPrimary(tmp_path / "a", url)
    again.append(1, b"after")
    again.wait(1, 1)
    again.stop()
    check_restored(tmp_path, url, primary)


@pytest.mark.parametrize("position", [0, 3])
def test_a_series_is_read_again_when_there_are_descriptors(
    tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "REPLICA_RETRY_S", 0.1)
    url = f"file://{tmp_path}/replica"
    primary = written_while_a_read_fails(tmp_path / "a", url, position, errno.EMFILE)
    for group in range(1, 5):
        primary.wait(group, 2)
    assert not primary.fenced
    assert "Too many open files: tried again" in caplog.text
    primary.stop()
    check_restored(tmp_path, url, primary)


@EACH
def test_another_stores_log_is_refused(tmp_path: Path, url: str) -> None:
    LocalPrimary(tmp_path / "a", url).stop()
    other = LocalPrimary(tmp_path / "c", f"file://{tmp_path}/other")
    other.append(1, b"mine")
    other.wait(1, 1)
    other.stop()
    with contextlib.closing(open_log(url)) as log, pytest.raises(errors.BadReplica, match=r"of store .* \(expected "):
        become_primary(log, str(tmp_path / "c"), "")


@FAULTY
def test_kills_and_takeovers_lose_nothing(tmp_path: Path, url: str) -> None:
    """Two stores; each round the primary is killed while it appends, and either starts again or is replaced."""
    pick = random.Random(seed())
    paths, written, acknowledged = [tmp_path / "a", tmp_path / "b"], list[bytes](), list[bytes]()
    primary, standby = LocalPrimary(paths[0], url), LocalStandby(paths[1], url)
    for _ in range(size(400, 25)):
        count = pick.randrange(1, 30)
        for _ in range(count):
            body = b"%d" % len(written)
            written.append(body)
            primary.append(1, body)
        primary.wait(1, pick.randrange(count + 1))
        primary.kill()
        acknowledged += primary.acknowledged.get(1, [])
        if pick.random() < 0.5:
            primary = LocalPrimary(primary.path, url)
        else:
            promoted = standby.promote(url)
            standby, primary = LocalStandby(primary.path, url), promoted
    primary.append(1, b"end")
    primary.wait(1, 1)
    assert eventually(lambda: are_equal(*paths))
    standby.stop()
    primary.stop()
    for path in paths:
        found = bodies_of(path, 1)
        assert len(found) == len(set(found))
        assert set(acknowledged) <= set(found)
        assert set(found) <= {*written, b"end"}
        assert check(str(path), report=print) == 0
