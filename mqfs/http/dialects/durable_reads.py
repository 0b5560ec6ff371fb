"""Reads of Durable Streams: present messages, long polls and server-sent events.

An answer says where the next read begins, whether that is the end of the stream, and whether the stream is closed. A
part with more after it never changes and may be cached; at the end a client has to ask whether it is still the end.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from mqfs import limits
from mqfs.errors import BadRequest, FellBehind
from mqfs.http import reading
from mqfs.http.answers import RAW, SANDBOX, Answer, Cut, Headers
from mqfs.http.dialects.durable_state import Catalog, StreamState, control_event, data_event, is_text, join
from mqfs.http.route import Call, TimedOut

_OFFSET = re.compile(r"0{16}_(\d{16})")
_EPOCH_S, _INTERVAL_S = 1_728_432_000, 20  # cursors count intervals since 9 October 2024, as the protocol has it
_JITTER = 180  # intervals: an hour
SAME_SITE: Headers = [("Cross-Origin-Resource-Policy", "cross-origin")]


def print_offset(sequence: int) -> str:
    """Return the offset of a sequence, as the protocol's own server prints it: offsets sort by their text."""
    return f"{0:016d}_{sequence:016d}"


def parse_offset(text: str) -> int:
    """Return the sequence of an offset. Raises BadRequest."""
    match = _OFFSET.fullmatch(text)
    if match is None or not text.isascii():
        raise BadRequest(f"invalid offset {text[:80]!r} (expected -1, now, or a Stream-Next-Offset)")
    return int(match[1])


def next_cursor(given: str) -> str:
    """Return the number of the present interval, or one above the client's own, so that no cache answers it for
    ever."""
    now = int(time.time() - _EPOCH_S) // _INTERVAL_S
    known = int(given) if given.isascii() and given.isdigit() and len(given) < 16 else -1
    return str(now if known < now else known + random.randint(1, _JITTER))


