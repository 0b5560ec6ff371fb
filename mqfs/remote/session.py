"""The connection to a server that may end: the connection is replaced, and unanswered calls are repeated.

Every call is a `Wait`. A call that a lost connection left unanswered waits here, in the order of the calls. After the
next attach the open files are opened again first, then the calls are repeated. A call is made so that this is harmless:

    call -- request --> server
              |  connection lost: the call waits here for `patience`, then it fails with EIO
              +-- attach, open files again -- request, `repeated` --> server

Files and names are known to tree.py and files.py only. An open file has `reopen`, a procedure that records why it could
not be opened, `on_ready`, called once all files are open again, and `on_closed`, called when the mount ends.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import trio

from mqfs import limits
from mqfs.errors import Disconnected, DiskFailed, Interrupted, MqfsError, NotFound, OverLimit
from mqfs.model import Qid, Step, User, Wait
from mqfs.net.identity import user_name
from mqfs.net.sockets import UnixAddress, parse_address
from mqfs.ninep.client import connection
from mqfs.ninep.client.machine import check
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import Fcall
from mqfs.ninep.codec.wire import Dialect
from mqfs.ninep.server.resumable import MARK
from mqfs.remote.link import Link

log = logging.getLogger("mqfs.mount")
T = TypeVar("T")
C = TypeVar("C", bound="Call[Any] | OneRequest[Any]")
Procedure: TypeAlias = Generator[
    list[Fcall] | float, list[Fcall], T
]  # yields requests, and is sent their replies, which may be errors; or yields seconds to wait

CONNECT_S = 5.0
RETRY_S, RETRY_MOST_S = 0.02, 1.0  # between two attempts, doubling
TICK_S = 0.5
INTERRUPT_S = 2.0  # without a connection, before a signal ends a call on names
ASK_S, SILENT_S = 5.0, 15.0  # without bytes from a server that owes answers: it is asked, then counts as lost
WRITTEN_BYTES = 256 << 20  # of unanswered writes
USERS = 1_024  # attached at once on a connection
REST_MS = 1  # for which tasks of the mount may have to wait


class Closed(MqfsError):
    """Raised for calls when the mount ends."""


class ServerStopsError(Exception):
    """Raised for an answer that only says that its server stops: the request is repeated on the next connection."""


class Call(Wait[T]):
    """A call that is repeated on the next connection if its connection is lost before the answer."""

    __slots__ = (
        "_attempt",
        "_left",
        "_make",
        "_procedure",
        "_replies",
        "_session",
        "cancelled",
        "link",
        "repeated",
    )

    def __init__(self, session: Session, make: Callable[[Link, bool], Procedure[T]]) -> None:
        """`make`: returns the procedure on a connection. Its second argument: an earlier outcome is unknown."""
        super().__init__(Call._cancel_call)  # type: ignore[arg-type]
        self._session, self._make = session, make
        self._attempt, self.repeated, self.cancelled = 0, False, False
        session.working += 1
        self.link: Link | None = None

    def start(self, link: Link) -> None:
        """Begin, or repeat, the call on a connection."""
        self.link = link
        self._attempt += 1
        self._procedure = self._make(link, self.repeated)
        self._step(partial(next, self._procedure))

    def _step(self, step: Callable[[], list[Fcall] | float]) -> None:
        try:
            requests = step()
        except StopIteration as done:
            self.resolve(done.value)
            return
        except MqfsError as error:
            self.fail(error)
            return
        assert self.link is not None
        if isinstance(requests, float):
            self._replies = []
            self._session.later(requests, partial(self._continue, self._attempt))
            return
        self._left, self._replies = len(requests), list[Any]([None]) * len(requests)
        answer = partial(self._answered, self._attempt)
        try:
            self.link.send([(request, partial(answer, number)) for number, request in enumerate(requests)])
        except OverLimit as error:
            self._step(partial(self._procedure.throw, error))

    def _answered(self, attempt: int, number: int, reply: Fcall | None) -> None:
        if attempt != self._attempt or self.settled:
            return
        assert self.link is not None
        if reply is None:
            self._attempt += 1
            self._procedure.close()
            if self.link.lost:
                self.repeated = True
                self._session.wait_for_link(self)
            else:
                self.fail(Interrupted())
            return
        self._replies[number] = reply
        self._left -= 1
        if not self._left:
            self._step(partial(self._procedure.send, self._replies))

    def _continue(self, attempt: int) -> None:
        """Continue after a pause, unless the call was cancelled or the connection lost."""
        assert self.link is not None
        if attempt != self._attempt or self.settled:
            return
        if self.cancelled or self.link.lost:
            self._answered(attempt, 0, None)
        else:
            self._step(partial(self._procedure.send, []))

    def resolve(self, value: T) -> None:
        self._session.working -= 1
        super().resolve(value)

    def fail(self, error: BaseException) -> None:
        self._session.working -= 1
        super().fail(error)

    @staticmethod
    def _cancel_call(call: Call[Any]) -> bool:
        """Cancel a call on names. It is short, and programs do not expect a signal to end it.

        So a signal ends it only in a pause, or without a connection for INTERRUPT_S. A call that was not started is
        cancelled at once where its user has too many waiting calls (`otherwise`).
        """
        call.cancelled = True
        if call.otherwise is None or call.repeated or call not in call._session.pending:
            return False
        del call._session.pending[call]
        call._session.working -= 1
        return True


class OneRequest(Wait[T]):
    """A call of one request, such as a read or a write, repeated as a `Call` is."""

    __slots__ = (
        "_fid", "_finish", "_held", "_is_once", "_is_short", "_make", "_recover", "_session", "_tag",
        "cancelled", "is_unknown", "link", "repeated",
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        make: Callable[[OneRequest[T]], Fcall | T],
        finish: Callable[[Fcall], Step[T]],
        *,
        recover: Callable[[MqfsError], Step[T]] | None = None,
        held: int = 0,
        is_short: bool = False,
        is_once: bool = False,
    ) -> None:
        """`make`: returns the request, or the result without one. `finish`: returns the result for the reply;
        `recover`: that for an error. `held`: the bytes that the request keeps in memory.

        `is_short`: a signal does not end it. `is_once`: a signal does not end it while a lost server may have done it,
        as its program would do it again. Raises OverLimit.
        """
        super().__init__(OneRequest._cancel_request)  # type: ignore[arg-type]
        self._session, self._make, self._finish, self._recover = session, make, finish, recover
        self.link: Link | None = None
        self.repeated = self.cancelled = False
        self.is_unknown = False  # a lost server may have done what must be done once
        self._tag, self._held, self._is_short, self._is_once = -1, held, is_short, is_once
        if held:
            session.hold(held)

    def start(self, link: Link) -> None:
        self.link = link
        try:
            request = self._make(self)
        except MqfsError as error:
            self.fail(error)
            return
        if isinstance(request, tuple):
            self._fid = cast(m.Tread | m.Twrite, request).fid
            self._tag = link.send_one(cast(Fcall, request), self._answered)
            if self.cancelled and not self._is_short:  # its flush was lost with the previous link
                link.flush(self._tag)
        else:
            self.resolve(cast(T, request))

    def _answered(self, reply: Fcall | None) -> None:
        if self.settled:
            return
        if reply is None:
            if self.link is not None and self.link.lost:
                self.repeated, self.is_unknown = True, self._is_once
                self._session.wait_for_link(self)
            else:
                self.fail(Interrupted())
            return
        try:
            try:
                result = self._finish(check(reply))
            except MqfsError as error:
                if isinstance(error, Interrupted) and not self.cancelled:
                    raise ServerStopsError from None
                if self._recover is None:
                    raise
                result = self._recover(error)
        except MqfsError as error:
            self.fail(error)
        except ServerStopsError:
            assert self.link is not None
            if self._fid in self.link.clunking:  # the mount clunked the fid, the file has another one
                self.start(self.link)
            else:
                self.repeated = True
                self._session.wait_for_link(self)
        else:
            self.follow(result)

    def resolve(self, value: T) -> None:
        self._let_go()
        super().resolve(value)

    def fail(self, error: BaseException) -> None:
        self._let_go()
        super().fail(error)

    def _let_go(self) -> None:
        if self._held:
            self._session.hold(-self._held)
            self._held = 0

    @staticmethod
    def _cancel_request(call: OneRequest[Any]) -> bool:
        """Cancel a request that waits for a connection at once, unless it is short or a lost server may have done it.

        Else its outcome decides: that after a flush, that of the next server, or that of `_end_cancelled`.
        """
        if not (call._is_short or call.is_unknown) and call._session.pending.pop(call, False) is None:
            call._let_go()
            return True
        call.cancelled = True
        if not call._is_short and call.link is not None and not call.link.lost:
            call.link.flush(call._tag)
        return False


class CommandRequest(OneRequest[T]):
    """A request with commands. O_NONBLOCK does not refuse it: waiting for a server counts as waiting for a disk."""

    __slots__ = ("undo",)
    is_prompt = True
    undo: Callable[[BaseException], None]  # called with the error if it fails, or Interrupted if it is cancelled

    def fail(self, error: BaseException) -> None:
        self.undo(error)
        super().fail(error)

    def cancel(self, otherwise: BaseException | None = None) -> bool:
        if not super().cancel(otherwise):
            return False
        self.undo(Interrupted())
        return True


class Session:
    """The present connection, to the first address that serves, and the calls that wait for the next one."""

    def __init__(self, address: str, *, patience_s: float, user: str = "", token: str = "") -> None:
        self.address, self.patience_s = address, patience_s
        self._user, self._token = user, token
        self.link: Link | None = None
        self._attached: Link | None = None  # also set while the files are opened again, before `link`
        self.pending: dict[Any, None] = {}  # calls that wait for a connection, in order
        self.files: dict[Any, None] = {}
        self.down_since_s = time.monotonic()
        self.is_per_user = False  # every user attaches as itself
        self.closing = self._impatient = False
        self._held = 0  # bytes of unanswered writes
        self.working = 0  # unanswered calls: tasks wait for them
        self._poll, self._poll_of = select.poll(), None  # type: select.poll, Link | None
        self._nursery: trio.Nursery | None = None

    # ------------------------------------------------------------ calls

    def hold(self, size: int) -> None:
        """Charge bytes of unanswered writes, or release them if negative. Raises OverLimit."""
        if size > 0 and self._held + size > WRITTEN_BYTES:
            raise OverLimit(f"unanswered writes of {self._held} bytes (expected at most {WRITTEN_BYTES} of a mount)")
        self._held += size

    def call(self, make: Callable[[Link, bool], Procedure[T]]) -> Call[T]:
        """Perform a procedure, and repeat it if its connection is lost."""
        return self.begin(Call(self, make))

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        """Call a function after a pause."""
        if self._nursery is None:
            then()
        else:
            self._nursery.start_soon(_after, seconds, then)

    def begin(self, call: C) -> C:
        """Start a call now, or on the next connection. It fails if there was no connection for too long."""
        if self.link is not None and not self.link.lost:
            call.start(self.link)
        elif self._impatient and not self.closing:
            call.fail(self._gone())
        else:
            self.wait_for_link(call)
        return call

    def wait_for_link(self, call: Any) -> None:
        """Have a call wait for the next connection."""
        if self.closing:
            call.fail(Closed("the mount ends"))
        else:
            self.pending[call] = None

    def _gone(self) -> DiskFailed:
        return DiskFailed(f"server: no connection for {self.patience_s:g} s")

    # ------------------------------------------------------------ the loop of the device

    def receive(self) -> bool:
        """Process the answers that have arrived. Return False if there were none."""
        link = self.link
        return link is not None and not link.lost and link.receive()

    def rest(self, device: int) -> bool:
        """Sleep until a request or an answer arrives, at most REST_MS. Return False if a task may wait for its turn.

        On a busy machine a process that yields runs last, and a process that is woken runs next.
        """
        link = self.link
        if link is None or link.lost or self.working:
            return False
        if self._poll_of is not link:
            self._poll_of, self._poll = link, select.poll()
            for fd in (device, link.fileno()):
                self._poll.register(fd, select.POLLIN)
        self._poll.poll(REST_MS)
        return True

    # ------------------------------------------------------------ users

    def root(self, link: Link, user: User | None) -> Procedure[int]:
        """Return the fid of the root as a user; `user` None: as the mount itself. Raises Denied."""
        if user is None or not self.is_per_user:
            return link.machine.root
        if (fid := link.roots.get(user.uid)) is None:
            fid = link.new_fid()
            name = user_name(user.uid)
            (reply,) = yield [m.Tattach(0, fid, m.NOFID, name, MARK, user.uid)]
            try:
                check(reply)
            except MqfsError:
                link.machine.free_fid(fid)
                raise
            if user.uid in link.roots:  # attached meanwhile
                drop(link, fid)
                return link.roots[user.uid]
            if len(link.roots) >= USERS:
                old = link.roots.pop(next(iter(link.roots)))
                drop(link, old)
            link.roots[user.uid] = fid
        return fid

    # ------------------------------------------------------------ connecting

    async def connect(self) -> Link:
        """Connect to the first address that serves. Raises Disconnected, or the refusal of the mount."""
        return await trio.to_thread.run_sync(self._connect, abandon_on_cancel=True)

    def _connect(self) -> Link:
        dial = partial(connection.connect, self.address, user=self._user, timeout=CONNECT_S, token=self._token)
        try:
            try:
                client = dial(aname=MARK, dialect=Dialect.LINUX, msize=limits.MSIZE_MOST)
            except MqfsError as error:
                if type(error) is not Disconnected:  # 9P2000.L has only numbers: plain 9P has the reason
                    dial().close()
                raise
        except TimeoutError as error:
            raise Disconnected(str(error)) from None
        where = parse_address(client.where)
        self.is_per_user = isinstance(where, UnixAddress) and not self._user and os.geteuid() == 0
        return Link(client)

    async def run(self, first: Link) -> None:
        """Serve on that connection and its replacements, until `close`."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._tick)
            link = first
            while True:
                await self._serve(link)
                if self.closing:
                    return
                link = await self._reconnect()

    async def _serve(self, link: Link) -> None:
        self._attached = link
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._resume, link)
            await link.run()
            nursery.cancel_scope.cancel()
        self.link = self._attached = None
        self.down_since_s = time.monotonic()
        if not self.closing:
            log.warning("%s: connection lost: %s", link.where, link.lost)

    async def _resume(self, link: Link) -> None:
        """Open the files again, then repeat the unanswered calls."""
        left = len(self.files)
        done = trio.Event()

        def reopened(_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        for file in list(self.files):
            call: Call[None] = Call(_NoRepeat(self), partial(_reopen, file))  # type: ignore[arg-type]
            call.start(link)
            call.subscribe(reopened)
        if left:
            await done.wait()
        if link.lost:
            return
        self.link, self._impatient = link, False
        pending, self.pending = self.pending, {}
        for file in list(self.files):
            file.on_ready()
        for call in pending:
            call.start(link)

    async def _reconnect(self) -> Link:
        wait_s = RETRY_S
        while True:
            try:
                link = await self.connect()
            except MqfsError as error:
                log.debug("no connection: %s", error)
            else:
                log.warning("%s: connected again after %.1f s", link.where, time.monotonic() - self.down_since_s)
                return link
            await trio.sleep(wait_s)
            wait_s = min(wait_s * 2, RETRY_MOST_S)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            now, link = time.monotonic(), self._attached
            if self.link is None:
                if not self._impatient and now - self.down_since_s > self.patience_s:
                    self._end_patience()
                elif now - self.down_since_s > INTERRUPT_S:
                    self._end_cancelled()
            if link is not None and link.unanswered and now - link.heard_s > ASK_S:
                if now - link.heard_s > SILENT_S:
                    link.lose(f"no answer in {SILENT_S:g} s")
                else:
                    link.send_one(m.Tgetattr(0, link.machine.root, 1), lambda reply: None)

    def _end_cancelled(self) -> None:
        for call in [call for call in self.pending if call.cancelled]:
            del self.pending[call]
            is_unknown = isinstance(call, OneRequest) and call.is_unknown
            call.fail(DiskFailed("server lost, outcome of the write unknown") if is_unknown else Interrupted())

    def _end_patience(self) -> None:
        self._impatient = True
        log.error("no connection for %g s: %d calls failed", self.patience_s, len(self.pending))
        self._fail_pending(self._gone)

    def _fail_pending(self, why: Callable[[], MqfsError]) -> None:
        pending, self.pending = self.pending, {}
        for call in pending:
            call.fail(why())

    def close(self) -> None:
        """Answer all waiting calls and end the connection."""
        self.closing = True
        for file in list(self.files):
            file.on_closed()
        self._fail_pending(partial(Closed, "the mount ends"))
        if self._attached is not None:
            self._attached.lose("the mount ends")


async def _after(seconds: float, then: Callable[[], None]) -> None:
    await trio.sleep(seconds)
    then()


class _NoRepeat:
    """A stand-in for the session of a call that reopens a file. It repeats nothing: the next connection reopens all."""

    def __init__(self, session: Session) -> None:
        self.pending: dict[Any, None] = {}
        self.later, self.working = session.later, 0

    def wait_for_link(self, call: Call[Any]) -> None:
        call.resolve(None)


def _reopen(file: Any, link: Link, repeated: bool) -> Procedure[None]:
    procedure: Procedure[None] = file.reopen(link)
    return procedure


# ---------------------------------------------------------------- walks

# A walk and the requests about its target are sent together: if the walk fails, its fid does not exist, and the server
# refuses the other requests. A walk of more names than fit in a request starts from a fid that was reached before.


def near(link: Link, root: int, names: list[str]) -> Procedure[tuple[int, list[str]]]:
    """Return the fid at which the last request of a walk starts, and its names. The caller has to drop that fid, unless
    it is the root."""
    if len(names) <= limits.WALK_NAMES:
        return root, names
    fid, at = link.new_fid(), root
    while len(names) > limits.WALK_NAMES:
        (reply,) = yield [walk(at, fid, names[: limits.WALK_NAMES])]
        try:
            yield from arrive(link, at, names[: limits.WALK_NAMES], reply)
        except MqfsError:
            drop(link, fid)
            raise
        at, names = fid, names[limits.WALK_NAMES :]
    return fid, names


def walk(start: int, fid: int, names: list[str]) -> Fcall:
    return m.Twalk(0, start, fid, tuple(names))


def arrive(link: Link, start: int, names: list[str], reply: Fcall) -> Procedure[Qid | None]:
    """Return the qid of the file that a walk reached; None: its start. Raises why the walk failed."""
    qids: Any = check(reply).qids  # type: ignore[attr-defined]
    if len(qids) < len(names):
        fid, arrived = link.new_fid(), len(qids)
        replies = yield [walk(start, fid, names[:arrived]), walk(fid, fid, names[arrived : arrived + 1])]
        drop(link, fid)
        for one in replies:
            check(one)
        raise NotFound(f"no stream or group {names[arrived]!r}")
    return qids[-1] if qids else None


def drop(link: Link, fid: int) -> None:
    """Clunk a fid, which may not exist, without waiting. The server first answers its parked requests."""

    def clunked(reply: Fcall | None) -> None:
        link.clunking.discard(fid)
        if reply is not None:
            link.machine.free_fid(fid)

    link.clunking.add(fid)
    link.send_one(m.Tclunk(0, fid), clunked)
