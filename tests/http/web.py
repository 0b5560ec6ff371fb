"""A server that speaks HTTP, and ways to speak to it: a client of the standard library, curl, and bytes."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server

USER = pwd.getpwuid(os.geteuid()).pw_name
_numbers = count(1)


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def next(self) -> int:
        return int(self.headers["Mqfs-Next"])


class Web:
    """A server on a port of loopback and on a unix socket."""

    def __init__(self, folder: Path, *options: str, at: int = 0, **more: Any) -> None:
        self.unix = folder / "web"
        self.server = Server.at(
            folder,
            "--http",
            f"tcp!127.0.0.1!{at}",
            "--http",
            f"unix!{self.unix}",
            "--tcp-user",
            USER,
            "--default",
            "replay all",
            *options,
            **more,
        )

    @property
    def port(self) -> int:
        """The port of its newest start."""
        return int(re.findall(r"HTTP at tcp!127\.0\.0\.1!(\d+)", self.server.text())[-1])

    @property
    def tls_port(self) -> int:
        return int(re.findall(r"HTTP at tls!127\.0\.0\.1!(\d+)", self.server.text())[-1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)

    def ask(self, method: str, path: str, body: bytes | str | None = None, **headers: str) -> Reply:
        """One request on a connection of its own. `a_b` in a header's name stands for `a-b`."""
        connection = self.connect()
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body.encode() if isinstance(body, str) else body, given)
            answer = connection.getresponse()
            return Reply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: bytes | str = b"", **headers: str) -> Reply:
        return self.ask("POST", path, body, **headers)

    def put(self, path: str, body: bytes | str | None = None) -> Reply:
        return self.ask("PUT", path, body)

    def group(self, *ctl: str) -> str:
        """The path of a new group, with those settings."""
        path = f"/g{next(_numbers)}"
        assert self.put(f"{path}/").status == 201
        if ctl:
            assert self.post(f"{path}/ctl", "\n".join(ctl)).status == 204
        return path

    def curl(self, *words: str, stdin: bytes = b"") -> Reply:
        """What curl gets; a word that begins with / is a path here."""
        words = tuple(self.url + word if word.startswith("/") else word for word in words)
        command = ["curl", "-sS", "--max-time", str(int(HANG_S)), "-D", "/dev/stderr", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=2 * HANG_S)
        head = done.stderr.split(b"\r\n\r\n")[-2 if b"\r\n\r\n" in done.stderr else -1]
        status = int(head.split(b" ")[1])
        lines = (line.decode().split(": ", 1) for line in head.split(b"\r\n")[1:])
        message = http.client.HTTPMessage()
        for name, value in lines:
            message[name] = value
        return Reply(status, message, done.stdout)

    def raw(self, *, unix: bool = False) -> socket.socket:
        family, where = (socket.AF_UNIX, str(self.unix)) if unix else (socket.AF_INET, ("127.0.0.1", self.port))
        sock = socket.socket(family)
        sock.settimeout(HANG_S)
        sock.connect(where)
        return sock

    def say(self, data: bytes) -> bytes:
        """All that the server answers to some bytes, until it closes."""
        with self.raw() as sock:
            sock.sendall(data)
            return rest(sock)

    @contextmanager
    def stream(self, path: str, **headers: str) -> Iterator[Lines]:
        """The answer to a GET that does not end."""
        connection = self.connect()
        try:
            connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield Lines(answer)
        finally:
            if connection.sock is not None:
                connection.sock.close()
            connection.close()

    def open_files(self, group: str, name: str) -> int:
        """How many handles there are of a file of a group; -1 where the server has no room for the question."""
        reply = self.get(f"{group}/.who")
        return sum(row["file"] == name for row in reply.lines) if reply.status == 200 else -1

    def eventually_open(self, group: str, name: str, number: int) -> None:
        eventually(lambda: self.open_files(group, name) == number, f"{number} handles of {name}")


class Lines:
    """A body that is read as it comes."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer, self.headers = answer, answer.headers

    def line(self) -> bytes:
        return self.answer.readline()

    def event(self) -> dict[str, str]:
        """The next event, as a browser reads it; of a comment {"": text}."""
        fields: dict[str, str] = {}
        while (line := self.line()) not in (b"\n", b""):
            name, _, value = line.decode().rstrip("\n").partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name in fields else value
        return fields


def rest(sock: socket.socket) -> bytes:
    """Until the end, or a reset."""
    data = b""
    try:
        while part := sock.recv(65_536):
            data += part
    except ConnectionResetError:
        pass
    return data


def statuses(data: bytes) -> list[int]:
    """The statuses of the answers in some bytes."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", data)]
