"""What no client sends: deep, long, huge and strange values, in every place where a value is read."""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import mqfs
from mqfs.http.answers import Answer
from mqfs.http.dialects import ntfy, qpubs
from mqfs.http.dialects.ntfy import PARTS
from mqfs.http.openapi import option
from mqfs.http.route import Call, Route
from mqfs.http.routes import ROUTES, TREE, Table
from mqfs.http.wire import head
from tests.http.subject import HttpSubject
from tests.http.web import Web, rest
from tests.support.eventually import HANG_S
from tests.support.server import short_folder

pytestmark = pytest.mark.process
DIGITS = "9" * 4_400  # above what int() takes
VALUES = {
    "brackets": "[" * 5_000,
    "objects": '{"a":' * 1_000,
    "digits": DIGITS,
    "minus digits": f"-{DIGITS}",
    "exponent": "1e999",
    "not a number": "NaN",
    "infinite": "Infinity",
    "superscript": "²",
    "direction": "a\u202eb",
    "half a character": '"\\ud800"',
    "seconds": f"{DIGITS}s",
    "clock": "25:99pm",
}
HEADERS = {
    "range": "bytes={}-{}",
    "if-none-match": "{}",
    "last-event-id": "{}",
    "accept": "{}",
    "content-type": "{}",
    "idempotency-key": "{}",
    "authorization": "Basic {}",
    "x-forwarded-for": "{}",
    "host": "{}",
    "origin": "http://{}",
    "traceparent": "{}",
    "mqfs-h-a": "{}",
    "mqfs-h-part": "{}",
}
DEEP = b"[" * 100_000
BODIES = (DEEP, b'{"a":' * 10_000, b'{"stream":"s","body":"x","headers":' + DEEP, b'{"topic":' + DIGITS.encode() + b"}")


@pytest.fixture(scope="module")
def faces() -> Iterator[Web]:
    """A server of the tree with qpubs, and of ntfy."""
    at_once = "from mqfs import limits; limits.HTTP_FAILURE_S = 0.0; from mqfs.cli.main import main; main()"
    with short_folder() as folder:
        program = (sys.executable, "-c", at_once, "serve")  # wrong tokens, too, are answered at once
        web = Web(folder, "--http-qpubs", "--http-ntfy", "alerts=tcp!127.0.0.1!0", program=program)
        with web.server:
            yield web


def target(route: Route, group: str) -> str:
    """A path of that route, in that group."""
    return route.path.replace("/shop", group).replace("TOPIC", "t").replace("PART", "p")


HEADED = ("stream", "kept", "group", ".batch")  # kinds whose routes read all headers there are
DEFAULTS = {"name": "s", "wait": "0s", "until": "1", "lease": "1s"}


