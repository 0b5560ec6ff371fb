"""Tauth over TCP: a secret written to its fid says who a client is; a plain dialogue, and the real server's socket."""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import limits
from mqfs.errors import BadConfig, BadRequest, Denied
from mqfs.model import QTDIR, Qid
from mqfs.net import challenge, tokens
from mqfs.net.identity import NONUNAME
from mqfs.net.peer import Peer
from mqfs.ninep.client import connection
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import Fcall
from mqfs.ninep.codec.wire import Framer, decode, encode
from mqfs.ninep.server.operations import QTAUTH
from mqfs.ninep.server.session import Session
from mqfs.syntax.lines import digest
from tests.ninep.test_dialogues import Dialogue, InMemory
from tests.support.eventually import HANG_S, eventually
from tests.support.ninep import Line, Raw, make_tree
from tests.support.server import Server
from tests.support.server import mqfs as run
from tests.support.tokens import OTHER, SECRET, line_of, secret_of

NEWER = secret_of("0e0f")


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("by_byte", [False, True], ids=["whole", "byte by byte"])
def test_the_dialogue(tmp_path: Path, by_byte: bool) -> None:
    known = tokens.Tokens(
        str(
            token_file(
                tmp_path, line_of(1001, SECRET) + "# a comment\n\n" + line_of(1002, OTHER) + line_of(1002, NEWER)
            )
        )
    )
    tree = make_tree()
    sessions: list[Session] = []

    def connect() -> InMemory:
        sessions.append(Session(tree, Peer("test", 65_534, fixed=True, tokens=known), lambda: None))
        return InMemory(sessions[-1], by_byte)

    Dialogue(Path(__file__).parent / "dialogues" / "tokens" / "tcp.txt").run(connect)
    for session in sessions:
        session.close()
        assert not session.fids.proofs


def test_each_fid_of_a_tauth_is_charged_and_keeps_no_long_name(tmp_path: Path) -> None:
    """A stranger sends them."""
    known = tokens.Tokens(str(token_file(tmp_path, line_of(1001, SECRET))))
    tree = make_tree()
    line = Line(tree)
    line.session = Session(tree, Peer("test", 65_534, fixed=True, tokens=known), lambda: None)
    line.one("Tversion tag NOTAG msize 8192 version 9P2000")
    before = tree.memory.used
    assert "Rerror" in line.one(f'Tauth tag 1 afid 1 uname {"u" * 257} aname ""')
    for afid in (1, 2):
        assert "Rauth" in line.one(f'Tauth tag 1 afid {afid} uname u aname ""')
    assert tree.memory.used - before == 2 * limits.FID_BYTES
    assert "Rclunk" in line.one("Tclunk tag 1 fid 1")
    assert tree.memory.used - before == limits.FID_BYTES
    line.session.close()
    assert tree.memory.used == before


