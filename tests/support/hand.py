"""A tree over a memory store with a clock that is moved by hand, and short calls to use it."""

from __future__ import annotations

import os
from typing import Any

from mqfs.engine.tree.tree import Tree
from mqfs.model import User, Wait
from mqfs.store.memory import MemoryStore
from tests.support.clock import ManualClock

ROOT = User(0, 0)
ANNA = User(1001, 1001)
BERT = User(1002, 1002, frozenset({1001}))


def finished(tree: Tree, step: Any) -> Any:
    """Return the result of a step that may be done in portions: by the system's clock even a short one may be."""
    while isinstance(step, Wait) and not step.settled:
        tree.run_timers()
    return step.result() if isinstance(step, Wait) else step


class Hand:
    """A tree with a group `g`, used as root by default."""

    def __init__(self, *lines: str) -> None:
        self.clock = ManualClock()
        self.tree = Tree(MemoryStore(), self.clock, owner=ROOT)
        self.group = self.mkdir("g")
        self.ctl(*lines)

    def mkdir(self, name: str, user: User = ROOT, mode: int = 0o777) -> Any:
        return self.tree.mkdir(user, self.tree.root, name, mode)

    def stream(self, name: str = "s", user: User = ROOT, mode: int = 0o666) -> Any:
        return self.tree.create(user, self.group, name, mode)

    def open(self, name: str, flags: int = os.O_RDONLY, user: User = ROOT) -> Any:
        return self.tree.open(user, self.tree.walk(user, self.group, name), flags)

    def ctl(self, *lines: str, user: User = ROOT) -> None:
        handle = self.open("ctl", os.O_WRONLY, user)
        handle.write("".join(f"{line}\n" for line in lines).encode())
        handle.close()

    def write(self, name: str, *bodies: bytes, user: User = ROOT) -> None:
        handle = self.open(name, os.O_WRONLY, user)
        for body in bodies:
            assert not isinstance(handle.write(body), Wait)
        handle.close()

    def text(self, name: str, user: User = ROOT) -> str:
        handle = self.open(name, user=user)
        data = handle.read(1 << 20)
        handle.close()
        return str(data.decode())

    def cursor(self, *commands: str, user: User = ROOT) -> Any:
        handle = self.open(".cursor", os.O_RDWR, user)
        handle.write("".join(f"{line}\n" for line in commands).encode())
        return handle
