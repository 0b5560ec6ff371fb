"""Proxies in front: nginx with the block of the guide, haproxy; and what their headers decide."""

from __future__ import annotations

import http.client
import os
import pwd
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import BadAddress
from mqfs.http.answers import Unauthorized
from mqfs.http.gate import Gate, Proxies, is_encrypted
from mqfs.net import tokens
from mqfs.net.peer import Peer
from mqfs.ninep.client import connection as blocking
from tests.http.hasty_server import HASTE
from tests.http.proxies import PROXIES, Through, nginx
from tests.http.test_events import SSE, start
from tests.http.test_wire import REFUSED
from tests.http.web import USER, Reply, Web, statuses
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S
from tests.support.server import COMMAND, mqfs, short_folder
from tests.support.tokens import SECRET, line_of

pytestmark = pytest.mark.process
HASTY: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
STREAMS = int(HASTE["HTTP_USER_STREAMS"])


@pytest.fixture(scope="module")
def hasty() -> Iterator[Web]:
    """A server with low bounds behind proxies of 127.0.0.1."""
    with short_folder() as folder:
        authority = Authority(folder)
        certificate = str(authority.of_server("localhost", file="server"))
        options = ["--http-proxy", "127.0.0.1/32", "--http-host", "mq.example"]
        web = Web(folder, *options, "--http", "tls!127.0.0.1!0", "--tls-cert", certificate, program=HASTY)
        with web.server:
            yield web


@pytest.fixture(scope="module", params=[(name, tls) for name in PROXIES for tls in (False, True)], ids=str)
def through(hasty: Web, request: pytest.FixtureRequest) -> Iterator[Through]:
    """Each proxy, which speaks to the server plainly and by TLS."""
    name, encrypted = request.param
    folder = hasty.server.folder
    with PROXIES[name](hasty, folder, folder / "server.pem", ca=folder / "ca.pem" if encrypted else None) as found:
        yield found


# ---------------------------------------------------------------- through a proxy


def test_events_are_not_held_back(through: Through) -> None:
    group = through.group()
    through.put(f"{group}/s")
    with through.stream(f"{group}/s", Accept=SSE) as lines:
        start(lines)
        for text in ("1", "2"):
            through.post(f"{group}/s", text)
            while "id" not in (event := lines.event()):
                assert event == {"": ""}  # comments of silence
            assert event["id"] == text


def test_nginx_holds_no_events_back_that_come_without_chunks(hasty: Web) -> None:
    folder, group = hasty.server.folder, hasty.group()
    hasty.put(f"{group}/s")
    proxy = nginx(hasty, folder, folder / "server.pem", version="1.0")
    with proxy as web, web.stream(f"{group}/s", Accept=SSE) as lines:
        start(lines)


def test_a_long_poll_and_its_client_that_leaves(through: Through) -> None:
    group = through.group()
    through.put(f"{group}/s")
    connection = through.connect()
    connection.request("GET", f"{group}/s?wait=1h&since=end")
    through.direct.eventually_open(group, ".cursor", 1)
    through.post(f"{group}/s", "x")
    assert connection.getresponse().read() == b"x"
    connection.request("GET", f"{group}/s?wait=1h&since=end")
    through.direct.eventually_open(group, ".cursor", 1)
    connection.close()
    through.direct.eventually_open(group, ".cursor", 0)


def test_claim_and_ack(through: Through) -> None:
    group = through.group()
    mail = f"{group}/.consumers/mail"
    assert through.put(mail).status == 201
    through.post(f"{group}/s", "job")
    (line,) = through.post(f"{mail}/claim?wait=10s").lines
    assert line["body"] == "job"
    assert through.post(f"{mail}/ack", line["token"]).status == 204
    assert through.post(f"{mail}/ack", line["token"]).status == 410


def test_a_large_body_both_ways(through: Through) -> None:
    group, body = through.group(), bytes(range(256)) * 4_000
    assert through.post(f"{group}/s", body).status == 201
    assert through.get(f"{group}/s").body == body
    assert through.post(f"{group}/s", bytes(1_044_481)).status == 413


def found_in(answer: bytes) -> list[int]:
    return statuses(answer.replace(b"HTTP/1.0", b"HTTP/1.1"))


def until_refused(sock: socket.socket) -> bytes:
    """Until the end, or the first answer is a refusal: what follows that is no request any more."""
    answer = b""
    try:
        while not (found := found_in(answer)) or found[0] < 400:
            part = sock.recv(65_536)
            if not part:
                break
            answer += part
    except ConnectionResetError:
        pass
    return answer


BEHIND = b"GET /.health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_request_hides_none(through: Through, what: str) -> None:
    """A proxy refuses it, or makes a request of it that means the same here: a message is the body, or none is."""
    group = through.direct.group()
    data = REFUSED[what][0].replace(b"/g/", group.encode() + b"/")
    with through.raw() as sock:
        try:
            sock.sendall(data + BEHIND)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = until_refused(sock)
    first, *others = found_in(answer) or [400]
    assert others in ([], [200])
    if others:
        assert b'{"status": "ok"}' in answer
    stored = through.direct.get(f"{group}/s?format=json")
    bodies = [line["body"] for line in stored.lines] if stored.status == 200 else []
    assert bodies in ([], ["abc" if b"abc" in data else ""])
    assert first >= 400 or not bodies or first == 201


