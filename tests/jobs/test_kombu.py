"""Programs of kombu over the transport: queues, exchanges, acknowledgements, limits, ends of servers."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.transport.virtual import UndeliverableWarning

import mqfs
import mqfs.kombu
from mqfs.client.types import File
from tests.support.eventually import eventually, unhurried
from tests.support.full_log import FILLER, FULL, fill_log
from tests.support.server import Server, short_folder

pytestmark = pytest.mark.process
SECOND = timedelta(seconds=1)
Connect = Callable[..., Connection]


@pytest.fixture
def connect(server: Server, name: str) -> Iterator[Connect]:
    made: list[Connection] = []

    def connect(address: str = server.address, **options: Any) -> Connection:
        connection = Connection(f"mqfs:///{name}", transport_options={"address": address, **options})
        made.append(connection)
        return connection

    yield connect
    for connection in made:
        connection.release()


def got(queue: Any) -> list[Any]:
    """What a queue has, acknowledged."""
    bodies = []
    while (message := queue.get()) is not None:
        bodies.append(message.payload)
        message.ack()
    return bodies


def eta(text: str) -> dict[str, str]:
    """The headers of a task of Celery."""
    return {"task": "add", "eta": text}


def drain(connection: Connection, count: int, into: list[Any]) -> None:
    """Deliver until `into` has that many."""
    while len(into) < count:
        connection.drain_events(timeout=20)


def test_a_message_is_got_until_it_is_acked(connect: Connect, server: Server, name: str) -> None:
    connection = connect()
    queue = Queue("a/queue", Exchange("tasks"), routing_key="k")(connection.channel())
    queue.declare()
    Producer(connection).publish({"n": 1}, exchange="tasks", routing_key="k")
    Producer(connection).publish(b"\xff\x00", routing_key="a/queue", content_type="application/data")
    first, second = queue.get(), queue.get()
    assert (first.payload, second.body, queue.get()) == ({"n": 1}, b"\xff\x00", None)
    second.ack()
    first.channel.qos.restore_unacked()
    assert got(queue) == [{"n": 1}]
    with server.connect() as client:
        consumer = client.group(f"{name}/queues", escape=True).stats().streams[mqfs.escape("a/queue")].consumer
    assert consumer is not None
    assert consumer.lag == 0


def test_bodies_are_readable_in_the_stream(connect: Connect, server: Server, name: str) -> None:
    connection = connect()
    with connection.SimpleQueue("plain") as queue:
        queue.put({"to": "grün"})
        with server.connect() as client:
            [message] = client.group(f"{name}/queues").history()
        assert '\\"to\\"' in message.body.decode()
        assert queue.get(timeout=10).payload == {"to": "grün"}


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("direct", ("a.b", "c"), {"first": ["a.b"], "second": ["c"]}),
        ("topic", ("a.#", "*.b"), {"first": ["a.b", "a.c.d"], "second": ["a.b", "x.b"]}),
        ("fanout", ("", ""), {"first": ["a.b", "c", "a.c.d", "x.b"], "second": ["a.b", "c", "a.c.d", "x.b"]}),
    ],
)
def test_exchanges_route_for_programs_that_did_not_bind(
    connect: Connect, kind: str, keys: tuple[str, str], expected: dict[str, list[str]]
) -> None:
    here, there, exchange = connect(), connect(), Exchange("e", kind)
    queues = [Queue(q, exchange, routing_key=k)(here.channel()) for q, k in zip(("first", "second"), keys, strict=True)]
    for queue in queues:
        queue.declare()
    producer = Producer(there, exchange=exchange)
    for key in ("a.b", "c", "a.c.d", "x.b"):
        producer.publish(key, routing_key=key)
    assert {queue.name: got(queue) for queue in queues} == expected
    queues[0].unbind_from(exchange, keys[0])
    producer.publish("later", routing_key="a.b")
    assert got(queues[0]) == []


def test_an_acknowledgement_by_another_thread_makes_room_at_once(connect: Connect) -> None:
    connection, bodies, threads = connect(), list[Any](), list[threading.Thread]()
    channel = connection.channel()
    queue = Queue("q")(channel)
    queue.declare()
    for number in range(3):
        Producer(connection).publish(number, routing_key="q")

    def work(body: Any, message: Any) -> None:
        bodies.append(body)
        threads.append(threading.Timer(0.2, message.ack))
        threads[-1].start()

    began = time.monotonic()
    with Consumer(channel, queue, callbacks=[work], prefetch_count=1):
        while len(bodies) < 3:
            connection.drain_events(timeout=20)
    for thread in threads:
        thread.join()
    assert bodies == [0, 1, 2]
    assert time.monotonic() - began < 20


def test_a_queue_that_is_removed_under_its_consumer(connect: Connect, server: Server, name: str) -> None:
    connection, queue = connect(), Queue("q")
    with server.connect() as client, Consumer(connection, queue):
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.01)
        client.group(f"{name}/queues").remove("q")
        with pytest.raises(connection.connection_errors, match="queue 'q': removed"):
            connection.drain_events(timeout=20)
    again, bodies = connect(), list[Any]()
    with Consumer(again, queue, callbacks=[lambda body, message: bodies.append(body)], no_ack=True):
        Producer(again).publish("again", routing_key="q")
        drain(again, 1, bodies)
    assert bodies == ["again"]


def test_higher_priorities_come_first(connect: Connect) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    for priority in (0, 9, 3, 6, 0):
        Producer(connection).publish(priority, routing_key="q", priority=priority)
    assert got(queue) == [9, 6, 3, 0, 0]


def test_a_task_with_an_eta_lies_in_the_server(connect: Connect) -> None:
    connection = connect()
    queue, producer = Queue("q")(connection.channel()), Producer(connection)
    queue.declare()

    def taken(times: int) -> tuple[list[tuple[Any, Any]], bool]:
        """The tasks in the order in which they come, and whether the last one comes in its time."""
        bodies, due = list[Any](), datetime.now(UTC) + times * SECOND
        producer.publish("later", routing_key="q", headers=eta(due.isoformat()))
        producer.publish("past", routing_key="q", headers=eta("2020-01-01T00:00:00"))
        producer.publish("in a year", routing_key="q", headers=eta((due + timedelta(days=365)).isoformat()))

        def take(body: Any, message: Any) -> None:
            bodies.append((body, message.headers["eta"]))
            message.ack()

        with Consumer(connection, [queue], callbacks=[take]):
            drain(connection, 2, bodies)
        return bodies, timedelta() <= datetime.now(UTC) - due < times * SECOND

    # without the header a worker of Celery runs them at once
    unhurried(taken, ([("past", None), ("later", None)], True))


@pytest.mark.parametrize("size", [1_050_000, 2_500_000])
def test_a_task_that_is_too_long_to_be_delayed_is_held_by_a_worker(
    connect: Connect, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes at once, and says until when; without that a worker of Celery would run it at once."""
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    due = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    Producer(connection).publish("x" * size, routing_key="q", headers=eta(due))
    message = queue.get()
    assert message is not None
    assert (message.payload, message.headers["eta"]) == ("x" * size, due)
    message.ack()
    assert "bytes cannot be delayed, a worker holds them until" in caplog.text