@pytest.mark.process
def test_over_tcp(tmp_path: Path) -> None:
    me = str(os.geteuid())
    path = token_file(tmp_path, line_of(me, SECRET) + line_of(1001, OTHER))
    options = ("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), "--tcp-user", "nobody")
    with Server(*options, cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        with connection.connect(found[1], token=SECRET) as client:
            client.mkdir("g")
            client.create("g/s").close()
            client.chmod("g/s", 0o600)
        with connection.connect(found[1]) as client, pytest.raises(Denied):
            client.open("g/s", "w")
        with mqfs.connect(found[1], token=SECRET + "\n", user=me) as library:
            library.group("g").publish("s", b"mine")
        for token, user in (("nonsense-nonsense", ""), (OTHER, me), ("", "")):
            if token:
                with pytest.raises(Denied, match="unknown token"):
                    connection.connect(found[1], token=token, user=user)
        assert SECRET not in server.text()


@pytest.mark.process
def test_a_server_without_tokens(tmp_path: Path) -> None:
    with Server("--listen", "tcp!127.0.0.1!0", "--tcp-user", "nobody", cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        with pytest.raises(Denied, match="server without tokens"):
            connection.connect(found[1], token=SECRET)


@pytest.mark.process
def test_over_a_unix_socket_the_system_says_who_it_is(tmp_path: Path) -> None:
    address = f"unix!{tmp_path}/9p"
    with Server("--listen", address, cwd=tmp_path), connection.connect(address, token="whatever this is") as client:
        client.mkdir("g")


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (line_of(1001, SECRET), 0o640, "open to others (expected mode 600"),
        ("1001\n", 0o600, "line 1: malformed hash (expected sha256:ID:HEX, 64 digits"),
        (f"\n1001 {SECRET}\n", 0o600, "line 2: malformed hash (expected sha256:ID:HEX, 64 digits"),
        (line_of(1001, SECRET)[:-1] + f" {OTHER}\n", 0o600, "line 1: malformed option (expected USER sha256:"),
        (line_of("no-such-user", SECRET), 0o600, "line 1: unknown user 'no-such-user'"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, mode: int, why: str) -> None:
    path = token_file(tmp_path, text, mode)
    with pytest.raises(BadConfig) as caught:
        tokens.Tokens(str(path))
    assert why in str(caught.value)
    done = run("serve", "--token-file", str(path), "--listen", "tcp!127.0.0.1!0", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert why in done.stderr
    assert SECRET not in done.stderr
    assert OTHER not in done.stderr


@pytest.mark.process
def test_no_file(tmp_path: Path) -> None:
    done = run("serve", "--token-file", "nowhere", "--listen", "tcp!127.0.0.1!0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == ("mqfs: --token-file nowhere: No such file or directory (expected a readable file)\n")


def knock(address: str, *tokens: str) -> tuple[list[str], float]:
    """Tokens written one after another on one connection: what each is answered with, and how long it took."""
    host, port = address.split("!")[1:]
    began, found = time.monotonic(), []
    raw = Raw(socket.create_connection((host, int(port)), 30))
    raw.ask("Tversion tag NOTAG msize 8192 version 9P2000")
    for token in tokens:
        raw.ask('Tauth tag 1 afid 9 uname "" aname ""')
        found.append(raw.ask(f'Twrite tag 1 fid 9 offset 0 data "{token}"'))
        if found[-1] != "EOF":
            raw.ask("Tclunk tag 1 fid 9")
    raw.close()
    return found, time.monotonic() - began


@pytest.mark.process
@pytest.mark.parametrize(("scope", "locks"), [("read", False), ("write", True), ("admin", True)])
def test_a_token_to_read_locks_nobody_out(tmp_path: Path, scope: str, locks: bool) -> None:
    """A shared lock it may take: readers have one, too."""
    secret = f"mq_0a0b_{'x' * 43}"
    path = token_file(tmp_path, f"{os.geteuid()} sha256:0a0b:{digest(secret.encode()).hex()} scope={scope}\n")
    with Server.at(tmp_path, "--listen", "tcp!127.0.0.1!0", "--token-file", str(path)) as server:
        with connection.connect(server.address) as client:
            client.mkdir("g")
            client.create("g/s").close()
        _, host, port = re.findall(r"9P at (tcp!\S+)", server.text())[0].split("!")
        raw = Raw(socket.create_connection((host, int(port)), 30))
        raw.ask("Tversion tag NOTAG msize 8192 version 9P2000.L")
        raw.unix = True
        raw.ask('Tauth tag 1 afid 9 uname "" aname "" n_uname 4294967295')
        raw.ask(f'Twrite tag 1 fid 9 offset 0 data "{secret}"')
        assert "Rattach" in raw.ask('Tattach tag 1 fid 0 afid 9 uname "" aname "" n_uname 4294967295')
        assert "Rwalk" in raw.ask("Twalk tag 1 fid 0 newfid 1 names [g s]")
        assert "Rlopen" in raw.ask("Tlopen tag 1 fid 1 flags 0")
        lock = "Tlock tag 1 fid 1 type {} flags 0 start 0 length 0 proc_id 1 client_id x"
        assert raw.ask(lock.format(0)) == "Rlock tag 1 status 0"
        assert raw.ask(lock.format(1)) == ("Rlock tag 1 status 0" if locks else "Rlerror tag 1 ecode 13")
        raw.close()


# ---------------------------------------------------------------- by a challenge


class Port:
    """Someone who has the port: it answers as a server with tokens does, and remembers all that it is sent."""

    def __init__(self, *replies: Fcall) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp!127.0.0.1!{self._socket.getsockname()[1]}"
        self.got = b""
        self._replies = {type(reply): reply for reply in replies}
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._socket.accept()
        framer = Framer(1 << 20)
        with sock:
            while data := sock.recv(65_536):
                self.got += data
                for buffer, start, size in framer.frames(data):
                    request: Any = decode(buffer, start, size, False)
                    sock.sendall(encode(self._reply(request), False))

    def _reply(self, request: Any) -> Fcall:
        if isinstance(request, m.Tversion):
            return m.Rversion(request.tag, request.msize, request.version)
        if isinstance(request, m.Tauth):
            return m.Rauth(request.tag, Qid(QTAUTH, 0, 0))
        if isinstance(request, m.Twrite):
            return m.Rwrite(request.tag, len(request.data))
        if isinstance(request, m.Tclunk):
            return m.Rclunk(request.tag)
        if isinstance(request, m.Tread):
            return self._replies[m.Rread]._replace(tag=request.tag)  # type: ignore[attr-defined]
        return m.Rattach(request.tag, Qid(QTDIR, 0, 1))

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(HANG_S)
        self._socket.close()


def test_a_token_does_not_go_to_who_has_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to one without a challenge, nor to one with: that learns nothing, and is found out."""
    with Port(m.Rread(0, b"")) as silent, pytest.raises(Denied, match="server without a challenge"):
        connection.connect(silent.address, token=SECRET, timeout=HANG_S)
    with Port(m.Rread(0, challenge.line("ab" * 32))) as asking, pytest.raises(Denied, match="another server"):
        connection.connect(asking.address, token=SECRET, timeout=HANG_S)
    for port in (silent, asking):
        assert SECRET.encode() not in port.got
        assert digest(SECRET.encode()).hex().encode() not in port.got
    monkeypatch.setenv("MQFS_PLAIN_TOKEN", "yes")
    with Port(m.Rread(0, b"")) as told:
        connection.connect(told.address, token=SECRET, timeout=HANG_S).close()
    assert SECRET.encode() in told.got


def test_an_answer_is_good_for_one_challenge(tmp_path: Path) -> None:
    known = tokens.Tokens(str(token_file(tmp_path, line_of(1001, SECRET))))
    key, own = digest(SECRET.encode()), challenge.new_nonce()
    proofs = [tokens.Proof(known, "", NONUNAME) for _ in range(2)]
    nonce, other = (challenge.parse_line(proof.read(1_024, 0)) for proof in proofs)
    assert nonce != other

    def answer(nonce: str, side: bytes = challenge.CLIENT, user: str = "") -> bytes:
        return challenge.line("0a0b", own, challenge.prove(key, side, nonce, own, user))

    for wrong in (answer(nonce), answer(other, challenge.SERVER), answer(other, user="1001")):
        with pytest.raises(Denied, match="unknown token"):
            proofs[1].write(wrong)
        other = challenge.parse_line(proofs[1].read(1_024, 0))
    with pytest.raises(Denied):
        proofs[1].write(answer(challenge.new_nonce()))
    with pytest.raises(BadRequest, match="answer to no challenge"):
        proofs[1].write(answer(other))
    assert proofs[0].write(answer(nonce)) > 0
    assert proofs[0].grant is not None
    assert challenge.parse_line(proofs[0].read(1_024, 0)) == challenge.prove(key, challenge.SERVER, nonce, own, "")


@pytest.mark.process
def test_the_library_never_sends_a_token_over_tcp(tmp_path: Path) -> None:
    """Read on the wire, by a relay between the two."""
    me = os.geteuid()
    path = token_file(tmp_path, line_of(me, SECRET))
    options = ("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), "--require-token")
    with Server.at(tmp_path, *options) as server:
        _, host, port = re.findall(r"9P at (tcp!\S+)", server.text())[0].split("!")
        with Relay((host, int(port))) as relay, mqfs.connect(relay.address, token=SECRET) as client:
            client.group("g", create=True).publish("s", b"x")
        assert SECRET.encode() not in relay.seen
        assert challenge.NAME.encode() in relay.seen
        with pytest.raises(Denied, match="without a token"):
            connection.connect(f"tcp!{host}!{port}", timeout=HANG_S)
        with connection.connect(server.address) as client:
            assert client.list("g")


class Relay:
    """Between a client and a server: it sees all bytes of the client's."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp!127.0.0.1!{self._socket.getsockname()[1]}"
        self.seen = b""
        self._thread = threading.Thread(target=self._serve, args=(server,))
        self._thread.start()

    def _serve(self, server: tuple[str, int]) -> None:
        near, _ = self._socket.accept()
        with near, socket.create_connection(server) as far:
            while ready := select.select([near, far], [], [], HANG_S)[0]:
                for sock in ready:
                    data = sock.recv(65_536)
                    if not data:
                        return
                    if sock is near:
                        self.seen += data
                    (far if sock is near else near).sendall(data)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(HANG_S)
        self._socket.close()


@pytest.mark.process
def test_guessing_is_slow_and_ends(tmp_path: Path) -> None:
    path = token_file(tmp_path, line_of(os.geteuid(), SECRET))
    with Server("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), "--trace", cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        answers, took = knock(found[1], "wrong-but-long-enough", "also-wrong-and-long", OTHER)
        assert [answer.split()[0] for answer in answers] == ["Rerror", "Rerror", "EOF"]
        assert took >= 2 * limits.TOKEN_DELAY_S
        answers, _ = knock(found[1], "wrong-but-long-enough", SECRET)
        assert [answer.split()[0] for answer in answers] == ["Rerror", "Rwrite"]
        eventually(lambda: "wrong tokens: 3" in server.text(), "it is logged")
        assert all(secret not in server.text() for secret in (SECRET, OTHER, "long-enough"))
        assert "(a token)" in server.text()


@pytest.mark.process
def test_who_does_not_wait_for_the_answer_to_a_wrong_token_is_let_go(tmp_path: Path) -> None:
    path = token_file(tmp_path, line_of(os.geteuid(), SECRET))
    with Server("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        host, port = found[1].split("!")[1:]
        raw = Raw(socket.create_connection((host, int(port)), 30))
        raw.ask("Tversion tag NOTAG msize 8192 version 9P2000")
        for fid in (8, 9):
            raw.ask(f'Tauth tag 1 afid {fid} uname "" aname ""')
        raw.send('Twrite tag 1 fid 8 offset 0 data "wrong-but-long-enough"')
        raw.send(f'Twrite tag 2 fid 9 offset 0 data "{SECRET}"')
        assert raw.reply() == "EOF"
        raw.close()
