"""Every row of the table of routes, by curl."""

from __future__ import annotations

import json
import os
import struct

import pytest

from mqfs.http.routes import ROUTES
from tests.http.web import Web, rest, statuses


def test_groups(web: Web) -> None:
    assert web.curl("-X", "PUT", "/shop/").status == 201
    assert web.curl("-X", "PUT", "/shop/").status == 200
    assert web.curl("-X", "PUT", "/shop/", "-H", "If-None-Match: *").status == 412
    for name in ("b", "a", "c"):
        assert web.curl("-X", "PUT", f"/shop/{name}").status == 201
    assert web.curl("-X", "PUT", "/shop/in/").status == 201
    listed = web.curl("/shop/").json
    assert [(e["name"], e["type"]) for e in listed["entries"]] == [
        ("a", "stream"), ("b", "stream"), ("c", "stream"), ("in", "group")
    ]  # fmt: skip
    page = web.curl("/shop/?after=a&count=2").json
    assert ([e["name"] for e in page["entries"]], page["after"]) == (["b", "c"], "c")
    assert web.curl("/shop/?after=c&count=2").json["after"] is None
    moved = web.curl("/shop")
    assert (moved.status, moved.headers["Location"]) == (308, "/shop/")
    for query in ("select=a", "select=a%20b&select=c&since=end", "detail&type=stream", "after=%3F%26?&count=2"):
        moved = web.curl(f"/shop?{query}")
        assert (moved.status, moved.headers["Location"]) == (308, f"/shop/?{query}")
    assert web.curl("-X", "DELETE", "/shop/").status == 409
    assert web.curl("-X", "DELETE", "/shop/in/").status == 204
    assert web.curl("/shop/in/").status == 404


def test_streams(web: Web, group: str) -> None:
    orders = f"{group}/orders"
    assert web.curl("-X", "PUT", orders).status == 201
    assert web.curl("-X", "PUT", orders).status == 200
    assert web.curl("-X", "PUT", orders, "-H", "If-None-Match: *").status == 412
    sent = web.curl("-d", "one", orders)
    assert (sent.status, sent.body, sent.headers["Mqfs-Sequence"]) == (201, b"1\n", "1")
    assert sent.headers["Location"] == f"{orders}?seq=1"
    assert web.curl("-T", "-", orders, "-H", "If-None-Match: *", stdin=b"x").status == 412
    assert web.curl("-T", "-", orders, stdin=b"two").body == b"2\n"
    assert web.curl("-d", "x", f"{group}/made").status == 201
    assert web.curl("-d", "x", f"{group}/never?create=no").status == 404
    assert web.curl(orders).body == b"onetwo"
    one = web.curl(sent.headers["Location"])
    assert (one.body, one.headers["Mqfs-Sequence"]) == (b"one", "1")
    assert web.curl(f"{orders}?seq=9").status == 404
    head = web.curl("-I", orders).headers
    assert [head[f"Mqfs-{name}"] for name in ("First", "Next", "Messages", "Bytes")] == ["1", "4", "2", "6"]
    assert web.curl("-X", "DELETE", orders).status == 204
    assert web.curl(orders).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("PUT", "/absent", 400, "expected PUT /absent/ (a group) or a body (a message)"),
        ("GET", "/absent/", 404, "no group 'absent' (make it: PUT /absent/)"),
        ("GET", "/absent", 404, "no group or stream 'absent' (make a group: PUT /absent/)"),
        ("POST", "/absent/orders", 404, "no group 'absent' (make it: PUT /absent/)"),
        ("GET", "/in/a%20b/c/orders", 404, "no group 'in/a b' (make it: PUT /in/a%20b/)"),
        ("GET", "/in/orders", 404, "no stream 'orders' in group 'in' (make it: PUT /in/orders)"),
        ("DELETE", "/in/orders", 404, "no stream 'orders' in group 'in' (make it: PUT /in/orders)"),
        (
            "POST",
            "/in/.consumers/mail/claim",
            404,
            "no consumer 'mail' in group 'in' (make it: PUT /in/.consumers/mail)",
        ),
        ("DELETE", "/in/.consumers/mail", 404, "no consumer 'mail' in group 'in' (make it: PUT /in/.consumers/mail)"),
        ("POST", "/in/.txn/PART/s", 404, "no part 'PART' (begin it: PUT /in/.txn/PART/)"),
        ("GET", "/in/there/", 400, "'there' is a stream, not a group (expected no slash at the end)"),
        ("GET", "/in/there/orders", 404, "'there' is a stream, not a group"),
        ("GET", "/in/there/orders/x", 400, "'there' is a stream, not a group"),
        ("GET", "/in/ctl/x", 404, "'ctl' is a file, not a group"),
        ("GET", "/.health/x", 404, "no file '.health/x'"),
        ("GET", "/.web/other", 404, "no page 'other'"),
    ],
)
def test_what_is_not_there_is_named_and_how_it_is_made(
    web: Web, method: str, path: str, status: int, says: str
) -> None:
    if web.get("/in/").status != 200:
        assert [web.put("/in/").status, web.put("/in/there").status] == [201, 201]
    refused = web.curl("-X", method, path)
    assert (refused.status, refused.body.decode()) == (status, f"{says}\n")
    assert web.get("/absent/").status == 404