def test_an_eta_that_is_no_time_is_refused(connect: Connect) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    with pytest.raises(connection.channel_errors, match=r"header eta 'soon' \(expected a time of ISO 8601\)"):
        Producer(connection).publish("x", routing_key="q", headers=eta("soon"))
    assert got(queue) == []


@pytest.mark.parametrize("text", ["soon", "2100-01-01T00:00:00", "2020-01-01T00:00:00"])
def test_an_eta_of_another_program_is_its_own(connect: Connect, text: str) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    Producer(connection).publish("x", routing_key="q", headers={"eta": text})
    message = queue.get()
    assert message is not None
    assert message.headers["eta"] == text


def test_what_is_delivered_again_says_so(connect: Connect) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    Producer(connection).publish("x", routing_key="q")
    message = queue.get()
    assert message.delivery_info["redelivered"] is False
    message.requeue()
    again = eventually(queue.get)
    assert (again.payload, again.delivery_info["redelivered"]) == ("x", True)


def test_a_message_expires(connect: Connect) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    Producer(connection).publish("gone", routing_key="q", expiration=0.001)
    Producer(connection).publish("there", routing_key="q")
    assert got(queue) == ["there"]


def test_a_rejected_message_is_a_dead_letter(connect: Connect, server: Server, name: str) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    Producer(connection).publish("bad", routing_key="q")
    queue.get().reject()
    with server.connect() as client:
        group = client.group(f"{name}/queues")
        group.publish("q", "no message of kombu")
        assert queue.get() is None
        reasons = [message.headers["reason"] for message in group.history(pattern="dead")]
    assert reasons[0] == "rejected"
    assert reasons[1].startswith("not a message of kombu")


