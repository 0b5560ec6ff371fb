"""`mqfs restore`: a standby that ends with the log, at a time, or at a message; with all groups, or some.

    --until @TIME             frames up to that time
    --until shop/eu:41        m40 m41 | m42     the group ends before the batch that begins with a later message; of the
                                                others counts what was replicated by then, as frames have it
    --group shop/eu           it, those inside, and those above: /, shop. All of the log is read

It begins with the newest checkpoint that is whole before that point. Whether a checkpoint is before a message is known
when it is copied; whether it is whole there, when the message is reached.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from mqfs import errors, limits
from mqfs.errors import BadReplica, BadStore, MqfsError, NotFound
from mqfs.model import Kind
from mqfs.records.record import HEAD, HEAD_BYTES, INNER, padded
from mqfs.replica import checkpoint, state
from mqfs.replica.checkpoint import Checkpoint
from mqfs.replica.following import Diverged, Follower, copy_from, store_of
from mqfs.replica.frame import decode
from mqfs.replica.log import NoAnswer, Position, ReplicatedLog
from mqfs.state.group import ROOT, place_of
from mqfs.store.disk import Disk, remove_tree
from mqfs.store.replication import Entry, LogBytes, Removed
from mqfs.store.standby import StandbyStore
from mqfs.store.store import FOLDERS, DiskBucket, DiskStore, folder_of, prepare, read_label, refusing, write_label

log = logging.getLogger("mqfs.replica")
SPARE_SEQUENCES = 1 << 32


class Restored(NamedTuple):
    groups: int
    number: int  # of the last frame
    time_ns: int  # of that frame
    missed: str = ""  # the part of the request or of the log that is not in it: a few words


class Point(NamedTuple):
    """Where a restore ends: at a time, at a message, or with the log."""

    time_ns: int | None = None
    group: str = ""
    sequence: int = -1  # negative: no message


class _NotReached(BadReplica):
    """The log does not have the requested message."""


class Ending:
    """The end of a restore: which entries a follower leaves out, and when the end is reached. See its calls in
    following.py."""

    def __init__(self, point: Point, *, names: bool) -> None:
        """`names`: whether the names of the groups are needed."""
        self._point, self.is_over = point, False
        self.is_past = False  # the log has something after the point
        self.heads = Heads() if names or point.sequence >= 0 else None
        self.number, self.newest = 0, -1  # of the group that ends with a message
        self._seen, self._wants = (0, 0), False

    def excludes(self, time_ns: int) -> bool:
        """Whether a batch that ends at that time is after the point."""
        if self.is_over or (self._point.time_ns is not None and time_ns > self._point.time_ns):
            self.is_past = True
        return self.is_past

    def missed(self, complete: Position, last: Position) -> str:
        """Return the part of the request that the log does not have, in a few words. `complete`: the last frame that
        ends a batch; `last`: the last frame."""
        wanted, found = self._point.time_ns, list[str]()
        if self.is_past or self._point.sequence >= 0 or (wanted is not None and last.time_ns > wanted):
            return ""
        if last.number > complete.number:
            found.append(f"without frames {complete.number + 1} to {last.number}, a batch whose end is not in the log")
        if wanted is not None:
            found.append("the time of --until is not reached: the log ends before it")
        return "; ".join(found)

    def cut(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries of a frame that count."""
        return entries if self.heads is None else [kept for entry in entries if (kept := self._cut(entry)) is not None]

    def _cut(self, entry: Entry) -> Entry | None:
        assert self.heads is not None
        wanted = self._point.sequence
        if self.is_over and entry.group == self.number:
            return None
        for sequence, position, is_first in self.heads.feed(entry):
            assert isinstance(entry, LogBytes)
            if wanted < 0 or self.is_over or not self._is_wanted(entry.group):
                continue
            self.number = entry.group
            if sequence > wanted and is_first:
                self.is_over = True
                size = position - entry.position
                return entry._replace(data=entry.data[:size]) if size > 0 else None
            self.newest = sequence
        return entry

    def _is_wanted(self, group: int) -> bool:
        """Whether the group is the one that ends with a message: it has the wanted path now, or had it when it was
        chosen."""
        assert self.heads is not None
        if group == self.number:
            return True
        if self._seen != (seen := (group, self.heads.changes)):
            self._seen, self._wants = seen, self.heads.path(group) == self._point.group
        return self._wants

    def require_reached(self) -> None:
        """Raise BadReplica if the log does not have the requested message."""
        if self.is_over or self.newest >= self._point.sequence:  # above it: later messages of its batch
            return
        what = f"--until {self._point.group}:{self._point.sequence}"
        assert self.heads is not None
        if not self.number and self._point.group not in (paths := self.heads.paths()):
            raise _NotReached(f"{what}: {errors.unknown('group', self._point.group, filter(None, paths))}")
        raise _NotReached(f"{what}: not in the log (expected at most {self.newest})")


