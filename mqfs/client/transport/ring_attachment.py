"""The attachment of this process to a group's ring, over generations of the ring and restarts of the server.

It has the current generation and the connection that holds it. It publishes and reads no messages.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import threading
import time
import weakref
from array import array
from typing import Any

from mqfs import limits, ring
from mqfs.client.types import Link
from mqfs.client.waiting import Backoff
from mqfs.errors import Busy, Disconnected, MqfsError, NotFound, Stale, Unsupported
from mqfs.net.sockets import pid_namespace, reachable
from mqfs.ring import protocol
from mqfs.syntax.names import check_file_name
from mqfs.syntax.patterns import DOTTED, Words

LOOK_S = 0.5  # between two checks of the server
GRACE_S = 10.0  # for which a publisher waits for the next server, with `reconnect=True`
REST_S = 5.0  # for which the files are used after a refusal
ENDING_S = 5.0  # within which a generation ends, with all its messages in the log
LONGEST_PAUSE_S = 0.1  # between two attempts
READS = 1_000  # attempts to read a value while others change it


class Refused(Exception):
    """The group has no ring for this client now; `why` is the server's error."""

    def __init__(self, why: MqfsError) -> None:
        super().__init__(str(why))
        self.why = why


class Attached:
    """A generation of a group's ring, and the connection that holds it."""

    def __init__(self, handle: ring.Ring, attach_socket: AttachClient, answer: dict[str, Any]) -> None:
        self.ring, self.socket = handle, attach_socket
        self.generation: int = answer["generation"]
        self.deliver: str = answer["deliver"]
        self.ttl_ns: int = answer["ttl_ns"]
        self.words = Words(*answer.get("words", DOTTED))
        self.ephemeral: bool = (
            answer.get("ephemeral", False) and self.deliver == "all"
        )  # its server understands such messages
        self.is_replaced = False  # by another generation, or it must not be used any more
        self.publishing = threading.Lock()
        self.numbers: dict[str, int] = {}  # of streams; constant in one generation
        self.retained: dict[str, bool | None] = {}  # by stream: whether anything retained messages when last asked

    @property
    def next(self) -> int:
        """The sequence of the next message, or an earlier one. Raises Stale if the ring is corrupt."""
        for _ in range(READS):
            sequence = self.ring.next
            if sequence:
                return sequence
        raise Stale("ring is corrupt")

    def number(self, stream: str) -> int | None:
        """Ask for the number of a stream; None: it is a view. Raises NotFound, BadName, Disconnected."""
        answer = self.socket.ask({"stream": check_file_name(stream)})
        if answer.get("view"):
            return None
        number: int = answer["number"]
        self.numbers[stream], self.retained[stream] = number, answer.get("retained")
        return number

    def name(self, number: int) -> str | None:
        """Ask for the name of a stream; None: unknown number. Raises Disconnected."""
        try:
            name: str = self.socket.ask({"number": number})["stream"]
        except NotFound:
            return None
        return name


