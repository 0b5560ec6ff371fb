"""Tokens over HTTP: scope, path, revoking, and what the audit says."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fq.client import Client as FqClient
from tests.fq.client import Refused
from tests.http.web import USER, Web, rest, statuses
from tests.support.eventually import eventually
from tests.support.server import mqfs, short_folder
from tests.support.tokens import SECRET, line_of

pytestmark = pytest.mark.process


class Issued:
    """A server, and its file of tokens."""

    def __init__(self, web: Web, folder: Path) -> None:
        self.web, self.file = web, folder / "tokens"

    def new(self, *options: str) -> str:
        done = mqfs("token", "new", USER, "--token-file", str(self.file), *options, cwd=self.file.parent)
        assert done.returncode == 0, done.stderr
        secret = done.stdout.strip()
        eventually(lambda: self.web.get("/", Authorization=bearer(secret)).status != 401)
        return secret

    def revoke(self, secret: str) -> None:
        token = secret.split("_")[1]
        assert mqfs("token", "revoke", token, "--token-file", str(self.file), cwd=self.file.parent).returncode == 0


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


@pytest.fixture(scope="module")
def issued() -> Iterator[Issued]:
    with short_folder() as folder:
        file = folder / "tokens"
        file.touch(0o600)
        web = Web(folder, "--token-file", str(file), "--audit", "changes")
        with web.server:
            yield Issued(web, folder)


def test_what_a_token_to_read_permits(issued: Issued) -> None:
    web, group = issued.web, issued.web.group()
    mail = f"{group}/.consumers/mail"
    assert web.put(mail).status == 201
    assert web.post(f"{group}/s", "m").status == 201
    auth = bearer(issued.new("--scope", "read"))
    for path in (f"{group}/", f"{group}/s", f"{group}/s?seq=1", f"{group}/.stats", f"{group}/ctl", mail):
        assert web.get(path, Authorization=auth).status == 200, path
    frames = "application/vnd.mqfs.frames"
    for path in (f"{group}/s", f"{group}/ctl", f"{mail}/claim", f"{mail}/ack", f"{mail}/seek", f"{group}/.batch"):
        assert web.post(path, "m", Authorization=auth, Content_Type=frames).status == 403, path
    assert web.ask("DELETE", f"{group}/s", Authorization=auth).status == 403
    assert web.ask("PUT", f"{group}/more/", Authorization=auth).status == 403


def test_what_a_token_to_write_permits(issued: Issued) -> None:
    web, group = issued.web, issued.web.group()
    mail = f"{group}/.consumers/mail"
    web.put(mail)
    web.put(f"{group}/s")
    auth = bearer(issued.new("--scope", "write"))
    assert web.post(f"{group}/s", "m", Authorization=auth).status == 201
    (line,) = web.post(f"{mail}/claim", Authorization=auth).lines
    assert web.post(f"{mail}/ack", line["token"], Authorization=auth).status == 204
    for path in (f"{group}/ctl", f"{mail}/seek"):
        assert web.post(path, "first", Authorization=auth).status == 403, path
    assert web.ask("DELETE", f"{group}/s", Authorization=auth).status == 403


def test_a_claim_is_not_settled_by_a_token_to_read(issued: Issued) -> None:
    web, group = issued.web, issued.web.group()
    mail = f"{group}/.consumers/mail"
    web.put(mail)
    web.post(f"{group}/s", "m")
    auth = bearer(issued.new("--scope", "read"))
    (line,) = web.post(f"{mail}/claim").lines
    assert web.post(f"{mail}/ack", line["token"], Authorization=auth).status == 403
    assert web.post(f"{mail}/ack", line["token"]).status == 204


def test_outside_of_its_path_nothing_is_there(issued: Issued) -> None:
    web, mine, other = issued.web, issued.web.group(), issued.web.group()
    web.post(f"{other}/s", "m")
    auth = bearer(issued.new("--path", mine))
    assert web.post(f"{mine}/s", "m", Authorization=auth).status == 201
    for path in (f"{other}/s", f"{other}/", f"{other}/none", "/none/s", "/"):
        assert web.get(path, Authorization=auth).status == 403, path


@pytest.mark.parametrize("path", ["", "/below", "/below/t", "/s", "/v", "/.consumers/c", "/none"])
def test_the_document_of_streams_begins_at_the_path_of_a_token(issued: Issued, path: str) -> None:
    web, group = issued.web, issued.web.group("bind v s")
    web.put(f"{group}/below/")
    for stream in (f"{group}/s", f"{group}/below/t"):
        assert web.post(stream, "m").status == 201
    web.put(f"{group}/.consumers/c")
    whole = [name for name in web.get("/.asyncapi.json").json["channels"] if f"/{name}".startswith(f"{group}/")]
    assert sorted(whole) == sorted(f"{group[1:]}/{name}" for name in ("below/t", "s", "v"))
    auth = bearer(issued.new("--scope", "read", "--path", f"{group}{path}"))
    got = web.get("/.asyncapi.json", Authorization=auth).json["channels"]
    under = f"{group}{path}"
    assert sorted(got) == sorted(name for name in whole if f"/{name}/".startswith(f"{under}/"))


def test_as_the_password_of_basic(issued: Issued) -> None:
    secret = issued.new()
    basic = base64.b64encode(f":{secret}".encode()).decode()
    assert issued.web.get("/", Authorization=f"Basic {basic}").status == 200
    refused = issued.web.get("/", Authorization="Bearer nonsense")
    assert refused.status == 401
    assert refused.headers.get_all("WWW-Authenticate") == ['Bearer realm="mqfs"', 'Basic realm="mqfs"']


def test_a_revoked_token_ends_its_streams_and_gives_back_its_claims(issued: Issued) -> None:
    web, group = issued.web, issued.web.group()
    mail = f"{group}/.consumers/mail"
    web.put(mail)
    web.post(f"{group}/s", "m")
    secret = issued.new()
    (line,) = web.post(f"{mail}/claim", Authorization=bearer(secret)).lines
    with web.raw() as sock:
        head = f"GET {group}/s?follow HTTP/1.1\r\nHost: localhost\r\nAuthorization: {bearer(secret)}\r\n\r\n"
        sock.sendall(head.encode())
        web.eventually_open(group, ".cursor", 1)
        issued.revoke(secret)
        assert not rest(sock).endswith(b"0\r\n\r\n")  # cut, not at its end
    assert web.get("/", Authorization=bearer(secret)).status == 401
    assert web.post(f"{mail}/ack", line["token"]).status == 410
    (again,) = web.post(f"{mail}/claim?wait=10s").lines
    assert again["body"] == "m"


def test_the_audit_names_the_token_and_never_its_secret(issued: Issued) -> None:
    web, group = issued.web, issued.web.group()
    secret = issued.new("--scope", "read")
    token = secret.split("_")[1]
    assert web.put(f"{group}/made").status == 201
    assert web.post(f"{group}/made", "m", Authorization=bearer(secret)).status == 403
    lines = [line for line in web.server.text().splitlines() if "audit" in line]
    assert any(
        re.search(rf'from="http tcp \d+" method="create" path="{group}/made" status="ok"', line) for line in lines
    )
    refused = [line for line in lines if f'token="{token}"' in line and 'status="refused"' in line]
    assert any(f'path="{group}/made"' in line for line in refused), lines
    assert secret not in web.server.text()


@pytest.fixture(scope="module")
def strict() -> Iterator[Web]:
    """A server that wants a token of all who come by TCP."""
    with short_folder() as folder:
        file = folder / "tokens"
        file.write_text(line_of(USER, SECRET))
        file.chmod(0o600)
        options = ("--token-file", str(file), "--require-token", "--http-qpubs", "--fq", "tcp!127.0.0.1!0")
        web = Web(folder, *options, "--http-ntfy", "alerts=tcp!127.0.0.1!0")
        with web.server:
            yield web


def test_no_one_without_a_token(strict: Web) -> None:
    """But for what is nothing of the tree, and over unix sockets."""
    for method, path in (("GET", "/"), ("POST", "/g/s"), ("GET", "/.metrics"), ("GET", "/.ready"), ("PUT", "/g/")):
        refused = strict.ask(method, path, b"x" if method == "POST" else None)
        assert (refused.status, refused.body.split(b":")[0]) == (401, b"client over TCP without a token"), path
        assert strict.ask(method, path, b"x", Authorization=bearer(SECRET)).status < 401 or path == "/g/s", path
    with strict.raw() as sock:  # what was asked before does not decide
        for path, status in (("/.health", 200), ("/.web/", 200), ("/", 401), ("/.health", 200), ("/", 401)):
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = b""
            while b"\r\n\r\n" not in answer or (status == 200 and path == "/.web/" and b"</html>" not in answer):
                answer += sock.recv(65_536)
            assert statuses(answer) == [status]
    with strict.raw(unix=True) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert statuses(sock.recv(65_536)) == [200]


def test_neither_by_ntfy_nor_by_fq(strict: Web) -> None:
    text = strict.server.text()
    for port, path in (
        (re.findall(r"ntfy of group 'alerts' at tcp!127\.0\.0\.1!(\d+)", text)[0], "/t/json?poll=1"),
        (re.findall(r"fq of group 'fq' at tcp!127\.0\.0\.1!(\d+)", text)[0], "/stats.json"),
    ):
        done = strict.curl(f"http://127.0.0.1:{port}{path}")
        assert done.status == 401
        assert strict.curl("-u", f":{SECRET}", f"http://127.0.0.1:{port}{path}").status in (200, 404)
    with pytest.raises(Refused, match="without a token"):
        FqClient(("127.0.0.1", int(port)), "q", user=USER)
    FqClient(("127.0.0.1", int(port)), "q", user=USER, password=SECRET).close()


@pytest.mark.parametrize("options", [(), ("--tls-client-ca", "ca.pem")])
def test_to_require_what_nobody_has(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = mqfs("serve", "--http", "tcp!127.0.0.1!0", "--require-token", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "--require-token: no effect alone (expected also --token-file)" in done.stderr
