"""The FUSE device of one mount: the last request read, and the replies to requests."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from mqfs import errors, limits
from mqfs.fuse import protocol
from mqfs.model import Step, Wait
from mqfs.quotas import UserLimits
from mqfs.serving.await_step import await_step

T = TypeVar("T")

log = logging.getLogger("mqfs.fuse")

_GONE = (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ECONNABORTED)  # the request or the mount no longer exists


class Device:
    """An open FUSE device. Each reply returns False if its request no longer exists."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.buffer = bytearray(limits.FUSE_REQUEST_BYTES)  # the last request
        self.view = memoryview(self.buffer)
        self.readv, self.write, self.writev = os.readv, os.write, os.writev  # or their traced versions

    def trace(self, line: Callable[[str], None]) -> None:
        """Call `line` for each request and each reply from now on."""

        def readv(fd: int, buffers: Any) -> int:
            size = os.readv(fd, buffers)
            line(f"-> {_show_request(self.buffer, size)}")
            return size

        def write(fd: int, reply: Any) -> int:
            line(f"<- {_show_reply(reply)}")
            return os.write(fd, reply)

        def writev(fd: int, parts: Any) -> int:
            line(f"<- {_show_reply(parts[0])}")
            return os.writev(fd, parts)

        self.readv, self.write, self.writev = readv, write, writev

    def send(self, reply: bytes | memoryview) -> bool:
        """Send a whole reply."""
        try:
            self.write(self.fd, reply)
        except OSError as error:
            return self.lost(error)
        return True

    def answer(self, unique: int, data: bytes) -> bool:
        """Reply with data."""
        try:
            self.writev(self.fd, (protocol.REPLY.pack(protocol.OUT_HEADER + len(data), 0, unique), data))
        except OSError as error:
            return self.lost(error)
        return True

    def refuse(self, unique: int, number: int) -> bool:
        """Reply with an errno; 0 reports success."""
        return self.send(protocol.REPLY.pack(protocol.OUT_HEADER, -number, unique))

    def bug(self, unique: int, what: str) -> None:
        """Reply EIO to a request that failed with an unexpected exception, and log that. Call it in the handler."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.error("%s failed: %s", what, error)
        else:
            log.exception("%s failed", what)
        self.refuse(unique, errno.EIO)

    def lost(self, error: OSError) -> bool:
        """Return False, for a reply that the device refused. Log an unexpected reason."""
        if error.errno not in _GONE:
            log.error("reply failed: %s", error)
        return False


def _show_request(buffer: bytearray, size: int) -> str:
    _, opcode, unique, node, uid, _, pid = protocol.HEADER.unpack_from(buffer)
    text = f"{protocol.NAMES.get(opcode, opcode)} {unique} node {node} uid {uid} pid {pid}"
    if opcode in (protocol.READ, protocol.WRITE):
        _, _, fh, offset, count, _, _ = protocol.HOT.unpack_from(buffer)
        return f"{text} fh {fh} offset {offset} count {count}"
    return f"{text} {size - protocol.IN_HEADER} bytes"


def _show_reply(reply: Any) -> str:
    size, number, unique = protocol.REPLY.unpack_from(reply)
    status = errno.errorcode.get(-number, str(number)) if number else f"{size - protocol.OUT_HEADER} bytes"
    return f"{unique} {status}"


# ---------------------------------------------------------------- parked requests and their interrupts


class ParkedRequest:
    """A request without a reply yet. The engine calls it with its resolved wait."""

    __slots__ = ("requests", "step", "then", "uid", "unique")

    def __init__(
        self, requests: ParkedRequests, unique: int, step: Wait[Any], then: Callable[[Any], object], uid: int | None
    ) -> None:
        self.requests, self.unique, self.step, self.then = requests, unique, step, then
        self.uid = uid  # the user charged for it; None: over the limit

    def __call__(self, step: Wait[Any]) -> None:
        device = self.requests.device
        self.requests.remove(self)
        try:
            self.then(step.result())
        except errors.MqfsError as error:
            device.refuse(self.unique, error.errno)
        except Exception:
            device.bug(self.unique, "parked request")

    def cancel(self) -> None:
        if self.step.cancel():
            self.requests.remove(self)
            self.requests.device.refuse(self.unique, errno.EINTR)

    interrupt = cancel


class Request:
    """A request with a task. It is a copy, as the next request overwrites the device's buffer."""

    __slots__ = ("body", "gid", "nodeid", "thread", "uid", "unique")

    def __init__(self, data: bytes) -> None:
        _, _, self.unique, self.nodeid, self.uid, self.gid, self.thread = protocol.HEADER.unpack_from(data)
        self.body = data[protocol.IN_HEADER :]

    def names(self, at: int = 0) -> list[bytes]:
        """Return the names from a byte of the body on."""
        return self.body[at:].split(b"\0")[:-1]


