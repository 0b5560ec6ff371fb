"""Dialling: connect to an address, through TLS if it says so; of several addresses, to the first that serves.

a   |------- no answer ........      one that hangs does not hold up the next: it has a head start only
b            |- a standby            a refusal ends the head start
c              |-- attached          the first one wins, and what comes after it is closed

A client with another address asks a silent server whether it still runs, as the kernel answers for a process that is
stopped or hangs. The thread that waits for replies looks every LOOK_S, as does a thread that sends while the socket
accepts no bytes:

    last reply ---- quiet for SILENT_S ---- asked ---- as long again, and nothing moved ---- lost

The question follows everything that the client sent before. The client sees the kernel's send buffer drain. For bytes
buffered by a hop on the way, such as an ssh tunnel, it allows a second for each limits.CLIENT_LINK_BYTES.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from mqfs import limits
from mqfs.errors import Disconnected, Standby
from mqfs.net.sockets import Address, TlsAddress, UnixAddress, detect_dead_host, is_host_silent, unsent
from mqfs.net.tls import TlsMachine, client_context, explain

SILENT_S = float(limits.CLIENT_SILENT_S)
LOOK_S = SILENT_S / limits.ASKED


def set_look(sock: socket.socket, *options: int) -> None:
    """Have recv(2) or send(2) raise BlockingIOError after LOOK_S. `options`: socket.SO_RCVTIMEO, SO_SNDTIMEO."""
    whole_s = int(LOOK_S)
    for option in options:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole_s, int((LOOK_S - whole_s) * 1e6)))


def is_ready(sock: Any, event: int, most_s: float) -> bool:
    """Whether a socket has an event of poll(2) within `most_s` seconds, at most LOOK_S."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(min(most_s, LOOK_S) * 1_000 + 1 if most_s else 0))


class Quiet:
    """The time for which the other side has accepted none of the bytes in the kernel's send buffer."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._least, self._since = sock, unsent(sock), time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the buffer last shrank: a slow link drains it bit by bit."""
        now, left = time.monotonic(), unsent(self._sock)
        if left < self._least:
            self._since, self._least = now, left
        return now - self._since


def send_all(sock: socket.socket, data: bytes) -> None:
    """Send as `sendall` does. Raises ConnectionError if a socket of `set_look` accepts no byte for 2 * SILENT_S."""
    sent, quiet = 0, None
    while sent < len(data):
        try:
            sent += sock.send(memoryview(data)[sent:] if sent else data)
            quiet = None
        except BlockingIOError:  # the kernel waits until much of its buffer is free
            quiet = quiet or Quiet(sock)
            if (quiet_s := quiet.seconds()) >= 2 * SILENT_S:
                raise ConnectionError(f"takes no request for {quiet_s:.0f} s") from None


class Silence:
    """The time for which the server of a connection has been silent. One thread looks at a time."""

    def __init__(self) -> None:
        self.asks = False  # there is another address to connect to
        self.asked = False
        self.sent = 0  # bytes
        self.taken = 0  # bytes sent up to the last request that was answered
        self._moved: tuple[int, ...] = ()
        self._since = self._most_s = 0.0
        self._quiet: Quiet | None = None  # since the question

    def look(self, sock: Any, moved: tuple[int, ...], is_sending: bool) -> bool:
        """Return whether to send the question now, and then to set `asked`. Called when nothing arrived for LOOK_S or
        less.

        `moved`: changes with all that arrives, and with long requests that are sent. `is_sending`: another thread
        sends, and looks, too. Raises ConnectionError if the server counts as lost.
        """
        if is_host_silent(sock):
            raise ConnectionError("its host is silent")
        if not self.asks:
            return False
        now = time.monotonic()
        if moved != self._moved or is_sending:
            self._moved, self._since, self._quiet, self.asked = moved, now, None, False
        elif self._quiet is None or not self.asked:
            if now - self._since >= SILENT_S:
                self._quiet = Quiet(sock)
                self._most_s = SILENT_S + (self.sent - self.taken) / limits.CLIENT_LINK_BYTES
                self.asked = not is_ready(sock, select.POLLOUT, 0)  # no room: the bytes that wait are the question
                return not self.asked
        elif self._quiet.seconds() >= self._most_s:
            raise ConnectionError(f"no answer in {now - self._since:.0f} s")
        return False


# ------------------------------------------------------------ dialling


C = TypeVar("C")  # the result of dialling: it has `close`

HEAD_START_S = 0.5  # of an address, before the next one is tried, too

_dialled = WeakSet[socket.socket]()


