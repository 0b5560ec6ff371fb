"""Files made when they are opened: `.stats`, `.who`, `.errors`. What they say is in report.py."""

from __future__ import annotations

from collections.abc import Callable

from mqfs.engine.files import status_files
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.group import Group
from mqfs.engine.nodes.own_files import Meta
from mqfs.model import User
from mqfs.wait import Step


class TextHandle(OpenFile):
    """A file made when it is opened: `.stats`, `.who`, `.errors`. Finite and seekable."""

    _MAKE: dict[str, Callable[[Group, User], str]] = {  # noqa: RUF012 - a table, never altered
        ".stats": status_files.stats,
        ".who": status_files.who,
        ".errors": status_files.refusals,
    }

    def __init__(self, node: Meta, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.text = self._MAKE[node.name](self.group, user).encode()
        self.size = len(self.text)

    def on_opened(self) -> None:
        self.hold(self.size)
        super().on_opened()

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        return self.text[offset : offset + count]
