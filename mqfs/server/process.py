"""The process of a server: its limits, and what it tells the service manager."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket


def raise_file_limit() -> None:
    """Every connection, bucket and open file may need a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def notify(text: str) -> None:
    """Notify the service manager, if there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + address[1:] if address[0] == "@" else address)
        sender.send(text.encode())


class Terminal:
    """The terminal that this process was started in: none under nohup, or where it has none."""

    def __init__(self) -> None:
        self._file = -1
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            with contextlib.suppress(OSError):
                self._file = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)

    def is_gone(self) -> bool:
        """Whether it was closed, which SIGHUP says, too."""
        try:
            return self._file >= 0 and not os.tcgetpgrp(self._file)
        except OSError:
            return True