def test_what_a_limit_holds_back_is_for_others(connect: Connect) -> None:
    """A read that waits would claim a message for a worker that may not have more."""
    busy, idle, bodies = connect(), connect(), list[Any]()
    queues = [Queue("one"), Queue("two")]
    channel = busy.channel()
    for queue in queues:
        queue(channel).declare()
    held = list[Any]()
    consumer = Consumer(channel, queues, callbacks=[lambda body, message: held.append(message)], prefetch_count=1)
    consumer.consume()
    Producer(busy).publish(1, routing_key="one")
    drain(busy, 1, held)
    for queue in queues:
        Producer(busy).publish(queue.name, routing_key=queue.name)
    with Consumer(idle, queues, callbacks=[lambda body, message: (bodies.append(body), message.ack())]):
        drain(idle, 2, bodies)
    assert sorted(bodies) == ["one", "two"]
    held.pop().ack()
    Producer(busy).publish(2, routing_key="one")
    drain(busy, 1, held)


def test_what_a_channel_had_is_requeued_when_it_ends(connect: Connect) -> None:
    first, second = connect(), connect()
    queue = Queue("q")(first.channel())
    queue.declare()
    Producer(first).publish("x", routing_key="q")
    message = queue.get()
    first.release()
    again = Queue("q")(second.channel()).get()
    assert (again.payload, message.acknowledged) == ("x", False)
    again.ack()


def test_what_is_requeued_too_often_is_a_dead_letter(connect: Connect, server: Server, name: str) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    Producer(connection).publish("poison", routing_key="q")
    with server.connect() as client:
        queues = client.group(f"{name}/queues")
        queues.ctl("retries 3", "backoff 0s 0s")
        tries = 0
        while (message := queue.get()) is not None:
            tries += 1
            message.requeue()
        [dead] = queues.history(pattern="dead")
    assert (tries, dead.headers["reason"]) == (3, "nack")


def test_without_acknowledgement(connect: Connect) -> None:
    connection, bodies = connect(), list[Any]()
    queue = Queue("q")(connection.channel())
    queue.declare()
    for n in range(3):
        Producer(connection).publish(n, routing_key="q")
    assert queue.get(no_ack=True).payload == 0
    with Consumer(connection, [queue], callbacks=[lambda body, _: bodies.append(body)], no_ack=True):
        drain(connection, 2, bodies)
    connection.release()
    with connect() as other:
        assert bodies == [1, 2]
        assert Queue("q")(other.channel()).get() is None


def test_drain_events_ends_in_time(connect: Connect) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    began = time.monotonic()
    with Consumer(connection, [queue]), pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 5


def test_queues_without_a_consumer_end(connect: Connect, server: Server, name: str) -> None:
    connection = connect()
    used = Queue("used", Exchange("e", "fanout"), auto_delete=True, expires=0.001)(connection.channel())
    used.declare()
    with Consumer(connection, [used]):
        Queue("left", Exchange("e", "fanout"), auto_delete=True, expires=0.001)(connection.channel()).declare()
        Queue("new", auto_delete=True)(connection.channel()).declare()  # each declaration looks at the others
        with server.connect() as client:
            assert client.group(f"{name}/queues").streams() == ["new", "used"]
            assert len(client.group(f"{name}/bindings").streams()) == 2  # and the marks


def test_a_message_for_no_queue_is_warned_of(connect: Connect, server: Server, name: str) -> None:
    with pytest.warns(UndeliverableWarning, match="no queue 'nowhere'"):
        Producer(connect()).publish("x", routing_key="nowhere")
    with server.connect() as client:
        assert client.group(f"{name}/queues").streams() == []


def test_purge_and_delete(connect: Connect) -> None:
    connection = connect()
    queue = Queue("q", Exchange("e"), routing_key="q")(connection.channel())
    queue.declare()
    for n in range(5):
        Producer(connection).publish(n, routing_key="q")
    assert (queue.purge(), got(queue)) == (5, [])
    Producer(connection).publish("in flight", routing_key="q")
    held = queue.get()
    for n in range(3_000):
        Producer(connection).publish(n, routing_key="q")
    assert (queue.purge(), queue.purge(), got(queue)) == (3_000, 0, [])
    held.requeue()
    assert eventually(queue.get).payload == "in flight"
    queue.delete()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndeliverableWarning)
        Producer(connection).publish(1, exchange="e", routing_key="q")
    with pytest.raises(connection.channel_errors, match="no queue 'q'"):
        Queue("q", passive=True)(connection.channel()).queue_declare(passive=True)


