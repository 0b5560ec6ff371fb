"""Claims over HTTP: tokens, leases, and what becomes of messages that did not arrive."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs.ninep.client import connection as blocking
from tests.http.hasty_server import HASTE
from tests.http.web import Web, rest
from tests.support.batches import frame
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, short_folder
from tests.support.tokens import OTHER, SECRET, line_of

SECRETS = {"root": SECRET, "daemon": OTHER}


@pytest.fixture
def mail(web: Web) -> str:
    """A consumer for which m1 to m4 wait; what failed comes again at once."""
    group = web.group("backoff 10ms 10ms")
    web.put(f"{group}/s")
    web.put(f"{group}/.consumers/mail")
    for n in range(1, 5):
        web.post(f"{group}/s", f"m{n}")
    return f"{group}/.consumers/mail"


OPTIONS = {
    "transient": [("yes", "transient"), ("no", "")],
    "private": [("yes", "private"), ("no", "")],
    "backlog": [("5", "backlog 5"), ("0", "")],
    "full": [("drop-new", "full drop-new"), ("block", "full block")],
    "order": [("key", "order key"), ("sequence", "")],
}


@pytest.mark.parametrize("over", ["", "s"])
def test_a_put_changes_the_options_that_are_given(web: Web, over: str) -> None:
    group = web.group()
    web.put(f"{group}/s")
    path = f"{group}/.consumers/c"
    assert web.put(f"{path}?over={over}" if over else path).status == 201

    def options() -> list[str]:
        """Those in `ctl`, each with its value."""
        (line,) = [line for line in web.get(f"{group}/ctl").body.decode().splitlines() if line.startswith("consumer c")]
        return sorted(re.findall("transient|private|backlog [0-9]+|full [a-z-]+|order key", line))

    there = dict[str, str]()
    for key, words in OPTIONS.items():
        for value, line in words:
            for _ in range(2):
                assert web.put(f"{path}?{key}={value}").status == 200
            there[key] = line
            assert options() == sorted(filter(None, there.values()))
    before = options()
    for query in ("", "?over=" + over, "?transient=no", "?full=block"):
        assert web.put(path + query).status == 200
    for query in ("?over=other", "?over=" + ("" if over else "s"), "?memory=yes", "?backlog=7&over=other"):
        assert web.put(path + query).status == 409
    for query in ("?backlog=x", "?backlog=", "?full=never", "?order=", "?order=size"):
        assert web.put(path + query).status == 400
    assert web.put(f"{group}/.consumers/.s").status == 200
    assert web.put(f"{group}/.consumers/.s?backlog=7").status == 400
    assert web.ask("PUT", f"{path}?backlog=9", If_None_Match="*").status == 412
    assert options() == before


def claim(web: Web, mail: str, options: str = "") -> list[Any]:
    return web.post(f"{mail}/claim?{options}").lines


def waiting(web: Web, mail: str) -> list[tuple[str, int]]:
    return [(message["body"], message["deliveries"]) for message in web.get(mail).lines]


def test_claims_are_shared_out(web: Web, mail: str) -> None:
    first, second = claim(web, mail, "max=3"), claim(web, mail, "max=3")
    assert [m["body"] for m in first] == ["m1", "m2", "m3"]
    assert [m["body"] for m in second] == ["m4"]
    assert len({m["token"] for m in first + second}) == 4
    assert web.post(f"{mail}/ack", "\n".join(m["token"] for m in first + second)).status == 204
    assert waiting(web, mail) == []


@pytest.mark.parametrize(
    ("verb", "left"),
    [
        ("ack", [("m2", 1)]),
        ("release", [("m1", 1), ("m2", 1)]),
        ("nack?after=0", [("m1", 2), ("m2", 1)]),
        ("dead?reason=it%20is%20late", [("m2", 1)]),
    ],
)
def test_settling(web: Web, mail: str, verb: str, left: list[tuple[str, int]]) -> None:
    tokens = [m["token"] for m in claim(web, mail, "max=4")]
    assert web.post(f"{mail}/ack", "\n".join(tokens[2:])).status == 204
    assert web.post(f"{mail}/{verb}", tokens[0]).status == 204
    assert web.post(f"{mail}/release", tokens[1]).status == 204
    assert waiting(web, mail) == left
    again = web.post(f"{mail}/{verb}", tokens[0])
    assert (again.status, again.body) == (410, tokens[0].encode() + b"\n")


def test_a_token_that_is_given_twice_is_settled(web: Web, mail: str) -> None:
    one, two = (m["token"] for m in claim(web, mail, "max=2"))
    assert web.post(f"{mail}/ack", f"{one}\n{two}\n{one}\n").status == 204
    assert waiting(web, mail) == [("m3", 1), ("m4", 1)]


def test_many_dead_letters_of_one_long_reason(web: Web) -> None:
    """All or none, though they are more commands than one write may have."""
    group, count = web.group(), 200
    mail = f"{group}/.consumers/mail"
    web.put(f"{group}/s")
    web.put(mail)
    batch = '{"stream":"s","body":"m"}\n' * count
    assert web.post(f"{group}/.batch", batch, Content_Type="application/x-ndjson").status == 201
    tokens = [m["token"] for m in claim(web, mail, f"max={count}")]
    assert len(tokens) == count
    with blocking.connect(web.server.address) as client, client.open(f"{mail[1:]}", "w") as consumer:
        consumer.write(b"seek first\n")
    dead = f"{mail}/dead?reason={'r' * 1_000}"
    assert web.post(dead, "\n".join(tokens)).status == 410
    again = [m["token"] for m in claim(web, mail, f"max={count}")]
    assert web.post(dead, "\n".join(again)).status == 204
    assert waiting(web, mail) == []
    assert web.ask("HEAD", f"{group}/dead").headers["Mqfs-Messages"] == str(count)


def test_the_reason_of_a_dead_letter(web: Web, mail: str) -> None:
    group = mail.split("/")[1]
    web.post(f"{mail}/dead?reason=no%20%23%20stamp", claim(web, mail)[0]["token"])
    assert web.get(f"/{group}/dead?format=json").lines[0]["headers"]["reason"] == "no # stamp"


def test_tokens_of_one_request_are_settled_all_or_none(web: Web, mail: str) -> None:
    mine = [m["token"] for m in claim(web, mail, "max=2")]
    other = claim(web, mail)[0]["token"]
    assert web.post(f"{mail}/ack", mine[0]).status == 204
    refused = web.post(f"{mail}/ack", "\n".join([*mine, other]))
    assert (refused.status, refused.body.decode().split()) == (410, mine)
    assert web.post(f"{mail}/ack", mine[1]).status == 204  # it was left
    assert web.post(f"{mail}/ack", other).status == 410  # it was not
    refused = web.post(f"{mail}/ack", "\n".join(mine), Accept="application/json")
    assert (refused.status, refused.json["status"], refused.json["tokens"]) == (410, 410, mine)


@pytest.mark.parametrize("verb", ["ack", "nack", "release", "dead", "touch"])
@pytest.mark.parametrize("void", [{0}, {1}, {2}, {0, 2}, {3}, {0, 3}, {0, 1, 2, 3}])
def test_a_refusal_names_all_that_is_not_settled(web: Web, mail: str, verb: str, void: set[int]) -> None:
    """Three messages of one claim, one of another: a void one spoils the others of its claim."""
    tokens = [m["token"] for options in ("max=3", "max=1") for m in claim(web, mail, options)]
    assert web.post(f"{mail}/ack", "\n".join(tokens[at] for at in void)).status == 204
    refused = web.post(f"{mail}/{verb}", "\n".join(tokens))
    left = [token for at, token in enumerate(tokens) if void & ({0, 1, 2} if at < 3 else {3})]
    assert (refused.status, refused.body.decode().split()) == (410, left)


def test_a_lease_ends_as_a_failed_delivery(web: Web, mail: str) -> None:
    token = claim(web, mail, "lease=1s")[0]["token"]
    eventually(lambda: ("m1", 2) in waiting(web, mail))
    assert web.post(f"{mail}/ack", token).status == 410
    web.eventually_open(f"/{mail.split('/')[1]}", "mail", 0)


def test_touch_renews_a_lease(web: Web, mail: str) -> None:
    first, second = claim(web, mail, "max=2&lease=1s")
    assert web.post(f"{mail}/touch?lease=1h", first["token"]).status == 204
    eventually(lambda: ("m2", 2) in waiting(web, mail))
    assert web.post(f"{mail}/ack", second["token"]).status == 410
    assert web.post(f"{mail}/ack", first["token"]).status == 204


@pytest.mark.parametrize("options", ["lease=0", "lease=13h", "lease=x", "max=0", "max=1001", "wait=x"])
def test_options_that_are_none(web: Web, mail: str, options: str) -> None:
    assert web.post(f"{mail}/claim?{options}").status in (400, 413)


@pytest.mark.parametrize("token", ["", "x", "1.1.1", "1.1.1.1.1", "a.1.1.00", "9" * 40 + ".1.1.00"])
def test_what_is_no_token(web: Web, mail: str, token: str) -> None:
    assert web.post(f"{mail}/ack", token).status == 400


def test_a_forged_token_is_gone(web: Web, mail: str) -> None:
    token = claim(web, mail)[0]["token"]
    number, sequence, delivery, mac = token.split(".")
    for forged in (
        f"{number}.{sequence}.{delivery}.{'0' * len(mac)}",
        f"{number}.{sequence}.2.{mac}",
        f"{number}.2.{delivery}.{mac}",
        f"{int(number) + 1}.{sequence}.{delivery}.{mac}",
    ):
        assert web.post(f"{mail}/ack", forged).status == 410
    other = mail.replace("mail", "other")
    web.put(other)
    assert web.post(f"{other}/ack", token).status == 410
    assert web.post(f"{mail}/ack", token).status == 204


def test_a_claim_waits(web: Web, mail: str) -> None:
    claim(web, mail, "max=4")
    group = f"/{mail.split('/')[1]}"
    with web.raw() as sock:
        sock.sendall(f"POST {mail}/claim?wait=1h&max=2 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        web.eventually_open(group, "mail", 2)
        web.post(f"{group}/s", "new")
        assert b'"body":"new"' in sock.recv(65_536)


def test_what_does_not_leave_whole_is_released(web: Web, mail: str) -> None:
    group = f"/{mail.split('/')[1]}"
    web.post(f"{mail}/seek", "end")
    for _ in range(8):
        web.post(f"{group}/s", b"x" * 1_000_000)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", web.port))
    sock.sendall(f"POST {mail}/claim?max=8 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    eventually(lambda: web.get(f"{group}/.stats").json["consumers"]["mail"]["claimed"] == 8)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    eventually(lambda: web.get(f"{group}/.stats").json["consumers"]["mail"]["claimed"] == 0)
    assert {deliveries for _, deliveries in waiting(web, mail)} == {1}


def test_a_seek_voids_claims(web: Web, mail: str) -> None:
    token = claim(web, mail)[0]["token"]
    assert web.post(f"{mail}/seek", "first").status == 204
    assert web.post(f"{mail}/ack", token).status == 410
    assert web.post(f"{mail}/seek", "nowhere").status == 400
    assert claim(web, mail)[0]["body"] == "m1"


def test_a_removed_group_takes_its_claims_along(web: Web, mail: str) -> None:
    group = f"/{mail.split('/')[1]}"
    token = claim(web, mail)[0]["token"]
    web.ask("DELETE", f"{group}/s")
    assert web.ask("DELETE", f"{group}/").status == 204
    assert web.post(f"{mail}/ack", token).status == 404


def test_tokens_do_not_outlive_the_server() -> None:
    with short_folder() as folder:
        web = Web(folder)
        with web.server:
            group = web.group()
            mail = f"{group}/.consumers/mail"
            web.put(f"{group}/s")
            web.put(mail)
            web.post(f"{group}/s", "m")
            token = claim(web, mail)[0]["token"]
            web.server.restart(signal.SIGKILL)
            assert web.post(f"{mail}/ack", token).status == 410
            again = claim(web, mail)[0]
            assert again["deliveries"] == 2
            assert web.post(f"{mail}/ack", token).status == 410
            assert web.post(f"{mail}/ack", again["token"]).status == 204


def test_what_was_claimed_does_not_wait_for_a_long_look_for_the_next_one(web: Web) -> None:
    group = web.group("replay all", 'bind v prefix:"" payload_contains("yes")', "consumer c v")
    web.put(f"{group}/s")
    no = frame("s", b"no") * 10_000
    web.post(f"{group}/s", "yes 1")
    with blocking.connect(web.server.address) as client, client.open(f"{group[1:]}/.batch", "w") as batch:
        for _ in range(10):
            batch.write(no)
    web.post(f"{group}/s", "yes 2")
    assert [row["body"] for row in claim(web, f"{group}/.consumers/c", "max=5")] == ["yes 1"]
    assert [row["body"] for row in claim(web, f"{group}/.consumers/c", "max=5&wait=60s")] == ["yes 2"]


@pytest.fixture(scope="module")
def hasty() -> Iterator[Web]:
    """With tokens of two users, and low limits."""
    program: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
    with short_folder() as folder:
        file = folder / "tokens"
        file.write_text("".join(line_of(user, secret) for user, secret in SECRETS.items()))
        os.chmod(file, 0o600)
        web = Web(folder, "--token-file", str(file), "--http-proxy", "127.0.0.2/32", program=program)
        with web.server:
            yield web


def test_the_token_of_another_user(hasty: Web) -> None:
    group = hasty.group("consumer mail")
    mail = f"{group}/.consumers/mail"
    hasty.post(f"{group}/s", "m")
    with blocking.connect(hasty.server.address) as client:
        client.chmod(mail.lstrip("/"), 0o666)
    token = claim(hasty, mail)[0]["token"]
    bearer = f"Bearer {SECRETS['daemon']}"
    assert hasty.post(f"{mail}/ack", "1.1.1.gone", Authorization=bearer).status == 410, "the consumer is open to it"
    assert hasty.post(f"{mail}/ack", token, Authorization=bearer).status == 403
    assert hasty.post(f"{mail}/ack", token).status == 204


def test_open_claims_of_a_user_are_bounded(hasty: Web) -> None:
    group = hasty.group()
    hasty.put(f"{group}/s")
    mail = f"{group}/.consumers/mail"
    hasty.put(mail)
    for n in range(7):
        hasty.post(f"{group}/s", str(n))
    tokens = [m["token"] for m in claim(hasty, mail, "max=7")]
    assert len(tokens) == 5
    refused = hasty.post(f"{mail}/claim")
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    assert hasty.post(f"{mail}/ack", "\n".join(tokens)).status == 204
    left = [m["token"] for m in claim(hasty, mail, "max=7")]
    assert len(left) == 2
    assert hasty.post(f"{mail}/ack", "\n".join(left)).status == 204  # other tests have that user, too


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("held", [0, 1, 4])
def test_claims_that_wait_count_among_those_of_a_user(hasty: Web, held: int, most: int) -> None:
    """Each as one message, until it has one or ends without."""
    group = hasty.group("consumer mail")
    mail = f"{group}/.consumers/mail"
    hasty.put(f"{group}/s")
    batch = frame("s", b"m")
    hasty.post(f"{group}/.batch", batch * held, Content_Type="application/vnd.mqfs.frames")
    tokens = [m["token"] for m in claim(hasty, mail, "max=5")]
    assert len(tokens) == held
    for _ in range(6):
        assert hasty.post(f"{mail}/claim?wait=10ms").status == 204
    waits: list[socket.socket] = []
    try:
        for number in range(1, 6 - held):
            waits.append(sock := hasty.raw())  # not before: one that asks for nothing is closed soon
            line = f"POST {mail}/claim?wait=1h&max={most} HTTP/1.1"
            sock.sendall(f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            hasty.eventually_open(group, "mail", number + bool(held))
        assert hasty.post(f"{mail}/claim?wait=10ms").status == 429
        waits.pop().close()
        eventually(lambda: hasty.post(f"{mail}/claim?wait=10ms").status == 204)
        hasty.post(f"{group}/.batch", batch * 12, Content_Type="application/vnd.mqfs.frames")
        answers = [rest(sock) for sock in waits]
    finally:
        for sock in waits:
            sock.close()
    last = hasty.post(f"{mail}/claim?max=5")  # one place was free, unless they have that, too
    tokens += [m["token"] for m in (last.lines if last.status == 200 else [])]
    tokens += [json.loads(line)["token"] for data in answers for line in data.split(b"\r\n\r\n")[1].splitlines()]
    assert hasty.get(f"{group}/.stats").json["consumers"]["mail"]["claimed"] == len(tokens) == 5
    assert hasty.post(f"{mail}/claim").status == 429
    assert hasty.post(f"{mail}/ack", "\n".join(tokens)).status == 204


WAYS_VOID = ("the group's lease", "seek", "seek of a file", "removed consumer", "removed group")


@pytest.mark.parametrize("asks", ["claims", "claims elsewhere", "acks first"])
@pytest.mark.parametrize("way", WAYS_VOID)
def test_a_void_claim_counts_no_more(hasty: Web, way: str, asks: str) -> None:
    """However it became void, and whatever its client asks for then."""
    group = hasty.group("backoff 10ms 10ms", *(["lease 1s"] if way == "the group's lease" else []))
    mail, place = f"{group}/.consumers/mail", f"{group.lstrip('/')}/.consumers/mail"
    hasty.put(f"{group}/s")
    hasty.put(mail)
    for n in range(7):
        hasty.post(f"{group}/s", str(n))
    tokens = [m["token"] for m in claim(hasty, mail, "max=5&lease=12h")]
    assert len(tokens) == 5

    def claimed() -> int:
        return int(hasty.get(f"{group}/.stats").json["consumers"]["mail"]["claimed"])

    if way == "the group's lease":
        eventually(lambda: claimed() == 0)
    elif way == "seek":
        assert hasty.post(f"{mail}/seek", "first").status == 204
    elif way == "seek of a file":
        with blocking.connect(hasty.server.address) as client, client.open(place, "r+") as file:
            file.write(b"seek first\n")
    else:
        assert hasty.post(f"{mail}/seek", "end").status == 204
        assert hasty.ask("DELETE", mail).status == 204
        if way == "removed group":
            hasty.ask("DELETE", f"{group}/s")
            assert hasty.ask("DELETE", f"{group}/").status == 204
            hasty.put(f"{group}/")
            hasty.put(f"{group}/s")
        hasty.put(mail)
    if asks == "acks first":
        assert hasty.post(f"{mail}/ack", "\n".join(tokens)).status == 410
    if asks == "claims elsewhere":
        group = hasty.group()
        mail = f"{group}/.consumers/mail"
        hasty.put(f"{group}/s")
        hasty.put(mail)
    for n in range(7):
        hasty.post(f"{group}/s", f"new {n}")
    again = claim(hasty, mail, "max=5")
    assert len(again) == 5
    assert hasty.post(f"{mail}/ack", "\n".join(m["token"] for m in again)).status == 204


def test_a_claim_that_ended_by_the_lease_of_the_group_leaves_no_open_file(hasty: Web) -> None:
    group = hasty.group("lease 1s")
    hasty.put(f"{group}/s")
    hasty.put(f"{group}/.consumers/mail")
    hasty.post(f"{group}/s", "m")
    assert len(claim(hasty, f"{group}/.consumers/mail", "lease=12h")) == 1
    hasty.eventually_open(group, "mail", 0)


def test_claims_of_one_stranger_refuse_no_other(hasty: Web) -> None:
    """All clients without a token act as one user, and have bounds by the block of their address: a host has it all."""
    group = hasty.group()
    mail = f"{group}/.consumers/mail"
    hasty.put(f"{group}/s")
    hasty.put(mail)
    for n in range(22):
        hasty.post(f"{group}/s", str(n))

    tokens: list[str] = []

    def claim_from(host: str) -> int:
        connection = http.client.HTTPConnection(
            "127.0.0.1", hasty.port, timeout=HANG_S, source_address=("127.0.0.2", 0)
        )
        try:
            connection.request("POST", f"{mail}/claim?max=7", headers={"X-Forwarded-For": host})
            answer = connection.getresponse()
            tokens.extend(json.loads(line)["token"] for line in answer.read().splitlines() if answer.status == 200)
            return answer.status
        finally:
            connection.close()

    hosts = ("192.0.2.1", "192.0.2.1", "192.0.2.2", "198.51.100.1", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    assert [claim_from(host) for host in hosts] == [200, 429, 429, 200, 200, 429, 200]
    bearer = f"Bearer {SECRETS['root']}"
    (line,) = hasty.post(f"{mail}/claim", Authorization=bearer).lines
    assert hasty.post(f"{mail}/ack", line["token"], Authorization=bearer).status == 204
    assert hasty.post(f"{mail}/ack", "\n".join(tokens)).status == 204


@pytest.mark.root
def test_who_a_client_is(hasty: Web) -> None:
    group = hasty.group("consumer c")
    root, daemon = (f"Bearer {SECRETS[user]}" for user in ("root", "daemon"))
    assert hasty.post(f"{group}/s", "x", Authorization=root).status == 201
    assert hasty.post(f"{group}/s", "x", Authorization=daemon).status == 403
    assert hasty.get(f"{group}/s", Authorization=daemon).body == b"x"
    assert hasty.curl("-u", f":{SECRETS['daemon']}", f"{group}/s").body == b"x"
    assert hasty.post(f"{group}/ctl", "depth 1", Authorization=daemon).status == 403


@pytest.mark.root
def test_an_option_is_changed_by_the_owner_of_the_group_alone(hasty: Web) -> None:
    group = hasty.group("consumer c backlog 5")
    daemon = f"Bearer {SECRETS['daemon']}"
    assert hasty.ask("PUT", f"{group}/.consumers/c?backlog=5", Authorization=daemon).status == 200
    assert hasty.ask("PUT", f"{group}/.consumers/c?backlog=6", Authorization=daemon).status == 403
    assert b"backlog 5" in hasty.get(f"{group}/ctl").body


def test_unknown_tokens(hasty: Web) -> None:
    for value in ("Bearer nobody-has-this-one", "Basic !", "Basic Og==", "Digest x", "Bearer"):
        refused = hasty.get("/", Authorization=value)
        assert refused.status == 401
        assert {text.split(" ")[0] for text in refused.headers.get_all("WWW-Authenticate", [])} == {"Bearer", "Basic"}
    began = time.monotonic()
    assert hasty.get("/", Authorization="Bearer x").status == 401  # after more than HTTP_FAILURES
    assert time.monotonic() - began >= HASTE["HTTP_FAILURE_S"]
    assert hasty.get("/", Authorization=f"Bearer {SECRETS['root']}").status == 200
