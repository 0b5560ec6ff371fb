"""Pages of other sites can neither write here nor read what is served to this machine alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.web import Web
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


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:9", "[::1]", "[::1]:80", "LOCALHOST"])
def test_names_of_loopback(web: Web, host: str) -> None:
    assert web.get("/", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.2", "queue.example"]
)
def test_other_names_are_refused(web: Web, host: str) -> None:
    assert web.get("/", Host=host).status == 403


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
