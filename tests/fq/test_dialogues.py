"""The conversations of dialogues/, by real sockets: what the client sends whole, and byte by byte."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.fq.codec import BEAT
from tests.fq.client import connect, serve
from tests.support.server import Server, short_folder

FILES = sorted(Path(__file__).with_name("dialogues").glob("*.txt"))
NODE = "127.0.0.9"
WORD = re.compile(r'(short|long|byte)?"([^"]*)"|(short)?\$(\w+)|\*(\d+)|([0-9a-f]+)|EOF')
SIZES = {"byte": 1, "short": 2, "long": 4, None: 0}


@pytest.fixture
def server() -> Iterator[Server]:
    with short_folder() as folder, serve(folder, "--fq-node", NODE) as it:
        yield it


class Dialogue:
    def __init__(self, address: str, piece: int) -> None:
        self._address, self._piece = address, piece
        self._connections: dict[str, socket.socket] = {}
        self._known: dict[str, bytes] = {}

    def connection(self, name: str) -> socket.socket:
        if name not in self._connections:
            self._connections[name] = connect(self._address)
        return self._connections[name]

    def line(self, line: str) -> None:
        way, _, text = line.partition(" ")
        sock = self.connection(way[:-2])
        words = list(WORD.finditer(text))
        assert " ".join(word.group() for word in words) == " ".join(
            re.split(r"\s+(?=[^\"]*(?:\"[^\"]*\"[^\"]*)*$)", text)
        )
        if way.endswith("->"):
            data = b"".join(map(self.sent, words))
            for at in range(0, len(data), self._piece):
                sock.sendall(data[at : at + self._piece])
        else:
            for word in words:
                self.received(sock, word)

    def sent(self, word: re.Match[str]) -> bytes:
        if word[6]:
            return bytes.fromhex(word[6])
        data = self._known[word[4]] if word[4] else word[2].encode()
        size = SIZES[word[1] or word[3]]
        return (len(data).to_bytes(size) if size else b"") + data

    def received(self, sock: socket.socket, word: re.Match[str]) -> None:
        if word.group() == "EOF":
            while (beat := sock.recv(2, socket.MSG_WAITALL)) == BEAT:
                pass  # the client was too slow for the next one not to be due
            assert beat == b""
        elif word[4] and word[4] not in self._known:
            self._known[word[4]] = take(sock, int.from_bytes(take(sock, 2)))
        elif word[5]:
            take(sock, int(word[5]))
        else:
            wanted = self.sent(word)
            assert take(sock, len(wanted)) == wanted, word.group()

    def end(self) -> None:
        for sock in self._connections.values():
            sock.close()


def take(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, f"the end, behind {data!r}"
        data += part
    return data


@pytest.mark.parametrize("piece", [1 << 20, 1], ids=["whole", "byte by byte"])
def test_dialogues(server: Server, piece: int) -> None:
    for file in FILES:
        dialogue = Dialogue(f"{server.folder}/fq", piece)
        for line in file.read_text().splitlines():
            if line and not line.startswith("#"):
                try:
                    dialogue.line(line)
                except (AssertionError, OSError) as error:
                    raise AssertionError(f"{file.name}: {line}: {error}") from error
        dialogue.end()
        server.restart()  # routes are numbered from the start again
