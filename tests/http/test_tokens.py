"""Tokens over HTTP: scope, path, revoking, and what the audit says."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.web import USER, Web, rest
from tests.support.eventually import eventually
from tests.support.server import mqfs, short_folder

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
