"""The reads of a file that takes nothing: some messages are asked for before they are wanted."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mqfs.errors import Interrupted, MqfsError, NotFound, OverLimit, Stale
from mqfs.model import Step, Wait
from mqfs.ninep.client.machine import check
from mqfs.ninep.codec import messages as m
from mqfs.ninep.server.resumable import POSITION, READABLE
from mqfs.remote.link import Link
from mqfs.remote.session import OneRequest

if TYPE_CHECKING:
    from mqfs.remote.files import OpenFile

AHEAD, AHEAD_BYTES = 32, 256 << 10  # messages that a reader asks for ahead, and about their bytes


def open_state(fid: int, *, change: bool = False) -> m.Tread:
    """The request for the STATE of an open file, now or after its next change."""
    return m.Tread(0, fid, int(change), 0)


class ReadAhead:
    """The reads of a file that takes nothing: some messages are asked for before they are wanted.

    Their order is that of the requests, so a file has one inbox. A reader that gives up leaves its request: what comes
    is the next reader's.
    """

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.inbox: deque[bytes | MqfsError] = deque()
        self.inbox_bytes = 0
        self.asked = 0  # unanswered requests
        self.window = 1
        self._is_ending = False  # whether an end of file is being verified
        self.waiting: OrderedDict[Wait[bytes], tuple[int, int]] = OrderedDict()  # reads: count, offset
        self.notify: Callable[[], None] | None = None

    def read(self, count: int, offset: int) -> Step[bytes]:
        file = self.file
        if not self.waiting:
            if (rest := file.rest(count, offset)) is not None:
                return rest
            if self.inbox:
                data = self._take(count, offset)
                if len(self.inbox) + self.asked <= self.window // 2:
                    self.window = min(self.window * 2, AHEAD)
                    with contextlib.suppress(OverLimit):  # then the next read asks
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
        data = self.inbox.popleft()
        if isinstance(data, MqfsError):
            raise data
        self.inbox_bytes -= len(data)
        return self.file.last.first(data, count, offset)

    def _ask(self) -> None:
        """Ask for so much that the window is full, one message at least for each reader that waits. Raises OverLimit:
        then nothing was asked."""
        file = self.file
        link = file.link
        if link is None or link.lost:
            return
        wanted = self.window if self.inbox_bytes < AHEAD_BYTES else 1
        missing = max(wanted, len(self.waiting)) - len(self.inbox) - self.asked
        if missing <= 0:
            return
        answer, resume = partial(self._answered, link), file.resume
        try:
            link.send([(file.next_request(), answer) for _ in range(missing)])
        except OverLimit:
            file.resume = resume
            raise
        self.asked += missing

    def _answered(self, link: Link, reply: Any) -> None:
        file = self.file
        if reply is None or link is not file.link:
            return  # `on_ready` asks again
        self.asked -= 1
        try:
            check(reply)
        except MqfsError as error:
            self._put(error)
            return
        data: bytes = reply.data
        if len(data) == POSITION.size and POSITION.unpack(data)[0] <= file.position:  # no end mark: that has a sequence
            if self._is_ending:
                return  # one answer says it for all
            self._is_ending = True
            step = file.verify_end(lambda: b"again")
            if isinstance(step, Wait):
                step.subscribe(self._on_end)
            else:
                self._is_ending = False
                self._put(step)
            return
        (file.position,) = POSITION.unpack_from(data)
        size = len(data) - POSITION.size
        self._put(data[POSITION.size :])
        if size * self.window > AHEAD_BYTES:
            self.window = max(AHEAD_BYTES // size, 1)

    def _on_end(self, wait: Wait[bytes]) -> None:
        """End-of-file, unless its server stopped: then `on_ready` has asked the next one."""
        self._is_ending = False
        try:
            data = wait.result()
        except MqfsError as error:
            self._put(error)
        else:
            if not data:
                self._put(b"")

    def _put(self, data: bytes | MqfsError) -> None:
        """Give the oldest reader that waits what came, or keep it."""
        if self.waiting:
            wait, (count, offset) = self.waiting.popitem(last=False)
            if isinstance(data, MqfsError):
                wait.fail(data)
            else:
                wait.resolve(self.file.last.first(data, count, offset))
                self.window = min(self.window * 2, AHEAD)
            return
        self.inbox.append(data)
        self.inbox_bytes += 0 if isinstance(data, MqfsError) else len(data)
        if (notify := self.notify) is not None:
            self.notify = None
            notify()

    def _cancel(self, wait: Wait[bytes]) -> bool:
        """At once without a connection; else after an answer to something: what was there by now has come then."""
        link = self.file.link
        if link is None or link.lost:
            self.waiting.pop(wait, None)
            return True
        link.send_one(open_state(self.file.fid), lambda reply: self._give_up(wait))
        return False

    def _give_up(self, wait: Wait[bytes]) -> None:
        if self.waiting.pop(wait, None) is not None:
            wait.fail(Interrupted())

    def poll(self, notify: Callable[[], None] | None) -> Step[int]:
        if notify is not None:
            self.notify = notify
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
        file.session.begin(call)
        return call

    def on_ready(self) -> None:
        """The file is open again, or could not be."""
        self.asked = 0
        if self.file.failed is not None:
            self.end(self.file.failed)
        elif self.waiting or self.notify is not None:
            try:
                self._ask()
            except OverLimit as error:
                self.end(error)

    def end(self, why: MqfsError | None) -> None:
        """Answer all that wait: with end-of-file, or why the file could not be opened again."""
        if (notify := self.notify) is not None:
            self.notify = None
            notify()
        while self.waiting:
            wait, _ = self.waiting.popitem(last=False)
            if why is None or isinstance(why, NotFound | Stale):
                wait.resolve(b"")
            else:
                wait.fail(why)
