"""Tauth over TCP: a secret written to its fid says who a client is; a plain dialogue, and the real server's socket."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest

import mqfs
from mqfs import limits
from mqfs.errors import BadConfig, Denied
from mqfs.net import tokens
from mqfs.net.peer import Peer
from mqfs.ninep import blocking
from mqfs.ninep.server.session import Session
from tests.ninep.test_dialogues import Dialogue, InMemory
from tests.support.eventually import eventually
from tests.support.ninep import Raw, make_tree
from tests.support.server import Server
from tests.support.server import mqfs as run

SECRET, OTHER = "a-secret-of-one-person", "0123456789abcdef"


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("by_byte", [False, True], ids=["whole", "byte by byte"])
def test_the_dialogue(tmp_path: Path, by_byte: bool) -> None:
    known = tokens.read_file(
        str(token_file(tmp_path, f"1001 {SECRET}\n# a comment\n\n1002\t{OTHER}\n1002 {OTHER}-new\n"))
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


@pytest.mark.process
def test_over_tcp(tmp_path: Path) -> None:
    me = str(os.geteuid())
    path = token_file(tmp_path, f"{me} {SECRET}\n1001 {OTHER}\n")
    options = ("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), "--tcp-user", "nobody")
    with Server(*options, cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        with blocking.connect(found[1], token=SECRET) as client:
            client.mkdir("g")
            client.create("g/s").close()
            client.chmod("g/s", 0o600)
        with blocking.connect(found[1]) as client, pytest.raises(Denied):
            client.open("g/s", "w")
        with mqfs.connect(found[1], token=SECRET + "\n", user=me) as library:
            library.group("g").publish("s", b"mine")
        for token, user in (("nonsense-nonsense", ""), (OTHER, me), ("", "")):
            if token:
                with pytest.raises(Denied, match="unknown token"):
                    blocking.connect(found[1], token=token, user=user)
        assert SECRET not in server.text()


@pytest.mark.process
def test_a_server_without_tokens(tmp_path: Path) -> None:
    with Server("--listen", "tcp!127.0.0.1!0", "--tcp-user", "nobody", cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        with pytest.raises(Denied, match="server without tokens"):
            blocking.connect(found[1], token=SECRET)


@pytest.mark.process
def test_over_a_unix_socket_the_system_says_who_it_is(tmp_path: Path) -> None:
    address = f"unix!{tmp_path}/9p"
    with Server("--listen", address, cwd=tmp_path), blocking.connect(address, token="whatever this is") as client:
        client.mkdir("g")


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (f"1001 {SECRET}\n", 0o640, "open to others (expected mode 600"),
        (
            "1001 short\n",
            0o600,
            "line 1: malformed (expected USER SECRET, the secret at least 16 bytes",
        ),
        (f"\n1001 {SECRET} more\n", 0o600, "line 2: malformed (expected USER SECRET"),
        (f"no-such-user {SECRET}\n", 0o600, "line 1: unknown user 'no-such-user'"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, mode: int, why: str) -> None:
    path = token_file(tmp_path, text, mode)
    with pytest.raises(BadConfig) as caught:
        tokens.read_file(str(path))
    assert why in str(caught.value)
    done = run("serve", "--token-file", str(path), "--listen", f"unix!{tmp_path}/9p", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert why in done.stderr
    assert SECRET not in done.stderr


@pytest.mark.process
def test_no_file(tmp_path: Path) -> None:
    done = run("serve", "--token-file", "nowhere", "--listen", f"unix!{tmp_path}/9p", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "mqfs: bad configuration: --token-file nowhere: No such file or directory (expected a readable file)\n"
    )


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
def test_guessing_is_slow_and_ends(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"{os.geteuid()} {SECRET}\n")
    with Server("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), "--trace", cwd=tmp_path) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        answers, took = knock(found[1], "wrong-but-long-enough", "also-wrong-and-long", OTHER)
        assert [answer.split()[0] for answer in answers] == ["Rerror", "Rerror", "EOF"]
        assert took >= 2 * limits.TOKEN_DELAY_S
        answers, _ = knock(found[1], "wrong-but-long-enough", SECRET)
        assert [answer.split()[0] for answer in answers] == ["Rerror", "Rwrite"]
        eventually(lambda: "permission denied: 3 wrong tokens" in server.text(), "it is logged")
        assert all(secret not in server.text() for secret in (SECRET, OTHER, "long-enough"))
        assert "(a token)" in server.text()


@pytest.mark.process
def test_who_does_not_wait_for_the_answer_to_a_wrong_token_is_let_go(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"{os.geteuid()} {SECRET}\n")
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
