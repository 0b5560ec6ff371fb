"""CloudEvents by HTTP, made and read by a library that is not ours; traces through HTTP; the AsyncAPI document."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary, to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from tests.http.web import Reply, Web

pytestmark = pytest.mark.process
KIND, MANY = "application/cloudevents+json", "application/cloudevents-batch+json"
GIVEN = {"specversion": "1.0", "type": "order", "source": "/shop", "id": "1"}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def event(data: Any, **more: Any) -> CloudEvent:
    known = {
        "type": "order",
        "source": "/shop",
        "id": "1",
        "specversion": "1.0",
        "time": datetime(2030, 1, 1, tzinfo=UTC),
    }
    return CloudEvent({**known, **more}, data)


def send(web: Web, path: str, message: HTTPMessage) -> int:
    reply = web.post(path, message.body, **{name.replace("-", "_"): value for name, value in message.headers.items()})
    assert reply.status == 201, reply.body
    return int(reply.headers["Mqfs-Sequence"])


def received(reply: Reply) -> CloudEvent:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    return from_binary(HTTPMessage(headers, reply.body), JSONFormat())


@pytest.mark.parametrize(
    ("data", "more"),
    [
        ({"lamps": 3, "wörter": ["ä"]}, {"datacontenttype": "application/json"}),
        ("3 lamps\n", {"datacontenttype": "text/plain"}),
        (bytes(range(256)), {"datacontenttype": "application/octet-stream"}),
        ({"a": 1}, {"datacontenttype": "application/json", "subject": 'ä "quoted" % €', "ext": "x y"}),
        (None, {}),
    ],
)
@pytest.mark.parametrize("write", [to_binary, to_structured])
def test_an_event_comes_as_it_went_by_either_mode(web: Web, group: str, data: Any, more: Any, write: Any) -> None:
    sent = event(data, **more)
    sequence = send(web, f"{group}/s", write(sent, JSONFormat()))
    reply = web.get(f"{group}/s?seq={sequence}")
    got = received(reply)
    assert got.get_attributes() == {"datacontenttype": "application/octet-stream", **sent.get_attributes()}
    assert got.get_data() == data or (data is None and not reply.body)
    (line,) = web.get(f"{group}/s?format=json").lines
    assert line["headers"]["ce-type"] == "order"


def test_both_modes_make_the_same_message(web: Web, group: str) -> None:
    sent = event({"lamps": 3}, datacontenttype="application/json")
    for write in (to_binary, to_structured):
        send(web, f"{group}/s", write(sent, JSONFormat()))
    first, second = web.get(f"{group}/s?format=json").lines
    assert first["headers"] == second["headers"]
    assert json.loads(first["body"]) == json.loads(second["body"])


def test_a_batch_is_all_or_none(web: Web, group: str) -> None:
    events = [{**GIVEN, "id": str(n), "data": n} for n in range(100)]
    reply = web.post(f"{group}/s", json.dumps(events), Content_Type=MANY)
    assert reply.status == 201
    assert [line["body"] for line in web.get(f"{group}/s?format=json").lines] == [str(n) for n in range(100)]
    for wrong in ({}, {**GIVEN, "type": ""}, [], 1, {**GIVEN, "specversion": "0.3"}):
        refused = web.post(f"{group}/s", json.dumps([*events, wrong]), Content_Type=MANY)
        assert (refused.status, b"event 101" in refused.body) == (400, True), refused.body
    assert len(web.get(f"{group}/s?format=json").lines) == 100


@pytest.mark.parametrize(
    "data",
    [
        "1e400",
        "-0",
        "1.10",
        "12345678901234567890.123456789",
        '{"a": 1, "a" :2 , "data": [ ]}',
        '"data"',
        '[{"x":"}"}]',
        " 7",
    ],
)
def test_data_keep_their_characters(web: Web, group: str, data: str) -> None:
    """Numbers are not rounded, and duplicate names stay, whatever is beside them."""
    head = json.dumps(GIVEN)[:-1]
    for sent in (f'{head},"data":{data}}}', f'{{ "ext" : "data\\": 1,", "data": 1,\n"data": {data}\t, {head[1:]}}}'):
        for body, kind in ((sent, KIND), (f"[{sent}]", MANY)):
            assert web.post(f"{group}/s", body, Content_Type=kind).status == 201
    assert [line["body"] for line in web.get(f"{group}/s?format=json").lines] == [data.strip()] * 4


@pytest.mark.parametrize(("size", "statuses"), [(262_144, (201, 201, 201)), (600_000, (413, 413, 201))])
def test_an_event_in_structured_mode_is_bounded(web: Web, group: str, size: int, statuses: tuple[int, ...]) -> None:
    """As the manual says; in binary mode its data is bounded as any message."""
    data = "x" * (size - len(json.dumps({**GIVEN, "data": ""})))
    sent = json.dumps({**GIVEN, "data": data})
    assert len(sent) == size
    binary = {f"ce_{name}": text for name, text in GIVEN.items()}
    replies = (
        web.post(f"{group}/s", sent, Content_Type=KIND),
        web.post(f"{group}/s", f"[{sent}]", Content_Type=MANY),
        web.post(f"{group}/s", data, **binary),
    )
    assert tuple(reply.status for reply in replies) == statuses


def test_options_go_with_an_event(web: Web, group: str) -> None:
    body = json.dumps({**GIVEN, "data": "x"})
    given = {"Content_Type": KIND, "Idempotency_Key": "k", "Mqfs_H_more": "1", "traceparent": TRACE}
    for _ in range(2):
        assert web.post(f"{group}/s", body, **given).status == 201
    (line,) = web.get(f"{group}/s?format=json").lines
    own = line["headers"]
    assert (own["ce-id"], own["more"], own["traceparent"], own["id"]) == ("1", "1", TRACE, "k")
    assert web.post(f"{group}/s", f"[{body}]", **{**given, "Content_Type": MANY}).status == 400


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (KIND, "no JSON"),
        (KIND, "[]"),
        (KIND, "1"),
        (KIND, "{}"),
        (KIND, json.dumps({**GIVEN, "data": 1, "data_base64": ""})),
        (KIND, json.dumps({**GIVEN, "data_base64": "?"})),
        (KIND, json.dumps({**GIVEN, "data_base64": 1})),
        (KIND, json.dumps({**GIVEN, "Upper": "1"})),
        (KIND, json.dumps({**GIVEN, "nested": {}})),
        (KIND, json.dumps({**GIVEN, "type": 5})),
        (KIND, json.dumps({**GIVEN, "subject": 5})),
        (KIND, json.dumps({**GIVEN, "time": "yesterday"})),
        (KIND, json.dumps({**GIVEN, "time": "2026-01-31"})),
        (KIND, json.dumps({**GIVEN, "time": "2026-01-31T08:00:00"})),
        (KIND, json.dumps({**GIVEN, "time": "2026-02-31T08:00:00Z"})),
        (KIND, json.dumps({**GIVEN, "half": "\ud800"})),
        (KIND, json.dumps({**GIVEN, "data": "\ud800", "datacontenttype": "text/plain"})),
        (MANY, "{}"),
        (MANY, "[]"),
        (MANY, json.dumps([{**GIVEN, "long": "x" * 70_000}])),
        (MANY, "[" * 50_000),
    ],
)
def test_what_is_refused(web: Web, group: str, kind: str, body: str) -> None:
    web.put(f"{group}/s")
    reply = web.post(f"{group}/s", body, Content_Type=kind)
    assert reply.status in (400, 413), reply.body
    assert web.get(f"{group}/.stats").json["written"] == 0


@pytest.mark.parametrize("time", [None, "2016-12-31T23:59:60Z", "2026-01-31t08:00:00.123456+02:00"])
def test_times(web: Web, group: str, time: str | None) -> None:
    web.put(f"{group}/s")
    assert web.post(f"{group}/s", json.dumps({**GIVEN, "time": time}), Content_Type=KIND).status == 201


def test_an_attribute_that_is_missing_is_named(web: Web, group: str) -> None:
    reply = web.post(f"{group}/s", "x", ce_specversion="1.0", ce_id="1", ce_source="/")
    assert (reply.status, b"'type': missing" in reply.body) == (400, True)


def test_events_again_and_again_on_one_connection(web: Web, group: str) -> None:
    """A connection that repeats itself has a shorter way, which is not for these."""
    connection = web.connect()
    for n in range(5):
        connection.request("POST", f"{group}/s", json.dumps({**GIVEN, "id": str(n), "data": n}), {"Content-Type": KIND})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (201, f"{n + 1}\n".encode())
    connection.close()
    assert [line["body"] for line in web.get(f"{group}/s?format=json").lines] == list("01234")
