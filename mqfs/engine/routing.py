"""Selection of messages of a group: all messages, or those of named streams, views and patterns.

A filter finds the next selected message in the log. It does not check permissions, positions or retention.

A view shows the messages of all streams that a pattern matches or a program selects, to read like a stream. View
decides which messages it shows; the registry finds the views of each stream by compiled patterns. Open views are in
files/readers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mqfs import errors, limits
from mqfs.engine.language import programs
from mqfs.engine.language.permissions import Numbered, R, require
from mqfs.engine.language.programs import Program
from mqfs.engine.language.settings import in_line
from mqfs.model import NEVER, Record, User
from mqfs.quotas import UserLimits
from mqfs.state.group import Attributes, ViewState
from mqfs.syntax.lines import quote, split
from mqfs.syntax.patterns import Patterns, check_pattern, has_wildcard

if TYPE_CHECKING:
    from mqfs.engine.group import Group

T = TypeVar("T")

log = logging.getLogger("mqfs.engine")


class View(Numbered):
    """A file of a group that merges streams. Its group binds and unbinds it."""

    def __init__(self, group: Group, own: ViewState) -> None:
        self.group, self.state = group, own
        self.removed = False
        self.readers: set[Any] = set()  # open files of the view
        self.programs: list[Program] = []
        self.patterns: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """Parse the patterns and programs of the state, after a change."""
        known = {program.text: program for program in self.programs}
        texts = [text for text in self.state.patterns if programs.is_program(text)]
        self.programs = [program for text in texts if (program := known.get(text) or self._parse(text))]
        self.patterns = [text for text in self.state.patterns if not programs.is_program(text)]
        self.bound = len(self.state.patterns)
        self.searches = sum(program.searches for program in self.programs)

    def lines(self) -> list[str]:
        """Return the view as ctl lines."""
        return [f"bind {quote(self.name)} {quote(text)}" for text in self.state.patterns]

    def _parse(self, text: str) -> Program | None:
        """Parse a program. None if one of its functions is no longer installed: it selects nothing, and the start
        continues."""
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
        """Whether a program of the view may select messages of a stream of that name."""
        return any(p.may_route(name) for p in self.programs)

    def has_all_of(self, name: str) -> bool:
        """Whether a program of the view selects all messages of a stream of that name."""
        return any(p.by_name and p.may_route(name) for p in self.programs)

    def selects(self, name: str, record: Record) -> bool:
        """Whether a program of the view selects that message of a stream of that name."""
        most = self.group.views.search_bytes
        return any(p.selects(name, record.body, record.sequence, most) for p in self.programs)


class NamedStream(Protocol):
    """A stream, or in mqfs/fq a name without a stream yet. `views` caches the routing version at the last look-up, the
    views with all of the stream's messages, and those that may have some."""

    number: int
    views: tuple[int, frozenset[str], frozenset[str]] | None

    @property
    def name(self) -> str: ...


# ------------------------------------------------------------ view registry


class ViewRegistry(dict[str, View]):
    """The views of a group, by name. A stream is matched against the patterns once, until they change."""

    on_refreshed: Callable[..., None]
    on_removed: Callable[[View], None]

    def __init__(self, catalog: Group) -> None:
        super().__init__()
        self._catalog = catalog
        self.bound = 0  # patterns and programs of all views
        self.searches = 0  # calls in these programs that search a body
        self.selecting = UserLimits("searches of messages", "PROGRAM_SEARCHES")  # by programs of open files
        self._patterns: Patterns[str] = Patterns(catalog.log.settings.words)
        self._routing: dict[str, View] = {}  # views with programs

    def load(self) -> None:
        """Make the views of the group's state."""
        for own in self._catalog.log.state.views.values():
            self._enter(View(self._catalog, own))

    def _enter(self, view: View) -> None:
        self[view.name] = view
        self.bound += view.bound
        self.searches += view.searches
        for pattern in view.patterns:
            self._patterns.add(pattern, view.name)
        if view.programs:
            self._routing[view.name] = view

    @property
    def search_bytes(self) -> int:
        """The bytes of a message that each search of a view's program sees."""
        return limits.PROGRAM_SEARCH_BYTES // max(1, self.searches)

    def selecting_bytes(self, uid: int) -> int:
        """Return the bytes of a message that each search by the programs of a user's open files sees.

        Each search has a guaranteed minimum. The remaining bytes are shared equally by users, then by the searches of
        the user, so a user with many searches takes little from others.
        """
        selecting, least = self.selecting, limits.PROGRAM_SEARCH_BYTES // limits.PROGRAM_SEARCHES
        left = limits.PROGRAM_SEARCH_BYTES - selecting.used * least
        return least + left // max(1, selecting.users * selecting.of(uid))

    def unbind(self, name: str) -> None:
        """Remove a view with all its patterns and programs."""
        self._catalog.log.change({"do": "unbind", "name": name, "pattern": None})
        self.refresh(name)

    def refresh(self, *names: str) -> None:
        """Bring these views, by name, in line with the state after a change: make, update or remove them."""
        views = [(name, self.get(name)) for name in names]
        for _, view in views:
            if view is not None:
                self._leave(view)
        if not len(self._patterns):
            self._patterns = Patterns(self._catalog.log.settings.words)  # they change only without bound patterns
        for name, view in views:
            self._refresh(name, view)
        self._catalog.routing_version += 1  # streams may have been looked up after the change of the state
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
        """Take the patterns and programs of a view out of the indexes."""
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
        """Return the names of the views that have all messages of the stream."""
        return self._look_up_views(stream)[0]

    def of(self, stream: NamedStream) -> frozenset[str]:
        """Return the names of the views that may have messages of the stream."""
        return self._look_up_views(stream)[1]

    def selects(self, name: str, stream: NamedStream, record: Record) -> bool:
        """Whether a message is in the view `name`, one of the views `of` its stream."""
        return name in self.matched(stream) or self[name].selects(stream.name, record)


