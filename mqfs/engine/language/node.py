"""Nodes of the tree that have a number and attributes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs.model import QTDIR, QTFILE, Qid

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream


class Numbered:
    """A file that has a number of its own in its group."""

    __slots__ = ()
    directory = False
    group: Group

    @property
    def qid(self) -> Qid:
        return Qid(QTDIR if self.directory else QTFILE, 0, self.group.number << 32 | self.number)  # type: ignore[attr-defined]


class Own(Numbered):
    """A file that is there as long as its group."""

    __slots__ = ()

    @property
    def parent(self) -> Group:
        return self.group

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
