"""The number of a node in its group: a mixin of streams, consumers, views and a group's own files."""

from __future__ import annotations

from typing import Protocol

from mqfs.model import QTDIR, QTFILE, Qid


class HasNumber(Protocol):
    """A group."""

    number: int


class InGroup(Protocol):
    """What the class has that this is a mixin of."""

    directory: bool

    @property
    def group(self) -> HasNumber: ...

    @property
    def number(self) -> int: ...


class Numbered:
    """A file that has a number of its own in its group."""

    __slots__ = ()
    directory = False

    @property
    def qid(self: InGroup) -> Qid:
        return Qid(QTDIR if self.directory else QTFILE, 0, self.group.number << 32 | self.number)
