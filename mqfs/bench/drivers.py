"""Drivers: how a process of the bench reaches its group, by the library or by the files of a mount."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import attrs

from mqfs.client.client import Client, connect, open
from mqfs.client.delivery import Claims
from mqfs.client.outgoing import Durability
from mqfs.errors import BadRequest
from mqfs.syntax.quoting import command_lines

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
    server: int = 0  # the process of the server, where it is the bench's own


class Driver(Protocol):
    """The calls of actors. Thread-safe."""

    def prepare(self, group: str, lines: Sequence[str], streams: Sequence[str]) -> None: ...

    def remove(self, group: str, streams: Sequence[str]) -> None:
        """Remove a group, protected or not. Raises MqfsError, OSError."""
        ...

    def publisher(self, group: str, stream: str) -> tuple[Callable[[bytes], object], Callable[[list[bytes]], object]]:
        """Functions that publish one message and many; they return once these are kept, as `wait` demands."""
        ...

    def subscribe(self, group: str, stream: str, size: int) -> Iterator[bytes]:
        """Every message of the stream from its beginning; `size`: of each."""
        ...

    def claim(self, group: str, size: int) -> Generator[Delivery, None, None]:
        """Messages of the consumer; `close` sends the acknowledgements that were not sent."""
        ...

    def count_acknowledged(self, group: str) -> int:
        """The number of acknowledged messages, by the tree's own count."""
        ...

    def close(self) -> None: ...


def open_driver(place: Place) -> Driver:
    if place.transport == "file":
        return Files(place.mount)
    if place.transport == "embedded":
        return Library(open(place.store), place)
    return Library(connect(place.address, transport=place.transport, reconnect=False), place)


class Library:
    """mqfs.client."""

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
    """A mount."""

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
        """One message a read; a longer one than expected is cut and shows as damaged."""
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
        """Nothing to do: the files are closed with the process."""
