"""`/.openapi.json`: a valid document with every route, whose examples work, and whose promises the server keeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import openapi_spec_validator
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error, response_schema_conformance
from schemathesis.specs.openapi.checks import content_type_conformance, response_headers_conformance

from mqfs.http import openapi
from mqfs.http.routes import ROUTES
from tests.http.web import Reply, Web
from tests.support import campaign
from tests.support.server import short_folder

pytestmark = pytest.mark.process
METHODS = {"get", "head", "put", "post", "delete"}
Operation = tuple[str, str, dict[str, Any]]


@schemathesis.serializer("application/x-ndjson", "application/vnd.mqfs.frames")
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def own() -> Iterator[Web]:
    """A server of its own: what is asked of it makes and removes things."""
    with short_folder() as folder:
        web = Web(folder)
        with web.server:
            yield web


def operations() -> list[Operation]:
    paths = openapi.document(ROUTES)["paths"]
    return [(path, method, item[method]) for path, item in paths.items() for method in item if method in METHODS]


def test_it_is_a_document(web: Web) -> None:
    reply = web.get("/.openapi.json")
    openapi_spec_validator.validate(reply.json)
    assert reply.json == json.loads(json.dumps(openapi.document(ROUTES)))
    assert web.get("/.openapi.json", If_None_Match=reply.headers["ETag"]).status == 304


def test_every_route_and_option_is_in_it() -> None:
    known = {(path, method): operation for path, method, operation in operations()}
    assert known.keys() == {(openapi.template(route.path), route.method.lower()) for route in ROUTES}
    assert len({operation["operationId"] for operation in known.values()}) == len(known)
    for route in ROUTES:
        operation = known[openapi.template(route.path), route.method.lower()]
        assert set(route.options) <= {parameter["name"] for parameter in operation["parameters"]}, route
        assert {str(status) for status in route.statuses} <= operation["responses"].keys(), route
        assert bool(route.body) == bool(route.example) <= ("requestBody" in operation), route


# ---------------------------------------------------------------- the examples


def prepare(web: Web, path: str, method: str) -> tuple[str, str]:
    """A new group in which the example of a path can be called: its name, and a body where the example has none."""
    group = web.group(*(["deliver one"] if path.endswith("take") else []))
    if "{CONSUMER}" in path:
        assert web.put(f"{group}/.consumers/mail").status == 201
    if "{STREAM}" in path or "{CONSUMER}" in path or (path, method) == ("/{GROUP}/", "get"):
        for stream in ("orders", "jobs"):
            assert web.post(f"{group}/{stream}", "2 beds").status == 201
    if path.endswith(".batch"):
        assert web.put(f"{group}/orders").status == 201
    if "/.txn/" in path:
        assert web.put(f"{group}/.txn/PART/").status == 201
    if path.rpartition("/")[2] in ("ack", "nack", "release", "dead", "touch"):
        return group[1:], web.post(f"{group}/.consumers/mail/claim").lines[0]["token"]
    return group[1:], ""


def call(web: Web, path: str, method: str, operation: dict[str, Any], parameter: dict[str, Any] | None) -> Reply:
    """Call an operation as its example is, with one of its parameters."""
    is_endless = parameter is not None and parameter["name"] == "follow" and path != "/{GROUP}"
    group, body = prepare(web, path, method)
    given = openapi.document(ROUTES)["paths"][path].get("parameters", [])
    for name, value in {**{p["name"]: p["example"] for p in given}, "GROUP": group}.items():
        path = path.replace(f"{{{name}}}", quote(value, safe=""))
    kind, media = next(iter(operation.get("requestBody", {}).get("content", {"": {}}).items()))
    headers = {"Content-Type": kind} if kind else {}
    if parameter is not None and parameter["name"].lower().removeprefix("mqfs-") in ("every", "cron"):
        headers["Mqfs-Id"] = "nightly"  # a schedule has a name
    if parameter is not None and parameter["in"] == "header":
        headers[parameter["name"]] = str(parameter["example"])
    elif parameter is not None:
        path += "?" + urlencode({parameter["name"]: parameter["example"]}, doseq=True)
    if is_endless:
        with web.stream(path) as lines:
            return Reply(lines.answer.status, lines.headers, b"")
    return web.ask(method.upper(), path, body or media.get("example"), **headers)


@pytest.mark.parametrize(("path", "method", "operation"), operations(), ids=lambda value: str(value)[:40])
def test_the_examples(path: str, method: str, operation: dict[str, Any], web: Web) -> None:
    parameters = [parameter for parameter in operation["parameters"] if "example" in parameter]
    assert [p["name"] for p in operation["parameters"] if p not in parameters] in ([], ["h-"])
    for parameter in (None, *parameters):
        reply = call(web, path, method, operation, parameter)
        name = parameter["name"] if parameter is not None else ""
        expected = 412 if name in ("If-Match", "If-None-Match", "Mqfs-Expect", "expect") else 399  # there are messages
        expected = 504 if name == "reply" else expected  # there is none
        expected = 409 if name in ("over", "memory") else expected  # the consumer is there, without it
        assert reply.status == expected or reply.status < 400, (name, reply)
        assert str(reply.status) in operation["responses"], (name, reply)


# ---------------------------------------------------------------- whatever it allows


def known_status(_context: Any, response: Any, case: Any) -> None:
    """A success is one of those that are described; a refusal may be any."""
    described = case.operation.definition.raw["responses"]
    assert response.status_code >= 400 or str(response.status_code) in described, response.status_code


NAMES = {
    "GROUP": ["g", "work"],
    "STREAM": ["orders", "view", "jobs", "new", "not/here"],
    "CONSUMER": ["mail", "new"],
    "PART": ["p", "q"],
}


def bounded(document: dict[str, Any]) -> dict[str, Any]:
    """Without what waits, which is tested elsewhere, and with names of which some are there."""
    for item in document["paths"].values():
        for parameter in item.get("parameters", []):
            parameter["schema"] = {"enum": NAMES[parameter["name"]]}
        for method in METHODS & item.keys():
            waits = ("wait", "follow")
            item[method]["parameters"] = [p for p in item[method]["parameters"] if p["name"] not in waits]
            for parameter in item[method]["parameters"]:
                if parameter["name"] == "format":
                    parameter["schema"]["enum"] = ["raw", "line", "nul", "json"]
    return document


def furnish(session: requests.Session, url: str) -> None:
    for group, ctl in ((f"{url}/g", "bind view '#'"), (f"{url}/work", "deliver one")):
        for path in ("", ".txn/p/", "orders", ".consumers/mail"):
            session.put(f"{group}/{path}")
        session.post(f"{group}/ctl", ctl)
        for path in ("orders", "jobs"):
            session.post(f"{group}/{path}", "2 beds")


def test_whatever_it_allows_is_answered(own: Web) -> None:
    schema = schemathesis.openapi.from_dict(bounded(own.get("/.openapi.json").json))
    checks = [not_a_server_error, known_status, response_schema_conformance, response_headers_conformance]
    seen: Counter[int] = Counter()
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            furnish(session, own.url)

            @seed(campaign.seed())
            @settings(
                max_examples=campaign.size(300),
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(), accept=st.sampled_from(["*/*", "application/json"]))
            def ask(case: Any, accept: str) -> None:
                if case.method == "DELETE" or "PART" in case.path:
                    furnish(session, own.url)
                reply = case.call(own.url, session, headers={"Accept": accept}, allow_redirects=False)
                seen[reply.status_code] += 1
                case.validate_response(reply, checks=[*checks, *([content_type_conformance] if reply.content else [])])

            ask()
    assert {200, 201, 204, 308, 400, 404} <= seen.keys()
    assert sum(seen[status] for status in seen if status < 400) > seen.total() / 3
    assert own.get("/.health").status == 200
