"""Reading a group's log through a `.cursor`: subscriptions that wait, and stretches of the past that end.

Owns the reading of `format record`, and how a reader goes on behind its last message when the server was away.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

from mqfs.client.large import MultipartAssembler
from mqfs.client.types import File, Link, read_whole
from mqfs.client.waiting import Waiting
from mqfs.client.words import commands, file_name, quote
from mqfs.errors import BadRequest, Disconnected, DiskFailed, FellBehind, Interrupted, NotFound
from mqfs.log import headers, record
from mqfs.model import Kind, Message, Record
from mqfs.syntax.patterns import compile_pattern

log = logging.getLogger("mqfs.client")

Filter: TypeAlias = Callable[[Message], bool]
Filters: TypeAlias = Filter | Sequence[Filter]
Patterns: TypeAlias = str | Sequence[str]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # between two attempts to reach a server that is away
TELL_S = 1.0  # between two reports of lost messages: under a small `depth` each read may lose some
_EVERYTHING = "#"
_PROGRAMS = ("exact:", "prefix:")


class Records:
    """The bytes of `format record` ↔ messages, however they are cut."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._data = b""
        self._at = 0

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next(self) -> Message | None:
        """The next whole message. Raises DiskFailed where the bytes do not pass their check."""
        while (found := self._next()) is not None:
            if found.kind == Kind.NAMES:
                self._learn(found.body)
            elif found.kind == Kind.MESSAGE:
                more = headers.decode(found.headers) if found.headers else {}
                return Message(found.sequence, self._names[found.stream], found.time_ns, found.body, more)
        return None

    def _next(self) -> Record | None:
        at, have = self._at, len(self._data)
        if have - at < record.HEAD_BYTES:
            return None
        size = int.from_bytes(self._data[at : at + 4], "little")
        if have - at < record.padded(size):
            return None
        found = record.decode(self._data[at : at + size])
        if found is None:
            raise DiskFailed("a record came that does not pass its check")
        self._at = at + record.padded(size)
        return found

    def _learn(self, table: bytes) -> None:
        at = 0
        while at < len(table):
            number, end = int.from_bytes(table[at : at + 4], "little"), at + 6
            end += int.from_bytes(table[at + 4 : at + 6], "little")
            self._names[number] = table[at + 6 : end].decode()
            at = end


def all_of(filters: Filters) -> tuple[Filter, ...]:
    return (filters,) if callable(filters) else tuple(filters)


def fell_behind(lost: int, names: Sequence[str]) -> FellBehind:
    """The error that says so. `lost` is the most that it can be, or -1: that is not known."""
    count = f"up to {lost} " if lost > 0 else ""
    of = " ".join(names) or "the group"
    error = FellBehind(f"{count}messages of {of} were lost (a larger 'depth', or 'replay all', keeps more)")
    error.lost = max(lost, 0)
    return error


def names_of(patterns: Patterns) -> tuple[str, ...]:
    """What is to be selected; nothing: everything."""
    names = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for name in names:
        if not wild(name):
            file_name(name)
    return () if _EVERYTHING in names else names


def require_name(name: str) -> None:
    """Of a stream that is not there yet: whether it can be meant. Raises BadRequest."""
    if name.startswith(_PROGRAMS):
        raise BadRequest(f"{name!r} is a routing program (expected a stream, a pattern, or a view that is bound to it)")


def wild(name: str) -> bool:
    return "*" in name or "#" in name


class Backoff:
    """How long to go on trying to reach a server, and the pauses between."""

    def __init__(self, limit: bool | float, closed: threading.Event, where: str) -> None:
        self._limit, self._closed, self._where = limit, closed, where
        self._pause, self._began = FIRST_PAUSE_S, 0.0

    def wait(self, error: Disconnected) -> None:
        """A pause; or raises what went wrong, where it was not to be borne (any longer)."""
        if self._limit is False or self._closed.is_set():
            raise error
        if not self._began:
            self._began = time.monotonic()
            log.warning("%s; trying again", error)
        elif self._limit is not True and time.monotonic() - self._began > self._limit:
            raise error
        self._closed.wait(self._pause)
        if self._closed.is_set():
            raise error
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)


