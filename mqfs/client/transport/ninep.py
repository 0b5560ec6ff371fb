"""The tree of a server, by 9P.

Owns the reconnect and the window of concurrent writes; the connection is mqfs.ninep.client's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from mqfs.client.types import READ_BYTES, Direct, File
from mqfs.errors import Disconnected, Interrupted, MqfsError, TooLong
from mqfs.ninep.client import connection, machine
from mqfs.ninep.client.channel import Channel
from mqfs.ninep.client.shared_connection import SharedConnection, Slot
from mqfs.ninep.codec.messages import Fcall, Twrite

T = TypeVar("T")

WINDOW_BYTES = 1 << 20  # writes under way at once: bounds the copies here and the queue in the server
WINDOW = 256
ANSWER_BYTES = 65_536  # of `.put`, and of a cursor with names of views


class NinepFile:
    """An open file of a server."""

    def __init__(self, connection: SharedConnection, channel: Channel) -> None:
        self.connection, self.channel = connection, channel
        self._slot: Slot | None = None  # the read that waits
        self._interrupted = False
        self._closed = False

    def read(self, count: int = READ_BYTES, timeout: float | None = None) -> bytes:
        channel = self.channel
        if channel.kept is not None:
            return channel.take_kept(count)
        deadline = None if timeout is None else time.monotonic() + timeout
        procedure = channel.read(count)
        request = next(procedure)
        slot = self._slot = self.connection.send([request])[0]
        try:
            if self._interrupted:
                self.connection.send([], slot)
            reply = self.connection.wait(slot, deadline)
        except Disconnected:
            raise
        except TimeoutError:
            reply = self._give_up(slot)
            if reply is None:
                raise
        except BaseException:
            late = self._give_up(slot)
            if late is not None:
                channel.keep(late)  # the next read returns it
            raise
        finally:
            self._slot = None
        if reply is None:
            self._interrupted = False
            raise Interrupted
        try:
            procedure.send(machine.expect(request, reply))
        except StopIteration as done:
            return cast(bytes, done.value)
        raise AssertionError("read failed: more than one request (expected plain 9P2000)")

    def _give_up(self, slot: Slot) -> Fcall | None:
        self.connection.send([], slot)
        return self.connection.wait(slot)

    def interrupt(self) -> None:
        self._interrupted = True
        slot = self._slot
        if slot is not None:
            with contextlib.suppress(Disconnected):
                self.connection.send([], slot)

    def request(self, data: bytes) -> Twrite:
        """The request of a write, to be sent with others. Raises TooLong."""
        if len(data) > self.channel.most:
            raise TooLong(f"message of {len(data)} bytes (expected at most {self.channel.most} by 9P)")
        return Twrite(0, self.channel.fid, 0, data)

    def write(self, data: bytes) -> None:
        self.connection.do(self.channel.write(data))

    def ask(self, data: bytes) -> bytes:
        connection, procedure = self.connection, self.channel.read(ANSWER_BYTES)
        request = next(procedure)
        written, answered = connection.send([self.request(data), request])
        machine.check(cast(Fcall, connection.wait(written)))
        reply = machine.expect(request, cast(Fcall, connection.wait(answered)))
        try:
            procedure.send(reply)
        except StopIteration as done:
            return cast(bytes, done.value) or self.read(ANSWER_BYTES)  # the write waited, the read did not
        raise AssertionError("read failed: more than one request (expected plain 9P2000)")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Disconnected):
                self.connection.do(self.connection.caller.clunk(self.channel.fid))

    def __del__(self) -> None:
        if not self._closed:
            self.connection.dropped.append(self.channel.fid)


class NinepTransport:
    """See `Link`. With `reconnect`, the next call by path replaces a lost connection."""

    can_be_lost = True

    def __init__(
        self,
        address: str,
        *,
        user: str = "",
        aname: str = "",
        timeout: float | None = None,
        reconnect: bool = True,
        token: str = "",
    ) -> None:
        self.label = address
        self._options: Any = (user, aname, timeout, token)
        self._reconnect, self._closed = reconnect, False
        self._dialling = threading.Lock()
        self._now = SharedConnection(address, *self._options)

    def connection(self) -> SharedConnection:
        """The present connection, or a new one. Raises Disconnected."""
        with self._dialling:
            if self._closed:
                raise Disconnected("the client was closed", final=True)
            if self._now.lost and self._reconnect:
                self._now.close()
                try:
                    self._now = SharedConnection(self.label, *self._options)
                except Disconnected as error:
                    raise Disconnected(error.detail) from None
                except (OSError, MqfsError) as error:
                    raise Disconnected(f"{self.label}: {error}") from None
            return self._now

    def open(self, path: str, mode: str) -> File:
        now = self.connection()
        return NinepFile(now, now.do(now.caller.open(path, connection.flags_of(mode))))

    def create(self, path: str) -> None:
        now = self.connection()
        NinepFile(now, now.do(now.caller.create(path, os.O_WRONLY))).close()

    def mkdir(self, path: str) -> None:
        now = self.connection()
        now.do(now.caller.mkdir(path))

    def remove(self, path: str) -> None:
        now = self.connection()
        now.do(now.caller.remove(path))

    def names(self, path: str) -> list[str]:
        now = self.connection()
        return now.do(now.caller.names(path))

    def direct(self, path: str) -> Direct | None:
        return None

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        results: list[MqfsError | None] = []
        at = 0
        while at < len(writes):
            end, size = at, 0
            while end < len(writes) and end - at < WINDOW and (end == at or size + len(writes[end][1]) <= WINDOW_BYTES):
                size += len(writes[end][1])
                end += 1
            results += self._write_some(writes[at:end])
            at = end
        return results

    def _write_some(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        connection: SharedConnection | None = None
        requests: list[Twrite | MqfsError] = []
        for file, data in writes:
            assert isinstance(file, NinepFile)
            connection = file.connection
            try:
                requests.append(file.request(data))
            except TooLong as error:
                requests.append(error)
        assert connection is not None
        slots = iter(connection.send([request for request in requests if isinstance(request, Twrite)]))
        return [self._error_of(connection, next(slots)) if isinstance(r, Twrite) else r for r in requests]

    def _error_of(self, connection: SharedConnection, slot: Slot) -> MqfsError | None:
        try:
            reply = connection.wait(slot)
            assert reply is not None
            machine.check(reply)
        except MqfsError as error:
            return error
        return None

    def close(self) -> None:
        with self._dialling:
            self._closed = True
            self._now.close()
