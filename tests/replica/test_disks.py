"""Disks that fail below a replicated log, and crashes between two steps: nothing counts that is not on disk."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica import checkpoint, state
from mqfs.replica.following import Diverged, end_before, open_follower, set_aside, store_of
from mqfs.replica.log import NoAnswer, open_log
from mqfs.store.check import check
from mqfs.store.disk import Disk
from tests.replica.primary import LocalPrimary, LocalStandby, bodies_of, restored
from tests.replica.test_copies import are_equal
from tests.support.eventually import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPLICA_BEAT_S", 0.2), ("REPLICA_STATE_S", 0.1), ("REPLICA_RETRY_S", 0.1)):
        monkeypatch.setattr(limits, name, value)


@pytest.mark.parametrize("number", [1, 2], ids=["of the folder above", "of the frame's folder"])
def test_a_frame_whose_name_was_not_synced_never_counts(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen nevertheless."""
    log, fsync, left = open_log(f"file://{tmp_path}/replica"), os.fsync, [number]

    def fail(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    for _ in range(2):
        with pytest.raises(BadReplica, match="not synced: Input/output error"):
            log.append(b"frame", 0, 0, takeover=True)
    with pytest.raises(BadReplica, match="not synced"):
        log.get(1)
    log.close()


def test_a_segment_is_synced_again_when_there_are_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, path = f"file://{tmp_path}/replica", tmp_path / "a"
    primary = LocalPrimary(path, url)
    keeper = primary.replicator._keeper
    sync, failed = type(keeper)._sync, list[str]()

    def fail(self: object, folder: str, first: int) -> None:
        if not failed:
            failed.append(folder)
            raise OSError(errno.EMFILE, "Too many open files")
        sync(keeper, folder, first)

    monkeypatch.setattr(type(keeper), "_sync", fail)
    primary.append(1, b"one")
    primary.wait(1, 1)
    eventually(lambda: failed, "a sync that fails")
    eventually(lambda: (found := state.read(str(path))) and found.have.get(1), "the state to have it")
    primary.stop()


def test_no_checkpoint_is_past_the_state_that_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames go: a start that needs them has its store set aside, with what was not appended yet."""
    url, path = f"file://{tmp_path}/replica", tmp_path / "a"
    for name, value in (("REPLICA_BEAT_S", 3_600.0), ("REPLICA_CHECKPOINT_FRAMES", 1)):
        monkeypatch.setattr(limits, name, value)
    rename, failed = os.rename, list[int]()

    def fail(begin: str, end: str) -> None:
        if end == f"{path}/{state.NAME}" and len(failed) < 3:
            failed.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(begin, end)

    def more() -> None:
        primary.append(1, b"more")
        primary.wait(1, len(primary.acknowledged.get(1, ())) + 1)

    primary = LocalPrimary(path, url)
    monkeypatch.setattr(Disk, "rename", staticmethod(fail))
    more()
    eventually(lambda: len(failed) == 3, "another attempt to write the state")
    with closing(open_log(url)) as log:
        assert checkpoint.newest(log) is None
        eventually(lambda: (found := state.read(str(path))) and found.have.get(1), "the state to have it")
        eventually(lambda: checkpoint.newest(log), "a checkpoint", lambda _: more())
    primary.kill()
    again = LocalPrimary(path, url)
    again.stop()
    assert not list(path.glob("quarantine/*"))
    assert bodies_of(path, 1) == primary.acknowledged[1]


def test_a_repair_moves_nothing_that_is_not_copied_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a segment is copied by its positions. What the disk has lost is in the copy."""
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 20_000)
    url, path = f"file://{tmp_path}/replica", tmp_path / "a"
    bodies = [b"%03d" % number + b"." * (1_000 + number) for number in range(200)]
    primary = LocalPrimary(path, url)
    primary.append(1, bodies[0], bodies[1])
    primary.wait(1, 2)
    eventually(lambda: (found := state.read(str(path))) and found.have.get(1), "the state to have it")
    primary.stop_copying()
    for body in bodies[2:]:
        primary.append(1, body)
    bucket = primary.bucket(1)
    bucket.upkeep.sync()
    primary.run(lambda: bucket.commit.synced == bucket.commit.written)
    assert len(bucket.chain.segments) > 3
    primary.kill()
    segment = next(path.glob(f"buckets/*/*/{1:020d}.log"))
    data = bytearray(segment.read_bytes())
    data[data.index(bodies[1]) + 9] ^= 1
    segment.write_bytes(data)
    lines = list[str]()
    assert check(str(path), fix=True, report=lines.append) > 0
    assert any("left as it is, for a replica has it" in line for line in lines)
    again = LocalPrimary(path, url)
    again.stop()
    restored(url, tmp_path / "r")
    assert check(str(tmp_path / "r")) == 0
    assert bodies_of(tmp_path / "r", 1) == bodies