def test_a_view(web: Web, group: str) -> None:
    assert web.post(f"{group}/ctl", "bind all '#'").status == 204
    web.post(f"{group}/a", "1")
    web.post(f"{group}/b", "2")
    assert web.curl(f"{group}/all").body == b"12"
    assert web.curl("-I", f"{group}/all").headers["Mqfs-Next"] == "3"
    assert web.curl("-X", "DELETE", f"{group}/all").status == 204
    assert web.curl(f"{group}/all").status == 404


def test_kept(web: Web, group: str) -> None:
    web.post(f"{group}/s", "hello ")
    web.post(f"{group}/s", "world")
    kept = f"{group}/.kept/s"
    whole = web.curl(kept)
    assert (whole.status, whole.body, whole.headers["Content-Length"]) == (200, b"hello world", "11")
    part = web.curl("-r", "3-7", kept)
    assert (part.status, part.body, part.headers["Content-Range"]) == (206, b"lo wo", "bytes 3-7/11")
    one = web.curl("-r", "4-4", kept)
    assert (one.status, one.body, one.headers["Content-Range"]) == (206, b"o", "bytes 4-4/11")
    assert web.curl("-r", "-5", kept).body == b"world"
    assert web.curl("-r", "-1", kept).body == b"d"
    assert web.curl("-r", "6-", kept).body == b"world"
    beyond = web.curl("-r", "11-", kept)
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, "bytes */11")
    tag = whole.headers["ETag"]
    assert web.curl(kept, "-H", f"If-None-Match: {tag}").status == 304
    web.post(f"{group}/s", "!")
    assert web.curl(kept, "-H", f"If-None-Match: {tag}").body == b"hello world!"
    assert web.curl("-r", "6-", "-H", f"If-Range: {tag}", kept).status == 200


def test_ctl_and_counters(web: Web, group: str) -> None:
    assert web.curl("-d", "depth 5", f"{group}/ctl").status == 204
    assert b"\ndepth 5\n" in web.curl(f"{group}/ctl").body
    wrong = web.curl("--data-binary", "depth 7\ndepth many\n", f"{group}/ctl")
    assert wrong.status == 400
    assert wrong.body.startswith(b"line 2: depth: invalid bound 'many'")
    assert b"\ndepth 5\n" in web.curl(f"{group}/ctl").body
    assert web.curl(f"{group}/.stats").json["refused"] == 1
    assert "depth: invalid bound 'many'" in web.curl(f"{group}/.errors").lines[0]["text"]
    with web.stream(f"{group}/?select&follow"):
        assert [row["file"] for row in web.curl(f"{group}/.who").lines] == [".cursor"]


