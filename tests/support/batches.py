"""A group with streams, and short calls to write atomic batches and transactions to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mqfs.engine.core.portions import exhaust
from mqfs.model import User, Wait
from mqfs.records import headers
from tests.support.hand import ROOT
from tests.support.queues import Queues


def frame(stream: str, body: bytes, **texts: str) -> bytes:
    """Encode a frame of `.batch`, independently of the engine."""
    name, head = stream.encode(), headers.encode(texts)
    size = 8 + len(name) + len(head) + len(body)
    return b"".join(
        (size.to_bytes(4, "little"), len(name).to_bytes(2, "little"), len(head).to_bytes(2, "little"), name, head, body)
    )


class Units(Queues):
    """A group `g` with the streams `s` and `t`, which keeps all messages."""

    def __init__(self, *lines: str, path: Path | None = None, clock: Any = None) -> None:
        super().__init__("replay all", *lines, path=path, clock=clock)
        self.stream("t")

    def batch(self, *frames: bytes, user: User = ROOT) -> Any:
        handle = self.at(".batch", os.O_WRONLY, user)
        try:
            return handle.write(b"".join(frames))
        finally:
            handle.close()

    def part(self, name: str, user: User = ROOT, mode: int = 0o755) -> Any:
        folder: Any = self.tree.find(user, "g/.txn")
        return self.tree.mkdir(user, folder, name, mode)

    def stage(self, part: str, stream: str, *bodies: bytes, user: User = ROOT) -> None:
        """Write to a stream of a part; make the part if it is missing."""
        if part not in self.parts():
            self.part(part, user)
        handle = self.at(f".txn/{part}/{stream}", os.O_WRONLY, user)
        for body in bodies:
            assert handle.write(body) == len(body)
        handle.close()

    def say(self, command: str, user: User = ROOT) -> Any:
        """Write a command to `.txn/ctl`. Return the step if it waits, else None."""
        handle = self.at(".txn/ctl", os.O_WRONLY, user)
        try:
            step = handle.write(command.encode())
            return step if isinstance(step, Wait) else None
        finally:
            handle.close()

    def parts(self) -> list[str]:
        folder: Any = self.tree.find(ROOT, "g/.txn")
        return [node.name for node in exhaust(self.tree.entries(ROOT, folder)) if node.directory]

    def committed(self, user: User = ROOT) -> dict[str, int]:
        """Return the last committed number of each producer of a user."""
        return {name: commit.number for name, commit in self.group.state.producers.get(user.uid, {}).items()}

    def log(self) -> list[tuple[str, str]]:
        """Return (stream, body) of all kept messages, in order."""
        rows: list[dict[str, Any]] = []
        for name in self.group.streams:
            rows += self.kept(name)
        return [(row["stream"], row["body"]) for row in sorted(rows, key=lambda row: int(row["sequence"]))]