class Stitched:
    """The messages of a durable stream from an offset on, beginning with its sources'. `next`: the offset after the
    messages read so far."""

    def __init__(self, call: Call, catalog: Catalog, stream: Any, at: int) -> None:
        self._call, self._catalog, self._stream = call, catalog, stream
        self._parts = [part for part in catalog.parts(stream) if part.end is None or part.end > at]
        for part in self._parts:
            call.tree.access(call.user, part.stream, os.R_OK)
        self._source: reading.AnswerMessages | None = None
        self._is_cut = False  # the messages after those returned were trimmed
        self.next, self.at_end = at, False

    async def gather(self, room: int) -> list[bytes]:
        """Return present messages, up to about `room` bytes. Raises FellBehind where the first one was trimmed."""
        if self._is_cut:
            raise FellBehind("messages lost: trimmed while they were read")
        found: list[bytes] = []
        size, self.at_end = 0, False
        while size < room and not self.at_end:
            source = self._source or await self._open()
            try:
                body = source.poll()
            except Cut:
                self._is_cut = True  # for the next read to report
                break
            if body is not None:
                self.next = max(self.next, source.cursor.position)
                found += [body] if body else []
                size += len(body)
                self._call.front.hold(size)
                await self._call.front.pause()
            elif not source.at_end:
                await source.pause()
            elif len(self._parts) > 1:
                self.close()
                self._parts.pop(0)
            else:
                self.at_end = True
        return found

    async def state(self) -> StreamState:
        """Return the state of the stream, and move `next` to its tail where all messages before that were read.

        The state is shared with other requests. Its tail may include messages written while it was looked up: then
        `at_end` becomes False."""
        state = await self._catalog.state(self._call, self._stream)
        self.at_end = self.at_end and (self._source is None or self._source.at_end)
        if self.at_end:
            self.next = state.tail if state.closed else max(self.next, state.tail)
        return state

    async def _open(self) -> reading.AnswerMessages:
        stream, end = self._parts[0]
        since = str(self.next) if self.next else "first"
        words = reading.Wish(RAW, since, follow=end is None, strict=True)
        self._source = source = reading.open_source(self._call, [stream.name], words)
        if end is not None:
            source.cursor.write(b"until %d\n" % (end - 1))
        await source.begin()
        return source

    async def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for another message. Raises TimedOut."""
        if self._source is not None:
            await self._source.wait(seconds)

    @property
    def is_over(self) -> bool:
        """Whether the stream was removed."""
        return bool(self._stream.removed)

    def close(self) -> None:
        if self._source is not None:
            self._source.stop()
            self._source.cursor.close()
            self._source = None


async def read(call: Call, catalog: Catalog, stream: Any) -> Answer:
    """Answer GET of an existing stream. Raises BadRequest, FellBehind."""
    given = [value for name, value in call.path.options if name == "offset"]
    live, cursor = call.option("live"), call.option("cursor") or ""
    if len(given) > 1:
        raise BadRequest("offset: given twice")
    if live not in (None, "long-poll", "sse"):
        raise BadRequest(f"live {live!r} (expected long-poll or sse)")
    if live is not None and not given:
        raise BadRequest(f"live={live}: no offset (expected offset=-1, now, or a Stream-Next-Offset)")
    word = given[0] if given else "-1"
    state = await catalog.state(call, stream)
    at = {"-1": 0, "now": state.tail}.get(word)
    stitched = Stitched(call, catalog, stream, parse_offset(word) if at is None else at)
    config = catalog.config(stream)
    config.readers += 1

    def close() -> None:
        stitched.close()
        config.readers -= 1
        config.used_ns = call.tree.clock.engine_ns()

    try:
        if live == "sse":
            return await _follow(call, stitched, config.kind, cursor, close)
        answer = await _page(call, stitched, config.kind, word, None if live is None else next_cursor(cursor))
    except BaseException:
        close()
        raise
    close()
    return answer


async def _page(call: Call, stitched: Stitched, kind: str, word: str, cursor: str | None) -> Answer:
    """Return the present messages; with a `cursor`, of a long poll, wait for the first where there are none."""
    start, number = stitched.next, stitched._stream.number
    found, state = await _gather(stitched)
    if cursor is not None:
        try:
            while not (found or state.closed or stitched.is_over or call.tree.closing):
                await stitched.wait(limits.DURABLE_WAIT_S)
                found, state = await _gather(stitched)
        except TimedOut:
            found, state = await _gather(stitched)  # includes messages and a close since the last look
    is_end = stitched.at_end
    is_closed = is_end and state.closed
    head: Headers = [*SAME_SITE, SANDBOX, ("Stream-Next-Offset", print_offset(stitched.next))]
    if is_end:
        head.append(("Stream-Up-To-Date", "true"))
    if is_closed:
        head.append(("Stream-Closed", "true"))
    elif cursor is not None:
        head.append(("Stream-Cursor", cursor))
    if cursor is not None and not found:
        return Answer(204, headers=[*head, ("Cache-Control", "no-store")])
    if word == "now":
        return Answer(200, join(kind, found), kind, [*head, ("Cache-Control", "no-store")])
    tag = f'"{number}:{start}:{stitched.next}{":c" if is_closed else ""}"'
    fresh = "no-cache" if is_end else "private, max-age=60, stale-while-revalidate=300"
    head += [("ETag", tag), ("Cache-Control", fresh)]
    if call.has_tag(tag):
        return Answer(304, headers=head)
    return Answer(200, join(kind, found), kind, head)


async def _gather(stitched: Stitched) -> tuple[list[bytes], StreamState]:
    """Return a page of messages, and the state after them. It is empty only at the end: an empty answer would be cached
    otherwise."""
    while True:
        found, state = await stitched.gather(limits.HTTP_PAGE_BYTES), await stitched.state()
        if found or stitched.at_end:
            return found, state


async def _follow(call: Call, stitched: Stitched, kind: str, cursor: str, close: Callable[[], None]) -> Answer:
    """Return an answer of events, which calls `close` after it. It ends after limits.DURABLE_EVENTS_S, as caches need
    it; a client then continues by another request."""
    found = await stitched.gather(reading.PIECE_BYTES)
    call.front.begin_stream()

    def done(_: bool) -> None:
        close()
        call.front.end_stream()

    head: Headers = [*SAME_SITE, ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no")]
    if not is_text(kind):
        head.append(("Stream-SSE-Data-Encoding", "base64"))
    return Answer(200, _events(call, stitched, kind, cursor, found), "text/event-stream", head, done, endless=True)


async def _events(call: Call, stitched: Stitched, kind: str, cursor: str, found: list[bytes]) -> AsyncIterator[bytes]:
    ends, is_first = time.monotonic() + limits.DURABLE_EVENTS_S, True
    while not call.tree.closing:
        state = await stitched.state()
        is_closed = stitched.at_end and state.closed
        if found or is_first or is_closed:
            control: dict[str, object] = {"streamNextOffset": print_offset(stitched.next)}
            if not is_closed:
                cursor = next_cursor(cursor)
                control["streamCursor"] = cursor
            control |= {"upToDate": True} if stitched.at_end else {}
            control |= {"streamClosed": True} if is_closed else {}
            yield data_event(kind, found) + control_event(control)
            found, is_first = [], False  # free the sent messages during the wait
        left = ends - time.monotonic()
        if is_closed or stitched.is_over or left <= 0:
            return
        if stitched.at_end:
            try:
                await stitched.wait(min(left, limits.HTTP_BEAT_S))
            except TimedOut:
                yield b":\n\n"
            await call.front.take_turn()
        await call.front.pause()
        try:
            found = await stitched.gather(reading.PIECE_BYTES)
        except FellBehind:
            return  # the next request is refused
