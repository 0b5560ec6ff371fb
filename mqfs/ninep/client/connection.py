"""A blocking 9P client, for one thread at a time.

Owns the socket; machine.py has the protocol.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Protocol, TypeVar

from mqfs import limits
from mqfs.errors import BadRequest, Disconnected, MqfsError
from mqfs.model import Stat
from mqfs.net.address import Address, TlsAddress, UnixAddress, explain_failure, parse_address
from mqfs.net.certificates import client_context
from mqfs.net.tls import TlsMachine, explain
from mqfs.ninep.client.channel import Channel, Procedure
from mqfs.ninep.client.machine import ClientMachine, expect
from mqfs.ninep.codec.dialect import Dialect
from mqfs.ninep.codec.messages import Fcall

T = TypeVar("T")

RECEIVE_BYTES = 65_536
WINDOW = 64  # procedures under way at once: enough to keep a server busy
MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY, "r+": os.O_RDWR}


def flags_of(mode: str) -> int:
    """The flags of open(2) for "r", "w" or "r+" ("b" may follow)."""
    plain = mode.replace("b", "")
    if plain not in MODES:
        raise BadRequest(f"invalid open mode {mode!r} (expected {', '.join(MODES)})")
    return MODES[plain]


class Socket(Protocol):
    """The calls of a connected socket that a client makes; over TLS a TlsSocket has them."""

    def recv(self, size: int, /) -> bytes | None:
        """Received bytes; None: none that are complete yet; b"": the end."""

    def sendall(self, data: bytes, /) -> None: ...
    def settimeout(self, timeout: float | None, /) -> None: ...
    def fileno(self) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


def connect(
    address: Address | str,
    *,
    user: str = "",
    aname: str = "",
    dialect: Dialect = Dialect.PLAIN,
    msize: int = limits.MSIZE_DEFAULT,
    timeout: float | None = None,
    token: str = "",
) -> Client:
    """Connect and attach to the tree at an address. `timeout`: of connecting, in seconds. `token`: the secret that
    identifies a client over TCP or TLS. Raises BadAddress, BadConfig, TimeoutError, the server's errors, and
    Disconnected where none answers."""
    where = parse_address(address) if isinstance(address, str) else address
    try:
        sock = _dial(where, timeout)
    except OSError as error:
        raise Disconnected(explain_failure(where, error)) from None
    client = Client(sock, ClientMachine(dialect, msize))
    try:
        private = isinstance(where, TlsAddress) or os.environ.get("MQFS_PLAIN_TOKEN") == "yes"
        token = "" if isinstance(where, UnixAddress) else token
        client.do(client.caller.connect(user, aname, token, private=private))
    except BaseException as error:
        client.close()
        if isinstance(error, Disconnected):  # by TLS: it refused our certificate, perhaps
            raise Disconnected(f"{where}: {error.detail}") from None
        raise
    sock.settimeout(None)
    return client


def _dial(where: Address, timeout: float | None) -> Socket:
    if isinstance(where, UnixAddress):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(where.path)
        except OSError:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((where.host, where.port), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not isinstance(where, TlsAddress):
        return sock
    # merged  # here, so that other clients need no ssl

    try:
        return TlsSocket(sock, where.host)
    except BaseException:
        sock.close()
        raise


class Client:
    """An attached connection, from `connect`."""

    def __init__(self, sock: Socket, machine: ClientMachine) -> None:
        self.socket, self.caller = sock, machine
        self._tickets: dict[int, int] = {}  # the request of each tag in use; tags are reused at once
        self._replies: dict[int, Fcall] = {}  # by ticket, until they are asked for
        self._sent = 0
        self._dropped: list[int] = []  # fids of files that were collected, to be clunked with the next call

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # ------------------------------------------------------------ calls

    def drop(self, fid: int) -> None:
        """Clunk the fid of a collected file with the next call: this may be in the middle of one."""
        self._dropped.append(fid)

    def do(self, procedure: Procedure[T]) -> T:
        """Run a procedure."""
        self._clunk_dropped()
        return self._drive(procedure)

    def _clunk_dropped(self) -> None:
        while self._dropped:
            with contextlib.suppress(MqfsError):
                self._drive(self.caller.clunk(self._dropped.pop()))

    def _drive(self, procedure: Procedure[T]) -> T:
        try:
            request = next(procedure)
            while True:
                try:
                    reply = expect(request, self._reply(self._send(request)))
                except Disconnected:
                    raise
                except MqfsError as error:
                    request = procedure.throw(error)
                else:
                    request = procedure.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value

    def _send(self, request: Fcall) -> int:
        return self._sent_as(self.caller.call(request))

    def _sent_as(self, tag: int) -> int:
        """Send the queued requests; a ticket for the reply to a tag."""
        self._sent += 1
        self._tickets[tag] = self._sent
        try:
            self.socket.sendall(self.caller.take())
        except OSError as error:
            raise _disconnected(error) from None
        return self._tickets[tag]

    def begin(self, request: Fcall) -> int:
        """Send a request without waiting; a ticket for `end`."""
        self._clunk_dropped()
        return self._send(request)

    def end(self, request: Fcall, ticket: int, timeout: float | None = None) -> Fcall:
        """The reply to a request of `begin`. Raises the error it carries, TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return expect(request, self._reply(ticket, deadline))

    def _reply(self, ticket: int, deadline: float | None = None) -> Fcall:
        """The reply to a request. Raises TimeoutError, Disconnected."""
        while ticket not in self._replies:
            if deadline is not None:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.000_001))
            try:
                data = self.socket.recv(max(RECEIVE_BYTES, self.caller.missing))
            except OSError as error:
                raise _disconnected(error) from None
            finally:
                if deadline is not None:
                    self.socket.settimeout(None)
            if data is None:
                continue
            if not data:
                raise Disconnected("the server closed the connection")
            for tag, reply in self.caller.receive(data):
                self._replies[self._tickets.pop(tag)] = reply
        return self._replies.pop(ticket)

    def together(self, procedures: Iterable[Procedure[T]]) -> list[T | MqfsError]:
        """The result or the error of each procedure. Up to WINDOW of them run at once, in any order."""
        self._clunk_dropped()
        results: dict[int, T | MqfsError] = {}
        waiting: deque[tuple[int, Procedure[T], Fcall, int]] = deque()

        def advance(number: int, procedure: Procedure[T], step: Callable[[], Fcall]) -> None:
            try:
                request = step()
            except StopIteration as done:
                results[number] = done.value
            except MqfsError as error:
                results[number] = error
            else:
                waiting.append((number, procedure, request, self._send(request)))

        left = enumerate(procedures)
        while True:
            for number, procedure in islice(left, WINDOW - len(waiting)):
                advance(number, procedure, partial(next, procedure))
            if not waiting:
                return [results[number] for number in sorted(results)]
            number, procedure, request, ticket = waiting.popleft()
            try:
                reply = expect(request, self._reply(ticket))
            except Disconnected:
                raise
            except MqfsError as error:
                advance(number, procedure, partial(procedure.throw, error))
            else:
                advance(number, procedure, partial(procedure.send, reply))

    def read(self, channel: Channel, count: int, timeout: float | None = None) -> bytes:
        """One read. On TimeoutError or Ctrl-C it is flushed; a message that arrives meanwhile is returned."""
        self._clunk_dropped()
        deadline = None if timeout is None else time.monotonic() + timeout
        procedure = channel.read(count)
        try:
            request = next(procedure)
            while True:
                ticket = self._send(request)
                try:
                    reply = self._reply(ticket, deadline)
                except (TimeoutError, KeyboardInterrupt):
                    self._flush(channel, ticket)
                    if channel.kept is None:
                        raise
                    return channel.take_kept(count)
                request = procedure.send(expect(request, reply))
        except StopIteration as done:
            data: bytes = done.value
            return data

    def _flush(self, channel: Channel, ticket: int) -> None:
        tag = next((tag for tag, other in self._tickets.items() if other == ticket), None)
        if tag is not None:  # else it is answered
            self._reply(self._sent_as(self.caller.flush(tag)))
            self._tickets.pop(tag, None)
        late = self._replies.pop(ticket, None)
        if late is not None:
            channel.keep(late)

    # ------------------------------------------------------------ files

    def open(self, path: str, mode: str = "r", *, nonblocking: bool = False) -> File:
        return File(self, self.do(self.caller.open(path, flags_of(mode), nonblocking=nonblocking)), mode)

    def create(self, path: str, mode: str = "w", permissions: int = 0o666) -> File:
        return File(self, self.do(self.caller.create(path, flags_of(mode), permissions)), mode)

    def mkdir(self, path: str, permissions: int = 0o777) -> None:
        self.do(self.caller.mkdir(path, permissions))

    def remove(self, path: str) -> None:
        self.do(self.caller.remove(path))

    def rename(self, path: str, name: str) -> None:
        """Rename in the same group."""
        self.do(self.caller.rename(path, name))

    def chmod(self, path: str, permissions: int) -> None:
        self.do(self.caller.chmod(path, permissions))

    def stat(self, path: str) -> Stat:
        return self.do(self.caller.stat(path))

    def list(self, path: str = "") -> list[str]:
        return self.do(self.caller.names(path))