def restore(
    replicated: ReplicatedLog,
    path: str,
    point: Point,
    groups: Sequence[str] = (),
    progress: Callable[[int], None] = lambda number: None,
) -> Restored:
    """Make the store at `path`, a new directory. It gets its own uuid, and reserves sequences so that clients that saw
    later messages never see their numbers again. The log is only read. `groups`: paths of those to restore; none: all.
    `progress` gets the number of the last frame read. Raises BadReplica, BadStore, DiskFull and DiskFailed; then it
    leaves nothing of its own in the directory, or says what stays."""
    _require_empty(path, set())
    replicated = _patient(replicated)
    try:
        store = store_of(replicated)
        if store is None:
            raise BadReplica(f"{replicated.name}: empty log: nothing to restore")
        work = _begin(path)
    except NoAnswer as error:
        raise _refused(replicated, error, "") from None
    try:
        follower, ending = _follow(replicated, work, store, point, groups, progress)
        with refusing(path):
            count = _make_own(work)
            _put_in_place(path)
    except (MqfsError, NoAnswer, Diverged) as error:
        raise _refused(replicated, error, _remove(work)) from error.__cause__
    except BaseException:
        if stays := _remove(work):
            log.warning("%s", stays)
        raise
    at = follower.reader.complete
    return Restored(count, at.number, at.time_ns, ending.missed(at, follower.reader.position))


def _refused(replicated: ReplicatedLog, error: MqfsError | NoAnswer | Diverged, stays: str) -> MqfsError:
    """Return the error of a restore, with a note of its remains."""
    text = f"{error} ({stays})" if stays else str(error)
    return type(error)(text) if isinstance(error, MqfsError) else BadReplica(f"{replicated.name}: not restored: {text}")


# ------------------------------------------------------------ engine


class _Patient:
    """An engine, or its objects: a call without an answer is repeated for limits.REPLICA_RESTORE_S, since a restore may
    have read for hours."""

    objects: _Patient

    def __init__(self, name: str, engine: object) -> None:
        self._log_name, self._engine = name, engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began, said = time.monotonic(), False
        while True:
            try:
                return call(*arguments)
            except NoAnswer as error:
                waited, most = time.monotonic() - began, limits.REPLICA_RESTORE_S
                if waited >= most:
                    raise
                if not said:
                    log.warning("%s: no answer: %s; tried again for %.0f s", self._log_name, error, most)
                said = True
                time.sleep(min(limits.REPLICA_RETRY_S, 0.05 + waited / 4))


def _patient(replicated: ReplicatedLog) -> ReplicatedLog:
    found = _Patient(replicated.name, replicated)
    found.objects = _Patient(replicated.name, replicated.objects)
    return cast(ReplicatedLog, found)


# ------------------------------------------------------------ directory

# The store is made in a folder of its own in the directory: a failure removes that folder, and nothing else.
#
#     shop/restore/  buckets mqfs replica ...      no server begins in `shop` while it has that folder, and no label
#     shop/          buckets ... restore/mqfs      its label goes last
#     shop/          buckets mqfs ...              a store

