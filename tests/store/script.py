"""A seeded script of operations on a store, and what must hold of the store after any stop in it.

The script knows all results: which records it appended, which a sync had reported on disk, which numbers it was
given, which groups were made and removed. `check` compares a store that was started again with that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from mqfs.errors import Damaged, DiskFailed, MqfsError, NotFound
from mqfs.model import Draft, Kind, Record, Wait
from mqfs.store.api import Bucket
from mqfs.store.group_commit import Done, Job, run
from mqfs.store.store import DiskStore
from tests.support.lying_disk import LyingDisk

PATH = "/s/store"
STREAMS = (16, 17, 18)


@attrs.define
class Entry:
    """One record that was handed to a bucket."""

    sequence: int  # -1: the call did not return
    kind: int
    stream: int
    body: bytes
    unit: int  # entries of one unit share it


@attrs.define
class Known:
    """What the script knows of one group."""

    number: int
    entries: list[Entry] = attrs.Factory(list)
    committed: int = 0  # the number of entries that are on disk
    given: set[int] = attrs.Factory(set)
    floors: dict[int, int] = attrs.Factory(lambda: dict.fromkeys(STREAMS, 0))
    dropped: set[int] = attrs.Factory(set)
    made: bool = False  # its maker has the answer
    removing: bool = False
    is_left_alone: bool = False  # its remover has no answer yet
    removed: bool = False
    changes: int = 0  # CHANGE and ACK records appended
    state_at: int = 0

    def wanted(self, entry: Entry) -> bool:
        return entry.sequence >= self.floors[entry.stream] and entry.sequence not in self.dropped


class Unstarted(Exception):
    """The script's store did not start again: it ends."""


class Turns:
    """A committer whose jobs wait for a turn and take time: writers write while one runs and before its result."""

    def __init__(self, disk: LyingDisk, meanwhile: Callable[[], None]) -> None:
        self._disk, self._meanwhile = disk, meanwhile
        self._tasks: dict[object, tuple[Job, Done]] = {}
        self._results: deque[tuple[Done, OSError | None]] = deque()
        self._runs = False
        self._trouble: BaseException | None = None

    def request(self, key: object, job: Job, done: Done, within_s: float) -> None:
        self._tasks[key] = job, done

    def cancel(self, key: object) -> None:
        self._tasks.pop(key, None)

    def stop(self) -> None:
        self._tasks.clear()

    def turn(self) -> None:
        """Post the result of the job that ended, or run the next one."""
        if self._results:
            done, error = self._results.popleft()
            done(error)
        elif self._tasks and not self._runs:
            job, done = self._tasks.pop(next(iter(self._tasks)))
            self._runs, self._disk.meanwhile = True, self._work
            try:
                self._results.append((done, run(job)))
            finally:
                self._runs, self._disk.meanwhile = False, nothing
            if self._trouble is not None:
                raise self._trouble

    def _work(self) -> None:
        self._disk.meanwhile = nothing  # a sync that the program itself waits for is alone
        try:
            self._meanwhile()
        except Exception as trouble:
            self._trouble = self._trouble or trouble
        self._disk.meanwhile = self._work


def nothing() -> None:
    pass


