"""A part of `.txn`: what is staged, before it is committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from mqfs import errors, group_state, limits
from mqfs.engine.language.permissions import W, X, require
from mqfs.engine.publishing.atomic_batch import StreamTotals, require_fit
from mqfs.engine.nodes.own_files import Folder, bits_for_writers
from mqfs.group_state import Attributes
from mqfs.log import batch
from mqfs.model import QTDIR, QTFILE, Qid, User
from mqfs.shares import Shares

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.nodes.txn_nodes import TxnCtl
    from mqfs.engine.stream import Stream

_META = {".batch": group_state.BATCH, ".put": group_state.PUT}  # what a part has beside streams


class StagingFolder(Folder):
    """`.txn`, or a part in it: a directory in which little is as in others."""

    __slots__ = ()

    def find(self, name: str) -> StagedBatch | StagedStream | TxnCtl | None:
        raise NotImplementedError

    def files(self) -> Sequence[StagedBatch | StagedStream | TxnCtl]:
        raise NotImplementedError

    def times(self) -> tuple[int, int, int, int]:
        """(mtime, ctime, bytes kept, links)"""
        raise NotImplementedError

    def mkdir(self, user: User, name: str, mode: int) -> StagedBatch:
        raise errors.NotPermitted("in a part there are no groups")

    def create(self, user: User, name: str) -> NoReturn:
        raise errors.NotPermitted(f"in {self.name} nothing is made but parts: mkdir {self.name}/PART")

    def unlink(self, user: User, name: str) -> None:
        """Nothing is done, so that `rm -r` works."""
        require(user, self.attributes, W | X, self.name)
        found = self.find(name)
        if found is None:
            raise errors.NotFound(name)
        if found.directory:
            raise errors.IsDirectory(name)

    def rmdir(self, user: User, name: str) -> None:
        raise errors.NotDirectory(name)


class StagedBatch(StagingFolder):
    """`.txn/PART`. In it are the group's streams, to be written to; listed are those that were."""

    __slots__ = (
        "_borders",
        "_names",
        "_own",
        "committing",
        "dropped",
        "made_ns",
        "messages",
        "mtime_ns",
        "places",
        "ranked",
        "staged",
        "tallies",
        "used_ns",
    )

    def __init__(self, group: Group, name: str, number: int, own: Attributes) -> None:
        self.group, self.name, self.number, self._own = group, name, number, own
        self.staged = group.tree.store.stage(number)
        self.tallies: dict[str, StreamTotals] = {}  # by the stream's name, in the order of their places
        self.places: dict[bytes, int] = {}  # in the table of streams that its blanks mean
        self._names: list[str] = []
        self._borders = [0]  # of what is read at once
        self.messages = 0
        self.ranked = self.committing = self.dropped = False
        self.made_ns = self.mtime_ns = group.tree.clock.wall_ns()
        self.used_ns = group.tree.clock.engine_ns()

    # ------------------------------------------------------------ as a directory

    @property
    def attributes(self) -> Attributes:
        return self._own

    @property
    def parent(self) -> Folder:  # type: ignore[override]
        return self.group.folders[".txn"]

    @property
    def removed(self) -> bool:
        return self.dropped or self.group.removed

    @property
    def qid(self) -> Qid:
        return Qid(QTDIR, 0, self.number << 32)

    def find(self, name: str) -> StagedStream | None:
        if name in _META:
            return StagedStream(self, name, _META[name])
        stream = self.group.streams.get(name)
        return StagedStream(self, name, stream.number) if stream is not None else None

    def files(self) -> Sequence[StagedStream]:
        found = (self.find(name) for name in [*_META, *self.tallies])
        return [file for file in found if file is not None]

    def times(self) -> tuple[int, int, int, int]:
        return self.mtime_ns, self.made_ns, self.staged.size, 0 if self.removed else 2

    def create(self, user: User, name: str) -> NoReturn:
        if self.find(name) is not None:
            raise errors.Exists(name)
        raise errors.NotFound(f"no stream {name!r} in this group; make it there before it is written to in a part")

    # ------------------------------------------------------------ what is in it

    def stream(self, user: User, name: str) -> Stream:
        """A stream to be written to. Raises NotFound, Denied."""
        stream = self.group.streams.get(name)
        if stream is None:
            raise errors.NotFound(f"no stream {name!r} in this group")
        require(user, stream.state, W, name)
        return stream

    def add(self, user: User, packed: batch.EncodedBatch, *, ranked: bool = False) -> None:
        """Put messages into it, or none. Raises NotFound, Denied, Busy, OverLimit, DiskFull."""
        if self.removed:
            raise errors.NotFound(f"part {self.name} was committed or dropped")
        if self.committing:
            raise errors.Busy(f"part {self.name} is being committed")
        names = [*self._names, *packed.fresh] if packed.fresh else self._names
        for row in packed.rows:
            self.stream(user, names[row.place])
        require_fit(self.messages + packed.messages, self.staged.size + len(packed.data))
        self.group.tree.staging.bytes.take(self._own.uid, len(packed.data))
        try:
            self.staged.append(packed.data)
        except OSError as error:
            self.group.tree.staging.bytes.give(self._own.uid, len(packed.data))
            raise errors.DiskFull(f"part {self.name}: {error}") from error
        self._count(packed)
        self.ranked = self.ranked or ranked
        self.mtime_ns = self.group.tree.clock.wall_ns()
        self.used_ns = self.group.tree.clock.engine_ns()

    def _count(self, packed: batch.EncodedBatch) -> None:
        for name in packed.fresh:
            self.places[name.encode()] = len(self._names)
            self._names.append(name)
            self.tallies[name] = StreamTotals()
        for row in packed.rows:
            tally = self.tallies[self._names[row.place]]
            tally.messages += row.messages
            tally.size += row.size
            tally.last = self.messages + row.last
        self.messages += packed.messages
        if self.staged.size - self._borders[-1] >= limits.UNIT_PIECE_BYTES:
            self._borders.append(self.staged.size)

    def pieces(self) -> Iterator[bytes]:
        """Its messages as blanks, read anew each time: they are too many to be held."""
        for begin, end in pairwise([*self._borders, self.staged.size]):
            try:
                data = self.staged.read(begin, end - begin)
            except OSError as error:
                raise errors.DiskFailed(f"part {self.name} cannot be read back: {error}") from error
            if len(data) != end - begin:
                raise errors.DiskFailed(f"part {self.name} cannot be read back")
            yield data


