"""Handlers of `on`: many on one subscription, filters that see them, and handlers that are slow."""

from __future__ import annotations

import asyncio
import queue
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator

import anyio
import pytest

import mqfs
from mqfs import Claim, Client, Message
from mqfs.client import Group, Registration, callbacks
from mqfs.client.callbacks import QUEUED
from mqfs.client.dispatching import COVERED
from mqfs.client.types import File
from tests.client.opening import Opening
from tests.support.calls import calls_once
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server

MANY = 10_000
HANDLER_BYTES = 2_048


def kept(tree: Client, name: str, *ctl: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all", *ctl])


class Collector:
    """A handler that keeps what it is called with."""

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.got: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def __call__(self, message: Message) -> None:
        self.got.put(message)

    def bodies(self, count: int) -> list[bytes]:
        return [self.got.get(timeout=HANG_S).body for _ in range(count)]


# ---------------------------------------------------------------- one dispatcher


def test_one_subscription_and_one_thread_serve_all(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.create("a.1")
    before = set(threading.enumerate())
    handlers = [Collector() for _ in range(200)]
    for number, handler in enumerate(handlers):
        group.on([f"a.{number}", f"b.*.{number}.#"], handler)
    assert [thread.name for thread in threading.enumerate() if thread not in before] == ["mqfs-dispatcher"]
    assert group.stats().cursors <= 1
    group.publish_many([(f"{kind}{number}", str(number)) for kind in ("a.", "b.x.", "c.") for number in range(200)])
    for number, handler in enumerate(handlers):
        assert handler.bodies(2) == [str(number).encode()] * 2
    assert group.unsubscribe() == 200
    group.publish("a.1", "x")
    assert all(handler.got.empty() for handler in handlers)


def test_a_handler_gets_what_is_published_behind_its_registration(tree: Client, name: str) -> None:
    """Not what others, which began before, have still to read."""
    group = kept(tree, name)
    first = Collector()
    group.on("s", first)
    for number in range(50):
        late = Collector()
        group.publish("s", f"before {number}")
        registration = group.on("#", late)
        group.publish("s", f"behind {number}")
        assert late.bodies(1) == [f"behind {number}".encode()]
        registration.unsubscribe()
    assert len(first.bodies(100)) == 100


def test_views_what_is_kept_and_names_to_come(tree: Client, name: str) -> None:
    group = kept(tree, name)
    group.publish("log.a", "old")
    group.bind("v", "log.*")
    view, old, later, every = (Collector() for _ in range(4))
    group.on("v", view)
    group.on("log.a", old, existing=True)
    group.on("later", later)
    group.on("#", every)
    group.publish_many([("log.a", "1"), ("later", "2"), ("other", "3")])
    assert view.bodies(1) == [b"1"]
    assert old.bodies(2) == [b"old", b"1"]
    assert later.bodies(1) == [b"2"]
    assert every.bodies(3) == [b"1", b"2", b"3"]


def test_a_slow_handler_stops_no_other_and_loses_nothing(tree: Client, name: str) -> None:
    group = kept(tree, name)
    gate, slow, quick = threading.Event(), Collector(), Collector()

    def wait(message: Message) -> None:
        assert gate.wait(HANG_S)
        slow(message)

    group.on("s", wait)
    group.on("s", quick)
    count = 2 * QUEUED + 100
    group.publish_many(("s", str(number)) for number in range(count))
    wanted = [str(number).encode() for number in range(count)]
    assert quick.bodies(count) == wanted
    gate.set()
    assert slow.bodies(count) == wanted


def test_a_slow_handler_loses_nothing_where_the_server_is_away_when_its_queue_is_full(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to get a subscription of its own just then."""
    monkeypatch.setattr(callbacks, "QUEUED", 100)
    begun, published, killed, gate = (threading.Event() for _ in range(4))
    slow, quick = Collector(), Collector()
    failures: list[Exception] = []

    def wait(message: Message) -> None:
        begun.set()
        assert gate.wait(HANG_S)
        slow(message)

    once = threading.Lock()

    def kill(message: Message, _: object) -> None:
        """Before the message for which the queue has no place is given to handlers. A subscription of a handler's own
        asks again about that message."""
        if message.body == b"101" and once.acquire(blocking=False):
            assert published.wait(HANG_S)
            server.kill()
            killed.set()

    with server.connect() as client:
        group = kept(client, "g")
        group.on("s", wait, on_error=lambda error, _: failures.append(error))
        group.on("s", quick)
        group.filters.append(kill)
        count = 200
        group.publish("s", "0")
        assert begun.wait(HANG_S)
        group.publish_many(("s", str(number)) for number in range(1, count))
        published.set()
        assert killed.wait(HANG_S)
        server.start()
        gate.set()
        wanted = [str(number).encode() for number in range(count)]
        assert quick.bodies(count) == wanted
        assert slow.bodies(count) == wanted
        assert failures == []


def test_a_slow_handler_with_two_registrations_loses_nothing(tree: Client, name: str) -> None:
    """What the full queue of one refuses is not one that it got."""
    group = kept(tree, name)
    gate, slow, quick = threading.Event(), Collector(), Collector()

    def wait(message: Message) -> None:
        assert gate.wait(HANG_S)
        slow(message)

    for pattern in ("s", "#"):
        group.on(pattern, wait)
    group.on("s", quick)
    count = 3 * QUEUED
    group.publish_many(("s", str(number)) for number in range(count))
    assert len(quick.bodies(count)) == count
    gate.set()
    got = [slow.got.get(timeout=patient(60)).body for _ in range(count)]
    assert sorted(map(int, got)) == [*range(count)]


class LostCursor:
    """A cursor whose server is killed before the second command of a registration."""

    def __init__(self, file: File, kill: Callable[[], None]) -> None:
        self._file, self._kill, self._asked = file, kill, 0

    def ask(self, data: bytes) -> bytes:
        self._asked += 1
        if self._asked == 2:
            self._kill()
        return self._file.ask(data)

    def close(self) -> None:
        self._file.close()


@pytest.mark.process
@pytest.mark.parametrize("patterns", [(), ("a.*",), ("#",), ("a.*", "#")])
def test_a_registration_that_fails_leaves_nothing(
    server: Server, patterns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no part in the messages of the handler's other registrations, and no thread."""
    with server.connect(reconnect=HANG_S) as client:
        group, handler = client.group("g", create=True, ctl=["replay all"]), Collector()
        group.create("a.b")
        for pattern in patterns:
            group.on(pattern, handler)
        before, cursor = set(threading.enumerate()), group._origin.cursor

        def kill() -> None:
            server.kill()
            server.start()

        with monkeypatch.context() as lost:
            lost.setattr(group._origin, "cursor", lambda: LostCursor(cursor(), kill))
            with pytest.raises(mqfs.Disconnected):
                group.on("a.b", handler)
        for first in range(0, QUEUED + 200, 100):
            group.publish_many(("a.b", str(number)) for number in range(first, first + 100))
            if patterns:
                got = [handler.got.get(timeout=patient(60)).body for _ in range(100)]
                assert got == [str(number).encode() for number in range(first, first + 100)]
        names = {"mqfs-dispatcher", "mqfs-listener"}
        eventually(lambda: not [t for t in threading.enumerate() if t not in before and t.name in names])
        assert handler.got.empty()
        assert group.unsubscribe(handler=handler) == len(patterns)


def test_handlers_come_and_go(tree: Client, name: str) -> None:
    """The names of those that went do not add up to everything."""
    group = kept(tree, name)
    stays = Collector()
    group.on("stays", stays)
    for number in range(2 * COVERED):
        handler = Collector()
        group.once(f"reply.{number}", handler)
        group.publish_many([("stays", "x"), (f"reply.{number}", "y")])
        assert handler.bodies(1) == [b"y"]
    assert len(stays.bodies(2 * COVERED)) == 2 * COVERED
    dispatcher = group._registry._dispatcher
    assert dispatcher is not None
    assert set(dispatcher._names or ()) == {"stays"}


def test_without_dedup_a_handler_is_called_for_each_registration(tree: Client, name: str) -> None:
    group = kept(tree, name)
    once, often = Collector(), Collector()
    for pattern in ("a.*", "a.*", "*.b"):
        group.on(pattern, once)
        group.on(pattern, often, dedup=False)
    group.publish_many([("a.b", "x"), ("a.c", "y"), ("end.b", "z")])
    assert sorted(once.bodies(3)) == [b"x", b"y", b"z"]
    assert Counter(often.bodies(6)) == {b"x": 3, b"y": 2, b"z": 1}
    assert group.unsubscribe(handler=often) == 3


def test_once_of_many(tree: Client, name: str) -> None:
    group = kept(tree, name)
    handlers = [Collector() for _ in range(20)]
    registrations = [group.once("s", handler) for handler in handlers]
    group.publish_many(("s", str(number)) for number in range(5))
    for registration, handler in zip(registrations, handlers, strict=True):
        registration.join(HANG_S)
        assert not registration.active
        assert handler.bodies(1) == [b"0"]
        assert handler.got.empty()
    assert group.unsubscribe() == 0


# ---------------------------------------------------------------- filters


def test_filters_see_the_handlers_and_choose(tree: Client, name: str) -> None:
    group = kept(tree, name)
    one, two, view = Collector("one"), Collector("two"), Collector("view")
    group.bind("v", "s")
    for pattern, handler in (("s", one), ("#", two), ("v", view)):
        group.on(pattern, handler)
    seen: queue.SimpleQueue[tuple[bytes, frozenset[str]]] = queue.SimpleQueue()

    def choose(message: Message, handlers: set[object]) -> object:
        labels = frozenset(handler.label for handler in handlers)  # type: ignore[attr-defined]
        seen.put((message.body, labels))
        return None if message.body == b"all" else [h for h in handlers if h is one]

    group.filters.append(choose)  # type: ignore[arg-type]
    group.publish_many([("s", "all"), ("s", "one")])
    assert (one.bodies(2), two.bodies(1), view.bodies(1)) == ([b"all", b"one"], [b"all"], [b"all"])
    assert {seen.get(timeout=HANG_S) for _ in range(4)} == {
        (body, labels) for body in (b"all", b"one") for labels in ({"one", "two"}, {"view"})
        for labels in (frozenset(labels),)
    }  # fmt: skip
    group.filters.append(lambda message, handlers: ())
    group.publish("s", "nobody")
    group.filters.clear()
    group.publish("s", "again")
    assert two.bodies(1)[0] in (b"nobody", b"again")


def test_a_filter_may_say_not_now(tree: Client, name: str) -> None:
    """The message comes when it says so; others go past it. One over a view keeps its order."""
    group = kept(tree, name)
    handler, view = Collector(), Collector()
    group.bind("v", "#")
    ready = threading.Event()
    group.filters.append(lambda message, handlers: None if ready.is_set() or message.body != b"not yet" else mqfs.LATER)
    group.on("s", handler)
    group.on("v", view)
    group.publish_many([("s", "1"), ("s", "not yet"), ("s", "2")])
    assert handler.bodies(2) == [b"1", b"2"]
    assert view.bodies(1) == [b"1"]
    ready.set()
    assert handler.bodies(1) == [b"not yet"]
    assert view.bodies(2) == [b"not yet", b"2"]


def test_filters_of_a_handler_and_of_a_subscription_can_be_changed(tree: Client, name: str) -> None:
    group = kept(tree, name)
    handler = Collector()
    filters = [lambda message: message.body != b"no"]
    group.on("s", handler, filters=filters)
    with group.subscribe("s", filters=filters) as messages:
        group.publish_many([("s", "no"), ("s", "1")])
        assert handler.bodies(1) == [messages.get(HANG_S).body] == [b"1"]
        filters.append(lambda message: message.body != b"1")
        group.publish_many([("s", "1"), ("s", "2")])
        assert handler.bodies(1) == [messages.get(HANG_S).body] == [b"2"]
        filters.clear()
        group.publish("s", "no")
        assert handler.bodies(1) == [messages.get(HANG_S).body] == [b"no"]


def test_a_filter_that_raises_is_reported_and_the_rest_goes_on(tree: Client, name: str) -> None:
    group = kept(tree, name)
    handler, errors = Collector(), queue.SimpleQueue[tuple[str, bytes]]()

    def fail(message: Message) -> bool:
        if message.body == b"bad":
            raise ValueError("no good")
        return True

    group.on("s", handler, filters=fail, on_error=lambda error, message: errors.put((str(error), message.body)))  # type: ignore[union-attr]
    group.publish_many([("s", "bad"), ("s", "good")])
    assert handler.bodies(1) == [b"good"]
    assert errors.get(timeout=HANG_S) == ("no good", b"bad")


def test_async_handlers_are_what_filters_see(opening: Opening, name: str, backend: str) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with opening() as client:
                group = await client.group(name, create=True, ctl=["replay all"])
                called = anyio.Event()

                async def handler(message: Message) -> None:
                    called.set()

                async def other(message: Message) -> None:
                    raise AssertionError

                group.filters.append(lambda message, handlers: handlers - {other})
                for each in (handler, other):
                    await group.on("s", each)
                await group.publish("s", "x")
                await called.wait()

    anyio.run(main, backend=backend)


# ---------------------------------------------------------------- ten thousand


@pytest.fixture
def inside() -> Iterator[Group]:
    with mqfs.open(None) as client:
        yield kept(client, "g")


def register(group: Group, count: int) -> list[Registration]:
    def nothing(message: Message) -> None:
        pass

    return [group.on(f"user.{n}.#", lambda message, n=n: nothing(message)) for n in range(count)]


def test_a_handler_takes_little_memory(inside: Group) -> None:
    register(inside, 100)
    handlers = [Collector() for _ in range(1_000)]
    tracemalloc.start()
    try:
        for number, handler in enumerate(handlers):
            inside.on(f"account.{number}.#", handler)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / len(handlers) < HANDLER_BYTES


def test_a_message_costs_the_same_with_many_handlers(inside: Group) -> None:
    """In calls of the dispatcher, and of the publisher: no clock is needed to see what is linear."""
    registry = inside._registry
    costs = []
    inside.create("user.0.x")
    inside.publish("user.0.x", "x")
    for count in (1, MANY):
        register(inside, count)
        dispatcher = registry._dispatcher
        assert dispatcher is not None
        message = Message(1 << 40, "other.7.x", 0, b"x", {})
        dispatch = calls_once(lambda d=dispatcher, m=message: d._dispatch(m, d._matching(m.stream)))  # type: ignore[misc]
        publish = calls_once(lambda: inside.publish("user.0.x", "x"))
        costs.append((dispatch, publish))
        inside.unsubscribe()
    one, many = costs
    assert many[0] == one[0]
    assert many[1] < 2 * one[1]


# ---------------------------------------------------------------- handlers that raise what is no Exception


class Halt(BaseException):
    """What a program may raise to end, as SystemExit."""


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError, Halt])
@pytest.mark.parametrize("how", ["on", "own", "single", "work", "filter", "group filter", "on_error"])
def test_what_is_no_exception_ends_no_thread_of_the_library(
    tree: Client, name: str, how: str, kind: type[BaseException]
) -> None:
    group, got = kept(tree, name, "retries 1"), Collector()
    failures: queue.SimpleQueue[tuple[Exception, Message | None]] = queue.SimpleQueue()
    group.create("s")

    def fail(message: Message) -> bool:
        if message.body == b"bad":
            raise kind("no")
        return True

    def handle(item: Message | Claim) -> None:
        message = getattr(item, "message", item)
        if how == "on_error" and message.body == b"bad":
            raise ValueError
        if "filter" not in how:
            fail(message)
        got(message)

    def on_error(error: Exception, message: Message | None) -> None:
        failures.put((error, message))
        if how == "on_error":
            raise kind("no")

    if how == "group filter":
        group.filters.append(lambda message, handlers: fail(message) and handlers)
    ended: Registration | mqfs.Worker
    if how == "work":
        ended = group.work("w", handle, over="s", on_error=on_error)
    else:
        ended = group.on(
            "s", handle, existing=how == "own", single=how == "single", on_error=on_error,
            filters=fail if how == "filter" else (),
        )  # fmt: skip
    for body in "1", "bad", "2":
        group.publish("s", body, single=how == "single")
    assert got.bodies(2) == [b"1", b"2"]
    error, message = failures.get(timeout=HANG_S)
    assert isinstance(error, Exception)
    assert message is not None
    assert message.body == b"bad"
    if how != "on_error":
        assert isinstance(error.__cause__, kind)
    end = ended.stop if isinstance(ended, mqfs.Worker) else ended.unsubscribe
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(HANG_S)
    assert not ending.is_alive()
    assert "active" not in repr(ended)
