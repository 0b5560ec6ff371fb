"""How many requests of one user are answered between two turns of another, by front ends where many may come at once.

Counted, not measured in seconds. The other user is a queue of fairness.py; the one with many has real sockets.
"""

from __future__ import annotations

import os
import pwd
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from mqfs import limits, ring
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.fq import codec
from mqfs.fq.server import FqServer
from mqfs.http.server import HttpServer
from mqfs.model import User
from mqfs.net import identity
from mqfs.net.sockets import UnixAddress
from mqfs.net.tokens import Tokens
from mqfs.ring import protocol
from mqfs.ring.server import attach_socket
from mqfs.ring.server.registry import RingRegistry
from mqfs.serving.accept import listen
from mqfs.serving.await_step import post_to_loop
from mqfs.serving.fairness import Fairness, FairQueue
from mqfs.store.memory import MemoryStore
from tests.support.eventually import HANG_S, PATIENCE
from tests.support.server import short_folder
from tests.support.tokens import OTHER, SECRET, line_of

ME = User(os.geteuid(), os.getegid())
TURNS = 100  # of the other user
FIRST = 10  # of them, by which the server knows that there are two users
CONNECTIONS = 240
MOST = 15  # answers between two turns: one is 0.2 ms of the processor


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(limits, "ACCEPTED_S", 0)
    monkeypatch.setattr(attach_socket, "ATTACH_S", HANG_S)
    with short_folder() as made:
        yield str(made)


class Greedy:
    """Many connections of one user, each of which asks again as soon as it is answered."""

    def __init__(self, path: str, kind: socket.SocketKind, first: Callable[[int], bytes], ask: bytes) -> None:
        self._where, self._first, self._ask = (path, kind), first, ask
        self.connected = self.answered = 0
        self.go = trio.Event()

    async def run(self, number: int) -> None:
        path, kind = self._where
        with trio.socket.socket(socket.AF_UNIX, kind) as sock:
            await sock.connect(path)
            await sock.send(self._first(number))
            reply = await sock.recv(9_000)
            assert reply[:1] in b"\xaa{", reply
            self.connected += 1
            await self.go.wait()
            while True:
                await sock.send(self._ask)
                if not await sock.recv(9_000):
                    return
                self.answered += 1

    async def all_leave(self, fairness: Fairness) -> None:
        """Many are ended, some at once, while another user works; the turn is free for the next connection then."""
        self.go.set()

        async def ended(number: int) -> None:
            with suppress(OSError):
                await self.run(number)

        async def work() -> None:
            queue = fairness.of("another user")
            while True:
                await queue.acquire()
                await queue.stop(queue.start(), done=False)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            mine = fairness.of(os.geteuid())
            with trio.fail_after(30 * PATIENCE):
                for number in range(60):
                    async with trio.open_nursery() as crowd:
                        for one in range(number % 4):
                            crowd.start_soon(ended, 100 * number + one)
                await mine.acquire()
                mine.release()
            nursery.cancel_scope.cancel()

    async def most_between(self, fairness: Fairness) -> int:
        """The most answers between two turns of another user, of many."""
        async with trio.open_nursery() as nursery:
            with trio.fail_after(HANG_S):
                for number in range(CONNECTIONS):
                    nursery.start_soon(self.run, number)
                while self.connected < CONNECTIONS:
                    await trio.sleep(0)
                self.go.set()
                queue, most, before = fairness.of("another user"), 0, 0
                for turn in range(TURNS):
                    await queue.acquire()
                    began = queue.start()
                    if turn > FIRST:
                        most = max(most, self.answered - before)
                    before = self.answered
                    await queue.stop(began, done=False)
            assert self.answered > TURNS // 10
            nursery.cancel_scope.cancel()
        return most


