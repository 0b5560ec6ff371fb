"""A program in the place of `python`: it has a process forked that has imported modules already (forked.py).

`write` makes the program. It asks the process that listens at `socket` in the program's folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path


def write(path: Path) -> Path:
    """A program that does as `python` does."""
    path.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
    path.chmod(0o700)
    return path


def main() -> None:
    status, ended = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
        request = json.dumps([False, sys.argv[1:], os.getcwd(), dict(os.environ)])
        socket.send_fds(link, [request.encode()], [0, 1, 2, ended])
        pid = int(link.recv(32))
    os.close(ended)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    code = int(os.read(status, 32) or 1)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
