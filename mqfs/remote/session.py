"""The connection to a server that may end: it is replaced, and what was not answered is asked again.

Every call is a `Wait`. One that a lost connection left without an answer waits here, in the order of asking. After the
next attach the open files are opened again first, then the calls are repeated. A call is made so that this is harmless:

    call -- request --> server
              |  connection lost: the call waits here for `patience`, then it fails with EIO
              +-- attach, open files again -- request, `repeated` --> server

Nothing here knows a file or a name: that is tree.py's and files.py's. An open file has `reopen`, a procedure that keeps
why it could not be opened, `on_ready`, called once all files are open again, and `on_closed`, when the mount ends.
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
ASK_S, SILENT_S = 5.0, 15.0  # of a server that owes answers: it is asked for one, then it counts as lost
WRITTEN_BYTES = 256 << 20  # of unanswered writes
USERS = 1_024  # attached at once on a connection
REST_MS = 1  # that tasks of the mount may wait for


class Closed(MqfsError):
    """The mount ends."""


class ServerStopsError(Exception):
    """An answer that only says that its server stops: the request is for the next connection."""


class Call(Wait[T]):
    """A call that is repeated on the next connection where one was lost before its answer."""

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
        """`make`: the procedure on a connection; with True it was tried before, with an unknown outcome."""
        super().__init__(Call._cancel_call)  # type: ignore[arg-type]
        self._session, self._make = session, make
        self._attempt, self.repeated, self.cancelled = 0, False, False
        session.working += 1
        self.link: Link | None = None

    def start(self, link: Link) -> None:
        """Begin, or begin again, on a connection."""
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
        """After a pause."""
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
        """A call on names is short, and programs do not expect that a signal ends it: it is cancelled only in a pause,
        or where there is no connection for INTERRUPT_S. One that was not begun is cancelled at once where it is not by
        a signal: its user has too many that wait."""
        call.cancelled = True
        if call.otherwise is None or call.repeated or call not in call._session.pending:
            return False
        del call._session.pending[call]
        call._session.working -= 1
        return True


class OneRequest(Wait[T]):
    """As `Call`, of one request: reads and writes."""

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
        """`make`: the request, or the result without one. `finish`: the result of the reply; `recover`: that of an
        error. `held`: the bytes that it keeps in memory. `is_short`: a signal does not end it; `is_once`: not where a
        server may have done it, as its program would do it again. Raises OverLimit."""
        super().__init__(OneRequest._cancel_request)  # type: ignore[arg-type]
        self._session, self._make, self._finish, self._recover = session, make, finish, recover
        self.link: Link | None = None
        self.repeated = self.cancelled = False
        self.is_unknown = False  # whether a server that is gone may have done what is to be done once
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
            if self.cancelled and not self._is_short:  # its flush was lost with the link before
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
            if self._fid in self.link.clunking:  # not the server ended this one, we did: the file has another fid
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
        """What a server that is gone may have done is not ended as if it was not: the next server says, or
        `_end_cancelled`."""
        if not (call._is_short or call.is_unknown) and call._session.pending.pop(call, False) is None:
            call._let_go()
            return True
        call.cancelled = True
        if not call._is_short and call.link is not None and not call.link.lost:
            call.link.flush(call._tag)
        return False


class CommandRequest(OneRequest[T]):
    """One of commands: a server that was left without an answer is waited for as a disk is."""

    __slots__ = ("undo",)
    is_prompt = True
    undo: Callable[[BaseException], None]  # called with the error where it fails, with Interrupted if it is cancelled

    def fail(self, error: BaseException) -> None:
        self.undo(error)
        super().fail(error)

    def cancel(self, otherwise: BaseException | None = None) -> bool:
        if not super().cancel(otherwise):
            return False
        self.undo(Interrupted())
        return True


class Session:
    """The present connection to the first address that serves, and what waits for the next one."""

    def __init__(self, address: str, *, patience_s: float, user: str = "", token: str = "") -> None:
        self.address, self.patience_s = address, patience_s
        self._user, self._token = user, token
        self.link: Link | None = None
        self._attached: Link | None = None  # the same, and before it: while the files are opened again
        self.pending: dict[Any, None] = {}  # calls that wait for a connection, in the order of asking
        self.files: dict[Any, None] = {}
        self.down_since_s = time.monotonic()
        self.is_per_user = False  # every user attaches as itself
        self.closing = self._impatient = False
        self._held = 0  # bytes of unanswered writes
        self.working = 0  # calls that are not answered: tasks wait for them
        self._poll, self._poll_of = select.poll(), None  # type: select.poll, Link | None
        self._nursery: trio.Nursery | None = None

    # ------------------------------------------------------------ calls

    def hold(self, size: int) -> None:
        """So many more bytes are kept for unanswered writes. Raises OverLimit."""
        if size > 0 and self._held + size > WRITTEN_BYTES:
            raise OverLimit(f"unanswered writes of {self._held} bytes (expected at most {WRITTEN_BYTES} of a mount)")
        self._held += size

    def call(self, make: Callable[[Link, bool], Procedure[T]]) -> Call[T]:
        """Perform a procedure, and again where its connection is lost."""
        return self.begin(Call(self, make))

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        """Call after a pause."""
        if self._nursery is None:
            then()
        else:
            self._nursery.start_soon(_after, seconds, then)

    def begin(self, call: C) -> C:
        """Start a call now, or with the next connection: it fails where there is none for too long."""
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
        """Take what the server has answered by now; False: nothing."""
        link = self.link
        return link is not None and not link.lost and link.receive()

    def rest(self, device: int) -> bool:
        """Sleep until a request or an answer comes, for a moment at most: on a busy machine a process that yields is
        the last to run again, and one that is woken the next. False: a task may wait for its turn."""
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
        """The fid of the root as a user; None: as the mount itself. Raises Denied."""
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
        """A connection to the first address that serves. Raises Disconnected, or what the mount was refused with."""
        return await trio.to_thread.run_sync(self._connect, abandon_on_cancel=True)

    def _connect(self) -> Link:
        dial = partial(connection.connect, self.address, user=self._user, timeout=CONNECT_S, token=self._token)
        try:
            try:
                client = dial(aname=MARK, dialect=Dialect.LINUX, msize=limits.MSIZE_MOST)
            except MqfsError as error:
                if type(error) is not Disconnected:  # 9P2000.L has numbers only: plain 9P says why
                    dial().close()
                raise
        except TimeoutError as error:
            raise Disconnected(str(error)) from None
        where = parse_address(client.where)
        self.is_per_user = isinstance(where, UnixAddress) and not self._user and os.geteuid() == 0
        return Link(client)

    async def run(self, first: Link) -> None:
        """Serve with that connection and those that replace it, for ever."""
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
        """Open the files again, then repeat what was not answered."""
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
        """Answer all that waits; the connection ends."""
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
    """In place of a session, for opening again: the next connection does it again."""

    def __init__(self, session: Session) -> None:
        self.pending: dict[Any, None] = {}
        self.later, self.working = session.later, 0

    def wait_for_link(self, call: Call[Any]) -> None:
        call.resolve(None)


def _reopen(file: Any, link: Link, repeated: bool) -> Procedure[None]:
    procedure: Procedure[None] = file.reopen(link)
    return procedure


# ---------------------------------------------------------------- walks

# A walk and what is asked of its end leave together: where it does not arrive, its fid is none, and the server refuses
# the rest. A walk of more names than one request has begins from a fid of its own, which was reached before.


def near(link: Link, root: int, names: list[str]) -> Procedure[tuple[int, list[str]]]:
    """The fid from which the last request of a walk begins, and its names. Another than the root is to be dropped."""
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
    """The number of the file that a walk came to; None: of its beginning. Raises why it did not arrive."""
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
    """Clunk a fid, which may be none, without waiting. The server answers its parked requests before that."""

    def clunked(reply: Fcall | None) -> None:
        link.clunking.discard(fid)
        if reply is not None:
            link.machine.free_fid(fid)

    link.clunking.add(fid)
    link.send_one(m.Tclunk(0, fid), clunked)
