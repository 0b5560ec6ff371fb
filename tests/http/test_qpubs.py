"""The names of qpubs: listen, once, ignore, emit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.http.test_events import start
from tests.http.web import Lines, Web, statuses
from tests.support.server import short_folder

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pubs() -> Iterator[Web]:
    with short_folder() as folder:
        web = Web(folder, "--http-qpubs")
        with web.server:
            yield web


@pytest.fixture
def place(pubs: Web) -> str:
    """The path of a new group's names."""
    return f"/.qpubs{pubs.group()}"


def begin(lines: Lines) -> str:
    """The id of a listen, from its first event."""
    event = start(lines).event()
    assert event["event"] == "listen"
    return str(json.loads(event["data"])["id"])


def body(lines: Lines) -> str:
    return str(json.loads(lines.event()["data"])["body"])


@pytest.mark.parametrize("name", ["jobs.new", "jobs.*", "#"])
def test_a_listen_gets_what_is_emitted_until_it_is_ignored(pubs: Web, place: str, name: str) -> None:
    pubs.post(f"{place}/emit?name=jobs.new", "before")
    query = name.replace("#", "%23")
    with pubs.stream(f"{place}/listen?name={query}") as lines:
        id = begin(lines)
        assert pubs.get(f"{place}/emit?name=jobs.new&value=1").status == 201
        assert pubs.post(f"{place}/emit?name=other.x.y", "no").status == 201
        assert pubs.post(f"{place}/emit?name=jobs.new", "2").status == 201
        assert [body(lines) for _ in range(2 if name != "#" else 3)] == (
            ["1", "2"] if name != "#" else ["1", "no", "2"]
        )
        assert pubs.get(f"{place}/ignore?name={query}&id={id}").status == 204
        assert lines.event() == {"event": "end", "data": "{}"}
        assert lines.line() == b""
    assert pubs.post(f"{place}/ignore?id={id}").status == 404


def test_an_old_client_ends_a_listen(pubs: Web, place: str) -> None:
    """By a POST without a length: it has no body."""
    with pubs.stream(f"{place}/listen?name=s") as lines:
        id = begin(lines)
        assert statuses(pubs.say(f"POST {place}/ignore?id={id} HTTP/1.0\r\n\r\n".encode())) == [204]
        assert lines.event() == {"event": "end", "data": "{}"}


def test_to_listen_makes_nothing(pubs: Web, place: str) -> None:
    """A name that is not there is waited for, however many ask for it."""
    group = place.removeprefix("/.qpubs")
    with pubs.stream(f"{place}/listen?name=later") as lines:
        begin(lines)
        for n in range(20):
            assert pubs.get(f"{place}/once?name=none{n}&wait=1ms").status == 204
        assert pubs.get(f"{place}/once?name=.none&wait=1ms").status == 400
        assert pubs.get(f"{group}/").json["entries"] == []
        pubs.post(f"{place}/emit?name=other", "no")
        pubs.post(f"{place}/emit?name=later", "1")
        assert body(lines) == "1"


def test_raw_data(pubs: Web, place: str) -> None:
    with pubs.stream(f"{place}/listen?name=x&data=raw") as lines:
        begin(lines)
        pubs.post(f"{place}/emit?name=x", "a\nb")
        assert lines.event()["data"] == "a\nb"


def test_a_client_that_comes_back_misses_nothing(pubs: Web, place: str) -> None:
    with pubs.stream(f"{place}/listen?name=x") as lines:
        seen = start(lines).event()["id"]
    assert seen == "0"
    pubs.post(f"{place}/emit?name=x", "meanwhile")
    with pubs.stream(f"{place}/listen?name=x", Last_Event_ID=seen) as lines:
        begin(lines)
        assert body(lines) == "meanwhile"