_WORK = "restore"


def _require_empty(path: str, own: set[str]) -> None:
    """Raise BadStore if the directory has other names than `own`."""
    with refusing(path):
        if os.path.exists(path) and set(os.listdir(path)) - own:
            raise BadStore(f"{path}: not empty (expected a new directory)")


def _begin(path: str) -> str:
    """Make the directory, if it does not exist, and the folder in it. Raises BadStore if another restore has that
    folder."""
    disk = Disk()
    with refusing(path):
        prepare(disk, path)
        try:
            disk.mkdir(f"{path}/{_WORK}")
        except FileExistsError:
            _require_empty(path, set())
            raise
    return f"{path}/{_WORK}"


def _put_in_place(path: str) -> None:
    """Move the store from the folder to the directory. After an error it is in the folder."""
    disk, moved = Disk(), list[str]()
    _require_empty(path, {_WORK})
    try:
        for name in (*FOLDERS, "mqfs"):
            disk.sync_folder(path)
            disk.rename(f"{path}/{_WORK}/{name}", f"{path}/{name}")
            moved.append(name)
        disk.sync_folder(path)
    except BaseException:
        for name in reversed(moved):
            disk.rename(f"{path}/{name}", f"{path}/{_WORK}/{name}")
        raise
    if stays := _remove(f"{path}/{_WORK}"):
        log.warning("%s", stays)


def _empty(work: str) -> None:
    """Remove the contents of the folder. The folder stays, so that no other restore begins."""
    with refusing(work):
        for name in os.listdir(work):
            remove_tree(Disk(), f"{work}/{name}")


def _remove(work: str) -> str:
    """Remove the folder; return what stays, and why, in a few words."""
    try:
        remove_tree(Disk(), work)
    except OSError as error:
        return f"{work} stays: {error.strerror}"
    return ""


# ------------------------------------------------------------ reading


def _follow(
    replicated: ReplicatedLog,
    path: str,
    store: uuid.UUID,
    point: Point,
    groups: Sequence[str],
    progress: Callable[[int], None],
) -> tuple[Follower, Ending]:
    """Follow the log up to the point; return the follower, closed."""
    why, tried = list[BadReplica](), 0
    for tried, base in enumerate(_bases(replicated, point, why)):
        ending = Ending(point, names=bool(groups))
        follower = _copied(replicated, path, store, base, ending, why)
        if follower is None:
            continue
        try:
            if base is None or not ending.is_over:
                _read(replicated, follower, ending, progress)
                if base is None or not ending.is_over or follower.state.position.number > base.whole:
                    if groups:
                        _remove_others(follower.store, ending, groups)
                    return follower, ending
        except _NotReached as error:
            why.append(error)  # the message may have been trimmed before the checkpoint
        except Diverged:
            if base is not None or not (tried or why):
                raise  # otherwise the first frames were trimmed
        finally:
            follower.close()
        _empty(path)  # the checkpoint is not whole before that point: try an older one
    expected = "expected a later --until, as --replica-keep allows"
    raise why[0] if why else BadReplica(f"{replicated.name}: begins after that point ({expected})")


def _copied(
    replicated: ReplicatedLog,
    path: str,
    store: uuid.UUID,
    base: Checkpoint | None,
    ending: Ending,
    why: list[BadReplica],
) -> Follower | None:
    """Return a follower at that checkpoint; None, with the reason in `why`, if the checkpoint is damaged: an older one
    may be whole."""
    try:
        return copy_from(replicated, path, store, base, ending)
    except BadReplica as error:
        if base is None:
            raise
        _pass_over(replicated, base.name, error, why)
    _empty(path)
    return None


def _pass_over(replicated: ReplicatedLog, name: str, error: BadReplica, why: list[BadReplica]) -> None:
    why.append(error)
    log.warning("%s: %s is not used, and an older one is: %s", replicated.name, name, error)


