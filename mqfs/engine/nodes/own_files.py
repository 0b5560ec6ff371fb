"""A group's own files and directories: `ctl`, `.stats`, `.consumers`, `.kept/STREAM`, `.consumers/.STREAM`, ...

Owns what they are called, their numbers and modes. Streams, views and consumers are files too, with classes of their
own.
"""

from __future__ import annotations

from mqfs import group_state, limits
from mqfs.engine.group import Group
from mqfs.engine.language.node import Numbered
from mqfs.engine.stream import Stream
from mqfs.errors import NotPermitted
from mqfs.group_state import Attributes
from mqfs.model import QTFILE, Qid

META_FILES = {
    "ctl": (group_state.CTL, 0o644),
    "order": (group_state.ORDER, 0o444),
    ".cursor": (group_state.CURSOR, 0o666),
    ".put": (group_state.PUT, 0o666),
    ".batch": (group_state.BATCH, 0o666),
    ".stats": (group_state.STATS, 0o444),
    ".who": (group_state.WHO, 0o444),
    ".errors": (group_state.ERRORS, 0o444),
}
FOLDERS = {".consumers": group_state.CONSUMERS, ".kept": group_state.KEPT, ".txn": group_state.TXN}
_KEPT_BIT = 1 << 31  # in the number of `.kept/STREAM`: stream numbers stay below
_TAKE_BITS = 3 << 30  # in the number of `.consumers/.STREAM`: stream numbers stay below 2**30


class Own(Numbered):
    """A file that is there as long as its group. Two of one number in a group are the same."""

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


class OfStream:
    """Another file of a stream, there as long as the stream is."""

    __slots__ = ("group", "stream")
    directory = False

    def __init__(self, stream: Stream) -> None:
        self.stream, self.group = stream, stream.group

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.stream is self.stream

    def __hash__(self) -> int:
        return hash(self.stream)

    @property
    def removed(self) -> bool:
        return self.stream.removed


class Meta(Own):
    """One of a group's own files: `ctl`, `order`, `.stats`, ..."""

    __slots__ = ("default_mode", "group", "name", "number")

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self.number, self.default_mode = META_FILES[name]

    def unlink(self, pid: int) -> None:
        """Nothing is done, so that `rm -r` works. Raises NotPermitted where a process does it again at once: GNU
        tar removes a file to make it again, and would try for ever."""
        unlinked, now = self.group.unlinked, self.group.clock.engine_ns()
        before, then = unlinked.get(self.number, (0, 0))
        unlinked[self.number] = pid, now
        if pid and pid == before and now - then < limits.UNLINK_AGAIN_S * 1e9:
            raise NotPermitted(f"{self.name} is always there; its process removed it a moment ago")

    @property
    def attributes(self) -> Attributes:
        """As the owner changed them, else the group's owner and the default mode."""
        own = self.group.state.files.get(self.number)
        return own or Attributes(self.default_mode, self.group.state.uid, self.group.state.gid)


class Folder(Own):
    """`.consumers`, `.kept` or `.txn`: a directory that is always there. Owner and mode are the group's."""

    __slots__ = ("group", "name", "number")
    directory = True

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name, self.number = group, name, FOLDERS[name]

    @property
    def attributes(self) -> Attributes:
        return self.group.state


class SnapshotNode(OfStream):
    """`.kept/STREAM`: what the stream keeps, as an ordinary file."""

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
    """`.consumers/.STREAM`: the consumer that all who take from the stream share, with claims; in no listing."""

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