class Subscription(Waiting[Message]):
    """Messages of a group, one by one: an iterator that any number of threads may share.

    After FellBehind or DiskFailed, told once each, it can be asked again and goes on behind what was lost.
    """

    def __init__(
        self,
        link: Link,
        path: str,
        patterns: Patterns,
        *,
        start: str,
        until: str = "",
        filters: Filters = (),
        reconnect: bool | float = False,
        singly: bool = False,
        was_away: bool = False,
    ) -> None:
        """`singly`: parts of bodies are left as they are. `was_away`: the server is another one than that which
        gave what comes before `start`."""
        self._set_up(link, path, patterns, until, filters, reconnect)
        self._singly, self._was_away = singly, was_away
        self._exactly: frozenset[str] = frozenset()  # names that are looked for here, as no stream is called so yet
        self._start = start
        self._gone = 0  # below that sequence what is not given is lost
        self._next: Message | None = None  # read, and to be given when the loss before it was told
        self._file = self._open()

    def _set_up(
        self, link: Link, path: str, patterns: Patterns, until: str, filters: Filters, reconnect: bool | float
    ) -> None:
        """What every way of reading has."""
        Waiting.__init__(self)
        self._link, self._path = link, path
        self._names, self._until = names_of(patterns), until
        self._filters, self._reconnect = all_of(filters), reconnect if link.can_be_lost else False
        self._turn = threading.Lock()  # one thread reads
        self._singly = False
        self._assembly = MultipartAssembler()
        self._lost = 0  # messages, and not told yet
        self._counted = 0  # losses below that sequence were counted
        self.told_at = -TELL_S  # when losses were told last

    # ------------------------------------------------------------ the cursor

    def _open(self) -> File:
        self._records = Records()
        file = self._link.open(f"{self._path}/.cursor", "r+")
        try:
            self._select(file)
            until = (f"until {self._until}",) if self._until else ()
            follows = self._singly or not self._until
            file.write(commands(f"seek {self._start}", *until, "format record", *(["streams"] if follows else [])))
            if follows:
                self._begin(*self._places(file))
        except BaseException:
            file.close()
            raise
        return file

    def _select(self, file: File) -> None:
        """A name without a wildcard may be that of a stream that is not there yet: then all is read, and sifted."""
        self._exactly = frozenset()
        if not self._names:
            return
        try:
            file.write(commands("select " + " ".join(map(quote, self._names))))
        except NotFound:
            if any(map(wild, self._names)):
                raise
            for name in self._names:
                require_name(name)
            file.read(65_536)  # the refusal's text
            self._exactly = frozenset(self._names)

    def _begin(self, next_sequence: int, streams: list[dict[str, int]]) -> None:
        """At that moment it was positioned. So it is known where to go on, and how much was lost, also where that comes
        before the first message."""
        if self._start == "end":
            self._start = str(next_sequence)
        elif self._start == "first":
            self._start = str(min((s["first"] for s in streams if s["first"]), default=next_sequence))
        elif self._start.isdigit():
            gone = max((s["floor"] for s in streams), default=0)
            if self._was_away:
                if b"replay off" in self._ctl_lines():
                    gone = next_sequence  # what came while nobody was there is nowhere to be seen
            elif gone > int(self._start):
                gone = self._really_gone()
            self._gone = max(self._gone, gone)

    def _really_gone(self) -> int:
        """Below that sequence messages were lost. A floor rises above what expired, too, and where nothing was."""
        said = json.loads(read_whole(self._link, f"{self._path}/.stats"))
        lines, streams = self._ctl_lines(), self._meant(said["streams"])
        if b"replay all" in lines:
            return max((s["cut"] for s in streams), default=0)
        before = b"replay last" in lines  # one may be of before the server's start
        return max((s["floor"] for s in streams if s["messages"] < s["written"] + before), default=0)

    def _ctl_lines(self) -> list[bytes]:
        return read_whole(self._link, f"{self._path}/ctl").splitlines()

    def _places(self, file: File) -> tuple[int, list[dict[str, int]]]:
        """The sequence that comes next, and what `.stats` says of each stream that may be meant: number, floor, cut,
        first. From a cursor that was asked for its `streams`."""
        text, interrupted = b"", False
        while not text.endswith(b"\n"):
            try:
                piece = file.read()
            except Interrupted:
                interrupted = True
                continue
            if not piece:
                raise NotFound(f"{self._path} was removed")
            text += piece
        if interrupted:
            file.interrupt()  # it was meant for the read of a message
        said = json.loads(text)
        return said["next"], self._meant(said["streams"])

    def _meant(self, streams: dict[str, dict[str, int]]) -> list[dict[str, int]]:
        """Of the streams those that it is over; all, where a name may be a view's."""
        patterns = [compile_pattern(name) for name in self._names if wild(name)]
        plain = {name for name in self._names if not wild(name)}
        if self._names and plain <= streams.keys():  # none of them is a view
            streams = {n: row for n, row in streams.items() if n in plain or any(match(n) for match in patterns)}
        return list(streams.values())

    def _reopen(self) -> None:
        """A new cursor behind the last message; the server is waited for."""
        patience = Backoff(self._reconnect, self._closed, self._link.where)
        self._was_away = True
        while True:
            try:
                self._file = self._open()
                return
            except Disconnected as error:
                patience.wait(error)

    def _ended(self) -> None:
        """An end of file: what it reads is gone, or the server stops."""
        self._over = True
        if self._reconnect is False or self._until:
            return
        try:
            self._reopen()
            self._over = bool(self._exactly)  # the stream it was over is gone
        except NotFound:
            pass

    # ------------------------------------------------------------ messages

    def get(self, timeout: float | None = None) -> Message:
        """The next message. Raises EOFError at the end, TimeoutError, and what the tree refuses with."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._get(deadline)
            if all(passes(message) for passes in self._filters):
                return message

    def _get(self, deadline: float | None) -> Message:
        with self._turn:
            while True:
                if self._gone or self._lost or self._next is not None:
                    message = self._behind_losses()
                else:
                    message = self._records.next()
                if message is not None:
                    self._start = str(message.sequence + 1)
                    if not self._exactly or message.stream in self._exactly:
                        whole = message if self._singly else self._assembly.take(message)
                        if whole is not None:
                            return whole
                else:
                    self._fill(deadline)

    def _fill(self, deadline: float | None) -> None:
        if self._over or self._closed.is_set():
            raise EOFError
        try:
            data = self._file.read(timeout=self._patience(deadline))
        except FellBehind:
            self._note_gone()
            return
        except TimeoutError:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            self._tell_losses(self._gone)
            return
        except Interrupted as error:
            self._interrupted(error)
            return
        except Disconnected as error:
            self._away(error)
            self._reopen()
            return
        if data:
            self._records.feed(data)
        elif not self._closed.is_set():
            self._tell_losses(min(self._gone, int(self._until) + 1) if self._until.isdigit() else self._gone)
            self._ended()

    # ------------------------------------------------------------ losses

    def _note_gone(self) -> None:
        """It fell behind: up to where that may have been, whatever comes before it."""
        try:
            self._file.write(commands("streams"))
            self._gone = max((row["floor"] for row in self._places(self._file)[1]), default=self._gone)
        except Disconnected as error:
            self._away(error)
            self._reopen()

    def _patience(self, deadline: float | None) -> float | None:
        """For how long to wait for more: a loss is not kept back for longer than the next message may take."""
        if self._gone or self._lost:
            soon = max(self.told_at + TELL_S, time.monotonic() + FIRST_PAUSE_S)
            deadline = soon if deadline is None else min(soon, deadline)
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    def _behind_losses(self) -> Message | None:
        """The next message, where something was lost before it. Raises FellBehind, not too often."""
        message, self._next = self._next or self._records.next(), None
        if message is None:
            return None
        self._count(message.sequence)
        if self._lost and time.monotonic() - self.told_at >= TELL_S:
            self._next = message
            self._tell()
        return message

    def _count(self, sequence: int) -> None:
        """All below that one was given, or is lost where it is below `_gone`."""
        if self._gone:
            if self._start.isdigit():
                first = max(int(self._start), self._counted)
                self._lost = max(self._lost, 0) + max(min(sequence, self._gone) - first, 0)
            else:
                self._lost = self._lost or -1
            self._counted = sequence
            if sequence >= self._gone:
                self._gone = 0

    def _tell_losses(self, end: int) -> None:
        """Where nothing comes behind them. `end`: of what was lost."""
        self._count(end)
        if self._lost:
            self._tell()

    def _tell(self) -> None:
        lost, self._lost, self.told_at = self._lost, 0, time.monotonic()
        raise fell_behind(lost, self._names)

    # ------------------------------------------------------------ ends

    def lost(self, error: Exception) -> bool:
        """Whether nothing comes after that error."""
        return self._over or self._closed.is_set() or not isinstance(error, FellBehind | DiskFailed)

    def close(self) -> None:
        """End it, whoever waits in it."""
        self._closed.set()
        self._file.interrupt()
        with self._turn:
            self._file.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["Backoff", "Filter", "Filters", "Patterns", "Records", "Subscription", "all_of", "names_of"]
