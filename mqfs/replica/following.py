"""Following a replicated log: frames become the same bytes in the same segment files of a store without an engine.

    log      ... 417 | 418 419+ 420+ 421 | 422      `+`: MORE, so 419 to 421 are one batch
    disk     after 418 while 421 is not read; after 421 when all three were written and synced
    state    the position of a sync before; a start reads the frames after it again, which changes nothing

If the frames after the position were removed, or belong to another history, the store is set aside in quarantine/ and
copied again from the newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from mqfs.errors import BadReplica
from mqfs.replica import checkpoint, state
from mqfs.replica.checkpoint import Checkpoint
from mqfs.replica.frame import Frame, Owner, crc_of, decode
from mqfs.replica.log import FramesMissing, LogRecord, NoAnswer, Position, Reader, ReplicatedLog
from mqfs.replica.state import ReplicaState
from mqfs.store.disk import Disk, remove_tree
from mqfs.store.replication import LogBytes, Removed, Trimmed
from mqfs.store.standby import StandbyStore
from mqfs.store.store import FOLDERS, read_label, refusing

if TYPE_CHECKING:
    from mqfs.replica.restore import Ending

log = logging.getLogger("mqfs.replica")


class Diverged(Exception):
    """The store is not a copy of a beginning of the log. The text says why."""


class Outdated(Diverged):
    """The store is a copy of a beginning of the log, and frames that it needs next were removed."""


class Follower:
    """One store that follows the log. Its calls raise NoAnswer, BadReplica, Diverged and errors of the store. After
    such an error, a new follower begins at the state that was written last."""

    def __init__(self, replicated: ReplicatedLog, path: str, found: ReplicaState) -> None:
        """Hold the store's lock. `found`: the state of the store."""
        assert found.position.store is not None
        self._log, self.path, self.state = replicated, path, found
        self.store = StandbyStore(path, str(found.position.store))
        self.reader = Reader(attrs.evolve(found.position), f"{path}/staging")
        self.takeovers: list[Owner] = []  # takeovers that were read
        self.written = False  # whether the last step had bytes of the store
        self._noted = time.monotonic()
        self._closed = False

    def step(self, wait_s: float, ending: Ending | None = None) -> int:
        """Read and apply available frames, and sync them; return their number. The first frame is awaited for at most
        `wait_s` seconds. `ending`: excludes frames from a restore. The step returns -1 at the first excluded batch, and
        frames are synced only by `close`."""
        records = self._log.read(self.reader.position.number, wait_s)
        ended, takeovers, self.written = False, len(self.takeovers), False
        for record in records:
            before = attrs.evolve(self.reader.complete)
            batch = self._feed(record)
            if batch is not None and ending is not None and ending.excludes(self.reader.complete.time_ns):
                self.reader.complete, ended = before, True
                break
            if batch is not None:
                self._apply(batch, ending)
        if records:
            if ending is None:
                self.store.sync()
            self.state.position = attrs.evolve(self.reader.complete)
        is_due = records and (time.monotonic() - self._noted > 1.0 or len(self.takeovers) > takeovers)
        if is_due and ending is None:
            self.note()  # a takeover at once: a start must tell a new one from one that was followed
        return -1 if ended else len(records)

    def follow_next(self) -> bool:
        """Apply the next frame if it is there; return whether it was. It is on disk after `sync`. This is for a server
        about to append the frame after it: as little as possible happens between this read and the append."""
        number = self.reader.position.number + 1
        data = self._log.get(number)
        if data is not None and (batch := self._feed(LogRecord(number, data))) is not None:
            self._apply(batch, None)
        return data is not None

    def sync(self) -> None:
        """Sync all that was applied, and record it in the state."""
        self.store.sync()
        self.state.position = attrs.evolve(self.reader.complete)
        self.note()

    def _feed(self, record: LogRecord) -> Iterable[Frame] | None:
        try:
            with refusing(self.path):
                return self.reader.feed(record)
        except FramesMissing as error:  # they were trimmed since `check_history`
            raise Outdated(str(error)) from None
        except BadReplica as error:
            raise Diverged(str(error)) from None

    def note(self) -> None:
        """Write the state. All that was applied must be synced before."""
        state.write(self.path, self.state)
        self._noted = time.monotonic()

    def _apply(self, batch: Iterable[Frame], ending: Ending | None) -> None:
        with refusing(self.path):  # a file has the rest of a large batch
            for frame in batch:
                if frame.owner is not None:
                    self.takeovers.append(frame.owner)
                    if self.state.primary and frame.owner.run not in self.state.runs:
                        self._leave_to(frame.owner)
                entries: Sequence[LogBytes | Trimmed | Removed]
                entries = [entry for entry in frame.entries if not isinstance(entry, Owner)]
                if ending is not None:
                    entries = ending.cut(entries)
                self.store.apply(entries)
                state.note(self.state.have, entries)
                self.written |= any(isinstance(entry, LogBytes) for entry in entries)

    def _leave_to(self, owner: Owner) -> None:
        """Become a standby, as another server took over from this store, which was the primary. Raises Diverged if its
        content differs from the log's: it would continue another history."""
        for group, here, there in self.ends():
            if here[0] < there[0] or here > there:
                text = f"group {group} ends at {here}, in the log at {there}"
                raise Diverged(f"{owner.address or 'another server'} took over, and {text}")
        self.state.primary = False

    def ends(self) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Yield where each group ends on this disk, and in the log: the name of its newest segment, and the bytes of
        it."""
        found = self.store.positions()
        for group in found.keys() | self.state.have.keys():
            yield group, found.get(group, (0, 0)), self.state.have.get(group, (0, 0))

    def catch_up(self, near: int = 0) -> None:
        """Step to the end of the log, as far as it is seen. `near`: once at most that many frames are missing, stop at
        the end that was seen then."""
        end, is_near = 0, False
        while not is_near or self.reader.position.number < end:
            at = self.reader.position.number
            last = self._log.newest(at)
            end = last.number if last is not None else at
            is_near = end - at <= near
            while self.reader.position.number < end and self.step(0.0):
                pass
        self.note()

    def close(self) -> None:
        """Sync all that was applied, and release the lock. May be called again."""
        if not self._closed:
            self._closed = True
            self.reader.close()
            self.store.close()


# ------------------------------------------------------------ beginning


def store_of(replicated: ReplicatedLog) -> uuid.UUID | None:
    """Return the store whose log this is; None if nothing was ever appended."""
    record = replicated.newest(0)
    if record is None:
        return None
    return decode(record.data).store


def check_history(replicated: ReplicatedLog, position: Position) -> None:
    """Raise Diverged if the log does not hold the frame of that position, or another in its place. Raise BadReplica if
    the log is a beginning of what this store has: no other copy has the missing frames, so the store is not set
    aside."""
    if not position.number:
        return
    data, after = replicated.get(position.number), replicated.get(position.number + 1)
    if data is None and after is None:
        if replicated.newest(position.number) is not None:
            raise Outdated(f"frames after {position.number} were trimmed")
        if (end := end_before(replicated, position)) and not is_replaced(replicated, position):
            expected = "expected another name in --replica, and the file 'replica' of this store moved away"
            raise BadReplica(f"{replicated.name}: {lost(end, position)}, which this store has ({expected})")
        raise Diverged(f"the log ends before frame {position.number}")
    if (crc_of(data) if data is not None else decode(after or b"").previous_crc) != position.crc:
        raise Diverged(f"frame {position.number} is another one")


def end_before(replicated: ReplicatedLog, position: Position) -> int:
    """Return the number of the last record if it is below the position, although the engine confirmed more; otherwise
    0."""
    if replicated.get(position.number) is not None:
        return 0  # without listing the whole log
    last = replicated.newest(0)
    return last.number if last is not None and last.number < position.number else 0


def lost(end: int, position: Position) -> str:
    return f"ends at frame {end}, and had frame {position.number}: the engine lost what it confirmed"


def is_replaced(replicated: ReplicatedLog, position: Position) -> bool:
    """Whether another server took over a log that had lost its end: its newest epoch is later than the position's, or
    begins with another takeover. An earlier epoch counts as a beginning of what this store has."""
    last = replicated.newest(0)
    if last is None or (epoch := decode(last.data).epoch) != position.epoch:
        return last is not None and epoch > position.epoch
    data = replicated.get(position.own)
    owner = decode(data).owner if data is not None else None
    return owner is None or owner.address != position.address


def open_follower(replicated: ReplicatedLog, path: str, store: uuid.UUID) -> Follower:
    """Open a follower at the state of the store at that path; if it has none, or one that does not fit, at the newest
    checkpoint. Raises BadReplica if it is another store."""
    found = state.read(path)
    if found is not None and found.position.store is not None:
        if found.position.store != store:
            raise BadReplica(f"{replicated.name}: of store {store} (expected {found.position.store}, as {path})")
        try:
            if found.position.number or found.primary:
                check_history(replicated, found.position)
                return Follower(replicated, path, found)
            if has_groups(path):
                raise Outdated("its copy was not finished")
        except Diverged as why:
            discard(path, why, primary=found.primary)
    elif has_groups(path):
        raise BadReplica(f"{path}: a store without a position in {replicated.name} (expected an empty directory)")
    return copy_again(replicated, path, store)


def has_groups(path: str) -> bool:
    buckets = f"{path}/buckets"
    return os.path.isdir(buckets) and any(os.listdir(f"{buckets}/{name}") for name in os.listdir(buckets))


def discard(path: str, why: Diverged, *, primary: bool) -> None:
    """Make room for a new copy. An outdated copy that never was a primary is removed, since the log has all of it.
    Everything else is set aside. Raises DiskFull, DiskFailed."""
    with refusing(path):
        if isinstance(why, Outdated) and not primary:
            log.warning("%s is copied again: %s", path, why)
            found = state.read(path)
            if found is not None:  # marks the copy as not finished
                state.write(path, ReplicaState(Position(store=found.position.store), {}, found.runs, False))
            remove_tree(Disk(), f"{path}/buckets")
        else:
            set_aside(path, str(why))


def set_aside(path: str, why: str) -> None:
    """Move the buckets of a store, which differ from the log, into its quarantine/."""
    disk = Disk()
    number = 1
    while disk.exists(f"{path}/quarantine/fenced-{number}"):
        number += 1
    to = f"{path}/quarantine/fenced-{number}"
    log.warning("%s is set aside in %s, and copied again: %s", path, to, why)
    found = state.read(path, disk)
    if found is not None:  # after a crash here, a start sets it aside again, since it has more than nothing
        state.write(path, ReplicaState(Position(store=found.position.store), {}, [], True), disk)
    if disk.exists(f"{path}/buckets"):
        disk.rename(f"{path}/buckets", to)
    disk.sync_folder(f"{path}/quarantine")
    disk.sync_folder(path)
    state.remove(path, disk)


def copy_again(replicated: ReplicatedLog, path: str, store: uuid.UUID) -> Follower:
    """Return a follower at the newest checkpoint, which is written to an empty store; without a checkpoint, at the
    beginning of the log. If a newer checkpoint replaces it meanwhile and its parts are removed, the newer one is used.
    Raises BadReplica if the newest is damaged."""
    while True:
        base = _base(replicated)
        try:
            return copy_from(replicated, path, store, base)
        except BadReplica as error:
            newer = checkpoint.newest(replicated)
            if base is None or newer is None or newer.name <= base.name:
                raise
            why = f"{error}, as a copy takes longer than --replica-keep: {newer.name} is newer"
        discard(path, Outdated(why), primary=False)


def _base(replicated: ReplicatedLog) -> Checkpoint | None:
    """Return the newest checkpoint; None: the log begins with its first frame, which is there. Raises NoAnswer."""
    base = checkpoint.newest(replicated)
    if base is None and replicated.get(2) is None and replicated.newest(2) is not None:
        raise NoAnswer("no checkpoint, and the first frames were trimmed")  # an engine not yet whole
    if base is None and ((first := replicated.get(1)) is None or decode(first).previous_crc):
        raise NoAnswer("the checkpoint with which it begins is not there")
    return base


def copy_from(
    replicated: ReplicatedLog, path: str, store: uuid.UUID, base: Checkpoint | None, ending: Ending | None = None
) -> Follower:
    """Return a follower at that checkpoint, which is written to an empty store; None: at the first frame."""
    if os.path.isdir(path) and os.path.exists(f"{path}/mqfs"):
        found = read_label(Disk(), path)[0]
        if found != str(store):
            _make_empty(path, found)
    position = Position(store=store) if base is None else base.position
    follower = Follower(
        replicated, path, ReplicaState(attrs.evolve(position), {} if base is None else base.have, [], False)
    )
    try:
        state.write(path, ReplicaState(Position(store=store), {}, [], False))  # marks the copy as not finished
        if base is not None:
            log.info("%s: %d segments of %s are copied", path, len(base.segments), base.name)
            for run in checkpoint.runs(replicated.objects, base):
                follower.store.apply([run] if ending is None else ending.cut([run]))
        follower.store.sync()
        follower.note()
    except BaseException:
        follower.close()
        raise
    return follower


def _make_empty(path: str, found: str) -> None:
    """Remove the label of a store without groups: a start before the log's first frame made it."""
    if has_groups(path):
        raise BadReplica(f"{path}: store {found} (expected a copy, or an empty directory)")
    os.unlink(f"{path}/mqfs")
    for name in FOLDERS:
        if os.path.isdir(f"{path}/{name}"):
            Disk().sync_folder(f"{path}/{name}")