# ---------------------------------------------------------------- whose requests they are


def ask(web: Web, source: str, path: str, **headers: str) -> Reply:
    """One request from an address of loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=HANG_S, source_address=(source, 0))
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, b"" if answer.status == 200 else answer.read())
    finally:
        connection.close()


def follow(stack: ExitStack, web: Web, source: str, path: str, **headers: str) -> None:
    """An answer without an end, from an address of loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=HANG_S, source_address=(source, 0))
    stack.callback(connection.close)
    connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    stack.callback(answer.close)
    assert answer.status == 200, answer.read()


def test_each_client_of_a_proxy_has_bounds_of_its_own(hasty: Web) -> None:
    folder = hasty.server.folder
    group = hasty.group()
    hasty.put(f"{group}/s")
    path = f"{group}/s?follow"
    with nginx(hasty, folder, folder / "server.pem") as web, ExitStack() as stack:
        for n in range(STREAMS):
            follow(stack, web, "127.0.0.2", path, X_Forwarded_For=f"9.9.9.{n}, 127.0.0.1")
        assert ask(web, "127.0.0.2", path, X_Forwarded_For="9.9.9.9").status == 429
        for _ in range(STREAMS):
            follow(stack, web, "127.0.0.3", path)
        assert ask(web, "127.0.0.3", path).status == 429


def test_a_proxy_has_more_connections_than_a_user(hasty: Web) -> None:
    with ExitStack() as stack:
        for n in range(int(HASTE["HTTP_USER_CONNECTIONS"]) + 3):
            sock = stack.enter_context(hasty.raw())
            sock.sendall(b"GET /.health HTTP/1.1\r\nHost: mq.example\r\n\r\n")
            assert statuses(sock.recv(4_096)) == [200], n


@pytest.mark.parametrize("unix", [False, True])
def test_of_others_the_headers_mean_nothing(unix: bool) -> None:
    """Hosts that are no proxies, and unix sockets, whose peer the kernel names."""
    with short_folder() as folder:
        web = Web(folder, *(["--http-proxy", "0.0.0.0/0"] if unix else ["--http-proxy", "10.0.0.0/8"]), program=HASTY)
        with web.server, ExitStack() as stack:
            group = web.group()
            web.put(f"{group}/s")
            found = []
            for n in range(STREAMS + 1):
                sock = stack.enter_context(web.raw(unix=unix))
                head = f"GET {group}/s?follow HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 9.9.9.{n}\r\n\r\n"
                sock.sendall(head.encode())
                found += statuses(sock.recv(4_096))
            assert found == [200] * STREAMS + [429]


def test_requests_of_several_clients_on_one_connection(hasty: Web) -> None:
    group = hasty.group()
    hasty.put(f"{group}/s")
    with ExitStack() as stack:
        for _ in range(STREAMS):
            follow(stack, hasty, "127.0.0.1", f"{group}/s?follow", X_Forwarded_For="9.9.9.1")
        with hasty.raw() as sock:
            for client, status in (("9.9.9.1", 429), ("9.9.9.1, 127.0.0.1", 429), ("9.9.9.1, 9.9.9.2", 200)):
                head = f"GET {group}/s?follow HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: {client}\r\n\r\n"
                sock.sendall(head.encode())
                assert statuses(sock.recv(4_096)) == [status], client