@pytest.mark.parametrize("length", [80, 90, 255])
def test_a_binding_of_long_names(connect: Connect, length: int) -> None:
    """It is longer than the name of a stream, and other programs know it."""
    here, there = connect(), connect()
    exchange, key, name = "жe"[length % 2] * length, "k" * length, "q" * length
    queue = Queue(name, Exchange(exchange, "topic"), routing_key=f"{key}.*")(here.channel())
    queue.declare()
    Queue(name, passive=True)(here.channel()).queue_declare(passive=True)
    producer = Producer(there, exchange=Exchange(exchange, "topic"))
    producer.publish(1, routing_key=f"{key}.x")
    producer.publish(2, routing_key=f"{key}.x.y")
    assert got(queue) == [1]
    queue.unbind_from(Exchange(exchange, "topic"), f"{key}.*")
    producer.publish(3, routing_key=f"{key}.x")
    assert got(queue) == []


def test_the_stream_of_dead_letters_is_no_queue(connect: Connect) -> None:
    connection = connect()
    with pytest.raises(connection.channel_errors, match=r"queue 'dead': group .* has its dead letters there"):
        Queue("dead")(connection.channel()).declare()


def test_a_queue_that_is_removed_while_its_consumer_is_away_is_not_made_again(connect: Connect) -> None:
    """It would have no binding: a worker of Celery was deaf to its remote control."""
    with short_folder() as folder, Server.at(folder) as server:
        connection, other, bodies = connect(server.address), connect(server.address), list[Any]()
        queue = Queue("q", Exchange("e", "fanout"))
        with Consumer(connection, [queue]):
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.1)
            server.restart()
            queue(other.channel()).delete()
            with pytest.raises(connection.connection_errors, match="queue 'q': removed under its consumer"):
                connection.drain_events(timeout=20)
        again = connect(server.address)
        with Consumer(again, queue, callbacks=[lambda body, message: bodies.append(body)], no_ack=True):
            Producer(other, exchange=Exchange("e", "fanout")).publish("x")
            drain(again, 1, bodies)
        for one in (connection, other, again):
            one.release()


def test_a_server_that_is_killed_is_waited_for(connect: Connect) -> None:
    with short_folder() as folder, Server.at(folder) as server:
        connection, bodies = connect(server.address), list[Any]()
        queue = Queue("q")(connection.channel())
        queue.declare()
        Producer(connection).publish("held", routing_key="q")
        held = queue.get()
        with Consumer(connection, [queue], callbacks=[lambda body, message: (bodies.append(body), message.ack())]):
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0)
            server.restart()
            drain(connection, 1, bodies)
            with pytest.raises((mqfs.Stale, mqfs.Disconnected)) as lost:
                held.ack()
            assert isinstance(lost.value, connection.connection_errors)
            Producer(connection).publish("after", routing_key="q")
            drain(connection, 2, bodies)
        assert bodies == ["held", "after"]
        connection.release()


def test_urls() -> None:
    with pytest.raises(mqfs.BadAddress, match="host 'there' without a port"):
        Connection("mqfs://there/jobs").connect()
    with Connection("mqfs://127.0.0.1:1/jobs") as connection, pytest.raises(connection.connection_errors):
        connection.transport.establish_connection()


# ---------------------------------------------------------------- what is refused


def test_a_rejected_message_that_cannot_be_a_dead_letter_comes_again(
    connect: Connect, server: Server, name: str
) -> None:
    """It takes no place of those that `prefetch_count` allows."""
    bodies = list[Any]()
    with server.connect() as client:
        ctl = [*mqfs.kombu._QUEUES, *FULL, "backoff 1ms 1ms", "retries 0"]
        group = client.group(f"{name}/queues", create=True, ctl=ctl, escape=True)
        connection = connect()
        queue = Queue("q")(connection.channel())
        queue.declare()
        Producer(connection).publish(1, routing_key="q")
        fill_log(group)

        def work(body: Any, message: Any) -> None:
            bodies.append(body)
            message.reject()

        with Consumer(connection, [queue], callbacks=[work], prefetch_count=1):
            drain(connection, 3, bodies)
            group.purge(FILLER)
            drain(connection, 4, bodies)
        assert group.stats().dead_letters == 1