def _disconnected(error: OSError) -> Exception:
    """Never an error of the system: EPIPE of a command line means its standard output. But for our own time-out, which
    has no number: it ends no connection."""
    is_ours = isinstance(error, TimeoutError) and error.errno is None
    return error if is_ours else Disconnected(error.strerror or str(error))


class File(io.RawIOBase):
    """An open file: each read is a message or a part of one, each write a message."""

    def __init__(self, client: Client, channel: Channel, mode: str) -> None:
        super().__init__()
        self._client, self.channel, self._flags = client, channel, flags_of(mode)

    def readable(self) -> bool:
        return self._flags != os.O_WRONLY

    def writable(self) -> bool:
        return self._flags != os.O_RDONLY

    def receive(self, count: int = limits.MESSAGE_BYTES, timeout: float | None = None) -> bytes:
        """One message, after at most `timeout` seconds. Raises TimeoutError."""
        return self._client.read(self.channel, count, timeout)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write one message. Raises TooLong."""
        return self._client.do(self.channel.write(bytes(data)))

    def close(self) -> None:
        if not self.closed:
            try:
                with contextlib.suppress(Disconnected):
                    if self._client.socket.fileno() >= 0:
                        self._client.do(self._client.caller.clunk(self.channel.fid))
            finally:
                super().close()

    def __del__(self) -> None:
        if not self.closed:
            self._client.drop(self.channel.fid)
            super().close()


# ------------------------------------------------------------ tls socket

# The socket of a client over TLS.
#
# Owns the handshake and the lock of the machine: one thread may receive while another sends.


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises ConnectionError with the reason in words where TLS fails."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConnectionError(explain(error)) from None


class TlsSocket:
    """The calls of a connected socket that a client makes, through TLS. A failure of TLS is a ConnectionError."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        """Complete the handshake, and check that the server's certificate has that name. Raises OSError, BadConfig."""
        self._socket = sock
        self._machine = machine = TlsMachine(client_context("9p"), host)
        self._lock = threading.Lock()
        self._early = b""
        machine.shake_hands()
        while not machine.ready:
            sock.sendall(machine.take())
            data = sock.recv(65_536)
            if not data:
                raise ConnectionError("closed by the server in the TLS handshake (expected a TLS server)")
            try:
                with _explained():
                    self._early = machine.receive(data)
            except ConnectionError:
                with contextlib.suppress(OSError):
                    sock.sendall(machine.take())  # the alert: the server's log then has the reason
                raise
        sock.sendall(machine.take())

    def recv(self, size: int) -> bytes | None:
        """Received bytes, all there are; None: none that can be decrypted yet; b"": the end."""
        if self._early:
            data, self._early = self._early, b""
            return data
        data = self._socket.recv(size)
        if not data:
            return b""
        with self._lock, _explained():
            plain = self._machine.receive(data)
            return plain if plain or self._machine.ended else None

    def sendall(self, data: bytes) -> None:
        """Send, behind the answers of TLS to what was received. Never in two threads at once."""
        with self._lock, _explained():
            self._machine.send(data)
            encrypted = self._machine.take()
        self._socket.sendall(encrypted)

    def settimeout(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        """As of a socket; announces the end first, if that does not block."""
        with contextlib.suppress(OSError), self._lock:
            self._machine.close()
            self._socket.send(self._machine.take(), socket.MSG_DONTWAIT)
        self._socket.shutdown(how)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        self._socket.close()


__all__ = ["Client", "File", "TlsSocket", "connect"]
