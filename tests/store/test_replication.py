"""The copy of a store: whatever stops when, it has what was confirmed."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

import pytest

from mqfs import errors
from mqfs.model import Kind
from mqfs.store.replication import Entry, LogBytes, Portion, Removed, Trimmed
from mqfs.store.standby import StandbyStore
from mqfs.store.store import DiskBucket, DiskStore, folder_of
from tests.store.script import PATH, Script
from tests.support.campaign import size, tree_seed
from tests.support.lying_disk import LyingDisk, Stopped
from tests.support.temp_store import SMALL, lowered

COPY = "/s/copy"
STEPS = 150


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


class Copied:
    """A replicator that works when it is asked to."""

    def __init__(self) -> None:
        self.notified = 0

    def notify(self) -> None:
        self.notified += 1

    def all_of(self, store: DiskStore, most: int = 1 << 20) -> list[Entry]:
        """All that the copy lacks, confirmed."""
        entries = []
        while (portion := store.replication.take(most)) is not None:  # type: ignore[union-attr]
            entries += portion.entries
            if not portion.more:
                store.replication.confirm()  # type: ignore[union-attr]
        return entries


class CopiedScript(Script):
    """A script whose store is copied meanwhile, in portions of any size. `log`: all series, which a standby may get
    again; `sure`: of each group, the entries that are copied, as callers heard."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.log: list[list[Entry]] = []
        self.sure: dict[int, int] = {}
        self.uuid = ""
        self._series: list[Entry] = []

    def notify(self) -> None:
        pass

    def start(self, disk: LyingDisk) -> None:
        self.store = DiskStore(PATH, disk=disk, replica=self.notify)
        self.uuid = self.store.uuid
        self.store.replication.begin(positions(self.log))  # type: ignore[union-attr]
        list(self.store.replication.open_all())  # type: ignore[union-attr]
        for known in self._alive():
            self._state(self.store.open(known.number), known)

    def step(self, disk: LyingDisk) -> None:
        if self.random.random() < 0.25:
            self.copy(self.random.choice([64, 500, 5_000]))
        super().step(disk)

    def copy(self, most: int) -> bool:
        """Take a portion; True: there was none."""
        assert self.store is not None and self.store.replication is not None  # noqa: PT018
        portion: Portion | None = self.store.replication.take(most)
        if portion is None:
            return True
        self._series += portion.entries
        if not portion.more:
            self.log.append(self._series)
            self._series = []
            self.store.replication.confirm()
        return False

    def _sync(self, bucket, known) -> None:  # type: ignore[no-untyped-def]
        super()._sync(bucket, known)
        count = len(known.entries)

        def told(error: OSError | None) -> None:
            if error is None:
                self.sure[known.number] = max(self.sure.get(known.number, 0), count)

        bucket.upkeep.replicate(told)


def positions(series: list[list[Entry]]) -> dict[int, tuple[int, int]]:
    """What a copy has that got all of it."""
    have: dict[int, tuple[int, int]] = {}
    for entry in (entry for entries in series for entry in entries):
        if isinstance(entry, LogBytes):
            have[entry.group] = max(have.get(entry.group, (0, 0)), (entry.first, entry.position + len(entry.data)))
    return have


def standby(script: CopiedScript, disk: LyingDisk, path: str = COPY) -> StandbyStore:
    return StandbyStore(path, script.uuid, disk)


def opened(store: DiskStore) -> DiskStore:
    """Every group is opened: of those whose log says so the removal is finished."""
    for number in store.groups():
        try:
            store.open(number)
        except errors.NotFound:
            continue
    return store


def holds(script: CopiedScript, store: DiskStore, *, everything: bool, forgets: bool = False) -> None:
    """The store has what was copied for sure, and nothing that was never written. `forgets`: it does not know which
    sequences and numbers were given to what was not copied."""
    script.numbers &= set(positions(script.log)) if forgets else script.numbers
    for known in script.known.values():
        if forgets:
            known.given = {entry.sequence for entry in known.entries[: script.sure.get(known.number, 0)]}
        known.committed = script.sure.get(known.number, 0)
        known.made = known.made and (everything or known.number in script.sure)
        known.removing |= known.removed
        known.removed = False
    script.check(opened(store), everything=everything)


