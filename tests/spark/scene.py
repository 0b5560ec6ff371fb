"""A server that keeps a store, and a client of it that writes what Spark shall read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mqfs.ninep.client import connection
from mqfs.ninep.client.connection import Client
from tests.support.server import Server


class Scene:
    """A server that keeps a store, and a client of it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.address = f"unix!{folder}/9p"
        self.server = Server("--store", str(self.store), "--listen", self.address, *options, cwd=folder)
        self._client: Client | None = None

    def start(self) -> None:
        """Again, after it ended."""
        self._hang_up()
        self.server.start()

    def stop(self) -> None:
        self._hang_up()
        self.server.close()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connection.connect(self.address, msize=1 << 20)
        return self._client

    def group(self, path: str, *lines: str) -> None:
        self.client.mkdir(path)
        self.ctl(path, *(lines or ("replay all", "sync off")))

    def ctl(self, path: str, *lines: str) -> None:
        with self.client.open(f"{path}/ctl", "w") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    def write(self, path: str, *bodies: bytes) -> None:
        with self.client.open(path, "w") as file:
            for body in bodies:
                file.write(body)

    def stream(self, path: str, *bodies: bytes) -> None:
        """Make one, and write to it."""
        self.client.create(path).close()
        self.write(path, *bodies)

    def put(self, group: str, head: str, body: bytes) -> None:
        with self.client.open(f"{group}/.put", "w") as file:
            file.write(head.encode() + b" " + body)

    def stats(self, group: str) -> Any:
        with self.client.open(f"{group}/.stats") as file:
            return json.loads(b"".join(iter(lambda: file.receive(1 << 20), b"")))
