"""Actors: producers, consumers, workers, and the two sides of a round trip. Each runs on its own thread.

Here are the measured loops and their counts. A histogram of durations has a constant size, as durations that differ by
less than 3 % are counted as one. A driver is how a process of the bench reaches its group: by the library, or by the
files of a mount. Only children.py talks to the parent process.
"""

from __future__ import annotations

import builtins
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import attrs

from mqfs.bench import payload
from mqfs.client.client import Client, connect, open
from mqfs.client.delivery import Claims
from mqfs.client.publisher import Durability
from mqfs.errors import BadRequest
from mqfs.syntax.lines import command_lines

_STEPS = 32  # per doubling
_BITS = 6  # durations below 2 × _STEPS ns are exact
_SIZE = (64 - _BITS) * _STEPS + 2 * _STEPS
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Histogram:
    """Counts of durations, in nanoseconds."""

    __slots__ = ("counts", "most")

    def __init__(self, counts: Sequence[int] = (), most: int = 0) -> None:
        self.counts = list(counts) + [0] * (_SIZE - len(counts))
        self.most = most

    def add(self, ns: int) -> None:
        shift = ns.bit_length() - _BITS
        if shift > 0:
            self.counts[(shift * _STEPS) + (ns >> shift)] += 1
        else:
            self.counts[ns if ns > 0 else 0] += 1
        if ns > self.most:
            self.most = ns

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.most = max(self.most, other.most)

    def __len__(self) -> int:
        return sum(self.counts)

    def bars(self) -> Iterator[tuple[int, int]]:
        """Yield the middle of each counted duration, and its count."""
        for at, count in enumerate(self.counts):
            if count:
                yield min(_middle(at), self.most), count

    def percentile(self, percent: float) -> int:
        """Return a percentile in nanoseconds; 0 if nothing was counted."""
        wanted = len(self) * percent / 100
        passed = 0
        for ns, count in self.bars():
            passed += count
            if passed >= wanted:
                return ns
        return self.most

    def to_list(self) -> list[int]:
        """Return the histogram for another process: `most`, then the counts up to the last that is not 0."""
        counts = list(self.counts)
        while counts and not counts[-1]:
            counts.pop()
        return [self.most, *counts]

    @classmethod
    def from_list(cls, row: Sequence[int]) -> Histogram:
        return cls(row[1:], row[0])


