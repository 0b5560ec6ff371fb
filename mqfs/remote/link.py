"""One 9P connection in trio's loop: requests are sent without a task each, replies call a function.

`mqfs.ninep.client.connection.connect` makes and attaches the connection in a thread; from then on its socket is read
and written here. Only `run` waits.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import trio

from mqfs.errors import BadFrame, OverLimit
from mqfs.ninep.client.connection import Client
from mqfs.ninep.client.dial import TlsSocket
from mqfs.ninep.codec.messages import Fcall

log = logging.getLogger("mqfs.mount")
RECEIVE_BYTES = 256 << 10
Answer: TypeAlias = Callable[[Fcall | None], object]  # called with the reply; None: flushed, or the connection is lost


class Link:
    """One connection. `lost` is the reason of its end, else "". At the end every request is answered with None."""

    def __init__(self, client: Client) -> None:
        self.machine = client.caller
        self.where = client.where
        self._tls = client.socket if isinstance(client.socket, TlsSocket) else None
        self._socket: socket.socket = self._tls.raw if self._tls else client.socket  # type: ignore[assignment]
        self._receive = client.socket.recv
        self._socket.setblocking(False)
        self._answers: dict[int, Answer] = {}
        self._flushes: dict[int, int] = {}  # the tag of each unanswered Tflush: the tag that it flushes
        self._outgoing: deque[memoryview] = deque()
        self._writing = trio.Event()
        self.roots: dict[int, int] = {}  # the fid of each attached user
        self.clunking: set[int] = set()  # fids whose Tclunk is unanswered
        self.heard_s = time.monotonic()
        self.lost = ""

    # ------------------------------------------------------------ requests

    def send(self, requests: Sequence[tuple[Fcall, Answer]]) -> list[int]:
        """Send requests in one piece and return their tags. On a lost connection answer them with None and return no
        tags. Raises OverLimit: then none was sent."""
        if self.lost:
            _answer_all([(answer, None) for _, answer in requests])
            return []
        tags = self.machine.call_all([request for request, _ in requests])
        self._answers.update(zip(tags, (answer for _, answer in requests), strict=True))
        self._push()
        return tags

    def send_one(self, request: Fcall, answer: Answer) -> int:
        """Send one request and return its tag, for `flush`; -1: it was answered with None at once."""
        if self.lost:
            answer(None)
            return -1
        try:
            tag = self.machine.call(request)
        except OverLimit:  # answered like a cancelled request
            answer(None)
            return -1
        self._answers[tag] = answer
        self._push()
        return tag

    def flush(self, tag: int) -> None:
        """Cancel a request. It is answered with its reply if that comes all the same, else with None."""
        if tag in self._answers and tag not in self._flushes.values():
            self._flushes[self.machine.flush(tag)] = tag
            self._push()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unanswered(self) -> int:
        return len(self._answers)

    def _push(self) -> None:
        """Send the queued bytes that the socket accepts now; `run` sends the rest."""
        data = self.machine.take()
        if self._tls is not None:
            data = self._tls.encrypt(data)
        if not data:
            return
        if not self._outgoing:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self.lose(error.strerror or str(error))
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._outgoing.append(memoryview(data))
        self._writing.set()

    # ------------------------------------------------------------ replies

    def receive(self) -> bool:
        """Receive bytes and answer the requests that they reply to. Return False if there were none."""
        try:
            data = self._receive(max(RECEIVE_BYTES, self.machine.missing))
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self.lose((error.strerror if isinstance(error, OSError) else "") or str(error))
            return False
        if data is None:
            self._push()
            return True
        if not data:
            self.lose("the server closed the connection")
            return False
        self.heard_s = time.monotonic()
        try:
            replies = self.machine.receive(data)
        except BadFrame as error:
            self.lose(str(error))
            return False
        answered: list[tuple[Answer, Fcall | None]] = []
        for tag, reply in replies:
            about = self._flushes.pop(tag, None)
            answer = self._answers.pop(tag if about is None else about, None)
            if answer is not None:
                answered.append((answer, reply if about is None else None))
        _answer_all(answered)  # last: an answer may send a request under a tag just freed
        return True

    async def run(self) -> None:
        """Receive and send until the connection is lost."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            while not self.lost:
                with contextlib.suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._socket)
                for _ in range(64):
                    if self.lost or not self.receive():
                        break
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        with contextlib.suppress(trio.ClosedResourceError):
            while not self.lost:
                await self._writing.wait()
                while self._outgoing and not self.lost:
                    await trio.lowlevel.wait_writable(self._socket)
                    self._send_rest()
                self._writing = trio.Event()

    def _send_rest(self) -> None:
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing[0])
                if sent < len(self._outgoing[0]):
                    self._outgoing[0] = self._outgoing[0][sent:]
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(error.strerror or str(error))

    def lose(self, why: str) -> None:
        """End the connection, and answer every request with None."""
        if self.lost:
            return
        self.lost = why
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
        self._outgoing.clear()
        answers, self._answers = self._answers, {}
        _answer_all([(answer, None) for answer in answers.values()])

    def new_fid(self) -> int:
        """Allocate a fid. Raises OverLimit."""
        fid = self.machine.fid()
        if fid >= 60_000:
            self.machine.free_fid(fid)
            raise OverLimit("too many open files of this mount (expected at most 60000)")
        return fid


def _answer_all(answered: Iterable[tuple[Answer, Fcall | None]]) -> None:
    """Call all answers. One that fails does not keep the others from their replies."""
    for answer, reply in answered:
        try:
            answer(reply)
        except Exception:
            log.exception("answer not handled")
