"""Calls at their edges: what cannot be meant is refused with its reason, and what ends does end."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import Client, Message, errors
from mqfs.client import Group
from mqfs.client.origin import Origin
from tests.support.eventually import HANG_S, patient
from tests.support.server import Server

LARGEST = 1_044_480


def kept(tree: Client, name: str, *ctl: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all", *ctl])


def bodies(messages: mqfs.Subscription) -> list[bytes]:
    """All that an iterator gives that ends; a test that hangs here is ended."""
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend(message.body for message in messages), daemon=True)
    reading.start()
    reading.join(patient(20))
    hangs = reading.is_alive()
    messages.close()
    assert not hangs, "history has no end"
    return got


@pytest.mark.parametrize("bounds", [(None, 4), (None, 10**15), (1, 5), (3, 9), (9, 99), (9, None), (9, 3), (-1, 9)])
def test_history_ends_wherever_its_bounds_are(tree: Client, name: str, bounds: tuple[int | None, int | None]) -> None:
    group = kept(tree, name)
    assert bodies(group.history(*bounds)) == [], "of an empty group"
    for body in ("1", "2", "3"):
        group.publish("s", body)
    first, last = bounds
    begin = 3 if first == -1 else first or 1
    assert bodies(group.history(*bounds)) == [str(n).encode() for n in range(begin, min(last or 3, 3) + 1)]
    assert bodies(group.history(*bounds, pattern="t")) == []


def test_a_closed_client_does_nothing(tree: Client, name: str) -> None:
    """Also through shared memory, which outlives the connection."""
    group = kept(tree, name)
    group.publish("s", "before")
    assert group.publish_many([("s", "before")] * 2) == 2
    tree.close()
    calls: list[Callable[[], object]] = [
        lambda: group.publish("s", "after"),
        lambda: group.publish("s", "after", wait="published"),
        lambda: group.publish("s", "after", headers={"k": "v"}),
        lambda: group.publish("s", b"x" * 2_000_000),
        lambda: group.publish_many([("s", "after")]),
        lambda: group.subscribe(),
        lambda: group.subscribe(existing=True),
        lambda: group.history(),
        lambda: group.on("s", print),
        lambda: group.consume("c"),
        lambda: group.streams(),
        lambda: tree.group(name),
    ]
    for call in calls:
        with pytest.raises(errors.Disconnected, match="the client was closed"):
            call()


def test_closing_ends_publishers(tree: Client, name: str) -> None:
    group = kept(tree, name, "sync off")
    published, raised = threading.Event(), list[errors.Disconnected]()

    def publish() -> None:
        try:
            while True:
                group.publish("s", "x")
                published.set()
        except errors.Disconnected as error:
            raised.append(error)

    publishing = threading.Thread(target=publish, daemon=True)
    publishing.start()
    assert published.wait(HANG_S)
    tree.close()
    publishing.join(patient(20))
    assert raised, "it still publishes"


@pytest.mark.process
def test_a_token_where_the_socket_tells_the_user_is_refused(shared: Server) -> None:
    for transport in ("9p", "auto", "ring"):
        with pytest.raises(errors.BadRequest, match=r"token with unix!.* \(expected tcp!HOST!PORT or tls!HOST!PORT\)"):
            shared.connect(token="secret", transport=transport)


@pytest.mark.parametrize("size", [LARGEST, LARGEST + 1, 9_000_000])
def test_a_message_of_any_size_can_be_copied(tree: Client, name: str, size: int) -> None:
    group = kept(tree, name)
    body = bytes(range(251)) * (size // 251 + 1)
    group.publish("s", body[:size], headers={"colour": "blue"})
    with group.consume("c") as claims, claims.get(HANG_S) as claim:
        claimed = claim.message
    message = next(group.history())
    plain = Message(message.sequence, "s", message.time_ns, body[:size], dict(message.headers))
    copies = [copy.copy(message), copy.deepcopy(message), message._replace(), claimed]
    copies += [pickle.loads(pickle.dumps(message, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for one in copies:
        assert one == message == plain
        assert [one != plain, plain != one] == [False, False]
        assert (one.size, one.body, one.headers) == (size, plain.body, plain.headers)
        with one.open() as file:
            assert file.read(10) == body[:10]
    assert message._replace(stream="t") == plain._replace(stream="t") != message
    assert message._asdict() == plain._asdict()


def test_messages_without_headers_share_them(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish_many([("s", "a"), ("s", "b")])
    one, other = group.history()
    assert one.headers == {}
    assert json.dumps(one.headers) == "{}"
    assert one.headers is other.headers
    for change in ("one.headers['k'] = 'v'", "one.headers.update(k='v')", "one.headers |= {'k': 'v'}"):
        with pytest.raises((TypeError, AttributeError)):
            exec(change, {"one": one})
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one._replace(headers={**one.headers})):
        copied.headers["k"] = "v"  # type: ignore[index]
    assert one.headers == other.headers == {}


def test_the_names_of_the_library_are_listed() -> None:
    assert set(mqfs.__all__) <= set(dir(mqfs))
    assert mqfs.errors is errors
    for name in mqfs.__all__:
        assert getattr(mqfs, name) is not None
    for name in ("Claims", "Subscription", "Registration", "Worker"):
        assert name in mqfs.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mqfs.nothing  # noqa: B018


@pytest.mark.parametrize("transport", ["9p", "auto"])
def test_a_server_that_is_not_there_is_no_bad_address(tmp_path: Path, transport: str) -> None:
    """As after a loss: programs that wait for their server need not know when it went."""
    for address, why in ((f"unix!{tmp_path}/s", "no such socket"), ("tcp!127.0.0.1!1", "connection refused")):
        with pytest.raises(errors.Disconnected, match=why):
            mqfs.connect(address, transport=transport)
    with pytest.raises(errors.BadAddress):
        mqfs.connect("http://nowhere", transport=transport)


def test_arguments_that_cannot_be_meant(tree: Client, name: str) -> None:
    group = kept(tree, name)
    any_: Any = group
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, r"invalid message 's' \(expected \(stream, body\) or Outgoing\)", lambda: any_.publish_many(["s"])),
        (TypeError, "invalid message 'ab'", lambda: any_.publish_many([("s", "x"), "ab"])),
        (TypeError, r"invalid message \('s',\)", lambda: any_.publish_many([("s",)])),
        (TypeError, "invalid message 'a'", lambda: any_.publish_many("ab")),
        (TypeError, "invalid message 's'", lambda: any_.publish_many(("s", b"x"))),
        (TypeError, r"invalid ctl 'depth 5' \(expected a list of lines\)", lambda: tree.group(name, ctl="depth 5")),
        (TypeError, "invalid defaults 'depth 5'", lambda: mqfs.open(None, defaults="depth 5")),
        (errors.BadRequest, r"no pattern \(expected '#' for everything\)", lambda: group.subscribe([])),
        (errors.BadRequest, "no pattern", lambda: group.history(pattern=[])),
        (errors.BadRequest, "no pattern", lambda: group.on([], print)),
        (errors.BadRequest, "no pattern", lambda: group.unsubscribe([])),
        (errors.BadRequest, "no pattern", lambda: group.consume("c", pattern=[])),
        (errors.BadRequest, r"bind failed: no pattern of 'v' \(expected one or more\)", lambda: group.bind("v")),
        (TypeError, r"invalid name b's' \(expected str\)", lambda: any_.publish(b"s", "x")),
        (TypeError, "invalid name b's'", lambda: any_.publish(b"s", "x", ttl=1)),
        (TypeError, "invalid name b's'", lambda: any_.publish(b"s", "x" * 2_000_000)),
        (TypeError, "invalid name b's'", lambda: any_.publish_many([(b"s", "x")])),
        (TypeError, "invalid name b's'", lambda: any_.publish_many([mqfs.Outgoing(b"s", "x", ttl=1)])),
        (TypeError, "invalid name b's'", lambda: any_.create(b"s")),
        (TypeError, "invalid name b's'", lambda: any_.take(b"s")),
        (TypeError, "invalid name b's'", lambda: any_.remove(b"s")),
        (TypeError, r"invalid pattern b's' \(expected str\)", lambda: any_.subscribe(b"s")),
        (TypeError, "invalid pattern b's'", lambda: any_.on(["t", b"s"], print)),
        (TypeError, "invalid pattern b's'", lambda: any_.history(pattern=b"s")),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    escaping: Any = tree.group(name, escape=True)
    with pytest.raises(TypeError, match=r"invalid text 1 \(expected str or bytes\)"):
        escaping.publish(1, "x")
    assert group.settings().depth == 0
    assert group.publish_many([("s", "x"), ["t", "y"]]) == 2  # type: ignore[list-item]


def test_what_a_name_holds_is_said(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.create("s")
    for call in (
        lambda stream: group.publish(stream, "x"),
        lambda stream: group.publish(stream, "x", ttl=1),
        lambda stream: group.publish_many([(stream, "x")]),
        lambda stream: group.create(stream),
        lambda stream: group.subscribe(stream),
        lambda stream: group.take(stream),
    ):
        with pytest.raises(errors.BadName, match=r"invalid name 'a\\+x00b': has a NUL") as raised:
            call("a\0b")
        assert "reserved" not in str(raised.value)
        with pytest.raises(errors.BadName, match="invalid name 'a/b': has a slash"):
            call("a/b")
        with pytest.raises(errors.BadName, match="reserved name 'ctl'"):
            call("ctl")


def test_a_second_registration_with_other_options_is_refused(tree: Client, name: str) -> None:
    group = kept(tree, name)

    def handler(message: Message) -> None: ...
    def passes(message: Message) -> bool:
        return True

    first = group.on("s", handler, filters=[passes])
    assert group.on("s", handler, filters=[passes]) is first
    others: list[dict[str, Any]] = [
        {"existing": True},
        {"filters": ()},
        {"concurrency": 2},
        {"once": True},
        {"on_error": lambda error, message: None},
    ]
    for other in others:
        with pytest.raises(errors.BadRequest, match=f"is registered for s with another {next(iter(other))}"):
            group.on("s", handler, **{"filters": [passes], **other})
    assert group.unsubscribe("s", handler) == 1


def test_a_claim_has_what_its_message_has(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish_json("s", {"a": [1]}, ttl="1h")
    with group.consume("c") as claims, claims.get(HANG_S) as claim:
        assert claim.json() == {"a": [1]}
        assert (claim.size, claim.topic) == (9, "s")


def test_only_json_is_published_as_json(tree: Client, name: str) -> None:
    """NaN is none, though Python would write it: other readers refuse the whole message."""
    group = kept(tree, name)
    for value in (float("nan"), [float("inf")], {1, 2}, b"x", "\ud800"):
        with pytest.raises(
            (TypeError, ValueError), match=r"publish_json failed: .* \(expected a value that JSON has\)"
        ):
            group.publish_json("s", value)
    assert bodies(group.history()) == []


def test_a_worker_is_closed_like_all_else(tree: Client, name: str) -> None:
    group = kept(tree, name)
    handled = threading.Event()
    worker = group.work("c", lambda claim: handled.set())
    group.publish("s", "x")
    assert handled.wait(HANG_S)
    worker.close()
    worker.close()
    worker.join(HANG_S)


def test_a_wait_that_ends_says_so(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.create("s")
    opened: list[Any] = [
        group.subscribe(),
        group.subscribe("s", filters=lambda message: True),
        group.subscribe(existing=True),
        group.consume("c"),
        group.take("s"),
    ]
    for source in opened:
        with source, pytest.raises(TimeoutError, match=r"no message in 0\.05 s"):
            source.get(0.05)


def test_a_group_is_made_with_its_settings_or_not_at_all(tree: Client, name: str) -> None:
    with pytest.raises(errors.BadCommand, match="depth"):
        tree.group(f"{name}/in/ner", create=True, ctl=["replay all", "depth much"])
    with pytest.raises(errors.NotFound):
        tree.group(name)
    tree.group(name, create=True)
    with pytest.raises(errors.BadCommand, match="depth"):
        tree.group(f"{name}/in/ner", create=True, ctl=["depth much"])
    assert tree.group(name).groups() == []
    with pytest.raises(errors.BadCommand, match="depth"):
        tree.group(name, create=True, ctl=["depth much"])
    assert tree.group(name).settings().replay == "off", "it was there before"


# ---------------------------------------------------------------- warnings


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "mqfs.client"]
    caplog.clear()
    return found


LATE = "'replay off' keeps no message for later readers (expected 'replay all' in ctl, or readers before publishers)"


@pytest.mark.parametrize("over", ["", "s"])
def test_who_comes_too_late_is_warned(tree: Client, name: str, over: str, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Callable[[Group], object]] = [
        lambda group: group.consume("late", over=over).close(),
        lambda group: group.work("work", print, over=over).stop(),
        lambda group: group.subscribe(existing=True).close(),
        lambda group: group.on("s", lambda message: None, existing=True).unsubscribe(),
        lambda group: list(group.history()),
    ]
    for number, call in enumerate(calls):
        group = tree.group(f"{name}/{number}", create=True)
        group.create("s")
        group.consume("early", over=over).close()
        call(tree.group(f"{name}/{number}"))
        assert warnings(caplog) == [], "nothing was written yet"
    for number, call in enumerate(calls):
        group = tree.group(f"{name}/{number}/after", create=True)
        group.publish("s", "x")
        call(group)
        (warning,) = warnings(caplog)
        assert warning.endswith(f"in group {group.path!r}: {LATE}")
        call(group)
        assert warnings(caplog) == [], "once"
        kept = tree.group(f"{name}/{number}/kept", create=True, ctl=["replay all", "bind v 'a\rreplay off\rb'"])
        kept.publish("s", "x")
        call(kept)
        assert warnings(caplog) == []


def test_a_warning_that_cannot_be_made_fails_no_call(
    tree: Client, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = tree.group(name, create=True)
    group.publish("s", "x")

    def refuse(_: Origin) -> None:
        raise errors.OverLimit("no more files")

    monkeypatch.setattr(Origin, "cursor", refuse)
    group.consume("late").close()
    assert group.consumers() == ["late"]
    assert warnings(caplog) == []


def test_plain_handlers_of_a_work_queue_are_warned_of(
    tree: Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each gets every message there too, as a subscription does; those that share them say so."""
    group = tree.group(name, create=True, ctl=["deliver one"])
    group.create("s")
    group.on("s", lambda message: None, single=True)
    assert warnings(caplog) == []
    group.on("s", lambda message: None)
    (warning,) = warnings(caplog)
    assert "each handler gets every message (expected single=True for handlers that share them)" in warning
    group.on("t", lambda message: None)
    assert warnings(caplog) == []