# ------------------------------------------------------------ filters


FEW = 16  # up to as many streams, the postings of each are searched; with more, the log is scanned
_LOOKED_THROUGH = 1_024  # up to as many streams of a group are matched one by one, as only few may match
_NONE, _SOME, _ALL = range(3)  # which messages of a stream a filter covers; some: a program selects them


class MessageFilter:
    """A selection of the messages of a group. `numbers`: of streams. `names`: of views, and patterns. `program`: of an
    open file, by which its user `uid` selects. All None: every message."""

    __slots__ = (
        "_covered", "_epoch", "_few", "_is_wild", "_named", "_patterns", "_program", "_shape",
        "_uid", "group", "names", "numbers",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        numbers: Collection[int] | None = None,
        names: Collection[str] | None = None,
        program: Program | None = None,
        uid: int = 0,
    ) -> None:
        self.group, self.numbers, self.names = group, numbers, names or ()
        self._program, self._uid = program, uid
        self._epoch = self._shape = -1
        self._covered: dict[int, int] = {}
        self._few: tuple[int, ...] | None = None
        self._named = frozenset(self.names)
        self._is_wild = False  # whether a name is a pattern with wildcards
        self._patterns: Patterns[bool] = Patterns(group.log.settings.words)
        for name in self.names:
            if name not in group.views:
                self._patterns.add(name, True)
                self._is_wild = self._is_wild or has_wildcard(name, group.log.settings.words)

    @property
    def searches(self) -> int:
        """The number of calls in the filter's own program that search a body."""
        return self._program.searches if self._program is not None else 0

    def follow(self, before: MessageFilter) -> None:
        """Replace the filter `before` of an open file by this one, and charge its searches to the user."""
        before.end()
        if self.searches:
            self.group.views.selecting.release(self._uid, -self.searches)

    def end(self) -> None:
        """Release the searches of the filter: its open file no longer uses it."""
        if self.searches:
            self.group.views.selecting.release(self._uid, self.searches)

    @property
    def everything(self) -> bool:
        return self.numbers is None and not self.names and self._program is None

    def candidates(self) -> Iterable[NamedStream]:
        """Return streams that include all that the filter covers."""
        listed = self._listed()
        return self.group.numbers.values() if listed is None else listed

    def _listed(self) -> Sequence[NamedStream] | None:
        """Return the streams of a filter that consists of numbers and plain names, some perhaps twice. None: the filter
        has wildcards or programs, or covers everything."""
        if self.everything or self._program is not None or self._is_wild:
            return None
        group, names = self.group, list(self.names)
        for view in [group.views[name] for name in self.names if name in group.views]:
            if view.programs or any(has_wildcard(text, group.log.settings.words) for text in view.patterns):
                return None
            names += view.patterns
        known, by_name = group.numbers, group.streams
        found = [known[number] for number in self.numbers or () if number in known]
        return found + [by_name[name] for name in names if name in by_name]

    def covers(self, stream: NamedStream) -> bool:
        """Whether the filter may select messages of the stream."""
        if self.numbers is None and not self.names and self._program is None:
            return True
        if self._shape == self.group.routing_version and (part := self._covered.get(stream.number)) is not None:
            return part != _NONE
        return self._part(stream) != _NONE

    def _part(self, stream: NamedStream) -> int:
        """Return which messages of the stream are covered: _NONE, _SOME or _ALL. Cached until the routing changes."""
        if self._shape != self.group.routing_version:
            self._shape = self.group.routing_version
            self._covered.clear()
        found = self._covered.get(stream.number)
        if found is None:
            found = self._covered[stream.number] = self._look_up(stream)
        return found

    def _look_up(self, stream: NamedStream) -> int:
        if self._program is not None:
            part = _ALL if self._program.by_name else _SOME
            return part if self._program.may_route(stream.name) else _NONE
        if self.numbers is not None and stream.number in self.numbers:
            return _ALL
        views = self.group.views
        matched = len(self._patterns) and self._patterns.match(stream.name)
        if matched or not self._named.isdisjoint(views.matched(stream)):
            return _ALL
        return _NONE if self._named.isdisjoint(views.of(stream)) else _SOME

    def selects(self, stream: NamedStream, record: Record) -> bool:
        """Whether the filter selects that message of the stream."""
        part = _ALL if self.everything else self._part(stream)
        if part != _SOME:
            return part == _ALL
        if self._program is not None:
            most = self.group.views.selecting_bytes(self._uid)
            return self._program.selects(stream.name, record.body, record.sequence, most)
        views = self.group.views
        return any(views.selects(name, stream, record) for name in self._named.intersection(views.of(stream)))

    def has_all_of(self, stream: NamedStream) -> bool:
        """Whether the filter selects all messages of the stream."""
        return self.everything or self._part(stream) == _ALL

    @property
    def by_stream(self) -> bool:
        """Whether the filter selects all messages or none of each stream."""
        views = self.group.views
        programs = [self._program] if self._program is not None else []
        programs += [program for name in self.names if name in views for program in views[name].programs]
        return all(program.by_name for program in programs)

    def is_sparse(self) -> tuple[int, ...] | None:
        """Return the numbers of the covered streams if they are at most FEW, else None."""
        if self._epoch != self.group.catalog_version:
            self._look_again()
        return self._few

    def _look_again(self) -> None:
        """Recompute `_few`: names or views of the group have changed."""
        self._epoch = self.group.catalog_version
        numbers, listed = self.group.numbers, self._listed()
        if listed is None and len(numbers) > (FEW if self.everything else _LOOKED_THROUGH):
            self._few = None
            return
        some = numbers.values() if listed is None else listed
        mine = tuple({stream.number: None for stream in some if self.covers(stream)})
        self._few = mine if len(mine) <= FEW else None

    def find(self, position: int, most: int = NEVER) -> Record | None:
        """Return the first message of a covered stream at or after the sequence `position`, or None at the end. With
        many streams at most `most` messages are examined: if none is of a covered stream, the last is returned. Raises
        Damaged."""
        bucket, few = self.group.log.bucket, self.is_sparse()
        if few is not None:
            if len(few) == 1:
                return bucket.reader.find(few[0], position)
            first: tuple[int, int] | None = None
            for number in few:
                found = bucket.reader.locate(number, position)
                if found is not None and (first is None or found[0] < first[0]):
                    first = (found[0], number)
            return bucket.reader.find(first[1], first[0]) if first else None
        while True:
            record = bucket.reader.scan(position)
            if record is None:
                return None
            stream = self.group.numbers.get(record.stream)
            most -= 1
            if not most or (stream is not None and self.covers(stream)):
                return record
            position = record.sequence + 1

    def before(self, position: int) -> int | None:
        """Return the sequence of the last message below `position` that the filter may select, or None."""
        bucket, few = self.group.log.bucket, self.is_sparse()
        if few is None:
            return bucket.reader.before(position)
        return max((s for number in few if (s := bucket.reader.before(position, number)) is not None), default=None)

    @property
    def over(self) -> bool:
        """Whether all streams of the filter were removed, and it has no names."""
        return not self.names and self.numbers is not None and not any(n in self.group.numbers for n in self.numbers)


