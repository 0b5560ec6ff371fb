"""The write side of a group: single messages, batches, large bodies.

Publishing threads share its open files: each thread has one to itself while it writes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from mqfs import limits
from mqfs.client.large import BodyWriter, StagedUploads, is_long
from mqfs.client.message import Receipt
from mqfs.client.outgoing import Item, Outgoing, head_of, outgoing, plain_pair, require_items, way_of
from mqfs.client.types import Body, File, Link, bytes_of, is_empty
from mqfs.errors import BadRequest, Denied, Disconnected, Exists, MqfsError, NotFound, TooLong
from mqfs.syntax.names import check_file_name

if TYPE_CHECKING:
    from mqfs.client.transport.ring import RingGroup

T = TypeVar("T")

OPEN_STREAMS = 128  # of a group: a fid each in the server
IN_PARTS = ("headers", "id", "key", "priority", "ttl")  # options of a body in parts
_BATCH = 1_024  # messages passed to the link at once: bounds the memory of an endless iterable


def _cannot(_stream: str, _body: object, _committed: bool) -> None:
    """See `RingGroup.publish_now`."""


class Publisher:
    """Publishes to one group. Thread-safe."""

    def __init__(self, link: Link, path: str) -> None:
        self._link, self._path = link, path
        self._direct = link.direct(path)
        self.publish_now = _cannot if self._direct is None else self._direct.publish_now
        self._lock = threading.Lock()
        self._idle: OrderedDict[str | None, list[File]] = OrderedDict()  # by stream; None: `.put`
        self._units = StagedUploads(link, path)

    # ------------------------------------------------------------ open files

    def _acquire(self, name: str | None) -> File:
        """A file of a lost connection would send nothing, and the next call by path may have connected again."""
        with self._lock:
            while idle := self._idle.get(name):
                file = idle.pop()
                if not idle:
                    del self._idle[name]
                if not file.is_lost:
                    return file
        if name is None:
            return self._link.open(f"{self._path}/.put", "r+")
        return self._link.open(f"{self._path}/{check_file_name(name)}", "w")

    def _return(self, name: str | None, file: File) -> None:
        spare: list[File] = []
        with self._lock:
            self._idle.setdefault(name, []).append(file)
            self._idle.move_to_end(name)
            if len(self._idle) > OPEN_STREAMS:
                spare = self._idle.popitem(last=False)[1]
        for old in spare:
            old.close()

    @contextmanager
    def _open_file(self, name: str | None) -> Iterator[File]:
        """A file to write to; closed after an error."""
        file = self._acquire(name)
        try:
            yield file
        except BaseException as error:
            if isinstance(error, Disconnected):
                self.close_idle()
            file.close()
            raise
        self._return(name, file)

    def close_idle(self) -> None:
        """Close the files that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for files in idle.values():
            for file in files:
                file.close()

    def close(self) -> None:
        """Close the files, and end the producer of large bodies."""
        self.close_idle()
        self._units.close()

    # ------------------------------------------------------------ one message

    def plain(self, stream: str, body: Body, create: bool, committed: bool) -> Receipt:
        """Write a message without options."""
        direct = self._direct
        if direct is None or is_long(body) or is_empty(body):
            return self._without_options(stream, body, create)
        data = body if type(body) is bytes else bytes_of(body)
        try:
            number = direct.publish(stream, data, committed)
        except NotFound:
            if not create:
                raise
            self.make(stream)
            number = direct.publish(stream, data, committed)
        if number is None:
            return self._without_options(stream, body, create)
        return Receipt(number, 0, None, False, direct.is_retaining(stream))

    def _without_options(self, stream: str, body: Body, create: bool) -> Receipt:
        if is_long(body):
            return self._publish_long(Outgoing(stream, body), create)
        data = head_of(stream) + (body if type(body) is bytes else bytes_of(body))
        return self._with_create(stream, create, lambda: self._put(data, stream, body))

    def ephemeral(self, message: Outgoing, create: bool, options: Sequence[str]) -> Receipt:
        """Put a message into the ring, and not into the log. Raises BadRequest where that cannot be done, also with
        other `options`."""
        if given := sorted([*message.metadata(), *options]):
            raise BadRequest(f"publish failed: ephemeral with {' and '.join(given)} (expected no other option)")
        direct, body = self._direct, bytes_of(message.body)
        if direct is None or not body:
            what = "an empty body" if direct is not None else "no shared memory"
            raise BadRequest(f"publish failed: ephemeral with {what} (expected a group with a ring, and a body)")
        if not self._with_create(message.stream, create, lambda: direct.publish_ephemeral(message.stream, body)):
            raise BadRequest("publish failed: ephemeral without a ring (expected 'deliver all', and a ring)")
        return Receipt(retained=False)

    def publish(self, message: Outgoing, create: bool, wait_s: float | None = None) -> Receipt:
        """Write a message by `.put`. Raises TimeoutError where there was no room for it in that time."""
        is_large = is_long(message.body)
        data = b"" if is_large else message.put(kept=True)
        try:
            if is_large:
                return self._publish_long(message, create, wait_s)
            return self._with_create(message.stream, create, lambda: self._ask(data, wait_s))
        except TimeoutError:
            raise TimeoutError(f"publish failed: no room in stream {message.stream!r} in {wait_s or 0:g} s") from None

    def _put(self, data: bytes, stream: str, body: Body) -> Receipt:
        """Write a message without options by `.put`; where its user has no rights there, by its stream's file."""
        try:
            return self._ask(data, None)
        except Denied:
            if is_empty(body):
                raise
            with self._open_file(stream) as file:
                file.write(bytes_of(body))
            return Receipt()

    def _ask(self, data: bytes, wait_s: float | None) -> Receipt:
        with self._open_file(None) as file:
            return Receipt.parse(file.ask(data, wait_s))

    def writer(self, message: Outgoing, create: bool, wait_s: float | None = None) -> BodyWriter:
        """A writer of a body of any size, with the options of a message."""

        def whole(body: bytes) -> None:
            self.publish(attrs.evolve(message, body=body), create, wait_s)

        stream = check_file_name(message.stream)
        make = (lambda: self.make(stream)) if create else None
        return BodyWriter(self._units, stream, message.metadata(), whole, make, wait_s)

    def _publish_long(self, message: Outgoing, create: bool, wait_s: float | None = None) -> Receipt:
        """Publish a body that is larger than a message. Raises TooLong where an option forbids that."""
        options = sorted(message.metadata().keys() - set(IN_PARTS))
        if options:
            raise TooLong(
                f"body of {len(message.body)} bytes with {' and '.join(options)} (expected at most "
                f"{limits.MESSAGE_BYTES}, or no options but {' '.join(IN_PARTS)})"
            )
        with self.writer(message, create, wait_s) as file:
            file.write(message.body)
        return Receipt()

    def _with_create(self, stream: str, create: bool, write: Callable[[], T]) -> T:
        """Write; where the stream is missing, or was removed under an open file, make it and write again."""
        try:
            return write()
        except NotFound:
            check_file_name(stream)
            if not create:
                raise
        self.make(stream)
        return write()

    def make(self, stream: str) -> None:
        """Make a stream, unless it exists: that needs no permission."""
        path = f"{self._path}/{check_file_name(stream)}"
        try:
            self._link.create(path)
        except Exists:
            pass
        except Denied:
            if not self._link.look_up([path])()[0]:
                raise

    # ------------------------------------------------------------ many

    def publish_many(self, messages: Iterable[Item], create: bool, committed: bool) -> int:
        """Write messages in order, several under way at once; how many."""
        count = 0
        wait: Callable[[], None] | None = None
        source = iter(messages)
        while batch := list(islice(source, _BATCH)):
            if self._direct is not None:
                done, wait = self._directly(self._direct, batch, create, count, wait, known=True)
                count += done
                if done == len(batch):
                    continue
                batch = batch[done:]
            require_items(batch)
            for kind, run in groupby(batch, way_of):
                alike = list(run)
                done = 0
                if kind == "long":
                    self._write_long([*map(outgoing, alike)], create, count)
                    done = len(alike)
                if kind == "plain" and self._direct is not None:
                    pairs = [*map(plain_pair, alike)]
                    done, wait = self._directly(self._direct, pairs, create, count, wait)
                if done < len(alike):
                    self._write([*map(outgoing, alike[done:])], create, count + done)
                count += len(alike)
        if wait is not None and committed:
            wait()
        return count

    def _write_long(self, messages: Sequence[Outgoing], create: bool, before: int) -> None:
        for number, message in enumerate(messages, before):
            try:
                self.publish(message, create)
            except MqfsError as error:
                error.add_note(f"publish_many failed at message {number}; those before it are published")
                raise

    def _directly(
        self,
        direct: RingGroup,
        messages: Sequence[Any],
        create: bool,
        before: int,
        wait: Callable[[], None] | None,
        known: bool = False,
    ) -> tuple[int, Callable[[], None] | None]:
        """Publish without the files: how many messages, and a function that waits for the commit of all so far."""
        first = 0
        try:
            try:
                done, later = direct.publish_many(messages, known=known)
            except NotFound as error:
                if not create or known:  # the group is gone
                    raise
                first = getattr(error, "published", 0)  # a stream was removed after these
                for stream in dict.fromkeys(stream for stream, _ in messages[first:]):
                    self.make(stream)
                done, later = direct.publish_many(messages[first:])
        except MqfsError as error:
            done = before + first + getattr(error, "published", 0)
            error.add_note(f"publish_many failed at message {done}; those before it are published")
            raise
        return first + done, later or wait

    def _write(self, batch: list[Outgoing], create: bool, before: int) -> int:
        files: dict[str | None, File] = {}
        ordered: list[tuple[File, bytes]] = []
        try:
            for message in batch:
                plain = way_of(message) == "plain"
                if message.stream not in files:
                    acquire = partial(self._acquire, message.stream)
                    files[message.stream] = self._with_create(message.stream, create, acquire)
                name = message.stream if plain else None
                if name not in files:
                    files[name] = self._acquire(name)
                ordered.append((files[name], bytes_of(message.body) if plain else message.put()))
            results = self._link.write_all(ordered)
        except BaseException as error:
            if isinstance(error, Disconnected):
                self.close_idle()
            for file in files.values():
                file.close()
            raise
        self._check(results, before, files)
        return len(batch)

    def _check(self, results: list[MqfsError | None], before: int, files: dict[str | None, File]) -> None:
        failed = next((n for n, error in enumerate(results) if error is not None), None)
        if failed is None:
            for name, file in files.items():
                self._return(name, file)
            return
        for file in files.values():
            file.close()
        error = results[failed]
        assert error is not None
        stored = results.count(None)
        error.add_note(
            f"publish_many failed at message {before + failed}; {stored} of its batch of {len(results)} are published"
        )
        raise error
