"""Pages of other sites can neither write here nor read what is served to this machine alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote, unquote

import pytest

from tests.http.browser import Page, chromium
from tests.http.web import Web, statuses
from tests.support.ports import free_port
from tests.support.server import short_folder

LISTED = "https://dash.example"


@pytest.fixture(scope="module")
def listing() -> Iterator[Web]:
    with short_folder() as folder:
        web = Web(folder, "--http-origin", LISTED, "--http-host", "queue.example")
        with web.server:
            yield web


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"Sec_Fetch_Site": "same-origin"}, 201),
        ({"Sec_Fetch_Site": "none"}, 201),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Origin": "http://localhost"}, 201),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": LISTED}, 403),
    ],
)
def test_writes_of_pages(web: Web, group: str, headers: dict[str, str], status: int) -> None:
    assert web.post(f"{group}/s", "x", Host="localhost", **headers).status == status
    assert web.get(f"{group}/", Host="localhost", **headers).status == 200


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Web]:
    """At all addresses of this machine."""
    with short_folder() as folder:
        at = f"tcp!0.0.0.0!{free_port()}"
        web = Anywhere(folder, "--http", at, "--insecure", "--http-qpubs", "--http-host", "queue.example")
        with web.server:
            yield web


class Anywhere(Web):
    @property
    def port(self) -> int:
        return int(re.findall(r"HTTP at tcp!0\.0\.0\.0!(\d+)", self.server.text())[-1])


OURS = ["localhost", "localhost:80", "127.0.0.1:9", "127.0.0.2", "[::1]", "[::1]:80", "LOCALHOST", "192.0.2.1:80"]
OTHERS = ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "0x7f.1", "[::1].a"]


@pytest.mark.parametrize("host", OURS)
def test_names_that_no_other_site_can_have(web: Web, open_to_all: Web, host: str) -> None:
    """An address in Host was not looked up: no name can be made to lead here."""
    assert web.get("/", Host=host).status == 200
    assert open_to_all.get("/", Host=host).status == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_refused(web: Web, open_to_all: Web, host: str) -> None:
    for one in (web, open_to_all):
        refused = one.get("/", Host=host)
        assert (refused.status, b"--http-host" in refused.body) == (403, True)
    with web.raw(unix=True) as sock:
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert statuses(sock.recv(4_096)) == [200], "no browser gets there"


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("queue.example", {}, 403),
        ("192.0.2.1", {}, 403),
        ("queue.example", {"X_Requested_With": "curl"}, 201),
        ("queue.example", {"Sec_Fetch_Site": "same-origin"}, 201),
        ("queue.example", {"Sec_Fetch_Site": "cross-site", "X_Requested_With": "curl"}, 403),
        ("localhost", {}, 201),
        ("127.0.0.1:80", {}, 201),
        ("localhost", {"Sec_Fetch_Site": "cross-site"}, 403),
    ],
)
def test_a_get_that_changes_something(open_to_all: Web, host: str, headers: dict[str, str], status: int) -> None:
    """By plain HTTP a browser says where it comes from to loopback only."""
    place = f"/.qpubs{open_to_all.group()}"
    assert open_to_all.get(f"{place}/emit?name=s&value=x", Host=host, **headers).status == status
    assert open_to_all.post(f"{place}/emit?name=s&value=x", Host=host).status == 201


class Foreign(BaseHTTPRequestHandler):
    """Another site, whose page has an image of the path that it is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<img src='{unquote(self.path[1:])}' onerror='document.title = 1'>".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_pages_of_other_sites_in_a_browser(open_to_all: Web, tmp_path: Path) -> None:
    """Neither an image of `emit` publishes, nor does a name that was bound to this machine reach it."""
    group = open_to_all.group("replay all")
    site = HTTPServer(("127.0.0.1", 0), Foreign)
    thread = Thread(target=site.serve_forever)
    thread.start()
    try:
        with chromium(tmp_path) as driver:
            page = Page(driver, open_to_all)
            for host in ("queue.example", "localhost", "127.0.0.1"):
                image = f"http://{host}:{open_to_all.port}/.qpubs{group}/emit?name={host}&value=x"
                driver.get(f"http://evil.example:{site.server_port}/{quote(image, safe='')}")
                page.until(lambda: driver.title == "1")
            driver.get(f"http://rebound.example:{open_to_all.port}{group}/.stats")
            assert "--http-host" in page.text("body")
            driver.get(f"http://queue.example:{open_to_all.port}/.web/#{group}/")
            page.shows("h1", group.strip("/"))
    finally:
        site.shutdown()
        thread.join()
        site.server_close()
    assert open_to_all.get(f"{group}/.stats").json["written"] == 0


def test_listed_names_and_origins(listing: Web) -> None:
    group = listing.group()
    assert listing.get("/", Host="queue.example:80").status == 200
    sent = listing.post(f"{group}/s", "x", Origin=LISTED, Sec_Fetch_Site="cross-site")
    assert (sent.status, sent.headers["Access-Control-Allow-Origin"], sent.headers["Vary"]) == (201, LISTED, "Origin")
    refused = listing.post(f"{group}/s", "x", Origin="https://evil.example", Sec_Fetch_Site="cross-site")
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (403, None)


def test_preflight(web: Web, listing: Web) -> None:
    asked = {"Origin": LISTED, "Access_Control_Request_Method": "PUT"}
    granted = listing.ask("OPTIONS", "/g/s", Access_Control_Request_Headers="authorization", **asked)
    assert (granted.status, granted.headers["Access-Control-Allow-Origin"]) == (204, LISTED)
    assert granted.headers["Access-Control-Allow-Headers"] == "authorization"
    refused = web.ask("OPTIONS", "/g/s", **asked)
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (204, None)


def test_bodies_are_no_pages(web: Web, group: str) -> None:
    web.post(f"{group}/s", "<script>alert(1)</script>")
    for path in (f"{group}/s", f"{group}/s?seq=1", f"{group}/.kept/s", f"{group}/s?format=line"):
        answer = web.get(path, Accept="text/html,*/*;q=0.8")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"] == "sandbox"
        assert "html" not in answer.headers["Content-Type"]
