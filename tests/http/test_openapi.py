"""`/.openapi.json`: a valid document with every route, and nothing that it allows makes the server fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openapi_spec_validator
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings

from mqfs.http import openapi
from mqfs.http.routes import ROUTES
from tests.http.web import Web
from tests.support import campaign
from tests.support.server import short_folder

pytestmark = pytest.mark.process
SETTINGS = settings(
    max_examples=campaign.size(100, 20), deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


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


def test_it_is_a_document(web: Web) -> None:
    reply = web.get("/.openapi.json")
    openapi_spec_validator.validate(reply.json)
    assert web.get("/.openapi.json", If_None_Match=reply.headers["ETag"]).status == 304


def test_every_route_and_option_is_in_it(web: Web) -> None:
    paths = web.get("/.openapi.json").json["paths"]
    for route in ROUTES:
        operation = paths[openapi.template(route.path)][route.method.lower()]
        named = {parameter["name"] for parameter in operation["parameters"]}
        assert {option for option in route.options if option != "h-"} <= named, route
        assert {str(status) for status in route.statuses} <= operation["responses"].keys(), route


def test_whatever_it_allows_is_answered(own: Web) -> None:
    document = own.get("/.openapi.json").json
    for item in document["paths"].values():
        for operation in item.values():
            if isinstance(operation, dict):  # what waits is tested elsewhere
                operation["parameters"] = [p for p in operation["parameters"] if p["name"] not in ("wait", "follow")]
    own.put("/shop/")
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()

        @seed(campaign.seed())
        @settings(
            max_examples=campaign.size(100, 20), deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            reply = case.call(base_url=own.url)
            assert reply.status_code < 500, (case, reply.text)

        ask()
    assert own.get("/.health").status == 200