class StagedStream:
    """A stream in a part, or its `.batch` or `.put`."""

    __slots__ = ("name", "number", "part")
    directory = False

    def __init__(self, part: StagedBatch, name: str, number: int) -> None:
        self.part, self.name, self.number = part, name, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedStream) and (other.part, other.number) == (self.part, self.number)

    def __hash__(self) -> int:
        return hash((self.part, self.number))

    @property
    def group(self) -> Group:
        return self.part.group

    @property
    def parent(self) -> StagedBatch:
        return self.part

    @property
    def removed(self) -> bool:
        return self.part.removed

    @property
    def qid(self) -> Qid:
        return Qid(QTFILE, 0, self.part.number << 32 | self.number)

    @property
    def attributes(self) -> Attributes:
        """Written by who may write to the part; of a stream nothing is read."""
        own = self.part.attributes
        mode = own.mode & 0o222 if self.name not in _META else bits_for_writers(own.mode)
        return Attributes(mode, own.uid, own.gid)

    def times(self) -> tuple[int, int, int, int]:
        tally = self.part.tallies.get(self.name)
        size = tally.size if tally is not None else 0
        return self.part.mtime_ns, self.part.made_ns, size, 0 if self.removed else 1


class Totals:
    """What all parts of a tree take together, and of each user."""

    def __init__(self, *, in_memory: bool) -> None:
        self.parts = Shares("parts", "PARTS")
        self.bytes = Shares("bytes in parts of transactions", "MEMORY_BYTES" if in_memory else "STAGED_BYTES")
