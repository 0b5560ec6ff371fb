"""A replacement for `python`: it has its process forked from one that has already imported modules (forked.py).

`write` makes the program. The program asks the process that listens on a socket named after the program's folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

START_S = 300  # on a busy machine


def write(path: Path) -> Path:
    """Write a program that behaves like `python`."""
    path.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
    path.chmod(0o700)
    return path


def connect(link: socket.socket, name: str) -> None:
    """Connect to a listener, which may still be starting."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return link.connect(name)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main() -> None:
    status, ended = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        connect(link, "\0" + os.path.dirname(sys.argv[0]))
        request = json.dumps([False, sys.argv[1:], os.getcwd(), dict(os.environ)])
        socket.send_fds(link, [request.encode()], [0, 1, 2, ended])
        pid = int(link.recv(32))
    os.close(ended)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    code = int(os.read(status, 32) or 1)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