@pytest.mark.slow
def test_a_copy_has_all_that_was_taken() -> None:
    for seed in range(tree_seed(), tree_seed() + size(100, least=6)):
        script, disk, made = CopiedScript(seed), LyingDisk(), LyingDisk()
        script.run(disk, STEPS)
        while not script.copy(300):
            pass
        target = standby(script, made)
        for series in script.log:
            target.apply(series)
        assert {group: place[0] for group, place in target.positions().items()} == {
            group: max(chain.firsts) for group, chain in chains(script.store).items()
        }
        same_bytes(script.store, made)
        target.close()
        holds(script, DiskStore(COPY, disk=made), everything=True)


def chains(store: DiskStore | None) -> dict:  # type: ignore[type-arg]
    assert store is not None
    return {number: store.open(number).chain for number in store.groups()}


def same_bytes(store: DiskStore | None, disk: LyingDisk) -> None:
    """The newest segment of each log is the same in the copy, byte for byte."""
    for number, chain in chains(store).items():
        segment = chain.segments[-1]
        fd = disk.open(segment.path.replace(PATH, COPY), 0)
        assert disk.pread(fd, 1 << 20, 0) == segment.read(0, segment.used), number
        disk.close(fd)


@pytest.mark.slow
def test_a_standby_without_power_gets_again_what_it_had_not_synced() -> None:
    luck = random.Random(tree_seed())
    script, disk = CopiedScript(tree_seed()), LyingDisk()
    script.run(disk, STEPS)
    while not script.copy(700):
        pass
    counting = LyingDisk()
    _apply(script, counting, [0])
    for stop in sorted(luck.sample(range(1, counting.calls), min(size(400, least=12), counting.calls - 1))):
        made, synced = LyingDisk(), [0]
        made.stop_at = stop
        try:
            _apply(script, made, synced)
        except Stopped:
            made = made.after_power_loss(luck if stop % 2 else None)
            made.stop_at = 0
        _apply(script, made, synced)
        again = DiskStore(COPY, disk=made)
        for group, place in positions(script.log).items():
            try:
                chain = again.open(group).chain
            except errors.NotFound:
                continue
            assert (chain.firsts[-1], chain.segments[-1].used) == place
            assert not chain.damaged
        again.close()


def _apply(script: CopiedScript, disk: LyingDisk, synced: list[int]) -> None:
    """All series from the last one that is known to be on disk on."""
    target = standby(script, disk)
    for number, series in enumerate(script.log[synced[0] :], synced[0]):
        target.apply(series)
        if number % 3 == 0:
            target.sync()
            synced[0] = number + 1
    target.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "without power"])
def test_nothing_that_was_copied_is_lost_with_its_server(killed: bool) -> None:
    """At any call that the primary makes: the copy has it, and the primary has it again from the copy."""
    luck = random.Random(tree_seed())
    counting = LyingDisk()
    CopiedScript(tree_seed()).run(counting, STEPS)
    for stop in sorted(luck.sample(range(1, counting.calls), min(size(600, least=15), counting.calls - 1))):
        disk, script, made = LyingDisk(), CopiedScript(tree_seed()), LyingDisk()
        disk.stop_at, disk.luck = stop, random.Random(stop)
        try:
            script.run(disk, STEPS)
        except Stopped:
            disk = disk.after_kill() if killed else disk.after_power_loss(luck)
        disk.stop_at = 0
        if not script.log:
            continue
        on_primary = stop % 2 == 0
        target = standby(script, disk, PATH) if on_primary else standby(script, made)
        for series in script.log:
            target.apply(series)
        target.close()
        store = DiskStore(PATH, disk=disk) if on_primary else DiskStore(COPY, disk=made)
        holds(script, store, everything=False, forgets=not on_primary)
        store.close()


def filled(store: DiskStore, count: int = 3) -> None:
    bucket = store.make(store.number(), b"0")
    bucket.writer.state = lambda: b"0"
    grow(bucket, count)


def grow(bucket: DiskBucket, count: int) -> None:
    for number in range(count):
        bucket.writer.append(Kind.MESSAGE, 16, number, b"%d" % number)