def test_commands_of_fq_are_performed_by_turns(folder: str) -> None:
    def auth(number: int) -> bytes:
        return codec.auth(b"tester", b"q%d" % number, b"mem:public", b"")

    async def main() -> int:
        server = FqServer(Tree(MemoryStore(), SystemClock(), owner=ME), group="fq", node=bytes(4))
        server.add(listen(f"unix!{folder}/fq"))
        greedy = Greedy(f"{folder}/fq", socket.SOCK_STREAM, auth, codec.status())
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            most = await greedy.most_between(server.web.fairness)
            while server.exchanges.queues:  # all have ended
                await trio.sleep(0.01)
            await server.stop()
        return most

    assert trio.run(main) < MOST


def test_who_is_looked_up_keeps_no_turn(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other connections of a host are served, though the user of one of them is not known yet."""
    slow_uid, is_asked, answers, ask = 1, threading.Event(), threading.Event(), pwd.getpwuid

    def look_up(uid: int) -> pwd.struct_passwd:
        if uid == slow_uid:
            is_asked.set()
            assert answers.wait(HANG_S)
        return ask(uid)

    def get(secret: str) -> socket.socket:
        sock = socket.create_connection(where, HANG_S)
        sock.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n\r\n".encode())
        return sock

    async def main() -> None:
        server = HttpServer(Tree(MemoryStore(), SystemClock(), owner=ME), tokens=tokens, tcp_user=str(ME.uid))
        server.add(listener)
        queue = server.fairness.of(where[0])
        with identity.serving_others():
            await act(server, queue)

    async def act(server: HttpServer, queue: FairQueue) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            queue.owner = trio.lowlevel.current_task()
            with get(OTHER) as slow:
                await wait_all_tasks_blocked(0.02)  # it waits for the turn
                monkeypatch.setattr(pwd, "getpwuid", look_up)
                queue.release()
                assert await trio.to_thread.run_sync(is_asked.wait, HANG_S)
                with get(SECRET) as other:
                    assert (await trio.to_thread.run_sync(other.recv, 12)) == b"HTTP/1.1 200"
                assert select.select([slow], [], [], 0) == ([], [], [])
                answers.set()
                assert (await trio.to_thread.run_sync(slow.recv, 12)) == b"HTTP/1.1 200"
            await server.stop()

    file = Path(folder) / "tokens"
    file.touch(0o600)
    file.write_text(line_of(ME.uid, SECRET) + line_of(slow_uid, OTHER))
    tokens, listener = Tokens(str(file)), listen("tcp!127.0.0.1!0")
    monkeypatch.setattr(identity, "_answers", {})  # of other tests
    where = listener.socket.getsockname()
    trio.run(main)


@pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)
def test_requests_of_ring_clients_whose_time_is_over_keep_no_turn(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURN_S", 0)
    monkeypatch.setattr(attach_socket, "ATTACH_S", 0.01)

    async def main() -> None:
        rings, fairness = RingRegistry(MemoryStore(), post_to_loop()), Fairness()
        door = attach_socket.AttachSocket(rings, [attach_socket.listen(UnixAddress(f"{folder}/s"))], fairness)
        ask = protocol.encode({"stream": "none"})
        greedy = Greedy(f"{folder}/s.ring", socket.SOCK_SEQPACKET, lambda _: ask, ask)
        async with trio.open_nursery() as nursery:
            await nursery.start(door.run)
            await greedy.all_leave(fairness)
            nursery.cancel_scope.cancel()
        rings.close()

    trio.run(main)


@pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)
def test_requests_of_ring_clients_are_answered_by_turns(folder: str) -> None:
    async def main() -> int:
        store, fairness = MemoryStore(), Fairness()
        rings = RingRegistry(store, post_to_loop())
        Tree(store, SystemClock(), owner=ME, prepare=rings.resume, defaults=["ring all"])
        door = attach_socket.AttachSocket(rings, [attach_socket.listen(UnixAddress(f"{folder}/s"))], fairness)
        ask = protocol.encode({"stream": "none"})
        greedy = Greedy(f"{folder}/s.ring", socket.SOCK_SEQPACKET, lambda _: ask, ask)
        async with trio.open_nursery() as nursery:
            await nursery.start(door.run)
            most = await greedy.most_between(fairness)
            nursery.cancel_scope.cancel()
        rings.close()
        return most

    assert trio.run(main) < MOST
