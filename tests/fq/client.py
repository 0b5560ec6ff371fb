"""A client of fq in our own words: blocking sockets, one connection for commands and one for data."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections import deque
from pathlib import Path
from typing import Any

from mqfs.fq import codec
from mqfs.fq.codec import Answer, AnswerParser, Message, MessageParser
from tests.support.eventually import HANG_S
from tests.support.server import Server

RECEIVE_BYTES = 1 << 18


class Refused(Exception):
    """What the server says before it ends a connection."""


def serve(folder: Path, *options: str, **more: Any) -> Server:
    """A server whose fq is at `fq` of that folder, and at a port of loopback."""
    listen = ("--fq", f"unix!{folder}/fq", "--fq", "tcp!127.0.0.1!0", "--tcp-user", "root")
    return Server.at(folder, *listen, *options, **more)


def port(server: Server) -> int:
    """The port of the current run."""
    lines = [line for line in server.text().splitlines() if "fq of group" in line and "127.0.0.1!" in line]
    return int(lines[-1].partition("127.0.0.1!")[2].partition(",")[0])


def connect(address: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.settimeout(HANG_S)
    sock.connect(address)
    return sock


class Client:
    """Both connections, open."""

    def __init__(
        self,
        address: str | tuple[str, int],
        queue: str = "",
        kind: str = "mem:public",
        *,
        user: str = "tester",
        password: str = "",
        node: bytes = b"",
        with_data: bool = True,
    ) -> None:
        self.address, self.commands = address, connect(address)
        self._answers: deque[Answer] = deque()
        self._parser, self._incoming = AnswerParser(), MessageParser(relayed=True)
        self.messages: deque[Message] = deque()
        self.commands.sendall(codec.auth(user.encode(), queue.encode(), kind.encode(), password.encode()))
        try:
            self.key = self.answer("key").text
        except BaseException:
            self.commands.close()
            raise
        self.data = connect(address) if with_data else self.commands
        if with_data:
            self.data.sendall(codec.data(self.key, node))

    def answer(self, kind: str) -> Answer:
        """The next answer that is no beat, unless one is wanted. Raises Refused."""
        while True:
            while self._answers:
                found = self._answers.popleft()
                if found.kind == "error":
                    raise Refused(found.text.decode())
                if found.kind == kind:
                    return found
                assert found.kind == "beat"
            data = self.commands.recv(RECEIVE_BYTES)
            if not data:
                raise EOFError
            self._answers.extend(self._parser.receive(data))

    def bind(self, exchange: str, program: str | bytes = b"prefix:", flags: int = 0) -> int:
        text = program.encode() if isinstance(program, str) else program
        self.commands.sendall(codec.bind(flags, exchange.encode(), text))
        return self.answer("bound").route

    def unbind(self, exchange: str, route: int) -> int:
        self.commands.sendall(codec.unbind(route, exchange.encode()))
        return self.answer("unbound").route

    def counts(self) -> dict[str, int]:
        self.commands.sendall(codec.status())
        return {key.decode(): value for key, value in self.answer("counts").counts}

    def publish(self, exchange: str, route: str | bytes, *payloads: bytes) -> None:
        name = route.encode() if isinstance(route, str) else route
        self.data.sendall(
            b"".join(codec.published(Message(exchange.encode(), name, os.urandom(16), body)) for body in payloads)
        )

    def receive(self, count: int = 1) -> list[Message]:
        """That many messages. Raises EOFError where the connection ends before."""
        while len(self.messages) < count:
            data = self.data.recv(RECEIVE_BYTES)
            if not data:
                raise EOFError
            self.messages.extend(self._incoming.receive(data))
        return [self.messages.popleft() for _ in range(count)]

    def wait_for_end(self) -> None:
        """The server ends it; beats may come before."""
        with contextlib.suppress(EOFError):
            while self.answer("beat"):
                pass

    def close(self) -> None:
        self.data.close()
        self.commands.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stats(where: int | str) -> dict[str, Any]:
    """`/stats.json`, at a port of loopback or a path."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = connect(where if isinstance(where, str) else ("127.0.0.1", where))
    with contextlib.closing(connection):
        connection.request("GET", "/stats.json")
        return dict(json.load(connection.getresponse()))
