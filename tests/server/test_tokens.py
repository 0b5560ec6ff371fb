"""Tokens as their users have them: `mqfs token` and its file, a real server over TCP, revocation, expiry, the audit."""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import shlex
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from mqfs import limits
from mqfs.cli.token import token as main
from mqfs.errors import BadConfig, Denied, MqfsError, NotFound
from mqfs.net import tokens
from mqfs.ninep.client import connection
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Server, environment
from tests.support.server import mqfs as run
from tests.support.tokens import SECRET, line_of

pytestmark = pytest.mark.process
ME = str(os.geteuid())


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run("token", *words, "--token-file", "tokens", cwd=folder)


def new(folder: Path, *options: str, user: str = ME) -> tuple[str, str]:
    """A new token's ID, and its secret."""
    done = command(folder, "new", user, *options)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"mq_([0-9a-f]{8})_[A-Za-z0-9_-]{43}\n", done.stdout)
    assert found is not None, done.stdout
    return found[1], done.stdout.strip()


def listed(folder: Path) -> list[list[str]]:
    done = command(folder, "ls")
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\t") for line in done.stdout.splitlines()]


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[Server, str]]:
    path = folder / "tokens"
    with Server("--listen", "tcp!127.0.0.1!0", "--token-file", str(path), *options, cwd=folder) as server:
        found = re.search(r"9P at (tcp!\S+)", server.text())
        assert found is not None
        yield server, found[1]


def tell(server: Server) -> None:
    os.kill(server.pid, signal.SIGHUP)


# ------------------------------------------------------------ the command


def test_a_token_is_made_listed_and_revoked(tmp_path: Path) -> None:
    first, secret = new(tmp_path)
    options = ("--scope", "write", "--path", "/my shop/eu", "--expires", "2100-01-01", "--note", "the mailer's")
    second, _ = new(tmp_path, *options)
    file = tmp_path / "tokens"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in file.read_text()
    assert listed(tmp_path) == [
        [first, ME, "admin", "/", "never"],
        [second, ME, "write", "/my shop/eu", "2100-01-01", "the mailer's"],
    ]
    assert command(tmp_path, "revoke", first).returncode == 0
    assert [row[0] for row in listed(tmp_path)] == [second]
    assert os.listdir(tmp_path) == ["tokens"]
    done = command(tmp_path, "revoke", first)
    assert done.returncode == 1
    assert f"no token '{first}' in {file} (expected an ID of mqfs token ls)\n" in done.stderr


