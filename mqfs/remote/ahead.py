"""The reads of a file that claims nothing: some messages are requested before they are read."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mqfs.errors import Interrupted, MqfsError, NotFound, OverLimit, Stale
from mqfs.model import Step, Wait
from mqfs.ninep.client.machine import check
from mqfs.ninep.codec import messages as m
from mqfs.ninep.server.resumable import POSITION, READABLE
from mqfs.remote.channels import read_settings
from mqfs.remote.link import Link
from mqfs.remote.session import OneRequest, Procedure

if TYPE_CHECKING:
    from mqfs.remote.files import OpenFile

T = TypeVar("T")
AHEAD, AHEAD_BYTES = 32, 256 << 10  # messages that are requested ahead, and about their bytes
AGE_S = 0.1  # messages read ahead that are older are requested again


def open_state(fid: int, *, change: bool = False) -> m.Tread:
    """Return the request for the STATE of an open file: the present one, or `change`: that after its next change."""
    return m.Tread(0, fid, int(change), 0)


class Arrival(NamedTuple):
    """A message, or an error, that arrived before it was read. `before`: the position before it; None: unknown."""

    data: bytes | MqfsError
    before: int | None
    came_s: float


class ReadAhead:
    """The reads of a file that claims nothing: some messages are requested before they are read.

    Answers arrive in the order of the requests, so a file has one inbox. If a reader gives up, its request stays, and
    the message is the next reader's.

    Messages in the inbox may be removed at the server meanwhile: by `ttl`, `depth`, `clear` or `drop`. Under `replay
    all` they are requested again when they are older than AGE_S. Under another `replay` the server keeps for a reader
    only messages that it has not sent to it. So in a group with a `ttl` or a `depth` no message is requested ahead,
    except by a poll.
    """

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.inbox: deque[Arrival] = deque()
        self.inbox_bytes = 0
        self.asked: dict[object, int] = {}  # unanswered requests, and their tags
        self.window = 1
        self.is_ahead: bool | None = None  # whether to request ahead; None: the settings were not read yet
        self.keeps_all = False  # whether the group then had `replay all`
        self._after_error = False  # the last answer was an error: its position is unknown
        self._is_ending = False  # an end-of-file is being verified
        self.waiting: OrderedDict[Wait[bytes], tuple[int, int]] = OrderedDict()  # reads: count, offset
        self.notify: Callable[[], None] | None = None

    def read(self, count: int, offset: int) -> Step[bytes]:
        file = self.file
        if not self.waiting:
            if (rest := file.rest(count, offset)) is not None:
                return rest
            if self._is_outdated():
                return self._renewed(partial(self.read, count, offset))
            if self.inbox:
                data = self._take(count, offset)
                if len(self.inbox) + len(self.asked) <= self.window // 2:
                    self._widen()
                    if self.is_ahead:
                        with contextlib.suppress(OverLimit):  # then the next read sends the requests
                            self._ask()
                return data
        if file.failed is not None:
            return file.after_failure()
        wait: Wait[bytes] = Wait(self._cancel)
        self.waiting[wait] = count, offset
        try:
            self._ask()
        except OverLimit:
            del self.waiting[wait]
            raise
        return wait

    def _take(self, count: int, offset: int) -> bytes:
        data = self.inbox.popleft().data
        if isinstance(data, MqfsError):
            raise data
        self.inbox_bytes -= len(data)
        return self.file.last.first(data, count, offset)

    # ------------------------------------------------------------ how much is asked for ahead

    def _widen(self) -> None:
        """Request more messages ahead, if the group's settings permit."""
        if self.is_ahead:
            self.window = min(self.window * 2, AHEAD)
        elif self.is_ahead is None:
            self.is_ahead = False
            self.file.session.call(self._learn)

    def _learn(self, link: Link, repeated: bool) -> Procedure[None]:
        settings: dict[str, str] = {}
        with contextlib.suppress(MqfsError):  # a consumer has none, and not everybody may read `ctl`
            settings = yield from read_settings(self.file.tree, self.file.node, link)
        self.keeps_all = settings.get("replay") == "all"
        self.is_ahead = self.keeps_all or settings.get("ttl") == settings.get("depth") == "0"

    def _is_outdated(self) -> bool:
        """Whether the first message of the inbox is too old. Never without a server, needed to read it again."""
        link = self.file.link
        if not self.keeps_all or not self.inbox or link is None or link.lost:
            return False
        first = self.inbox[0]
        return first.before is not None and time.monotonic() - first.came_s > AGE_S

    def _renewed(self, then: Callable[[], Step[T]]) -> Wait[T]:
        """Read the settings again, empty the inbox if it is still outdated, and return the result of `then`."""
        learning = self.file.session.call(self._learn)
        is_cancelled = False

        def cancel(wait: Wait[T]) -> bool:
            nonlocal is_cancelled
            is_cancelled = True
            learning.cancel()
            return False

        def learned(done: Wait[None]) -> None:
            try:
                done.result()
                if self._is_outdated():
                    self._drop()
                step = then()
            except MqfsError as error:
                whole.fail(error)
                return
            if is_cancelled and isinstance(step, Wait) and step.cancel():
                whole.fail(Interrupted())
            else:
                whole.follow(step)

        whole: Wait[T] = Wait(cancel)
        learning.subscribe(learned)
        return whole

    def _drop(self) -> None:
        """Empty the inbox. The next request starts at the position before its first message."""
        file, link = self.file, self.file.link
        asked, self.asked = self.asked, {}
        if link is not None and not link.lost:
            for tag in asked.values():
                link.flush(tag)
        assert self.inbox[0].before is not None
        file.position = file.resume = max(self.inbox[0].before, 1)
        self.inbox.clear()
        self.inbox_bytes, self.window, self._after_error = 0, 1, False

    def _ask(self) -> None:
        """Send requests to fill the window, at least one per waiting reader. Raises OverLimit, with none sent."""
        file = self.file
        link = file.link
        if link is None or link.lost:
            return
        wanted = self.window if self.inbox_bytes < AHEAD_BYTES else 1
        missing = max(wanted, len(self.waiting)) - len(self.inbox) - len(self.asked)
        if missing <= 0:
            return
        names, resume = [object() for _ in range(missing)], file.resume
        try:
            tags = link.send([(file.next_request(), partial(self._answered, name)) for name in names])
        except OverLimit:
            file.resume = resume
            raise
        self.asked.update(zip(names, tags, strict=True))

    def _answered(self, name: object, reply: Any) -> None:
        file = self.file
        if reply is None or name not in self.asked:
            return  # `on_ready` or `_drop` has it requested again
        del self.asked[name]
        try:
            check(reply)
        except MqfsError as error:
            self._put(error)
            return
        data: bytes = reply.data
        if len(data) == POSITION.size and POSITION.unpack(data)[0] <= file.position:  # an EOF marker has a sequence
            if self._is_ending:
                return  # one answer stands for all
            self._is_ending = True
            step = file.verify_end(lambda: b"again")
            if isinstance(step, Wait):
                step.subscribe(self._on_end)
            else:
                self._is_ending = False
                self._put(step)
            return
        before = file.position
        (file.position,) = POSITION.unpack_from(data)
        size = len(data) - POSITION.size
        self._put(data[POSITION.size :], before)
        if size * self.window > AHEAD_BYTES:
            self.window = max(AHEAD_BYTES // size, 1)

    def _on_end(self, wait: Wait[bytes]) -> None:
        """Record an end-of-file, unless its server only stopped: then `on_ready` has asked the next server."""
        self._is_ending = False
        try:
            data = wait.result()
        except MqfsError as error:
            self._put(error)
        else:
            if not data:
                self._put(b"")

    def _put(self, data: bytes | MqfsError, before: int | None = None) -> None:
        """Pass an answer to the oldest waiting reader, or keep it. `before`: the position before a message."""
        if before is None:
            before = self.file.position
        if self._after_error:
            before = None
        self._after_error = isinstance(data, MqfsError)
        if self.waiting:
            wait, (count, offset) = self.waiting.popitem(last=False)
            if isinstance(data, MqfsError):
                wait.fail(data)
            else:
                wait.resolve(self.file.last.first(data, count, offset))
                self._widen()
            return
        self.inbox.append(Arrival(data, before, time.monotonic()))
        self.inbox_bytes += 0 if isinstance(data, MqfsError) else len(data)
        if (notify := self.notify) is not None:
            self.notify = None
            notify()

    def _cancel(self, wait: Wait[bytes]) -> bool:
        """Cancel at once without a connection. Else send a request and give up at its answer: messages that were there
        before it have arrived by then."""
        link = self.file.link
        if link is None or link.lost:
            self.waiting.pop(wait, None)
            return True
        self._await_answer(link, wait)
        return False

    def _await_answer(self, link: Link, wait: Wait[bytes]) -> None:
        link.send_one(open_state(self.file.fid), lambda reply: self._give_up(link, wait))

    def _give_up(self, link: Link, wait: Wait[bytes]) -> None:
        if self._is_ending and wait in self.waiting and not link.lost:  # an end-of-file is being verified
            self._await_answer(link, wait)
        elif self.waiting.pop(wait, None) is not None:
            wait.fail(Interrupted())

    def poll(self, notify: Callable[[], None] | None) -> Step[int]:
        if notify is not None:
            self.notify = notify
        if self._is_outdated():
            return self._renewed(partial(self.poll, None))
        self._ask()
        if self.inbox or self.file.failed is not None:
            return READABLE
        file = self.file
        call: OneRequest[int] = OneRequest(
            file.session,
            lambda call: open_state(file.require_fid()),
            lambda reply: READABLE if self.inbox else 0,
            is_short=True,
        )
        return file.session.begin(call)

    def on_ready(self) -> None:
        """Send requests again after the file was opened again, or end the reads if it could not be."""
        self.asked = {}
        if self.file.failed is not None:
            self.end(self.file.failed)
        elif self.waiting or self.notify is not None:
            try:
                self._ask()
            except OverLimit as error:
                self.end(error)

    def end(self, why: MqfsError | None) -> None:
        """Answer all waiting reads: with end-of-file, or with the error why the file could not be opened again."""
        if (notify := self.notify) is not None:
            self.notify = None
            notify()
        while self.waiting:
            wait, _ = self.waiting.popitem(last=False)
            if why is None or isinstance(why, NotFound | Stale):
                wait.resolve(b"")
            else:
                wait.fail(why)
