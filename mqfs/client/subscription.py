"""Subscriptions that read a group's log through a `.cursor`: from now on, or a part of the past.

A subscription keeps its position across a lost connection and a restart of the server, and counts lost messages.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from mqfs import limits
from mqfs.client.large import MultipartAssembler
from mqfs.client.message import Message, RecordDecoder
from mqfs.client.types import READ_BYTES, File, Filter, Filters, Link, Patterns, Subscription, parse_answer, read_whole
from mqfs.client.waiting import FIRST_PAUSE_S, Ready, Waiting
from mqfs.errors import BadRequest, Disconnected, DiskFailed, DiskFull, FellBehind, Interrupted, NotFound
from mqfs.records import headers
from mqfs.syntax.lines import command_lines, quote_word
from mqfs.syntax.names import check_file_name
from mqfs.syntax.patterns import DOTTED, Words, compile_selection, has_wildcard

REPORT_S = 0.05  # the timeout of a `get` that reports lost messages without a later message
LOSS_REPORT_S = 1.0  # between two reports of lost messages: under a small `depth` each read may lose some
_EVERYTHING = "#"
_PROGRAMS = ("exact:", "prefix:")


def all_of(filters: Filters) -> Sequence[Filter]:
    """Return filters as a sequence. A list is not copied: it may be changed while messages are read."""
    return (filters,) if callable(filters) else filters


def fell_behind(lost: int, names: Sequence[str]) -> FellBehind:
    """Return the error that reports a loss. `lost`: an upper bound of the messages; -1: unknown."""
    count = f"up to {lost} " if lost > 0 else ""
    of = " ".join(names) or "the group"
    error = FellBehind(f"{count}messages of {of} were lost (expected a larger 'depth' or 'replay all')")
    error.lost = max(lost, 0)
    return error


def names_of(patterns: Patterns) -> tuple[str, ...]:
    """Return the arguments of `select`; none for everything. Raises BadName."""
    names = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for name in names:
        if not has_wildcard(name):
            check_file_name(name)
    return () if _EVERYTHING in names else names


def require_patterns(patterns: Patterns) -> tuple[str, ...]:
    """Return the names that a caller gives. Raises TypeError, and BadRequest for an empty list, which could mean
    nothing or everything."""
    names = (patterns,) if isinstance(patterns, str | bytes) else tuple(patterns)
    if not names:
        raise BadRequest("no pattern (expected '#' for everything)")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"invalid pattern {name!r} (expected str)")
    return names


def require_name(name: str) -> None:
    """Raise BadRequest for a name that no future stream can have."""
    if name.startswith(_PROGRAMS):
        raise BadRequest(f"{name!r} is a routing program (expected program=..., a stream, a pattern or a view)")


class _LostCursor:
    """The file of a subscription that could not be opened: its server is disconnected."""

    def __init__(self, error: Disconnected) -> None:
        self._error = error

    def receive(self, *_: object, **__: object) -> bytes:
        raise self._error

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class CursorSubscription(Ready, Waiting[Message], Subscription):
    """See `Subscription`."""

    _read_bytes = READ_BYTES

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
        program: str = "",
        covers: bool = False,
        is_past: bool = False,
        is_patient: bool = False,
    ) -> None:
        """`start`, `until`: arguments of `seek` and `until`. `singly`: parts of bodies are messages of their own.
        `was_away`: the server was restarted since the messages before `start` were read. `program`: a routing program
        instead of patterns. `covers`: the names are patterns, and streams that need not exist yet; none is a view.
        `is_past`: do not wait for messages up to `until`. `is_patient`: if the server is disconnected, the first `get`
        waits for it, as later ones do, instead of this raising Disconnected."""
        if program and names_of(patterns):
            raise BadRequest("subscribe failed: pattern and program given (expected one)")
        self._set_up(link, path, patterns, until, filters, reconnect)
        self._program, self._covers, self._is_past = program, covers, is_past
        self._singly, self._was_away = singly, was_away
        self._start = start
        self._received_to = 0  # the sequence after the last received message; 0: none was received
        try:
            self._file = self._open()
        except Disconnected as error:
            if not (is_patient and self._reconnect):
                raise
            self._file = cast(File, _LostCursor(error))

    def _set_up(
        self, link: Link, path: str, patterns: Patterns, until: str, filters: Filters, reconnect: bool | float
    ) -> None:
        """Set the state that a subscription in a ring has, too."""
        Waiting.__init__(self)
        self._link, self._path = link, path
        self._names, self._until = names_of(patterns), until
        self._filters, self._reconnect = all_of(filters), reconnect if link.can_be_lost else False
        self._program = ""
        self._words = DOTTED  # of the group's patterns, by its last answer
        self._turn = threading.Lock()  # held by the thread that reads
        self._singly = False
        self._exactly: frozenset[str] = frozenset()  # names selected here, as the cursor knows no such stream yet
        self._ready: deque[Message] = deque()  # received, not returned yet
        self._pop = None  # returns the next of `_ready`, if none is a part or filtered and no loss is before them
        self._lost_below = 0  # unread messages below this sequence are lost
        self._assembly = MultipartAssembler()
        self._losses = 0  # lost messages that are not reported yet
        self._counted_below = 0  # losses below this sequence are counted
        self.reported_at = -LOSS_REPORT_S

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "ended" if self._at_end else "open"
        of = self._program or " ".join(self._names) or _EVERYTHING
        return f"<mqfs subscription to {of!r} in group {self._path or '/'!r} at {self._link.label}, {state}>"

    # ------------------------------------------------------------ the cursor

    def _open(self) -> File:
        self._decoder = RecordDecoder()
        file = self._link.open(f"{self._path}/.cursor", "r+")
        try:
            self._select(file)
            until = (f"until {self._end(file)}",) if self._until else ()
            follows = self._singly or not self._until
            file.write(command_lines(f"seek {self._start}", *until, "format record", *(["streams"] if follows else [])))
            if follows:
                self._begin(*self._places(file))
        except BaseException:
            file.close()
            raise
        return file

    def _end(self, file: File) -> str:
        """Return the argument of `until`; with `is_past` at most the present end of the log."""
        if not self._is_past or not self._until.isdigit():
            return self._until
        file.write(command_lines("selected"))
        return str(min(int(self._until), self._answer(file)["next"] - 1))

    def _select(self, file: File) -> None:
        """Select the names; if one without a wildcard is not found, select everything and filter here. Raises
        NotFound, BadRequest."""
        self._exactly = frozenset()
        if self._program:
            file.write(command_lines(f"select program {quote_word(self._program)}"))
        if self._covers:
            file.write(self._cover_command())
        if self._covers or not self._names:
            return
        try:
            file.write(command_lines("select " + " ".join(map(quote_word, self._names))))
        except NotFound:
            file.receive(65_536)  # the error text
            file.write(command_lines("streams"))
            self._places(file)
            if any(has_wildcard(name, self._words) for name in self._names):
                raise
            for name in self._names:
                require_name(name)
            self._exactly = frozenset(self._names)

    def _cover_command(self) -> bytes:
        return command_lines(" ".join(["cover", *map(quote_word, self._names)]))

    def cover(self, names: Sequence[str]) -> None:
        """Replace the names of a subscription that `covers`; none: everything."""
        self._names = tuple(names)
        with suppress(Disconnected):  # the next cursor is opened with them
            self._file.write(self._cover_command())

    def _begin(self, next_sequence: int, streams: list[dict[str, int]]) -> None:
        """Record the position of a new cursor, to reopen one there, and the losses before its first message."""
        if self._start == "end":
            self._start = str(next_sequence)
        elif self._start == "first":
            self._start = str(min((s["first"] for s in streams if s["first"]), default=next_sequence))
        elif self._start.isdigit():
            gone = max((s["floor"] for s in streams), default=0)
            if self._was_away:
                if b"replay off" in self._ctl_lines():
                    gone = next_sequence  # the messages written meanwhile are unknown
            elif gone > int(self._start):
                gone = self._trimmed_below()
            self._lost_below = max(self._lost_below, gone)

    def _trimmed_below(self) -> int:
        """Return the sequence below which messages were lost. The floors of streams do not tell: they also pass expired
        messages and gaps."""
        stats = json.loads(read_whole(self._link, f"{self._path}/.stats"))
        lines, streams = self._ctl_lines(), self._selected(stats["streams"])
        if b"replay all" in lines or b"replay key" in lines:  # a message replaced by a newer one is not a loss
            return max((s["cut"] for s in streams), default=0)
        before = b"replay last" in lines  # the newest message may be older than the server's counts
        return max((s["floor"] for s in streams if s["messages"] < s["written"] + before), default=0)

    def _ctl_lines(self) -> list[bytes]:
        return read_whole(self._link, f"{self._path}/ctl").split(b"\n")

    def _places(self, file: File) -> tuple[int, list[dict[str, int]]]:
        """Return the next sequence, and the rows of the selected streams: number, floor, cut, first. Called after the
        command `streams` was written to the cursor."""
        answer = self._answer(file)
        self._words = Words(*answer.get("words", DOTTED))
        return answer["next"], self._selected(answer["streams"])

    def _answer(self, file: File) -> dict[str, Any]:
        """Return the answer of a cursor to a command. Raises NotFound if the group was removed."""
        text, interrupted = b"", False
        while not text.endswith(b"\n"):
            try:
                piece = file.receive()
            except Interrupted:
                interrupted = True
                continue
            if not piece:
                raise NotFound(f"no group {self._path!r}: removed while it was read")
            text += piece
        if interrupted:
            file.interrupt()  # for the next read of a message
        return parse_answer(text)

    def _selected(self, streams: dict[str, dict[str, int]]) -> list[dict[str, int]]:
        """Return the rows of the selected streams; of all, if a name may be a view's."""
        selects = compile_selection(self._names, self._words)
        if all(has_wildcard(name, self._words) or name in streams for name in self._names):  # no name is a view's
            streams = {name: row for name, row in streams.items() if selects(name)}
        return list(streams.values())

    def _reopen(self, deadline: float | None) -> None:
        """Open a new cursor after the last message, once the server is connected again."""
        self._was_away = True
        self._file = self._retry(self._open, deadline)
        if self._interrupt_requested:  # requested meanwhile
            self._file.interrupt()

    def _on_end_of_file(self, deadline: float | None) -> None:
        """Handle an end of file: the subscription ends, its streams were removed, or the server stops."""
        if self._reconnect is False or self._until:
            self._at_end = True
            return
        try:
            self._reopen(deadline)
            self._at_end = bool(self._exactly)  # its only stream was removed
        except NotFound:
            self._at_end = True

    # ------------------------------------------------------------ messages

    def _has_next(self) -> bool:
        return bool(self._ready) and not (self._lost_below or self._losses or self._closed.is_set())

    def _when_ready(self, call: Callable[[], None]) -> tuple[float, float] | None:
        away = None
        if self._ready:
            call()
        else:
            away = super()._when_ready(call)
        if away or not (self._lost_below or self._losses):
            return away
        after_s = max(self.reported_at + LOSS_REPORT_S - time.monotonic(), FIRST_PAUSE_S)  # even without a message
        return after_s, REPORT_S

    def _next_item(self, deadline: float | None) -> Message:
        while True:
            message = self._get(deadline)
            if not self._filters or all(passes(message) for passes in self._filters):
                return message

    _wait_next = Waiting.__next__

    def _get(self, deadline: float | None) -> Message:
        self._acquire_turn(deadline)
        try:
            while True:
                message = self._take(deadline)
                if not self._exactly or message.stream in self._exactly:
                    whole = message if self._singly else self._assembly.add_part(message)
                    if whole is not None:
                        return whole
        finally:
            self._turn.release()

    def _take(self, deadline: float | None) -> Message:
        """Return the next received message, after receiving some if there is none. Raises the errors of `get`."""
        while not self._ready:
            self._fill(deadline)
        if self._lost_below or self._losses:
            self._count_before(self._sequence_of(self._ready[0]))
        return self._ready.popleft()

    @staticmethod
    def _sequence_of(message: Message) -> int:
        return message.sequence

    def _fill(self, deadline: float | None) -> None:
        """Wait for messages and receive them. A call may return without any; callers repeat it until a message is
        ready. Raises the errors of `get`."""
        if self._at_end or self._closed.is_set():
            raise EOFError
        if self._received_to:
            self._start = str(self._received_to)
        try:
            count = limits.MESSAGE_BYTES if self._decoder.has_part else self._read_bytes
            data = self._file.receive(count, timeout=self._wait_s(deadline))
        except FellBehind:
            self._fall_behind(deadline)
            return
        except TimeoutError:
            now, is_lost = time.monotonic(), bool(self._lost_below or self._losses)
            is_due = is_lost and now >= self.reported_at + LOSS_REPORT_S  # also in a `get` that waits less than that
            if not is_due and deadline is not None and now >= deadline:
                raise
            self._report_losses(self._lost_below)
            return
        except Interrupted as error:
            self._interrupted(error)
            return
        except Disconnected as error:
            self._require_reconnect(error)
            self._reopen(deadline)
            return
        if data:
            self._receive(self._decoder.feed(data), self._decoder.has_headers)
        elif not self._closed.is_set():
            end = int(self._until) + 1 if self._until.isdigit() else self._lost_below
            self._report_losses(min(self._lost_below, end))
            self._on_end_of_file(deadline)

    def _receive(self, messages: list[Message], has_headers: bool) -> None:
        """Add received messages to `_ready`. `has_headers`: some of them may have headers."""
        if messages:
            is_plain = not (self._lost_below or self._losses or self._exactly) and (
                self._singly or not has_headers or not any(headers.PART in message.headers for message in messages)
            )
            self._pop = self._ready.popleft if is_plain and self._filters == () else None
            self._ready.extend(messages)
            self._received_to = messages[-1].sequence + 1

    # ------------------------------------------------------------ losses

    def _fall_behind(self, deadline: float | None) -> None:
        """Prepare the report of a loss after FellBehind: unread messages below the present floors are lost."""
        try:
            self._file.write(command_lines("streams"))
            self._lost_below = max((row["floor"] for row in self._places(self._file)[1]), default=self._lost_below)
        except Disconnected as error:
            self._require_reconnect(error)
            self._reopen(deadline)

    def _wait_s(self, deadline: float | None) -> float | None:
        """Return how many seconds to wait for a message, None: without limit. A loss is reported soon even if no
        message follows."""
        if self._lost_below or self._losses:
            soon = max(self.reported_at + LOSS_REPORT_S, time.monotonic() + FIRST_PAUSE_S)
            deadline = soon if deadline is None else min(soon, deadline)
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    def _count_before(self, sequence: int) -> None:
        """Count the losses before the message of a sequence. Raises FellBehind, at most every LOSS_REPORT_S."""
        self._count(sequence)
        self._start = str(sequence + 1)
        if self._losses and time.monotonic() - self.reported_at >= LOSS_REPORT_S:
            self._report()

    def _count(self, sequence: int) -> None:
        """Count as lost the messages below `sequence` and `_lost_below` that were not read."""
        if self._lost_below:
            if self._start.isdigit():
                first = max(int(self._start), self._counted_below)
                self._losses = max(self._losses, 0) + max(min(sequence, self._lost_below) - first, 0)
            else:
                self._losses = self._losses or -1
            self._counted_below = sequence
            if sequence >= self._lost_below:
                self._lost_below = 0

    def _report_losses(self, end: int) -> None:
        """Report losses without a message after them. `end`: the sequence above them. Raises FellBehind."""
        self._count(end)
        if self._losses:
            self._report()

    def _report(self) -> None:
        lost, self._losses, self.reported_at = self._losses, 0, time.monotonic()
        raise fell_behind(lost, self._names)

    # ------------------------------------------------------------ ends

    def lost(self, error: Exception) -> bool:
        return self._at_end or self._closed.is_set() or not isinstance(error, FellBehind | DiskFailed | DiskFull)

    def close(self) -> None:
        self._closed.set()
        if self._is_of_parent:
            return
        self._file.interrupt()
        self._wake()
        with self._turn:
            self._file.close()

    def __enter__(self) -> CursorSubscription:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


def read_one(link: Link, path: str, first: int, last: int = 0) -> Message | None:
    """Return a message of the group, or None if it was removed. `last`: for a body in parts, the sequence of its last
    part."""
    until = str(last or first)
    with (
        suppress(FellBehind),
        CursorSubscription(
            link, path, _EVERYTHING, start=str(first), until=until, is_past=True, singly=not last
        ) as messages,
    ):
        return next(messages, None)
    return None
