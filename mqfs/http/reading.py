"""Reading messages: pages, long polls and answers without an end, each through a `.cursor` of its own.

This module decides when an answer ends, and reports each gap. Positions, filters and formats are the cursor's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import closing
from time import perf_counter
from typing import Any, cast

import attrs

from mqfs import limits
from mqfs.engine.files.cursor import Cursor
from mqfs.engine.files.status import cut
from mqfs.engine.stream import Stream
from mqfs.errors import BadCommand, BadRequest, Damaged, FellBehind, Interrupted, MqfsError, NotFound, OverLimit
from mqfs.http import answers, cloud_events, target
from mqfs.http.answers import NO_STORE, SANDBOX, Answer, Cut, Format, Headers
from mqfs.http.route import WHOLE, Call, TimedOut
from mqfs.model import Step, Wait
from mqfs.records.record import HEAD
from mqfs.syntax.lines import command_lines, quote_word

PIECE_BYTES = 65_536  # of an answer, sent at once
RECORD_BYTES = 256 << 10  # of one read in `format record`
GATHERED_BYTES = 1 << 20  # of an answer, read before they are charged to its user's memory
_LINE = re.compile(r"line \d+: (seek )?")
OPTIONS = (
    "since", "count", "bytes", "until", "wait", "follow", "strict", "format", "data", "last_event_id", "seq",
)  # fmt: skip


@attrs.frozen
class Wish:
    """The options of a request to read."""

    form: Format
    since: str
    until: int | None = None  # the last sequence
    count: int | None = None
    size: int | None = None
    wait: float | None = None
    follow: bool = False
    strict: bool = False

    @property
    def counted(self) -> bool:
        return self.count is not None or self.size is not None


def wish(call: Call) -> Wish:
    """Parse the options of a request to read. Raises BadRequest, TooLong."""
    accept = call.request.headers.get("accept", "*/*")
    form = answers.choose(call.option("format"), accept, call.option("data"))
    since = call.option("since") or "first"
    seen = call.request.headers.get("last-event-id") or call.option("last_event_id")
    if seen:
        if not (seen.isascii() and seen.isdigit() and len(seen) < 19):
            raise BadRequest(f"header Last-Event-ID {seen!r} (expected a sequence)")
        since = str(int(seen) + 1)
    until = call.option("until")
    last = None if until in (None, "end") else call.number("until", 1 << 62)
    if form is answers.RECORD and call.option("count") is not None:
        raise BadRequest("count: not with format record (expected bytes)")
    follow = call.flag("follow") or (form.beat is not None and call.option("wait") is None and until is None)
    return Wish(
        form=form,
        since=since,
        until=last,
        count=call.number("count", 1 << 62),
        size=call.number("bytes", limits.HTTP_READ_BYTES),
        wait=call.seconds("wait"),
        follow=follow,
        strict=call.flag("strict"),
    )


class AnswerMessages:
    """The framed messages of one answer; the cursor has the position. `undone`: the next sequence of the log if the
    request continues after it, else 0. The client then knows messages of another log of that name, or messages lost
    with the server's memory."""

    def __init__(self, call: Call, cursor: Cursor, wish: Wish, undone: int) -> None:
        self._call, self.cursor, self._wish, self._undone = call, cursor, wish, undone
        self._parked: Wait[bytes] | None = None
        self._shown = cursor.shown
        self._many = wish.form is answers.RECORD  # a read returns whole records, as many as fit
        self._room = min(RECORD_BYTES, wish.size or RECORD_BYTES) if self._many else WHOLE
        self.messages = 0
        self.over = False
        self.first = 0  # sequence of the first message

    def poll(self) -> bytes | None:
        """Return the next message, or a notice of lost ones. None: the next message has to be waited for, or (`over`)
        none will come. Raises Cut, FellBehind, DiskFailed."""
        at, step = self.cursor.position, self._parked
        try:
            if step is None:
                read = self.cursor.read(self._room)
                step = self._parked = read if isinstance(read, Wait) else None
                data = b"" if step is not None else cast(bytes, read)
            if step is not None:
                if not step.settled:
                    return None
                self._parked = None
                data = step.result()
        except FellBehind:
            last = max(lost_before(self.cursor), self.cursor.position, at + 1) - 1
            return self._lost(at, last, started=self.messages > 0)
        except Damaged as error:
            return self._lost(error.sequence, error.sequence, started=self.messages > 0)
        shown = self.cursor.shown
        if shown is self._shown or shown is None:
            self.over = True
            return None
        self._shown = shown
        if not self.first:
            self.first = HEAD.unpack_from(data)[2] if self._many else shown.sequence
        self.messages += 1
        self.over = self.messages == self._wish.count
        return self._wish.form.message(data)

    def _lost(self, first: int, last: int, *, started: bool) -> bytes:
        """Return the notice of a gap, empty for a format without one. Raises FellBehind for a gap at the beginning of a
        `strict` answer, and Cut if the format has no notice and messages were sent before the gap."""
        if self._wish.strict and not started:
            raise FellBehind(f"messages lost: {first} to {last}")
        if self._wish.form.lost is not None:
            return self._wish.form.lost(first, last)
        if started:
            raise Cut
        return b""

    async def begin(self) -> bytes:
        """Return the first bytes of the answer: a gap's notice, and the first message where it had to be read to find
        the gap."""
        since, cursor, piece = self._wish.since, self.cursor, b""
        while not (cursor.over or cursor.arrive()):
            await self.pause()
        if not since.isdigit():
            return self._wish.form.begin
        if self._undone:
            return self._wish.form.begin + self._lost(self._undone, int(since) - 1, started=False)
        floor, first = lost_before(cursor), max(int(since), 1)
        settings = cursor.group.settings
        if settings.replay != "all" and settings.deliver == "all":  # messages without a reader are trimmed uncounted
            piece = self.poll() or b""
            while not piece and not self.over and self.cursor.search is not None:
                await self.pause()
                piece = self.poll() or b""
            floor = max(floor, self.first or cursor.group.log.end.next)
        if self._wish.until is not None:
            floor = min(floor, self._wish.until + 1)
        lost = self._lost(first, floor - 1, started=False) if first < floor else b""
        return self._wish.form.begin + lost + piece

    def gather(self, room: int) -> bytes:
        """Return present messages: up to about `room` bytes, or those found within 2 * limits.LOOKING_S."""
        pieces, size, until = [], 0, perf_counter() + 2 * limits.LOOKING_S
        while size < room and not self.over and (data := self.poll()) is not None:
            pieces.append(data)
            size += len(data)
            if perf_counter() > until:
                break
        return b"".join(pieces)

    async def all(self, room: int) -> bytes:
        """Return present messages, up to about `room` bytes, and pause as often as that takes. Raises OverLimit, and
        the errors of `poll`."""
        pieces, size = [], 0
        while size < room and not self.at_end:
            pieces.append(self.gather(min(room - size, GATHERED_BYTES)))
            size += len(pieces[-1])
            self._call.front.hold(size)
            await self.pause()
        return b"".join(pieces)

    @property
    def at_end(self) -> bool:
        """Whether there are no more messages at present."""
        return self.over or not (self._parked is None or self._parked.settled or self.cursor.search)

    async def pause(self) -> None:
        """Let other connections run, and wait for a search of the log to end."""
        if self._parked is not None:
            try:
                await self._call.front.await_step(self.cursor.search)
            except (Interrupted, OverLimit):  # the search was cancelled
                self.stop()
                raise
            except MqfsError:
                pass  # `poll` raises it
            await self._call.front.take_turn()
        await self._call.front.pause()

    async def wait(self, seconds: float | None) -> None:
        """Wait up to `seconds` (None: without a bound) until `poll` has a message. Raises TimedOut, Interrupted,
        OverLimit."""
        if self._parked is not None:
            try:
                await self._call.front.await_step(cast(Step[bytes], self._parked), seconds)
            except (Interrupted, TimedOut, OverLimit):
                self._parked = None
                raise
            except MqfsError:
                pass  # `poll` raises it

    def stop(self) -> None:
        """Cancel the waiting read. A message delivered meanwhile is not lost: a cursor claims nothing."""
        if self._parked is not None:
            self._parked.cancel()
            self._parked = None


