"""Actors: producers, consumers, workers, and the two sides of a round trip. Each runs on its own thread.

The measured loops and their counts. Only child.py talks to the parent process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs

from mqfs.bench import payload
from mqfs.bench.drivers import PING, PONG, STREAM, Driver
from mqfs.bench.histogram import Histogram

_clock = time.monotonic_ns
_SECOND_NS = 10**9
_APART_NS = 10**18  # at most: 31 years, which the clock and an Event can wait for


@attrs.frozen
class Load:
    """The parameters of one run, the same for all its actors."""

    group: str
    producers: int
    size: int
    batch: int = 1
    messages: int | None = None  # of all producers
    seconds: float | None = None
    rate: float | None = None  # messages a second, of all producers
    round_trips: int = 0
    marks: bool = True  # each producer publishes an end mark, for consumers; workers get one each from elsewhere


class Actor:
    """A measured loop. `count` is what progress shows."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.count = 0
        self.begun_ns = self.ended_ns = 0
        self.histogram = Histogram()
        self.stop = threading.Event()

    def prepare(self, driver: Driver) -> None:
        """Open what the loop needs. All actors begin when all are prepared."""
        raise NotImplementedError

    def run(self) -> None:
        self.begun_ns = self.ended_ns = _clock()
        self.act()

    def act(self) -> None:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "begun_ns": self.begun_ns,
            "ended_ns": self.ended_ns,
            "histogram": self.histogram.to_list(),
        }


class Producer(Actor):
    """Publishes its share, at its share of the rate, then an end mark."""

    def prepare(self, driver: Driver) -> None:
        self._one, self._many = driver.publisher(self.load.group, STREAM)
        self._tail = payload.tail(self.load.size)

    def act(self) -> None:
        load = self.load
        most = limit(load.messages, load.producers, self.number)
        end_ns = self.begun_ns + int(load.seconds * _SECOND_NS) if load.seconds is not None else None
        turns = self._turns(load.rate, end_ns) if load.rate is not None else endless()
        for due_ns in turns:
            count = min(load.batch, most - self.count)
            if not count or self.stop.is_set() or (end_ns is not None and max(due_ns, self.ended_ns) >= end_ns):
                break
            self._send(count, due_ns)
        if load.marks:
            self.mark()

    def mark(self) -> None:
        self._one(payload.make(self.number, self.count, 0, self._tail, payload.END))

    def _turns(self, rate: float, end_ns: int | None) -> Iterator[int]:
        """When each batch is due; one that is due after the end comes at the end. A late batch counts as sent then: the
        wait for the one before it is measured, too."""
        load = self.load
        apart_ns = min(_SECOND_NS * load.producers * load.batch / rate, _APART_NS)
        due_ns = self.begun_ns + apart_ns * self.number / load.producers
        while not self.stop.is_set():
            left_s = ((due_ns if end_ns is None else min(due_ns, end_ns)) - _clock()) / _SECOND_NS
            if left_s > 0 and self.stop.wait(left_s):
                return
            yield int(due_ns)
            due_ns += apart_ns

    def _send(self, count: int, due_ns: int) -> None:
        if count == 1:
            self._one(payload.make(self.number, self.count, due_ns, self._tail))
        else:
            first = self.count
            self._many([payload.make(self.number, first + i, due_ns, self._tail) for i in range(count)])
        self.count += count
        self.ended_ns = _clock()
        self.histogram.add(self.ended_ns - due_ns)


def limit(messages: int | None, producers: int, number: int) -> int:
    """The most messages that one producer publishes."""
    if messages is None:
        return 2**32 - 1
    return messages // producers + (number < messages % producers)


def endless() -> Iterator[int]:
    """Due times without a rate: always now."""
    while True:
        yield _clock()


class Receiver(Actor):
    """The common part of consumers and workers."""

    check: payload.Order | payload.QueueCheck

    def report(self) -> dict[str, Any]:
        return {**super().report(), "checks": attrs.asdict(self.check.result)}

    def _count(self, data: bytes) -> None:
        sent_ns = self.check.count(data)
        if sent_ns:
            self.ended_ns = _clock()
            self.histogram.add(self.ended_ns - sent_ns)
            self.count += 1


class Consumer(Receiver):
    """Receives every message, until all producers have ended."""

    check: payload.Order

    def prepare(self, driver: Driver) -> None:
        self.check = payload.Order(self.load.producers, self.load.size)
        self._bodies = driver.subscribe(self.load.group, STREAM, self.load.size)

    def act(self) -> None:
        check, count = self.check, self._count
        for data in self._bodies:
            count(data)
            if data[2] == payload.END and check.at_end:
                return

    def report(self) -> dict[str, Any]:
        gaps = {"next": self.check.next, "missing": [len(missing) for missing in self.check.missing]}
        return {**super().report(), **gaps}


class Worker(Receiver):
    """Receives a share and acknowledges each, until it receives an end mark."""

    check: payload.QueueCheck

    def prepare(self, driver: Driver) -> None:
        self.check = payload.QueueCheck(self.load.producers, self.load.size)
        self._claims = driver.claim(self.load.group, self.load.size)

    def act(self) -> None:
        check, count = self.check, self._count
        for data, ack in self._claims:
            count(data)
            if ack is not None:
                ack()
            if check.at_end:
                break
        self._claims.close()


class Pinger(Actor):
    """Publishes a message and waits for its echo, one after another."""

    def prepare(self, driver: Driver) -> None:
        self._publish, _ = driver.publisher(self.load.group, PING)
        self._answers = driver.subscribe(self.load.group, PONG, self.load.size)
        self._tail = payload.tail(self.load.size)

    def act(self) -> None:
        until_ns = self.begun_ns + int((self.load.seconds or 5.0) * _SECOND_NS)
        for number in range(self.load.round_trips):
            sent_ns = _clock()
            if self.stop.is_set() or sent_ns > until_ns:
                break
            ping = payload.make(0, number, sent_ns, self._tail)
            self._publish(ping)
            if next(self._answers) != ping:
                raise AssertionError("round trip failed: the echo differs from the message")
            self.histogram.add(_clock() - sent_ns)
            self.count += 1
        self._publish(payload.make(0, self.count, 0, self._tail, payload.END))
        self.ended_ns = _clock()


class Echo(Actor):
    """Publishes again each message that it receives."""

    def prepare(self, driver: Driver) -> None:
        self._publish, _ = driver.publisher(self.load.group, PONG)
        self._pings = driver.subscribe(self.load.group, PING, self.load.size)

    def act(self) -> None:
        for data in self._pings:
            if data[2] == payload.END:
                return
            self._publish(data)


ROLES: dict[str, type[Actor]] = {
    "producer": Producer,
    "consumer": Consumer,
    "worker": Worker,
    "pinger": Pinger,
    "echo": Echo,
}
