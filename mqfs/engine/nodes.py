"""A group's own files and directories: `ctl`, `.stats`, `.consumers`, `.kept/STREAM`, `.consumers/.STREAM`, ...

This module has their names and modes; their numbers are in state/group.py. Streams, views and consumers are files too,
with classes of their own. docs/contributing/hacking.md lists what a new file needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import attrs

from mqfs import errors, limits
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import Numbered, W, X, bits_for_writers, require
from mqfs.engine.publishing.batch import StagedBatch
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.errors import NotPermitted
from mqfs.model import QTDIR, QTFILE, Qid, User
from mqfs.state import group as group_state
from mqfs.state.group import Attributes
from mqfs.syntax.lines import print_path


class MetaFile(NamedTuple):
    """A file that each group has."""

    number: int
    mode: int  # the default; a user class without w in it can never write


META_FILES = {
    "ctl": MetaFile(group_state.CTL, 0o644),
    "order": MetaFile(group_state.ORDER, 0o444),
    ".cursor": MetaFile(group_state.CURSOR, 0o666),
    ".put": MetaFile(group_state.PUT, 0o666),
    ".batch": MetaFile(group_state.BATCH, 0o666),
    ".stats": MetaFile(group_state.STATS, 0o444),
    ".who": MetaFile(group_state.WHO, 0o444),
    ".errors": MetaFile(group_state.ERRORS, 0o444),
}
FOLDERS = {".consumers": group_state.CONSUMERS, ".kept": group_state.KEPT, ".txn": group_state.TXN}
_KEPT_BIT = 1 << 31  # set in the number of `.kept/STREAM`: stream numbers are below it
_TAKE_BITS = 3 << 30  # set in the number of `.consumers/.STREAM`: stream numbers are below 2**30


class PermanentNode(Numbered):
    """A file that exists as long as its group. Two with the same number in a group are equal."""

    __slots__ = ()
    group: Group
    number: int

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.group, other.number) == (self.group, self.number)

    def __hash__(self) -> int:
        return hash((self.group, self.number))

    @property
    def removed(self) -> bool:
        return self.group.removed


def unlink_nothing(group: Group, file: Meta | StagedStream, pid: int) -> None:
    """Accept the removal of a permanent file without doing it, so that `rm -r` works. Raises NotPermitted if a process
    repeats it within UNLINK_AGAIN_S: GNU tar removes a file to make it again, and would retry for ever."""
    mine, now = (pid, file.qid.path), group.clock.engine_ns()
    (last, then), group.unlinked = group.unlinked, (mine, now)
    if pid and last == mine and now - then < limits.UNLINK_AGAIN_S * 1e9:
        raise NotPermitted(f"cannot remove {file.name}: it is always there")


@attrs.frozen
class OfStream:
    """Another file of a stream, which exists as long as the stream."""

    stream: Stream
    directory = False

    @property
    def group(self) -> Group:
        return self.stream.group

    @property
    def removed(self) -> bool:
        return self.stream.removed


class Meta(PermanentNode):
    """One of a group's own files: `ctl`, `order`, `.stats`, ..."""

    __slots__ = ("default_mode", "group", "name", "number")

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self.number, self.default_mode = META_FILES[name].number, META_FILES[name].mode

    @property
    def attributes(self) -> Attributes:
        """The attributes set by the owner; by default the group's owner and the default mode."""
        own = self.group.state.files.get(self.number)
        return own or Attributes(self.default_mode, self.group.state.uid, self.group.state.gid)


class Folder(PermanentNode):
    """`.consumers`, `.kept` or `.txn`: a permanent directory. Owner and mode are the group's."""

    __slots__ = ("group", "name", "number")
    directory = True

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name, self.number = group, name, FOLDERS[name]

    @property
    def attributes(self) -> Attributes:
        return self.group.state


class SnapshotNode(OfStream):
    """`.kept/STREAM`: the retained messages of a stream as an ordinary file."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self.stream.name

    @property
    def qid(self) -> Qid:
        return Qid(QTFILE, 0, self.group.number << 32 | _KEPT_BIT | self.stream.number)

    @property
    def attributes(self) -> Attributes:
        own = self.stream.state
        return Attributes(own.mode & 0o444, own.uid, own.gid)


class TakeFile(OfStream):
    """`.consumers/.STREAM`: the default consumer of a stream, with explicit acknowledgement; in no listing."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return f".{self.stream.name}"

    @property
    def qid(self) -> Qid:
        return Qid(QTFILE, 0, self.group.number << 32 | _TAKE_BITS | self.stream.number)

    @property
    def attributes(self) -> Attributes:
        return self.stream.state


# ------------------------------------------------------------ txn nodes

_META = {name: META_FILES[name].number for name in (".batch", ".put")}  # the files of a part that are not streams


