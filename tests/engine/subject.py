"""The engine as the model test drives it: one group of a real tree. Other faces offer the same calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, cast

from mqfs.engine.nodes import META_FILES, Meta
from mqfs.engine.tree.tree import Tree
from mqfs.errors import MqfsError
from mqfs.model import User, Wait
from mqfs.store.api import Store
from tests.models.pubsub import WAIT
from tests.support.clock import ManualClock
from tests.support.parked import parked

USER = User(uid=0, gid=0)


class TreeSubject:
    """Group `g` of a tree over some store."""

    def __init__(self, store: Store) -> None:
        self.clock = ManualClock()
        self.store = store
        self.tree = Tree(store, self.clock, owner=USER)
        self.group = cast(Any, self.tree.mkdir(USER, self.tree.root, "g", 0o755))
        self.answers: list[tuple[int, Any]] = []
        self.waits: dict[int, Wait[Any]] = {}
        self.handles: dict[str, Any] = {}
        self.offsets: dict[str, int] = {}
        self.ctl_handle = self.tree.open(USER, Meta(self.group, "ctl"), os.O_RDWR)
        self.ctl("sync off")

    def _try(self, call: Callable[[], Any], wait: int | None = None, done: Callable[[Any], None] | None = None) -> Any:
        try:
            step = call()
        except MqfsError as error:
            return type(error).__name__
        if not isinstance(step, Wait):
            if done:
                done(step)
            return step
        assert wait is not None
        self.waits[wait] = step

        def settled(step: Wait[Any]) -> None:
            del self.waits[wait]
            try:
                value = step.result()
                if done:
                    done(value)
            except MqfsError as error:
                value = type(error).__name__
            self.answers.append((wait, value))

        step.subscribe(settled)
        return WAIT

    def create(self, name: str) -> Any:
        got = self._try(lambda: self.tree.create(USER, self.group, name, 0o644))
        return got if isinstance(got, str) else None

    def remove(self, name: str) -> Any:
        return self._try(lambda: self.tree.unlink(USER, self.group, name))

    def rename(self, old: str, new: str) -> Any:
        return self._try(lambda: self.tree.rename(USER, self.group, old, self.group, new))

    def ctl(self, *lines: str) -> Any:
        got = self._try(lambda: self.ctl_handle.write("".join(f"{line}\n" for line in lines).encode()))
        if isinstance(got, str):
            self.ctl_handle.read(4096)  # why it was refused
        return got if isinstance(got, str) else None

    def tick(self, seconds: float) -> None:
        self.clock.forward(seconds)
        self.tree.dirty_groups.add(self.group)
        self.group.unblock()
        self.tree.tick()

    def open(self, key: str, name: str, flags: int) -> Any:
        meta = {"order": "order", "cursor": ".cursor"}.get(name, name)
        node = Meta(self.group, meta) if meta in META_FILES else self.group.streams.get(meta)
        if node is None:
            return "NotFound"
        got = self._try(lambda: self.tree.open(USER, node, flags))
        if isinstance(got, str):
            return got
        self.handles[key], self.offsets[key] = got, 0
        return None

    def close(self, key: str) -> None:
        self.handles.pop(key).close()

    def read(self, wait: int, key: str, count: int) -> Any:
        def done(data: bytes) -> None:
            self.offsets[key] += len(data)

        return self._try(lambda: self.handles[key].read(count, self.offsets[key]), wait, done)

    def write(self, wait: int, key: str, body: bytes) -> Any:
        return self._try(lambda: self.handles[key].write(body), wait)

    def put(self, wait: int, text: bytes) -> Any:
        """One write to `.put`."""
        if (put := self.handles.get(".put")) is None:
            put = self.handles[".put"] = self.tree.open(USER, Meta(self.group, ".put"), os.O_WRONLY)
        return self._try(lambda: put.write(text), wait)

    def command(self, key: str, line: str) -> Any:
        got = self._try(lambda: self.handles[key].write(f"{line}\n".encode()))
        return got if isinstance(got, str) else None

    def cancel(self, wait: int) -> bool:
        if not self.waits[wait].cancel():
            return False
        del self.waits[wait]
        return True

    def ready(self, key: str) -> bool:
        return bool(self.handles[key].readable)

    def restart(self, maker: Callable[[str], Store], path: str, clean: bool) -> None:
        """A new server over the same store; without `clean`, over what a kill of the server leaves of it."""
        self.ctl_handle.close()
        if (put := self.handles.pop(".put", None)) is not None:
            put.close()
        killed = f"{path}.killed"
        if not clean:
            shutil.copytree(path, killed)
        self.tree.close()
        self.store.close()
        if not clean:
            shutil.rmtree(path)
            os.rename(killed, path)
        self.store = maker(path)
        self.tree = Tree(self.store, self.clock, owner=USER)
        self.group = self.tree.root.groups["g"]
        self.ctl_handle = self.tree.open(USER, Meta(self.group, "ctl"), os.O_RDWR)

    def settle(self) -> None:
        """Everything that is under way has arrived."""

    def end(self) -> None:
        for key in list(self.handles):
            self.close(key)
        for name in list(self.group.streams):
            self.remove(name)  # an unfinished line may wait for room, with no writer behind it
        self.ctl_handle.close()
        assert self.tree.open_files.count == 0
        assert parked(self.tree) == 0
        self.tree.close()
        self.store.close()