def _read(replicated: ReplicatedLog, follower: Follower, ending: Ending, progress: Callable[[int], None]) -> None:
    """Follow up to the point. Raises BadReplica if the log does not have it."""
    while (count := follower.step(0.2, ending)) >= 0:
        progress(follower.state.position.number)
        if not count and replicated.newest(follower.reader.position.number) is None:
            break
    ending.require_reached()


def _bases(replicated: ReplicatedLog, point: Point, why: list[BadReplica]) -> Iterator[Checkpoint | None]:
    """Yield the checkpoints that may be whole before the point, the newest first, and at last None, the first frame."""
    for name in reversed(checkpoint.list_names(replicated)):
        try:
            made = checkpoint.load(replicated, name)
            fits = made is not None and (point.time_ns is None or _is_whole_by(replicated, made, point.time_ns))
        except BadReplica as error:
            _pass_over(replicated, name, error, why)
            continue
        if fits:
            yield made
    yield None


def _is_whole_by(replicated: ReplicatedLog, made: Checkpoint, time_ns: int) -> bool:
    if made.position.time_ns > time_ns or made.whole == made.position.number:
        return made.position.time_ns <= time_ns
    data = replicated.get(made.whole)
    return data is not None and decode(data).time_ns <= time_ns


def _remove_others(store: StandbyStore, ending: Ending, wanted: Sequence[str]) -> None:
    """Remove the groups that were not requested. Raises BadReplica if a requested group does not exist."""
    assert ending.heads is not None
    paths = ending.heads.paths()
    for path in wanted:
        if path not in paths:
            raise BadReplica(f"--group {path}: {errors.unknown('group', path, filter(None, paths))}")
    kept = {paths[path] for path in paths if any(_is_inside(path, one) or _is_inside(one, path) for one in wanted)}
    store.apply(Removed(number) for number in store.positions() if number not in kept)


def _is_inside(path: str, group: str) -> bool:
    return not group or path == group or path.startswith(f"{group}/")


def _make_own(path: str) -> int:
    """Make it a store of its own, with sequences reserved; return the number of its groups."""
    disk = Disk()
    _, numbers = read_label(disk, path)
    write_label(disk, path, str(uuid.uuid4()), numbers)
    store, opened = DiskStore(path), list[DiskBucket]()
    try:
        _reserve(store, opened)
        count = len(store.groups())
    except BaseException:
        for bucket in opened:
            bucket.upkeep.abandon()  # the store is removed
        raise
    finally:
        store.close()
    state.remove(path, disk)
    return count


def _reserve(store: DiskStore, opened: list[DiskBucket]) -> None:
    """Write to disk where the sequences of each group continue; a close would do so without raising errors."""
    for number in store.groups():
        try:
            bucket = store.open(number)
        except NotFound:
            continue  # its log ends with its removal, whose frame was not there yet
        opened.append(bucket)
        after = bucket.end.next + SPARE_SEQUENCES
        if bucket.chain.open is None:
            opened[-1] = bucket = _unsealed(store, bucket)
        bucket.ranges.skip_to(after)
        bucket.writer.reserve_at_stop()
        segment = bucket.chain.open
        assert segment is not None
        store.disk.fdatasync(segment.open())
        if bucket is not store.open(number):
            bucket.upkeep.close()


def _unsealed(store: DiskStore, bucket: DiskBucket) -> DiskBucket:
    """Reopen the log so that its newest segment is appended to again, since a new one would need a state, which only
    the engine knows. The segment after it is in quarantine/. A segment without an index is not sealed."""
    number, newest = bucket.id, bucket.chain.segments[-1]
    log.warning("group %d: its newest segment is not whole and was left out, see quarantine/", number)
    bucket.upkeep.abandon()
    store.disk.unlink(f"{newest.path[:-4]}.idx")
    folder = folder_of(store.path, number)
    store.disk.sync_folder(folder)
    return DiskBucket(store, number, folder)