@pytest.mark.parametrize("step", ["rename", "remove"])
def test_a_crash_while_a_store_is_set_aside_loses_nothing_of_it(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does the copy begin behind what its disk has."""
    url, path = f"file://{tmp_path}/replica", tmp_path / "a"
    primary = LocalPrimary(path, url)
    primary.append(1, b"one")
    primary.wait(1, 1)
    primary.stop()
    log = open_log(url)

    rename = os.rename

    def crash(*arguments: object) -> None:
        raise OSError(errno.EIO, "the power is cut")

    def crash_at_buckets(begin: str, end: str) -> None:
        if begin.endswith("/buckets"):
            crash()
        rename(begin, end)

    with monkeypatch.context() as crashing:
        if step == "rename":
            crashing.setattr(Disk, "rename", staticmethod(crash_at_buckets))
        else:
            crashing.setattr(state, "remove", crash)
        with pytest.raises(OSError, match="the power is cut"):
            set_aside(str(path), str(Diverged("it is another history")))
    store = store_of(log)
    assert store is not None
    open_follower(log, str(path), store).close()
    # With its state still there it has no more than the log, and is followed on as it is.
    kept = "buckets/*/*/*.log" if step == "rename" else "quarantine/fenced-*/*/*/*.log"
    assert list(path.glob(kept))
    standby = LocalStandby(tmp_path / "b", url)
    again = LocalStandby(path, url)
    assert eventually(lambda: are_equal(path, tmp_path / "b"))
    standby.stop()
    again.stop()
    log.close()
    state.remove(str(path))
    assert bodies_of(path, 1) == [b"one"]


def test_a_look_at_the_end_of_a_whole_log_does_not_list_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/replica"
    LocalPrimary(tmp_path / "a", url).stop()
    log, found = open_log(url), state.read(str(tmp_path / "a"))
    assert found is not None
    monkeypatch.setattr(type(log), "newest", lambda *arguments: pytest.fail("the log is listed"))
    assert end_before(log, found.position) == 0
    log.close()


@pytest.mark.parametrize("work", ["list", "remove_stale_uploads"])
def test_a_folder_of_a_log_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint is not there, and its parts are removed."""
    with closing(open_log(f"file://{tmp_path}/replica")) as log:
        assert log.objects.list("checkpoint/") == []
        log.objects.put("checkpoint/one", b"1")

        def fail(path: str) -> NoReturn:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

        monkeypatch.setattr(os, "scandir", fail)
        with pytest.raises(NoAnswer, match="Too many open files"):
            log.objects.list("checkpoint/") if work == "list" else log.objects.remove_stale_uploads()
        monkeypatch.undo()
        assert log.objects.list("checkpoint/") == ["checkpoint/one"]


def test_a_directory_that_is_away_is_not_made_again(tmp_path: Path) -> None:
    """A file system that was unmounted, say: what is made in its place would be in the way when it comes back."""
    with closing(open_log(f"file://{tmp_path}/replica")) as log:
        (tmp_path / "replica").rename(tmp_path / "away")
        with pytest.raises(NoAnswer):
            log.objects.put("standby/one", b"")
        with pytest.raises(NoAnswer):
            log.append(b"", 0, 0, takeover=False)
        assert not (tmp_path / "replica").exists()
        (tmp_path / "away").rename(tmp_path / "replica")
        log.objects.put("standby/one", b"1")
        assert log.objects.get("standby/one") == b"1"


def test_an_engine_that_fails_now_and_then_does_not_delay_a_takeover(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails more often than within each `--failover`."""
    url, folder, away = f"file://{tmp_path}/replica", tmp_path / "replica", tmp_path / "away"
    primary = LocalPrimary(tmp_path / "a", url)
    primary.append(1, b"one")
    primary.wait(1, 1)
    standby = LocalStandby(tmp_path / "b", url, failover_s=6.0)
    assert eventually(lambda: are_equal(tmp_path / "a", tmp_path / "b"))
    primary.kill()

    def failures() -> int:
        return sum("no answer" in record.getMessage() for record in caplog.records)

    count = 0
    while standby.thread.is_alive() and count < 30:
        before = failures()
        folder.rename(away)
        assert eventually(lambda before=before: failures() > before or not standby.thread.is_alive())
        away.rename(folder)
        standby.thread.join(1.0)  # what it hears in between is nothing
        count += 1
    assert count > 1
    assert standby.failed is None
    assert standby.primary is not None
    LocalPrimary(tmp_path / "b", url, standby.primary).stop()
    assert bodies_of(tmp_path / "b", 1) == [b"one"]
