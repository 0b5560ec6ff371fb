"""The broker of dramatiq, mostly without its workers: what settles a message, and what that costs a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dramatiq
import pytest
from dramatiq import Consumer, MessageProxy, Worker
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Retries

from mqfs import errors
from mqfs.client import Group
from mqfs.client.types import File
from mqfs.dramatiq import SETTINGS, MqfsBroker, MqfsConsumer
from tests.support.eventually import eventually
from tests.support.full_log import FILLER, FULL, fill_log
from tests.support.server import Server

pytestmark = pytest.mark.process
PREFETCH = 2


@pytest.fixture
def group(server: Server, name: str) -> Iterator[Group]:
    """That of the broker, by the files alone."""
    with server.connect(transport="9p") as client:
        yield client.group(name, create=True, ctl=[*SETTINGS, *FULL, "backoff 1ms 1ms", "retries 0"])


@pytest.fixture
def broker(server: Server, name: str, group: Group) -> Iterator[MqfsBroker]:
    broker = MqfsBroker(server.address, group=name, middleware=[])
    broker.declare_queue("q")
    yield broker
    broker.close()


def consume(broker: MqfsBroker) -> Consumer:
    return broker.consume("q", PREFETCH, timeout=20_000)


def received(consumer: Consumer) -> MessageProxy:
    message = next(consumer)
    assert message is not None
    return message


def publish(broker: MqfsBroker, *numbers: int) -> None:
    for number in numbers:
        broker.enqueue(dramatiq.Message("q", "actor", (number,), {}, {}))


def free(consumer: Consumer) -> int:
    """Messages that it may claim yet."""
    assert isinstance(consumer, MqfsConsumer)
    return consumer._free._value


def test_a_message_that_cannot_be_a_dead_letter_comes_again(broker: MqfsBroker, group: Group) -> None:
    """Each that it kept instead would leave the consumer a place less, up to its silent end."""
    publish(broker, 1)
    fill_log(group)
    consumer = consume(broker)
    for _ in range(3 * PREFETCH):
        message = received(consumer)
        assert message.args == (1,)
        consumer.nack(message)
    group.purge(FILLER)
    consumer.nack(received(consumer))
    assert group.stats().dead_letters == 1
    assert free(consumer) == PREFETCH


def test_what_is_no_message_and_cannot_be_a_dead_letter_takes_no_place(broker: MqfsBroker, group: Group) -> None:
    group.publish("q", b"garbage")
    fill_log(group)
    consumer = consume(broker)
    for _ in range(3 * PREFETCH):
        assert next(consumer) is None
    assert group.stats().streams["q"].consumer.failed >= 3 * PREFETCH
    assert free(consumer) == PREFETCH


@pytest.mark.parametrize("verb", ["ack", "nack"])
def test_what_a_full_disk_refuses_is_tried_again(
    broker: MqfsBroker, group: Group, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(broker, 1)
    consumer = consume(broker)
    message = received(consumer)

    def refused(file: File, line: str) -> None:
        raise errors.DiskFull("no room")

    with monkeypatch.context() as full:
        full.setattr(message.claim._claims, "_command", refused)
        with pytest.raises(ConnectionClosed, match="no room"):
            getattr(consumer, verb)(message)
        consumer.requeue([message])
        assert free(consumer) == PREFETCH - 1
    getattr(consumer, verb)(message)
    assert free(consumer) == PREFETCH
    assert group.stats().streams["q"].consumer.claimed == 0


def test_a_message_of_the_consumer_before_makes_no_place(broker: MqfsBroker) -> None:
    """dramatiq replaces a consumer that failed, and settles by the new one what the old one gave."""
    publish(broker, 1, 2)
    before, after = consume(broker), consume(broker)
    early, late = received(before), received(after)
    after.ack(early)
    assert (free(before), free(after)) == (PREFETCH, PREFETCH - 1)
    after.ack(late)
    assert free(after) == PREFETCH


def test_a_consumer_that_cannot_receive_keeps_its_places(broker: MqfsBroker, server: Server) -> None:
    consumer = consume(broker)
    broker.close()
    with pytest.raises((ConnectionClosed, StopIteration)):
        next(consumer)
    assert free(consumer) == PREFETCH


@contextmanager
def working(broker: MqfsBroker, job: Callable[[str], None]) -> Iterator[dramatiq.Actor[[str], None]]:
    """An actor that is retried, and a worker for it."""
    broker.add_middleware(Retries(min_backoff=1, max_backoff=1))
    actor = dramatiq.actor(job, broker=broker, queue_name="q", actor_name="job")
    worker = Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        yield actor
    finally:
        worker.stop()


@pytest.mark.parametrize("reason", ["too long to be delayed", "no room"])
def test_a_job_whose_retry_is_refused_runs_again(broker: MqfsBroker, group: Group, reason: str) -> None:
    """dramatiq logs the refusal, and acknowledges the job that failed."""
    runs = list[int]()

    def fail_once(text: str) -> None:
        runs.append(len(text))
        if len(runs) == 1:
            if reason == "no room":
                fill_log(group)
            raise RuntimeError("the first time")

    size = 1_100_000 if reason != "no room" else 1
    with working(broker, fail_once) as actor:
        actor.send("x" * size)
        assert eventually(lambda: len(runs) == 2)
        assert eventually(lambda: group.stats().streams["q"].consumer.lag == 0)
    assert (runs, group.stats().dead_letters) == ([size, size], 0)


def test_a_job_whose_retries_are_all_refused_is_a_dead_letter(broker: MqfsBroker, group: Group) -> None:
    group.ctl("retries 3")
    runs = list[int]()

    def fail(text: str) -> None:
        runs.append(len(text))
        raise RuntimeError("each time")

    with working(broker, fail) as actor:
        actor.send("x" * 1_100_000)
        assert eventually(lambda: group.stats().dead_letters)
    assert group.stats().streams["q"].consumer.lag == 0
    assert runs == [1_100_000] * 3


def test_the_stream_of_dead_letters_is_no_queue(broker: MqfsBroker) -> None:
    with pytest.raises(errors.BadName, match=r"queue 'dead': group .* has its dead letters there"):
        broker.declare_queue("dead")
    assert "dead" not in broker.queues


def test_a_queue_that_was_removed_is_joined(broker: MqfsBroker, group: Group) -> None:
    group.remove("q")
    broker.join("q", timeout=20_000)
