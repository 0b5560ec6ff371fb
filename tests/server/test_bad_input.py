"""Everything that can be said wrongly to `mqfs`: one clear line, the exit code that fits, nothing changed."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs
import pytest

from mqfs.errors import MqfsError
from mqfs.ninep.client.connection import connect
from mqfs.server.app import check_words
from mqfs.server.options import KINDS, Options
from mqfs.store.store import DiskStore
from tests.support.eventually import HANG_S
from tests.support.server import COMMAND, Server, environment, mounted, mqfs, unmount

USAGE, FAILED = 2, 1


def refused(cwd: Path, code: int, *arguments: str, **more: str) -> str:
    """Run it, and return its one line."""
    before = sorted(cwd.rglob("*"))
    done = mqfs(*arguments, cwd=cwd, **more)
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("mqfs: "), lines
    assert done.stdout == ""
    assert sorted(cwd.rglob("*")) == before
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--stor", "x"], "unknown option '--stor' (did you mean --store?)"),
        (["serve", "--store"], "--store: missing value"),
        (["serve", "--insecure=yes"], "--insecure: unexpected value"),
        (["serve", "extra", "more"], "unexpected argument 'extra' (see mqfs serve --help)"),
        (["sevre"], "unknown command 'sevre' (did you mean serve?)"),
        (["token", "add"], "unknown command 'add' (expected one of ls, new, revoke)"),
        (["check"], "missing argument STORE (see mqfs check --help)"),
        (["bench", "--size", "big"], "--size 'big': not a number (expected a whole number)"),
        (["bench", "--rate", "big"], "--rate 'big': not a number (expected a number)"),
        (["spark", "replay", "x", "--rate", "-1"], "--rate -1: out of range (expected at least 0)"),
        (["bridge", "fq", "h:1", "e", "p", "h:2"], "missing option --node (see mqfs bridge fq --help)"),
        (["bridge", "fsq", "--separator", "x", "d", "a", "g"], "--separator 'x' (expected two characters"),
        (["completion", "tcsh"], "SHELL 'tcsh': unknown (expected one of bash, zsh, fish)"),
        (["serve", "--listen", "127.0.0.1"], "unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"),
        (
            ["serve", "--listen", "tls://localhost:5640"],
            "no certificate (expected --tls-cert FILE)",
        ),
        (["serve", "--listen", "udp!localhost!564"], "unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"),
        (["serve", "--listen", "unix!"], "unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"),
        (["serve", "--listen", "tcp!localhost!http"], "expected 0 to 65535"),
        (["serve", "--listen", "tcp!localhost!65536"], "expected 0 to 65535"),
        (["serve", "--listen", "unix!" + "x" * 200], "at most 107 bytes"),
        (["serve", "--default", "replay everything"], "off, last, key or all"),
        (["serve", "--default", "reply all"], "unknown command 'reply'"),
        (["serve", "--default", "eof s"], "eof: an action (expected a setting)"),
        (["serve", "--tcp-user", "no such user"], "no such user"),
        (["serve", "--config", "absent.toml"], "absent.toml: No such file"),
        *(
            (["serve", "--http-origin", text], f"--http-origin {text!r}: no browser sends it (expected SCHEME://HOST")
            for text in ("https://dash.example/", "dash.example", "https://Dash.example", "*", "https://*.example", "")
        ),
        *(
            (["serve", "--http-host", text], f"--http-host {text!r}: not the name of a host (expected one such as")
            for text in ("http://mq.example", "mq.example/", "*.example", "")
        ),
        (["serve", "--mount", ""], "--mount ''"),
        (["serve", "--store", ""], "--store ''"),
    ],
)
def test_usage(tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in refused(tmp_path, USAGE, *arguments)


TCP = "tcp!HOST!PORT or tls!HOST!PORT or --http-proxy"
HTTP = "--http or --http-ntfy or --http-durable"
NEEDS = {
    "--http-origin https://a.example": f"{HTTP} or --fq",
    "--http-host a.example": f"{HTTP} or --fq",
    "--http-proxy 10.0.0.0/8": HTTP,
    "--http-qpubs": "--http",
    "--http-qpubs --http-ntfy g=unix!n": "--http",
    "--fq-group a": "--fq",
    "--fq-node 192.0.2.1": "--fq",
    "--fq-users f --token-file t": "--fq",
    "--tcp-user daemon": TCP,
    "--token-file t": f"{TCP} or --fq-users",
    "--require-token --listen tcp!127.0.0.1!0": "--token-file",
    "--tls-cert c --listen tcp!127.0.0.1!0": "tls!HOST!PORT",
    "--tls-key k": "--tls-cert",
    "--tls-client-ca a": "--tls-cert",
    "--replica file:///r": "--store",
    "--standby": "--replica",
    "--failover 9s": "--replica",
    "--confirm 1": "--replica",
    "--replica-keep 2h": "--replica",
    "--allow-other": "--mount",
    "--no-allow-other": "--mount",
}


@pytest.mark.parametrize("words", NEEDS)
def test_an_option_without_effect(tmp_path: Path, words: str) -> None:
    """Its user would believe that it is in force."""
    option = words.split()[0].replace("--no-", "--")
    line = refused(tmp_path, USAGE, "serve", "--listen", "unix!absent/s", *words.split())
    assert line == f"mqfs: {option}: no effect alone (expected also {NEEDS[words]})"


def test_each_option_that_needs_another_is_tried() -> None:
    needy = {f"--{field.name.replace('_', '-')}" for field in attrs.fields(Options) if "needs" in field.metadata}
    assert needy == {words.split()[0] for words in NEEDS} - {"--no-allow-other"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stor = 'x'", "unknown key 'stor' (expected one of store mount"),
        ("store = 7", 'invalid store = 7 (expected "TEXT")'),
        ("listen = true", 'invalid listen = true (expected "TEXT"'),
        ("listen = ['unix!a', 3]", "listen = ['unix!a', 3]"),
        ("trace = 'yes'", "'yes' (expected some of 9p"),
        ("store", "TOML"),
        ("[serve]\nstore = 'x'", "unknown key 'serve'"),
        ("\x80", "KEY = VALUE"),
        ('store = "a\\u0000b"', "invalid store = 'a\\x00b' (expected text without NUL)"),
        ("default = 'replay nothing'", "off, last, key or all"),
        ("http-origin = 'https://dash.example/'", "no browser sends it"),
        ("listen = 'udp!x'", "unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"),
    ],
)
def test_config(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mqfs.toml").write_bytes(text.encode("latin-1"))
    assert says in refused(tmp_path, USAGE, "serve", "--config", "mqfs.toml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve --config /dev/zero", "--config /dev/zero: too long (expected at most 1048576 bytes)"),
        ("token ls --config /dev/full", "--config /dev/full: too long (expected at most 1048576 bytes)"),
        ("serve --listen tcp!127.0.0.1!0 --token-file /dev/zero", "not a regular file (expected a file of mode 600)"),
        (
            "serve --store s --fq 127.0.0.1:0 --token-file tokens --fq-users /dev/zero",
            "--fq-users /dev/zero: too long (expected at most 1048576 characters)",
        ),
        ("serve --listen tls!127.0.0.1!0 --tls-cert /dev/zero", "not a regular file (expected a PEM file)"),
        ("mount unix!s mq --token-file /dev/zero", "/dev/zero: too long (expected a token or a password)"),
        ("mount unix!s mq --token-file /dev/null", "/dev/null: empty (expected a token or a password)"),
        (
            "bridge fq h:1 e p unix!s --node 127.0.0.1 --password-file /dev/zero",
            "/dev/zero: too long (expected a token or a password)",
        ),
        (
            "bridge fsq d unix!s g --token-file /dev/null",
            "/dev/null: empty (expected a token or a password)",
        ),
    ],
)
def test_a_file_that_has_no_end_or_nothing(tmp_path: Path, words: str, says: str) -> None:
    (tmp_path / "tokens").touch(0o600)
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh", *COMMAND, *words.split()],
        cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == USAGE
    assert (done.stderr.count("\n"), says in done.stderr) == (1, True), done.stderr


MANY = "9" * 5_000
ODD = [
    "", "\0", "a\0b", "\udcff", "\n", "²", MANY, "[", "]", "!", "=", "/", ":", "::/999", "a" * 10_000, "(" * 3_000,
    "http://[x", "nats://[::1/x", "file://", "unix!", "unix!\0", "tcp![!1", "tls!²!1", "user:", "user:\0", "g=", "g=[",
    f"ttl {MANY}d", f"limit a {MANY}", "bind a prefix:'' " + "(" * 3_000, f"* messages={MANY}", "\0=\0",
]  # fmt: skip


@pytest.mark.parametrize("key", [key.replace("-", "_") for key, kind in KINDS.items() if kind != "flag"])
def test_odd_values_of_an_option_are_accepted_or_refused(key: str) -> None:
    """Also of a program that serves inside itself, which may give what neither a command line nor a file can have."""
    enough = {"store": "s", "replica": "file:///r", "token_file": "t"}  # so that all options are looked at
    for odd in ODD:
        options = Options(**{**enough, key: (odd,) if KINDS[key.replace("_", "-")] == "list" else odd})
        with pytest.raises(MqfsError) if "\0" in odd else suppress(MqfsError):
            check_words(options)


def test_standard_input_closed(tmp_path: Path) -> None:
    line = f"exec {shlex.join(COMMAND)} serve <&- >&-"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    assert done.returncode == USAGE
    assert "standard input or output: closed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("to", "says"),
    [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device"), ("", "")],
    ids=["closed", "full", "a pipe without a reader"],
)
@pytest.mark.parametrize(
    "words", ["check store", "doctor store", "token ls --token-file tokens", "completion bash", "--help", "--version"]
)
def test_output_that_cannot_be_written(tmp_path: Path, words: str, to: str, says: str) -> None:
    DiskStore(f"{tmp_path}/store").close()
    (tmp_path / "tokens").write_text(f"root sha256:a:{'0' * 64}\n")
    (tmp_path / "tokens").chmod(0o600)
    reader, writer = os.pipe()
    os.close(reader)
    env = {**environment(), "PYTHONUNBUFFERED": ""}
    line = f"exec {shlex.join(COMMAND)} {words} {to}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == (f"mqfs: standard output: {says}\n" if says else "")
    assert done.returncode == FAILED


def not_empty(path: Path) -> None:
    path.mkdir()
    (path / "letter").touch()


def another_version(path: Path) -> None:
    path.mkdir()
    (path / "mqfs").write_text("mqfs 99\nuuid 0\ngroups 2\n")


def no_label(path: Path) -> None:
    path.mkdir()
    (path / "mqfs").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Path.touch, "store: not a directory"),
        (not_empty, "not empty and not a store"),
        (another_version, "store version 99 (expected 1)"),
        (no_label, "no label (expected 'mqfs 1')"),
    ],
)
def test_store(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    make(tmp_path / "store")
    line = refused(tmp_path, FAILED, "serve", "--store", "store", "--listen", "unix!s")
    assert says in line
    assert not (tmp_path / "s").exists()


def test_store_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    line = refused(tmp_path, FAILED, "serve", "--store", "a/b", "--listen", "unix!s")
    assert line.endswith(f": {tmp_path.resolve()}/a/b: {tmp_path.resolve()}/a does not exist (expected a folder)")


def test_store_locked(tmp_path: Path) -> None:
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path) as server:
        line = refused(tmp_path, FAILED, "serve", "--store", "store", "--listen", "unix!other")
        assert f"in use by process {server.pid}" in line
        assert f"in use by process {server.pid}" in refused(tmp_path, FAILED, "check", "store")


def test_corrupt_store(tmp_path: Path) -> None:
    """A group of whose log nothing is left to be read."""
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path):
        pass
    (log,) = (tmp_path / "store").rglob("*.log")
    size = log.stat().st_size
    log.write_bytes(os.urandom(size))
    for path in (tmp_path / "store").rglob("*.idx"):
        path.unlink()
    done = mqfs("serve", "--store", "store", "--listen", "unix!s", cwd=tmp_path)
    assert done.returncode == FAILED
    assert "Traceback" not in done.stderr
    assert all(line.startswith("mqfs: ") for line in done.stderr.splitlines()), done.stderr
    kept = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size == size]
    assert kept, "what failed a check is never deleted"


def test_check_finds_and_repairs(tmp_path: Path) -> None:
    """Rot in the middle of a log: found, left alone without --fix, moved aside with it; the rest is there."""
    with (
        Server("--store", "store", "--listen", "unix!s", "--default", "replay all", cwd=tmp_path),
        connect(f"unix!{tmp_path / 's'}") as client,
    ):
        client.mkdir("a")
        with client.create("a/s") as stream:
            for number in range(3):
                stream.write(b"message %d" % number * 100)
    assert mqfs("check", "store", cwd=tmp_path).stdout == "store: sound\n"
    (log,) = [path for path in (tmp_path / "store").rglob("*.log") if b"message 1" in path.read_bytes()]
    rotten = log.read_bytes().replace(b"message 1", b"MESSAGE 1", 1)
    log.write_bytes(rotten)
    check = mqfs("check", "store", cwd=tmp_path)
    assert check.returncode == FAILED
    assert "1 problem (repair: --fix)" in check.stdout
    assert log.read_bytes() == rotten
    fixed = mqfs("check", "--fix", "store", cwd=tmp_path)
    assert (fixed.returncode, fixed.stderr) == (0, ""), fixed.stdout
    assert any(b"MESSAGE 1" in path.read_bytes() for path in (tmp_path / "store" / "quarantine").iterdir())
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path), connect(f"unix!{tmp_path / 's'}") as client:
        stream = client.open("a/s")
        assert [stream.receive()[:9], stream.receive()[:9]] == [b"message 0", b"message 2"]


def test_check_of_what_is_no_store(tmp_path: Path) -> None:
    path = tmp_path.resolve()
    assert refused(tmp_path, FAILED, "check", "absent").endswith(f": {path}/absent: does not exist")
    assert refused(tmp_path, FAILED, "check", "a/b").endswith(f": {path}/a/b: does not exist")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path, FAILED, "check", "empty").endswith(f": {path}/empty: not a store")
    (tmp_path / "file").touch()
    assert refused(tmp_path, FAILED, "check", "file").endswith(f": {path}/file: not a store")
    not_empty(tmp_path / "full")
    assert refused(tmp_path, FAILED, "check", "full").endswith(f": {path}/full: not a store")


def test_unix_address_in_use(tmp_path: Path) -> None:
    with Server("--listen", "unix!s", cwd=tmp_path):
        line = refused(tmp_path, FAILED, "serve", "--store", "store", "--listen", "unix!s")
        assert "unix!s: in use by another server" in line


def test_unix_address_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    assert "unix!s: not a socket" in refused(tmp_path, FAILED, "serve", "--listen", "unix!s")
    assert (tmp_path / "s").read_text() == "precious"


def test_unix_address_without_folder(tmp_path: Path) -> None:
    assert "directory that does not exist" in refused(tmp_path, FAILED, "serve", "--listen", "unix!absent/s")


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(tmp_path, FAILED, "serve", "--store", "store", "--listen", f"tcp!127.0.0.1!{port}")
        assert "in use" in line


def test_tcp_off_loopback(tmp_path: Path) -> None:
    assert "--insecure" in refused(tmp_path, FAILED, "serve", "--store", "store", "--listen", "tcp!0.0.0.0!0")


def test_second_address_bad_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    refused(tmp_path, FAILED, "serve", "--listen", "unix!s", "--listen", "unix!absent/s")
    assert not (tmp_path / "s").exists()


def test_name_space_of_somebody_else(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.mkdir(tmp_path / "ns")
        os.chown(tmp_path / "ns", 1, 1)
        space = str(tmp_path / "ns")
    else:
        space = "/"
    assert "belongs to another user" in refused(tmp_path, FAILED, "serve", "-s", "mq", NAMESPACE=space)


# ---------------------------------------------------------------- the mount point


def test_mount_point_missing(tmp_path: Path) -> None:
    line = refused(tmp_path, FAILED, "serve", "--store", "store", "--mount", "mq")
    assert "mq" in line


def test_mount_point_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "mq").touch()
    assert "directory" in refused(tmp_path, FAILED, "serve", "--store", "store", "--mount", "mq")


def test_mount_point_not_empty(tmp_path: Path) -> None:
    not_empty(tmp_path / "mq")
    assert "empty" in refused(tmp_path, FAILED, "serve", "--store", "store", "--mount", "mq")


def test_mount_point_in_use(tmp_path: Path) -> None:
    mount = tmp_path / "mq"
    mount.mkdir()
    with Server(cwd=tmp_path, mount=mount):
        done = mqfs("serve", "--store", "store", "--mount", "mq", cwd=tmp_path)
        assert done.returncode == FAILED
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "in use" in done.stderr or "mounted" in done.stderr
        assert os.listdir(mount), "the mount of the other server is still there"
    assert not mounted(mount)


def test_stale_mount_is_cleaned_at_start(tmp_path: Path) -> None:
    mount = tmp_path / "mq"
    mount.mkdir()
    try:
        server = Server("--store", "store", "--mount", "mq", cwd=tmp_path)
        server.kill()
        assert mounted(mount)
        with pytest.raises(OSError, match="not connected"):
            os.listdir(mount)
        with Server("--store", "store", cwd=tmp_path, mount=mount):
            assert "ctl" in os.listdir(mount)
    finally:
        unmount(mount)