def test_callers_wait_for_the_copy_and_a_series_counts_whole() -> None:
    replica, disk = Copied(), LyingDisk()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store)
    told: list[OSError | None] = []
    store.open(1).upkeep.replicate(told.append)
    assert (told, replica.notified) == ([], 2)  # something was written, and a caller waits for it
    copies = store.replication
    assert copies is not None
    first = copies.take(100)
    assert first is not None
    assert first.more
    copies.confirm()
    assert not told
    while (portion := copies.take(100)) is not None and portion.more:
        pass
    assert not told
    copies.confirm()
    assert told == [None]
    assert (copies.lag_bytes, copies.lag_s, copies.take(100)) == (0, 0.0, None)
    store.open(1).writer.append(Kind.MESSAGE, 16, 9, b"more")
    assert (replica.notified, copies.lag_bytes) == (3, 40)


def test_a_fenced_store_is_read_only_and_its_callers_get_the_error() -> None:
    store = DiskStore(PATH, disk=LyingDisk(), replica=Copied().notify)
    filled(store)
    told: list[OSError | None] = []
    store.open(1).upkeep.replicate(told.append)
    fenced = OSError(5, "this server is no longer the primary")
    store.replication.fail(fenced)  # type: ignore[union-attr]
    assert told == [fenced]
    store.open(1).upkeep.replicate(told.append)
    assert told == [fenced, fenced]
    with pytest.raises(errors.ReadOnly, match="no longer the primary"):
        store.open(1).writer.append(Kind.MESSAGE, 16, 9, b"x")


def test_a_removed_group_goes_when_its_copy_knows_it() -> None:
    replica, disk = Copied(), LyingDisk()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store)
    filled(store)
    replica.all_of(store)
    told: list[OSError | None] = []
    store.remove(2, told.append)
    assert (list(store.groups()), told) == ([1], [])
    with pytest.raises(errors.NotFound):
        store.open(2)
    entries = replica.all_of(store)
    assert told == [None]
    assert entries[-1] == Removed(2)
    assert b'{"removed":' in b"".join(entry.data for entry in entries if isinstance(entry, LogBytes))
    assert not disk.is_folder(f"{PATH}/buckets/02/2")


def test_a_removal_that_the_copy_did_not_know_is_finished_at_the_start() -> None:
    replica, disk = Copied(), LyingDisk()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store)
    filled(store)
    replica.all_of(store)
    store.remove(2)
    again = DiskStore(PATH, disk=disk.after_kill(), replica=replica.notify)
    assert list(again.groups()) == [1, 2]
    assert again.replication is not None
    again.replication.begin({1: (1, 10_000), 2: (1, 0)})
    list(again.replication.open_all())
    assert list(again.groups()) == [1]
    assert again.disk.is_folder(f"{PATH}/buckets/02/2")
    assert Removed(2) in replica.all_of(again)
    assert not again.disk.is_folder(f"{PATH}/buckets/02/2")


def test_a_removal_is_finished_at_a_start_without_a_copy() -> None:
    replica, disk = Copied(), LyingDisk()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store)
    filled(store)
    store.remove(2)
    again = DiskStore(PATH, disk=disk.after_kill())
    with pytest.raises(errors.NotFound, match="removed"):
        again.open(2)
    assert list(again.groups()) == [1]


def test_a_damaged_removal_leaves_the_group() -> None:
    """The record is the only one that says so: without it nothing is removed."""
    disk = LyingDisk()
    store = DiskStore(PATH, disk=disk, replica=Copied().notify)
    filled(store)
    store.remove(1)
    later = disk.after_kill()
    path = f"{PATH}/buckets/01/1/{1:020d}.log"
    fd = later.open(path, 2)
    at = later.pread(fd, 1 << 16, 0).index(b'{"removed":')
    later.pwrite(fd, b"?", at)
    later.close(fd)
    again = DiskStore(PATH, disk=later)
    assert again.open(1).reader.first == 1
    assert list(again.groups()) == [1]


