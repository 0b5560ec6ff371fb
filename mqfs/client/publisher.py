"""Writing messages: the open files that a group's publishers share, and what `.put` is told.

Owns those files; a thread that writes has one to itself for that time.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby, islice
from typing import Any, TypeVar

import attrs

from mqfs import limits
from mqfs.client import words
from mqfs.client.large import BodyWriter, StagedUploads, is_long
from mqfs.client.types import Body, Direct, File, Link
from mqfs.client.words import Duration
from mqfs.errors import Disconnected, Exists, MqfsError, NotFound, TooLong

T = TypeVar("T")

KEPT_OPEN = 128  # files of one group: a fid each in the server
_BATCH = 1_024  # messages handed to the link at once: bounds what is held of an endless iterable


@attrs.frozen
class Outgoing:
    """A message to be published, and what is said with it: the values of `Group.publish`."""

    stream: str
    body: Body
    ttl: Duration | None = None
    delay: Duration | None = None
    at: float | datetime | None = None
    priority: int | None = None
    headers: Mapping[str, str] | None = None
    id: str = ""
    single: bool = False

    def has_metadata(self) -> dict[str, Any]:
        """The object of `.put`, but for its stream; empty where a plain write does."""
        said: dict[str, Any] = {}
        if self.ttl is not None:
            said["ttl"] = words.duration(self.ttl)
        if self.delay is not None:
            said["delay"] = words.duration(self.delay)
        if self.at is not None:
            said["at"] = self.at.timestamp() if isinstance(self.at, datetime) else self.at
        if self.priority is not None:
            said["priority"] = self.priority
        if self.headers:
            said["headers"] = dict(self.headers)
        if self.id:
            said["id"] = self.id
        if self.single:
            said["single"] = True
        return said

    def put(self) -> bytes:
        said = json.dumps({"stream": words.file_name(self.stream), **self.has_metadata()}, ensure_ascii=False)
        return said.encode() + b"\n" + words.data(self.body)


def _kind(message: Outgoing | tuple[str, Body]) -> str:
    """How it is written."""
    if is_long(message.body if isinstance(message, Outgoing) else message[1]):
        return "long"
    return "plain" if _is_plain(message) else "put"


def _is_plain(message: Outgoing | tuple[str, Body]) -> bool:
    return not isinstance(message, Outgoing) or not message.has_metadata()


def _pair(message: Outgoing | tuple[str, Body]) -> tuple[str, bytes]:
    stream, body = (message.stream, message.body) if isinstance(message, Outgoing) else message
    return stream, (body if type(body) is bytes and body else words.data(body))


class Publisher:
    """The writing side of one group."""

    def __init__(self, link: Link, path: str) -> None:
        self._link, self._path = link, path
        self._direct = link.direct(path)
        self._lock = threading.Lock()
        self._idle: OrderedDict[str | None, list[File]] = OrderedDict()  # of a stream; None: of `.put`
        self._units = StagedUploads(link, path)

    # ------------------------------------------------------------ open files

    def _take(self, name: str | None) -> File:
        with self._lock:
            idle = self._idle.get(name)
            if idle:
                file = idle.pop()
                if not idle:
                    del self._idle[name]
                return file
        if name is None:
            return self._link.open(f"{self._path}/.put", "r+")
        return self._link.open(f"{self._path}/{words.file_name(name)}", "w")

    def _put_back(self, name: str | None, file: File) -> None:
        spare: list[File] = []
        with self._lock:
            self._idle.setdefault(name, []).append(file)
            self._idle.move_to_end(name)
            if len(self._idle) > KEPT_OPEN:
                spare = self._idle.popitem(last=False)[1]
        for old in spare:
            old.close()

    @contextmanager
    def _opened(self, name: str | None) -> Iterator[File]:
        """A file to write to; not used again after an error."""
        file = self._take(name)
        try:
            yield file
        except BaseException as error:
            if isinstance(error, Disconnected):
                self.let_go()
            file.close()
            raise
        self._put_back(name, file)

    def let_go(self) -> None:
        """Close what is open and not in use."""
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for files in idle.values():
            for file in files:
                file.close()

    def close(self) -> None:
        """The group is not written to any more."""
        self.let_go()
        self._units.let_go()

    # ------------------------------------------------------------ one message

    def plain(self, stream: str, body: Body, create: bool, sequence: bool, committed: bool) -> int | None:
        """Write a message with nothing said; its sequence if that is wanted."""
        direct = self._direct
        if is_long(body):
            return self.publish(Outgoing(stream, body), create, sequence)
        if direct is not None:
            data = body if type(body) is bytes and body else words.data(body)
            try:
                found = direct.publish(stream, data, committed)
            except NotFound:
                words.file_name(stream)
                if not create:
                    raise
                self.make(stream)
                found = direct.publish(stream, data, committed)
            if found is not None:
                return found if sequence else None
        return self.publish(Outgoing(stream, body), create, sequence)

    def publish(self, message: Outgoing, create: bool, sequence: bool) -> int | None:
        """Write it, its stream made if it is missing; its sequence if that is wanted."""
        if is_long(message.body):
            self._publish_long(message, create, sequence)
            return None
        write = self._by_put if sequence or message.has_metadata() else self._plainly
        return self._again(message.stream, create, lambda: write(message, sequence))

    def _plainly(self, message: Outgoing, sequence: bool) -> None:
        body = words.data(message.body)
        with self._opened(message.stream) as file:
            file.write(body)

    def _by_put(self, message: Outgoing, sequence: bool) -> int | None:
        data = message.put()
        with self._opened(None) as file:
            file.write(data)
            return int(file.read(64)) if sequence else None

    def writer(self, stream: str, more: Mapping[str, str] | None, create: bool) -> BodyWriter:
        """A body of any size."""

        def plainly(body: bytes) -> None:
            self.publish(Outgoing(stream, body, headers=more), create, False)

        words.file_name(stream)
        return BodyWriter(self._units, stream, more, plainly, (lambda: self.make(stream)) if create else None)

    def _publish_long(self, message: Outgoing, create: bool, sequence: bool) -> None:
        """A body that is more than one message."""
        said = sorted(message.has_metadata().keys() - {"headers"}) + ["sequence"] * sequence
        if said:
            raise TooLong(
                f"{len(message.body)} bytes; with {' and '.join(said)} a body has at most {limits.MESSAGE_BYTES}: "
                "a larger one is several messages, which have headers only"
            )
        with self.writer(message.stream, message.headers, create) as file:
            file.write(message.body)

    def _again(self, stream: str, create: bool, write: Callable[[], T]) -> T:
        """A stream that is missing, or was removed under an open file, is made, once."""
        try:
            return write()
        except NotFound:
            words.file_name(stream)
            if not create:
                raise
        self.make(stream)
        return write()

    def make(self, stream: str) -> None:
        """Make a stream, if there is none."""
        try:
            self._link.create(f"{self._path}/{words.file_name(stream)}")
        except Exists:
            pass

    # ------------------------------------------------------------ many

    def publish_many(self, messages: Iterable[Outgoing | tuple[str, Body]], create: bool, committed: bool) -> int:
        """Write them in order, none waiting for the one before; how many."""
        count = 0
        wait: Callable[[], None] | None = None
        source = iter(messages)
        while batch := list(islice(source, _BATCH)):
            for kind, run in groupby(batch, _kind):
                alike = list(run)
                done = 0
                if kind == "long":
                    self._write_long([m if isinstance(m, Outgoing) else Outgoing(*m) for m in alike], create, count)
                    done = len(alike)
                if kind == "plain" and self._direct is not None:
                    done, wait = self._directly(self._direct, alike, create, count, wait)
                if done < len(alike):
                    self._write(
                        [m if isinstance(m, Outgoing) else Outgoing(*m) for m in alike[done:]], create, count + done
                    )
                count += len(alike)
        if wait is not None and committed:
            wait()
        return count

    def _write_long(self, messages: Sequence[Outgoing], create: bool, before: int) -> None:
        for number, message in enumerate(messages, before):
            try:
                self.publish(message, create, False)
            except MqfsError as error:
                error.add_note(f"message {number} of publish_many; those before it were published")
                raise

    def _directly(
        self,
        direct: Direct,
        messages: Sequence[Outgoing | tuple[str, Body]],
        create: bool,
        before: int,
        wait: Callable[[], None] | None,
    ) -> tuple[int, Callable[[], None] | None]:
        """Past the files: how many of them, and what waits for their commit and what was published before."""
        pairs = [_pair(message) for message in messages]
        try:
            try:
                done, later = direct.publish_many(pairs)
            except NotFound:
                for stream, _ in pairs:
                    words.file_name(stream)
                if not create:
                    raise
                for stream in dict.fromkeys(stream for stream, _ in pairs):
                    self.make(stream)
                done, later = direct.publish_many(pairs)
        except MqfsError as error:
            done = before + getattr(error, "published", 0)
            error.add_note(f"message {done} of publish_many; those before it were published")
            raise
        return done, later or wait

    def _write(self, batch: list[Outgoing], create: bool, before: int) -> int:
        files: dict[str | None, File] = {}
        ordered: list[tuple[File, bytes]] = []
        try:
            for message in batch:
                plain = not message.has_metadata()
                if message.stream not in files:
                    files[message.stream] = self._again(message.stream, create, lambda m=message: self._take(m.stream))  # type: ignore[misc]
                name = message.stream if plain else None
                if name not in files:
                    files[name] = self._take(name)
                ordered.append((files[name], words.data(message.body) if plain else message.put()))
            results = self._link.write_all(ordered)
        except BaseException as error:
            if isinstance(error, Disconnected):
                self.let_go()
            for file in files.values():
                file.close()
            raise
        self._look(results, before, files)
        return len(batch)

    def _look(self, results: list[MqfsError | None], before: int, files: dict[str | None, File]) -> None:
        failed = next((n for n, error in enumerate(results) if error is not None), None)
        if failed is None:
            for name, file in files.items():
                self._put_back(name, file)
            return
        for file in files.values():
            file.close()
        error = results[failed]
        assert error is not None
        stored = results.count(None)
        error.add_note(
            f"message {before + failed} of publish_many; of its batch of {len(results)} {stored} were stored"
        )
        raise error
