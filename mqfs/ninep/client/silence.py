"""Whether a server that says nothing is there still. A client that has another address to go to asks it.

The kernel answers for a process that is stopped or hangs. The thread that waits for replies looks every LOOK_S, that
which sends where the socket takes nothing:

    last reply ---- quiet for SILENT_S ---- asked ---- as long again, and nothing moved ---- lost
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


def send_all(sock: socket.socket, data: bytes) -> None:
    """As `sendall`. Raises ConnectionError where a socket of `set_look` takes nothing for 2 * SILENT_S."""
    sent, quiet_since, least = 0, 0.0, 0
    while sent < len(data):
        try:
            sent += sock.send(memoryview(data)[sent:] if sent else data)
            quiet_since = 0.0
        except BlockingIOError:
            now, left = time.monotonic(), unsent(sock)
            if not quiet_since or left < least:  # the kernel waits for much room, which a slow link makes bit by bit
                quiet_since, least = now, left
            elif now - quiet_since >= 2 * SILENT_S:
                raise ConnectionError(f"takes no request for {now - quiet_since:.0f} s") from None


class Silence:
    """How long the server of a connection has been silent. One thread looks at a time."""

    def __init__(self) -> None:
        self.asks = False  # there is another address to go to
        self._moved: tuple[int, ...] = ()
        self._since = self._asked_at = 0.0
        self._least = 0  # unsent bytes, of those before the question

    def look(self, sock: Any, moved: tuple[int, ...], is_sending: bool) -> bool:
        """Nothing has come for LOOK_S, or less: whether to ask now. `moved`: changes with all that comes, and with long
        requests that leave. `is_sending`: a thread does, which looks, too. Raises ConnectionError where the server
        counts as gone."""
        if is_host_silent(sock):
            raise ConnectionError("its host is silent")
        if not self.asks:
            return False
        now = time.monotonic()
        if moved != self._moved or is_sending:
            self._moved, self._since, self._asked_at = moved, now, 0.0
        elif not self._asked_at:
            if now - self._since >= SILENT_S:
                self._asked_at, self._least = now, unsent(sock)
                return is_ready(sock, select.POLLOUT, 0)  # else that is the question
        elif (left := unsent(sock)) < self._least:  # a slow link: the question is behind a long request
            self._asked_at, self._least = now, left
        elif now - self._asked_at >= SILENT_S:
            raise ConnectionError(f"no answer in {now - self._since:.0f} s")
        return False
