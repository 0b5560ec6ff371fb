"""Whether a server that says nothing is there still. A client that has another address to go to asks it.

The kernel answers for a process that is stopped or hangs. The thread that waits for replies looks every LOOK_S, that
which sends where the socket takes nothing:

    last reply ---- quiet for SILENT_S ---- asked ---- as long again, and nothing moved ---- lost

The question is behind what the client sent before it. What the kernel keeps of that is seen to become less; what a hop
on the way keeps, as an ssh tunnel does, is given a second for each limits.CLIENT_LINK_BYTES.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from typing import Any

from mqfs import limits
from mqfs.net.sockets import is_host_silent

SILENT_S = float(limits.CLIENT_SILENT_S)
LOOK_S = SILENT_S / limits.ASKED


def set_look(sock: socket.socket, *options: int) -> None:
    """Have recv(2) or send(2) end with BlockingIOError after LOOK_S; `options`: socket.SO_RCVTIMEO, SO_SNDTIMEO."""
    whole_s = int(LOOK_S)
    for option in options:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole_s, int((LOOK_S - whole_s) * 1e6)))


def is_ready(sock: Any, event: int, most_s: float) -> bool:
    """Whether a socket has an event of poll(2), within `most_s` seconds, or LOOK_S."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(min(most_s, LOOK_S) * 1_000 + 1 if most_s else 0))


def unsent(sock: Any) -> int:
    """Bytes that the other side has not acknowledged, over TCP, or has not read."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), "little")


class Quiet:
    """For how long the other side has taken none of the bytes that the kernel keeps for it."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._least, self._since = sock, unsent(sock), time.monotonic()

    def seconds(self) -> float:
        """A slow link takes them bit by bit."""
        now, left = time.monotonic(), unsent(self._sock)
        if left < self._least:
            self._since, self._least = now, left
        return now - self._since


def send_all(sock: socket.socket, data: bytes) -> None:
    """As `sendall`. Raises ConnectionError where a socket of `set_look` takes nothing for 2 * SILENT_S."""
    sent, quiet = 0, None
    while sent < len(data):
        try:
            sent += sock.send(memoryview(data)[sent:] if sent else data)
            quiet = None
        except BlockingIOError:  # the kernel waits for much room
            quiet = quiet or Quiet(sock)
            if (quiet_s := quiet.seconds()) >= 2 * SILENT_S:
                raise ConnectionError(f"takes no request for {quiet_s:.0f} s") from None


class Silence:
    """How long the server of a connection has been silent. One thread looks at a time."""

    def __init__(self) -> None:
        self.asks = False  # there is another address to go to
        self.asked = False
        self.sent = 0  # bytes
        self.taken = 0  # of them, up to the last request that was answered
        self._moved: tuple[int, ...] = ()
        self._since = self._most_s = 0.0
        self._quiet: Quiet | None = None  # since the question

    def look(self, sock: Any, moved: tuple[int, ...], is_sending: bool) -> bool:
        """Nothing has come for LOOK_S, or less: whether to ask now, and to set `asked`. `moved`: changes with all
        that comes, and with long requests that leave. `is_sending`: a thread does, which looks, too. Raises
        ConnectionError where the server counts as gone."""
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
                self.asked = not is_ready(sock, select.POLLOUT, 0)  # then what waits there is the question
                return not self.asked
        elif self._quiet.seconds() >= self._most_s:
            raise ConnectionError(f"no answer in {now - self._since:.0f} s")
        return False