def test_a_segment_with_bytes_that_are_not_confirmed_is_not_compacted() -> None:
    disk, replica = LyingDisk(), Copied()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store, 200)
    bucket = store.open(1)
    segments = len(bucket.chain.segments)
    assert segments > 3
    bucket.upkeep.sync()
    wanted = bucket.chain.firsts  # one of each segment
    bucket.upkeep.trim({16: 1}, set(range(1, 200)) - set(wanted))
    for _ in range(20):
        store.tick()
    assert len(bucket.chain.segments) == segments
    replica.all_of(store)
    bucket.upkeep.trim({16: 1}, set(range(1, 200)) - set(wanted))
    for _ in range(20):
        store.tick()
    assert len(bucket.chain.segments) < segments


def test_a_segment_that_a_checkpoint_reads_holds_back_no_other() -> None:
    """An upload may take for ever."""
    disk, replica = LyingDisk(), Copied()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store, 400)
    replica.all_of(store)
    bucket = store.open(1)
    firsts = list(bucket.chain.firsts)
    assert len(firsts) > 6
    held = firsts[2]
    store.replication.held = {1: (held, 64)}  # type: ignore[union-attr]
    before = disk.size_of(f"{folder_of(PATH, 1)}/{held:020d}.log")
    bucket.upkeep.trim({16: 1}, set(range(1, 400)) - set(firsts))

    def compacted() -> list[int]:
        for _ in range(40):
            store.tick()
        return [int(name[:-4]) for name in logs_of(disk, PATH)]

    assert compacted() == [firsts[0], held, firsts[3], firsts[-1]]
    assert disk.size_of(f"{folder_of(PATH, 1)}/{held:020d}.log") == before
    store.replication.held = {}  # type: ignore[union-attr]
    assert compacted() == [firsts[0], held, firsts[3], firsts[-1]]
    assert disk.size_of(f"{folder_of(PATH, 1)}/{held:020d}.log") < before
    store.close()


def test_what_is_trimmed_goes_from_the_copy() -> None:
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    filled(store, 200)
    target = StandbyStore(COPY, store.uuid, made)
    target.apply(replica.all_of(store))
    before = made.listdir(f"{COPY}/buckets/01/1")
    store.open(1).upkeep.trim({16: 150}, set())
    entries = replica.all_of(store)
    assert any(isinstance(entry, Trimmed) for entry in entries)
    target.apply(entries)
    target.close()
    logs = {name for name in made.listdir(f"{COPY}/buckets/01/1") if name.endswith(".log")}
    assert logs == {name for name in disk.listdir(f"{PATH}/buckets/01/1") if name.endswith(".log")} < set(before)


def test_each_of_many_new_segments_is_on_disk_after_a_sync() -> None:
    made, groups = LyingDisk(), range(1, 200)
    target = StandbyStore(COPY, "one", made)
    target.apply([LogBytes(group, 1, 0, b"x" * 64) for group in groups])
    target.sync()
    assert set(StandbyStore(COPY, "one", made.after_power_loss(None)).positions()) == set(groups)


def test_a_copy_of_another_store_and_a_gap_are_refused() -> None:
    made = LyingDisk()
    StandbyStore(COPY, "one", made).close()
    with pytest.raises(errors.BadStore, match="expected a copy of two"):
        StandbyStore(COPY, "two", made)
    target = StandbyStore(COPY, "one", made)
    target.apply([LogBytes(1, 1, 0, b"x" * 64)])
    with pytest.raises(errors.BadStore, match="bytes missing from 64 to 72"):
        target.apply([LogBytes(1, 1, 72, b"x" * 8)])
    target.apply([LogBytes(9, 1, 72, b"x" * 8)])  # of a group that is gone: its removal comes again, too
    assert set(target.positions()) == {1}


