"""A group with work queues, and short calls to use them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mqfs.engine.tree.tree import Tree
from mqfs.errors import MqfsError
from mqfs.model import User, Wait
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.hand import ROOT, Hand

BIG = 1 << 20


class Taker:
    """An open stream of a `deliver one` group, read as by a client that advances its offset with each read."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.offset = handle, 0
        self.close, self.write = handle.close, handle.write

    def read(self, count: int) -> Any:
        step = self.handle.read(count, self.offset)
        if isinstance(step, Wait):
            step.subscribe(lambda done: self._moved(done.result()))
        else:
            self._moved(step)
        return step

    def _moved(self, data: bytes) -> None:
        self.offset += len(data)

    def push_back(self, data: bytes) -> None:
        self.offset -= len(data)
        self.handle.push_back(data)


class Queues(Hand):
    """A tree with a group `g` and a stream `s` in that. With a path the store is on disk, and can be restarted."""

    on_disk: ClassVar[list[Queues]] = []  # closed at the end of the test by tests/conftest.py

    def __init__(self, *lines: str, path: Path | None = None, clock: Any = None) -> None:
        self.clock: Any = clock or ManualClock()
        self.path = path
        self.store: Any = DiskStore(str(path)) if path else MemoryStore()
        self.tree = Tree(self.store, self.clock, owner=ROOT)
        if path:
            self.on_disk.append(self)
        self.group = self.mkdir("g")
        self.ctl("sync off", *lines)
        self.stream("s")

    def restart(self, *, clean: bool = True, while_down: Any = None) -> None:
        """Open the store again; without `clean`, its state after a kill. All handles are lost. `while_down` is called
        between."""
        assert self.path is not None
        killed = self.path.with_name("killed")
        if not clean:
            shutil.copytree(self.path, killed)
        self.tree.close()
        self.store.close()
        if not clean:
            shutil.rmtree(self.path)
            killed.rename(self.path)
        if while_down is not None:
            while_down()
        self.store = DiskStore(str(self.path))
        self.tree = Tree(self.store, self.clock, owner=ROOT)
        self.group = self.tree.root.groups["g"]

    def close(self) -> None:
        self.tree.close()
        self.store.close()

    def at(self, path: str, flags: int = os.O_RDONLY, user: User = ROOT) -> Any:
        return self.tree.open(user, self.tree.find(user, f"g/{path}"), flags)

    def consumer(self, name: str = "w", *words: str) -> None:
        self.ctl(" ".join(["consumer", name, *words]))

    def worker(self, name: str = "w", *commands: str, user: User = ROOT) -> Any:
        """Open a consumer for reading and writing, and write commands to it."""
        handle = self.at(f".consumers/{name}", os.O_RDWR, user)
        for command in commands:
            say(handle, command)
        return handle

    def taker(self, name: str = "s", user: User = ROOT) -> Taker:
        return Taker(self.at(name, os.O_RDWR, user))

    def put(self, body: bytes, stream: str = "s", user: User = ROOT, **keys: Any) -> int:
        """Put a message. Return its sequence, which the next read gives."""
        handle = self.at(".put", os.O_RDWR, user)
        assert not isinstance(handle.write(json.dumps({"stream": stream, **keys}).encode() + b" " + body), Wait)
        sequence = int(handle.read(64))
        handle.close()
        return sequence

    def shows(self, path: str, user: User = ROOT) -> list[bytes]:
        """Return the messages that an open for reading only returns."""
        handle = self.at(path, os.O_RDONLY, user)
        pieces: list[bytes] = []
        while piece := handle.read(BIG, sum(map(len, pieces))):
            pieces.append(piece)
        handle.close()
        return pieces

    def kept(self, stream: str = "s") -> list[dict[str, Any]]:
        """Return the kept messages of a stream, as JSON objects."""
        handle = self.at(".cursor", os.O_RDWR)
        handle.write(f"select {stream}\nseek first\nuntil end\nformat json\n".encode())
        rows = []
        while line := handle.read(BIG):
            rows.append(json.loads(line))
        handle.close()
        return rows

    def stats(self, consumer: str = "w") -> dict[str, Any]:
        return dict(json.loads(self.text(".stats"))["consumers"][consumer])

    def row(self, stream: str = "s") -> dict[str, Any]:
        """Return the `.stats` of a stream."""
        return dict(json.loads(self.text(".stats"))["streams"][stream])

    def queue(self, stream: str = "s") -> dict[str, Any]:
        """Return the `.stats` of the default consumer of a stream."""
        return dict(self.row(stream)["consumer"])

    def errors(self, user: User = ROOT) -> list[str]:
        return [json.loads(line)["text"] for line in self.text(".errors", user).splitlines()]

    def pass_time(self, seconds: int) -> None:
        """Move the clock, with a tick of the server for each second."""
        for _ in range(seconds):
            self.clock.forward(1)
            self.tree.tick()


def say(handle: Any, line: str) -> None:
    assert handle.write(f"{line}\n".encode()) == len(line.encode()) + 1


def read(handle: Any) -> bytes:
    """Read, and assert that the read need not wait."""
    data = handle.read(BIG)
    assert not isinstance(data, Wait)
    return bytes(data)


def waits(handle: Any) -> bool:
    """Whether a read would have to wait."""
    step = handle.read(BIG)
    return isinstance(step, Wait) and step.cancel()


def drain(handle: Any, *, ack: bool = True) -> list[bytes]:
    """Read all messages that are ready, and return their bodies. `ack`: acknowledge each."""
    bodies: list[bytes] = []
    while True:
        step = handle.read(BIG)
        if isinstance(step, Wait):
            assert step.cancel()
            return bodies
        if not step:
            return bodies
        bodies.append(bytes(step))
        if ack:
            say(handle, "ack")


def told(handle: Any) -> dict[str, str]:
    """Return the lines of `info` about the last message."""
    say(handle, "info")
    text = read(handle).decode()
    assert text.endswith("\n\n")
    return dict(line.split(" ", 1) for line in text.splitlines() if line)


def refusal(handle: Any, line: str) -> MqfsError:
    """Write a line that is refused, and return the error. Asserts that the next read returns its text."""
    with pytest.raises(MqfsError) as caught:
        handle.write(f"{line}\n".encode())
    assert read(handle) == f"{caught.value}\n".encode()
    return caught.value