def _close_in_child() -> None:
    """Close the parent's sockets in a child: an open copy would hide the parent's end, and hold its claims."""
    for sock in [*_dialled]:
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def dial(where: Address, timeout: float | None, *, is_alone: bool = True) -> socket.socket | TlsSocket:
    """Return a connected socket. `is_alone`: there is no other address. Raises OSError, BadConfig."""
    if isinstance(where, UnixAddress):
        sock = _connected(socket.AF_UNIX, 0, where.path, timeout)
        if not is_alone:
            set_look(sock, socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        return sock
    sock = _connected_to_host(where.host, where.port, timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        detect_dead_host(sock, limits.CLIENT_SILENT_S)
        set_look(sock, socket.SO_RCVTIMEO, *(() if is_alone else (socket.SO_SNDTIMEO,)))
        return TlsSocket(sock, where.host) if isinstance(where, TlsAddress) else sock
    except BaseException:
        sock.close()
        raise


def _connected(family: int, protocol: int, at: Any, timeout: float | None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM, protocol)
    _dialled.add(sock)  # before it connects: a child forked meanwhile has it, too
    try:
        sock.settimeout(timeout)
        sock.connect(at)
    except BaseException:
        sock.close()
        raise
    return sock


def _connected_to_host(host: str, port: int, timeout: float | None) -> socket.socket:
    """Connect as `socket.create_connection` does: to the first address that answers, each within the timeout."""
    *others, (last, _, protocol, _, at) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, number, _, other in others:
        with contextlib.suppress(OSError):
            return _connected(family, number, other, timeout)
    return _connected(last, protocol, at, timeout)


def first_of(addresses: Sequence[Address], attempt: Callable[[Address], C], timeout: float | None) -> C:
    """Return the result of the first attempt that succeeds, within `timeout` seconds. Raises an address's refusal if it
    is final, such as for a wrong token; else Disconnected with the reason of each address."""
    race = _Race(attempt)
    try:
        return race.run(addresses, None if timeout is None else time.monotonic() + timeout)
    finally:
        race.end()


class _Race(Generic[C]):
    """Attempts to connect, each on a thread of its own."""

    def __init__(self, attempt: Callable[[Address], C]) -> None:
        self._attempt = attempt
        self._outcomes: queue.SimpleQueue[tuple[Address, C | Exception]] = queue.SimpleQueue()
        self._lock, self._is_over = threading.Lock(), False

    def _try(self, where: Address) -> None:
        outcome: C | Exception
        try:
            outcome = self._attempt(where)
        except Exception as error:
            outcome = error
        with self._lock:
            if not self._is_over:
                self._outcomes.put((where, outcome))
                return
        _close(outcome)

    def run(self, addresses: Sequence[Address], deadline: float | None) -> C:
        """Return the first success. Raises as `first_of` does."""
        failed: dict[Address, Exception | None] = dict.fromkeys(addresses)
        waiting, under_way = list(dict.fromkeys(addresses)), 0
        while waiting or under_way:
            if waiting:
                threading.Thread(target=self._try, args=(waiting.pop(0),), name="mqfs-dial", daemon=True).start()
                under_way += 1
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            wait_s = left_s if not waiting else HEAD_START_S if left_s is None else min(HEAD_START_S, left_s)
            try:
                where, outcome = self._outcomes.get(timeout=wait_s)
            except queue.Empty:
                if left_s == wait_s:
                    break
                continue
            under_way -= 1
            if not isinstance(outcome, Exception):
                return outcome
            failed[where] = outcome
        raise _why(failed)

    def end(self) -> None:
        """End the race: close the connections that were made, and have later ones closed."""
        with self._lock:
            self._is_over = True
        with contextlib.suppress(queue.Empty):
            while True:
                _close(self._outcomes.get_nowait()[1])


def _close(outcome: Any) -> None:
    if not isinstance(outcome, Exception):
        outcome.close()


def _why(failed: dict[Address, Exception | None]) -> Exception:
    """Return the error for all addresses."""
    for error in failed.values():
        if error is not None and not isinstance(error, Disconnected | OSError):
            return error  # final, such as a refused token: a server that serves would refuse it, too
    texts = []
    for where, error in failed.items():
        text = error.wire_text() if isinstance(error, Standby) else str(error or "no answer")
        texts.append(text if text.startswith(str(where)) else f"{where}: {text}")
    return Disconnected("; ".join(texts))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise ConnectionError with the reason in words where TLS fails."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConnectionError(explain(error)) from None


def reason_of(error: Exception) -> str:
    """Return why a connection was lost, as a text. The OSError itself is not raised further: a command that gets EPIPE
    takes it for the end of its standard output."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


class TlsSocket:
    """The calls of a connected socket that a client uses, through TLS. A failure of TLS is a ConnectionError.

    A lock guards the machine of TLS: one thread may receive while another sends.
    """

    def __init__(self, sock: socket.socket, host: str) -> None:
        """Complete the handshake, and check the server's certificate for the host's name. Raises OSError, BadConfig."""
        self.raw = sock
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
        """Return all received bytes that can be decrypted; None if there are none yet, b"" at the end."""
        if self._early:
            data, self._early = self._early, b""
            return data
        data = self.raw.recv(size)
        if not data:
            return b""
        with self._lock, _explained():
            plain = self._machine.receive(data)
            return plain if plain or self._machine.ended else None

    def sendall(self, data: bytes) -> None:
        """Send data, after the answers of TLS to received data. Never called in two threads at once."""
        with self._lock, _explained():
            self._machine.send(data)
            encrypted = self._machine.take()
        send_all(self.raw, encrypted)

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes that `sendall` would send, for a caller that sends them in its own loop."""
        with self._lock, _explained():
            self._machine.send(data)
            return self._machine.take()

    def settimeout(self, timeout: float | None) -> None:
        self.raw.settimeout(timeout)

    def fileno(self) -> int:
        return self.raw.fileno()

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        return self.raw.getsockopt(level, name, size)

    def shutdown(self, how: int) -> None:
        """Shut down as a socket does, and announce the end first, if that does not block."""
        with contextlib.suppress(OSError), self._lock:
            self._machine.close()
            self.raw.send(self._machine.take(), socket.MSG_DONTWAIT)
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()