class Refusing:
    """Handles of a channel whose commands a full disk refuses, as long as it is so."""

    def __init__(self, channel: Any, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
        """`lines`: beginnings of those that are refused."""
        self.is_full = True
        for source in channel._sources.values():
            monkeypatch.setattr(source.claims, "_command", self._through(source.claims._command, lines))

    def _through(self, command: Callable[[File, str], None], lines: tuple[str, ...]) -> Callable[[File, str], None]:
        def through(file: File, line: str) -> None:
            if self.is_full and line.startswith(lines):
                raise mqfs.DiskFull("no room")
            command(file, line)

        return through


@pytest.mark.parametrize("verb", ["ack", "reject", "requeue"])
def test_what_a_full_disk_refuses_can_be_tried_again(
    connect: Connect, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    Producer(connection).publish(1, routing_key="q")
    message = queue.get()
    disk = Refusing(message.channel, monkeypatch, "ack", "nack", "dead", "release")
    with pytest.raises(mqfs.DiskFull):
        getattr(message, verb)()
    disk.is_full = False
    getattr(message, verb)()
    assert not message.channel.claims
    if verb == "requeue":
        assert eventually(lambda: got(queue)) == [1]
    assert got(queue) == []


def test_one_message_that_is_not_restored_holds_no_other_back(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    queue = Queue("q")(connection.channel())
    queue.declare()
    for number in range(3):
        Producer(connection).publish(number, routing_key="q")
    messages = [queue.get() for _ in range(3)]
    channel = messages[0].channel
    disk = Refusing(channel, monkeypatch, f"release {channel.claims[messages[0].delivery_tag].sequence}")
    with pytest.raises(mqfs.DiskFull):
        channel.basic_recover(requeue=True)
    assert [*channel.claims] == [messages[0].delivery_tag]
    disk.is_full = False
    channel.basic_recover(requeue=True)
    assert got(queue) == [0, 1, 2]


# ---------------------------------------------------------------- consumers that end


def handles(server: Server, name: str, queue: str) -> int:
    with server.connect() as client:
        consumer = client.group(f"{name}/queues", escape=True).stats().streams[queue].consumer
    return 0 if consumer is None else consumer.handles


def test_a_consumer_that_is_cancelled_uses_its_queue_no_more(connect: Connect, server: Server, name: str) -> None:
    """Once what it has is acknowledged, which may be afterwards."""
    connection, messages = connect(), list[Any]()
    channel = connection.channel()
    queue = Queue("q")(channel)
    queue.declare()
    for number in range(3):
        Producer(connection).publish(number, routing_key="q")
    callbacks = [lambda body, message: messages.append(message)]
    with Consumer(channel, queue, callbacks=callbacks, prefetch_count=2):
        drain(connection, 2, messages)
    messages[0].ack()
    assert handles(server, name, "q") == 1, "a message is not settled"
    messages[1].ack()
    eventually(lambda: handles(server, name, "q") == 0)
    assert got(queue) == [2]


def test_a_queue_is_used_as_long_as_one_tag_consumes_it(connect: Connect, server: Server, name: str) -> None:
    channel = connect().channel()
    queue = Queue("q")(channel)
    one, other = Consumer(channel, queue), Consumer(channel, queue)
    one.consume()
    other.consume()
    one.cancel()
    assert handles(server, name, "q") == 1
    other.cancel()
    eventually(lambda: handles(server, name, "q") == 0)


def test_a_channel_over_many_queues_one_after_another_holds_none(connect: Connect) -> None:
    connection = connect()
    channel = connection.channel()
    for number in range(5):
        queue = Queue(f"reply-{number}", auto_delete=True)(channel)
        queue.declare()
        with Consumer(channel, queue):
            pass
    assert channel._sources == {}


def test_the_time_of_a_queue_counts_from_its_last_use(connect: Connect, server: Server, name: str) -> None:
    """Not from its declaration: it has long passed when a consumer of a queue in use connects again."""
    connection, other = connect(), connect()
    queue = Queue("q", expires=3_600)(connection.channel())
    queue.declare()

    def look() -> list[str]:
        Queue("look", auto_delete=True)(other.channel()).declare()
        with server.connect() as client:
            return client.group(f"{name}/queues").streams()

    consumer = Consumer(connection, [queue])
    consumer.consume()
    with server.connect() as client:  # its time is past at once
        rows = client.group(f"{name}/temporary")
        [row] = rows.history(pattern="q")
        rows.publish("q", json.dumps({**row.json(), "expires_s": -1}))
    assert look() == ["look", "q"], "it is used"
    connection.release()
    eventually(lambda: handles(server, name, "q") == 0)
    assert look() == ["look", "q"], "it was used until now"
    assert look() == ["look"]