# ------------------------------------------------------------ heads

# Facts about the groups, taken from the heads of the records in runs of the log. A run may end inside a record:
#
#     ....][state "eu" in 3 | m40 | m4 ... 1 | ack | m42 ....]
#
# A state, which begins each segment, has the group's parent and name; a rename is a record after it. Bodies are
# skipped, except those with a name.

_RENAME = b'{"do":"rename","stream":0,'
_PLACE_BYTES = 8_192  # of a state, in which the name is; and of a rename


class Found(NamedTuple):
    """A message, or an EOF marker."""

    sequence: int
    position: int  # of the first record of its atomic batch, in the segment
    is_first: bool  # whether it is the first message of that batch


class LogHeads:
    """Reads the heads of one log's newest segment, run by run."""

    def __init__(self) -> None:
        self.parent, self.name, self.is_renamed = 0, "", False
        self._first = -1  # the segment
        self._next = 0  # position of the next record in it
        self._rest = b""  # the beginning of that record, as far as it is needed
        self._batch, self._has_message = 0, False

    def feed(self, run: LogBytes) -> Iterator[Found]:
        """Yield the messages whose heads a run completes. A repeated run yields nothing."""
        if run.first > self._first:
            self._first, self._next, self._rest = run.first, 0, b""
        begin = self._next + len(self._rest)
        if run.first < self._first or run.position > begin or run.position + len(run.data) <= begin:
            return  # repeated, or after a skipped part: the next segment has everything again
        data, at = self._rest + run.data[begin - run.position :], 0
        while at + HEAD_BYTES <= len(data):
            size, _, sequence, _, _, kind, flags, headers = HEAD.unpack_from(data, at)
            if size < HEAD_BYTES:
                break  # not a record
            if kind in (Kind.STATE, Kind.CHANGE):
                wanted = min(size, HEAD_BYTES + headers + _PLACE_BYTES)
                if at + wanted > len(data):
                    break
                self._note(kind, data[at + HEAD_BYTES + headers : at + wanted])
            if not flags & INNER:
                self._batch, self._has_message = self._next + at, False
            if kind <= Kind.END:
                yield Found(sequence, self._batch, not self._has_message)
                self._has_message = True
            at += padded(size)
        self._next, self._rest = self._next + at, data[at:]

    def _note(self, kind: int, body: bytes) -> None:
        if kind == Kind.STATE:
            if (place := place_of(body)) is not None:
                self._move(*place[1:])
        elif body.startswith(_RENAME):
            self._move(self.parent, str(json.loads(body)["name"]))

    def _move(self, parent: int, name: str) -> None:
        self.is_renamed |= (parent, name) != (self.parent, self.name)
        self.parent, self.name = parent, name


class Heads:
    """The heads of all logs of a store."""

    def __init__(self) -> None:
        self._logs: dict[int, LogHeads] = {}
        self.changes = 0  # changes of places, counted when a message follows

    def feed(self, entry: Entry) -> Iterator[Found]:
        """Yield the messages whose heads an entry completes."""
        if isinstance(entry, Removed):
            self._logs.pop(entry.group, None)
            self.changes += 1
        elif isinstance(entry, LogBytes):
            log = self._logs.setdefault(entry.group, LogHeads())
            for found in log.feed(entry):
                if log.is_renamed:
                    log.is_renamed = False
                    self.changes += 1
                yield found

    def paths(self) -> dict[str, int]:
        """Return the number of each group whose place is known, by its path; that of the root is empty."""
        return {path: number for number in self._logs if (path := self.path(number)) is not None}

    def path(self, number: int) -> str | None:
        """Return the path of a group; None if it is unknown."""
        names: list[str] = []
        while number != ROOT:
            found = self._logs.get(number)
            if found is None or not found.name or found.parent >= number:  # a group is younger than its parent
                return None
            names.append(found.name)
            number = found.parent
        return "/".join(reversed(names))