def test_a_newest_segment_that_the_copy_has_and_the_store_lost() -> None:
    """It is not whole here: nothing is copied over what is whole there, and the other groups are served."""
    disk, copied = LyingDisk(), Copied()
    store = DiskStore(PATH, disk=disk, replica=copied.notify)
    store.replication.begin({})  # type: ignore[union-attr]
    filled(store, 200)
    filled(store)
    logs = sorted(name for name in disk.listdir(folder_of(PATH, 1)) if name.endswith(".log"))
    assert len(logs) > 1
    have = positions([copied.all_of(store)])
    store.close()
    fd = disk.open(f"{folder_of(PATH, 1)}/{logs[-1]}", os.O_RDWR)
    disk.pwrite(fd, bytes(disk.size(fd)), 0)
    disk.unlink(f"{folder_of(PATH, 1)}/{logs[-1][:-4]}.idx")
    again = DiskStore(PATH, disk=disk, replica=copied.notify)
    again.replication.begin(have)  # type: ignore[union-attr]
    list(again.replication.open_all())  # type: ignore[union-attr]
    with pytest.raises(errors.BadReplica, match=r"group 1: segment [0-9]+ is in the replica, and not whole here"):
        again.open(1)
    bucket = again.open(2)
    bucket.writer.append(Kind.MESSAGE, 16, 9, b"more")
    assert [entry.group for entry in copied.all_of(again)] == [2]
    again.close()


def logs_of(disk: LyingDisk, store: str) -> list[str]:
    return sorted(name for name in disk.listdir(f"{store}/buckets/01/1") if name.endswith(".log"))


def with_copy(disk: LyingDisk, made: LyingDisk, replica: Copied) -> tuple[DiskStore, StandbyStore, list[Entry]]:
    """A store of some segments, its copy, and what that got."""
    store = DiskStore(PATH, disk=disk, replica=replica.notify)
    store.replication.begin({})  # type: ignore[union-attr]
    filled(store, 200)
    target = StandbyStore(COPY, store.uuid, made)
    series = replica.all_of(store)
    target.apply(series)
    return store, target, series


@pytest.mark.parametrize("ends", ["killed", "closed"])
def test_what_was_trimmed_before_a_restart_goes_from_the_copy(ends: str) -> None:
    """The copy did not know it by then: no engine answered. So its files are here yet, and are trimmed again."""
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, series = with_copy(disk, made, replica)
    before = logs_of(disk, PATH)
    store.open(1).upkeep.trim({16: 150}, set())
    store.open(1).upkeep.sync()
    assert store.open(1).upkeep.size < sum(disk.size_of(f"{folder_of(PATH, 1)}/{name}") for name in before)
    if ends == "closed":
        store.close()
    else:
        disk = disk.after_kill()
    assert logs_of(disk, PATH) == before
    again = DiskStore(PATH, disk=disk, replica=replica.notify)
    again.replication.begin(positions([series]))  # type: ignore[union-attr]
    list(again.replication.open_all())  # type: ignore[union-attr]
    again.open(1).upkeep.trim({16: 150}, set())
    again.open(1).upkeep.sync()
    target.apply(replica.all_of(again))
    target.sync()
    assert logs_of(made, COPY) == logs_of(disk, PATH)
    assert len(logs_of(made, COPY)) < len(before)


def test_what_the_copy_has_nothing_of_goes_while_its_engine_is_away() -> None:
    """Else the disk would have to have room for all that is written meanwhile."""
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, _ = with_copy(disk, made, replica)
    before = logs_of(disk, PATH)
    for floor in (300, 450):
        grow(store.open(1), 150)
        store.open(1).upkeep.trim({16: floor}, set())
        store.open(1).upkeep.sync()
    assert logs_of(disk, PATH)[: len(before)] == before
    assert int(logs_of(disk, PATH)[len(before)][:-4]) > 300
    target.apply(replica.all_of(store))
    target.sync()
    assert logs_of(made, COPY) == logs_of(disk, PATH)
    assert int(logs_of(disk, PATH)[0][:-4]) > 300
    store.close()


@pytest.mark.parametrize("how", ["moved aside", "quarantine emptied", "lost"])
def test_what_was_lost_at_the_beginning_stays_in_the_copy(how: str) -> None:
    """Only what a server trimmed goes from the copy, not what a start does not find."""
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, series = with_copy(disk, made, replica)
    store.close()
    before = logs_of(disk, PATH)
    disk.unlink(f"{PATH}/buckets/01/1/{before[0][:-4]}.idx")
    aside = f"{PATH}/quarantine/1-{before[0][:-4]}-0"
    disk.rename(f"{PATH}/buckets/01/1/{before[0]}", aside)  # as `check --fix` does
    if how == "quarantine emptied":
        disk.unlink(aside)
    elif how == "lost":
        disk.rename(aside, "/s/elsewhere")
    again = DiskStore(PATH, disk=disk, replica=replica.notify)
    again.replication.begin(positions([series]))  # type: ignore[union-attr]
    list(again.replication.open_all())  # type: ignore[union-attr]
    target.apply(replica.all_of(again))
    target.close()
    assert logs_of(made, COPY) == before


