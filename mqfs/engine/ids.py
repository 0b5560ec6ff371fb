"""Ids of `.put`: the same id within `dedup` is accepted and not appended again.

Owns how long and how many are remembered; they are in the group's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.state import Change

if TYPE_CHECKING:
    from mqfs.engine.group import Group


class Ids:
    """Of one group."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def known(self, id_: str) -> int:
        """The sequence of the message that was put under that id not long ago; 0 if none was."""
        until, sequence = self.group.state.ids.get(id_, (0, 0))
        return sequence if until > self.group.tree.clock.engine_ns() else 0

    def note(self, id_: str, sequence: int) -> Change:
        """The change by which an id is remembered. Raises OverLimit."""
        if len(self.group.state.ids) >= limits.DEDUP_IDS:
            self.forget()
        if len(self.group.state.ids) >= limits.DEDUP_IDS:
            raise errors.OverLimit(f"at most {limits.DEDUP_IDS} ids are remembered; make 'dedup' shorter")
        until = self.group.tree.clock.engine_ns() + self.group.settings.dedup
        return {"do": "id", "id": id_, "until": until, "sequence": sequence}

    def forget(self) -> None:
        """Those whose time is over."""
        now = self.group.tree.clock.engine_ns()
        ids = self.group.state.ids
        while ids and (first := next(iter(ids)), ids[first][0])[1] <= now:
            del ids[first]
