"""Helpers of the 9P tests: a tree in memory, a session without sockets, a server on real ones, arbitrary messages."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from hypothesis import strategies as st

from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadFrame
from mqfs.model import Qid, Record, User
from mqfs.net.identity import serving_others
from mqfs.net.peer import Peer
from mqfs.ninep.client import connection
from mqfs.ninep.codec.messages import Dir, Entry, Fcall
from mqfs.ninep.codec.notation import parse, show
from mqfs.ninep.codec.wire import NUMBERS, Framer, decode, encode, layout
from mqfs.ninep.server.connection import Server
from mqfs.ninep.server.session import Session
from mqfs.serving.accept import listen
from mqfs.store.api import Committed
from mqfs.store.memory import MemoryAppender, MemoryBucket, MemoryLog, MemoryLogReader, MemoryStore
from tests.support.eventually import HANG_S
from tests.support.timers import ring_timers

META = [".batch", ".consumers", ".cursor", ".errors", ".kept", ".put", ".stats", ".txn", ".who", "ctl", "order"]
ME = User(os.getuid(), os.getgid())


def make_tree(**options: Any) -> Tree:
    return Tree(MemoryStore(), SystemClock(), owner=ME, **options)


def open_handles(tree: Tree) -> int:
    return tree.open_files.count


class Line:
    """A session in memory: requests and replies as lines of the notation."""

    def __init__(self, tree: Tree, uid: int | None = None, version: str = "") -> None:
        self.wakes = self.taken = 0
        peer = Peer("test", ME.uid if uid is None else uid, ME.gid)
        self.session = Session(tree, peer, self._wake)
        self._framer = Framer(1 << 30)
        if version:
            self.ask(f"Tversion tag NOTAG msize 8192 version {version}")
            self.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')

    def _wake(self) -> None:
        self.wakes += 1

    def send(self, *lines: str) -> None:
        unix = self.session.negotiated.unix
        self.session.receive(b"".join(encode(parse(line), unix) for line in lines))

    def take(self) -> bytes:
        """Take the bytes that the session has to send."""
        data = b"".join(self.session.take())
        self.taken += len(data)
        return data

    def values(self) -> list[Fcall]:
        data = self.take()
        unix = self.session.negotiated.unix
        return [decode(buffer, start, size, unix) for buffer, start, size in self._framer.frames(data)]

    def replies(self) -> list[str]:
        return [show(value) for value in self.values()]

    def ask(self, *lines: str) -> list[str]:
        self.send(*lines)
        return self.replies()

    def one(self, line: str) -> str:
        (reply,) = self.ask(line)
        return reply

    def value(self, line: str) -> Any:
        self.send(line)
        (reply,) = self.values()
        return reply


class Running:
    """A server in a thread of its own, on a unix socket, with `tcp` also on TCP, and with the option `tls` on TLS."""

    def __init__(self, tree: Tree, folder: Path, tcp: bool = False, **options: Any) -> None:
        self.tree = tree
        self.address = f"unix!{folder}/9p"
        self.options, self.tcp = options, tcp
        self.port = 0
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(HANG_S)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self.error = error
            self._ready.set()

    async def _serve(self) -> None:
        self.server = Server(self.tree, **self.options)
        self.server.add(listen(self.address))
        if self.tcp:
            listener = listen("tcp!127.0.0.1!0")
            self.server.add(listener)
            self.port = listener.socket.getsockname()[1]
        if "tls" in self.options:
            listener = listen("tls!127.0.0.1!0")
            self.server.add(listener)
            self.encrypted = str(listener.address)
        self.token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_others)
            await nursery.start(self.server.run)
            nursery.start_soon(ring_timers, self.tree)
            self._ready.set()
            await self._stop.wait()
            self.tree.close()
            await self.server.stop()
            nursery.cancel_scope.cancel()

    @staticmethod
    async def _serve_others() -> None:
        with serving_others():
            await trio.sleep_forever()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the server's thread."""
        return trio.from_thread.run_sync(function, *arguments, trio_token=self.token)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.token.run_sync_soon(self._stop.set)
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def connect(self, **options: Any) -> connection.Client:
        return connection.connect(self.address, timeout=HANG_S, **options)

    def socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(HANG_S)
        sock.connect(self.address.removeprefix("unix!"))
        return sock


@contextmanager
def running(tree: Tree, folder: Path, **options: Any) -> Iterator[Running]:
    server = Running(tree, folder, **options)
    try:
        yield server
    finally:
        server.stop()