def _middle(at: int) -> int:
    shift = max(0, at // _STEPS - 1)
    return ((at - shift * _STEPS) << shift) + (1 << shift) // 2


# ------------------------------------------------------------ drivers


STREAM, PING, PONG, CONSUMER = "bench", "ping", "pong", "bench"
Delivery: TypeAlias = tuple[bytes, Callable[[], object] | None]  # a body and its acknowledgement


@attrs.frozen
class Place:
    """The location of the tree."""

    transport: str
    address: str = ""
    mount: str = ""
    store: str = ""  # of an embedded engine
    wait: Durability = "committed"
    prefetch: int = 1  # of workers: messages that one claims at once
    server: int = 0  # the process of the server, if the bench started it


class Driver(Protocol):
    """The calls that actors make. Thread-safe."""

    def prepare(self, group: str, lines: Sequence[str], streams: Sequence[str]) -> None: ...

    def remove(self, group: str, streams: Sequence[str]) -> None:
        """Remove a group, protected or not. Raises MqfsError, OSError."""
        ...

    def publisher(self, group: str, stream: str) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        """Return functions that publish one message and many. They return once messages are kept, as `wait` demands."""
        ...

    def subscribe(self, group: str, stream: str, size: int) -> Iterator[bytes]:
        """Yield every message of the stream from its beginning. `size`: of a message."""
        ...

    def claim(self, group: str, size: int) -> Generator[Delivery, None, None]:
        """Yield messages claimed by the consumer. `close` sends the outstanding acknowledgements."""
        ...

    def count_acknowledged(self, group: str) -> int:
        """Return the number of acknowledged messages in the tree's own statistics."""
        ...

    def close(self) -> None: ...


def open_driver(place: Place) -> Driver:
    if place.transport == "file":
        return Files(place.mount)
    if place.transport == "embedded":
        return Library(open(place.store), place)
    return Library(connect(place.address, transport=place.transport, reconnect=False), place)


class Library:
    """A driver over mqfs.client."""

    def __init__(self, client: Client, place: Place) -> None:
        self._client, self._wait, self._prefetch = client, place.wait, place.prefetch

    def prepare(self, group: str, lines: Sequence[str], streams: Sequence[str]) -> None:
        made = self._client.group(group, create=True, ctl=lines)
        made.create(*streams)

    def remove(self, group: str, streams: Sequence[str]) -> None:
        made = self._client.group(group)
        made.ctl("protect off")
        for consumer in made.consumers():
            made.remove_consumer(consumer)
        for stream in streams:
            made.remove(stream)
        self._client.remove_group(group)

    def publisher(self, group: str, stream: str) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        to = self._client.group(group)
        publish, publish_many, wait = to.publish, to.publish_many, self._wait
        return (
            lambda body: publish(stream, body, create=False, wait=wait),
            lambda bodies: publish_many([(stream, body) for body in bodies], create=False, wait=wait),
        )

    def subscribe(self, group: str, stream: str, size: int) -> Iterator[bytes]:
        reading = self._client.group(group).subscribe(stream, existing=True)
        return (message.body for message in reading)

    def claim(self, group: str, size: int) -> Generator[Delivery, None, None]:
        claims = self._client.group(group).consume(CONSUMER, create=False, prefetch=self._prefetch)
        return self._bodies(claims)

    def _bodies(self, claims: Claims) -> Generator[Delivery, None, None]:
        try:
            for claim in claims:
                yield claim.body, claim.ack if self._prefetch == 1 else partial(claim.__exit__, None, None, None)
        finally:
            claims.close()

    def count_acknowledged(self, group: str) -> int:
        return self._client.group(group).stats().consumers[CONSUMER].acknowledged

    def close(self) -> None:
        self._client.close()


class Files:
    """A driver over the files of a mount."""

    def __init__(self, mount: str) -> None:
        self._mount = mount

    def _path(self, *names: str) -> str:
        return os.path.join(self._mount, *names)

    def prepare(self, group: str, lines: Sequence[str], streams: Sequence[str]) -> None:
        os.mkdir(self._path(group))
        for stream in streams:
            os.close(os.open(self._path(group, stream), os.O_WRONLY | os.O_CREAT))
        self._ctl(group, *lines)

    def _ctl(self, group: str, *lines: str) -> None:
        file = os.open(self._path(group, "ctl"), os.O_WRONLY)
        try:
            os.write(file, command_lines(*lines))
        finally:
            os.close(file)

    def remove(self, group: str, streams: Sequence[str]) -> None:
        self._ctl(group, "protect off")
        for consumer in os.listdir(self._path(group, ".consumers")):
            os.unlink(self._path(group, ".consumers", consumer))
        for stream in streams:
            os.unlink(self._path(group, stream))
        os.rmdir(self._path(group))

    def publisher(self, group: str, stream: str) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        file = os.open(self._path(group, stream), os.O_WRONLY)
        write = os.write

        def many(bodies: list[bytes]) -> None:
            raise BadRequest("batch failed: a write to a file is one message (expected another transport)")

        return (lambda body: write(file, body)), many

    def subscribe(self, group: str, stream: str, size: int) -> Iterator[bytes]:
        file = os.open(self._path(group, stream), os.O_RDONLY)
        return self._read(file, size)

    def _read(self, file: int, size: int) -> Iterator[bytes]:
        """Yield one message per read. A longer one than expected is cut and counts as damaged."""
        read = os.read
        while body := read(file, size):
            yield body

    def claim(self, group: str, size: int) -> Generator[Delivery, None, None]:
        file = os.open(self._path(group, ".consumers", CONSUMER), os.O_RDWR)
        write = os.write

        def ack() -> None:
            write(file, b"ack\n")

        return ((body, ack) for body in self._read(file, size))

    def count_acknowledged(self, group: str) -> int:
        with builtins.open(self._path(group, ".stats"), encoding="utf-8") as file:
            return int(json.load(file)["consumers"][CONSUMER]["acknowledged"])

    def close(self) -> None:
        """Do nothing: the files are closed with the process."""


# ------------------------------------------------------------ actors


_clock = time.monotonic_ns
_SECOND_NS = 10**9
_APART_NS = 10**18  # 31 years at most, which the clock and an Event can wait for


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
    marks: bool = True  # whether producers publish end marks, for consumers; workers get one each by other means


class Actor:
    """A measured loop. Progress shows its `count`."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.count = 0
        self.begun_ns = self.ended_ns = 0
        self.histogram = Histogram()
        self.stop = threading.Event()

    def prepare(self, driver: Driver) -> None:
        """Open what the loop needs. All actors begin once all are prepared."""
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
    """A producer: publishes its share, at its share of the rate, then an end mark."""

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
        """Yield when each batch is due; a time after the end is yielded at the end. The latency of a late batch counts
        from its due time, and so includes the wait for the batch before it."""
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
    """Return the number of messages that one producer publishes at most."""
    if messages is None:
        return 2**32 - 1
    return messages // producers + (number < messages % producers)


def endless() -> Iterator[int]:
    """Yield the present time as due: there is no rate."""
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
    """A receiver of every message, until all producers have ended."""

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
    """A receiver of a share of the messages. It acknowledges each, until it receives an end mark."""

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
    """An actor that publishes a message and waits for its echo, again and again."""

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
    """An actor that publishes each received message again."""

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
