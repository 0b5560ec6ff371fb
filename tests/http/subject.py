"""The front end as the models drive it: requests through real sockets, and a clock that stands still.

One thread runs the server. Between two steps it does all there is to do: an answer that has not come by then waits.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import tempfile
import threading
from typing import Any, NamedTuple, cast

import trio
import trio.testing

from mqfs.engine.group import Group
from mqfs.engine.tree.tree import Tree
from mqfs.http.routes import TREE, Table
from mqfs.http.server import HttpServer
from mqfs.net.peer import Peer
from mqfs.quotas import Quotas
from mqfs.serving.accept import listen
from mqfs.store.api import Store
from mqfs.store.memory import MemoryStore
from tests.engine.subject import USER
from tests.models.pubsub import WAIT
from tests.support.clock import ManualClock
from tests.support.eventually import HANG_S
from tests.support.parked import parked
from tests.support.temp_store import lowered


class Reply(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


class HttpSubject:
    """Group `g` of a tree in memory, or of that store. `answers`: what came to requests that waited."""

    def __init__(self, store: Store | None = None, table: Table = TREE, quotas: Quotas | None = None) -> None:
        self.store, self._table, self._quotas = store or MemoryStore(), table, quotas
        self.clock = ManualClock()
        self.answers: list[tuple[int, Reply]] = []
        self._waiting: dict[int, tuple[socket.socket, bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="mqfs-http-")
        self._address = f"{self._folder.name}/web"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: trio.run(self._serve, clock=trio.testing.MockClock()))
        self._thread.start()
        assert self._started.wait(HANG_S)

    async def _serve(self) -> None:
        self.tree = Tree(self.store, self.clock, owner=USER, quotas=self._quotas)
        there = self.tree.root.groups.get("g")
        self.group = there or cast(Group, self.tree.mkdir(USER, self.tree.root, "g", 0o755))
        self._server, self._end = HttpServer(self.tree), trio.Event()
        self._server.add(listen(f"unix!{self._address}"), self._table)
        self._token = trio.lowlevel.current_trio_token()
        # nothing waits for a thread, or by the clock
        with lowered(NAMES_S=1 << 40, TURN_LONG_S=1 << 40, TURN_SHARED_S=-1):
            await self._serve_until_the_end()

    async def _serve_until_the_end(self) -> None:
        Peer("test", os.geteuid()).look_up()  # for ever
        async with trio.open_nursery() as nursery:
            await nursery.start(self._server.run)
            self._started.set()
            await self._end.wait()
            nursery.cancel_scope.cancel()

    # ------------------------------------------------------------ requests

    def ask(self, wait: int, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
        """The reply, or WAIT: then it comes to `answers`."""
        given = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in given.items())
        place = path.removeprefix("../") if path.startswith("../") else f"g/{path}"
        data = f"{method} /{place} HTTP/1.1\r\n{head}\r\n".encode() + body
        return trio.from_thread.run(self._ask, wait, data, method == "HEAD", trio_token=self._token)

    async def _ask(self, wait: int, data: bytes, head: bool) -> Any:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._address)
        sock.sendall(data)
        sock.setblocking(False)
        await trio.testing.wait_all_tasks_blocked()
        reply, data = self._reply(sock, b"", head)
        if reply is None:
            self._waiting[wait] = sock, data
            return WAIT
        sock.close()
        await trio.testing.wait_all_tasks_blocked()
        return reply

    def _reply(self, sock: socket.socket, data: bytes, head: bool = False) -> tuple[Reply | None, bytes]:
        try:
            while part := sock.recv(1 << 16):
                data += part
        except BlockingIOError:
            pass
        if b"\r\n\r\n" not in data:
            return None, data
        response = http.client.HTTPResponse(cast(Any, Bytes(data)), method="HEAD" if head else "GET")
        response.begin()
        try:
            return Reply(response.status, response.read(), dict(response.headers)), b""
        except http.client.IncompleteRead:
            return None, data

    def settle(self) -> None:
        """Everything that is under way has arrived."""
        trio.from_thread.run(self._settle, trio_token=self._token)

    async def _settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        for wait, (sock, before) in list(self._waiting.items()):
            reply, data = self._reply(sock, before)
            self._waiting[wait] = sock, data
            if reply is not None:
                del self._waiting[wait]
                sock.close()
                self.answers.append((wait, reply))
        await trio.testing.wait_all_tasks_blocked()

    def cancel(self, wait: int) -> None:
        """The client leaves."""
        trio.from_thread.run(self._cancel, wait, trio_token=self._token)

    async def _cancel(self, wait: int) -> None:
        self._waiting.pop(wait)[0].close()
        await trio.testing.wait_all_tasks_blocked()

    # ------------------------------------------------------------ what is no request

    def rename(self, old: str, new: str) -> None:
        """Rename a stream; the name is free."""
        self._call(lambda: self.tree.rename(USER, self.group, old, self.group, new))

    def tick(self, seconds: int) -> None:
        """Time passes, all at once."""

        def tick() -> None:
            self.tree.dirty_groups.add(self.group)
            self.clock.forward(seconds)
            self.group.unblock()
            self.tree.tick()

        self._call(tick)

    def call(self, function: Any) -> None:
        """Call it on the server's thread, and wait for what follows."""
        self._call(function)
        self.settle()

    def _call(self, function: Any) -> None:
        trio.from_thread.run_sync(function, trio_token=self._token)

    def end(self, least: int = 0, most: int = 0) -> None:
        """Stop, and check that nothing is left but handles of claims, from `least` to `most`."""
        handles, *left = self.tree.open_files.count, parked(self.tree), self.tree.waits.used
        self.abandon()
        assert least <= handles <= most
        assert left == [0, 0]

    def abandon(self) -> None:
        for sock, _ in self._waiting.values():
            sock.close()
        self._call(self._end.set)
        self._thread.join()
        self._folder.cleanup()


class Bytes:
    """What http.client takes for a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