def lost_before(cursor: Cursor) -> int:
    """Return one above the newest selected message that a reader may have missed."""
    return max(map(cut, cursor.streams().values()), default=0)


def open_cursor(call: Call, names: list[str], since: str, form: str, *commands: str, select: str = "select") -> Cursor:
    """Open a cursor over streams and views of the group; without names, over all. `commands`: further lines to write to
    it. `select`: the command for the names, "select" or "cover"."""
    cursor = cast(Cursor, call.tree.open(call.user, call.own(".cursor"), os.O_RDWR))
    try:
        words = " ".join(map(quote_word, names))
        cursor.whole_below = limits.CTL_BYTES
        cursor.write(command_lines(f"{select} {words}", f"seek {quote_word(since)}", f"format {form}", *commands))
    except BaseException as error:
        cursor.close()
        if isinstance(error, BadCommand):  # without the numbers of lines, which the client did not write
            raise BadCommand(_LINE.sub(lambda found: "since " if found[1] else "", error.detail)) from None
        raise
    return cursor


def bound(cursor: Cursor, last: int | None) -> int:
    """End a cursor at `last` or at the present end of the log, whichever is first. Returns the sequence after it."""
    end = cursor.group.log.end.next
    stop = end if last is None else min(last + 1, end)
    cursor.write(b"until %d\n" % max(stop - 1, 0))
    return max(stop, cursor.position)


