"""The contents of messages and results of calls: sizes, ends, values, empty bodies, any text as a stream's name."""

from __future__ import annotations

import time

import pytest

import mqfs
from mqfs import Client, Message, Receipt, errors
from mqfs.client import Group
from tests.support.eventually import HANG_S, eventually

SECOND_NS = 10**9


def kept(tree: Client, name: str, *ctl: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all", *ctl])


def test_a_message_knows_its_size_and_its_end(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("s", "äb", ttl="1h")
    group.publish("s", b"x" * 1_100_000)
    first, large = group.history()
    assert (first.size, large.size) == (3, 1_100_000)
    assert first.expires_ns == first.time_ns + 3_600 * SECOND_NS
    assert large.expires_ns is None


@pytest.mark.parametrize("create", [False, True])
def test_a_publish_has_a_receipt(tree: Client, name: str, create: bool) -> None:
    group = kept(tree, name)
    if not create:
        group.create("s")
    before = time.time_ns()
    told = [
        group.publish("s", "a", ttl="1h", create=create),
        group.publish("s", "b", ttl=60, headers={"k": "v"}),
        group.publish("s", "a", id="x"),
        group.publish("s", "again", id="x"),
    ]
    group.ctl("ttl 30s")
    told.append(group.publish("s", "c", priority=1))
    messages = list(group.history())
    assert [message.body for message in messages] == [b"a", b"b", b"a", b"c"]
    wanted = [Receipt(m.sequence, m.time_ns, m.expires_ns, False, True) for m in messages]
    wanted.insert(3, wanted[2]._replace(duplicate=True))
    wanted[4] = wanted[4]._replace(expires_ns=wanted[4].time_ns + 30 * SECOND_NS)
    assert told == wanted
    late = group.publish("s", "later", delay=3_600)
    assert late.time_ns >= before + 3_600 * SECOND_NS
    assert late.expires_ns == late.time_ns + 30 * SECOND_NS
    with pytest.raises(errors.NotFound):
        group.publish("missing", "a", ttl=1, create=False)
    assert group.publish("s", "after an error", ttl=1).sequence > late.sequence
    group.ctl("depth 1", "full drop-new")
    assert group.publish("s", "no room") in (Receipt(retained=False), Receipt(retained=True))
    assert group.publish("s", "no room", priority=1) == Receipt(retained=False)


def test_a_plain_publish_has_a_receipt_and_no_headers(tree: Client, name: str) -> None:
    group = kept(tree, name)
    receipts = [group.publish("s", "a"), group.publish("s", b""), group.publish("s", b"x" * 2_000_000)]
    messages = list(group.history())
    assert [message.headers for message in messages] == [{}, {}, messages[2].headers]
    assert [receipt.sequence for receipt in receipts] == [1, 2, 0], "a body in parts has no receipt"
    assert [receipt.retained for receipt in receipts] == [True, True, None]


def test_a_receipt_tells_whether_anything_retains_the_message(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    assert group.publish("s", "lost").retained is False
    assert group.publish("s", "lost", headers={"a": "b"}).retained is False
    with group.subscribe("s"):
        assert group.publish("s", "read", headers={"a": "b"}).retained is True
    group.consume("c").close()
    assert group.publish("s", "consumed", headers={"a": "b"}).retained is True
    eventually(lambda: group.publish("s", "consumed").retained is True)
    other = tree.group(f"{name}-all", create=True, settings=mqfs.Settings(replay="all"))
    assert other.publish("s", "later").retained is True


@pytest.mark.process
def test_a_receipt_comes_in_the_round_trip_of_the_write(name: str, request: pytest.FixtureRequest) -> None:
    with request.getfixturevalue("shared").connect(transport="9p") as client:
        group = kept(client, name)
        group.publish("s", "a")
        sent = []
        connection = client._link.connection()  # type: ignore[attr-defined]
        send = connection.send
        connection.send = lambda requests, *more: sent.append(len(requests)) or send(requests, *more)
        group.publish("s", "b", ttl=1)
        assert group.publish("s", "c").sequence == 3
        assert sent == [2, 2], "the read leaves with the write"


def test_a_publish_waits_for_room_as_long_as_it_was_told(tree: Client, name: str) -> None:
    group = kept(tree, name, "full block", "depth 2")
    for body in "ab":
        group.publish("s", body, wait_s=HANG_S)
    with pytest.raises(TimeoutError, match=r"publish failed: no room in stream 's' in 0\.05 s"):
        group.publish("s", "c", wait_s=0.05)
    with pytest.raises(TimeoutError, match="no room"):
        group.publish("s", "c", wait_s=0, headers={"a": "b"})
    assert [message.body for message in group.history()] == [b"a", b"b"]
    group.purge("s")
    assert group.publish("s", "d", wait_s=HANG_S).retained is True
    assert [message.body for message in group.history()] == [b"d"], "what had no room was not published later"


def test_the_wait_of_a_large_body_for_room_has_its_limit_too(tree: Client, name: str) -> None:
    group = kept(tree, name, "full block", "depth 3", "deliver one")
    body = bytes(1_500_000)  # two messages
    group.publish("s", body, wait_s=0)
    for wait_s in (0.0, 0.05):
        with pytest.raises(TimeoutError, match="no room in stream 's' in 0"):
            group.publish("s", body, wait_s=wait_s)
    with group.take("s") as claims:
        claims.get(HANG_S).ack()
    group.publish("s", body, wait_s=HANG_S)
    with group.take("s") as claims:
        assert claims.get(HANG_S).body == body


def test_values(tree: Client, name: str) -> None:
    group = kept(tree, name)
    value = {"name": "Ä", "list": [1, 2.5, None, True], "empty": {}}
    with group.subscribe() as messages:
        assert group.publish_json("s", value, priority=7).sequence == 1
        message = messages.get(HANG_S)
    assert message.json() == value
    assert message.body == '{"name":"Ä","list":[1,2.5,null,true],"empty":{}}'.encode()
    assert message.headers["priority"] == "7"
    group.publish("s", "no value")
    with group.consume("c") as claims, claims.get(HANG_S) as claim:
        assert claim.message.json() == value
    with pytest.raises(ValueError):
        list(group.history())[-1].json()


def test_empty_bodies(tree: Client, name: str) -> None:
    """They are messages, in the order of the others; an EOF marker is none."""
    group = kept(tree, name)
    with group.subscribe() as messages, group.consume("c") as claims:
        group.publish("s", b"")
        group.publish("s", "x")
        group.publish_many([("s", ""), ("s", b"y"), mqfs.Outgoing("s", bytearray(), ttl="1h")])
        with group.writer("s"):
            pass
        group.ctl("eof s")
        group.publish("s", memoryview(b""), single=False)
        wanted = [b"", b"x", b"", b"y", b"", b"", b""]
        assert [messages.get(HANG_S).body for _ in wanted] == wanted
        for body in wanted:
            with claims.get(HANG_S) as claim:
                assert claim.body == body
    assert [message.body for message in group.history()] == wanted


TOPICS = ["a.b", "a/b", ".hidden", "", "ctl", "100%", "tab\there", "ctl%", "order.x"]


def test_any_text_is_the_name_of_a_stream(tree: Client, name: str) -> None:
    plain = kept(tree, name)
    group = tree.group(name, escape=True)
    assert tree.group(name) is plain
    with group.subscribe() as all_, group.subscribe("a.*") as some, group.subscribe(["ctl", "a/b"]) as two:
        for topic in TOPICS:
            group.publish(topic, topic)
        assert [all_.get(HANG_S).topic for _ in TOPICS] == TOPICS
        assert some.get(HANG_S).topic == "a.b"
        assert [two.get(HANG_S).topic for _ in range(2)] == ["a/b", "ctl"]
    group.publish_many([(".x", "1"), mqfs.Outgoing("/", "2", headers={"k": "v"})])
    assert sorted(group.streams()) == sorted([*TOPICS, ".x", "/"])
    names = [message.stream for message in plain.history()]
    assert names == [*map(mqfs.escape, [*TOPICS, ".x", "/"])]
    assert [mqfs.unescape(stream).decode() for stream in names[: len(TOPICS)]] == TOPICS
    with group.consume("c", over="a/b") as claims, claims.get(HANG_S) as claim:
        assert claim.message.topic == "a/b"
    for topic in TOPICS:
        group.remove(topic)
    assert sorted(group.streams()) == sorted([".x", "/"])
    assert Message(1, "50%", 0, b"", {}).topic == "50%", "it was not escaped"
