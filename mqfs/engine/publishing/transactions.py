"""Transactions: parts that are staged in `.txn`, and the commit that appends some of them as one atomic batch.

A group has its parts and the last commit of each producer. Until the commit the store keeps the messages of a part as
unsequenced records (mqfs/records/batch.py) with indexes of the part's own stream names. They cannot be read, and do
not survive the server. The commit is a record of the batch that it appends, so a crash leaves both or neither.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core.timers import PARTS, Alarm
from mqfs.engine.language.batch_frames import merge_expected
from mqfs.engine.language.permissions import W, allowed, require_owner
from mqfs.engine.publishing.admission import PutId
from mqfs.engine.publishing.batch import AtomicBatch, StagedBatch, StreamTotals, require_fit
from mqfs.model import Step, User
from mqfs.quotas import require_share
from mqfs.records.batch import BatchSource
from mqfs.state.group import Attributes, Change
from mqfs.syntax.names import check_control, check_name, one_line

if TYPE_CHECKING:
    from mqfs.engine.files.handle import OpenFile
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

_SECOND_NS = 10**9
_NUMBERS = 1 << 63


class Transactions:
    """The parts of a group, and its commits."""

    def __init__(self, host: Group) -> None:
        self._host, self._log, self._staging = host, host.log, host.staging
        self.parts: dict[str, StagedBatch] = {}
        self._alarm = Alarm(host.timers, host, PARTS, "dropping idle parts", self._drop_idle)

    def text(self, user: User) -> str:
        """Return the text of `.txn/ctl` for a user: all parts, and the user's producers; for the owner all."""
        every = user.uid in (0, self._log.state.uid)
        known = {uid: mine for uid, mine in self._log.state.producers.items() if every or uid == user.uid}
        last = [(name, commit.number) for mine in known.values() for name, commit in mine.items()]
        lines = [f"committed {one_line(name)}.{number}" for name, number in last]
        lines += [f"part {p.name} {p.attributes.uid} {p.messages} {p.staged.size}" for p in self.parts.values()]
        return "".join(f"{line}\n" for line in lines)

    # ------------------------------------------------------------ parts

    def make(self, user: User, name: str, mode: int) -> StagedBatch:
        """Open a part. Raises BadName, Exists, OverLimit."""
        if self._host.removed:
            raise errors.NotFound(f"group {self._log.state.name!r}: removed")
        if name == "ctl" or name in self.parts:
            raise errors.Exists(f"part {name!r}: exists already")
        check_name(name)
        part = StagedBatch(self._host, name, Attributes(mode & 0o777, user.uid, user.gid))
        self.parts[name] = part
        self._alarm.at(part.used_ns + limits.TRANSACTION_IDLE_S * _SECOND_NS)
        return part

    def drop(self, part: StagedBatch) -> None:
        """Remove a part that is committed or no longer needed, with its staged data."""
        del self.parts[part.name]
        part.dropped = True
        self._staging.give(part.attributes.uid, part.staged.size, len(part.ids), charged=not part.committing)
        self._staging.parts.release(part.attributes.uid)
        try:
            part.staged.close()
        except OSError as error:
            self._host.refuse(User(0, 0), ".txn", f"staged data of part {part.name!r} not removed: {error}")

    def spoil(self, part: StagedBatch, user: User, why: str) -> None:
        """Drop a part that lacks data which a user wrote to it: its commit then fails, so it has to be staged again."""
        self.drop(part)
        self._host.refuse(user, ".txn", f"part {part.name!r} dropped: {why}")

    def _drop_idle(self, now_ns: int) -> None:
        """Drop the parts that were not written to for TRANSACTION_IDLE_S seconds."""
        idle = limits.TRANSACTION_IDLE_S * _SECOND_NS
        for part in list(self.parts.values()):
            if part.committing:
                part.used_ns = now_ns
            if part.used_ns + idle > now_ns:
                self._alarm.at(part.used_ns + idle)
            else:
                self.drop(part)
                owner = User(part.attributes.uid, part.attributes.gid)
                self._host.refuse(
                    owner, ".txn", f"part {part.name!r} dropped: no write for {limits.TRANSACTION_IDLE_S} s"
                )

    def end(self) -> None:
        """Drop all parts: the group was removed, or the server stops."""
        for part in list(self.parts.values()):
            self.drop(part)

    # ------------------------------------------------------------ commands

    def _mine(self, user: User, name: str, *, also: int = -1) -> StagedBatch:
        part = self.parts.get(name)
        if part is None:
            raise errors.NotFound(f"no part {name!r} (committed or dropped, or the server was restarted)")
        if user.uid != also:
            require_owner(user, part.attributes, f"part {name}")
        if part.committing:
            raise errors.Busy(f"part {name!r}: being committed")
        return part

    def abort(self, user: User, names: Sequence[str]) -> None:
        """Drop parts, for their owner or the owner of the group. Raises NotFound, NotPermitted, Busy; then none was
        dropped."""
        parts = [self._mine(user, name, also=self._log.state.uid) for name in names]
        for part in dict.fromkeys(parts):
            self.drop(part)

    def commit(self, user: User, word: str, names: Sequence[str], value: int, writer: OpenFile) -> Step[int]:
        """Append the parts `names`, in that order, as one atomic batch, and drop them. If the ID `word` was committed
        before, only drop them. `value`: the result of the write. `writer`: see WriteRequest."""
        producer, number = parse_id(word)
        if not names:
            self._require_writer(user)
        if self._is_committed(user, producer, number):
            for part in [self._mine(user, name) for name in dict.fromkeys(names) if name in self.parts]:
                self.drop(part)
            return self._log.after_metadata_sync(value)
        if len(set(names)) != len(names):
            raise errors.BadCommand("commit: a part is named twice (expected each once)")
        parts = [self._mine(user, name) for name in names]
        unit = self._unit(user, parts, partial(self._changes, user, producer, number), value)
        unit.writer = writer
        return unit.write()

    def _is_committed(self, user: User, producer: str, number: int) -> bool:
        known = self._log.state.producers.get(user.uid, {}).get(producer)
        return known is not None and number <= known.number

    def _changes(self, user: User, producer: str, number: int) -> list[Change]:
        """Return the changes to append with the batch; none if the ID was committed while the batch waited. Raises
        OverLimit if no more producers can be remembered."""
        if self._is_committed(user, producer, number):
            return []
        now = self._host.clock.engine_ns()
        commit: Change = {"do": "commit", "producer": producer, "number": number, "uid": user.uid, "engine": now}
        if producer in self._log.state.producers.get(user.uid, {}):
            return [commit]
        check_control(producer)
        try:
            self._require_room(user.uid)
        except errors.OverLimit:
            old = self._unused_producers(now - limits.PRODUCER_KEPT_S * _SECOND_NS)
            self._require_room(user.uid, old)
            return [_forget(old), commit]
        return [commit]

    def _unused_producers(self, before_ns: int) -> list[tuple[int, str]]:
        """Return the producers without a commit since that engine time: user and name."""
        users = self._log.state.producers.items()
        return [(uid, name) for uid, mine in users for name, last in mine.items() if last.engine_ns <= before_ns]

    def _require_room(self, uid: int, without: Sequence[tuple[int, str]] = ()) -> None:
        """Check that one more producer of a user can be remembered, if those in `without` are forgotten. Raises
        OverLimit."""
        producers = self._log.state.producers
        mine = len(producers.get(uid, ())) - sum(owner == uid for owner, _ in without) + 1
        used = sum(map(len, producers.values())) - len(without) + 1
        require_share("producers that are not forgotten", limits.PRODUCERS, uid, mine, used)

    def _require_writer(self, user: User) -> None:
        """Check that the user owns the group or may write to a stream of it. Raises Denied."""
        if user.uid in (0, self._log.state.uid):
            return
        if not any(allowed(user, stream.state, W) for stream in self._host.streams.values()):
            raise errors.Denied("commit: no part given, and no stream that the user may write to")

    def _unit(
        self, user: User, parts: Sequence[StagedBatch], commit: Callable[[], list[Change]], value: int
    ) -> AtomicBatch:
        """Make the atomic batch of these parts, and freeze them until it is done or undone. Raises NotFound, Denied,
        OverLimit, BadCommand."""
        tallies: dict[Stream, StreamTotals] = {}
        sources: list[BatchSource] = []
        ids: dict[PutId, int] = {}
        expected: dict[str, int] = {}
        before = 0
        for part in parts:
            numbers = array("I")
            for name, mine in part.tallies.items():
                stream = part.stream(user, name)
                numbers.append(stream.number)
                tallies.setdefault(stream, StreamTotals()).add(mine.messages, mine.size, before + mine.last)
            sources.append(BatchSource(part.messages, part.staged.size, numbers, part.pieces))
            if twice := ids.keys() & part.ids.keys():
                raise errors.BadCommand(f"commit: id {min(twice).text!r} is in two parts (expected each once)")
            ids |= {put_id: before + place for put_id, place in part.ids.items()}
            merge_expected(expected, part.expected)
            before += part.messages
            before += self._add_lines(part, before, sources, tallies)
        require_fit(before, sum(source.stored_bytes for source in sources))
        self._freeze(parts, True)
        ranked = any(part.ranked for part in parts)
        return AtomicBatch(
            self._host.publisher, sources, tallies, value, ranked, commit, ids,
            expected={self._host.streams[name]: sequence for name, sequence in expected.items()},
            done=lambda _: self._done(parts), undo=lambda: self._freeze(parts, False),
        )  # fmt: skip

    def _add_lines(
        self, part: StagedBatch, before: int, sources: list[BatchSource], tallies: dict[Stream, StreamTotals]
    ) -> int:
        """Add the unfinished lines of a part, and return their number: they were accepted before the commit, so they
        belong to it. Their files keep them until it is done, and also if it is refused."""
        lines = [line() for line in part.unfinished.values()]
        size = sum(len(packed.data) for _, packed in lines)
        self._staging.take(part.attributes.uid, size, 0)  # checks the limits for them, too
        self._staging.give(part.attributes.uid, size, 0)
        for place, (user, packed) in enumerate(lines, before):
            stream = part.stream(user, packed.fresh[0])
            tallies.setdefault(stream, StreamTotals()).add(1, packed.rows[0].size, place)
            sources.append(BatchSource(1, len(packed.data), array("I", [stream.number]), partial(iter, (packed.data,))))
        return len(lines)

    def _freeze(self, parts: Sequence[StagedBatch], committing: bool) -> None:
        """Mark parts as being committed, or not any more, and move their charge: during a commit the streams are
        charged, not the part."""
        for part in parts:
            if part.committing != committing:
                part.committing = committing
                self._staging.charge(part.attributes.uid, -part.staged.size if committing else part.staged.size)
            if not committing:
                closed, part.closed = part.closed, []
                for end in closed:
                    end()

    def _done(self, parts: Sequence[StagedBatch]) -> None:
        for part in parts:
            self.drop(part)

    def forget(self, user: User, names: Sequence[str]) -> None:
        """Forget producers of the user. The owner of the group may also forget those of others, if it has none of that
        name itself. Raises NotFound, NotPermitted."""
        self._log.change(_forget([found for name in names for found in self._to_forget(user, name)]))

    def _to_forget(self, user: User, name: str) -> list[tuple[int, str]]:
        owners = [uid for uid, mine in self._log.state.producers.items() if name in mine]
        if not owners:
            raise errors.NotFound(f"no producer {name!r} in group {self._log.state.name!r}")
        if user.uid in owners:
            return [(user.uid, name)]
        if user.uid not in (0, self._log.state.uid):
            raise errors.NotPermitted(f"producer {name!r}: another user's")
        return [(uid, name) for uid in owners]


def _forget(producers: Sequence[tuple[int, str]]) -> Change:
    names, uids = [name for _, name in producers], [uid for uid, _ in producers]
    return {"do": "forget producers", "producers": names, "uids": uids}


def parse_id(word: str) -> tuple[str, int]:
    """Parse PRODUCER.NUMBER. Raises BadCommand."""
    producer, _, digits = word.rpartition(".")
    if not producer or not digits.isascii() or not digits.isdigit() or len(digits) > 19 or int(digits) >= _NUMBERS:
        raise errors.BadCommand(f"commit: invalid ID {word[:40]!r} (expected PRODUCER.NUMBER, such as nightly.7)")
    if len(producer.encode()) > limits.NAME_BYTES:
        raise errors.BadCommand(f"commit: name of the producer too long (expected at most {limits.NAME_BYTES} bytes)")
    return producer, int(digits)