def test_wrong_tokens_are_counted_for_the_client(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    gate = Gate()
    proxy = Peer("http tcp 1", 0, fixed=True, host="127.0.0.1", tokens=tokens.Tokens(str(file)))
    bad, good = proxy.charged_to("9.9.9.1"), proxy.charged_to("9.9.9.2")
    for _ in range(20):
        with pytest.raises(Unauthorized):
            gate.user(bad, "Bearer nonsense")
    assert [gate.delay(peer) > 0 for peer in (bad, good, proxy)] == [True, False, False]


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_at_a_unix_socket(name: str) -> None:
    """Its clients act as over TCP, each with bounds of its own; no other user can say for whom it asks."""
    with short_folder() as folder:
        tokens = folder / "tokens"
        tokens.write_text(line_of("daemon", SECRET))
        tokens.chmod(0o600)
        server = str(Authority(folder).of_server("localhost", file="server"))
        options = ("--http-proxy", f"user:{USER}", "--http-host", "mq.example", "--token-file", str(tokens))
        web = Web(folder, *options, "--tcp-user", "nobody", program=HASTY)
        with web.server, PROXIES[name](web, folder, Path(server), unix=True) as through:
            with blocking.connect(web.server.address) as client:
                client.mkdir("g", 0o777)
                client.chmod("g", 0o777)
            sent = through.post("/g/s", "x", Authorization=f"Bearer {SECRET}", Mqfs_Priority="7")
            assert sent.status == 201
            assert through.post("/g/s", "x").status == 403
            (line,) = through.get("/g/s?format=json").lines
            assert line["headers"]["sender"] == str(pwd.getpwnam("daemon").pw_uid)
            with ExitStack() as stack:
                for _ in range(STREAMS):
                    follow(stack, web, "127.0.0.1", "/g/s?follow")
                for _ in range(STREAMS):
                    follow(stack, through, "127.0.0.2", "/g/s?follow")
                assert ask(through, "127.0.0.2", "/g/s?follow").status == 429
                follow(stack, through, "127.0.0.3", "/g/s?follow")


@pytest.mark.root
def test_another_user_at_the_unix_socket_is_no_proxy() -> None:
    with short_folder() as folder:
        web = Web(folder, "--http-proxy", "user:daemon", program=HASTY)
        os.chmod(folder, 0o755)
        with web.server:
            web.put("/g/")
            web.put("/g/s")
            os.chmod(web.unix, 0o777)
            curl = ["curl", "-s", "--unix-socket", str(web.unix), "-H", "X-Forwarded-For: 9.9.9.9", "-d", "x"]
            found = {}
            for uid in (pwd.getpwnam("daemon").pw_uid, 65_534):
                who = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
                url = f"http://localhost/g/of-{uid}"
                found[uid] = subprocess.run([*who, *curl, "-w", "%{http_code}", url], capture_output=True).stdout
            daemon, nobody = found
            assert found[daemon].endswith(b"201"), "as --tcp-user"
            assert found[nobody].endswith(b"403"), "as itself"


@pytest.mark.parametrize(
    ("host", "forwarded", "client"),
    [
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", "5.6.7.8, 1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", "5.6.7.8,1.2.3.4 , 10.0.0.2", "1.2.3.4"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "1.2.3.4, unknown", "10.0.0.1"),
        ("10.0.0.1", "1.2.3.4, unknown, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "1.2.3.4,", "10.0.0.1"),
        ("10.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "::ffff:1.2.3.4", "1.2.3.4"),
        ("fd00::1", "1.2.3.4", "1.2.3.4"),
        ("1.2.3.4", "5.6.7.8", "1.2.3.4"),
        ("11.0.0.1", "5.6.7.8", "11.0.0.1"),
    ],
)
def test_who_the_client_is(host: str, forwarded: str, client: str) -> None:
    assert Proxies(["10.0.0.0/8", "fd00::/8"]).client(host, forwarded) == client


@pytest.mark.parametrize(
    ("proto", "encrypted"), [("https", True), ("HTTPS", True), ("http", False), ("", False), ("https, http", False)]
)
def test_what_is_encrypted(proto: str, encrypted: bool) -> None:
    assert is_encrypted(proto) is encrypted


def test_the_scheme_that_a_proxy_names(tmp_path: Path) -> None:
    with short_folder() as folder:
        web = Web(folder, "--http-proxy", "127.0.0.1/32", "--http-ntfy", "alerts=tcp!127.0.0.1!0")
        with web.server:
            web.put("/alerts/")
            port = int(web.server.text().split("ntfy of group 'alerts' at tcp!127.0.0.1!")[1].split()[0])
            ntfy = Through(web, port)
            for proto, status in (("https", 401), ("http", 403)):
                reply = ntfy.get("/t/json?poll=1&auth=QmVhcmVyIHg", X_Forwarded_Proto=proto)
                assert reply.status == status


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_the_urls_that_a_client_of_a_proxy_is_told(scheme: str) -> None:
    with short_folder() as folder:
        web = Web(folder, "--http-proxy", "127.0.0.1/32", "--http-durable", "ds=tcp!127.0.0.1!0")
        with web.server:
            port = int(web.server.text().split("Durable Streams of group 'ds' at tcp!127.0.0.1!")[1].split()[0])
            named = {"X_Forwarded_Proto": scheme, "Host": "localhost:1234"}
            made = Through(web, port).ask("PUT", "/s", "x", **named)
            assert (made.status, made.headers["Location"]) == (201, f"{scheme}://localhost:1234/s")
            (server,) = web.get("/.asyncapi.json", **named).json["servers"].values()
            assert (server["protocol"], server["host"]) == (scheme, "localhost:1234")


@pytest.mark.parametrize("text", ["10.0.0.1/8", "localhost", "", "10.0.0.0/33"])
def test_what_is_no_network(tmp_path: Path, text: str) -> None:
    done = mqfs("serve", "--http", "tcp!127.0.0.1!0", "--http-proxy", text, cwd=tmp_path)
    expected = "expected such as 10.1.2.0/24 or ::1/128, or user:NAME"
    why = f"mqfs: --http-proxy: invalid network {text!r} ({expected})\n"
    assert (done.returncode, done.stderr) == (2, why)
    with pytest.raises(BadAddress):
        Proxies([text])


def test_a_public_name_reaches_loopback_by_consent(hasty: Web) -> None:
    assert hasty.get("/", Host="mq.example").status == 200
    assert hasty.get("/", Host="other.example", X_Forwarded_For="1.2.3.4").status == 403
