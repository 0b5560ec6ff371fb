"""The views of a group, by name: binding, unbinding, and which of them a stream is in.

Owns the compiled patterns. What a view looks like to a reader is in view.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs.engine.names import quote
from mqfs.engine.stream import Stream, end_parked, serve_parked
from mqfs.engine.topics import Patterns
from mqfs.engine.view import View
from mqfs.types import Record

if TYPE_CHECKING:
    from mqfs.engine.group import Group


class Views(dict[str, View]):
    """Of one group. A stream is matched once, when it is new or the patterns have changed."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.bound = 0  # patterns and programs of all of them
        self._patterns: Patterns[str] = Patterns()
        self._routing: dict[str, View] = {}  # those with a program

    def load(self) -> None:
        """Those that the group's state names."""
        for own in self.group.state.views.values():
            self._enter(View(self.group, own))

    def lines(self) -> list[str]:
        """As ctl lines."""
        return [f"bind {quote(view.name)} {quote(text)}" for view in self.values() for text in view.state.patterns]

    def _enter(self, view: View) -> None:
        self[view.name] = view
        self.bound += len(view.state.patterns)
        for pattern in view.patterns:
            self._patterns.add(pattern, view.name)
        self._note_programs(view)

    def _note_programs(self, view: View) -> None:
        if view.programs:
            self._routing[view.name] = view
        else:
            self._routing.pop(view.name, None)

    def bind(self, name: str, pattern: str) -> None:
        """A pattern or program more for a view, which is made if it is not there. Both were checked."""
        view = self.get(name)
        if view is not None and pattern in view.state.patterns:
            return
        number = self.group.state.next_stream
        now = self.group.tree.clock.wall_ns()
        self.group.change({"do": "bind", "number": number, "name": name, "pattern": pattern, "time": now})
        if view is None:
            self._enter(View(self.group, self.group.state.views[name]))
        else:
            self.bound += 1
            view.refresh()
            if pattern in view.patterns:
                self._patterns.add(pattern, name)
            self._note_programs(view)
        self.group.consumers.rank_anew()

    def unbind(self, name: str, pattern: str | None) -> None:
        """One pattern or program of a view less, or all of them; without any it is gone."""
        view = self[name]
        before, bound = view.patterns, len(view.state.patterns)
        self.group.change({"do": "unbind", "name": name, "pattern": pattern})
        self.bound -= bound - len(view.state.patterns)
        view.refresh()
        self._note_programs(view)
        for text in before:
            if text not in view.patterns:
                self._patterns.remove(text, name)
        if not view.state.patterns:
            del self[name]
            view.removed = True
            end_parked(view.parked, self.group)
        self.group.consumers.reshaped()
        self.group.consumers.rank_anew()

    def _look_up_views(self, stream: Stream) -> tuple[frozenset[str], frozenset[str]]:
        found = stream.views
        if found is None or found[0] != self.group.shape:
            matched = frozenset(self._patterns.match(stream.name))
            routed = (name for name, view in self._routing.items() if view.may_route(stream.name))
            stream.views = found = (self.group.shape, matched, matched.union(routed))
        return found[1], found[2]

    def matched(self, stream: Stream) -> frozenset[str]:
        """The views that have all of the stream."""
        return self._look_up_views(stream)[0]

    def of(self, stream: Stream) -> frozenset[str]:
        """The views that may have messages of the stream."""
        return self._look_up_views(stream)[1]

    def offer(self, stream: Stream, record: Record) -> None:
        """A new message, for readers of views that wait."""
        for name in self.of(stream):
            view = self[name]
            if view.parked:
                serve_parked(view.parked, record)
