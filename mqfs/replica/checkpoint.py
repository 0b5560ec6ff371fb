"""Checkpoints of a store beside its replicated log: where a standby or `mqfs restore` begins.

    checkpoint/00000000000000000417-1700000000   after frame 417, and when: the segments, in parts
    checkpoint/00000000000000000000-2596996162   before frame 1: what the store had when its log began
    segment/3/7-40-0-8388608-9ab01234            epoch 3, group 7, segment 40, part 0, its bytes, its CRC-32C

A checkpoint before frame 1 has a check sum in place of a time. Frame 1 repeats it in place of that of a frame before
it. If several servers begin a log at once, one gets frame 1, and the checkpoints of the others do not count.

A checkpoint has the content of the log at a frame. Its bytes come from the segment files of a running store. Later
bytes are not read. A compacted segment has the same messages, but not the same first bytes, so the newest segments at
the frame are not compacted meanwhile (`Keeper`). If a segment is removed while it is read, the checkpoint is made
again. It lacks messages trimmed meanwhile, so a restore to a frame before it is whole needs an older checkpoint:

    log      417 position | 418 m7 | 419 m7 is acknowledged | 420 whole
    store              segments are read: that of m7 is gone ^ begins when all are read

A segment with a record that fails its check is in no checkpoint. An earlier checkpoint and the frames since may have
what this disk lost, so until `mqfs check --fix` no checkpoint is made and nothing is removed.

Parts that the checkpoint before it has are not sent again. A name is never reused for other bytes. A primary removes
parts only after a checkpoint that it made itself. Its successor begins with that one or a later one, so a primary that
was fenced and does not know it yet removes nothing that its successor needs. A part is removed when no retained
checkpoint has it:

    kept             checkpoint 417 of epoch 3, the oldest | checkpoint 903 of epoch 5, made here
    no answer came   checkpoint 871 of epoch 5: it may be there, so its parts are kept as if it were
    others           segment/2/... goes | segment/4/... stays: a checkpoint may still come | segment/5/... goes
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from math import ceil
from typing import Any, NamedTuple

import attrs
from google_crc32c import value

from mqfs import limits, ring
from mqfs.errors import BadReplica
from mqfs.replica.frame import decode
from mqfs.replica.log import NoAnswer, Objects, Position, ReplicatedLog, Stopped
from mqfs.replica.state import Have, decode_have, decode_position, encode_have, encode_position
from mqfs.store.check import Log
from mqfs.store.disk import Disk
from mqfs.store.replication import LogBytes
from mqfs.store.store import folder_of

_ATTEMPTS = 8  # at a checkpoint, while segments are removed
_AHEAD = 2  # parts of a checkpoint that are requested at once


class Part(NamedTuple):
    size: int
    crc: int
    name: str


class Segment(NamedTuple):
    group: int
    first: int
    parts: Sequence[Part]


@attrs.frozen
class Checkpoint:
    name: str
    position: Position
    have: Have
    segments: Sequence[Segment]
    whole: int  # the frame from which on it lacks nothing

    @property
    def time_s(self) -> int:
        """When it was whole, in UNIX seconds. A checkpoint before frame 1 has no time."""
        return int(self.name.rpartition("-")[2])


class Damaged(BadReplica):
    """This disk does not have the bytes that were written."""


class _SegmentWent(Exception):
    """A segment was removed while it was read."""


class Overtaken(Exception):
    """A group was removed after the position: a checkpoint there would lack it. A later position has the removal."""


class Checkpointer:
    """Makes the checkpoints of one store."""

    def __init__(self, log: ReplicatedLog, path: str, stop: threading.Event | None = None) -> None:
        """`path`: the path of the store. `stop`: when it is set no more parts are sent."""
        self._log, self._objects, self._path = log, log.objects, path
        self._stop = stop or threading.Event()
        self._known: dict[str, tuple[int, int, Segment]] = {}  # complete segments, by path: inode and bytes
        self._parts: dict[str, str] = {}  # names of parts that the next checkpoint can use, by name without the epoch
        self._made = ""  # the newest checkpoint
        self._own_epoch = -1  # epoch of the parts; -1: some may belong to a checkpoint that is not made yet
        self._epochs: dict[str, int] = {}  # epochs of checkpoints that exist, or may exist
        self._named: dict[str, str] = {}  # their parts, each with the newest checkpoint that has it
        self._cursor = ""  # names of parts up to that one were examined

    def make(self, position: Position, have: Have, follow: Callable[[], int] | None = None) -> Checkpoint:
        """Make a checkpoint of the content of the log at that position. `follow` waits for a batch that begins after
        the call, and returns the number of its last frame; None: the store is not written to. Position 0 gets the check
        sum that frame 1 is to repeat. Raises Overtaken, Stopped, NoAnswer, Damaged, BadReplica, OSError."""
        self._own_epoch = -1
        if not self._parts and (before := newest(self._log)) is not None:
            self._parts = {_tail(part): part for part in _names_of(before)}
        for _ in range(_ATTEMPTS):
            try:
                groups = (self._group(group, *end, position.epoch) for group, end in sorted(have.items()))
                segments = list(chain.from_iterable(groups))
            except _SegmentWent:
                continue
            whole = max(1, position.number) if follow is None else follow()
            tail = ceil(time.time())
            if not position.number:
                tail = _sum_of(have, segments)
                position = attrs.evolve(position, crc=tail)
            name = f"checkpoint/{position.number:020d}-{tail}"
            made = self._finish(Checkpoint(name, position, have, segments, whole))
            if follow is not None:
                follow()  # a later takeover begins with these parts: `prune` removes none of them
            return made
        raise BadReplica("checkpoint: not made: segments are removed faster than they are read")

    def _finish(self, made: Checkpoint) -> Checkpoint:
        self._note(made)  # first: without an answer it may exist, or appear later
        self._objects.put(made.name, _encode(made))
        self._parts = {_tail(part): part for part in _names_of(made)}
        self._made, self._own_epoch = made.name, made.position.epoch
        return made

    def _note(self, found: Checkpoint) -> None:
        self._epochs[found.name] = found.position.epoch
        for part in _names_of(found):
            self._named[part] = max(found.name, self._named.get(part, ""))

    def _group(self, group: int, last: int, position: int, epoch: int) -> Iterator[Segment]:
        folder = folder_of(self._path, group)
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".log"))
        except FileNotFoundError:
            raise Overtaken(group) from None
        if f"{last:020d}.log" not in names:
            raise _SegmentWent
        for first in (int(name[:-4]) for name in names):
            if first <= last:
                yield self._segment(group, first, folder, names, epoch, position if first == last else None)

    def _segment(
        self, group: int, first: int, folder: str, names: Sequence[str], epoch: int, size: int | None
    ) -> Segment:
        """Send one segment: `size` bytes of it, or all. `names`: the names of all segments in that folder."""
        path = f"{folder}/{first:020d}.log"
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                if size is None:
                    known = self._known.get(path)
                    if known is not None and known[:2] == (stat.st_ino, stat.st_size):
                        return known[2]
                data = file.read(stat.st_size if size is None else size)
            if size is not None and len(data) < size:
                raise Damaged(f"{path}: {size - len(data)} bytes missing (run mqfs check)")
            if ring.MISSING or ring.scan(data).end < len(data):
                _check(Log(Disk(), folder, f"{first:020d}.log", names), size)
        except FileNotFoundError:
            raise _SegmentWent from None
        step = limits.REPLICA_PART_BYTES
        parts = [
            self._part(f"{group}-{first}-{at // step}", epoch, data[at : at + step]) for at in range(0, len(data), step)
        ]
        segment = Segment(group, first, parts)
        if size is None:
            self._known[path] = (stat.st_ino, stat.st_size, segment)
        return segment

    def _part(self, where: str, epoch: int, data: bytes) -> Part:
        crc = value(data)
        tail = f"{where}-{len(data)}-{crc:08x}"
        if (name := self._parts.get(tail)) is None:
            if self._stop.is_set():
                raise Stopped
            self._objects.put(name := f"segment/{epoch}/{tail}", data)
            self._parts[tail] = name
        return Part(len(data), crc, name)

    def prune(self, keep_s: float, now_s: float) -> None:
        """Remove objects that no restore to the last `keep_s` seconds needs: frames, checkpoints, parts that no
        checkpoint has, and remains of uploads. Some are removed at a time; frames first, since they are the most.
        Raises NoAnswer, BadReplica."""
        names = _all_names(self._log)
        if self._made and self._made not in names:
            raise NoAnswer(f"{self._made}: not listed")  # so other names may be missing there
        times = {name: int(name.rpartition("-")[2]) for name in names if not _is_first(name)}
        base = max((name for name, time_s in times.items() if time_s <= now_s - keep_s), default="")
        if base and self._is_known(base):
            self._log.trim(_number(base))  # that frame stays: a log always ends with one
            self._objects.delete(*(name for name in names if name < base))
            self._epochs = {name: epoch for name, epoch in self._epochs.items() if name >= base}
        kept = [name for name in names if name >= base]
        if kept and all(map(self._is_known, kept)):
            self._remove_parts(base, self._epochs[kept[0]])
        self._objects.remove_stale_uploads()

    def _is_known(self, name: str) -> bool:
        """Whether the parts of that checkpoint are known; False if it was removed."""
        if name not in self._epochs and (found := load(self._log, name)) is not None:
            self._note(found)
        return name in self._epochs

    def _is_ended(self, part: str, epoch: int) -> bool:
        """Whether no future checkpoint of its epoch can use a part that no checkpoint has now."""
        digits = part.split("/")[1]
        if part.count("/") != 2 or not digits.isdecimal():
            return False  # another object
        return int(digits) < epoch or int(digits) == self._own_epoch

    def _remove_parts(self, base: str, epoch: int) -> None:
        """Remove parts that only checkpoints before `base` have, and parts of no checkpoint: those sent here, and those
        of epochs before `epoch`, that of the oldest checkpoint kept. A primary of an earlier epoch makes no more
        checkpoints: its `follow` does not return. If it did return already, its late checkpoint is older than that one,
        so nothing begins with it."""
        useless = [part for part, newest in self._named.items() if newest < base]
        page = self._objects.list("segment/", self._cursor, limits.REPLICA_PAGE)
        useless += [part for part in page if part not in self._named and self._is_ended(part, epoch)]
        removed = useless[: limits.REPLICA_REMOVED_PARTS]
        self._objects.delete(*removed)
        for part in removed:
            self._named.pop(part, None)
        if len(removed) == len(useless):  # otherwise that page is examined again
            self._cursor = page[-1] if len(page) == limits.REPLICA_PAGE else ""


def _check(log: Log, size: int | None) -> None:
    """Raise Damaged if the first `size` bytes of a segment, or all, have a record that fails its check. A record torn
    by an unclean stop is ignored: it was never in the log."""
    end = len(log.data) if size is None else size
    bad = [(start, min(stop, end)) for start, stop in log.found.bad if start < end]
    if size is not None and log.newest and log.found.end < end:
        bad.append((log.found.end, end))  # not a torn tail: the log has all of it
    if bad:
        words = f"bytes {bad[0][0]} to {bad[0][1]} do not pass their check"
        raise Damaged(f"{log.path}: {words} (run mqfs check; the replica may still have them)")


def _tail(part: str) -> str:
    """Return the name of a part without its epoch: its place and its check sum."""
    return part.rpartition("/")[2]


def _names_of(checkpoint: Checkpoint) -> set[str]:
    return {part.name for segment in checkpoint.segments for part in segment.parts}


def _encode(made: Checkpoint) -> bytes:
    body: dict[str, Any] = {
        "format": 1,
        "position": encode_position(made.position),
        "have": encode_have(made.have),
        "segments": made.segments,
        "whole": made.whole,
    }
    return json.dumps(body).encode()


def _sum_of(have: Have, segments: Sequence[Segment]) -> int:
    """Return a check sum over a checkpoint, never 0: 0 in frame 1 means no checkpoint before it."""
    return int(value(json.dumps([encode_have(have), segments]).encode())) or 1


def _all_names(log: ReplicatedLog) -> list[str]:
    return [name for name in log.objects.list("checkpoint/") if name[11:31].isdecimal() and name[32:].isdecimal()]


def _is_first(name: str) -> bool:
    """Whether the checkpoint is before frame 1."""
    return not _number(name)


def _number(name: str) -> int:
    """Return the number of the frame after which the checkpoint is."""
    return int(name[11:31])


def list_names(log: ReplicatedLog) -> list[str]:
    """Return the names of all checkpoints that count, the oldest first."""
    names = _all_names(log)
    if not names or not _is_first(names[0]):
        return names
    first = log.get(1)
    named = decode(first).previous_crc if first is not None else 0
    return [name for name in names if not _is_first(name) or int(name[32:]) == named]


def load(log: ReplicatedLog, name: str) -> Checkpoint | None:
    """Load the checkpoint of that name; None if it does not exist. Raises NoAnswer, BadReplica."""
    data = log.objects.get(name)
    if data is None:
        return None
    try:
        found = json.loads(data)
        rows = [Segment(row[0], row[1], [Part(*part) for part in row[2]]) for row in found["segments"]]
        position = decode_position(found["position"])
        return Checkpoint(name, position, decode_have(found["have"]), rows, int(found.get("whole", position.number)))
    except (ValueError, KeyError, TypeError) as error:
        raise BadReplica(f"{name}: unreadable: {error}") from None


def newest(log: ReplicatedLog) -> Checkpoint | None:
    """Return the newest checkpoint; None if there is none. Raises NoAnswer, BadReplica."""
    found = (load(log, name) for name in reversed(list_names(log)))
    return next((made for made in found if made is not None), None)


def runs(objects: Objects, checkpoint: Checkpoint) -> Iterator[LogBytes]:
    """Yield all bytes of a checkpoint, checked. Raises NoAnswer, BadReplica."""
    names = iter(part.name for segment in checkpoint.segments for part in segment.parts)
    with ThreadPoolExecutor(_AHEAD, "parts") as pool:
        asked = deque(pool.submit(objects.get, name) for name in islice(names, _AHEAD))
        for segment in checkpoint.segments:
            at = 0
            for size, crc, name in segment.parts:
                data = asked.popleft().result()
                if (following := next(names, None)) is not None:
                    asked.append(pool.submit(objects.get, following))
                if data is None or len(data) != size or value(data) != crc:
                    reason = "missing" if data is None else "wrong check sum"
                    raise BadReplica(f"{name}: {reason} (expected {size} bytes of {checkpoint.name})")
                yield LogBytes(segment.group, segment.first, at, data)
                at += size