def test_a_handler_over_a_view_with_a_long_name(tree: Client, name: str) -> None:
    group = kept(tree, name)
    views = ["v" * 200, "w" * 200]
    for view in views:
        group.bind(view, "s")
    called: list[int] = []
    registration = group.on(views, lambda message: called.append(1))
    assert registration.active


# ---------------------------------------------------------------- long topics


@pytest.mark.parametrize("size", [255, 256, 300, 5_000])
def test_a_topic_of_any_length_is_a_stream(tree: Client, name: str, size: int) -> None:
    group = tree.group(name, create=True, ctl=["replay all"], escape=True)
    topics = ["a." + "x/y" * size, "é" * size, "a." + "x/y" * size + "z"]
    with group.subscribe() as all_, group.subscribe(topics[0]) as one, group.subscribe("a.*") as some:
        for topic in topics:
            group.publish(topic, topic)
        group.publish_many([(topics[0], "many"), mqfs.Outgoing(topics[1], "many", headers={"k": "v"})])
        with group.writer(topics[2]) as body:
            body.write(b"x" * 1_100_000)
        got = [all_.get(HANG_S) for _ in range(6)]
        assert [message.topic for message in got] == [*topics, *topics]
        assert [one.get(HANG_S).topic for _ in range(2)] == [topics[0]] * 2
        assert [some.get(HANG_S).topic for _ in range(4)] == [topics[0], topics[2], topics[0], topics[2]]
    assert len({message.stream for message in got}) == 3
    assert got[4].headers["k"] == "v"
    with group.consume("c", over=topics[0]) as claims, claims.get(HANG_S) as claim:
        assert claim.topic == topics[0]
    for stream in group.streams():
        group.remove(stream)
    assert group.streams() == []
    with pytest.raises(errors.BadName, match="is not UTF-8"):
        group.publish(b"\xff" * size, "x")  # type: ignore[arg-type]