def test_batch(web: Web, group: str) -> None:
    web.put(f"{group}/a")
    web.put(f"{group}/b")
    lines = [{"stream": "a", "body": "1"}, {"stream": "b", "body_base64": "/w=="}, {"stream": "a", "body": "3",
             "headers": {"k": "v"}}]  # fmt: skip
    body = "\n".join(map(json.dumps, lines)).encode()
    kind = "Content-Type: application/x-ndjson"
    sent = web.curl("--data-binary", "@-", "-H", kind, f"{group}/.batch", stdin=body)
    assert (sent.status, sent.body) == (201, b"1\n")
    read = web.curl(f"{group}/?select=a&select=b&format=json").lines
    assert [(m["stream"], m.get("body"), m.get("body_base64")) for m in read] == [
        ("a", "1", None), ("b", None, "/w=="), ("a", "3", None)
    ]  # fmt: skip
    assert read[2]["headers"] == {"sender": read[2]["headers"]["sender"], "k": "v"}
    refused = web.curl(
        "--data-binary", "@-", "-H", kind, f"{group}/.batch", stdin=body + b'\n{"stream":"no","body":"x"}'
    )
    assert refused.status == 404
    assert web.curl("-I", f"{group}/a").headers["Mqfs-Next"] == "4"
    wrong = web.curl("--data-binary", "@-", "-H", kind, f"{group}/.batch", stdin=body + b"\n{}")
    assert (wrong.status, b"line 4" in wrong.body) == (400, True)
    frames = struct.pack("<IHH", 10, 1, 0) + b"a4"
    sent = web.curl(
        "--data-binary", "@-", "-H", "Content-Type: application/vnd.mqfs.frames", f"{group}/.batch", stdin=frames * 2
    )
    assert (sent.status, sent.body) == (201, b"4\n")
    assert web.curl("-d", "x", f"{group}/.batch").status == 400


