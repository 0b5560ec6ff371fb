"""Ports for programs that cannot be given port 0, or that come back at the same one."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below those that the kernel gives to clients, so that none takes it between two starts. Each worker of pytest has its
# own, and gives each once: its program may not listen yet when the next is asked for.
_WORKER, _WORKERS = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
_OWN = range(10_000 + int(_WORKER.removeprefix("gw")), 32_000, int(_WORKERS))
_ports = itertools.cycle(random.Random().sample(_OWN, len(_OWN)))  # not seeded: other runs of pytest may be beside


def free_port() -> int:
    """One that no program listens at, and that was not given before."""
    while True:
        port = next(_ports)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