def test_what_was_lost_in_the_middle_stays_in_the_copy() -> None:
    """Also when the segment before it is trimmed, which answers for those sequences, too."""
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, series = with_copy(disk, made, replica)
    store.close()
    before = logs_of(disk, PATH)
    for ending in ("log", "idx"):
        disk.unlink(f"{PATH}/buckets/01/1/{before[1][:-4]}.{ending}")
    again = DiskStore(PATH, disk=disk, replica=replica.notify)
    again.replication.begin(positions([series]))  # type: ignore[union-attr]
    list(again.replication.open_all())  # type: ignore[union-attr]
    again.open(1).upkeep.trim({16: int(before[1][:-4])}, set())
    again.open(1).upkeep.sync()
    target.apply(replica.all_of(again))
    target.close()
    assert logs_of(disk, PATH) == before[2:]
    assert logs_of(made, COPY) == before[1:]
    again.close()


def test_what_was_compacted_into_a_trimmed_segment_goes_from_the_copy() -> None:
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, _ = with_copy(disk, made, replica)
    bucket, before = store.open(1), logs_of(disk, PATH)
    bucket.upkeep.trim({16: 1}, set(range(1, 200)) - set(bucket.chain.firsts))  # one of each segment stays
    for _ in range(20):
        store.tick()
    assert logs_of(disk, PATH) == [before[0], before[-1]]
    bucket.upkeep.trim({16: 200}, set())
    bucket.upkeep.sync()
    target.apply(replica.all_of(store))
    target.close()
    assert logs_of(disk, PATH) == logs_of(made, COPY)
    assert before[0] not in logs_of(made, COPY)
    store.close()


def test_a_segment_with_messages_behind_what_was_trimmed_stays_in_the_copy() -> None:
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, _ = with_copy(disk, made, replica)
    before = logs_of(made, COPY)
    second = int(before[1][:-4])
    target.apply([Trimmed(1, 1, second - 1)])
    assert logs_of(made, COPY) == before
    target.apply([Trimmed(1, 1, second)])
    assert logs_of(made, COPY) == before[1:]
    target.close()
    store.close()


def test_what_a_store_compacted_as_the_primary_stays_in_it_as_a_copy() -> None:
    """Its segment has messages of several, of which the new primary trims the first."""
    disk, made, replica = LyingDisk(), LyingDisk(), Copied()
    store, target, series = with_copy(disk, made, replica)
    bucket, before = store.open(1), logs_of(disk, PATH)
    firsts = list(bucket.chain.firsts)
    bucket.upkeep.trim({16: 1}, set(range(1, 200)) - set(firsts))
    for _ in range(20):
        store.tick()
    assert logs_of(disk, PATH) == [before[0], before[-1]]
    target.apply(rest := replica.all_of(store))
    target.close()
    store.close()
    primary = DiskStore(COPY, disk=made, replica=replica.notify)
    primary.replication.begin(positions([series, rest]))  # type: ignore[union-attr]
    list(primary.replication.open_all())  # type: ignore[union-attr]
    former = StandbyStore(PATH, primary.uuid, disk)
    primary.open(1).upkeep.trim({16: 1}, set(range(1, 200)) - set(firsts[1:]))
    primary.open(1).upkeep.sync()
    former.apply(entries := replica.all_of(primary))
    former.close()
    assert any(isinstance(entry, Trimmed) for entry in entries)
    primary.close()
    again, kept, at = DiskStore(PATH, disk=disk), list[int](), 0
    while (record := again.open(1).reader.scan(at)) is not None:
        kept += [record.sequence] if record.kind == Kind.MESSAGE else []
        at = record.sequence + 1
    assert set(firsts[1:]) <= set(kept)
    again.close()
