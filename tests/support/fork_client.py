"""A program in the place of `python`: it has a process forked that has imported modules already (forked.py).

`write` makes the program. It asks the process of this machine that listens by the name of the program's folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

START_S = 300  # on a machine that is busy with other things


def write(path: Path) -> Path:
    """A program that does as `python` does."""
    path.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
    path.chmod(0o700)
    return path


def connect(link: socket.socket, name: str) -> None:
    """It may be about to begin."""
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
