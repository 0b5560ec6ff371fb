"""Whatever arrives, the server lives on, ends only that connection, and nothing leaks."""

from __future__ import annotations

import contextlib
import logging
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import BadFrame
from mqfs.model import Qid
from mqfs.net.peer import Peer
from mqfs.ninep.client.machine import ClientMachine
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import NUMBERS, TYPES, Dialect, Framer, decode, encode, layout
from mqfs.ninep.server.session import Session
from tests.support.campaign import seed, size
from tests.support.eventually import eventually
from tests.support.ninep import ME, Raw, make_tree, open_handles, running
from tests.support.parked import parked

VERSIONS = ("9P2000", "9P2000.u", "9P2000.L")
REQUESTS = [kind for number, kind in TYPES.items() if not number & 1]
NAMES = (
    "a",
    "b",
    "s",
    "t",
    "ctl",
    "order",
    ".cursor",
    ".stats",
    ".who",
    ".errors",
    "..",
    ".",
    "",
    "x/y",
    "\udcff",
    "n" * 256,
)
BODIES = (b"", b"x", b"hello\n", b"replay all\n", b"data line\n", b"depth 2\nfull block\n", b"nonsense\n", bytes(500))


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A request that met a bug is logged with its traceback."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


class Fuzzer:
    """Requests that make some sense: known fids and names more often than others."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def field(self, name: str, kind: str) -> Any:
        chance = self.chance
        if kind in ("u8", "u16", "u32", "u64", "mode"):
            return self.number(name, {"u8": 8, "u16": 16, "u64": 64}.get(kind, 32))
        if kind in ("text", "name"):
            return chance.choice(NAMES) if kind == "name" else chance.choice(("", "a", "/a", "9P2000", "root", "x"))
        if kind == "names":
            return tuple(chance.choice(NAMES) for _ in range(chance.choice((0, 1, 1, 2, 17))))
        if kind == "data":
            return chance.choice(BODIES)
        if kind == "qid":
            return Qid(0, 0, 0)
        assert kind == "stat"
        return m.Dir(*(self.field(name, kind) for name, kind, _ in layout(m.Dir)))

    def number(self, name: str, bits: int) -> int:
        chance = self.chance
        if "fid" in name or name == "dirfd":
            return chance.choice((0, 0, 1, 1, 2, 3, 4, 5, 6, m.NOFID))
        if name in ("offset", "start", "size"):
            return chance.choice((0, 0, 1, 5, 1000, (1 << bits) - 1))
        if name in ("count", "length"):
            return chance.choice((0, 1, 10, 1000, 8000, (1 << bits) - 1))
        if name == "oldtag":
            return chance.randrange(40)
        if name in ("mode", "perm", "flags"):
            return (
                chance.choice((0, 1, 2, 3, 0o644, 0o100644, 0o20000000755, 0o102, 0o4000, 0x200, 0x40))
                & (1 << bits) - 1
            )
        return chance.choice((0, 1, (1 << bits) - 1))

    def request(self) -> bytes:
        kind = self.chance.choice(REQUESTS)
        if kind is m.Tversion and self.chance.random() < 0.9:
            kind = self.chance.choice((m.Tread, m.Twrite, m.Twalk, m.Topen, m.Tlopen, m.Tlcreate, m.Tcreate))
        fields = {name: self.field(name, form) for name, form, _ in layout(kind)}
        if kind is m.Tversion:
            fields["version"] = self.chance.choice(VERSIONS)
            fields["msize"] = 8192
        value: m.Fcall = kind(tag=self.chance.randrange(40), **fields)
        return encode(value, self.unix)

    unix = False

    def mutated(self, frame: bytes) -> bytes:
        """A frame with something wrong in it; its size often right, so that it is looked into."""
        chance, raw = self.chance, bytearray(frame)
        for _ in range(chance.choice((1, 1, 2, 5))):
            raw[chance.randrange(4, len(raw))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        if chance.random() < 0.3:
            del raw[chance.randrange(5, len(raw) + 1) :]
        if chance.random() < 0.3:
            raw += chance.randbytes(chance.randrange(20))
        if chance.random() < 0.8:
            raw[:4] = struct.pack("<I", len(raw))
        return bytes(raw)


def begin(session: Session, version: str) -> None:
    session.receive(encode(m.Tversion(0xFFFF, 8192, version), False))
    session.receive(encode(m.Tattach(0, 0, m.NOFID, "", ""), session.negotiated.unix))
    session.take()


def well_formed(session: Session, framer: Framer) -> int:
    """Every reply can be read; how many there were."""
    found = 0
    for buffer, start, length in framer.frames(b"".join(session.take())):
        reply = decode(buffer, start, length, session.negotiated.unix)
        assert NUMBERS[type(reply)] & 1
        assert length <= session.negotiated.msize
        found += 1
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("malformed", [False, True], ids=["sense", "mutated"])
def test_sessions(version: str, malformed: bool) -> None:
    """Requests without plan, whole or broken, on one tree by several connections at once."""
    chance = random.Random(f"{seed()} {version} {malformed}")
    fuzzer = Fuzzer(chance)
    tree = make_tree()
    replies = ended = 0
    for _ in range(size(60)):
        sessions = [Session(tree, Peer("test", ME.uid, ME.gid), lambda: None) for _ in range(3)]
        framers = [Framer(1 << 20) for _ in sessions]
        for session in sessions:
            begin(session, version)
        for _ in range(150):
            at = chance.randrange(len(sessions))
            session = sessions[at]
            fuzzer.unix = session.negotiated.unix
            frame = fuzzer.request()
            if malformed and chance.random() < 0.2:
                frame = fuzzer.mutated(frame)
            try:
                session.receive(frame)
            except BadFrame:
                assert malformed or session.negotiated.dialect is None
                ended += 1
                session.close()
                sessions[at] = Session(tree, Peer("test", ME.uid, ME.gid), lambda: None)
                begin(sessions[at], version)
                framers[at] = Framer(1 << 20)
            if session.negotiated.dialect is not None:
                replies += well_formed(sessions[at], framers[at])
        for session in sessions:
            session.close()
        assert (open_handles(tree), parked(tree), len(tree.locks)) == (0, 0, 0)
    assert replies > size(60) * 50
    assert bool(ended) == malformed


def test_random_bytes_at_the_socket(tmp_path: Path) -> None:
    chance = random.Random(seed())
    fuzzer = Fuzzer(chance)
    tree = make_tree()
    with running(tree, tmp_path) as server:
        good = Raw(server.socket(), "9P2000")
        with server.connect() as client:
            client.mkdir("quiet")  # of a name that the noise does not know
        assert good.ask("Twalk tag 1 fid 0 newfid 1 names [quiet]").startswith("Rwalk")
        assert good.ask("Tcreate tag 1 fid 1 name watched perm 0666 mode 2").startswith("Rcreate")
        for round_ in range(size(300)):
            bad = Raw(server.socket(), chance.choice(VERSIONS) if chance.random() < 0.7 else "")
            fuzzer.unix = bad.unix
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(chance.randrange(10)):
                    bad.socket.sendall(fuzzer.mutated(fuzzer.request()))
                bad.socket.sendall(chance.randbytes(chance.randrange(200)))
            bad.close()
            body = f"{round_}"
            good.send(f'Twrite tag 1 fid 1 offset 0 data "{body}"')
            assert good.reply() == f"Rwrite tag 1 count {len(body)}"
        eventually(lambda: len(server.server.connections) == 1)
        eventually(lambda: open_handles(tree) == 1)
        good.close()
    assert open_handles(tree) == 0


def test_client_machine() -> None:
    """Whatever a server says, the client's machine understands it or says that it is broken."""
    chance = random.Random(seed())
    replies = [kind for number, kind in TYPES.items() if number & 1 and kind is not m.Rreaddir]
    fuzzer = Fuzzer(chance)
    understood = broken = 0
    for _ in range(size(20_000)):
        caller = ClientMachine(chance.choice(list(Dialect)), 8192)
        for _ in range(4):
            caller.call(m.Tread(0, 1, 0, 100))
        kind = chance.choice(replies)
        fields = {name: () if form == "qids" else fuzzer.field(name, form) for name, form, _ in layout(kind)}
        frame = encode(kind(tag=chance.randrange(5), **fields), caller.dialect.unix)
        if chance.random() < 0.5:
            frame = fuzzer.mutated(frame)
        try:
            understood += len(caller.receive(frame))
        except BadFrame:
            broken += 1
    assert understood > 100
    assert broken > 100
