"""Which messages of a group something is over: all, or those of streams, views and patterns that names say.

A filter finds the next such message in the log. It knows nothing of permissions, positions or what is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.engine.language import programs
from mqfs.engine.language.permissions import R, require
from mqfs.engine.language.programs import Program
from mqfs.engine.routing.views import NamedStream
from mqfs.model import NEVER, Record, User
from mqfs.syntax.patterns import Patterns, check_pattern, has_wildcard
from mqfs.syntax.quoting import split

if TYPE_CHECKING:
    from mqfs.engine.group import Group

FEW = 16  # streams: up to here each one's postings are searched, above it the log is walked
_LOOKED_THROUGH = 1_024  # streams of a group that are tried one by one against a pattern, in the hope of few
_NONE, _SOME, _ALL = range(3)  # of the messages of a stream that it covers; some: a program says which


class MessageFilter:
    """`numbers`: of streams. `names`: of views, and patterns. All None: everything. `program`: of an open file, by
    which its user `uid` selects."""

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
        self._is_wild = False  # a name is a pattern for others
        self._patterns: Patterns[bool] = Patterns(group.log.settings.words)
        for name in self.names:
            if name not in group.views:
                self._patterns.add(name, True)
                self._is_wild = self._is_wild or has_wildcard(name, group.log.settings.words)

    @property
    def searches(self) -> int:
        """Calls of its own program that look through a whole body."""
        return self._program.searches if self._program is not None else 0

    def follow(self, before: MessageFilter) -> None:
        """An open file selects by this one from now on."""
        before.end()
        if self.searches:
            self.group.views.selecting.release(self._uid, -self.searches)

    def end(self) -> None:
        """No open file selects by it any more."""
        if self.searches:
            self.group.views.selecting.release(self._uid, self.searches)

    @property
    def everything(self) -> bool:
        return self.numbers is None and not self.names and self._program is None

    def candidates(self) -> Iterable[NamedStream]:
        """All streams that it may cover."""
        listed = self._listed()
        return self.group.numbers.values() if listed is None else listed

    def _listed(self) -> Sequence[NamedStream] | None:
        """The same where it is made of numbers and names, some twice. None: patterns or programs say more."""
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
        """Whether messages of the stream may belong to it."""
        if self.numbers is None and not self.names and self._program is None:
            return True
        if self._shape == self.group.routing_version and (part := self._covered.get(stream.number)) is not None:
            return part != _NONE
        return self._part(stream) != _NONE

    def _part(self, stream: NamedStream) -> int:
        """Which of its messages; looked up once for each stream, until what views have changes."""
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
        """Whether that message belongs to it."""
        part = _ALL if self.everything else self._part(stream)
        if part != _SOME:
            return part == _ALL
        if self._program is not None:
            most = self.group.views.selecting_bytes(self._uid)
            return self._program.selects(stream.name, record.body, record.sequence, most)
        views = self.group.views
        return any(views.selects(name, stream, record) for name in self._named.intersection(views.of(stream)))

    def has_all_of(self, stream: NamedStream) -> bool:
        """Whether all messages of the stream belong to it."""
        return self.everything or self._part(stream) == _ALL

    @property
    def by_stream(self) -> bool:
        """Whether of each stream all messages belong to it, or none."""
        views = self.group.views
        programs = [self._program] if self._program is not None else []
        programs += [program for name in self.names if name in views for program in views[name].programs]
        return all(program.by_name for program in programs)

    def is_sparse(self) -> tuple[int, ...] | None:
        """The streams' numbers, where they are few."""
        if self._epoch != self.group.catalog_version:
            self._look_again()
        return self._few

    def _look_again(self) -> None:
        """Names or views of the group have changed."""
        self._epoch = self.group.catalog_version
        numbers, listed = self.group.numbers, self._listed()
        if listed is None and len(numbers) > (FEW if self.everything else _LOOKED_THROUGH):
            self._few = None
            return
        some = numbers.values() if listed is None else listed
        mine = tuple({stream.number: None for stream in some if self.covers(stream)})
        self._few = mine if len(mine) <= FEW else None

    def find(self, position: int, most: int = NEVER) -> Record | None:
        """The first message of a stream that it covers, at or after that sequence. Where it covers many streams, `most`
        messages are looked at: if none of them is one, the last is returned. Raises Damaged."""
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
        """The sequence of the last message below that one which may belong to it."""
        bucket, few = self.group.log.bucket, self.is_sparse()
        if few is None:
            return bucket.reader.before(position)
        return max((s for number in few if (s := bucket.reader.before(position, number)) is not None), default=None)

    @property
    def over(self) -> bool:
        """Every stream it named was removed, and it names nothing else."""
        return not self.names and self.numbers is not None and not any(n in self.group.numbers for n in self.numbers)


def split_select(line: str) -> list[str]:
    """The words of a line; after `select program` a program is the rest of it, as it stands. Raises BadCommand."""
    found = programs.at_end(line) if line.split(None, 1)[:1] == ["select"] else None
    return ["select", *found] if found is not None and found[0] == "program" else split(line)


def cover(group: Group, words: Sequence[str]) -> MessageFilter:
    """What `cover NAME...` says: streams that are there or will be, and patterns. Raises BadCommand."""
    for word in words:
        check_pattern(word, group.log.settings.words)
    return MessageFilter(group, None, words)


def select(before: MessageFilter, words: Sequence[str], user: User) -> MessageFilter:
    """What `select NAME...` says: streams, views, patterns, or `program` and one; no names: everything.

    `before`: what the same open file of that user selects until then. Raises NotFound, BadCommand, OverLimit, Denied.
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
