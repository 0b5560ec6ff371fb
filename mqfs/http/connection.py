"""One connection: each request is answered before the next one is read.

It bounds the time of requests and writes answers to the wire. While an answer is made the connection is not read; the
server reports when its client disconnects.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from mqfs import limits
from mqfs.engine.files.handle import OpenFile
from mqfs.errors import Interrupted, MqfsError, OverLimit, TooLong
from mqfs.http import target, wire
from mqfs.http.answers import Answer, Cut, NoLength, TooSlow, Unauthorized
from mqfs.http.cloud_events import is_structured
from mqfs.http.gate import OPEN, is_encrypted
from mqfs.http.publishing import is_plain, keys, place_of, publish, publish_to, put_there
from mqfs.http.route import Call, Route, TimedOut
from mqfs.http.routes import Table
from mqfs.http.target import Path
from mqfs.http.wire import Request, RequestParser
from mqfs.model import Grant, Step, User, Wait
from mqfs.net.peer import Peer
from mqfs.serving.await_step import answered, await_step
from mqfs.serving.fairness import TimeSlice
from mqfs.serving.stream import Gone, SocketStream

if TYPE_CHECKING:
    from mqfs.http.server import HttpServer

log = logging.getLogger("mqfs.http")
T = TypeVar("T")
REQUESTS = 16  # requests in a row before other connections are served
SMALL_BYTES = 65_536  # a body up to this size is not charged to its user's memory


class Connection:
    """A socket stream and the requests that arrive on it. Calls wait through it (Call.front)."""

    def __init__(self, server: HttpServer, channel: SocketStream, peer: Peer, rebindable: bool, table: Table) -> None:
        self.server, self.channel, self.rebindable, self.table = server, channel, rebindable, table
        self.peer = peer  # the peer that the present request is charged to
        self._proxy = peer if server.proxies.has(peer.account) else None
        self.tree, self.claims = server.tree, server.claims
        self.scope = trio.CancelScope()
        self.idle = True  # between two requests
        self._parser = RequestParser()
        self._waits = False  # a call waits
        self._begun = False  # a part of the present answer was sent
        self._half_closed = self._gone = False
        self._version = "1.1"
        self._closing = False
        self._unread = False  # a part of a refused request was not read
        self._slice_ends = 0.0
        self._slice = TimeSlice(server.fairness.of(peer.account))
        channel.before_wait = self._slice.pause
        self._alone = b""  # the bytes of the present request, if it was received whole and alone
        self._repeated: RepeatedPublish | None = None
        self._held = 0  # bytes of memory charged to the user
        self._request_bytes = 0  # the part of them that is the request's
        self._user: tuple[str | None, User] | None = None  # of the last Authorization

    @property
    def grant(self) -> Grant | None:
        """The grant of the last request's token."""
        return self._user[1].grant if self._user is not None else None

    # ------------------------------------------------------------ requests

    async def run(self) -> None:
        """Answer requests until the client disconnects or the connection has to close."""
        requests = 0
        try:
            with self.scope:
                while not self._closing and (request := await self._next()) is not None:
                    self.idle = False
                    await self._answer(request)
                    self._hold(0)
                    self.idle = True
                    requests += 1
                    if requests % REQUESTS == 0 or perf_counter() > self._slice_ends:
                        await trio.lowlevel.checkpoint()
                self._slice.pause()
                await self._slice.queue.end()
                if self._unread:
                    await self.channel.linger()
        except Gone:
            pass
        finally:
            self._slice.pause()
            self._hold(0)
            self._forget()
            self._parser.close()

    async def _next(self) -> Request | None:
        """Return the next request once its head is complete and its user has the turn; None if the connection is to
        close."""
        parser, self._alone = self._parser, b""
        if self._proxy is not None:  # until the client of the next request is known
            self._slice.queue = self.server.fairness.of(self._proxy.account)
        if parser.requests:
            await self.take_turn()
        deadline = trio.current_time() + (limits.HTTP_IDLE_S if parser.idle else limits.HTTP_HEAD_S)
        while not parser.requests:
            if parser.error is not None:
                await self._refuse(parser.error)
                return None
            was_idle = parser.idle
            try:
                data = await self._receive(deadline)
            except trio.TooSlowError:
                if not parser.idle:
                    await self._refuse(TooSlow(f"no whole head in {limits.HTTP_HEAD_S:g} s"))
                return None
            if not data:
                return None
            await self.take_turn()
            if was_idle and self._repeated is not None and self._repeated.take(data):
                return self._repeated.request
            self._forget()
            self.channel.unread = rest = parser.receive(data)
            if was_idle and not parser.idle:
                deadline = trio.current_time() + limits.HTTP_HEAD_S
            if was_idle and len(parser.requests) == 1 and parser.complete and not rest:
                self._alone = data
        return parser.requests.popleft()

    async def _receive(self, deadline: float) -> bytes:
        """Return the next bytes. The stream of a repeated publish is closed after limits.HTTP_REPEAT_S without any."""
        if self._repeated is not None:
            try:
                return await self.channel.receive_soon(limits.HTTP_REPEAT_S)
            except trio.TooSlowError:
                self._forget()
        return await self.channel.receive(deadline)

    def _forget(self) -> None:
        if self._repeated is not None:
            self._repeated.close()
            self._repeated = None

    async def _refuse(self, error: MqfsError) -> None:
        """Answer an invalid request, after which no other can be read."""
        self._closing = self._unread = True
        await self._send(Request(), self.table.refuse(Request(), error))

    async def _answer(self, request: Request) -> None:
        self._version, self._begun = request.version, False
        if self._proxy is not None:
            given = request.headers.get("x-forwarded-for", "")
            self.peer = self._proxy.charged_to(self.server.proxies.client(self._proxy.account, given))
            self._slice.pause()
            self._slice.queue = self.server.fairness.of(self.peer.account)
            await self.take_turn()
        self._slice_ends = perf_counter() + self._slice.most_s
        try:
            answer = await self._perform(request)
        except MqfsError as error:
            explained = partial(self.server.gate.explain, error, self.peer, self._user)
            answer = self.table.refuse(request, await self._looked_up(explained))
            if isinstance(error, Unauthorized) and (seconds := self.server.gate.delay(self.peer)):
                self._slice.pause()
                await trio.sleep(seconds)
        except TimedOut:
            answer = self.table.refuse(request, TooSlow("request timed out"))
        except Gone:
            raise
        except Exception:
            log.exception("%s: %s %s failed", self.peer.where, request.method, request.shown)
            answer = Answer(500, b"internal server error (see the server log)\n")
        if not request.complete:
            self._closing = self._unread = True
        sent = False
        try:
            sent = await self._send(request, answer)
        finally:
            if answer.done is not None:
                answer.done(sent)
        await self._slice.stop()

    async def _perform(self, request: Request) -> Answer:
        """Check a request from its head, receive its body, and make the call. Raises MqfsError."""
        if self._repeated is not None and self._repeated.request is request:
            return await self._repeated.publish()
        server = self.server
        server.rules.check(request, self.rebindable)
        if request.method == "OPTIONS" and (answer := server.rules.preflight(request)) is not None:
            return answer
        path = target.parse(request.target)
        user = await self._looked_up(partial(self._user_of, request, path))
        found = self.table.resolve(self.tree, user, path)
        if request.method == "OPTIONS":
            return Answer(204, headers=[("Allow", ", ".join(self.table.methods(found)))])
        route = self.table.find(request.method, found, path)
        if route.changes:
            server.rules.check_change(request, not self.rebindable or self.is_encrypted(request))
        call = Call(self, user, self.peer.account, request, path, found)
        call.check_options(route.options)
        if request.has_unknown_length and route.needs_body(request, path):
            self._unread = True
            raise NoLength("header Content-Length: missing (expected for a POST in HTTP/1.0)")
        await self._receive_body(request, route)
        self._request_bytes = self._held
        answer = await route.call(call)
        if self._alone and self._proxy is None:
            self._repeated = repeatable(call, route, self._alone)
        # A completed change that cannot be undone is answered: a refusal would hide it.
        refuse = answer.done is not None or request.method in ("GET", "HEAD")
        try:
            if isinstance(answer.body, bytes):
                self.hold(len(answer.body), refuse=refuse)
        except OverLimit:
            if answer.done is not None:
                answer.done(False)
            raise
        return answer

    def is_encrypted(self, request: Request) -> bool:
        """Whether a request used TLS all the way; for a request of a proxy, what its X-Forwarded-Proto says."""
        proto = request.headers.get("x-forwarded-proto", "")
        return self.channel.encrypted if self._proxy is None else is_encrypted(proto)

    def _user_of(self, request: Request, path: Path) -> User:
        given = self.table.credentials(request, path, self.is_encrypted(request))
        if given is None and path.names[:1] in OPEN:  # these need no token
            return self.peer.itself()
        if self._user is None or self._user[0] != given:
            self._user = given, self.server.gate.user(self.peer, given)
        return self._user[1]

    async def _receive_body(self, request: Request, route: Route) -> None:
        """Receive the body of a request. Raises TooLong, TooSlow, OverLimit, Gone, and the parser's error."""
        most = route.most_bytes
        if request.announced > most:
            raise TooLong(f"body of {request.announced} bytes: too long (expected at most {most})")
        if not request.complete and request.expects_continue:
            await self.channel.send(wire.CONTINUE, limits.HTTP_SEND_S)
        began = trio.current_time()
        while not request.complete:
            if self._parser.error is not None:
                raise self._parser.error
            deadline = began + limits.HTTP_HEAD_S + request.size / limits.HTTP_BODY_RATE
            try:
                data = await self.channel.receive(deadline)
            except trio.TooSlowError:
                raise TooSlow(f"body: too slow (expected at least {limits.HTTP_BODY_RATE} bytes a second)") from None
            if not data:
                raise Gone
            await self.take_turn()
            self.channel.unread = self._parser.receive(data)
            self._hold(request.size if request.size > SMALL_BYTES else 0)
            await self.pause()
            if request.size > most:
                break
        if request.size > most:
            raise TooLong(f"body: too long (expected at most {most} bytes)")

    def hold(self, size: int, *, refuse: bool = True) -> None:
        """Charge the request's user for the answer, of which `size` bytes are made so far. Raises OverLimit, if
        `refuse`."""
        self._hold(self._request_bytes + (size if size > SMALL_BYTES else 0), refuse)

    def _hold(self, size: int, refuse: bool = True) -> None:
        if size or self._held:
            self._held = self.tree.memory.change(self.peer.account, self._held, size, refuse=refuse)

    # ------------------------------------------------------------ answers

    async def _send(self, request: Request, answer: Answer) -> bool:
        """Send an answer. Returns whether the kernel accepted all of it. Raises Gone."""
        self._begun = True
        self.server.note(self.peer, request, answer)
        self._closing = self._closing or not request.keep_alive or self.server.stopping
        headers = answer.all_headers() + self.server.rules.headers(request)
        body, is_head = answer.body, request.method == "HEAD"
        if isinstance(body, bytes):
            size = None if is_head else len(body)
            head = wire.head(answer.status, headers, int(time.time()), size, self._closing)
            await self._send_parts((head,) if is_head else (head, body), limits.HTTP_SEND_S)
            return True
        counted = any(name == "Content-Length" for name, _ in headers)
        chunked = not counted and request.version == "1.1" and not is_head
        self._closing = self._closing or not (counted or chunked or is_head)
        if chunked:
            headers.append(("Transfer-Encoding", "chunked"))
        head = wire.head(answer.status, headers, int(time.time()), None, self._closing)
        if is_head:
            await self.channel.send(head, limits.HTTP_SEND_S)
            return True
        return await self._stream(head, body, chunked, math.inf if answer.endless else limits.HTTP_SEND_S)

    async def _send_parts(self, parts: tuple[bytes, ...], patience: float) -> None:
        """Send parts one after another. Large ones are not joined: the copy would take memory until the client has read
        it."""
        if sum(map(len, parts)) <= SMALL_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            await self.channel.send(part, patience)

    async def _stream(self, head: bytes, body: AsyncIterator[bytes], chunked: bool, patience: float) -> bool:
        """Send a body piece by piece; the kernel has accepted each before the next one is made. The call has charged
        the first piece already."""
        try:
            async with aclosing(cast(Any, body)):
                async for piece in body:
                    if not head:
                        self.hold(len(piece))
                    await self._send_parts((head, *(wire.chunk(piece) if chunked else (piece,))), patience)
                    head = b""
                    del piece  # free it: the wait for the next piece may be long
                    self.hold(0)
                    await self._slice.stop()
                    await self.take_turn()
        except (Cut, MqfsError) as error:
            log.info("%s: answer cut: %s", self.peer.where, error)
            self._closing = True
            return False
        await self.channel.send(head + (wire.LAST_CHUNK if chunked else b""), patience)
        return True

    # ------------------------------------------------------------ waiting

    async def await_step(self, step: Step[T], seconds: float | None = None, *, looks: bool = True) -> T:
        """Return the value of a step, for which it waits up to `seconds` (None: without a bound).

        Raises TimedOut after that time; a step that still searches the present messages ends its search first, if
        `looks`. Raises Interrupted if the server stops, and OverLimit. A step that raises these has done nothing."""
        if not isinstance(step, Wait):
            return step
        if step.settled:
            return step.result()
        if self.tree.closing and step.cancel():  # earlier waits were cancelled; nothing would end this one
            raise Interrupted("the server stops")
        counted = self._count_wait(step)
        self._waits = True
        try:
            if self._gone:
                self.lost()
            if self._half_closed:
                self._probe()
            self._slice.pause()
            until = math.inf if seconds is None else trio.current_time() + seconds
            with trio.CancelScope(deadline=until):
                return await await_step(step, until if looks else math.inf)
        finally:
            self._slice.resume()
            self._waits = False
            if counted:
                self.tree.waits.release(self.peer.account)
        raise TimedOut

    def to_the_end(self) -> AbstractContextManager[object]:
        """Return a scope to undo work in: its waits are not cancelled when the client disconnects."""
        return trio.CancelScope(shield=True)

    async def _looked_up(self, call: Callable[[], T]) -> T:
        """Return the result of a call that may look up the system's database of users. Other connections of the user
        have the turn until the database answers. Raises NotAnswered."""
        step = answered(call)
        if isinstance(step, Wait):
            self._slice.pause()
            try:
                return await await_step(step)
            finally:
                self._slice.resume()
        return step

    def _count_wait(self, step: Wait[Any]) -> bool:
        """Count a wait against its user's limit; return whether it was counted. Beyond the limit it is refused, unless
        it can no longer be cancelled. Raises OverLimit."""
        try:
            self.tree.waits.acquire(self.peer.account)
        except OverLimit:
            if step.cancel():
                raise
            return False
        return True

    async def pause(self) -> None:
        """Give other connections their turn if the present time slice has ended."""
        if perf_counter() > self._slice_ends:
            await self._slice.stop(False)
            await self.take_turn()
            self._slice_ends = perf_counter() + self._slice.most_s

    async def take_turn(self) -> None:
        """Wait for the turn of the connection's user, who is charged for the work from then on."""
        await self._slice.start()

    def begin_stream(self) -> None:
        self.server.begin_stream(self.peer)

    def end_stream(self) -> None:
        self.server.end_stream(self.peer)

    # ------------------------------------------------------------ the client's end

    def half_closed(self) -> None:
        """Record that the client has shut down its sending side. It may still read: probe, if a call waits for it."""
        self._half_closed = True
        if self._waits:
            self._probe()

    def _probe(self) -> None:
        """Send bytes that every client ignores: the host of a disconnected client answers with a reset."""
        if self._version == "1.1" and not self._begun:
            self.channel.send_now(wire.CONTINUE)

    def gone(self) -> None:
        """Record that the client has disconnected, and cancel its waits. Between two requests the next read finds the
        end."""
        self._gone = True
        if not self.idle:
            self.lost()

    def lost(self) -> None:
        """Cancel all waits of the connection, which then claim nothing."""
        self.scope.cancel()


