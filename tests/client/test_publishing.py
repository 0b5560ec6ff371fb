"""Publishing, and what there is of a group: the same over both transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqfs import Client, Message, Outgoing, errors, ring
from mqfs.client import Group
from mqfs.client.transport.ring import RingGroup
from mqfs.client.transport.ring_attachment import Attached
from tests.support.eventually import HANG_S, eventually, patient, unhurried
from tests.support.server import Server

LARGEST = 1_044_480


def kept(tree: Client, name: str, *ctl: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all", *ctl])


def bodies(group: Group, pattern: str = "#") -> list[bytes]:
    return [message.body for message in group.history(pattern=pattern)]


def test_a_message_is_what_was_said(tree: Client, name: str) -> None:
    group = kept(tree, name)
    before = time.time_ns()
    assert group.publish("plain", b"\x00\xff").sequence == 1
    texts = {"colour": "blue", "empty": ""}
    at = group.publish("rich", "tëxt", priority=9, ttl="1h", key="blue sky", headers=texts).sequence
    plain, rich = group.history()
    assert plain == Message(plain.sequence, "plain", plain.time_ns, b"\x00\xff", {})
    assert before <= plain.time_ns <= rich.time_ns <= time.time_ns()
    assert (rich.sequence, rich.stream, rich.body) == (at, "rich", "tëxt".encode())
    wanted = {"priority": "9", "ttl": "1h", "colour": "blue", "empty": ""}
    assert {key: rich.headers[key] for key in wanted} == wanted
    assert (plain.key, rich.key) == ("", "blue sky")


@pytest.mark.parametrize("size", [1, 4_096, 262_144 - 40, 262_144, 1_000_000, LARGEST])
def test_bodies_of_any_size(tree: Client, name: str, size: int) -> None:
    group = kept(tree, name)
    body = bytes(range(251)) * (size // 251 + 1)
    with group.subscribe() as messages, group.consume("taker") as claims:
        group.publish("s", body[:size])
        group.publish("s", body[:size], headers={"with": "headers"})
        group.publish("s", b"the next")
        for read in (
            messages.get(HANG_S),
            messages.get(HANG_S),
            claims.get(HANG_S).message,
            claims.get(HANG_S).message,
        ):
            assert read.body == body[:size]
        assert messages.get(HANG_S).body == claims.get(HANG_S).body == b"the next"
    assert [len(body) for body in bodies(group)] == [size, size, 8]


@pytest.mark.parametrize("id", ["", "with-an-id"])
def test_what_cannot_be_published(tree: Client, name: str, id: str) -> None:
    group = kept(tree, name)
    with pytest.raises(errors.TooLong):
        group.publish("s", bytes(LARGEST + 1), id=id, delay=1)
    with pytest.raises(errors.MqfsError, match="reserved"):
        group.publish(".hidden", b"x")
    with pytest.raises(errors.NotFound):
        group.publish("missing", b"x", create=False, id=id)
    with pytest.raises(errors.BadCommand, match=r"priority .*: out of range \(expected 0 to 9\)"):
        group.publish("s", b"x", priority=10)
    assert group.publish("s", b"afterwards", id=id).retained
    assert bodies(group) == [b"afterwards"]


def test_the_refusal_of_a_full_stream_is_the_trees(tree: Client, name: str) -> None:
    group = kept(tree, name, "depth 1", "full reject")
    group.publish("s", b"1")
    for many in (False, True):
        with pytest.raises(errors.StreamFull, match="depth reached with"):
            group.publish_many([("s", b"2")]) if many else group.publish("s", b"2")
    assert bodies(group) == [b"1"]


def test_the_same_id_is_published_once(tree: Client, name: str) -> None:
    group = kept(tree, name)
    first = group.publish("s", b"once", id="a").sequence
    assert group.publish("s", b"again", id="a").sequence == first
    assert bodies(group) == [b"once"]


def test_a_message_is_published_only_after_the_one_expected(tree: Client, name: str) -> None:
    group = kept(tree, name)
    first = group.publish("s", "one", expect=0).sequence
    with pytest.raises(errors.Conflict) as caught:
        group.publish("s", "two", expect=0)
    assert caught.value.newest == first
    assert group.publish_many([Outgoing("s", "two", expect=first), Outgoing("t", "three", expect=0)]) == 2
    assert bodies(group) == [b"one", b"two", b"three"]


def test_the_newest_of_each_key(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay key"])
    group.create("s")
    with group.subscribe("s", existing=True) as early:
        for key, body in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("c", "")):
            group.publish("s", body, key=key)
        group.publish_many([Outgoing("s", "5", key="d"), Outgoing("s", "6", key="d"), Outgoing("s", "7")])
        assert [early.get(HANG_S).body for _ in range(8)] == [b"1", b"2", b"3", b"4", b"", b"5", b"6", b"7"]
    assert bodies(group) == [b"2", b"3", b"6", b"7"]
    with group.subscribe("s", existing=True) as late:
        assert [late.get(HANG_S).body for _ in range(4)] == [b"2", b"3", b"6", b"7"]
        group.publish("s", "8", key="b")
        assert late.get(HANG_S).body == b"8"


def test_of_writers_that_expect_the_same_one_wins(tree: Client, name: str) -> None:
    """Beside others that publish plainly, perhaps in shared memory."""
    group = kept(tree, name)
    lost = []

    def count(tag: int) -> None:
        for _ in range(10):
            while True:
                seen = list(group.history(pattern="s"))
                number = sum(message.body != b"plain" for message in seen)
                try:
                    group.publish("s", f"{number}", expect=seen[-1].sequence if seen else 0)
                    break
                except errors.Conflict:
                    lost.append(tag)

    def plain() -> None:
        for _ in range(20):
            group.publish("s", b"plain")

    threads = [threading.Thread(target=count, args=(tag,)) for tag in range(2)] + [threading.Thread(target=plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    counted = [body for body in bodies(group) if body != b"plain"]
    assert counted == [b"%d" % number for number in range(20)]


def test_a_message_that_waits_for_its_time(tree: Client, name: str) -> None:
    group = kept(tree, name)

    def come(times: int) -> list[bytes]:
        group.publish("s", b"late", delay=times * timedelta(milliseconds=300))
        group.publish("s", b"at", at=datetime.now(UTC) + times * timedelta(milliseconds=100))
        group.publish("s", b"now")
        return [messages.get(HANG_S).body for _ in range(3)]

    with group.subscribe() as messages:
        unhurried(come, [b"now", b"at", b"late"])


def test_delays_are_kept_to_the_millisecond_not_to_the_second(tree: Client, name: str) -> None:
    group = kept(tree, name, "sync off")
    began = time.monotonic()
    with group.subscribe() as messages:
        for _ in range(12):
            group.publish("s", b"late", delay=0.02)
            messages.get(HANG_S)
    assert 12 * 0.02 <= time.monotonic() - began < patient(8)  # a delay is no tick of a second


def test_ttl(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("s", b"short", ttl=0.05)
    group.publish("s", b"long", ttl=3_600)
    eventually(lambda: bodies(group) == [b"long"])


@pytest.mark.slow
def test_many_keep_their_order(tree: Client, name: str) -> None:
    group = kept(tree, name)
    sent = [(f"s{number % 7}", str(number)) for number in range(3_000)]
    mixed = [Outgoing(s, b, headers={"n": b}) if int(b) % 5 == 0 else (s, b) for s, b in sent]
    assert group.publish_many(iter(mixed)) == 3_000
    got = list(group.history())
    assert [(message.stream, message.body.decode()) for message in got] == sent
    assert [m.headers.get("n") for m in got[:6]] == ["0", None, None, None, None, "5"]


def test_one_bad_of_many_is_told(tree: Client, name: str) -> None:
    group = kept(tree, name)
    made = [{"colour": "blue"}, {"sender": "me"}, {"colour": "red"}]
    with pytest.raises(errors.BadCommand) as raised:
        group.publish_many(Outgoing("s", str(n), headers=more) for n, more in enumerate(made))
    assert "publish_many failed at message 1" in raised.value.__notes__[0]
    assert bodies(group) == [b"0", b"2"]
    with pytest.raises(errors.TooLong) as raised:
        group.publish_many([("s", b"3"), Outgoing("s", bytes(LARGEST + 1), delay=5), ("s", b"4")])
    assert "publish_many failed at message 1" in raised.value.__notes__[0]
    assert bodies(group) == [b"0", b"2", b"3"]


def test_a_stream_removed_under_a_publisher(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("s", b"1")
    group.remove("s")
    group.publish("s", b"2")
    assert bodies(group) == [b"2"]


def test_threads_publish_through_one_client(tree: Client, name: str) -> None:
    group = kept(tree, name, "sync off")
    threads = [
        threading.Thread(target=lambda n=n: [group.publish(f"s{n}", str(i)) for i in range(200)]) for n in range(8)
    ]
    with group.subscribe() as messages:
        for thread in threads:
            thread.start()
        got = [messages.get(HANG_S) for _ in range(1_600)]
        for thread in threads:
            thread.join()
    assert [m.sequence for m in got] == sorted(m.sequence for m in got)
    for n in range(8):
        assert [m.body for m in got if m.stream == f"s{n}"] == [str(i).encode() for i in range(200)]


# ---------------------------------------------------------------- a group


def test_what_there_is(tree: Client, name: str) -> None:
    group = tree.group(f"{name}/in/ner", create=True)
    group.create("b", "a", "a")
    group.bind("all", "#")
    assert (group.streams(), group.groups()) == (["a", "b"], [])
    assert tree.group(name).groups() == ["in"]
    assert "ner" in tree.group(f"{name}/in").groups()
    group.ctl("replay all", "ttl 1h")
    settings = group.settings()
    assert (settings.replay, settings.ttl, settings.deliver) == ("all", 3_600.0, "all")
    with pytest.raises(errors.BadCommand, match="replay"):
        group.ctl("depth 5", "replay sometimes")
    assert group.settings().depth == 0
    group.publish("a", b"x")
    assert group.stats().streams["a"].messages == 1
    group.purge("a")
    assert group.stats().streams["a"].messages == 0
    group.unbind("all")
    group.remove("a")
    group.remove("b")
    tree.remove_group(f"{name}/in/ner")
    assert tree.group(f"{name}/in").groups() == []
    with pytest.raises(errors.NotFound):
        tree.group(f"{name}/in/ner")


def test_deliver_can_be_set_after_publishing(tree: Client, name: str) -> None:
    """The files that publishers keep open are in no one's way."""
    group = tree.group(name, create=True)
    group.publish("s", b"x")
    group.ctl("deliver one")
    assert group.settings().deliver == "one"