def requests(routes: tuple[Route, ...], group: str) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Each route with each value in each option and header, and with each body."""
    done = set()
    for route in routes:
        path, body, any_name = target(route, group), b"x" if route.body else b"", "*" in route.options
        names = [f"{name}a" if name == "h-" else name for name in route.options if name != "*"]
        end = "".join(f"&{name}={text}" for name, text in DEFAULTS.items() if name in names)
        headers = list(HEADERS) if route.kind in HEADED and not route.verb else []
        if any_name:
            names = [found[0] for found in PARTS.values()]
            headers, names, end = names, [*names, "since", "id", "auth"], "&poll=1&since=all"
        elif route.kind != "qpubs":
            headers += [option(name, route.verb or route.kind).header for name in route.options]
        about = route.call if any_name else route.body  # options of one name are read in one way
        names, headers = ([name for name in found if (about, name) not in done] for found in (names, headers))
        done.update((about, name) for name in (*names, *headers))
        if route.method == "DELETE":
            continue  # the others would find nothing
        for value in VALUES.values():
            for name in names:
                yield route.method, f"{path}?{name}={quote(value)}{end}", body, {}
            for name in filter(None, headers):
                yield route.method, f"{path}?{end[1:]}", body, {name: HEADERS.get(name, "{}").format(value, value)}
        for body in BODIES if route.body else ():
            for kind in ("application/json", "application/x-ndjson", "application/vnd.mqfs.frames"):
                yield route.method, path, body, {"Content-Type": kind}


@pytest.mark.parametrize("face", ["tree", "qpubs", "ntfy"])
def test_no_value_is_a_fault_of_the_server(faces: Web, face: str) -> None:
    """Not one answer is 500, and no traceback is in the log."""
    group = "/alerts" if face == "ntfy" else faces.group("replay all")
    for path in (f"{group}/", f"{group}/orders", f"{group}/.consumers/mail"):
        faces.put(path)
    beside = qpubs.beside(TREE).routes
    routes = {"tree": ROUTES, "qpubs": beside[len(ROUTES) :], "ntfy": ntfy.ROUTES}[face]
    port = faces.port
    if face == "ntfy":
        (port,) = map(int, re.findall(r"ntfy of group 'alerts' at tcp!127\.0\.0\.1!(\d+)", faces.server.text()))
    found: Counter[int] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    for method, path, body, headers in requests(routes, group):
        connection.request(method, path, body or None, {name: text.encode() for name, text in headers.items()})
        answer = connection.getresponse()
        found[answer.status] += 1
        assert answer.status < 500, (method, path[:200], headers, answer.read())
        if path.split("?")[0].endswith("/listen"):
            connection.close()  # the answer does not end
        answer.read()
    connection.close()
    assert "Traceback" not in faces.server.text()
    assert found[400] > 10, found


BREAKS = ("\r\n", "\n", "\r", "\0")
_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\r\n\0]*")


def own_headers(mark: str) -> dict[str, str]:
    """The headers of a message that looks like an event. Another could follow each name or value after `mark`."""
    evil = f"1{mark}Set-Cookie: x{mark}{mark}HTTP/1.1 200 OK{mark}X"
    names = {f"{begin}{evil}": "y" for begin in ("ce-", "ce-b: ", "content-type", "", "Mqfs-H-")}
    values = dict.fromkeys(("ce-c", "content-type", "plain", "reply-id"), evil)
    return {"ce-specversion": "1.0", "ce-id": "1", **names, **values}


def require_one_answer(data: bytes, body: bytes) -> None:
    """The whole answer is one head, of whole lines, and that body."""
    head, _, rest = data.partition(b"\r\n\r\n")
    begin, *lines = head.split(b"\r\n")
    assert begin == b"HTTP/1.1 200 OK"
    assert [line for line in lines if not _LINE.fullmatch(line)] == []
    assert not [line for line in lines if line.lower().startswith((b"set-cookie", b"x:"))]
    assert lines.count(b"ce-id: 1") == 1
    assert rest == body


@pytest.mark.parametrize("mark", BREAKS, ids=repr)
@pytest.mark.parametrize("way", ["query", "batch", "part", "tree"])
def test_no_header_of_a_message_becomes_another_line_of_an_answer(faces: Web, mark: str, way: str) -> None:
    """Whichever way it was written; in a GET of one message, and in a reply that is one."""
    group, own = faces.group("replay all"), own_headers(mark)
    message = json.dumps({"stream": "s", "headers": own, "body": "hello"})
    faces.put(f"{group}/s")
    if way == "query":
        options = "&".join(f"h-{quote(name, safe='')}={quote(text, safe='')}" for name, text in own.items())
        assert faces.post(f"{group}/s?{options}", "hello").status == 201
    elif way == "batch":
        assert faces.post(f"{group}/.batch", message, Content_Type="application/x-ndjson").status == 201
    elif way == "part":
        faces.put(f"{group}/.txn/p/")
        put = f"{json.dumps({'stream': 's', 'headers': own})}\nhello"
        assert faces.post(f"{group}/.txn/p/.put", put).status == 202
        assert faces.post(f"{group}/.txn/ctl", "commit a.1 p").status == 204
    else:
        with mqfs.connect(faces.server.address, transport="9p") as client:
            client.group(group[1:]).publish("s", b"hello", headers=own)
    (line,) = faces.get(f"{group}/s?format=json").lines
    assert own.items() <= line["headers"].items()
    require_one_answer(faces.say(b"GET %b/s?seq=1 HTTP/1.0\r\n\r\n" % group.encode()), b"hello")

    with faces.raw() as sock:
        faces.put(f"{group}/asked")
        faces.put(f"{group}/.consumers/c?over=asked")
        sock.sendall(b"POST %b/asked?reply=60s HTTP/1.0\r\nContent-Length: 1\r\n\r\n?" % group.encode())
        (asked,) = faces.post(f"{group}/.consumers/c/claim?wait=60s").lines
        reply = json.dumps({"stream": asked["headers"]["reply-to"], "headers": own, "body": "yes"})
        assert faces.post(f"{group}/.batch", reply, Content_Type="application/x-ndjson").status == 201
        require_one_answer(rest(sock), b"yes")


@pytest.mark.parametrize("mark", BREAKS, ids=repr)
@pytest.mark.parametrize("at", ["a{}b", "{}", "b{}", "{}b"])
def test_no_head_is_made_of_a_line_break(mark: str, at: str) -> None:
    """Whoever asks for it."""
    text = at.format(mark)
    for pair in ((text, "v"), ("N", text)):
        with pytest.raises(ValueError, match="line break or NUL"):
            head(200, [("A", "1"), pair, ("B", "2")], 0, 0, False)


async def fault(call: Call) -> Answer:
    raise ZeroDivisionError("division by zero")


def test_a_fault_of_the_server_is_logged_without_the_query(caplog: pytest.LogCaptureFixture) -> None:
    """A client of ntfy may give its token there."""
    subject = HttpSubject(table=Table((Route("GET", "health", "/.health", fault, "Fail.", options=("*",)),)))
    try:
        reply = subject.ask(0, "GET", "../.health?auth=c2VjcmV0&x=1")
    finally:
        subject.end()
    assert (reply.status, reply.body) == (500, b"internal server error (see the server log)\n")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["GET /.health failed"]
    assert "ZeroDivisionError" in caplog.text
    assert "c2VjcmV0" not in caplog.text


def memory_of(web: Web) -> int:
    """Bytes in memory of the server."""
    text = Path(f"/proc/{web.server.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) << 10


def test_what_strangers_ask_for_does_not_stay_in_memory(faces: Web) -> None:
    """Neither of targets, nor of headers that all who read a stream see."""
    group = faces.group("replay all")
    faces.put(f"{group}/s")

    def ask(count: int) -> None:
        connection = faces.connect()
        for n in range(count):
            connection.request("GET", f"/{n}{'/a' * 3_900}?{'&b=c' * 60}")
            assert connection.getresponse().read()
            connection.request("GET", f"/.health?{n}={'x' * 7_500}")
            assert connection.getresponse().read()
        connection.close()

    ask(100)
    before = memory_of(faces)
    ask(1_100)
    assert memory_of(faces) - before < 16 << 20
