"""HTTP over TLS: clients not written here, certificates of clients, renewal, peers that speak no TLS."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.net import identity
from tests.http.web import Web
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually
from tests.support.server import mqfs, short_folder

pytestmark = pytest.mark.process
ME = identity.user_name(os.geteuid())


@pytest.fixture(scope="module")
def authority() -> Iterator[Authority]:
    with short_folder() as folder:
        yield Authority(folder)


@pytest.fixture(scope="module")
def web(authority: Authority) -> Iterator[Web]:
    with short_folder() as folder:
        web = Web(folder, *options(authority))
        with web.server:
            yield web


@pytest.fixture(scope="module")
def known(authority: Authority) -> Iterator[Web]:
    """A server whose clients need certificates."""
    with short_folder() as folder:
        web = Web(folder, *options(authority), "--tls-client-ca", str(authority.path))
        with web.server:
            yield web


def options(authority: Authority) -> list[str]:
    return ["--http", "tls!127.0.0.1!0", "--tls-cert", str(authority.of_server(file="server"))]


def curl(web: Web, authority: Authority, path: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["curl", "-sS", "--max-time", str(int(HANG_S)), "--cacert", str(authority.path), *words]
    return subprocess.run(
        [*command, f"https://127.0.0.1:{web.tls_port}{path}"], capture_output=True, text=True, timeout=2 * HANG_S
    )


def dialled(web: Web, context: ssl.SSLContext) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", web.tls_port), HANG_S)
    return context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_publish_and_read(web: Web, authority: Authority) -> None:
    group = web.group()
    assert curl(web, authority, f"{group}/s", "--data-binary", "hello").stdout == "1\n"
    assert curl(web, authority, f"{group}/s").stdout == "hello"


def test_the_protocol_is_agreed(web: Web, authority: Authority) -> None:
    context = authority.trusting()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with dialled(web, context) as tls:
        assert (tls.selected_alpn_protocol(), tls.version()) == ("http/1.1", "TLSv1.3")


def test_a_body_of_many_records_both_ways(web: Web, authority: Authority, tmp_path: Path) -> None:
    group, body = web.group(), os.urandom(1_000_001)
    (tmp_path / "body").write_bytes(body)
    assert curl(web, authority, f"{group}/s", "-T", str(tmp_path / "body")).stdout == "1\n"
    assert curl(web, authority, f"{group}/s", "-o", str(tmp_path / "got")).stderr == ""
    assert (tmp_path / "got").read_bytes() == body


def test_requests_one_after_another_on_one_connection(web: Web, authority: Authority) -> None:
    group = web.group()
    connection = http.client.HTTPSConnection("127.0.0.1", web.tls_port, timeout=HANG_S, context=authority.trusting())
    for number in range(1, 20):
        connection.request("POST", f"{group}/s", b"m")
        assert connection.getresponse().read() == b"%d\n" % number
    connection.close()


def test_a_follower_gets_what_comes_and_is_ended_by_what_it_does_not_take(web: Web, authority: Authority) -> None:
    group = web.group()
    web.put(f"{group}/s")
    connection = http.client.HTTPSConnection("127.0.0.1", web.tls_port, timeout=HANG_S, context=authority.trusting())
    connection.request("GET", f"{group}/s?follow&format=line")
    answer = connection.getresponse()
    for text in (b"one\n", b"two\n"):
        web.post(f"{group}/s", text[:-1])
        assert answer.readline() == text
    connection.sock.close()
    connection.close()
    answer.close()
    web.post(f"{group}/s", "three")  # the next message, or the next beat, finds that the peer is gone
    web.eventually_open(group, ".cursor", 0)


def test_a_client_that_speaks_no_tls(web: Web) -> None:
    with socket.create_connection(("127.0.0.1", web.tls_port), HANG_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while sock.recv(4_096):
            pass
    eventually(lambda: "does not speak TLS" in web.server.text())


def test_a_certificate_of_another_authority_is_refused_by_the_client(web: Web, tmp_path: Path) -> None:
    done = curl(web, Authority(tmp_path, "other"), "/")
    assert done.returncode == 60  # curl(1): the peer's certificate cannot be authenticated


def test_renewal(web: Web, authority: Authority) -> None:
    def serial() -> object:
        with dialled(web, authority.trusting()) as tls:
            return (tls.getpeercert() or {})["serialNumber"]

    before = serial()
    authority.of_server(file="server")
    os.kill(web.server.pid, signal.SIGHUP)
    eventually(lambda: serial() != before)


def test_a_client_is_the_user_of_its_certificate(known: Web, authority: Authority) -> None:
    group = known.group()
    cert = str(authority.of_user(ME))
    assert curl(known, authority, f"{group}/s", "--cert", cert, "-d", "m").stdout == "1\n"
    assert [stream["name"] for stream in known.get(f"{group}/").json["entries"]] == ["s"]


def test_a_certificate_of_no_user(known: Web, authority: Authority) -> None:
    cert = str(authority.of_user("nobody-of-that-name"))
    done = curl(known, authority, "/", "--cert", cert, "-w", "%{http_code}")
    assert done.stdout.endswith("403")
    assert "unknown user" in done.stdout


def test_no_certificate_no_connection(known: Web, authority: Authority) -> None:
    with dialled(known, authority.trusting()) as tls:
        tls.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            tls.recv(1)


def test_tls_needs_a_certificate(tmp_path: Path) -> None:
    done = mqfs("serve", "--http", "tls!127.0.0.1!0", cwd=tmp_path)
    why = "mqfs: tls!127.0.0.1!0: no certificate (expected --tls-cert FILE)\n"
    assert (done.returncode, done.stderr) == (2, why)