def test_transaction(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    part = f"{group}/.txn/p1"
    assert web.curl("-X", "PUT", f"{part}/").status == 201
    assert web.curl("-d", "a", f"{part}/s").status == 202
    frames = struct.pack("<IHH", 10, 1, 0) + b"sb"
    kind = "Content-Type: application/vnd.mqfs.frames"
    assert web.curl("--data-binary", "@-", "-H", kind, f"{part}/.batch", stdin=frames).status == 202
    assert web.curl(f"{group}/s").body == b""
    assert web.curl("-d", "commit app.1 p1", f"{group}/.txn/ctl").status == 204
    assert web.curl(f"{group}/s").body == b"ab"
    assert b"app" in web.curl(f"{group}/.txn/ctl").body
    web.put(f"{part}/")
    assert web.curl("-X", "DELETE", f"{part}/").status == 204
    assert web.curl("-d", "commit app.2 p1", f"{group}/.txn/ctl").status == 404


def test_consumers(web: Web, group: str) -> None:
    mail = f"{group}/.consumers/mail"
    web.put(f"{group}/s")
    assert web.curl("-X", "PUT", f"{mail}?over=s&memory=yes&backlog=9&full=drop-new").status == 201
    assert web.curl("-X", "PUT", mail).status == 200
    assert "consumer mail s memory backlog 9 full drop-new\n" in web.curl(f"{group}/ctl").body.decode()
    for body in ("a", "b", "c"):
        web.post(f"{group}/s", body)
    assert [(m["body"], m["deliveries"]) for m in web.curl(mail).lines] == [("a", 1), ("b", 1), ("c", 1)]
    claimed = web.curl("-X", "POST", f"{mail}/claim?max=2").lines
    assert [m["body"] for m in claimed] == ["a", "b"]
    assert web.curl("-X", "DELETE", mail).status == 409
    tokens = [m["token"] for m in claimed]
    assert web.curl("-d", tokens[0], f"{mail}/ack").status == 204
    assert web.curl("-d", tokens[0], f"{mail}/ack").status == 410
    assert web.curl("-d", tokens[1], f"{mail}/nack?after=0").status == 204
    assert [(m["body"], m["deliveries"]) for m in web.curl(mail).lines] == [("b", 2), ("c", 1)]
    assert web.curl("-d", "end", f"{mail}/seek").status == 204
    assert web.curl("-X", "POST", f"{mail}/claim?wait=10ms").status == 204
    assert web.curl("-X", "DELETE", mail).status == 204
    assert web.curl(mail).status == 404


def test_take(web: Web) -> None:
    group = web.group("deliver one")
    for body in ("a", "b", "c"):
        web.post(f"{group}/s", body)
    assert web.curl(f"{group}/s").body == b"abc"
    assert web.curl("-X", "POST", f"{group}/s/take").body == b"a"
    assert web.curl("-X", "POST", f"{group}/s/take?max=9&format=line").body == b"b\nc\n"
    assert web.curl("-X", "POST", f"{group}/s/take?wait=10ms").status == 204
    web.post(f"{group}/ctl", "ack next")
    refused = web.curl("-X", "POST", f"{group}/s/take")
    assert (refused.status, b"or a consumer" in refused.body) == (409, True)
    assert web.curl("-X", "POST", f"{web.group()}/s/take").status == 404


def test_health(web: Web) -> None:
    assert web.curl("/.health").json == {"status": "ok"}
    assert web.curl("/.ready").json == {"status": "ok", "reasons": [], "warnings": []}


def test_a_unix_socket_is_served_as_its_peer(web: Web, group: str) -> None:
    with web.raw(unix=True) as sock:
        sock.sendall(f"POST {group}/s?h-k=v HTTP/1.0\r\nContent-Length: 1\r\n\r\nx".encode())
        assert statuses(rest(sock)) == [201]
    assert web.get(f"{group}/s?format=json").lines[0]["headers"] == {"sender": str(os.geteuid()), "k": "v"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/a%2Fb", 400), ("/a%00", 400), ("/./a", 400), ("/../a", 400), ("/%2e%2e/a", 400), ("//a", 400),
        ("/%ff", 400), ("/%zz", 400), ("/a/b/c/d", 404), ("/ctl/x", 404), ("/ctl/x/y", 400), ("/ctl/", 400),
        ("/?what=1", 400), ("/a%zz?x", 400), ("/.nothing", 404), ("/.txn/ctl", 200), ("/%63tl", 200),
    ],
)  # fmt: skip
def test_paths(web: Web, path: str, status: int) -> None:
    assert web.curl("--path-as-is", path).status == status


def test_methods(web: Web, group: str) -> None:
    refused = web.curl("-X", "PATCH", f"{group}/")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET, PUT, DELETE, HEAD")
    assert web.curl("-X", "OPTIONS", f"{group}/").headers["Allow"] == "GET, PUT, DELETE, HEAD"
    assert web.curl("-X", "DELETE", group).status == 400
    assert web.curl("-X", "POST", f"{group}/.put").status == 404


def test_errors_as_the_client_wants_them(web: Web) -> None:
    plain = web.curl("/no")
    assert plain.headers["Content-Type"] == "text/plain; charset=utf-8"
    problem = web.curl("-H", "Accept: application/json", "/no")
    assert problem.headers["Content-Type"] == "application/problem+json"
    assert problem.json == {
        "type": "about:blank", "title": "file does not exist", "status": 404, "detail": plain.body.decode().strip()
    }  # fmt: skip


def test_each_row_is_said_once() -> None:
    keys = [(route.method, route.kind, route.verb) for route in ROUTES]
    assert len(set(keys)) == len(keys)
    assert all(route.about.endswith(".") and route.path.startswith("/") for route in ROUTES)


def test_nothing_is_below_the_server_s_own_files(web: Web) -> None:
    for path in ("/.health/x", "/.ready/x", "/.metrics/x", "/.openapi.json/x"):
        assert web.get(path).status == 404, path
