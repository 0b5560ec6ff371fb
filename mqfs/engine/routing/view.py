"""A view: the messages of all streams that a pattern matches or a program selects, to read like a stream.

Owns which messages are in it. Which views a stream is in, the registry knows; an open one is files/view_file.py.
"""

from __future__ import annotations

import logging
from typing import Any

from mqfs import errors
from mqfs.engine.language import programs
from mqfs.engine.language.node import Numbered
from mqfs.engine.language.programs import Program
from mqfs.group_state import Attributes, ViewState
from mqfs.model import Record
from mqfs.syntax.quoting import quote

log = logging.getLogger("mqfs.engine")


class View(Numbered):
    """The file. Bound and unbound by its group."""

    def __init__(self, group: Any, own: ViewState) -> None:
        self.group, self.state = group, own
        self.removed = False
        self.readers: set[Any] = set()  # the open ones
        self.programs: list[Program] = []
        self.patterns: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """Its patterns have changed."""
        known = {program.text: program for program in self.programs}
        texts = [text for text in self.state.patterns if programs.is_program(text)]
        self.programs = [program for text in texts if (program := known.get(text) or self._parse(text))]
        self.patterns = [text for text in self.state.patterns if not programs.is_program(text)]
        self.bound = len(self.state.patterns)
        self.searches = sum(program.searches for program in self.programs)

    def lines(self) -> list[str]:
        """As ctl lines."""
        return [f"bind {quote(self.name)} {quote(text)}" for text in self.state.patterns]

    def _parse(self, text: str) -> Program | None:
        """None where a function of it is no longer installed: it selects nothing, and the start continues."""
        try:
            return programs.parse(text)
        except errors.BadCommand as error:
            log.error("view %s: %s", self.name, error)
            return None

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def number(self) -> int:
        return self.state.number

    @property
    def attributes(self) -> Attributes:
        return Attributes(0o444, self.group.state.uid, self.group.state.gid)

    def may_route(self, name: str) -> bool:
        """Whether one of its programs may select messages of a stream of that name."""
        return any(p.may_route(name) for p in self.programs)

    def has_all_of(self, name: str) -> bool:
        """Whether one of its programs selects all messages of a stream of that name."""
        return any(p.by_name and p.may_route(name) for p in self.programs)

    def selects(self, name: str, record: Record) -> bool:
        """Whether one of its programs selects that message of a stream of that name."""
        searches = self.group.views.searches
        return any(p.selects(name, record.body, record.sequence, searches) for p in self.programs)