async def read(call: Call) -> Answer:
    """Read messages of a stream or a view, or of the streams of a group that `select` names."""
    if call.option("seq") is not None:
        return one(call)
    words = wish(call)
    names = [value for name, value in call.path.options if name == "select"]
    if call.target.kind != "group":
        names = [call.target.name]
    return await answer(call, open_source(call, [name for name in names if name], words), words)


def exists(call: Call, name: str) -> bool:
    """Whether the group has a file of that name. Raises Denied where the user may not read it."""
    try:
        call.tree.access(call.user, call.own(name), os.R_OK)
    except NotFound:
        return False
    return True


def open_source(call: Call, names: list[str], words: Wish, select: str = "select") -> AnswerMessages:
    """Open the messages of streams, views and patterns for an answer. `select`: with "cover" the streams need not exist
    yet. A `since` beyond the end of the log reads all messages, after a notice of the lost ones."""
    until = [] if words.until is None else [f"until {words.until}"]
    since, end = words.since, call.group.log.end.next
    is_undone = since.isascii() and since.isdigit() and len(since) < 20 and int(since) > end
    cursor = open_cursor(call, names, "first" if is_undone else since, words.form.cursor, *until, select=select)
    return AnswerMessages(call, cursor, words, end if is_undone else 0)


async def answer(call: Call, source: AnswerMessages, words: Wish) -> Answer:
    """Answer with messages, with or without an end. The cursor is closed after the answer."""
    try:
        return await (_follow(call, source, words) if words.follow else _page(call, source, words))
    except Cut:
        source.cursor.close()
        raise FellBehind("messages lost: trimmed while the answer was made") from None
    except BaseException:
        source.cursor.close()
        raise


async def _page(call: Call, source: AnswerMessages, words: Wish) -> Answer:
    """Return an answer with an end. With `count` or `bytes` it fits a page, and Mqfs-Next is exactly the sequence after
    it."""
    cursor = source.cursor
    start = await source.begin()
    piece = b""
    if words.wait is not None and start == words.form.begin:
        try:
            while not (piece := source.poll() or b"") and not source.over:
                await source.wait(words.wait)
        except TimedOut:
            pass
    stop = bound(cursor, words.until)
    room = words.size or limits.HTTP_PAGE_BYTES if words.counted else PIECE_BYTES
    body = piece + await source.all(room - len(piece))
    head: Headers = [*NO_STORE, SANDBOX]
    if source.at_end or words.counted or cursor.position >= stop:
        source.stop()
        head += _places(source, cursor.position if words.counted else max(stop, cursor.position))
        cursor.close()
        if not body and words.wait is not None and start == words.form.begin:
            return Answer(204, headers=head)
        return Answer(200, start + body + (words.form.end if source.over else b""), words.form.kind, head)
    head += _places(source, stop)
    return Answer(200, _rest(source, words, start + body), words.form.kind, head, lambda _: cursor.close())


def _places(source: AnswerMessages, following: int) -> Headers:
    return [("Mqfs-First", str(source.first or source.cursor.position)), ("Mqfs-Next", str(following))]


async def _rest(source: AnswerMessages, words: Wish, data: bytes) -> AsyncIterator[bytes]:
    """Yield the body of an answer with an end, in pieces."""
    yield data
    del data
    while not source.at_end:
        yield source.gather(PIECE_BYTES)
        await source.pause()
    yield words.form.end


