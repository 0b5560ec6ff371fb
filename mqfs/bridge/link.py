"""The group that a bridge is a client of: calls that outlast a lost connection, and files the library has no call for.

Raises Interrupted where the bridge stops meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

from mqfs.client.backoff import Backoff
from mqfs.client.client import Client
from mqfs.client.subscription import CursorSubscription
from mqfs.client.transport.ninep import NinepTransport
from mqfs.client.types import File, read_whole
from mqfs.errors import Again, Disconnected, DiskFull, Interrupted, OverLimit, OverQuota, StreamFull
from mqfs.syntax.patterns import Words
from mqfs.syntax.quoting import split

T = TypeVar("T")

CONNECT_S = 10.0
LATER = (Again, DiskFull, OverLimit, OverQuota, StreamFull)  # the group has no room for a message now


class GroupLink:
    """A group, over one connection of 9P, which is made again where it is lost. Thread-safe."""

    def __init__(self, address: str, path: str, *, user: str, token: str, stopping: threading.Event) -> None:
        self.path, self.stopping = path.strip("/"), stopping
        self._link = NinepTransport(address, user=user, token=token, timeout=CONNECT_S, reconnect=True)
        self._client = Client(self._link, True)
        self.group = self.repeat(lambda: self._client.group(self.path))

    def repeat(self, call: Callable[[], T]) -> T:
        """The result of a call, which is repeated while the server is away, or stops."""
        try:
            return Backoff(True, self.stopping).retry(call, Disconnected, Interrupted)
        except (Disconnected, Interrupted):
            if self.stopping.is_set():
                raise Interrupted("the bridge stops") from None
            raise

    def stats(self) -> dict[str, Any]:
        return self.repeat(self.group.stats)

    def settings(self) -> dict[str, str]:
        return self.repeat(self.group.settings)

    def words(self) -> Words:
        """Of the group's patterns."""
        return Words(*split(self.settings()["words"]))

    def lines(self, file: str) -> list[str]:
        """Of a file that has an end."""
        return self.repeat(lambda: read_whole(self._link, f"{self.path}/{file}")).decode().splitlines()

    def open(self, file: str, mode: str) -> File:
        return self._link.open(f"{self.path}/{file}", mode)

    def command(self, file: str, line: str) -> None:
        """Write a command to a file."""
        with closing(self.open(file, "w")) as opened:
            opened.write(line.encode() + b"\n")

    def mkdir(self, path: str) -> None:
        self._link.mkdir(f"{self.path}/{path}")

    def connection(self) -> object:
        """The present one: another than before where the server was away. Raises Disconnected."""
        return self._link.connection()

    def follow(self, first: int) -> CursorSubscription:
        """The messages from a sequence on, also those to come. Its reads raise Disconnected."""
        return CursorSubscription(self._link, self.path, "#", start=str(first))

    def close(self) -> None:
        self._client.close()
