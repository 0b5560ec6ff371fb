"""Publishing: the same records as by any other way, options, and streams without room."""

from __future__ import annotations

import base64
import json
import os
import time
from typing import Any

import pytest

from mqfs import limits
from mqfs.ninep.client import connection as ninep
from tests.http.web import Web, rest, statuses
from tests.support.eventually import eventually, unhurried
from tests.support.server import short_folder

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def records(web: Web, group: str, name: str) -> list[tuple[bytes, dict[str, str]]]:
    """Bodies and headers of a stream."""
    with web.server.connect() as client, client.group(group[1:]).subscribe(name, existing=True) as subscription:
        count = int(web.ask("HEAD", f"{group}/{name}").headers["Mqfs-Messages"])
        messages = [next(subscription) for _ in range(count)]
        return [(message.body, dict(message.headers)) for message in messages]


@pytest.mark.parametrize("data", ["message", "line", "coalesce"])
@pytest.mark.parametrize("body", [b"one", b"one\n", b"a\nb\n", b"a\nb", b"\n\n", b"\xff\0\n\r", b"x" * 100_000])
def test_a_message_is_as_if_written_to_the_file(web: Web, data: str, body: bytes) -> None:
    group = web.group(f"data {data}")
    web.put(f"{group}/file")
    with ninep.connect(web.server.address) as client, client.open(f"{group[1:]}/file", "w") as file:
        file.write(body)
    assert web.post(f"{group}/web", body).status == 201
    assert records(web, group, "web") == records(web, group, "file")


@pytest.mark.parametrize("parent", ["banana", "00-1-2-00", TRACE + "-x", f"00-{0:032}-{1:016}-01", "ff" + TRACE[2:]])
def test_a_trace_that_is_none_is_left_out(web: Web, group: str, parent: str) -> None:
    """As W3C Trace Context wants it, with its state."""
    web.ask("POST", f"{group}/s", "x", traceparent=parent, tracestate="a=b")
    [(_, found)] = records(web, group, "s")
    assert not {"traceparent", "tracestate"} & found.keys()


def test_options_as_headers_and_in_the_query(web: Web, group: str) -> None:
    headers = {
        "Mqfs_Priority": "7", "Mqfs_Ttl": "1h", "Mqfs_Id": "a1", "Mqfs_Key": "k", "Mqfs_H_Kind": "ä",
        "traceparent": TRACE,
    }  # fmt: skip
    web.ask("POST", f"{group}/s", "x", **{name: text.encode().decode("latin-1") for name, text in headers.items()})
    web.post(f"{group}/s?priority=2&key=k%202&h-Kind=b%20c", "y", Mqfs_Priority="7")
    found = [headers for _, headers in records(web, group, "s")]
    assert {name: text for name, text in found[0].items() if name != "sender"} == {
        "priority": "7", "ttl": "1h", "id": "a1", "key": "k", "kind": "ä", "traceparent": TRACE,
    }  # fmt: skip
    assert (found[1]["priority"], found[1]["key"], found[1]["Kind"]) == ("2", "k 2", "b c")


@pytest.mark.parametrize(
    "option",
    ["priority=x", "priority=10", "delay=x", "delay=1s&at=1", "at=soon", "single=perhaps", "id=", "what=1", "ttl=1"],
)
def test_options_that_are_none(web: Web, group: str, option: str) -> None:
    assert web.post(f"{group}/s?{option}", "x").status == 400
    assert web.get(f"{group}/.stats").json["written"] == 0


def test_a_key_makes_a_repeat_harmless(web: Web, group: str) -> None:
    for name, value in (("Idempotency-Key", "k1"), ("Mqfs-Id", "k1")):
        sent = web.ask("POST", f"{group}/s", "x", **{name: value})
        assert (sent.status, sent.body) == (201, b"1\n")
    assert web.post(f"{group}/s?id=k2", "y").body == b"2\n"
    assert web.get(f"{group}/s").body == b"xy"