class Script:
    """`run` performs `steps` operations; an exception from the disk leaves `known` as it was up to there.

    `slow`: syncs take time, and the writers go on meanwhile.
    """

    def __init__(self, seed: int, *, slow: bool = False) -> None:
        self.random = random.Random(seed)
        self.slow = slow
        self.turns: Turns | None = None
        self.tolerate = False
        self.known: dict[int, Known] = {}
        self.numbers: set[int] = set()
        self.store: DiskStore | None = None
        self.units = self.bodies = 0
        self.errors: list[BaseException] = []

    def run(self, disk: LyingDisk, steps: int, *, tolerate: bool = False) -> None:
        self.tolerate = tolerate
        self.start(disk)
        for _ in range(steps):
            self._try(lambda: self.step(disk))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except MqfsError as error:
            if not self.tolerate:
                raise
            self.errors.append(error)

    def start(self, disk: LyingDisk) -> None:
        self.store = DiskStore(PATH, disk=disk)
        if self.slow:
            self.turns = self.store.committer = Turns(disk, self._write_on)
        groups = set(self.store.groups())
        for known in self.known.values():
            if known.is_left_alone:
                known.removed, known.is_left_alone = known.number not in groups, False
            if known.made and not known.removed:
                self._state(self.store.open(known.number), known)

    def _state(self, bucket: Bucket, known: Known) -> None:
        bucket.writer.state = lambda: b"%d" % known.changes + b" " * (known.number * 40)

    def _write_on(self) -> None:
        """What the other writers do while a sync runs: none of them waits for it."""
        for _ in range(self.random.choice([0, 1, 3, 12])):
            self._try(lambda: self._use_any(self.random.random()))

    def _use_any(self, choice: float) -> None:
        assert self.store is not None
        if not (alive := self._alive()):
            return
        known = self.random.choice(alive)
        self._use(self.store.open(known.number), known, choice)

    def _alive(self) -> list[Known]:
        return [known for known in self.known.values() if known.made and not (known.removed or known.is_left_alone)]

    def step(self, disk: LyingDisk) -> None:
        assert self.store is not None
        if self.turns is not None and self.random.random() < 0.3:
            self.turns.turn()
        alive = self._alive()
        choice = self.random.random()
        if not alive or (choice < 0.02 and len(self.known) < 5):
            if self.turns is not None and self.known and choice < 0.7 and not alive:
                self.turns.turn()
            else:
                self._make()
            return
        if choice < 0.03:
            try:
                self.store.close()
                self.start(disk)
            except MqfsError as error:
                raise Unstarted from error
            return
        if choice < 0.04 and len(alive) > 1:
            self._remove(self.random.choice(alive))
            return
        self._use_any(choice)

    def _make(self) -> None:
        """One group, or some together."""
        for _ in range(self.random.randint(1, 3)):
            self._make_one()

    def _make_one(self) -> None:
        assert self.store is not None
        number = self.store.number()
        assert number not in self.numbers
        self.numbers.add(number)
        known = self.known[number] = Known(number)

        def made(wait: Wait[Any]) -> None:
            def take() -> None:
                self._state(wait.result(), known)
                known.made = True

            self._try(take)

        wait: Wait[Any] = Wait()
        wait.subscribe(made)
        wait.follow_call(lambda: self.store.make_soon(number, b"0"))  # type: ignore[union-attr]

    def _remove(self, known: Known) -> None:
        """It is left alone until it is known whether it went."""
        known.removing = known.is_left_alone = True

        def removed(wait: Wait[None]) -> None:
            def take() -> None:
                wait.result()
                known.removed = True

            known.is_left_alone = False
            self._try(take)

        wait: Wait[None] = Wait()
        wait.subscribe(removed)
        wait.follow_call(lambda: self.store.remove(known.number))  # type: ignore[union-attr]

    def _use(self, bucket: Bucket, known: Known, choice: float) -> None:
        assert self.store is not None
        if choice < 0.50:
            self._append(bucket, known, Kind.MESSAGE)
        elif choice < 0.54:
            self._append(bucket, known, Kind.END)
        elif choice < 0.64:
            self._append(bucket, known, self.random.choice([Kind.CHANGE, Kind.ACK]))
        elif choice < 0.70:
            self._append_unit(bucket, known)
        elif choice < 0.72:
            sequence = bucket.writer.skip()
            assert sequence not in known.given
            known.given.add(sequence)
        elif choice < 0.90:
            self._sync(bucket, known)
        elif choice < 0.97:
            self._trim(bucket, known)
        else:
            self.store.tick()

    def _body(self) -> bytes:
        size = self.random.choice([0, 1, 20, 20, 100, 100, 700])
        self.bodies += 1
        mark = b"%d " % self.bodies
        return mark + self.random.randbytes(size) + b"\0" * self.random.choice([0, 0, 9])

    def _append(self, bucket: Bucket, known: Known, kind: int) -> None:
        self.units += 1
        stream = self.random.choice(STREAMS) if kind != Kind.CHANGE else 0
        body = b"%024d" % known.changes if kind == Kind.ACK else b"%d" % known.changes
        body = self._body() if kind <= Kind.END else body
        entry = Entry(-1, kind, stream, body, self.units)
        known.entries.append(entry)
        try:
            sequence = bucket.writer.append(kind, stream, len(known.entries), body)
        except MqfsError as error:
            self._refused(known, [entry], error)
            raise
        self._given(known, [entry], sequence)

    def _append_unit(self, bucket: Bucket, known: Known) -> None:
        self.units += 1
        entries, drafts = [], []
        for _ in range(self.random.randint(2, 5)):
            entry = Entry(-1, Kind.MESSAGE, self.random.choice(STREAMS), self._body(), self.units)
            known.entries.append(entry)
            entries.append(entry)
            drafts.append(Draft(entry.kind, entry.stream, entry.body))
        try:
            sequence = bucket.writer.append_batch(drafts, len(known.entries))
        except MqfsError as error:
            self._refused(known, entries, error)
            raise
        self._given(known, entries, sequence)

    def _refused(self, known: Known, entries: list[Entry], error: MqfsError) -> None:
        """They must never be seen. But a disk that fails for good may keep all of a record but zeros at its end, which
        are there anyway, and does not let it be taken back."""
        assert self.store is not None
        assert isinstance(self.store.disk, LyingDisk)
        if not (isinstance(error, DiskFailed) and self.store.disk.fail_on):
            for entry in entries:
                known.entries.remove(entry)

    def _given(self, known: Known, entries: list[Entry], sequence: int) -> None:
        for number, entry in enumerate(entries):
            entry.sequence = sequence + number
            if entry.kind > Kind.END:
                known.changes += 1
                continue
            assert entry.sequence not in known.given, "a sequence was given twice"
            assert not known.given or entry.sequence > max(known.given)
            known.given.add(entry.sequence)

    def _sync(self, bucket: Bucket, known: Known) -> None:
        count = len(known.entries)

        def told(error: OSError | None) -> None:
            if error is None:
                known.committed = max(known.committed, count)

        bucket.upkeep.sync(told)

    def _trim(self, bucket: Bucket, known: Known) -> None:
        for stream in STREAMS:
            if self.random.random() < 0.5:
                known.floors[stream] = max(known.floors[stream], bucket.end.next - self.random.randint(0, 25))
        if known.given and self.random.random() < 0.5:
            known.dropped.add(self.random.choice(sorted(known.given)))
        bucket.upkeep.trim(dict(known.floors), set(known.dropped))
        self.store.tick()  # type: ignore[union-attr]

    # ------------------------------------------------------------ what must hold

    def check(self, store: DiskStore, *, everything: bool = False) -> None:
        """`everything`: the page cache was not lost, so that all that was appended must be there."""
        groups = set(store.groups())
        for known in self.known.values():
            if known.removed:
                assert known.number not in groups, "a removed group is back"
            elif known.made and not known.removing:
                assert known.number in groups, "a group that was made is gone"
            known.removed, known.removing, known.is_left_alone = known.number not in groups, False, False
            if known.number in groups:
                self._check_group(store, known, everything)
        assert groups <= self.numbers
        number = store.number()
        assert number not in self.numbers, "a group number was given twice"
        self.numbers.add(number)
        for gone in self.numbers - groups:
            try:
                store.open(gone)
            except NotFound:
                continue
            raise AssertionError("a group that is not there was opened")

    def _check_group(self, store: DiskStore, known: Known, everything: bool) -> None:
        bucket = store.open(known.number)
        messages = [entry for entry in known.entries if entry.kind <= Kind.END]
        found = read(bucket)
        self._check_history(bucket, known, everything)
        sure = messages if everything else [e for e in known.entries[: known.committed] if e.kind <= Kind.END]
        for entry in sure:
            if entry.sequence >= 0 and known.wanted(entry):
                assert entry.sequence in found, "lost"
        # A call that did not return has no sequence: it is recognised by its body, which begins with a number.
        bodies = {entry.body: entry for entry in messages}
        for sequence, record in found.items():
            assert record.body in bodies, "invented"
            entry = bodies[record.body]
            assert (entry.kind, entry.stream) == (record.kind, record.stream)
            assert entry.sequence in (-1, sequence), "another sequence"
            entry.sequence = sequence
            known.given.add(sequence)
        self._check_units(known, messages, found)
        order = [entry.sequence for entry in messages if entry.sequence in found]
        assert order == sorted(order)
        assert bucket.end.next > max(known.given, default=0), "a sequence will be given twice"
        self._forget_lost(known, found)

    def _check_units(self, known: Known, messages: list[Entry], found: dict[int, Record]) -> None:
        units: dict[int, list[bool]] = {}
        for entry in messages:
            if entry.sequence < 0 or known.wanted(entry):
                units.setdefault(entry.unit, []).append(entry.sequence in found)
        assert all(len(set(seen)) == 1 for seen in units.values()), "half a unit"

    def _check_history(self, bucket: Bucket, known: Known, everything: bool) -> None:
        state, behind = bucket.upkeep.history()
        assert state is not None
        count = int(state)
        for record in behind:
            assert int(record.body) == count, "a change is missing or there twice"
            count += 1
        done = known.entries if everything else known.entries[: known.committed]
        least = sum(entry.kind > Kind.END and entry.sequence >= 0 for entry in done)
        most = sum(entry.kind > Kind.END for entry in known.entries)
        base = known.state_at
        assert base + least <= count <= base + most, "a change was lost or invented"
        known.changes, known.state_at = count, count

    def _forget_lost(self, known: Known, found: dict[int, Record]) -> None:
        """From here on the store is the truth: what was not committed may be gone, and what is there stays."""
        known.entries = [e for e in known.entries if e.kind <= Kind.END and e.sequence in found]
        known.committed = len(known.entries)
        known.made = True


def read(bucket: Bucket) -> dict[int, Record]:
    """All messages by scan, which find must agree with."""
    found: dict[int, Record] = {}
    sequence = 0
    while True:
        try:
            record = bucket.reader.scan(sequence)
        except Damaged as error:
            sequence = error.sequence + 1
            continue
        if record is None:
            break
        assert record.sequence >= sequence
        assert record.sequence not in found
        found[record.sequence] = record
        assert bucket.reader.find(record.stream, record.sequence) == record
        sequence = record.sequence + 1
    for stream in STREAMS:
        mine = [r.sequence for r in found.values() if r.stream == stream]
        assert bucket.metrics.count(stream, 0)[0] >= len(mine)
    return found