class StagingFolder(Folder):
    """`.txn`, or a part in it: a directory with look-up, listing and changes of its own."""

    __slots__ = ()

    def find(self, name: str) -> PartFolder | StagedStream | TxnCtl | None:
        raise NotImplementedError

    def files(self) -> Sequence[PartFolder | StagedStream | TxnCtl]:
        raise NotImplementedError

    def times(self) -> tuple[int, int, int, int]:
        """Return (mtime, ctime, bytes staged, links); times in wall ns."""
        raise NotImplementedError

    def mkdir(self, user: User, name: str, mode: int) -> PartFolder:
        raise errors.NotPermitted("cannot make groups in a part of a transaction")

    def create(self, user: User, name: str) -> NoReturn:
        raise errors.NotPermitted(f"cannot create files in {self.name} (expected a part: mkdir {self.name}/PART)")

    def unlink(self, user: User, name: str, pid: int) -> None:
        """Accept the removal of a file, which stays, as `unlink_nothing` does. Raises NotFound, IsDirectory, Denied,
        NotPermitted."""
        require(user, self.attributes, W | X, self.name)
        found = self.find(name)
        if found is None:
            raise not_found(self, name)
        if isinstance(found, PartFolder):
            raise errors.IsDirectory(f"{name!r}: a part, not a file (remove it by rmdir)")
        unlink_nothing(self.group, found, pid)

    def rmdir(self, user: User, name: str) -> None:
        raise errors.NotDirectory(f"{name!r}: a file, not a directory")


class TxnFolder(StagingFolder):
    """`.txn`: a user who may enter the group may make a part, as in /tmp."""

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
            raise errors.NotDirectory(f"{name!r}: a file, not a part")
        self.group.transactions.abort(user, [name])


class TxnCtl(Meta):
    """`.txn/ctl`."""

    __slots__ = ()

    def __init__(self, group: Group) -> None:
        self.group, self.name, self.number, self.default_mode = group, "ctl", group_state.TXN_CTL, 0o666


class PartFolder(StagingFolder):
    """`.txn/PART`: it has all the group's streams for writing, and lists those that were written to."""

    __slots__ = ("part",)

    def __init__(self, group: Group, part: StagedBatch) -> None:
        self.group, self.part, self.name, self.number = group, part, part.name, part.number

    def __eq__(self, other: object) -> bool:  # by the part, as a file of the group may have the same number
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
            raise errors.Exists(f"{name!r}: exists already")
        raise errors.NotFound(f"no stream {name!r} in group {self.group.name!r} (create it there first)")


@attrs.frozen
class StagedStream:
    """A stream in a part, or its `.batch` or `.put`. Two with the same part and number are equal."""

    group: Group = attrs.field(eq=False)
    part: StagedBatch
    name: str = attrs.field(eq=False)
    number: int
    directory = False

    @property
    def removed(self) -> bool:
        return self.part.dropped

    @property
    def qid(self) -> Qid:
        return Qid(QTFILE, 0, self.part.number << 32 | self.number)

    @property
    def attributes(self) -> Attributes:
        """The owner of the part, and a mode that lets those write who may write to the part. Only `.batch` and `.put`
        can be read."""
        own = self.part.attributes
        mode = own.mode & 0o222 if self.name not in _META else bits_for_writers(own.mode)
        return Attributes(mode, own.uid, own.gid)

    def times(self) -> tuple[int, int, int, int]:
        tally = self.part.tallies.get(self.name)
        size = tally.size if tally is not None else 0
        return self.part.mtime_ns, self.part.made_ns, size, 0 if self.removed else 1


# ------------------------------------------------------------ places

Node = Group | Stream | View | Consumer | Meta | Folder | SnapshotNode | TakeFile | StagedStream


def parent(node: Node) -> Group | Folder:
    """Return the directory of a node; that of the root is the root."""
    if isinstance(node, Group):
        return node.parent
    if isinstance(node, StagedStream):
        return PartFolder(node.group, node.part)
    if isinstance(node, PartFolder | TxnCtl):
        return TxnFolder(node.group)
    if isinstance(node, Consumer | TakeFile):
        return Folder(node.group, ".consumers")
    return Folder(node.group, ".kept") if isinstance(node, SnapshotNode) else node.group


_CONTENTS = {".consumers": "consumer", ".kept": "stream", ".txn": "part"}


def not_found(directory: Group | Folder, name: str) -> errors.NotFound:
    """Return the error for a name that does not exist in a directory."""
    if isinstance(directory, Group):
        return errors.NotFound(f"no stream or group {name!r} in group {directory.name!r}")
    kind = _CONTENTS.get(directory.name, "stream")
    return errors.NotFound(f"no {kind} {name!r} in group {directory.group.name!r}")


def path_of(node: Node) -> tuple[str, ...]:
    """Return the present names from the root to a node."""
    names: list[str] = []
    while (above := parent(node)) is not node:
        names.append(node.name)
        node = above
    return tuple(reversed(names))


def path_text(node: Node) -> str:
    """Return the present path of a node as text."""
    return print_path(path_of(node))
