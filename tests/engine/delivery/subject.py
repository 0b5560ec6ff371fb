"""The engine as the queue model drives it: one group of a real tree, directly or through a 9P connection."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from mqfs.engine.tree.tree import Tree
from mqfs.ninep.client.machine import Procedure
from mqfs.state.acks import AckState
from mqfs.store.api import Store
from tests.engine.nine import NineSubject
from tests.engine.subject import USER, TreeSubject
from tests.support.clock import SECOND

YEAR = 31_556_952 * SECOND
FLAGS = {"writer": os.O_WRONLY, "taker": os.O_RDWR, "worker": os.O_RDWR}


def path_of(name: str, kind: str) -> str:
    return f".consumers/{name}" if kind == "worker" else name


def rows_of(data: bytes) -> list[tuple[int, str, bytes, dict[str, str]]]:
    """(sequence, stream, body, headers) of messages in `format json`."""
    rows = [json.loads(line) for line in data.splitlines()]
    return [(row["sequence"], row["stream"], row["body"].encode(), row.get("headers", {})) for row in rows]


def progress_of(tree: Tree, name: str) -> AckState:
    """What that consumer of group `g` has acknowledged."""
    found: Any = tree.find(USER, f"g/.consumers/{name}")
    progress: AckState = found.state.progress
    return progress


class QueueSubject(TreeSubject):
    """Group `g` of a tree over some store."""

    def __init__(self, store: Store, deliver: str) -> None:
        super().__init__(store)
        self.ctl(f"deliver {deliver}")
        self.put_handle: Any = self.handle_of(".put", os.O_RDWR)

    def handle_of(self, path: str, flags: int) -> Any:
        return self.tree.open(USER, self.tree.find(USER, f"g/{path}"), flags)

    def everything(self, path: str, flags: int = os.O_RDONLY, *commands: str) -> list[bytes]:
        handle = self.handle_of(path, flags)
        for command in commands:
            handle.write(f"{command}\n".encode())
        pieces: list[bytes] = []
        while piece := handle.read(1 << 20, sum(map(len, pieces))):
            pieces.append(piece)
        handle.close()
        return pieces

    def open(self, key: str, name: str, kind: Any) -> Any:
        got = self._try(lambda: self.handle_of(path_of(name, kind), FLAGS[kind]))
        if isinstance(got, str):
            return got
        self.handles[key], self.offsets[key] = got, 0
        return None

    def put(self, wait: int, text: bytes) -> Any:
        return self._try(lambda: self.put_handle.write(text), wait)

    def put_answer(self) -> bytes:
        return bytes(self.put_handle.read(4096))

    def touch(self, name: str) -> Any:
        folder: Any = self.tree.find(USER, "g/.consumers")
        got = self._try(lambda: self.tree.create(USER, folder, name, 0o666))
        return got if isinstance(got, str) else None

    def unlink(self, name: str) -> Any:
        folder: Any = self.tree.find(USER, "g/.consumers")
        return self._try(lambda: self.tree.unlink(USER, folder, name))

    def push_back(self, key: str, data: bytes) -> None:
        self.offsets[key] -= len(data)
        self.handles[key].push_back(data)

    def tick(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.forward(1)
            self.tree.tick()

    def jump(self, years: int) -> None:
        self.clock.wall += years * YEAR

    def restart(self, maker: Callable[[str], Store], path: str, clean: bool) -> None:
        if clean:
            self.put_handle.close()
        super().restart(maker, path, clean)
        self.handles.clear()
        self.put_handle = self.handle_of(".put", os.O_RDWR)

    def end(self) -> None:
        self.put_handle.close()
        super().end()


class QueueNine(NineSubject):
    """The same over a 9P connection."""

    def __init__(self, deliver: str) -> None:
        super().__init__()
        self.ctl(f"deliver {deliver}")
        self.put_channel = self.do(self.caller.open("g/.put", os.O_RDWR))

    def everything(self, path: str, flags: int = os.O_RDONLY, *commands: str) -> list[bytes]:
        channel = self.do(self.caller.open(f"g/{path}", flags))
        for command in commands:
            self.do(channel.write(f"{command}\n".encode()))
        pieces: list[bytes] = []
        while piece := self.do(channel.read(1 << 16)):
            pieces.append(piece)
        self.do(self.caller.clunk(channel.fid))
        return pieces

    def open(self, key: str, name: str, kind: Any) -> Any:
        return super().open(key, path_of(name, kind), FLAGS[kind])

    def put(self, wait: int, text: bytes) -> Any:
        self.handles["put"] = self.put_channel
        try:
            return self.write(wait, "put", text)
        finally:
            del self.handles["put"]

    def put_answer(self) -> bytes:
        return bytes(self.do(self.put_channel.read(4096)))

    def touch(self, name: str) -> Any:
        return self.try_(self._touch(name))

    def _touch(self, name: str) -> Procedure[None]:
        channel = yield from self.caller.create(f"g/.consumers/{name}", os.O_RDWR)
        yield from self.caller.clunk(channel.fid)

    def unlink(self, name: str) -> Any:
        return self.try_(self.caller.remove(f"g/.consumers/{name}"))

    def tick(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.forward(1)
            self.tree.tick()

    def jump(self, years: int) -> None:
        self.clock.wall += years * YEAR

    def end(self) -> None:
        self.do(self.caller.clunk(self.put_channel.fid))
        super().end()
