"""Ports for programs that cannot be given port 0, or that come back at the same one."""

from __future__ import annotations

import random
import socket

_OWN = range(10_000, 32_000)  # below those that the kernel gives to clients, so that none takes it between two starts
_random = random.Random()  # not seeded as the tests are: workers run beside one another


def free_port() -> int:
    """One that no program listens at."""
    while True:
        port = _random.choice(_OWN)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
