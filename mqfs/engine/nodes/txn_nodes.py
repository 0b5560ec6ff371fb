"""The nodes of `.txn`: its folder, `ctl`, the parts, and the files in a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from mqfs import errors, group_state
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import W, X, bits_for_writers, require
from mqfs.engine.nodes.own_files import Folder, Meta
from mqfs.engine.publishing.staged_batch import StagedBatch
from mqfs.group_state import Attributes
from mqfs.model import QTDIR, QTFILE, Qid, User

_META = {".batch": group_state.BATCH, ".put": group_state.PUT}  # what a part has beside streams


class StagingFolder(Folder):
    """`.txn`, or a part in it: a directory in which little is as in others."""

    __slots__ = ()

    def find(self, name: str) -> PartFolder | StagedStream | TxnCtl | None:
        raise NotImplementedError

    def files(self) -> Sequence[PartFolder | StagedStream | TxnCtl]:
        raise NotImplementedError

    def times(self) -> tuple[int, int, int, int]:
        """(mtime, ctime, bytes kept, links)"""
        raise NotImplementedError

    def mkdir(self, user: User, name: str, mode: int) -> PartFolder:
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


class TxnFolder(StagingFolder):
    """`.txn`: who may enter the group may open a part, as in /tmp."""

    __slots__ = ()

    def __init__(self, group: Group) -> None:
        super().__init__(group, ".txn")

    @property
    def attributes(self) -> Attributes:
        own = self.group.state
        return Attributes(0o1777, own.uid, own.gid)

    def find(self, name: str) -> PartFolder | TxnCtl | None:
        if name == "ctl":
            return TxnCtl(self.group)
        part = self.group.transactions.parts.get(name)
        return PartFolder(self.group, part) if part is not None else None

    def files(self) -> Sequence[PartFolder | TxnCtl]:
        parts = self.group.transactions.parts.values()
        return [TxnCtl(self.group), *(PartFolder(self.group, part) for part in parts)]

    def times(self) -> tuple[int, int, int, int]:
        made = self.group.state.made_ns
        return max(self.group.log.end.last_ns, made), made, 0, 2 + len(self.group.transactions.parts)

    def mkdir(self, user: User, name: str, mode: int) -> PartFolder:
        require(user, self.group.state, X, self.group.name)
        return PartFolder(self.group, self.group.transactions.make(user, name, mode))

    def rmdir(self, user: User, name: str) -> None:
        if name == "ctl":
            raise errors.NotDirectory(name)
        self.group.transactions.abort(user, [name])


class TxnCtl(Meta):
    """`.txn/ctl`."""

    __slots__ = ()

    def __init__(self, group: Group) -> None:
        self.group, self.name, self.number, self.default_mode = group, "ctl", group_state.TXN_CTL, 0o666


class PartFolder(StagingFolder):
    """`.txn/PART`. In it are the group's streams, to be written to; listed are those that were."""

    __slots__ = ("part",)

    def __init__(self, group: Group, part: StagedBatch) -> None:
        self.group, self.part, self.name, self.number = group, part, part.name, part.number

    def __eq__(self, other: object) -> bool:  # by the part: its number may be that of a file of the group
        return isinstance(other, PartFolder) and other.part is self.part

    def __hash__(self) -> int:
        return hash(self.part)

    @property
    def attributes(self) -> Attributes:
        return self.part.attributes

    @property
    def removed(self) -> bool:
        return self.part.dropped

    @property
    def qid(self) -> Qid:
        return Qid(QTDIR, 0, self.number << 32)

    def find(self, name: str) -> StagedStream | None:
        if name in _META:
            return StagedStream(self.group, self.part, name, _META[name])
        stream = self.group.streams.get(name)
        return StagedStream(self.group, self.part, name, stream.number) if stream is not None else None

    def files(self) -> Sequence[StagedStream]:
        found = (self.find(name) for name in [*_META, *self.part.tallies])
        return [file for file in found if file is not None]

    def times(self) -> tuple[int, int, int, int]:
        return self.part.mtime_ns, self.part.made_ns, self.part.staged.size, 0 if self.removed else 2

    def create(self, user: User, name: str) -> NoReturn:
        if self.find(name) is not None:
            raise errors.Exists(name)
        raise errors.NotFound(f"no stream {name!r} in this group; make it there before it is written to in a part")


class StagedStream:
    """A stream in a part, or its `.batch` or `.put`."""

    __slots__ = ("group", "name", "number", "part")
    directory = False

    def __init__(self, group: Group, part: StagedBatch, name: str, number: int) -> None:
        self.group, self.part, self.name, self.number = group, part, name, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedStream) and (other.part, other.number) == (self.part, self.number)

    def __hash__(self) -> int:
        return hash((self.part, self.number))

    @property
    def removed(self) -> bool:
        return self.part.dropped

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
