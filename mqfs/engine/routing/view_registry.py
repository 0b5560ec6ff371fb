"""The views of a group, by name: binding, unbinding, and which of them a stream is in.

Owns the compiled patterns. What a view looks like to a reader is in view.py.
"""

from __future__ import annotations

from collections.abc import Callable

from mqfs.engine.routing.catalog import Catalog, NamedStream
from mqfs.engine.routing.view import View
from mqfs.model import Record
from mqfs.syntax.patterns import Patterns


class ViewRegistry(dict[str, View]):
    """Of one group. A stream is matched once, when it is new or the patterns have changed."""

    on_refreshed: Callable[[], None]
    on_removed: Callable[[View], None]

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self._catalog = catalog
        self.bound = 0  # patterns and programs of all of them
        self.searches = 0  # of these programs
        self._patterns: Patterns[str] = Patterns(catalog.log.settings.words)
        self._routing: dict[str, View] = {}  # those with a program

    def load(self) -> None:
        """Those that the group's state names."""
        for own in self._catalog.log.state.views.values():
            self._enter(View(self._catalog, own))

    def _enter(self, view: View) -> None:
        self[view.name] = view
        self.bound += view.bound
        self.searches += view.searches
        for pattern in view.patterns:
            self._patterns.add(pattern, view.name)
        self._note_programs(view)

    def _note_programs(self, view: View) -> None:
        if view.programs:
            self._routing[view.name] = view
        else:
            self._routing.pop(view.name, None)

    def unbind(self, name: str) -> None:
        """All patterns and programs of a view."""
        self._catalog.log.change({"do": "unbind", "name": name, "pattern": None})
        self.refresh(name)

    def refresh(self, *names: str) -> None:
        """What the state says of these views has changed."""
        views = [(name, self.get(name)) for name in names]
        for _, view in views:
            if view is not None:
                self._leave(view)
        if not len(self._patterns):
            self._patterns = Patterns(self._catalog.log.settings.words)  # they change while no view has patterns
        for name, view in views:
            self._refresh(name, view)
        self._catalog.routing_version += 1  # streams may have been looked up since the state changed
        self.on_refreshed()

    def _refresh(self, name: str, view: View | None) -> None:
        own = self._catalog.log.state.views.get(name)
        if view is not None and view.state is own:
            view.refresh()
            self._enter(view)
        else:
            if view is not None:
                self._end(view)
            if own is not None:
                self._enter(View(self._catalog, own))

    def _leave(self, view: View) -> None:
        """Forget what it is bound to."""
        self._routing.pop(view.name, None)
        for pattern in view.patterns:
            self._patterns.remove(pattern, view.name)
        self.bound -= view.bound
        self.searches -= view.searches

    def _end(self, view: View) -> None:
        del self[view.name]
        view.removed = True
        self.on_removed(view)

    def _look_up_views(self, stream: NamedStream) -> tuple[frozenset[str], frozenset[str]]:
        found = stream.views
        if found is None or found[0] != self._catalog.routing_version:
            name, routing = stream.name, self._routing.items()
            matched = frozenset(self._patterns.match(name)).union(v for v, view in routing if view.has_all_of(name))
            routed = matched.union(v for v, view in routing if view.may_route(name))
            stream.views = found = (self._catalog.routing_version, matched, routed)
        return found[1], found[2]

    def matched(self, stream: NamedStream) -> frozenset[str]:
        """The views that have all of the stream."""
        return self._look_up_views(stream)[0]

    def of(self, stream: NamedStream) -> frozenset[str]:
        """The views that may have messages of the stream."""
        return self._look_up_views(stream)[1]

    def selects(self, name: str, stream: NamedStream, record: Record) -> bool:
        """Whether a message of a stream that may be in that view is in it."""
        return name in self.matched(stream) or self[name].selects(stream.name, record)
