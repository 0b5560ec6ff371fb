"""A server's inside in this process: store, rings and tree; what other threads ask of it is done when the test says so.

Clients that have attached; and a kill, after which the rings are held as a keeper would.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable
from typing import Any, ClassVar

from mqfs import ring
from mqfs.clock import SystemClock
from mqfs.engine.group import Group
from mqfs.engine.tree.tree import Tree
from mqfs.model import User, Wait
from mqfs.ring.server.registry import Attachment, RingRegistry
from mqfs.store.api import Store
from mqfs.store.disk import Disk
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.store.script import PATH
from tests.support.eventually import eventually

ME = User(os.geteuid(), os.getegid(), frozenset(), os.getpid(), "test")


class Keeper:
    """Keeps the rings' descriptors in this process: what the real one does is tests/ring/server/test_keeper.py's."""

    rings: ClassVar[dict[tuple[int, int], int]] = {}

    def __init__(self, path: str) -> None:
        self.path = path

    @staticmethod
    def held(path: str) -> dict[tuple[int, int], int]:
        return {name: os.dup(fd) for name, fd in Keeper.rings.items()}

    def keep(self, group: int, generation: int, fd: int) -> None:
        Keeper.rings[group, generation] = os.dup(fd)

    def drop(self, group: int, generation: int) -> None:
        fd = Keeper.rings.pop((group, generation), -1)
        if fd >= 0:
            os.close(fd)

    def ensure_alive(self) -> None:
        pass

    def quit(self) -> None:
        for name in list(Keeper.rings):
            self.drop(*name)


class Client:
    """A process that has attached; it is in ours."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.ring = ring.attach(attachment.fileno(), attachment.generation)

    def number(self, stream: str) -> int:
        number = self.attachment.number(stream)
        assert number is not None
        return number


class Rig:
    """`disk`: one that lies, or what `path` has; neither: memory. `replica`: the store has one, which never follows."""

    def __init__(
        self, *lines: str, disk: Disk | None = None, path: str = "", streams: str = "s t", replica: bool = False
    ) -> None:
        self.posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.disk = disk
        self.store: Store
        if disk is not None:
            self.store = DiskStore(PATH, disk=disk, replica=(lambda: None) if replica else None)
        else:
            self.store = DiskStore(path, self.posts.put) if path else MemoryStore()
        self.rings = RingRegistry(self.store, self.posts.put)
        self.tree = Tree(self.store, SystemClock(), owner=ME, prepare=self.rings.resume)
        if "g" not in self.tree.root.groups:
            self.tree.mkdir(ME, self.tree.root, "g", 0o777)
            self.until(lambda: "g" in self.tree.root.groups)
            for name in streams.split():
                self.create(name)
            if lines:
                self.ctl(*lines)
        self.run()

    @property
    def group(self) -> Group:
        return self.tree.root.groups["g"]

    @property
    def own(self) -> Any:
        """The group's ring, and who uses it; None where it has none."""
        return self.rings._rings.get(self.group)

    # ------------------------------------------------------------ the engine's thread

    def run(self) -> None:
        """What other threads asked for so far."""
        while True:
            try:
                call = self.posts.get_nowait()
            except queue.Empty:
                return
            call()

    def until(self, true: Callable[[], Any]) -> None:
        """Run until that is true, or fail."""
        eventually(true, pause=self._run_next)

    def _run_next(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self.posts.get(timeout=seconds)()

    def pump(self) -> None:
        """Take what is in the ring now, whether its thread has noticed or not."""
        if self.own is not None:
            self.own.ring_log.pump()
        self.run()

    def tick(self) -> None:
        self.tree.tick()
        self.rings.tick()
        self.run()

    def result(self, step: Any) -> Any:
        """What a call comes to."""
        if isinstance(step, Wait):
            self.until(lambda: step.settled)
            return step.result()
        return step

    # ------------------------------------------------------------ files

    def open(self, name: str, flags: int = os.O_RDONLY) -> Any:
        return self.tree.open(ME, self.tree.find(ME, f"g/{name}"), flags)

    def write(self, name: str, *bodies: bytes) -> None:
        handle = self.open(name, os.O_WRONLY)
        try:
            for body in bodies:
                self.result(handle.write(body))
        finally:
            handle.close()

    def ctl(self, *lines: str) -> None:
        self.write("ctl", "".join(f"{line}\n" for line in lines).encode())

    def create(self, name: str) -> None:
        self.result(self.tree.create(ME, self.group, name, 0o666))

    def cursor(self, *commands: str) -> Any:
        handle = self.open(".cursor", os.O_RDWR)
        handle.write("".join(f"{line}\n" for line in commands).encode())
        return handle

    def log(self) -> list[tuple[int, str, bytes]]:
        """(sequence, stream, body) of all that the log has, of streams that are there."""
        rows, bucket, at = [], self.group.log.bucket, 0
        while (record := bucket.reader.scan(at)) is not None:
            at = record.sequence + 1
            stream = self.group.numbers.get(record.stream)
            if stream is not None and record.kind == 1:
                rows.append((record.sequence, stream.name, record.body))
        return rows

    # ------------------------------------------------------------ clients

    def attach(self) -> Client:
        return Client(self.rings.attach(ME, "g"))

    def kill(self) -> None:
        """The process is gone; nothing of it is written, and what it had locked is free."""
        for own in [*self.rings._rings.values(), *self.rings._ending.values()]:
            assert own.follower is not None
            own.follower._stopped.set()
            own.follower._again.release()
            own.ring_log.intake.close()
        self.rings._rings.clear()

    def stop(self) -> None:
        self.rings.close()
        self.run()
        self.tree.close()
        self.run()
        self.store.close()
