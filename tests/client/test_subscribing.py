"""Subscriptions, as iterators and as callbacks: the same over both transports."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import Client, Message, errors
from mqfs.client import Group
from mqfs.client.arrow import ColumnSubscription
from tests.support.eventually import HANG_S, eventually

FILES = [pytest.param("9p", marks=pytest.mark.process), "inside"]  # a ring still has what was cut


def kept(tree: Client, name: str, *ctl: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all", *ctl])


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, queue.SimpleQueue[object]]:
    """Its result, or what it raised."""
    out: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            out.put(call())
        except BaseException as error:
            out.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def parked(group: Group, count: int = 1) -> None:
    """Wait until `count` reads of cursors wait; the server tells by what it counts as open. (Who reads a ring begins
    at once, and of that nothing is to be seen.)"""
    if group._link.direct(group.path) is not None:
        return
    for _ in range(20_000):
        if group.stats().cursors >= count:
            return
    raise AssertionError("no cursor")


def test_from_now_on_and_from_the_beginning(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("s", b"old")
    with group.subscribe() as new, group.subscribe(existing=True) as everything:
        group.publish("s", b"new")
        assert new.get(HANG_S).body == b"new"
        assert [everything.get(HANG_S).body for _ in range(2)] == [b"old", b"new"]


def test_words_of_the_group(tree: Client, name: str) -> None:
    """Patterns of its own words, over files and rings; `*` is a letter there. A stream of that name may come later."""
    group = kept(tree, name, "words : + >")
    group.create("a:x", "b")
    with group.subscribe("a:+") as one, group.subscribe("c*") as later, group.subscribe() as all_:
        for stream in ("a:x", "a.x", "c*", "cd"):
            group.publish(stream, stream)
        assert one.get(HANG_S).stream == "a:x"
        assert later.get(HANG_S).stream == "c*"
        assert [all_.get(HANG_S).stream for _ in range(4)] == ["a:x", "a.x", "c*", "cd"]
    with pytest.raises(errors.BadCommand), group.subscribe("a+") as wrong:
        wrong.get(HANG_S)
    group.ctl("words . * #")
    with group.subscribe("c.*") as again:
        group.publish("c.d", "x")
        assert again.get(HANG_S).stream == "c.d"


def test_programs(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("log.a", "no error")
    program = 'prefix:log. (payload_prefix("error"))'
    with group.subscribe(program=program) as new, group.subscribe(program="exact:log.a", existing=True) as all_:
        for stream, body in [("log.a", "fine"), ("web", "error"), ("log.b", "error 'it''s'")]:
            group.publish(stream, body)
        assert new.get(HANG_S).body == b"error 'it''s'"
        assert [all_.get(HANG_S).body for _ in range(2)] == [b"no error", b"fine"]
    assert [message.stream for message in group.history(program=program)] == ["log.b"]
    with pytest.raises(errors.BadCommand, match="column"):
        group.subscribe(program="prefix:a (")
    with pytest.raises(errors.BadRequest):
        group.subscribe("log.*", program=program)


def test_one_or_more_words(tree: Client, name: str) -> None:
    """As the wildcard of qpubs; by the log, a ring, a view, a consumer, a handler and after a restart alike."""
    group = tree.group(name, create=True, ctl=["replay all", "words . + '#' *", "bind view a.*"])
    assert group.settings().words == (".", "+", "#", "*")
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    group.on("a.*", lambda message: called.put(message.stream))
    with group.subscribe("a.*") as now, group.consume("c", over="view") as claims, group.subscribe("view") as view:
        for stream in "a", "a.b", "b", "a.b.c":
            group.publish(stream, "x")
        for wanted in "a.b", "a.b.c":
            got = [
                now.get(HANG_S).stream,
                view.get(HANG_S).stream,
                claims.get(HANG_S).stream,
                called.get(timeout=HANG_S),
            ]
            assert got == [wanted] * 4
    assert [message.stream for message in group.history(pattern="*.b")] == ["a.b"]
    assert {message.stream for message in group.history(pattern="+")} == {"a", "b"}
    with pytest.raises(errors.BadCommand, match="wildcard inside a word"):
        group.subscribe("ab*")
    group.unbind("view")
    group.ctl("words . + '#'")
    assert group.settings().words == (".", "+", "#")


def test_patterns(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.bind("errors", "*.error")
    patterns = ["a.*", "#.error", "errors", "b.error", ["a.info", "b.error"], "later"]
    group.create("a.info", "a.error", "b.error")
    readers = [group.subscribe(pattern) for pattern in patterns]
    group.publish_many([("a.info", b"1"), ("a.error", b"2"), ("b.error", b"3"), ("later", b"4"), ("x.y.error", b"5")])
    wanted = [b"12", b"235", b"23", b"3", b"13", b"4"]
    for reader, want in zip(readers, wanted, strict=True):
        assert b"".join(reader.get(HANG_S).body for _ in want) == want
        with pytest.raises(TimeoutError):
            reader.get(0)
        reader.close()


def test_a_stream_that_is_removed_ends_it(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.create("s")
    messages = group.subscribe("s")
    group.publish("s", b"last")
    assert next(messages).body == b"last"
    thread, out = in_thread(lambda: list(messages))
    group.remove("s")
    assert out.get(timeout=HANG_S) == []
    thread.join()


def test_closing_ends_who_waits(tree: Client, name: str) -> None:
    group = kept(tree, name)
    messages = group.subscribe()
    threads = [in_thread(lambda: list(messages)) for _ in range(3)]
    parked(group)
    messages.close()
    for thread, out in threads:
        assert out.get(timeout=HANG_S) == []
        thread.join()
    with pytest.raises(EOFError):
        messages.get()


def test_the_end_of_the_client_ends_who_waits(tree: Client, name: str) -> None:
    group = kept(tree, name)
    messages = group.subscribe(reconnect=False)
    thread, out = in_thread(lambda: list(messages))
    parked(group)
    tree.close()
    ended = out.get(timeout=HANG_S)
    assert ended == [] or isinstance(ended, errors.Disconnected)
    thread.join()
    with pytest.raises(errors.Disconnected, match="closed"):
        group.publish("s", b"x")


def test_the_end_of_the_client_ends_waits_that_would_reconnect(tree: Client, name: str) -> None:
    group = kept(tree, name)
    messages, claims = group.subscribe(), group.consume("c")
    waits = [in_thread(lambda source=source: source.get()) for source in (messages, claims)]
    parked(group)
    tree.close()
    for thread, out in waits:
        assert isinstance(out.get(timeout=HANG_S), EOFError | errors.Disconnected)
        thread.join()


@pytest.mark.parametrize("timeout", [0, 0.001])
def test_a_timeout_and_an_interrupt_lose_nothing(tree: Client, name: str, timeout: float) -> None:
    group = kept(tree, name, "sync off")
    messages = group.subscribe()
    got: list[int] = []
    thread, _ = in_thread(lambda: [group.publish("s", str(n)) for n in range(500)])
    while len(got) < 500:
        try:
            if len(got) % 2:
                messages.interrupt()
            got.append(int(messages.get(timeout).body))
        except (TimeoutError, errors.Interrupted):
            pass
    thread.join()
    assert got == list(range(500))


@pytest.mark.parametrize(
    "tree", [pytest.param("9p", marks=pytest.mark.process), "inside"], indirect=True
)  # a ring still has what was cut
def test_a_reader_that_fell_behind_is_told_once(tree: Client, name: str) -> None:
    group = kept(tree, name, "depth 2")
    messages = group.subscribe()
    group.publish_many(("s", str(number)) for number in range(5))
    with pytest.raises(errors.FellBehind, match="up to 3 messages of the group were lost"):
        next(messages)
    assert [messages.get(HANG_S).body for _ in range(2)] == [b"3", b"4"]


def test_filters(tree: Client, name: str) -> None:
    group = kept(tree, name)
    even: Callable[[Message], bool] = lambda message: int(message.body) % 2 == 0  # noqa: E731
    small: Callable[[Message], bool] = lambda message: int(message.body) < 5  # noqa: E731
    one, both = group.subscribe(filters=even), group.subscribe(filters=[even, small])
    group.publish_many(("s", str(number)) for number in range(8))
    assert [one.get(HANG_S).body for _ in range(4)] == [b"0", b"2", b"4", b"6"]
    assert [both.get(HANG_S).body for _ in range(3)] == [b"0", b"2", b"4"]
    with pytest.raises(TimeoutError):
        both.get(0)


def test_a_waiting_reader_holds_up_nobody(tree: Client, name: str) -> None:
    """64 threads wait, one publishes, through one client."""
    group = kept(tree, name, "sync off")
    readers = [group.subscribe(f"s{number}") for number in range(64)]
    threads = [in_thread(lambda reader=reader: reader.get(HANG_S).body) for reader in readers]  # type: ignore[misc]
    parked(group, 64)
    for number in reversed(range(64)):
        group.publish(f"s{number}", str(number))
    for number, (thread, out) in enumerate(threads):
        assert out.get(timeout=HANG_S) == str(number).encode()
        thread.join()


# ---------------------------------------------------------------- callbacks


def test_callbacks_in_order(tree: Client, name: str) -> None:
    group = kept(tree, name)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    group.publish("a.b", b"0")
    registration = group.on("a.*", lambda message: got.put(message.body), existing=True)
    group.publish_many(("a.b", str(number)) for number in range(1, 100))
    assert [got.get(timeout=HANG_S) for _ in range(100)] == [str(number).encode() for number in range(100)]
    registration.unsubscribe()
    group.publish("a.b", b"after")
    assert got.empty()
    assert not registration.active


def test_the_same_handler_is_called_once(tree: Client, name: str) -> None:
    group = kept(tree, name)
    got: queue.SimpleQueue[str] = queue.SimpleQueue()
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()

    def handler(message: Message) -> None:
        (ends if message.body == b"end" else got).put(message.stream)

    assert group.on("x.#", handler) is group.on("x.#", handler)
    other = group.on("*.y", handler)
    for _ in range(50):
        group.publish_many([("x.y", b"both"), ("x.z", b"one"), ("a.y", b"the other")])
    group.publish_many([("x", b"end"), ("b.y", b"end")])
    assert sorted(ends.get(timeout=HANG_S) for _ in range(2)) == ["b.y", "x"]
    assert sorted(got.get(timeout=HANG_S) for _ in range(150)) == sorted(["x.y", "x.z", "a.y"] * 50)
    assert got.empty()
    assert group.unsubscribe("x.#", handler) == 1
    assert other.active
    assert group.unsubscribe(handler=print) == 0
    assert group.unsubscribe() == 1
    assert group.on("x.#", handler).active
    assert group.unsubscribe("x.#") == 1


def test_once(tree: Client, name: str) -> None:
    group = kept(tree, name)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    registration = group.once("s", lambda message: got.put(message.body))
    group.publish_many([("s", b"1"), ("s", b"2")])
    registration.join(HANG_S)
    assert not registration.active
    assert (got.get(timeout=HANG_S), got.empty()) == (b"1", True)
    assert group.unsubscribe() == 0


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_handler_may_end_its_own_subscription(tree: Client, name: str, concurrency: int) -> None:
    group = kept(tree, name)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    registration = group.on("s", lambda message: ended.put(group.unsubscribe()), concurrency=concurrency)
    group.publish("s", b"x")
    assert ended.get(timeout=HANG_S) == 1
    registration.join(HANG_S)
    assert not registration.active


def test_a_handler_that_raises(tree: Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
    group = kept(tree, name)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()

    def handler(message: Message) -> None:
        if message.body == b"bad":
            raise ValueError("no good")
        got.put(message.body)

    def told(error: Exception, message: Message | None) -> None:
        got.put((str(error), message.body if message else None))

    group.on("s", handler, on_error=told)
    group.publish_many([("s", b"bad"), ("s", b"good")])
    assert [got.get(timeout=HANG_S) for _ in range(2)] == [("no good", b"bad"), b"good"]
    group.unsubscribe()
    group.on("s", handler)
    group.publish_many([("s", b"bad"), ("s", b"good")])
    assert got.get(timeout=HANG_S) == b"good"
    assert "no good" in caplog.text


@pytest.mark.parametrize(
    "tree", [pytest.param("9p", marks=pytest.mark.process), "inside"], indirect=True
)  # a ring still has what was cut
def test_a_callback_is_told_of_losses(tree: Client, name: str) -> None:
    group = kept(tree, name, "depth 1")
    begun, busy, told = threading.Event(), threading.Event(), queue.SimpleQueue[object]()

    def handler(message: Message) -> None:
        begun.set()
        busy.wait(HANG_S)
        told.put(message.body)

    group.on("#", handler, existing=True, on_error=lambda error, message: told.put(type(error)))
    group.publish("s", b"0")
    assert begun.wait(HANG_S)
    group.publish_many(("s", str(number)) for number in range(1, 5))
    busy.set()
    assert [told.get(timeout=HANG_S) for _ in range(3)] == [b"0", errors.FellBehind, b"4"]


@pytest.mark.slow
def test_concurrency(tree: Client, name: str) -> None:
    """Three handlers run at once, no fourth."""
    group = kept(tree, name)
    barrier, lock, running, most = threading.Barrier(3), threading.Lock(), 0, 0
    done: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def handler(message: Message) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(HANG_S)
        with lock:
            running -= 1
        done.put(message.body)

    group.on("s", handler, concurrency=3)
    group.publish_many(("s", str(number)) for number in range(9))
    assert sorted(done.get(timeout=HANG_S) for _ in range(9)) == [str(number).encode() for number in range(9)]
    assert most == 3
    with pytest.raises(errors.BadRequest):
        group.on("s", handler, concurrency=0)


def test_a_thread_that_waits_holds_up_no_get_longer_than_its_limit(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    group.create("s")
    columns = ColumnSubscription(group._link, group.path, "s", start="end")
    for messages in (group.subscribe("s"), columns):
        with messages:
            waiter = threading.Thread(target=next, args=(messages, None), daemon=True)
            waiter.start()
            eventually(messages._turn.locked)
            ended = threading.Event()

            def get(messages: Any = messages, ended: threading.Event = ended) -> None:
                with pytest.raises(TimeoutError):
                    messages.get(0.05)
                ended.set()

            threading.Thread(target=get, daemon=True).start()
            assert ended.wait(HANG_S)
            assert waiter.is_alive()
        waiter.join(HANG_S)