def test_once(pubs: Web, place: str) -> None:
    pubs.post(f"{place}/emit?name=x", "before")
    assert pubs.get(f"{place}/once?name=x&wait=1ms").status == 204
    with pubs.raw() as sock:
        sock.sendall(f"GET {place}/once?name=x&format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        pubs.eventually_open(place.removeprefix("/.qpubs"), ".cursor", 1)
        pubs.post(f"{place}/emit?name=x", "next")
        pubs.post(f"{place}/emit?name=x", "behind")
        assert sock.recv(65_536).endswith(b"\r\n\r\nnext")


def test_an_ignored_listen_that_nobody_reads_ends_too(pubs: Web, place: str) -> None:
    group = place.removeprefix("/.qpubs")
    with pubs.stream(f"{place}/listen?name=x") as lines:
        id = begin(lines)
        pubs.eventually_open(group, ".cursor", 1)
        pubs.get(f"{place}/ignore?id={id}")
        pubs.eventually_open(group, ".cursor", 0)


@pytest.mark.parametrize(
    ("method", "query", "status"),
    [
        ("GET", "listen", 400),
        ("GET", "listen?name=%23.a*b", 400),
        ("GET", "listen?name=x&data=none", 400),
        ("POST", "listen?name=x", 405),
        ("GET", "once?name=x&format=sse", 400),
        ("GET", "once?name=x&more=1", 400),
        ("GET", "emit?name=x", 400),
        ("GET", "emit?name=x&value=", 400),
        ("POST", "emit?value=x", 400),
        ("POST", "emit?name=ctl&value=x", 404),
        ("POST", "emit?name=.x&value=x", 400),
        ("GET", "ignore", 404),
        ("GET", "none?name=x", 404),
    ],
)
def test_what_is_refused(pubs: Web, place: str, method: str, query: str, status: int) -> None:
    assert pubs.ask(method, f"{place}/{query}").status == status


def test_where_nothing_is(pubs: Web) -> None:
    for path in ("/.qpubs", "/.qpubs/", "/.qpubs/none/listen?name=x", "/.qpubs/emit"):
        assert pubs.get(path).status == 404, path


def test_a_page_of_another_site_emits_nothing(pubs: Web, place: str) -> None:
    for method in ("GET", "POST"):
        assert pubs.ask(method, f"{place}/emit?name=x&value=1", Sec_Fetch_Site="cross-site").status == 403
        assert pubs.ask(method, f"{place}/ignore?id=1", Sec_Fetch_Site="cross-site").status == 403
    assert pubs.get(f"{place.removeprefix('/.qpubs')}/.stats").json["written"] == 0


def test_a_head_emits_nothing(pubs: Web, place: str) -> None:
    for verb in ("emit", "ignore"):
        reply = pubs.ask("HEAD", f"{place}/{verb}?name=x&value=1")
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, POST"), verb
    assert pubs.get(f"{place.removeprefix('/.qpubs')}/.stats").json["written"] == 0


def test_without_the_option_there_is_nothing(web: Web, group: str) -> None:
    assert web.post(f"/.qpubs{group}/emit?name=x&value=1").status == 404
    assert web.get(f"{group}/.stats").json["written"] == 0


def test_a_last_event_beyond_the_end_is_no_silent_gap(pubs: Web, place: str) -> None:
    pubs.post(f"{place}/emit?name=a", "1")
    with pubs.stream(f"{place}/listen?name=a", Last_Event_ID="9") as lines:
        listen = start(lines).event()
        assert (listen["event"], listen["id"]) == ("listen", "0")  # a client that comes back begins there
        assert lines.event() == {"event": "lost", "data": "[2, 9]"}
        assert body(lines) == "1"


def test_what_is_refused_makes_no_stream(pubs: Web) -> None:
    group = pubs.group("depth 10B", "full reject")
    assert pubs.post(f"/.qpubs{group}/emit?name=new", "x" * 40).status == 413
    assert pubs.ask("HEAD", f"{group}/new").status == 404