# ---------------------------------------------------------------- history


@pytest.mark.slow
def test_stretches_of_the_past(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish_many((f"s.{number % 2}", str(number)) for number in range(10))
    first = next(group.history()).sequence

    def got(*bounds: int | None, **more: object) -> str:
        return "".join(message.body.decode() for message in group.history(*bounds, **more))  # type: ignore[arg-type]

    assert got() == "0123456789"
    assert got(first + 3) == "3456789"
    assert got(first + 3, first + 5) == "345"
    assert got(None, first + 1) == "01"
    assert got(-2) == "89"
    assert got(pattern="*.1") == "13579"
    assert got(-2, pattern="s.0") == "68"
    assert got(pattern=["s.0", "s.1"]) == "0123456789"
    assert got(pattern="unheard.of") == ""
    assert got(filters=lambda message: int(message.body) > 7) == "89"
    assert got(since="1h") == got(since=timedelta(hours=1)) == "0123456789"
    middle = list(group.history())[5]
    assert got(since=middle.time_ns / 1e9 + 3_600) == ""
    assert got(since=datetime.fromtimestamp(0, UTC)) == "0123456789"
    with pytest.raises(errors.BadRequest):
        got(1, since=0.0)
    assert [m.body for m in group.history(first, first)] == [b"0"]


@pytest.mark.process
@pytest.mark.parametrize("create", [True, False])
def test_a_stream_that_is_removed_under_a_batch_repeats_nothing(
    shared: Server, name: str, create: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That ends the generation of the ring, in which the first messages are."""
    if ring.MISSING:
        pytest.skip(ring.MISSING)
    with shared.connect(transport="ring") as client, shared.connect(transport="9p") as other:
        group = kept(client, name)
        group.publish_many([("s", "before"), ("t", "before")])
        publish_all, removed = RingGroup._publish_all, []

        def interrupted(self: RingGroup, at: Attached, messages: Sequence[Any], known: bool) -> int | None:
            if removed or known:  # text is not bytes: that leaves it to the second attempt
                return publish_all(self, at, messages, known)
            publish_all(self, at, messages[:50], known)
            other.group(name).remove("t")
            removed.append("t")
            try:
                return publish_all(self, at, messages[50:], known)
            except errors.MqfsError as error:
                error.published = 50 + getattr(error, "published", 0)  # type: ignore[attr-defined]
                raise

        monkeypatch.setattr(RingGroup, "_publish_all", interrupted)
        batch = [("s" if number < 50 else "t", str(number)) for number in range(100)]
        if create:
            assert group.publish_many(batch) == 100
        else:
            with pytest.raises(errors.NotFound) as raised:
                group.publish_many(batch, create=False)
            assert "failed at message 50" in raised.value.__notes__[0]
        numbers = [str(number).encode() for number in range(100 if create else 50)]
        assert bodies(group, "s") == [b"before", *numbers[:50]]
        assert bodies(group) == [b"before", *numbers]
