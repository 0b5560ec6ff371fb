"""SIGHUP: what a changed configuration file changes in a running server, and what it does not."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.ninep.client.connection import connect
from mqfs.server.options import KINDS
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server
from tests.support.server import mqfs as run

PAGE = "https://dash.example"
PLAIN = 'listen = "unix!s"\nhttp = "127.0.0.1:0"\n'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "mqfs.toml").write_text('listen = "unix!s"\nhttp = "127.0.0.1:0"\n')
    with Server("--config", "mqfs.toml", cwd=tmp_path) as found:
        yield found


def reload(server: Server, text: str, said: str) -> None:
    """Change the file, send SIGHUP, wait for that line of the log."""
    (server.folder / "mqfs.toml").write_bytes(text.encode(errors="surrogateescape"))
    count = server.text().count(said)

    def is_said() -> bool:
        assert server.process.poll() is None, server.text()
        return server.text().count(said) > count

    server.process.send_signal(signal.SIGHUP)
    eventually(is_said, f"{said}: {text:.99}")


def refusal(server: Server) -> str:
    """Why a page of another site may not make a group as user nobody: the rules of browsers, or else its rights."""
    found = re.search(r"HTTP at tcp!127\.0\.0\.1!(\d+)", server.text())
    assert found is not None
    headers = {"Origin": PAGE, "Host": "mq.example"}
    request = urllib.request.Request(f"http://127.0.0.1:{found[1]}/g/", method="PUT", headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=HANG_S)
    return refused.value.read().decode()


def test_origins_and_names_of_the_host(server: Server) -> None:
    both, plain = "options changed: http-origin, http-host", 'listen = "unix!s"\nhttp = "127.0.0.1:0"\n'
    assert "host 'mq.example'" in refusal(server)
    reload(server, f'{plain}http-host = "mq.example"\n', "options changed: http-host")
    assert "another site's page" in refusal(server)
    reload(server, f'{plain}http-host = "mq.example"\nhttp-origin = "{PAGE}"\n', "options changed: http-origin")
    assert "excludes uid 65534" in refusal(server)
    reload(server, plain, both)
    assert "host 'mq.example'" in refusal(server)


def test_the_log(server: Server) -> None:
    """Its level and format change; then a warning of JSON names the options that need a start."""
    text = 'listen = "unix!s"\nhttp = "127.0.0.1:0"\nlog-format = "json"\n'
    reload(server, text, '"message": "options changed: log-format"')
    text = 'listen = "unix!t"\nhttp = "127.0.0.1:0"\nstore = "st"\nlog-format = "json"\nlog-level = "warning"\n'
    reload(server, text, "from the next start: store, listen")
    line = json.loads(server.text().splitlines()[-1])
    assert (line["level"], line["logger"]) == ("warning", "mqfs")
    assert not (server.folder / "t").exists()
    assert not (server.folder / "st").exists()
    assert server.stop() == 0
    assert "stopping" not in server.text()  # a line of level info


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('listen = "unix!s"\nlog-level = "loud"\nhttp-origin = "http://x"\n', "--log-level 'loud': unknown"),
        ("stroe = 1\n", "unknown key 'stroe'"),
        ("= not TOML\n", "expected TOML"),
        ('listen = "unix!s"\ndefault = "replay never"\n', "--default: "),
    ],
)
def test_a_bad_file_changes_nothing(server: Server, text: str, said: str) -> None:
    reload(server, text, "the options stay as they were")
    assert said in server.text()
    assert "options changed" not in server.text()


# Files that Python's reader of TOML, or a check of a value, refuses in ways of its own.
DEEP = 3_000
UNREADABLE = {
    "a long number": f"limit = {'1' * 5_000}\n",
    "a long number in hexadecimal": f"limit = 0x{'f' * 5_000}\n",
    "a long number in a list": f"limit = [0x{'f' * 5_000}]\n",
    "a long number in a date": f"limit = {'1' * 5_000}-01-01\n",
    "deep lists": f"limit = {'[' * DEEP}{']' * DEEP}\n",
    "deep tables": f"limit = {'{a=' * DEEP}1{'}' * DEEP}\n",
    "deep keys": f"limit{'.a' * DEEP} = 1\n",
    "a deep name of a table": f"[limit{'.a' * DEEP}]\n",
    "not UTF-8": "limit = '\udcff'\n",
    "NUL in a list": 'http-host = ["a", "\\u0000"]\n',
    **{f"NUL in {key}": f'{key} = "a\\u0000b"\n' for key, kind in KINDS.items() if kind != "flag"},
}


def test_a_file_that_is_bad_in_any_way_changes_nothing(server: Server) -> None:
    for text in UNREADABLE.values():
        reload(server, text, "the options stay as they were")
    assert "options changed" not in server.text()
    reload(server, f'{PLAIN}http-host = "mq.example"\n', "options changed: http-host")


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_start_and_other_commands_refuse_such_a_file_in_a_line(tmp_path: Path, case: str) -> None:
    (tmp_path / "mqfs.toml").write_bytes(UNREADABLE[case].encode(errors="surrogateescape"))
    for words in (("serve",), ("token", "ls")):
        done = run(*words, "--config", "mqfs.toml", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith("mqfs: --config mqfs.toml: ")
    done = run("doctor", "--config", "mqfs.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "bad  configuration: --config mqfs.toml: " in done.stdout


# Options that a start refuses, whatever the machine is, some only where they are put in force.
REFUSED = [
    'trace = "x,y"',
    'audit = "some"',
    'limit = "* messages=many"',
    'tcp-user = "no such user"',
    'default = "sync replica"',
    'default = ["deliver one", "data coalesce"]',
    'default = ["keep ring", "sync replica"]\nreplica = "file:///r"\nstore = "s"',
    'http-ntfy = "a=tcp!0.0.0.0!0"',
    'fq = "tls!0.0.0.0!0"\ntls-cert = "a.pem"',
    'fq = "tls!127.0.0.1!0"',
    'fq-node = "localhost"',
    'fq-users = "u"',
    'service = "udp!x"',
    "http-qpubs = true\nhttp = []",
    "standby = true",
    "require-token = true",
    'replica = "file:///r"',
    'replica = "ftp://r"\nstore = "s"',
    'replica = "file:///r"\nstore = "s"\nconfirm = "2"',
    'replica = "file:///r"\nstore = "s"\nfailover = "1s"',
    'replica = "file:///r"\nstore = "s"\nreplica-keep = "long"',
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_start_refuses_is_refused_by_a_reload(server: Server, text: str) -> None:
    """In the same words; nothing of the file is put in force."""
    text = f'{PLAIN if "http =" not in text else ""}http-host = "mq.example"\n{text}\n'
    (server.folder / "mqfs.toml").write_text(text)
    done = run("serve", "--config", "mqfs.toml", cwd=server.folder)
    assert (done.returncode in (1, 2), done.stderr.count("\n")) == (True, 1), done.stderr
    reload(server, text, "the options stay as they were")
    assert f"{done.stderr.strip()}; the options stay as they were\n" in server.text()
    assert "options changed" not in server.text()


def test_lines_of_defaults_that_fit_together_are_accepted(tmp_path: Path) -> None:
    with Server("--listen", "unix!s", "--default", "deliver one", "--default", "ack next", cwd=tmp_path) as server:
        with connect(f"unix!{tmp_path}/s") as client:
            client.mkdir("g")
            assert b"ack next" in client.open("g/ctl").receive(10_000)
        assert server.stop() == 0


def test_without_a_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    with Server("--listen", "unix!s", cwd=tmp_path) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.stop() == 0
        assert "options" not in server.text()


@pytest.mark.parametrize("name", ["mqfs.toml", "tokens", "server.pem", "server.key", "ca.pem"])
def test_a_named_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """It is a bad file, which changes nothing: the server reads and serves, and stops when it is to."""
    authority = Authority(tmp_path)
    pair = authority.of_server(file="pair").read_text()
    for file in ("server.pem", "server.key", "tokens"):
        (tmp_path / file).touch(0o600)
        (tmp_path / file).write_text("" if file == "tokens" else pair)
    lines = ['listen = ["unix!s", "tls!127.0.0.1!0"]', 'http = ["unix!web"]']
    for key, file in (("token-file", "tokens"), ("tls-cert", "server.pem"), ("tls-key", "server.key")):
        lines.append(f'{key} = "{file}"')
    text = "\n".join([*lines, 'tls-client-ca = "ca.pem"', ""])
    (tmp_path / "mqfs.toml").write_text(text)
    with Server("--config", "mqfs.toml", cwd=tmp_path) as server:
        (tmp_path / name).rename(tmp_path / "aside")
        os.mkfifo(tmp_path / name, 0o600)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: f"{name}: not a regular file" in server.text(), "it is refused")
        with connect(f"unix!{tmp_path}/s") as client:
            client.mkdir("g")
        (tmp_path / "aside").rename(tmp_path / name)
        (tmp_path / "mqfs.toml").write_text(text + 'http-host = "mq.example"\n')
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "options changed: http-host" in server.text(), "the files are read again")
        assert server.stop() == 0
