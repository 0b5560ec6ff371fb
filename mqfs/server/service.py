"""The service manager of this process, if there is one: notices to it, and the sockets that it passed.

Without one (sd_notify(3), sd_listen_fds(3)) nothing is sent, and there are no sockets. READY=1 is a datagram of its
own, so that programs that only wait for it may compare it whole.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable

from mqfs.errors import BadConfig

FIRST = 3  # the descriptor of the first passed socket
MOST_SOCKETS = 1_024
NINEP, HTTP, FQ = "9P", "HTTP", "fq"  # protocols
PASSED = {"9p": NINEP, "http": HTTP, "fq": FQ}  # FileDescriptorName of a socket: its protocol
EXTENSION_S = 60.0  # for which a start may continue after the last recovered group
EVERY_S = 1.0  # between two notices of a long start


def notify(text: str) -> None:
    """Notify the service manager, if there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + address[1:] if address[0] == "@" else address)
        sender.send(text.encode())


def watchdog_s() -> float:
    """Return the seconds within which this process has to send `WATCHDOG=1`; infinite: it need not."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or pid not in ("", str(os.getpid())):
        return math.inf
    return int(usec) / 1e6


class Notices:
    """The notices of one server beside READY=1 and STOPPING=1: progress of the start, what it serves, sign of life.

    It counts as alive while its event loop runs `tick` and the committer's thread does not hang in one job. So a disk
    that no longer answers ends the server, as a standstill of the loop does.
    """

    def __init__(
        self,
        send: Callable[[str], None] = notify,
        period_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`period_s`: the time within which WATCHDOG=1 has to be sent; None: as the environment says."""
        self._clock = clock
        self._send, self._half_s = send, (watchdog_s() if period_s is None else period_s) / 2
        self._status = ""
        self._job: int | None = None
        self._start_at = 0.0  # when the next notice of a start is due; below: of life
        self._life_at = 0.0 if math.isfinite(self._half_s) else math.inf

    def start(self, text: str) -> None:
        """Report the progress of the start as `text`, and extend its timeout."""
        if (now := self._clock()) >= self._start_at:
            self._start_at, self._status = now + EVERY_S, text
            self._send(f"STATUS={text}\nEXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}")
            self.tick(text)

    def tick(self, status: str, job: int | None = None) -> None:
        """Send status and sign of life if due; called about once a second. `job`: number of the committer's present
        job; None: it is idle."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")
        if (now := self._clock()) >= self._life_at and (job is None or job != self._job):
            self._life_at, self._job = now + self._half_s, job
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Report that options and files are being read again; READY=1 follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def passed_sockets() -> list[tuple[str, socket.socket]]:
    """Return the name and the socket of each listening socket passed to this process. Raises BadConfig.

    The variables are removed, so that no child of this process uses the sockets.
    """
    pid, count, names = (os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()):
        return []
    if not count.isdecimal() or int(count) > MOST_SOCKETS:
        raise BadConfig(f"variable LISTEN_FDS {count!r}: invalid number (expected 0 to {MOST_SOCKETS})")
    found = []
    for number, name in zip(range(int(count)), [*names.split(":"), *[""] * int(count)], strict=False):
        if name not in PASSED:
            raise BadConfig(f"socket {name!r}: unknown name (expected FileDescriptorName={', '.join(PASSED)})")
        found.append((name, _listening(name, FIRST + number)))
    return found


def _listening(name: str, descriptor: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
        sock.set_inheritable(False)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.type == socket.SOCK_STREAM
    except OSError as error:
        raise BadConfig(f"socket {name!r}: {error.strerror} (expected a descriptor as of sd_listen_fds)") from None
    if not listens:
        raise BadConfig(f"socket {name!r}: does not listen (expected ListenStream= and Accept=no)")
    return sock
