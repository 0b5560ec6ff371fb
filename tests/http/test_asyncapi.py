"""`/.asyncapi.json`: a valid document with every stream that the user may see."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.http.node.run import PACKAGES
from tests.http.web import Web

pytestmark = pytest.mark.process


def test_it_is_a_document_of_the_streams(web: Web, group: str) -> None:
    name = group[1:]
    web.put(f"{group}/below/")
    for path in (f"{group}/s", f"{group}/a~b%20c", f"{group}/below/t"):
        assert web.post(path, "x").status == 201
    document = web.get("/.asyncapi.json").json
    schema = json.loads((PACKAGES / "@asyncapi" / "specs" / "schemas" / "3.0.0.json").read_text())
    jsonschema.Draft7Validator(schema).validate(document)
    ours = {path: one["address"] for path, one in document["channels"].items() if path.startswith(f"{name}/")}
    assert ours == {path: f"/{path}" for path in (f"{name}/a~b c", f"{name}/below/t", f"{name}/s")}
    operation = document["operations"][f"publish:{name}/a~b c"]
    assert operation["channel"] == {"$ref": f"#/channels/{name}~1a~0b c"}
