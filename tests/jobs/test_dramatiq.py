"""The broker of dramatiq without its workers: what settles a message, and what that costs a consumer."""

from __future__ import annotations

from collections.abc import Iterator

import dramatiq
import pytest
from dramatiq import Consumer, MessageProxy
from dramatiq.errors import ConnectionClosed

from mqfs import errors
from mqfs.client import Group
from mqfs.client.types import File
from mqfs.dramatiq import SETTINGS, MqfsBroker, MqfsConsumer
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
