"""A 9P connection for any number of threads.

Owns the socket and the choice of the thread that receives: of those that wait for replies one receives, and hands the
others theirs; a thread alone never switches to another. A read that waits holds up no other call.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Sequence
from typing import TypeVar

from mqfs import limits
from mqfs.errors import BadFrame, Disconnected, MqfsError
from mqfs.ninep.client import connection, machine
from mqfs.ninep.client.channel import Procedure
from mqfs.ninep.codec.messages import Fcall

T = TypeVar("T")

RECEIVE_BYTES = 262_144


class Slot:
    """An unanswered request."""

    __slots__ = ("about", "done", "flushing", "reply", "tag", "wake")

    def __init__(self, tag: int, about: Slot | None = None) -> None:
        self.tag, self.about = tag, about  # `about`: the request that a flush is of
        self.reply: Fcall | None = None
        self.done = False  # answered; or flushed or lost, without a reply
        self.flushing = False
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def settle(self, reply: Fcall | None) -> None:
        self.reply, self.done = reply, True
        self.wake.put(None)


class SharedConnection:
    """An attached connection. Thread-safe."""

    def __init__(self, address: str, user: str, aname: str, timeout: float | None, token: str = "") -> None:
        self.where = address
        self._client = connection.connect(
            address, user=user, aname=aname, msize=limits.MSIZE_MOST, timeout=timeout, token=token
        )
        self._socket, self.caller = self._client.socket, self._client.caller
        self.lost = ""  # the reason
        self.dropped: list[int] = []  # fids of files that were collected, to be clunked with the next call
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the machine and the fields below
        self._sending = threading.Lock()  # requests leave in order; acquired before the other
        self._slots: dict[int, Slot] = {}
        self._followers: dict[Slot, None] = {}  # of threads that wait while another one receives
        self._receiving = False

    # ------------------------------------------------------------ ends

    def _require(self) -> None:
        if os.getpid() != self._pid:
            raise Disconnected("connection of the parent process (expected a new one in the child)", final=True)
        if self.lost:
            raise Disconnected(f"{self.where}: {self.lost}")

    def _lose(self, why: str) -> None:
        """Settle all requests without a reply. The lock is held."""
        self.lost = self.lost or why
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.settle(None)
        for slot in self._followers:
            slot.wake.put(None)

    def close(self, why: str = "the client was closed") -> None:
        with self._lock:
            self._lose(why)
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)  # wakes the thread that receives
        self._socket.close()

    @property
    def gone(self) -> bool:
        """Whether the peer has closed, noticed or not."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(self.lost) or bool(poll.poll(0))

    # ------------------------------------------------------------ requests out, replies in

    def send(self, requests: Sequence[Fcall], aborted: Slot | None = None) -> list[Slot]:
        """Send requests, or the Tflush of one, unless that is answered or being flushed: the slot of the latter is
        settled by it."""
        with self._sending:
            with self._lock:
                self._require()
                slots = [Slot(self.caller.call(request)) for request in requests]
                if aborted is not None and not (aborted.done or aborted.flushing):
                    aborted.flushing = True
                    slots.append(Slot(self.caller.flush(aborted.tag), aborted))
                self._slots.update((slot.tag, slot) for slot in slots)
                data = self.caller.take()
            try:
                self._socket.sendall(data)
            except BaseException as error:
                with self._lock:
                    self._lose(f"sending failed ({error})" if isinstance(error, OSError) else "sending was interrupted")
                if isinstance(error, OSError):
                    raise Disconnected(f"{self.where}: {self.lost}") from None
                raise
        return slots

    def wait(self, slot: Slot, deadline: float | None = None) -> Fcall | None:
        """The reply; None: the request was flushed. Raises TimeoutError, Disconnected."""
        with self._lock:
            try:
                while not slot.done:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError
                    if self._receiving:
                        self._follow(slot, left)
                    else:
                        self._lead(left)
            finally:
                if not self._receiving and self._followers:
                    next(iter(self._followers)).wake.put(None)  # another thread has to receive
            if slot.reply is None and self.lost:
                raise Disconnected(f"{self.where}: {self.lost}")
            return slot.reply

    def _follow(self, slot: Slot, left: float | None) -> None:
        self._followers[slot] = None
        self._lock.release()
        try:
            with contextlib.suppress(queue.Empty):
                slot.wake.get(timeout=left)
        finally:
            self._lock.acquire()
            del self._followers[slot]

    def _lead(self, left: float | None) -> None:
        if self.lost:
            raise Disconnected(f"{self.where}: {self.lost}")
        self._receiving = True
        self._lock.release()
        try:
            data = self._receive(left)
        finally:
            self._lock.acquire()
            self._receiving = False
        if data == b"":
            self._lose("the server closed the connection")
        elif data is not None and not self.lost:  # where sending failed meanwhile, no request is left
            self._distribute(data)

    def _receive(self, left: float | None) -> bytes | None:
        """Received bytes; b"" at the end, None after the time-out."""
        try:
            if left is not None:
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(left * 1_000 + 1):
                    return None
            return self._socket.recv(max(RECEIVE_BYTES, self.caller.missing))
        except (OSError, ValueError):
            return b""

    def _distribute(self, data: bytes) -> None:
        try:
            replies = self.caller.receive(data)
        except BadFrame as error:
            self._lose(str(error))
            return
        for tag, reply in replies:
            slot = self._slots.pop(tag)
            old = slot.about
            if old is not None and not old.done:
                self._slots.pop(old.tag, None)
                old.settle(None)
            slot.settle(reply)

    # ------------------------------------------------------------ calls

    def do(self, procedure: Procedure[T]) -> T:
        """Run a procedure."""
        while self.dropped:
            with contextlib.suppress(MqfsError):
                self._drive(self.caller.clunk(self.dropped.pop()))
        return self._drive(procedure)

    def _drive(self, procedure: Procedure[T]) -> T:
        try:
            with self._lock:
                request = next(procedure)
            while True:
                try:
                    reply = machine.expect(request, self._finish(self.send([request])[0]))
                except Disconnected:
                    raise
                except MqfsError as error:
                    with self._lock:
                        request = procedure.throw(error)
                else:
                    with self._lock:
                        request = procedure.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value

    def _finish(self, slot: Slot) -> Fcall:
        """The reply to a request; flushes it where the wait is interrupted (Ctrl-C)."""
        try:
            reply = self.wait(slot)
        except Disconnected:
            raise
        except BaseException:
            self.send([], slot)
            self.wait(slot)
            raise
        assert reply is not None
        return reply


__all__ = ["SharedConnection", "Slot"]