def test_comments_and_other_lines_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    before = f"# ours\n\n{line_of(ME, SECRET)}"
    file.write_text(before)
    file.chmod(0o600)
    made, _ = new(tmp_path)
    assert file.read_text().startswith(before)
    assert listed(tmp_path)[0] == ["0a0b", ME, "admin", "/", "never"]
    assert command(tmp_path, "revoke", made).returncode == 0
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("new", "no-such-user"), "unknown user 'no-such-user' (expected one of getent passwd)"),
        (("new", ME, "--scope", "all"), "--scope 'all' (expected read, write, admin)"),
        (("new", ME, "--path", "shop"), "--path 'shop' (expected /GROUP or /GROUP/NAME, without . and ..)"),
        (("new", ME, "--path", "/shop/../x"), "--path '/shop/../x' (expected /GROUP or /GROUP/NAME"),
        (("new", ME, "--expires", "2027-13-01"), "--expires '2027-13-01': invalid time (expected YYYY-MM-DD, YYYY"),
        (("new", ME, "--expires", "tomorrow"), "--expires 'tomorrow': invalid time (expected YYYY-MM-DD, YYYY"),
        (("new", ME, "--expires", "30"), "--expires '30': invalid time (expected YYYY-MM-DD, YYYY-MM-DDTHH:MM:SSZ"),
        (("new", ME, "--expires", ""), "--expires '': invalid time (expected"),
        (("new", ME, "--expires", "9" * 19 + "d"), "--expires '9999999999999999999d': invalid time (expected"),
        (("new", ME, "--expires", "2020-01-31"), "--expires '2020-01-31': in the past (expected a later time)"),
        (("new", ME, "--expires", "0s"), "--expires '0s': in the past (expected a later time)"),
        (("new", ME, "--note", "two\nlines"), "--note: control characters (expected one line)"),
        (("new", ME, "--path", "/two\nlines"), "(expected /GROUP or /GROUP/NAME"),
        (("new", ME, "--path", "/not-utf-8\udcff"), "(expected /GROUP or /GROUP/NAME"),
        (("ls",), "No such file or directory (expected a readable file)"),
        (("revoke", "a"), "No such file or directory (expected a readable file)"),
    ],
)
def test_a_refused_command_makes_no_file(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    done = command(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert why in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_file_may_be_named_by_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mqfs.toml").write_text(f'token-file = "{tmp_path}/secrets"\n')
    assert run("token", "new", ME, "--config", "mqfs.toml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "secrets").exists()
    done = run("token", "ls", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "mqfs: no file of tokens (expected --token-file FILE, or --config FILE with token-file)\n",
    )


def test_on_a_terminal_the_secret_is_a_line_of_its_own(tmp_path: Path) -> None:
    words = [*COMMAND[1:], "token", "new", ME, "--token-file", "tokens"]
    child = pexpect.spawn(COMMAND[0], words, cwd=str(tmp_path), env=environment(), timeout=HANG_S)
    child.expect(r"^mq_[0-9a-f]{8}_[A-Za-z0-9_-]{43}\r\n$")
    child.expect(pexpect.EOF)


def test_two_who_edit_at_once_lose_nothing(tmp_path: Path) -> None:
    words = [*COMMAND, "token", "new", ME, "--token-file", "tokens"]
    children = [
        subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(5)
    ]
    made = {child.communicate(timeout=HANG_S)[0].split("_")[1] for child in children}
    assert {row[0] for row in listed(tmp_path)} == made
    assert len(made) == 5


def test_an_edit_that_would_make_the_file_too_long_is_refused(tmp_path: Path) -> None:
    """The server would refuse the file, and no token could be revoked any more. One that just fits is edited."""
    file, made = tmp_path / "tokens", new(tmp_path)[0]
    size = file.stat().st_size
    comment = b"#" * (limits.TOKEN_FILE_BYTES - 2 * size - 1) + b"\n"
    for spare, fits in ((0, True), (1, False)):
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[0] + b"#" * spare + comment)
        before = file.read_bytes()
        done = command(tmp_path, "new", ME)
        said = f"mqfs: --token-file {file}: too long (expected at most {limits.TOKEN_FILE_BYTES} bytes)\n"
        assert (done.returncode, done.stderr) == ((0, "") if fits else (2, said))
        assert fits or file.read_bytes() == before
        assert made in [row[0] for row in listed(tmp_path)]
        assert os.listdir(tmp_path) == ["tokens"]
    assert command(tmp_path, "revoke", made).returncode == 0


@pytest.mark.parametrize("to", [">/dev/full", ">&-", "a pipe without a reader"])
@pytest.mark.parametrize("before", [None, "# of ann"])
def test_a_token_whose_secret_cannot_be_printed_is_not_left(tmp_path: Path, to: str, before: str | None) -> None:
    file, text = tmp_path / "tokens", f"{before}\n{line_of(ME, SECRET)}" if before else ""
    if before:
        file.touch(0o600)
        file.write_text(text)
    reader, writer = os.pipe()
    os.close(reader)
    line = f"exec {shlex.join(COMMAND)} token new {ME} --token-file tokens {to if to.startswith('>') else ''}"
    env = {**environment(), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr.count("\n") == (1 if to.startswith(">") else 0)
    assert file.read_text() == text


@pytest.mark.parametrize("words", [("new", ME), ("revoke", "0a0b")])
def test_an_edit_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"#{'x' * 100_000}\n{line_of(ME, SECRET)}#\n")
    before = file.read_bytes()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        [*COMMAND, "token", *words, "--token-file", "tokens"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, preexec_fn=limit, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"mqfs: {file}: File too large\n")
    assert (os.listdir(tmp_path), file.read_bytes()) == (["tokens"], before)


def test_an_id_that_is_in_the_file_is_not_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(["0a0b", "0a0b", "0c0d"])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(numbers))
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(line_of(ME, SECRET))
    main(["new", ME, "--token-file", str(file)], standalone_mode=False)
    assert [row[0] for row in listed(tmp_path)] == ["0a0b", "0c0d"]


def test_what_an_edit_did_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file before it has its name, and its name after that."""
    made, _ = new(tmp_path)
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def note_sync(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        sync(fd)

    def note_rename(source: str, to: str) -> None:
        done.append("rename")
        rename(source, to)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    for words in (["new", ME], ["revoke", made]):
        main([*words, "--token-file", str(tmp_path / "tokens")], standalone_mode=False)
        assert done == ["file", "rename", "folder"]
        done.clear()


# ------------------------------------------------------------ the server


def test_scope_and_path_over_tcp(tmp_path: Path) -> None:
    _, admin = new(tmp_path)
    _, writer = new(tmp_path, "--scope", "write", "--path", "/shop/eu")
    _, reader = new(tmp_path, "--scope", "read")
    with served(tmp_path) as (server, address):
        with connection.connect(address, token=admin) as client:
            for name in ("shop", "shop/eu", "other"):
                client.mkdir(name)
            for name in ("shop/eu/s", "shop/x"):
                client.create(name).close()
        with connection.connect(address, token=writer) as client:
            file = client.open("shop/eu/s", "w")
            assert file.write(b"hello") == 5
            for call in (
                lambda: client.open("shop/x", "w"),
                lambda: client.open("other/nowhere"),
                lambda: client.list("shop"),
                lambda: client.mkdir("shop/eu/new"),
                lambda: client.open("shop/eu/ctl", "w"),
            ):
                with pytest.raises((Denied, NotFound)):  # 9P tells no more of a walk that came half the way
                    call()
        with connection.connect(address, token=writer, aname="shop/eu") as client:
            assert "s" in client.list()
        with pytest.raises(Denied, match="/other: outside the path of token"):
            connection.connect(address, token=writer, aname="other")
        with connection.connect(address, token=reader) as client:
            assert client.open("shop/eu/ctl").receive()
            with pytest.raises(Denied, match="has scope read for s"):
                client.open("shop/eu/s", "w")
        assert not any(secret in server.text() for secret in (admin, writer, reader))


def test_a_revoked_token_ends_its_connections_and_its_claims_go_back(tmp_path: Path) -> None:
    lost, worker_token = new(tmp_path)
    _, kept = new(tmp_path)
    with (
        served(tmp_path) as (server, address),
        connection.connect(address, token=kept) as other,
        connection.connect(address, token=worker_token) as worker,
    ):
        worker.mkdir("g")
        worker.open("g/ctl", "w").write(b"deliver one\nack next\nbackoff 10ms 10ms\n")
        worker.create("g/jobs").close()
        worker.open("g/jobs", "w").write(b"a job")
        claimed = worker.open("g/jobs", "r+")
        assert claimed.receive(100) == b"a job"
        assert command(tmp_path, "revoke", lost).returncode == 0
        eventually(lambda: f"connection ended: token {lost} revoked" in server.text(), "its connection ends")
        with pytest.raises((MqfsError, ConnectionError)):
            claimed.receive(100)
        assert other.open("g/jobs", "r+").receive(100) == b"a job"
        with pytest.raises(Denied, match="unknown token"):
            connection.connect(address, token=worker_token)
        assert worker_token not in server.text()


def test_an_expired_token_ends(tmp_path: Path) -> None:
    new(tmp_path)
    with served(tmp_path) as (server, address):
        made, secret = new(tmp_path, "--expires", "4s")  # not before: a start may take as long on a busy machine
        tell(server)
        eventually(lambda: "tokens read" in server.text(), "it is read")
        with connection.connect(address, token=secret) as client:
            client.mkdir("g")
            eventually(lambda: f"token {made} revoked, changed or expired" in server.text(), "its connection ends")
            with pytest.raises((MqfsError, ConnectionError)):
                client.mkdir("h")
        with pytest.raises(Denied, match="unknown token"):
            connection.connect(address, token=secret)
        assert listed(tmp_path)[1][4].endswith("(expired)")


def test_a_new_token_is_known_at_once_by_sighup_and_soon_without(tmp_path: Path) -> None:
    new(tmp_path)
    with served(tmp_path) as (server, address):
        for tells in (True, False):
            _, secret = new(tmp_path)
            before = server.text().count("tokens read")
            if tells:
                tell(server)
            eventually(lambda before=before: server.text().count("tokens read") > before, "it is read")
            connection.connect(address, token=secret).close()


def test_a_bad_new_file_is_logged_and_the_old_tokens_stay(tmp_path: Path) -> None:
    _, secret = new(tmp_path)
    file = tmp_path / "tokens"
    with served(tmp_path) as (server, address), connection.connect(address, token=secret) as client:
        bad = [
            (f"{ME} sha256:x\n", 0o600, "line 1: malformed hash (expected sha256:ID:HEX, 64 digits)"),
            (f"{ME} {SECRET}\n", 0o600, "line 1: malformed hash (expected"),
            (line_of(ME, SECRET), 0o644, "open to others (expected mode 600"),
        ]
        for text, mode, why in bad:
            os.unlink(file)
            file.touch(0o600)
            file.write_text(text)
            file.chmod(mode)
            eventually(lambda why=why: f"{why}" in server.text(), "it is refused")
        os.unlink(file)
        tell(server)
        eventually(lambda: "No such file or directory" in server.text(), "it is missed")
        assert server.text().count("the tokens stay as they were") >= 3
        client.mkdir("still")
        connection.connect(address, token=secret).close()
        assert SECRET not in server.text()


def test_a_changed_scope_ends_connections_of_before(tmp_path: Path) -> None:
    made, secret = new(tmp_path)
    file = tmp_path / "tokens"
    with served(tmp_path) as (server, address), connection.connect(address, token=secret) as client:
        client.mkdir("g")
        fresh = tmp_path / "fresh"
        fresh.touch(0o600)
        fresh.write_text(file.read_text().replace("scope=admin", "scope=read note='it''s new'"))
        fresh.rename(file)
        eventually(lambda: f"token {made} revoked" in server.text(), "its connection ends")
        with connection.connect(address, token=secret) as again, pytest.raises(Denied, match="has scope read"):
            again.mkdir("h")


def test_the_audit_of_a_server(tmp_path: Path) -> None:
    made, secret = new(tmp_path)
    with served(tmp_path, "--audit", "changes") as (server, address):
        with connection.connect(address, token=secret) as client:
            client.mkdir("g")
        with connection.connect(address, token=secret) as client:
            assert "g" in client.list()
        with pytest.raises(Denied):
            connection.connect(address, token="mq_00000000_" + "x" * 43)
        rows = audit_rows(server)
        assert [(row["method"], row["status"], row["detail"]) for row in rows] == [
            ("token", "ok", "first use"),
            ("mkdir", "ok", "mode 755"),
            ("token", "refused", "unknown or expired"),
        ]
        assert {row["token"] for row in rows[:2]} == {made}
        assert re.fullmatch(r"9p tcp \d+ 127\.0\.0\.1", rows[0]["from"])
        assert rows[1]["from"] == rows[0]["from"].rpartition(" ")[0]
        assert secret not in server.text()


def audit_rows(server: Server) -> list[dict[str, Any]]:
    lines = [line for line in server.text().splitlines() if line.startswith("mqfs: audit ")]
    return [{key: json.loads(value) for key, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', line)} for line in lines]


def test_of_audit_lines_none_is_left_out(tmp_path: Path) -> None:
    with Server.at(tmp_path, "--audit", "changes") as server, connection.connect(server.address) as client:
        for number in range(100):
            client.mkdir(f"g{number}")
        assert len([row for row in audit_rows(server) if row["method"] == "mkdir"]) == 100


def test_an_unknown_level_of_audit(tmp_path: Path) -> None:
    done = run("serve", "--audit", "some", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "mqfs: --audit 'some': unknown level (expected off, changes, all)\n",
    )


# ------------------------------------------------------------ the answer to: whose secret is this?


def test_an_id_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"{ME} sha256:a:{'0' * 64}\n" * 2)
    with pytest.raises(BadConfig, match="ID a twice"):
        tokens.Tokens(str(file))


def test_a_secret_is_known_whole_and_until_it_expires(tmp_path: Path) -> None:
    made, secret = new(tmp_path, "--expires", "3s", "--scope", "write", "--path", "/a/b")
    known = tokens.Tokens(str(tmp_path / "tokens"))
    grant = known.user(secret.encode())
    assert grant is not None
    assert (grant.uid, grant.id, grant.scope, grant.path) == (int(ME), made, "write", ("a", "b"))
    for wrong in (b"", secret[:-1].encode(), secret.encode() + b"x", secret.encode().swapcase(), made.encode()):
        assert known.user(wrong) is None
    ended: list[Any] = []
    known.on_ended.append(ended.append)
    eventually(lambda: known.user(secret.encode()) is None, "it expires")
    known.tick()
    assert ended == [{grant}]


def test_revoke_of_nothing_leaves_the_file(tmp_path: Path) -> None:
    new(tmp_path)
    before = (tmp_path / "tokens").stat()
    assert command(tmp_path, "revoke", "nothing").returncode == 1
    after = (tmp_path / "tokens").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
