"""A server that stands still is left by a client with another address; one that waits, or is far away, is not."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.ninep.client import connection, dial
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.ports import free_port
from tests.support.server import Server, short_folder

pytestmark = pytest.mark.process
NOBODY = ",unix!/none/9p"  # the other address
LONG = 1_000_000


@pytest.fixture
def server() -> Iterator[Server]:
    with short_folder() as folder:
        served = Server.at(folder, "--listen", f"tcp!127.0.0.1!{free_port()}")
        with served:
            with connection.connect(served.address) as owner:
                owner.create("s").close()
                owner.chmod("s", 0o666)
                with owner.open("ctl", "w") as ctl:
                    ctl.write(b"replay all\ndepth 1\nfull block\n")
            yield served
            served.process.send_signal(signal.SIGCONT)


def be_silent_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(dial, "SILENT_S", seconds)
    monkeypatch.setattr(dial, "LOOK_S", seconds / limits.ASKED)
    monkeypatch.setattr(limits, "CLIENT_LINK_BYTES", 100_000 / seconds)


def connect(address: str) -> connection.Client:
    return connection.connect(address + NOBODY, msize=limits.MSIZE_MOST, timeout=HANG_S)


def waits(one: connection.Client) -> dict[str, Callable[[], object]]:
    """All in which a client waits for its server."""
    file, ready = one.open("s", "r+"), threading.Event()

    def watch() -> bytes:
        file.when_ready(ready.set)
        assert ready.wait(HANG_S)
        return file.receive()

    def write_much() -> None:
        while True:
            file.write(bytes(LONG))

    return {
        "read": file.receive,
        "read in time": lambda: file.receive(timeout=HANG_S),
        "watch": watch,
        "write": lambda: file.write(b"x"),
        "write much": write_much,  # more than the kernel keeps of a unix socket
        "stat": lambda: one.stat("s"),
        "open": lambda: one.open("s"),
    }


@pytest.mark.parametrize("call", ["read", "read in time", "watch", "write", "write much", "stat", "open"])
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_server_that_stands_still_is_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, way: str, call: str
) -> None:
    """Its kernel takes what is sent all the same, and answers keepalive."""
    be_silent_after(monkeypatch, 0.5)
    with ThreadPoolExecutor(1) as threads, connect(server.address if way == "unix" else server.arguments[-1]) as one:
        act = waits(one)[call]
        server.process.send_signal(signal.SIGSTOP)
        waiting = threads.submit(act)
        try:
            with pytest.raises(errors.Disconnected, match=r"no answer in|takes no request"):
                waiting.result(HANG_S / 4)
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("call", ["read", "watch", "write"])
def test_a_server_that_has_no_answer_yet_is_not_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    be_silent_after(monkeypatch, patient(0.5))
    with (
        ThreadPoolExecutor(1) as threads,
        connect(server.address) as one,
        connection.connect(server.address) as owner,
        owner.open("s", "w") as writer,
        owner.open("ctl", "w") as ctl,
    ):
        act = waits(one)[call]
        if call == "write":
            writer.write(b"first")
        replies = connection.progress(one)[0]
        waiting = threads.submit(act)
        eventually(lambda: connection.progress(one)[0] > replies + 5, "the server to be asked again and again")
        assert not waiting.done()
        assert not one.lost
        if call == "write":
            ctl.write(b"full drop-old\n")
        else:
            writer.write(b"x")
        assert waiting.result(HANG_S) == (1 if call == "write" else b"x")


def test_a_connection_with_all_tags_in_use_is_not_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more can be asked there."""
    silent_s = patient(0.3)
    be_silent_after(monkeypatch, silent_s)
    monkeypatch.setattr(limits, "TAGS", 8)
    with connect(server.address) as one, connection.connect(server.address) as owner, owner.open("s", "w") as writer:
        file = one.open("s")
        slots = one.send([next(file.channel.read(100)) for _ in range(8)])
        with pytest.raises(TimeoutError):
            one.wait(slots[0], time.monotonic() + 5 * silent_s)
        assert not one.lost
        writer.write(b"x")
        reply: Any = one.answer(slots[0], time.monotonic() + HANG_S)
        assert reply.data == b"x"


class SlowLink:
    """Takes the bytes for a server slowly, and gives back what it answers at once."""

    def __init__(self, server: str, pause_s: float, hoards: bool) -> None:
        """`hoards`: it takes all at once, and keeps it."""
        self._server, self._pause_s, self._hoards = server, pause_s, hoards
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.address = f"tcp!127.0.0.1!{self.listener.getsockname()[1]}"

    def run(self) -> None:
        with self.listener, self.listener.accept()[0] as client, socket.socket(socket.AF_UNIX) as server:
            server.connect(self._server)
            back = threading.Thread(target=self._carry, args=(server, client, 0.0))
            back.start()
            self._carry(client, server, self._pause_s)
            back.join(HANG_S)

    def _carry(self, one: socket.socket, other: socket.socket, pause_s: float) -> None:
        kept = queue.Queue[bytes](0 if self._hoards else 1)

        def take() -> None:
            kept.put(data := one.recv(16_384))
            while data:
                kept.put(data := one.recv(16_384))

        threading.Thread(target=take, daemon=True).start()
        while data := kept.get():
            other.sendall(data)
            if len(data) > 1_000:
                time.sleep(pause_s)
        other.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("kept", "hoards"),
    [(4 << 20, False), (32 << 10, False), (4 << 20, True)],
    ids=["in the kernel", "in the client", "on the way"],
)
def test_a_long_request_on_a_slow_link_is_no_silence(
    server: Server, monkeypatch: pytest.MonkeyPatch, kept: int, hoards: bool
) -> None:
    """Wherever its bytes wait: the question is behind them."""
    silent_s = patient(1.0)
    be_silent_after(monkeypatch, silent_s)
    link = SlowLink(server.address.removeprefix("unix!"), silent_s / 10, hoards)
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        carried = threads.submit(link.run)
        one = stack.enter_context(connect(link.address))
        assert isinstance(one.socket, socket.socket)
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kept)
        file, other = one.open("s", "r+"), one.open("s")
        waiting = threads.submit(other.receive)
        began = time.monotonic()
        assert file.write(bytes(LONG)) == LONG
        assert time.monotonic() - began > 2 * silent_s
        assert len(waiting.result(HANG_S)) == LONG
        file.close()
        other.close()
        one.close()
        carried.result(HANG_S)


def test_an_attach_that_hangs_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who connects for as long as it takes waits for it, though the other address serves by then."""
    monkeypatch.setattr(connection, "ATTACH_S", 0.5)
    server.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(connection.connect, server.address + NOBODY)
        try:
            with pytest.raises(errors.Disconnected, match="no answer in"):
                connecting.result(HANG_S / 4)
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_a_server_without_another_is_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none to go to, and what waits would be lost."""
    be_silent_after(monkeypatch, 0.05)
    with ThreadPoolExecutor(1) as threads, connection.connect(server.arguments[-1]) as one:
        act = waits(one)["stat"]
        looked = threading.Semaphore(0)
        monkeypatch.setattr(dial, "is_host_silent", lambda sock: looked.release())
        server.process.send_signal(signal.SIGSTOP)
        waiting = threads.submit(act)
        try:
            assert looked.acquire(timeout=HANG_S)
            assert not waiting.done()
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert waiting.result(HANG_S)
