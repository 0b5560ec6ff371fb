"""Ports for programs that do not accept port 0, or that use the same port again after a restart."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below the range from which the kernel assigns ports to clients, so that no client uses one between two starts. Each
# worker of pytest has its own ports, and returns each once: its program may not listen yet at the next call.
_WORKER, _WORKERS = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
_OWN = range(10_000 + int(_WORKER.removeprefix("gw")), 32_000, int(_WORKERS))
_ports = itertools.cycle(random.Random().sample(_OWN, len(_OWN)))  # not seeded: other pytests may run, too


def free_port() -> int:
    """Return a port on which no program listens, and which was not returned before."""
    while True:
        port = next(_ports)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
