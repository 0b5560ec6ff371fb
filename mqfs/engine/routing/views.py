"""A view: the messages of all streams that a pattern matches or a program selects, to read like a stream.

A view decides which messages are in it; the registry knows the views of each stream, with compiled patterns. Open views
are in files/readers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mqfs import errors, limits
from mqfs.engine.language import programs
from mqfs.engine.language.permissions import Numbered
from mqfs.engine.language.programs import Program
from mqfs.model import Record
from mqfs.quotas import UserLimits
from mqfs.state.group import Attributes, ViewState
from mqfs.syntax.patterns import Patterns
from mqfs.syntax.quoting import quote

if TYPE_CHECKING:
    from mqfs.engine.group import Group

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
        most = self.group.views.search_bytes
        return any(p.selects(name, record.body, record.sequence, most) for p in self.programs)


class NamedStream(Protocol):
    """A stream, or in mqfs/fq a name that none has yet: with the views that it was found to be in, and the routing
    version of then."""

    number: int
    views: tuple[int, frozenset[str], frozenset[str]] | None

    @property
    def name(self) -> str: ...


# ------------------------------------------------------------ view registry


class ViewRegistry(dict[str, View]):
    """The views of a group, by name. A stream is matched once: when it is new, or the patterns have changed."""

    on_refreshed: Callable[..., None]
    on_removed: Callable[[View], None]

    def __init__(self, catalog: Group) -> None:
        super().__init__()
        self._catalog = catalog
        self.bound = 0  # patterns and programs of all of them
        self.searches = 0  # of these programs
        self.selecting = UserLimits("searches of messages", "PROGRAM_SEARCHES")  # by programs of open files
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

    @property
    def search_bytes(self) -> int:
        """The bytes of a message that each of their searches sees."""
        return limits.PROGRAM_SEARCH_BYTES // max(1, self.searches)

    def selecting_bytes(self, uid: int) -> int:
        """The same for searches of the programs of a user's open files: what each may see in any case, and an equal
        share of a user of what that leaves. So many searches of one user take little from others."""
        selecting, least = self.selecting, limits.PROGRAM_SEARCH_BYTES // limits.PROGRAM_SEARCHES
        left = limits.PROGRAM_SEARCH_BYTES - selecting.used * least
        return least + left // max(1, selecting.users * selecting.of(uid))

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
        self.on_refreshed(*names)

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