class Raw:
    """A real connection to a server, with requests and replies as lines of the notation."""

    def __init__(self, sock: socket.socket, version: str = "") -> None:
        self.socket, self.unix = sock, False
        self._framer = Framer(1 << 30)
        self._queue: list[str] = []
        if version:
            self.ask(f"Tversion tag NOTAG msize 8192 version {version}")
            self.unix = version != "9P2000"
            self.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')

    def send(self, *lines: str) -> None:
        self.socket.sendall(b"".join(encode(parse(line), self.unix) for line in lines))

    def reply(self) -> str:
        """Return the next reply; EOF at the end of the connection."""
        while not self._queue:
            try:
                data = self.socket.recv(65_536)
            except ConnectionResetError:
                data = b""
            if not data:
                return "EOF"
            for buffer, start, size in self._framer.frames(data):
                self._queue.append(show(decode(buffer, start, size, self.unix)))
        return self._queue.pop(0)

    def ask(self, line: str) -> str:
        self.send(line)
        return self.reply()

    def sync(self) -> None:
        """Wait until the server has performed all earlier requests, and queue their replies."""
        self.send("Tflush tag 65000 oldtag 65001")
        seen = []
        while (line := self.reply()) not in ("Rflush tag 65000", "EOF"):
            seen.append(line)
        self._queue = seen + self._queue

    def close(self) -> None:
        self.socket.close()


# ---------------------------------------------------------------- arbitrary messages

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXTS | st.binary(max_size=10).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
QIDS = st.builds(Qid, U8, U32, U64)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "u8": U8,
    "u16": U16,
    "u32": U32,
    "u64": U64,
    "mode": U32,
    "text": TEXTS,
    "name": NAMES,
    "names": st.lists(NAMES, max_size=4).map(tuple),
    "qid": QIDS,
    "qids": st.lists(QIDS, max_size=4).map(tuple),
    "data": st.binary(max_size=50) | TEXTS.map(str.encode),
    "entries": st.lists(st.builds(Entry, QIDS, U64, U8, NAMES), max_size=3).map(tuple),
}


def _arbitrary(kind: type[Any], unix: bool) -> st.SearchStrategy[Any]:
    fields = {name: KINDS[form] for name, form, mark in layout(kind) if unix or mark != "unix"}
    if kind not in (Dir, Entry):
        fields["tag"] = U16
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def _messages(unix: bool) -> st.SearchStrategy[Any]:
    KINDS["stat"] = _arbitrary(Dir, unix)
    return st.one_of([_arbitrary(kind, unix) for kind in NUMBERS])


_MESSAGES = {unix: _messages(unix) for unix in (False, True)}


def messages(unix: bool) -> st.SearchStrategy[Any]:
    """Generate any message of the wire format."""
    return _MESSAGES[unix]


def broken(session: Session, data: bytes) -> bool:
    """Feed bytes to a session. Whether the connection has to end."""
    try:
        session.receive(data)
    except BadFrame:
        return True
    return False


class FailingReader(MemoryLogReader):
    """A log reader on a disk whose reads fail while `failing`."""

    failing = False

    def find(self, stream: int, sequence: int) -> Record | None:
        if self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().find(stream, sequence)


class FailingStore(MemoryStore):
    def make(self, number: int, state: bytes) -> MemoryBucket:
        bucket = self._buckets[number] = MemoryBucket(number, state)
        bucket.reader = FailingReader(bucket.upkeep)
        return bucket


class SlowStore(MemoryStore):
    """A store whose disk can be slow: then no record counts as synced until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self.owed: list[Committed] = []

    def make(self, number: int, state: bytes) -> MemoryBucket:
        bucket = self._buckets[number] = MemoryBucket(number, state)
        bucket.upkeep = log = SlowLog(self, number, state)
        bucket.end, bucket.reader, bucket.metrics = log.end, MemoryLogReader(log), MemoryLogReader(log)
        bucket.writer = bucket.ranges = MemoryAppender(log)
        return bucket

    def release(self) -> None:
        """Complete all pending syncs."""
        owed = self.owed[:]
        self.owed.clear()
        for then in owed:
            then(None)


class SlowLog(MemoryLog):
    """A log of a SlowStore."""

    def __init__(self, store: SlowStore, number: int, state: bytes) -> None:
        super().__init__(number, state)
        self.store = store

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        if then is not None and self.store.slow:
            self.store.owed.append(then)
        else:
            super().sync(then, within_s)