class RingAttachment:
    """The generations of one group's ring, one after the other. Thread-safe."""

    def __init__(
        self,
        link: Link,
        socket_path: str,
        name: str,
        *,
        required: bool,
        reconnect: bool | float,
        timeout: float | None,
    ) -> None:
        """`name`: the group's path, for the attach socket. `required`: a group without a ring is an error."""
        self.closed = threading.Event()
        self.now: Attached | None = None
        self.times_away = 0  # how often the connection to the server was lost
        self.reconnect = reconnect
        self._link, self._socket_path, self._name = link, socket_path, name
        self._required, self._timeout = required, timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held by the thread that attaches
        self._refused: tuple[float, MqfsError] | None = None
        self._without_socket_since = 0.0
        self._lost_socket: AttachClient | None = None  # the last one that was counted in `times_away`
        _attachments.add(self)

    def attached(self) -> Attached:
        """Return the current generation, attaching to it if needed. Raises Disconnected, and Refused, or the server's
        error instead if a ring is required."""
        with self._lock:
            self.require()
            at = self.now
            self._note_loss(at)
            if at is not None and at.ring.retired:
                at.is_replaced = True
            if at is not None and not at.is_replaced and not at.socket.is_lost:
                return at
            if at is not None and at.socket.is_lost and self.reconnect is False:
                at.is_replaced = True
                raise Disconnected(f"{self._link.label}: the server closed the connection")
            if self._refused is not None and time.monotonic() < self._refused[0]:
                raise Refused(self._refused[1])
            try:
                return self._attach()
            except Disconnected:
                raise
            except MqfsError as error:
                self.now = None
                if self._required:
                    raise
                self._refused = time.monotonic() + REST_S, error
                raise Refused(error) from None

    def _note_loss(self, at: Attached | None) -> None:
        if at is not None and at.socket.is_lost and at.socket is not self._lost_socket:
            self._lost_socket = at.socket
            self.times_away += 1

    def release_retired(self) -> bool:
        """Release a generation that has ended, as its memory is not freed before. Returns whether a generation is still
        held."""
        if self._lock.acquire(blocking=False):
            try:
                at = self.now
                if at is not None and at.ring.retired:
                    self._note_loss(at)
                    at.is_replaced, self.now = True, None
            finally:
                self._lock.release()
        return self.now is not None

    def _attach(self) -> Attached:
        """Attach to the current generation, once the one before it has ended."""
        return Backoff(ENDING_S, self.closed, longest_s=LONGEST_PAUSE_S).retry(self._attach_once, Busy, Stale)

    def _attach_once(self) -> Attached:
        """Attach to the current generation. Raises Stale, Busy while a generation ends."""
        attach_socket = self._dial()
        try:
            answer, memory = attach_socket.attach(self._name)
            now = self.now
            if now is None or now.generation != answer["generation"]:
                now = Attached(_map(memory.fileno(), answer["generation"]), attach_socket, answer)
            elif now.is_replaced:
                raise Stale("ring of the server is retired")
            else:
                now.socket.close()
                now.socket = attach_socket
            memory.close()
        except BaseException:
            attach_socket.close()
            raise
        self.now = now
        if self.closed.is_set():  # closed meanwhile
            self.close()
            self.require()
        return now

    def _dial(self) -> AttachClient:
        try:
            attach_socket = AttachClient(self._socket_path, self._timeout)
        except NoAttachSocket:
            self._link.open(".stats", "r").close()  # a starting server has its attach socket before it answers 9P
            attach_socket = self._dial_again()
        self._without_socket_since = 0.0
        return attach_socket

    def _dial_again(self) -> AttachClient:
        """Connect again. If the attach socket existed before, its server is stopping: Disconnected is raised for up to
        GRACE_S, so that callers wait for the next server; then NoAttachSocket."""
        try:
            return AttachClient(self._socket_path, self._timeout)
        except NoAttachSocket as error:
            self._without_socket_since = self._without_socket_since or time.monotonic()
            if self.now is None or time.monotonic() - self._without_socket_since > GRACE_S:
                raise
            raise Disconnected(error.detail) from None

    def require(self) -> None:
        if os.getpid() != self._pid:
            raise Disconnected("connection of the parent process (expected a new one in the child)", final=True)
        if self.closed.is_set():
            raise Disconnected("the client was closed", final=True)

    def attach_again(self) -> Attached:
        """Wait for the server, and return the current generation. Raises Refused, Disconnected."""
        limit_s = GRACE_S if self.reconnect is True else self.reconnect
        return Backoff(limit_s, self.closed, longest_s=LONGEST_PAUSE_S).retry(self.attached, Disconnected)

    def usable(self) -> Attached | None:
        """Return the generation to use now; None: use the files."""
        at = self.now
        if at is not None and not at.is_replaced:
            return at
        try:
            return self.attach_again()
        except Refused:
            return None

    def still_valid(self, at: Attached) -> bool:
        """Wait for the server, attach again, and return whether a generation is still current. Raises Disconnected."""
        try:
            return self.attach_again() is at
        except Refused:
            return False

    def close(self) -> None:
        """Close the connection, and use the ring no more: its memory outlives the connection."""
        self.closed.set()
        at = self.now
        if at is not None:
            at.is_replaced = True
            at.socket.close()


def _map(fd: int, generation: int) -> ring.Ring:
    """Map the ring of a descriptor. Raises Unsupported if this process cannot map it; it then uses the files."""
    try:
        return ring.attach(fd, generation)
    except OSError as error:
        raise Unsupported(f"ring not mapped: {error.strerror or error}") from None