_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)


class RepeatedPublish:
    """A publish with the head of the one before it on the same connection, which was checked then; its stream stays
    open.

    Two things must not have changed: the bytes of the head except the length of the body, and the state of each group
    from the stream's to the root. Any other request is parsed and checked in full. `before` and `behind` are the bytes
    of the head before and after the length of the body.
    """

    def __init__(self, call: Call, before: bytes, behind: bytes) -> None:
        self._call, self._before, self._behind = call, before, behind
        self.request = call.request
        self._place = place_of(call)
        self._handle: OpenFile | None = None
        self._logs = [(group.log, group.log.changes) for group in _up(call.group)]

    def take(self, data: bytes) -> bool:
        """Whether `data` is one more such request, whole and alone; if so its body replaces that of `request`."""
        end = data.find(b"\r", len(self._before))
        body = end + len(self._behind)
        head = b"%b%d%b" % (self._before, len(data) - body, self._behind)
        if len(data) == body or not data.startswith(head):
            return False
        if any(log.changes != changes for log, changes in self._logs) or self._call.group.ring is not None:
            return False
        self.request.replace(data[body:])
        return True

    async def publish(self) -> Answer:
        """Publish the body of `request` to the open stream. Raises MqfsError."""
        call, handle = self._call, self._handle
        if handle is None or handle.closed:
            handle = self._handle = call.tree.open(call.user, call.target.node, os.O_WRONLY)
        answer = await publish_to(handle, call, call.target.node, self._place)
        return answer if answer is not None else await publish(call)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()


def _up(group: Any) -> Iterator[Any]:
    """Yield a group and its ancestors, up to the root."""
    yield group
    while group.parent is not group:
        group = group.parent
        yield group


def repeatable(call: Call, route: Route, data: bytes) -> RepeatedPublish | None:
    """Return a RepeatedPublish for further requests like this completed one, or None where each has to be checked.
    `data`: the bytes of the request, received whole and alone."""
    request = call.request
    if route.call not in (publish, put_there) or call.target.kind == "new stream" or not request.keep_alive:
        return None
    quota = call.tree.quotas.of(call.user.uid) if call.tree.quotas is not None else None
    if quota is not None and (quota.handles or quota.messages or quota.bytes):
        return None  # the stream would count as open, or each needs another file, see `publish_to`
    found, end = _LENGTH.search(data), data.find(wire.HEAD_END) + len(wire.HEAD_END)
    if found is None or found.end() > end or keys(call) or not is_plain(call.group) or request.expects_continue:
        return None
    if is_structured(request.headers) or call.option("reply") is not None:
        return None
    return RepeatedPublish(call, data[: found.start(1)], data[found.end(1) : end])
