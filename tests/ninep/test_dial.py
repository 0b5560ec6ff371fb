"""Several addresses: the first server that serves, whatever the others do."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from mqfs import errors
from mqfs.net.sockets import TcpAddress, UnixAddress, is_host_silent, parse_addresses
from mqfs.ninep.client import connection, dial
from mqfs.ninep.client.dial import HEAD_START_S, first_of
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import Server, short_folder
from tests.support.tokens import SECRET

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as folder, Server.at(folder, "--listen", f"tcp!127.0.0.1!{free_port()}") as server:
        yield server


@pytest.fixture
def hanging() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp!127.0.0.1!{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("unix!/a", [UnixAddress("/a")]),
        ("unix!/a,b", [UnixAddress("/a,b")]),
        ("unix!/a,tcp!b!1", [UnixAddress("/a"), TcpAddress("b", 1)]),
        ("a:1,b:2", [TcpAddress("a", 1), TcpAddress("b", 2)]),
        ("tcp://a:1,tcp://b:2,tls!c!3", None),
        ("[::1]:1,[::2]:2", [TcpAddress("::1", 1), TcpAddress("::2", 2)]),
    ],
)
def test_several_addresses_are_parsed(text: str, found: list[object] | None) -> None:
    assert parse_addresses(text) == found or (found is None and len(parse_addresses(text)) == 3)


@pytest.mark.parametrize("text", ["", "tcp!a!1,", ",tcp!a!1", "tcp!a!1,,tcp!b!1", "tcp!a!1,tcp!b!x"])
def test_a_list_with_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(errors.BadAddress):
        parse_addresses(text)


def test_the_first_that_serves_is_used(server: Server, hanging: str) -> None:
    refused = f"tcp!127.0.0.1!{free_port()}"
    began = time.monotonic()
    with connection.connect(f"{refused},{hanging},{server.address}", timeout=HANG_S) as client:
        assert client.where == server.address
        assert client.stat("").name == "/"
    assert time.monotonic() - began < HANG_S / 2, "the one that hangs holds it up for its head start"


def test_why_none_serves_is_said_of_each(hanging: str) -> None:
    refused = f"tcp!127.0.0.1!{free_port()}"
    with pytest.raises(errors.Disconnected) as caught:
        connection.connect(f"{refused},{hanging}", timeout=3 * HEAD_START_S)
    assert f"{refused}: connection refused; {hanging}: no answer" in str(caught.value)


def test_a_refused_token_is_said_as_such(server: Server) -> None:
    refused, asked = f"tcp!127.0.0.1!{free_port()}", server.arguments[-1]
    with pytest.raises(errors.Denied):
        connection.connect(f"{refused},{asked}", token=SECRET, timeout=HANG_S)


class Made:
    """What an attempt has made."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_what_comes_too_late_is_closed() -> None:
    first, second = (TcpAddress("a", number) for number in (1, 2))
    late, winner, let_go = Made(), Made(), threading.Event()

    def attempt(where: object) -> Made:
        if where == first:
            assert let_go.wait(HANG_S)
            return late
        return winner

    assert first_of([first, second], attempt, HANG_S) is winner
    let_go.set()
    assert late.closed.wait(HANG_S)
    assert not winner.closed.is_set()


def test_a_host_that_answers_is_not_silent_though_its_program_reads_nothing() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(socket.create_connection(listener.getsockname()))
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while sock.send(bytes(1 << 16)):
                pass
        assert not is_host_silent(sock)
    with socket.socket(socket.AF_UNIX) as sock:
        assert not is_host_silent(sock)


def test_a_child_keeps_no_connection_that_was_being_made_when_it_was_forked() -> None:
    """The listener takes it later."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        taken = [stack.enter_context(socket.create_connection(listener.getsockname()))]  # no room for another one
        descriptors = len(os.listdir("/proc/self/fd"))
        threads = stack.enter_context(ThreadPoolExecutor(1))
        made = threads.submit(dial.dial, TcpAddress(*listener.getsockname()), HANG_S)
        eventually(lambda: len(os.listdir("/proc/self/fd")) > descriptors)
        may_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(may_end[1])
            os.read(may_end[0], 1)
            os._exit(0)
        os.close(may_end[0])
        try:
            taken += [stack.enter_context(listener.accept()[0]) for _ in range(2)]
            made.result(HANG_S).close()
            taken[-1].settimeout(HANG_S)
            assert taken[-1].recv(1) == b""
        finally:
            os.close(may_end[1])
            os.waitpid(child, 0)


def test_a_client_that_waits_looks_at_its_host_unnoticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    monkeypatch.setattr(dial, "LOOK_S", 0.01)
    monkeypatch.setattr(dial, "is_host_silent", lambda sock: looked.set())
    address = server.arguments[-1]
    with connection.connect(server.address) as owner, connection.connect(address, timeout=HANG_S) as client:
        owner.create("s", "w", 0o666).close()
        with owner.open("s", "w") as writer, client.open("s") as reader, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(reader.receive)
            assert looked.wait(HANG_S)
            writer.write(b"1")
            assert answer.result(HANG_S) == b"1"
