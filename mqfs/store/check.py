"""mqfs check: reads a whole store, reports damage, and repairs it.

It looks at every record, index, state and name. What failed a check is never deleted: damaged segments are moved to
quarantine/ whole, and their sound records are written to a new file.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence

from mqfs import errors, limits
from mqfs.model import MORE, NEVER, Kind
from mqfs.records.record import FLAGS_AT, INNER, Row, decode, encode, last_byte, padded, with_flags
from mqfs.state.group import Attributes, GroupState
from mqfs.state.salvage import replay, retain_all, unknown
from mqfs.store.disk import Disk, opened, read_file, write_file
from mqfs.store.recovery import MOVED, History, is_json, whole_states
from mqfs.store.segment.index import (
    COLUMNS,
    SEALED,
    NonMessageRecords,
    OpenIndex,
    columns_pass,
    decode_part,
    load_part,
    size_of,
)
from mqfs.store.segment.recovery import RecoveryScan, is_reserve, scan_segment
from mqfs.store.sequences import behind_damage, reserve_body, reserved_by
from mqfs.store.store import FOLDERS, DiskStore, group_folders, read_label, take_lock, write_label

Report = Callable[[str], None]
Progress = Callable[[str], None]  # shows how far the check is
_PIECE = 1 << 20  # bytes read of a log for its first records
_NAMES = {"mqfs", "lock", "keeper", "replica", "promote", "lost+found", *FOLDERS}
_NAMED = 10  # damaged records listed


def no_progress(text: str) -> None:
    """Show no progress."""


def check(path: str, fix: bool = False, report: Report = print, progress: Progress = no_progress) -> int:
    """Report each fault in one line; return their number. Raises BadStore if the path is no store or the store is in
    use. For a repair it is also raised if the store is open to other users: the start that ends the repair would be
    refused.

    Lines that begin with "note: " are no damage: an unclean stop left it, and the next start repairs it.
    """
    path = os.path.realpath(path)
    disk = Disk()
    if not disk.exists(path):
        raise errors.BadStore(f"{path}: does not exist")
    if disk.exists(f"{path}/mqfs") or not disk.is_folder(f"{path}/buckets"):
        read_label(disk, path)  # raises BadStore, for one of another version, too
    if fix and disk.is_open_to_others(path):
        raise errors.BadStore(f"{path}: open to other users (expected the server's user, mode 700)")
    lock = take_lock(disk, path, write=fix)
    try:
        checker = Checker(disk, path, fix, report, progress)
        checker.names()
        checker.label()
        groups = sorted(group_folders(disk, path)) if disk.is_folder(f"{path}/buckets") else []
        for done, (number, folder) in enumerate(groups):
            checker.place = f"{done:,} of {len(groups):,} groups checked"
            progress(checker.place)
            checker.group(number, folder)
    finally:
        disk.close(lock)
    if fix:
        _start_once(path, report, progress)
    return checker.problems


def _start_once(path: str, report: Report, progress: Progress) -> None:
    """Start the store and stop it cleanly, which cuts torn tails and writes the indexes."""
    store = DiskStore(path)
    try:
        groups = store.groups()
        if max(groups, default=0) >= read_label(store.disk, path)[1]:
            store.number()  # writes a label that is above all groups
        for done, number in enumerate(groups):
            progress(f"{done:,} of {len(groups):,} groups checked and opened")
            try:
                store.open(number).upkeep.rebuild()
            except errors.MqfsError as error:
                report(f"group {number}: {error}")
    finally:
        store.close()


class Checker:
    def __init__(self, disk: Disk, path: str, fix: bool, report: Report, progress: Progress) -> None:
        self.disk, self.path, self.fix, self.report, self.progress = disk, path, fix, report, progress
        self.place = ""  # how far the check is
        self.problems = 0
        self.reserved = 0

    def problem(self, text: str) -> None:
        self.problems += 1
        self.report(text)

    # ------------------------------------------------------------ the folder

    def label(self) -> None:
        """Check the label; a repair writes a new one by way of staging/."""
        if self.disk.exists(f"{self.path}/mqfs"):
            _, self.reserved = read_label(self.disk, self.path)
            return
        self.problem("mqfs: the file that says what store this is, is missing")
        self.reserved = max((number for number, _ in group_folders(self.disk, self.path)), default=0) + 1
        if self.fix:
            write_label(self.disk, self.path, str(uuid.uuid4()), self.reserved)

    def names(self) -> None:
        """Check the names beside the buckets."""
        for name in sorted(set(self.disk.listdir(self.path)) - _NAMES):
            self.report(f"note: {name}: not a part of a store")
        for name in FOLDERS:
            if not self.disk.is_folder(f"{self.path}/{name}"):
                if self.disk.exists(f"{self.path}/{name}"):
                    raise errors.BadStore(f"{self.path}/{name}: not a folder")
                self.problem(f"{name}/ is missing")
                if self.fix:
                    self.disk.mkdir(f"{self.path}/{name}")
        for name, text in (
            ("staging", "left by an unclean stop; removed at the next start"),
            ("quarantine", "kept aside"),
        ):
            count = len(self.disk.listdir(f"{self.path}/{name}")) if self.disk.is_folder(f"{self.path}/{name}") else 0
            if count:
                self.report(f"note: {name}/: {count} {text}")

    def group(self, number: int, folder: str) -> None:
        if number >= self.reserved:
            self.problem(f"group {number}: its number is not below `groups {self.reserved}` of the store's mqfs file")
        if os.path.basename(os.path.dirname(folder)) != f"{number & 255:02x}":
            self.problem(f"group {number}: in the wrong folder, {folder}")
        names = sorted(self.disk.listdir(folder))
        logs = [name for name in names if name.endswith(".log") and name[:-4].isdecimal()]
        moved = [name for name in names if name.endswith(MOVED) and name[:-4].isdecimal()]
        for name in names:
            if name not in logs + moved and f"{name[:-4]}.log" not in logs:
                self.report(f"note: group {number}: {name} belongs to no segment")
        logs = self._renamed(number, folder, self._without_folders(number, folder, logs), moved)
        if not logs:
            self.report(f"note: group {number}: no log; it was not made to the end")
            return
        if (of := self._state_of(folder, logs)) not in (0, number):
            self.problem(f"group {number}: it holds the log of group {of}")
            if self.fix:
                self._move_aside(folder, f"{number}")
            return
        self._segments(number, folder, logs)

    def _state_of(self, folder: str, logs: list[str]) -> int:
        """Return the group number in the newest state of the last segment; 0 if it is unknown."""
        state = History([Log(self.disk, folder, logs[-1], logs)]).state
        if state is None or not is_json(state):
            return 0
        group = json.loads(state).get("group")
        return group if isinstance(group, int) else 0

    def _without_folders(self, number: int, folder: str, logs: list[str]) -> list[str]:
        """Return the names in `logs` that are files; report the folders."""
        wrong = [name for name in logs if self.disk.is_folder(f"{folder}/{name}")]
        for name in wrong:
            self.problem(f"group {number}: {name} is a folder")
            if self.fix:
                self._move_aside(f"{folder}/{name}", f"{number}-{name}")
        return [name for name in logs if name not in wrong]

    def _renamed(self, number: int, folder: str, logs: list[str], moved: list[str]) -> list[str]:
        """Handle segments that hold lower sequences than their names say: each gets its own name, or is moved aside.
        Returns the names to check. `moved`: segments that an interrupted repair left half renamed."""
        least = {name: self._least(folder, name) for name in logs + moved}
        foreign = [name for name in logs if least[name] < int(name[:-4])] + moved
        for name in foreign:
            self.problem(f"group {number}: {name} holds sequence {least[name]}")
        if not foreign or not self.fix:
            return [name for name in logs if name not in foreign]
        on_way = {name: name for name in moved}  # current name -> name before the renaming
        for name in {*foreign, *(f"{least[name]:020d}.log" for name in foreign)} & set(logs):
            if (made := f"{name[:-4]}{MOVED}") not in on_way:
                self.disk.rename(f"{folder}/{name}", f"{folder}/{made}")
                on_way[made] = name
        for made, name in sorted(on_way.items(), key=lambda item: item[1] not in foreign):
            self._give_name(number, folder, made, f"{least[name]:020d}.log")
        self.disk.sync_folder(folder)
        return sorted(name for name in self.disk.listdir(folder) if name.endswith(".log") and name[:-4].isdecimal())

    def _least(self, folder: str, name: str) -> int:
        """Return the lowest sequence in the log. Its first piece is enough, unless a state fills that."""
        with opened(self.disk, f"{folder}/{name}") as fd:
            data = self.disk.pread(fd, _PIECE, 0)
        index, others = OpenIndex(), NonMessageRecords()
        scan_segment(data, 0, index, others, covered=NEVER)
        if not len(index) and len(data) == _PIECE:
            log = Log(self.disk, folder, name, [name, ""])
            index, others = log.index, log.others
        return least_of(index, others, int(name[:-4]))

    def _give_name(self, number: int, folder: str, made: str, own: str) -> None:
        if self.disk.exists(f"{folder}/{own}"):
            self._move_aside(f"{folder}/{made}", f"{number}-{made[:-4]}.log")
            return
        self.disk.rename(f"{folder}/{made}", f"{folder}/{own}")
        for index in (f"{folder}/{made[:-4]}.idx", f"{folder}/{own[:-4]}.idx"):
            if self.disk.exists(index):
                self.disk.unlink(index)  # derived from a log: made again

    def _move_aside(self, path: str, name: str) -> None:
        aside = _free_name(f"{self.path}/quarantine/{name}", self.disk)
        self.disk.rename(path, aside)
        self.disk.sync_folder(f"{self.path}/quarantine")
        self.disk.sync_folder(os.path.dirname(path))
        self.report(f"note: {path} is now {aside}")

    # ------------------------------------------------------------ one bucket

    def _segments(self, number: int, folder: str, names: list[str]) -> None:
        last, bound, bad = 0, 0, False
        names = self._without_unwritten(number, folder, names)
        history = History(self._newest_first(folder, names))
        whole, state = self._state(number, folder, names, history)
        newest: Log | None = None
        for done, (name, following) in enumerate(zip(names, [*names[1:], ""], strict=True)):
            if done:
                self.progress(f"{self.place}, {done:,} of {len(names):,} segments of the next")
            log = newest = Log(self.disk, folder, name, names)
            before = self.problems
            self._records(number, log)
            end = int(following[:-4]) if following else 1 << 64
            last = self._order(number, log, last, end)
            self._bodies(number, log)
            damaged = self.problems > before
            bad = bad or damaged
            bound = max([bound, last + 1, *(reserved_by(log.body(r)) for r in log.others if r.kind == Kind.CHANGE)])
            self._index(number, log)
            if damaged and self.fix and not log.newest and not self._is_left(number, log):
                self._write_anew(number, log, [])
        assert newest is not None
        if self.fix and (bad or not whole) and not self._is_left(number, newest):
            self._write_newest(number, newest, bound, whole, state)

    def _is_left(self, number: int, log: Log) -> bool:
        """Whether to leave a segment alone because a replica may have a part of it, or all of the newest. A rewritten
        one would differ from the copies: bytes copied later, by their positions, would overwrite theirs."""
        if not self.disk.exists(f"{self.path}/replica"):
            return False
        try:
            state = json.loads(read_file(self.disk, f"{self.path}/replica"))
            copied = {int(group): int(first) for group, first, _ in state["have"]}
        except (OSError, ValueError, KeyError, TypeError):
            copied = {}
        if not log.newest and int(log.name[:-4]) < copied.get(number, 0):
            return False
        self.report(
            f"note: group {number}: {log.name} is left as it is, for a replica has it (serve it until that has all, "
            f"then move the store away and start from that; where there is none any more remove {self.path}/replica)"
        )
        return True

    def _without_unwritten(self, number: int, folder: str, names: list[str]) -> list[str]:
        """Return the names without the newest segments whose heads never reached the disk, as a start does. Nothing
        after a head is on disk before it, so no record is missing before these."""
        while len(names) > 1:
            log = Log(self.disk, folder, names[-1], names)
            if log.found.end or log.found.bad:
                break
            self._records(number, log)
            self._index(number, log)  # an index would prove that the head was on disk
            names = names[:-1]
        return names

    def _newest_first(self, folder: str, names: list[str]) -> Iterator[Log]:
        """Yield the logs, the newest first. Only one at a time has its bytes in memory, however many lack a whole
        state."""
        for name in reversed(names):
            log = Log(self.disk, folder, name, names)
            yield log
            log.drop_bytes()

    def _state(self, number: int, folder: str, names: list[str], history: History) -> tuple[bool, GroupState]:
        """Return whether the state is whole, and the state as far as it is known; if not whole, with all streams that
        have messages."""
        owner = Attributes(0o700 if number > 1 else 0o755, os.geteuid(), os.getegid())
        has_state = history.state is not None

        def streams() -> set[int]:
            return {stream for name in names for stream in Log(self.disk, folder, name, names).index.streams}

        try:
            state = unknown(number, owner) if history.state is None else GroupState.decode(history.state)
            replay(state, history, history.lost, owner, streams)
        except (ValueError, LookupError):
            if not history.lost:
                return True, unknown(number, owner)  # the record is whole and invalid: nothing replaces it
            state = unknown(number, owner)
            retain_all(state, owner, streams())
        if not has_state:
            self.problem(f"group {number}: no state is whole: its names and settings are lost")
        elif history.lost:
            self.problem(f"group {number}: its state is damaged: {', '.join(history.lost[:_NAMED])}")
        return not history.lost, state

    def _records(self, number: int, log: Log) -> None:
        for start, end in log.found.torn:
            self.report(f"note: group {number}: {log.name}: bytes {start} to {end} were torn by an unclean stop")
        for start, end in log.found.bad:
            self.problem(f"group {number}: {log.name}: bytes {start} to {end} do not pass their check")
        if log.found.written > log.found.end and not log.found.bad:
            count = log.found.written - log.found.end
            if log.found.end >= log.covered or all(at < log.found.end for at in log.listed):
                self.report(f"note: group {number}: {log.name}: a torn tail of {count} bytes; cut at the next start")
            else:
                self.problem(f"group {number}: {log.name}: {count} bytes behind the last whole batch")
        head = min((row.position for row in log.others if row.kind == Kind.STATE), default=-1)
        if head != 0 and log.found.end:
            self.report(f"note: group {number}: {log.name} does not begin with a state")

    def _order(self, number: int, log: Log, last: int, end: int) -> int:
        """Check that sequences grow and times do not go back; return the last sequence."""
        time_ns = 0
        for sequence, when in zip(log.index.sequences, log.index.times, strict=True):
            if sequence >= end:
                break  # the next segment has it too: a compaction was interrupted
            if sequence <= last:
                self.problem(f"group {number}: {log.name}: message {sequence} comes after {last}")
            if when < time_ns:
                self.problem(f"group {number}: {log.name}: the time of message {sequence} goes back")
            last, time_ns = max(last, sequence), max(time_ns, when)
        return last

    def _bodies(self, number: int, log: Log) -> None:
        """Check that states and changes are JSON."""
        for row in log.others:
            if row.kind in (Kind.CHANGE, Kind.CLOCK) and not is_json(log.body(row)):
                self.problem(f"group {number}: {log.name}: the change at {row.position} is not JSON")
        state = History([log]).state
        if state is not None and not is_json(state):
            self.problem(f"group {number}: {log.name}: its state is not JSON")

    def _index(self, number: int, log: Log) -> None:
        """Check that the index, if there is one, fits the log."""
        path = f"{log.path[:-4]}.idx"
        if not self.disk.exists(path):
            if not log.newest:
                self.report(f"note: group {number}: {log.name} has no index; it is made when it is read")
            return
        wrong = _index_fault(log, read_file(self.disk, path))
        if wrong:
            self.problem(f"group {number}: {log.name[:-4]}.idx {wrong}")
            if self.fix:
                self.disk.unlink(path)  # derived from the log: made again

    # ------------------------------------------------------------ repair

    def _write_newest(self, number: int, log: Log, bound: int, whole: bool, state: GroupState) -> None:
        """Rewrite the newest segment, with sequences reserved past all that the damage may have hidden. If the state
        was not whole, it is written too."""
        bodies: list[bytes] = []
        if not whole:
            data, step = state.encode(), limits.STATE_RECORD_BYTES
            bodies = [data[at : at + step] for at in range(0, len(data), step)]
        extra = [
            encode(bound - 1, 0, 0, Kind.STATE, MORE | (INNER if piece else 0), b"", body)
            for piece, body in enumerate(bodies)
        ]
        reserve = reserve_body(behind_damage(bound))
        extra.append(encode(bound - 1, 0, 0, Kind.CHANGE, INNER if bodies else 0, b"", reserve))
        self._write_anew(number, log, extra)
        if not whole:
            self.report(f"note: group {number}: it retains everything now ({', '.join(state.ctl)}); see its ctl")
            for name in sorted(row.name for row in state.streams.values() if row.name.startswith("recovered-")):
                self.report(f"note: group {number}: stream {name}: its record is missing")

    def _write_anew(self, number: int, log: Log, extra: list[bytes]) -> None:
        """Write a log of the sound records; the old file is moved to quarantine/ whole."""
        made = f"{self.path}/staging/{number}-{log.name}"
        write_file(self.disk, made, log.good() + b"".join(extra))
        aside = _free_name(f"{self.path}/quarantine/{number}-{log.name[:-4]}-0", self.disk)
        write_file(self.disk, aside, log.data)
        self.disk.sync_folder(f"{self.path}/quarantine")
        self.disk.rename(made, log.path)
        if self.disk.exists(f"{log.path[:-4]}.idx"):
            self.disk.unlink(f"{log.path[:-4]}.idx")
        self.disk.sync_folder(log.folder)
        self.report(f"note: group {number}: {log.name} was rewritten; the old one is {aside}")


def _index_fault(log: Log, data: bytes) -> str:
    """Return why an index is damaged; "" if it is sound."""
    at = to = messages = 0
    index, others = OpenIndex(), bytearray()
    while at < len(data):
        part = decode_part(data, at, at)
        if part is None:
            return "has a part that does not pass its check"
        if part.identity != log.identity:
            return "is of another log"
        if part.start != to or part.to > len(log.data) or not columns_pass(data, part):
            return "does not fit its log"
        if part.flags & SEALED and part.to != len(log.data):
            return "is of another log"
        load_part(index, data, part)
        others += part.rows
        at, to, messages = at + part.size, part.to, messages + part.messages
    if log.found.bad:
        return ""  # the log is damaged, not the index
    for name in ("sequences", "times", "positions", "bodies", "streams", "headers", "kinds"):
        if getattr(index, name) != getattr(log.index, name)[:messages]:
            return f"has other {name} than its log"
    if others != log.others.packed[: len(others)]:
        return "has other changes than its log"
    return ""


def _free_name(path: str, disk: Disk) -> str:
    names = (f"{path}.{number}" if number else path for number in itertools.count())
    return next(name for name in names if not disk.exists(name))


# ------------------------------------------------------------ whole log


def least_of(index: OpenIndex, others: NonMessageRecords, first: int) -> int:
    """Return the lowest sequence in a log: of a message, or the one at which its head says it begins; `first` if it has
    none."""
    heads = [others[0].sequence + 1] if len(others) else []
    return min([*heads, *index.sequences[:1]], default=first)


class Log:
    """One segment's log, read whole."""

    def __init__(self, disk: Disk, folder: str, name: str, names: Sequence[str]) -> None:
        """`names`: those of all segments of the group."""
        newest = name == names[-1]
        self.folder, self.name, self.newest = folder, name, newest
        self._disk = disk
        self.path = f"{folder}/{name}"
        self.first = int(name[:-4])
        self.data = read_file(disk, self.path)
        self.identity = int.from_bytes(self.data[4:8], "little")
        self.index, self.others = OpenIndex(), NonMessageRecords()
        self.listed: dict[int, Row | None] = {}  # the records in its index, by position; None: a message
        covered = self.covered = self._covered()
        end = covered if newest else len(self.data)
        self.found: RecoveryScan = self._scan(end, covered)
        if newest and covered < len(self.data):
            self._tail(covered)
        if len(names) == 1 and not self.found.end:  # the only segment was on disk before it got its name
            self.found = self._scan(len(self.data), last_byte(self.data))
        self._judge_listed()
        self.doubtful, self.damaged_head = self.found.doubtful, self.found.head

    def _scan(self, end: int, covered: int) -> RecoveryScan:
        return scan_segment(self.data[:end], 0, self.index, self.others, covered=covered)

    def _judge_listed(self) -> None:
        """Sort out damage within the range that the index covers: the index lists all records there, so bad ranges
        without a listed record were torn before."""
        others = [
            at for at, row in self.listed.items() if row is not None and not is_reserve(row.kind, row.stream, row.body)
        ]
        torn = []
        for start, end in self.found.bad:
            if end > self.covered:
                continue
            self.found.doubtful.discard(start)
            if any(start <= at < end for at in others):
                self.found.doubtful.add(start)
            if not any(start <= at < end for at in self.listed):
                torn.append((start, end))
        if torn:  # except what a SETTLED record proves to be damage: an index made again lists none
            data = self.data[: self.covered]
            damaged = scan_segment(data, 0, OpenIndex(), NonMessageRecords(), covered=0).bad
            torn = [stretch for stretch in torn if stretch not in damaged]
        if torn:
            self.found.torn += torn
            self.found.bad = [stretch for stretch in self.found.bad if stretch not in torn]
            self.index, self.others = self._listed_only()

    def _listed_only(self) -> tuple[OpenIndex, NonMessageRecords]:
        """Return the index and the other records without the remaining records of torn batches."""
        index, others = OpenIndex(), NonMessageRecords()
        kept = [n for n, at in enumerate(self.index.positions) if at >= self.covered or at in self.listed]
        for name, code in COLUMNS:
            column = getattr(self.index, name)
            getattr(index, name).extend(array(code, [column[n] for n in kept]))
        for row in self.others:
            if row.position >= self.covered or row.position in self.listed:
                others.append(row)
        others.last_ns = self.others.last_ns
        return index, others

    def _covered(self) -> int:
        """Return the position up to which its index says that the log is on disk: damage before it is no torn tail."""
        path, covered, at = f"{self.path[:-4]}.idx", 0, 0
        data = read_file(self._disk, path) if self._disk.exists(path) else b""
        while (part := decode_part(data, at, at)) is not None and part.start == covered:
            if not at and decode(self.data[: int.from_bytes(self.data[:4], "little")]) is None:
                self.identity = part.identity  # the first record is damaged, and its CRC cannot identify the log
            if part.to > len(self.data) or part.identity != self.identity or not columns_pass(data, part):
                break
            at, covered = at + part.size, part.to
            index = OpenIndex()
            load_part(index, data, part)
            self.listed.update(dict.fromkeys(index.positions))
            self.listed.update((row.position, row) for row in NonMessageRecords(part.rows))
        return covered

    def _tail(self, covered: int) -> None:
        low = max(self.index.sequences[-1:], default=-1)
        behind = scan_segment(
            self.data[covered:], covered, self.index, self.others, covered=covered, tail=True, low=low
        )
        self.found.bad += behind.bad
        self.found.doubtful |= behind.doubtful
        self.found.head = max(self.found.head, behind.head)
        self.found.end = max(self.found.end, behind.end)
        self.found.written = max(self.found.written, behind.written)

    def body(self, row: Row) -> bytes:
        return self.data[row.position + row.size - row.body : row.position + row.size]

    def good(self) -> bytes:
        """Return the records that pass, in order. Of a batch that lost a record, the remaining parts become batches of
        their own."""
        index = self.index
        spans = [(position, size_of(index, n)) for n, position in enumerate(index.positions)]
        states = whole_states(self)
        rows = (row for row in self.others if row.kind != Kind.STATE or row.position in states)
        spans = sorted([*spans, *((row.position, row.size) for row in rows)])
        flags = [self.data[at + FLAGS_AT] for at, _ in spans]
        joined = [
            bool(flags[n] & MORE and flags[n + 1] & INNER and at + padded(size) == spans[n + 1][0])
            for n, (at, size) in enumerate(spans[:-1])
        ]
        pieces = []
        for (at, size), had, before, behind in zip(spans, flags, [False, *joined], [*joined, False], strict=False):
            data = self.data[at : at + padded(size)]
            is_inner = INNER if before else 0
            now = had & ~(MORE | INNER) | (MORE if behind else 0) | is_inner
            pieces.append(data if now == had else with_flags(data, now))
        return b"".join(pieces)

    # ------------------------------------------------------------ see `LogSegment`

    def rows(self) -> NonMessageRecords:
        return self.others

    def counts(self) -> tuple[int, int, int]:
        sequences = self.index.sequences
        return (len(sequences), sequences[0], sequences[-1]) if sequences else (0, 0, 0)

    def drop_bytes(self) -> None:
        """Drop the bytes from memory: from now on only `read` is called, which reads the file."""
        self.data = b""

    def read(self, position: int, size: int) -> bytes:
        if self.data:
            return self.data[position : position + size]
        with opened(self._disk, self.path) as fd:
            return self._disk.pread(fd, size, position)

    def report_corruption(self, position: int, data: bytes) -> None:
        """Do nothing: the scan reported it before."""

    def drop_index_cache(self) -> None:
        """Do nothing: the index stays in memory."""