# ---------------------------------------------------------------- attach socket (docs/reference/ring-protocol.md)

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_RECEIVE = (limits.RING_PACKET_BYTES,), (socket.CMSG_LEN(array("i").itemsize),), (socket.MSG_CMSG_CLOEXEC,)
_NO_SERVER = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.EPROTOTYPE)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # this process or machine lacks resources


class NoAttachSocket(Unsupported):
    """No server listens at the attach socket."""


class AttachClient:
    """A connection to the attach socket, which holds one attachment while it is open. Thread-safe."""

    def __init__(self, path: str, timeout: float | None) -> None:
        """Connect, in at most `timeout` seconds. Raises NoAttachSocket, Unsupported, Disconnected."""
        self._path = path
        self._lock = threading.Lock()
        self._memory: list[io.FileIO] = []  # the received descriptor, as a file, which can be closed twice
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._socket.settimeout(timeout)
                with reachable(path) as where:
                    self._socket.connect(where)
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            if error.errno in _NO_SERVER:
                raise NoAttachSocket(f"{path}: no server with rings ({error.strerror})") from None
            if error.errno in _SHORT:
                raise Unsupported(f"{path}: {error.strerror}") from None
            raise Disconnected(f"{path}: {error}") from None
        _open.add(self)

    def attach(self, group: str) -> tuple[dict[str, Any], io.FileIO]:
        """Attach to a group's ring. Returns its description, and its memory, which `close` closes, too. Raises the
        server's error, Unsupported, Disconnected."""
        where = {"version": protocol.VERSION, "pid_namespace": pid_namespace()}
        answer = self._exchange({"attach": group, **where})
        if len(self._memory) != 1:  # this process has no free descriptor
            raise Unsupported(f"{self._path}: no descriptor in the answer")
        return answer, self._memory[0]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer, which repeats the question. Raises the server's error, Disconnected."""
        answer = self._exchange(question)
        if any(answer.get(key) != asked for key, asked in question.items()):
            self.close()
            raise Disconnected(f"{self._path}: an answer to another question than {question}")
        return answer

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask, and receive the answer. If anything interrupts that, also Ctrl-C, the connection is closed: the next
        question would get this answer."""
        received: list[Any] = []
        with self._lock:
            try:
                with contextlib.suppress(BrokenPipeError):  # refused; the reason can still be read
                    self._socket.send(protocol.encode(question))
                # One call of C: a signal handler that raises runs after it, when `received` has the descriptor.
                received.extend(map(self._socket.recvmsg, *_RECEIVE))
                self._keep_memory(received)
            except BaseException as error:
                if not self._memory:
                    with contextlib.suppress(OSError):  # the descriptor is not that of a file
                        self._keep_memory(received)
                self.close()
                if isinstance(error, OSError):
                    raise Disconnected(f"{self._path}: {error}") from None
                raise
        data = received[0][0]
        if not data:
            raise Disconnected(f"{self._path}: the server closed the connection")
        answer = protocol.decode(data)
        if "error" in answer:
            protocol.raise_refusal(answer)
        return answer

    def _keep_memory(self, received: list[Any]) -> None:
        """Keep the received descriptors as files: all, or none if this is interrupted."""
        fds = array("i")
        for _, ancillary, _, _ in received:
            for _, _, data in ancillary:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        self._memory.extend(map(io.FileIO, fds))

    @property
    def is_lost(self) -> bool:
        """Whether this or the other end was closed."""
        fd = self._socket.fileno()
        if fd < 0:
            return True
        poll = select.poll()  # threads cannot share one
        poll.register(fd, select.POLLRDHUP)
        return any(what & _GONE for _, what in poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for an answer
        self._socket.close()
        for memory in self._memory:
            memory.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # `__init__` has failed
            self._socket.close()


_attachments: weakref.WeakSet[RingAttachment] = weakref.WeakSet()
_open: weakref.WeakSet[AttachClient] = weakref.WeakSet()


def _in_child() -> None:
    """Drop, in a forked child, the parent's rings, the locks that its threads may have held, and its connections. An
    open connection in a child would hide the parent's end from the server."""
    for attachment in list(_attachments):
        attachment.now, attachment._lock = None, threading.Lock()
    for client in list(_open):
        client._socket.close()


os.register_at_fork(after_in_child=_in_child)