class WaitingTask:
    """The task of a request, while it waits."""

    __slots__ = ("_until", "scope", "uid", "unique")

    def __init__(self, unique: int, uid: int | None, least_s: float) -> None:
        """`least_s`: seconds from now during which an interrupt does not end it."""
        self.unique, self.uid, self.scope = unique, uid, trio.CancelScope()
        self._until = trio.current_time() + least_s

    def interrupt(self) -> None:
        self.scope.deadline = self._until

    def cancel(self) -> None:
        self.scope.cancel()


class ParkedRequests:
    """The parked requests of one mount. Each is charged to its user's limit of `waits`, or with a task of `tasks`."""

    def __init__(self, device: Device, waits: UserLimits) -> None:
        self.device, self._waits = device, waits
        self.tasks = UserLimits("opens and changes of files that wait", "FUSE_TASKS")
        self.by_unique: dict[int, ParkedRequest | WaitingTask] = {}
        self.early: dict[int, None] = {}  # requests interrupted before they were read, oldest first
        self.closing = False

    def park(self, unique: int, step: Wait[Any], then: Callable[[Any], object]) -> None:
        """Have `then` reply with the result of a step. Raises OverLimit beyond a limit if the step can be cancelled."""
        uid = _acquire(self._waits, protocol.U32.unpack_from(self.device.buffer, protocol.USER)[0], step)
        request = self.by_unique[unique] = ParkedRequest(self, unique, step, then, uid)
        step.subscribe(request)

    async def wait(self, request: Request, step: Step[T], least_s: float = 0.0) -> T:
        """Return the result of a step, in the task of a request. `least_s`: seconds during which no interrupt ends it.

        Raises Interrupted if the request was interrupted and the step cancelled, OverLimit beyond a limit if the step
        can be cancelled.
        """
        if not isinstance(step, Wait):
            return step
        if step.settled:
            return step.result()
        unique = request.unique
        uid = _acquire(self.tasks, request.uid, step, tells=True)
        task = self.by_unique[unique] = WaitingTask(unique, uid, least_s)
        if unique in self.early:
            del self.early[unique]
            task.interrupt()
        try:
            with task.scope:
                return await await_step(step)
        finally:
            self.remove(task)
        raise errors.Interrupted

    def remove(self, request: ParkedRequest | WaitingTask) -> None:
        if self.by_unique.pop(request.unique, None) is not None and request.uid is not None:
            (self._waits if isinstance(request, ParkedRequest) else self.tasks).release(request.uid)

    def interrupt(self, unique: int) -> None:
        """Cancel a request, or record its interrupt if the request was not read yet. A request that can no longer be
        cancelled is answered as if it was not interrupted."""
        request = self.by_unique.get(unique)
        if request is not None:
            request.interrupt()
        elif not self.closing:
            self.early[unique] = None
            if len(self.early) > limits.INTERRUPTS:
                del self.early[next(iter(self.early))]

    def is_interrupted(self, unique: int) -> bool:
        """Whether a request was interrupted before it was read. If so, answer it."""
        if unique not in self.early:
            return False
        del self.early[unique]
        self.device.refuse(unique, errno.EINTR)
        return True

    def close(self) -> None:
        """Cancel all requests, and from now on answer every read with end-of-file."""
        self.closing = True
        self.early[0] = None  # no request has that number; so every later read and write looks at `early`
        for request in reversed(list(self.by_unique.values())):  # none becomes the first of its queue
            request.cancel()


def _acquire(shares: UserLimits, uid: int, step: Wait[Any], *, tells: bool = False) -> int | None:
    """Charge a wait to its user. Return the user, or None over the limit.

    Raises OverLimit if a wait over the limit can be cancelled. One that cannot, and ends later as cancelled, fails with
    that error. `tells`: the cancel passes the error, which the wait may report itself; a claim would search on with it.
    """
    try:
        shares.acquire(uid)
    except errors.OverLimit as error:
        if step.cancel(error if tells else None):
            raise
        step.otherwise = error
        return None
    return uid