async def _follow(call: Call, source: AnswerMessages, words: Wish) -> Answer:
    """Return an answer without an end. Raises OverLimit."""
    cursor = source.cursor
    data = await source.begin() + source.gather(PIECE_BYTES)
    call.front.hold(len(data))
    call.front.begin_stream()

    def done(_: bool) -> None:
        source.stop()
        cursor.close()
        call.front.end_stream()

    head: Headers = [*NO_STORE, SANDBOX, ("Mqfs-First", str(source.first or cursor.position))]
    return Answer(200, _forever(call, source, words, data), words.form.kind, head, done, endless=True)


async def _forever(call: Call, source: AnswerMessages, words: Wish, data: bytes) -> AsyncIterator[bytes]:
    form = words.form
    yield data
    data = b""  # free the sent piece during the wait
    while not source.over and not call.tree.closing:
        data = source.gather(PIECE_BYTES)
        if not data and not source.over:
            try:
                await source.wait(form.silence_s() if form.beat is not None else None)
            except TimedOut:
                data = form.beat() if form.beat is not None else b""
            await call.front.take_turn()
        yield data
        data = b""
        await call.front.pause()
    if not call.tree.closing:  # without it, clients connect again after a restart
        yield form.end


# ---------------------------------------------------------------- one message, and none


def one(call: Call) -> Answer:
    """Return the message of `seq`. Raises FellBehind where it was trimmed, NotFound."""
    sequence = call.number("seq", 1 << 62) or 0
    with closing(open_cursor(call, [call.target.name], str(sequence), "json")) as cursor:
        cursor.write(b"until %d\n" % sequence)
        line = cursor.read(WHOLE)
        if not isinstance(line, bytes):
            line.cancel()
            line = b""
        if not line:
            floor = max((stream.state.floor for stream in cursor.streams().values()), default=0)
            if sequence < floor:
                raise FellBehind(f"message {sequence} of {call.target.name!r}: trimmed")
            raise NotFound(f"no message {sequence} in stream {call.target.name!r}")
    return message_of(line)


def message_of(line: bytes) -> Answer:
    """Return a message from its line of `format json`, with those of its headers that HTTP can carry."""
    message = json.loads(line)
    body = message["body"].encode() if "body" in message else answers.base64_body(message["body_base64"])
    own = message.get("headers", {})
    time = line.split(b'"time":', 1)[1].split(b",", 1)[0].decode()  # with all its digits
    head = [*NO_STORE, SANDBOX, ("Mqfs-Sequence", str(message["sequence"])), ("Mqfs-Time", time)]
    head += [(f"Mqfs-H-{name}", text) for name, text in own.items() if carries(name, text)]
    kind = own.get(cloud_events.CONTENT_TYPE, "")
    is_event = cloud_events.MARK in own and carries("content-type", kind)
    return Answer(200, body, kind if is_event and kind else answers.RAW.kind, head + cloud_events.to_headers(own))


def carries(name: str, text: str) -> bool:
    """Whether HTTP can carry a header of a message."""
    return name.isascii() and all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in name) and text.isprintable()


async def look(call: Call) -> Answer:
    """Answer HEAD: where a stream begins and ends, and how much it retains."""
    node: Any = call.target.node
    end = node.group.log.end.next
    head = [*NO_STORE, ("Mqfs-Next", str(end))]
    call.tree.access(call.user, node, os.R_OK)
    if isinstance(node, Stream):
        kept = call.tree.stat(node).kept_bytes
        first = node.kept.first_kept() or end
        head += [("Mqfs-First", str(first)), ("Mqfs-Messages", str(node.kept.count)), ("Mqfs-Bytes", str(kept))]
        head += [("Mqfs-Written", str(node.written)), ("ETag", f'"{node.kept.newest_kept()}"')]
    return Answer(200, headers=head, kind=answers.RAW.kind)


async def absent(call: Call) -> Answer:
    """Answer a read of a missing stream. A client that received its events before gets 204: do not reconnect."""
    form = answers.choose(call.option("format"), call.request.headers.get("accept", "*/*"))
    seen = call.request.headers.get("last-event-id") or call.option("last_event_id")
    if form is answers.SSE and seen:
        return Answer(204)
    raise target.absent(call.target, call.path.names)