def _split_select(line: str) -> list[str]:
    """Split a line into words; after `select program` the rest of the line is one word. Raises BadCommand."""
    found = programs.at_end(line) if line.split(None, 1)[:1] == ["select"] else None
    return ["select", *found] if found is not None and found[0] == "program" else split(line)


def commands_of(text: str, parse: Callable[[str, list[str]], T]) -> list[T]:
    """Return the result of `parse(verb, words)` for each command line. Raises BadCommand, which names the line, and
    what `parse` raises."""
    found: list[T] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if words := _split_select(line):
                found.append(parse(words[0], words[1:]))
        except errors.BadCommand as error:
            raise in_line(error, line, number, text) from None
    return found


def cover(group: Group, words: Sequence[str]) -> MessageFilter:
    """Make the filter of `cover NAME...`: existing and future streams, and patterns. Raises BadCommand."""
    for word in words:
        check_pattern(word, group.log.settings.words)
    return MessageFilter(group, None, words)


def select(before: MessageFilter, words: Sequence[str], user: User) -> MessageFilter:
    """Make the filter of `select NAME...`: streams, views and patterns, or `program` and a program; without names,
    everything.

    `before`: the present filter of the same open file. Raises NotFound, BadCommand, OverLimit, Denied.
    """
    group = before.group
    if len(words) == 2 and words[0] == "program" and programs.is_program(words[1]):
        program = programs.parse(words[1])
        if (more := program.searches - before.searches) > 0:
            group.views.selecting.check(user.uid, more)
        return MessageFilter(group, program=program, uid=user.uid)
    numbers: list[int] = []
    names: list[str] = []
    for word in words:
        stream = group.streams.get(word)
        if stream is not None:
            require(user, stream.state, R, word)
            numbers.append(stream.number)
        elif word in group.views:
            names.append(word)
        elif has_wildcard(word, group.log.settings.words):
            check_pattern(word, group.log.settings.words)
            names.append(word)
        else:
            raise errors.NotFound(f"no stream or view {word!r} in group {group.name!r}")
    return MessageFilter(group, dict.fromkeys(numbers) if words else None, names)