def test_the_newest_of_each_key(web: Web) -> None:
    group = web.group("replay key")
    for key, body in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")):
        assert web.ask("POST", f"{group}/s", body, Mqfs_Key=key).status == 201
    assert web.post(f"{group}/s?key=c", "").status == 201
    assert (web.get(f"{group}/s").body, web.get(f"{group}/s?since=last").body) == (b"23", b"3")
    assert web.get(f"{group}/s?since=3&format=json").json["body"] == "3"
    assert web.get(f"{group}/.stats").json["keys"] == 2
    assert f'mqfs_keys{{group="{group}"}} 2\n' in web.get("/.metrics").body.decode()


def test_a_condition_on_the_newest_message(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    assert web.ask("HEAD", f"{group}/s").headers["ETag"] == '"0"'
    sent = web.ask("POST", f"{group}/s", "one", If_None_Match="*")
    assert (sent.status, sent.headers["ETag"]) == (201, '"1"')
    for given in ({"If_None_Match": "*"}, {"If_Match": '"0"'}, {"Mqfs_Expect": "0"}):
        refused = web.ask("POST", f"{group}/s", "two", **given)
        assert (refused.status, refused.headers["ETag"]) == (412, '"1"')
    assert web.ask("POST", f"{group}/s", "two", If_Match='"1"').status == 201
    assert web.post(f"{group}/s?expect=2", "three").status == 201
    assert web.ask("HEAD", f"{group}/s").headers["ETag"] == '"3"'
    assert web.get(f"{group}/s").body == b"onetwothree"


@pytest.mark.parametrize(
    ("settings", "requests"),
    [
        ("replay all", [("", "x"), ("?ttl=1h", "x")]),
        ("replay last", [("", "x"), ("?priority=7", "x")]),
        ("replay off", [("", "x"), ("?ttl=1h", "x"), ("?id=i", "x")]),
        ("replay off\nconsumer c", [("", "x"), ("?id=i", "x")]),
        ("replay all", [("?id=i", "x"), ("", "y"), ("?id=i", "x")]),
        ("replay all\ndata line", [("", "x\n"), ("", "y\nz\n")]),
        ("replay all\ndepth 1\nfull drop-new", [("", "x"), ("", "y"), ("?ttl=1h", "z")]),
        ("deliver one", [("", "x"), ("?id=i", "y")]),
    ],
)
def test_the_tag_of_an_answer_is_the_one_of_the_stream(
    web: Web, settings: str, requests: list[tuple[str, str]]
) -> None:
    group = web.group(settings)
    web.put(f"{group}/s")
    for options, body in requests:
        answer = web.post(f"{group}/s{options}", body)
        assert answer.status == 201
        tag = web.ask("HEAD", f"{group}/s").headers["ETag"]
        is_newest = tag == f'"{answer.headers.get("Mqfs-Sequence")}"'
        assert answer.headers["ETag"] == (tag if is_newest else None)


@pytest.mark.parametrize("tag", ["1", "*", 'W/"1"', '"1", "2"', '"x"', ""])
def test_an_entity_tag_that_is_no_sequence(web: Web, group: str, tag: str) -> None:
    assert web.ask("POST", f"{group}/s", "x", If_Match=tag).status == 400
    assert web.get(f"{group}/.stats").json["written"] == 0


@pytest.mark.parametrize(
    ("options", "headers", "body", "status"),
    [
        ("", {"If_Match": '"4"'}, "x", 412),
        ("?expect=4", {}, "x", 412),
        ("?reply=never", {}, "x", 400),
        ("?expect=4", {}, "x" * 1_044_481, 413),
        ("", {}, "x" * 1_044_481, 413),
        ("", {"Content_Type": "application/cloudevents+json"}, "{}", 400),
        ("", {"Content_Type": "application/cloudevents-batch+json"}, "[]", 400),
        ("", {"Content_Type": "application/cloudevents-batch+json"}, "[{}]", 400),
        ("?ttl=soon", {}, "x", 400),
        ("?priority=11", {}, "x", 400),
        ("?delay=soon", {}, "x", 400),
        ("?delay=1s&at=1", {}, "x", 400),
        ("?at=99999999999", {}, "x", 400),
        ("?every=1h", {}, "x", 400),
        ("?cron=never&id=1", {}, "x", 400),
        ("?key=" + "k" * 300, {}, "x", 400),
        ("?id=" + "i" * 1_025, {}, "x", 400),
        ("?h-sender=me", {}, "x", 400),
        ("", {"Mqfs_H_Sender": "me"}, "x", 400),
        ("?reply=5s&delay=1s", {}, "x", 400),
        ("?reply=5s&priority=11", {}, "x", 400),
        ("?expect=4&ttl=1s", {}, "x", 412),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_what_is_refused_makes_no_stream(
    web: Web, group: str, method: str, options: str, headers: dict[str, str], body: str, status: int
) -> None:
    """Nor does it bring one back that was removed."""
    web.post(f"{group}/back", "x")
    assert web.ask("DELETE", f"{group}/back").status == 204
    for name in ("new", "back"):
        assert web.ask(method, f"{group}/{name}{options}", body, **headers).status == status
        assert web.ask("HEAD", f"{group}/{name}").status == 404
        assert web.ask(method, f"{group}/{name}", "x", If_Match='"0"').status == 201


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("ctl", "options", "status"),
    [
        ("depth 10B\nfull reject", "", 413),
        ("depth 10B\nfull reject", "?priority=1", 413),
        ("depth 10B\nfull reject", "?reply=5s", 413),
        ("data line\ndepth 10B\nfull reject", "", 413),
        ("replay off", "?reply=5s", 404),
    ],
)
def test_what_the_group_refuses_takes_its_stream_back(
    web: Web, method: str, ctl: str, options: str, status: int
) -> None:
    """It is refused by the group, so only when the stream was made."""
    group = web.group(*ctl.split("\n"))
    assert web.ask(method, f"{group}/new{options}", "x" * 40).status == status
    assert web.ask("HEAD", f"{group}/new").status == 404


def test_a_stream_that_another_uses_meanwhile_stays(web: Web) -> None:
    group = web.group("depth 10B", "full reject")
    assert web.post(f"{group}/new", "x").status == 201
    assert web.post(f"{group}/new", "x" * 40).status == 413
    assert web.ask("HEAD", f"{group}/new").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_only_the_first_message_of_a_stream(web: Web, group: str, method: str) -> None:
    """Also of one that was made before, without a message."""
    for name in ("new", "made"):
        if name == "made":
            assert web.put(f"{group}/{name}").status == 201
        first = web.ask(method, f"{group}/{name}", "x", If_None_Match="*")
        assert (first.status, first.headers["ETag"]) == (201, f'"{first.headers["Mqfs-Sequence"]}"')
        second = web.ask(method, f"{group}/{name}", "y", If_None_Match="*")
        assert (second.status, second.headers["ETag"]) == (412, first.headers["ETag"])
    assert web.ask("PUT", f"{group}/made", If_None_Match="*").status == 412


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/json", "application/vnd.mqfs.frames"])
@pytest.mark.parametrize("body", ["", "\n", " \n\t\r\n"])
def test_a_batch_of_nothing_is_refused(web: Web, group: str, kind: str, body: str) -> None:
    web.put(f"{group}/.txn/p/")
    for path in (f"{group}/.batch", f"{group}/.txn/p/.batch"):
        refused = web.post(path, body, Content_Type=kind)
        assert refused.status == 400, (path, refused.body)


def test_a_batch_with_a_condition(web: Web, group: str) -> None:
    web.post(f"{group}/s", "one")
    line = {"stream": "s", "body": "two", "headers": {"expect": "7"}}
    refused = web.ask("POST", f"{group}/.batch", json.dumps(line), Content_Type="application/x-ndjson")
    assert (refused.status, refused.headers["ETag"]) == (412, '"1"')


def test_a_schedule(web: Web, group: str) -> None:
    sent = web.ask("PUT", f"{group}/s", "tick", Mqfs_Every="1s", Mqfs_Id="t")
    assert (sent.status, sent.body) == (201, b"1\n")
    assert web.post(f"{group}/s?cron=0%205%20*%20*%20*&id=u", "early").status == 201
    rows = web.get(f"{group}/.stats").json["schedules"]
    assert {name: row.get("every") or row["cron"] for name, row in rows.items()} == {"t": "1s", "u": "0 5 * * *"}
    eventually(lambda: web.get(f"{group}/s").body.startswith(b"tick"))
    assert web.post(f"{group}/ctl", "unschedule t\nunschedule u\n").status == 204
    assert web.get(f"{group}/.stats").json["schedules"] == {}
    for wrong in ("every=0&id=t", "cron=x&id=t", "every=1s", "every=1s&id=t&expect=0"):
        assert web.post(f"{group}/s?{wrong}", "x").status == 400


def test_a_request_is_answered_with_its_reply(web: Web, group: str) -> None:
    with web.server.connect() as client:
        there = client.group(group[1:])
        there.create("s")
        worker = there.work(
            "w", lambda claim: there.reply(claim.message, claim.body[::-1], headers={"k": "v"}), over="s"
        )
        reply = web.post(f"{group}/s?reply=60s", "abc")
        assert (reply.status, reply.body, reply.headers["Mqfs-H-k"]) == (200, b"cba", "v")
        worker.stop()
        late = web.post(f"{group}/s?reply=100ms", "abc")
        assert (late.status, late.body) == (504, b"no reply from stream 's' in 0.1 s\n")
        assert web.post(f"{group}/s?reply=1s&delay=1s", "abc").status == 400
        assert there.streams() == ["s"]


@pytest.mark.parametrize(
    ("size", "status"), [(0, 200), (1, 200), (limits.MESSAGE_BYTES, 200), (2_500_000, 200), (17 << 20, 502)]
)
@pytest.mark.parametrize("word", [b"0123456789", b"\xff\0"])
def test_a_reply_of_any_size_is_whole_or_refused(web: Web, group: str, word: bytes, size: int, status: int) -> None:
    """The library writes a long one in parts."""
    body = (word * (size // len(word) + 1))[:size]
    with web.server.connect() as client:
        there = client.group(group[1:])
        there.create("s")
        worker = there.work("w", lambda claim: there.reply(claim.message, body, headers={"k": "v"}), over="s")
        reply = web.post(f"{group}/s?reply=60s", "abc")
        worker.stop()
    assert reply.status == status
    if status == 200:
        assert (reply.body == body, reply.headers["Mqfs-H-k"], reply.headers["Mqfs-H-part"]) == (True, "v", None)


@pytest.mark.parametrize(("size", "status"), [(1, 200), (17 << 20, 502), (None, 504)])
def test_a_stream_made_for_a_request_stays_whatever_its_reply(web: Web, size: int | None, status: int) -> None:
    """It was published, and perhaps delivered; others may use the stream by now. None: no reply comes."""
    group = web.group("replay off")
    with web.server.connect() as client:
        there = client.group(group[1:])
        web.put(f"{group}/.consumers/w?over=new")
        worker = there.work("w", lambda claim: size and there.reply(claim.message, bytes(size)))
        reply = web.post(f"{group}/new?reply={'60s' if size else '100ms'}", "abc")
        assert (reply.status, there.streams()) == (status, ["new"])
        worker.stop()


@pytest.mark.parametrize("parts", [["1/3", "2", None], ["1/3"], ["2/2"], ["2"], ["1/3", "3/3"], ["1/2", "1/2", "2/2"]])
def test_a_reply_that_is_no_whole_body_is_its_first_message(web: Web, group: str, parts: list[str | None]) -> None:
    web.put(f"{group}/s")
    web.put(f"{group}/.consumers/c?over=s")
    with web.raw() as sock:
        sock.sendall(f"POST {group}/s?reply=1s HTTP/1.0\r\nContent-Length: 1\r\n\r\n?".encode())
        (asked,) = web.post(f"{group}/.consumers/c/claim?wait=60s").lines
        name = asked["headers"]["reply-to"]
        lines = [
            {"stream": name, "body": str(number), "headers": {"part": part} if part else {}}
            for number, part in enumerate(parts)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        assert web.post(f"{group}/.batch", text, Content_Type="application/x-ndjson").status == 201
        answer = rest(sock)
    assert (answer[:16], answer[-5:]) == (b"HTTP/1.1 200 OK\r", b"\r\n\r\n0")


@pytest.mark.parametrize("options", ["reply=0", "reply=0s", "reply=0ms"])
def test_a_request_needs_time_for_its_reply(web: Web, group: str, options: str) -> None:
    web.put(f"{group}/s")
    assert web.post(f"{group}/s?{options}", "x").status == 400
    assert web.get(f"{group}/.stats").json["written"] == 0


@pytest.mark.parametrize("ttl", ["", "&ttl=0", "&ttl=0s", "&ttl=1h", "&ttl=200ms"])
def test_a_request_without_a_reply_is_not_delivered_any_more(web: Web, group: str, ttl: str) -> None:
    web.put(f"{group}/s")
    web.put(f"{group}/.consumers/c?over=s")
    assert web.post(f"{group}/s?reply=300ms{ttl}", "x").status == 504
    assert web.post(f"{group}/.consumers/c/claim").status == 204


@pytest.mark.parametrize(
    ("full", "options", "status"),
    [
        ("block", "reply=300ms", 503),
        ("block", "reply=1h&wait=300ms", 503),
        ("block", "reply=300ms&wait=1h", 503),
        ("drop-new", "reply=1h", 507),
        ("reject", "reply=1h", 507),
    ],
)
def test_a_request_that_is_not_written_waits_for_no_reply(web: Web, full: str, options: str, status: int) -> None:
    """It would wait longer than a test does."""
    group = web.group("depth 1", f"full {full}")
    web.put(f"{group}/s")
    web.put(f"{group}/.consumers/c?over=s")
    web.post(f"{group}/s", "fills it")
    assert web.post(f"{group}/s?{options}", "x").status == status
    assert [line["body"] for line in web.get(f"{group}/s?format=json").lines] == ["fills it"]


def test_a_repeated_request_waits_for_no_reply(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    web.put(f"{group}/.consumers/c?over=s")
    assert web.post(f"{group}/s?id=k", "x").status == 201
    assert web.post(f"{group}/s?id=k&reply=1h", "x").status == 409
    assert web.get(f"{group}/?type=stream").json["entries"] == [{"name": "s", "type": "stream"}]


def test_a_request_of_a_user_who_may_open_nothing_leaves_no_stream() -> None:
    with short_folder() as folder:
        web = Web(folder, "--limit", f"{os.geteuid()} handles=1")
        with web.server:
            path = web.group()
            web.put(f"{path}/s")
            with web.server.connect() as client:
                group = client.group(path[1:])
                with group.subscribe("s"):
                    assert web.post(f"{path}/s?reply=1s", "abc").status == 429
                assert group.streams() == ["s"]


@pytest.mark.parametrize("data", ["message", "line", "coalesce"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nz", b"\n" + b"z" * 800])
def test_what_a_part_does_not_take_is_refused(data: str, end: bytes) -> None:
    with short_folder() as folder:
        web = Web(folder, "--limit", f"{os.geteuid()} kept=3000")
        with web.server:
            group = web.group(f"data {data}")
            web.put(f"{group}/s")
            web.put(f"{group}/.txn/p/")
            assert web.post(f"{group}/.txn/p/s", b"x" * 1500 + end).status == 202
            refused = web.post(f"{group}/.txn/p/s", b"y\n" + b"y" * 1500 + end)
            assert (refused.status, b"keeps" in refused.body) == (429, True)
            assert web.post(f"{group}/.txn/p/s", b"a").status == 202
            assert web.post(f"{group}/.txn/ctl", "commit a.1 p").status == 204
            assert web.get(f"{group}/s").body == b"x" * 1500 + end + b"a"


def test_a_request_that_no_one_reads(web: Web) -> None:
    group = web.group("replay off")
    web.put(f"{group}/s")
    assert web.post(f"{group}/s?reply=60s", "abc").status == 404


def test_a_repeat_after_a_kill_is_published_once(web: Web) -> None:
    group = web.group()
    sent = [web.ask("POST", f"{group}/s", str(n), Idempotency_Key=f"n{n}").body for n in range(5)]
    web.server.restart()
    again = [web.ask("POST", f"{group}/s", str(n), Idempotency_Key=f"n{n}").body for n in range(7)]
    assert again[:5] == sent
    assert web.get(f"{group}/s").body == b"0123456"


def test_delay(web: Web) -> None:
    def shown(times: int) -> tuple[bytes, bytes]:
        group = web.group()
        assert web.post(f"{group}/s?delay={times * 300}ms", "later").status == 201
        assert web.post(f"{group}/s", "now").status == 201
        assert web.post(f"{group}/s", "soon", Mqfs_At=str(time.time() + times * 0.2)).status == 201
        before = web.get(f"{group}/s").body
        eventually(lambda: len(web.get(f"{group}/s").body) == len("nowsoonlater"))
        return before, web.get(f"{group}/s").body

    unhurried(shown, (b"now", b"nowsoonlater"))


def test_a_full_stream(web: Web) -> None:
    group = web.group("depth 1", "full drop-new")
    web.post(f"{group}/s", "kept")
    sent = web.post(f"{group}/s", "x")
    assert (sent.status, sent.body, sent.headers["Mqfs-Sequence"]) == (201, b"discarded\n", None)
    assert sent.headers["Mqfs-Retained"] == "no"
    said = web.post(f"{group}/s", "x", Accept="application/json")
    assert said.json == {"sequence": None, "retained": False}
    group = web.group("depth 1", "full reject")
    web.post(f"{group}/s", "kept")
    assert web.post(f"{group}/s", "x").status == 507


def test_a_publish_says_whether_anything_retains_it(web: Web) -> None:
    """By a write, by `.put` and by `.batch`; a delayed message is held."""
    group = web.group("replay off")

    def retained(**more: str) -> tuple[str | None, bool]:
        query = more.pop("query", "")
        sent = web.post(f"{group}/s{query}", "x", **more)
        said = web.post(f"{group}/s{query}", "x", Accept="application/json", **more).json
        assert sent.status == 201
        assert int(sent.body) == said["sequence"] - 1
        return sent.headers["Mqfs-Retained"], said["retained"]

    assert retained() == ("no", False)
    assert retained(query="?ttl=1h") == ("no", False)
    assert web.post(f"{group}/s?delay=1h", "x").headers["Mqfs-Retained"] is None
    assert web.post(f"{group}/ctl", "data line").status == 204
    assert retained() == ("no", False)
    assert web.put(f"{group}/.consumers/mail").status == 201
    assert retained() == (None, True)
    assert web.curl("-X", "DELETE", f"{group}/.consumers/mail").status == 204
    assert retained() == ("no", False)
    assert web.post(f"{group}/ctl", "replay all").status == 204
    assert retained() == (None, True)


def test_a_publish_waits_for_room(web: Web) -> None:
    group = web.group("depth 1", "full block")
    web.post(f"{group}/s", "first")
    refused = web.post(f"{group}/s?wait=20ms", "x")
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    request = f"POST {group}/s?wait=1h HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nnext"
    with web.raw() as sock:
        sock.sendall(request.encode())
        eventually(lambda: web.get(f"{group}/.stats").json["streams"]["s"]["blocked"] == 1)
    eventually(lambda: web.get(f"{group}/.stats").json["streams"]["s"]["blocked"] == 0)  # that client left
    with web.raw() as sock:
        sock.sendall(request.encode())
        eventually(lambda: web.get(f"{group}/.stats").json["streams"]["s"]["blocked"] == 1)
        web.post(f"{group}/ctl", "clear s")
        assert statuses(sock.recv(4_096)) == [201]
    assert web.get(f"{group}/s").body == b"next"


BOUNDS = (255, 256, 65_535, 65_536, 70_000, 200_000)
EVENT = {"specversion": "1.0", "type": "t", "source": "/s", "id": "1", "data": 1}


@pytest.mark.parametrize("size", BOUNDS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_a_frame_has_no_room_for_is_refused(web: Web, group: str, size: int, count: int) -> None:
    """A name, a header, and headers together, around each bound; whatever the body is."""
    web.put(f"{group}/s")
    texts = {f"h{n}": "x" * (size // count) for n in range(count)}
    names = {"x" * (size // count) + str(n): "" for n in range(count)}
    lines = [
        {"stream": "s" * size, "body": "x"},
        {"stream": "s", "body": "x", "headers": texts},
        {"stream": "s", "body": "x", "headers": names},
    ]
    for line in lines:
        reply = web.post(f"{group}/.batch", json.dumps(line), Content_Type="application/x-ndjson")
        assert 400 <= reply.status < 500 or (size < 300 and reply.status == 201), (reply.status, reply.body)
    for kind, body in (("-batch", [EVENT | texts]), ("", EVENT | texts), ("-batch", [EVENT | names])):
        sent = json.dumps(body)
        reply = web.post(f"{group}/s", sent, Content_Type=f"application/cloudevents{kind}+json")
        assert 400 <= reply.status < 500 or (size < 300 and reply.status == 201), (reply.status, reply.body)
    if size > 65_535:
        assert web.get(f"{group}/.stats").json["written"] == 0
    assert "Traceback" not in web.server.text()


def test_bodies_that_are_none(web: Web, group: str) -> None:
    assert web.post(f"{group}/s", b"x" * 1_044_481).status == 413
    assert web.post(f"{group}/s").status in (201, 400)  # an empty message, where the tree has those
    lines: list[tuple[Any, int]] = [
        ("{}", 400), ("[]", 400), ("x", 400), ('{"stream":"s"}', 400), ('{"stream":"s","body":1}', 400),
        ('{"stream":"s","body":"x","body_base64":"eA=="}', 400), ('{"stream":"s","body_base64":"!"}', 400),
        ('{"stream":"s","body":"x","more":1}', 400), ('{"stream":"s","body":"x","headers":{"a":1}}', 400),
        ('{"stream":"s","body":"x","headers":{"sender":"a"}}', 400), ("[" * 100_000, 400),
    ]  # fmt: skip
    web.put(f"{group}/s")
    for line, status in lines:
        assert web.post(f"{group}/.batch", line, Content_Type="application/x-ndjson").status == status, line[:50]


@pytest.mark.parametrize("size", [10, 20_000])
def test_a_line_means_the_same_whatever_its_length(web: Web, group: str, size: int) -> None:
    coded = base64.b64encode(b"x" * size).decode()
    lines: list[tuple[dict[str, Any], int]] = [
        ({"stream": "s", "body": None, "body_base64": coded}, 201),
        ({"stream": "t", "body": coded, "body_base64": None}, 201),
        ({"stream": "s", "body": None, "body_base64": None, "headers": {"a": coded}}, 400),
        ({"stream": "s", "body": 1, "body_base64": coded}, 400), ({"stream": None, "body": coded}, 400),
        ({"stream": "s", "body": coded, "headers": {"a": None}}, 400),
    ]  # fmt: skip
    web.put(f"{group}/s")
    web.put(f"{group}/t")
    for line, status in lines:
        answer = web.post(f"{group}/.batch", json.dumps(line), Content_Type="application/x-ndjson")
        assert answer.status == status, (line.keys(), answer.body)
    assert [web.get(f"{group}/{stream}").body for stream in "st"] == [b"x" * size, coded.encode()]
