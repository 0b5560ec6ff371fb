"""The dialogues of this folder, in memory and over a socket; see README.md."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Protocol

import pytest

from mqfs.errors import BadFrame
from mqfs.net.peer import Peer
from mqfs.ninep.codec.messages import Rversion
from mqfs.ninep.codec.notation import parse, show
from mqfs.ninep.codec.wire import Framer, decode, encode
from mqfs.ninep.server.session import Session
from tests.support.ninep import ME, Raw, make_tree, open_handles, running
from tests.support.parked import parked

FOLDER = Path(__file__).with_name("dialogues")
DIALOGUES = sorted(path.name for path in FOLDER.glob("*.txt"))
WORD = r'(?:"(?:[^"\\]|\\.)*"|[^\s"]+)'
LINE = re.compile(r"(\w*)(->|<-) (.*)")


class Party(Protocol):
    """One connection of a dialogue."""

    unix: bool

    def feed(self, data: bytes) -> None: ...

    def reply(self) -> str: ...

    def rest(self) -> list[str]: ...

    def sync(self) -> None: ...


class InMemory:
    def __init__(self, session: Session, by_byte: bool) -> None:
        self.session, self.by_byte = session, by_byte
        self.unix = False
        self._framer = Framer(1 << 30)
        self._queue: list[str] = []

    def feed(self, data: bytes) -> None:
        step = 1 if self.by_byte else max(len(data), 1)
        try:
            for at in range(0, len(data), step):
                self.session.receive(data[at : at + step])
        except BadFrame:
            self._take()
            self._queue.append("EOF")

    def _take(self) -> None:
        for buffer, start, size in self._framer.frames(b"".join(self.session.take())):
            value = decode(buffer, start, size, self.unix)
            if isinstance(value, Rversion):
                self.unix = value.version in ("9P2000.u", "9P2000.L")
            self._queue.append(show(value))

    def reply(self) -> str:
        self._take()
        return self._queue.pop(0) if self._queue else "nothing"

    def rest(self) -> list[str]:
        self._take()
        return self._queue

    def sync(self) -> None:
        pass


class OverSocket(Raw):
    def feed(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> str:
        line = super().reply()
        if line.startswith("Rversion"):
            self.unix = line.endswith((".u", ".L"))
        return line

    def sync(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().sync()

    def rest(self) -> list[str]:
        lines: list[str] = []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send("Tversion tag NOTAG msize 8192 version 9P2000")
        while (line := self.reply()) != "EOF" and not line.startswith("Rversion"):
            lines.append(line)
        return lines


class Dialogue:
    """The lines of a file, spoken by parties that `connect` makes."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text().splitlines()
        self.names: dict[str, str] = {}
        self.parties: dict[str, Party] = {}

    def run(self, connect: type | object) -> None:
        speaking = None
        for number, line in enumerate(self.lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            found = LINE.fullmatch(line)
            assert found, f"line {number}: {line}"
            who, arrow, text = found.groups()
            if who not in self.parties:
                self.parties[who] = connect()  # type: ignore[operator]
            party = self.parties[who]
            if arrow == "->":
                if speaking is not None and speaking is not party:
                    speaking.sync()  # what was said before was heard before
                speaking = party
                party.feed(self.request(party, text))
            else:
                self.expect(number, text, party.reply())
        for party in self.parties.values():
            assert party.rest() == []

    def request(self, party: Party, text: str) -> bytes:
        if text.startswith("raw 0x"):
            return bytes.fromhex(text.removeprefix("raw 0x"))
        filled = re.sub(r"\$(\w+)", lambda name: self.names[name[1]], text)
        return encode(parse(filled), party.unix)

    def expect(self, number: int, text: str, reply: str) -> None:
        pattern, given = "", set()
        for part in re.split(r"(\$\w+|\*)", text):
            name = part[1:]
            if part == "*":
                pattern += WORD
            elif not part.startswith("$"):
                pattern += re.escape(part)
            elif name in self.names:
                pattern += self.names[name]
            else:
                pattern += f"(?P={name})" if name in given else rf"(?P<{name}>\d+)"
                given.add(name)
        found = re.fullmatch(pattern, reply)
        assert found, f"line {number}: {text}\n was: {reply}"
        self.names.update(found.groupdict())


@pytest.mark.parametrize("by_byte", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("name", DIALOGUES)
def test_in_memory(name: str, by_byte: bool) -> None:
    tree = make_tree()
    sessions: list[Session] = []

    def connect() -> InMemory:
        sessions.append(Session(tree, Peer("test", ME.uid, ME.gid), lambda: None))
        return InMemory(sessions[-1], by_byte)

    Dialogue(FOLDER / name).run(connect)
    for session in sessions:
        session.close()
    assert open_handles(tree) == 0
    assert parked(tree) == 0
    assert len(tree.locks) == 0


@pytest.mark.parametrize("name", DIALOGUES)
def test_over_a_socket(name: str, tmp_path: Path) -> None:
    tree = make_tree()
    with running(tree, tmp_path) as server:
        parties: list[OverSocket] = []

        def connect() -> OverSocket:
            parties.append(OverSocket(server.socket()))
            return parties[-1]

        try:
            Dialogue(FOLDER / name).run(connect)
        finally:
            for party in parties:
                party.close()
    assert open_handles(tree) == 0
