"""The tree of a server, by 9P.

It reconnects, and keeps a window of concurrent writes; the connection is mqfs.ninep.client's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, cast

from mqfs import limits
from mqfs.client.types import TEMPORARY, File
from mqfs.errors import Disconnected, MqfsError, TooLong
from mqfs.ninep.client import connection
from mqfs.ninep.client.connection import Client, Slot
from mqfs.ninep.codec.messages import Twrite

if TYPE_CHECKING:
    from mqfs.client.transport.ring import RingGroup

WINDOW_BYTES = 1 << 20  # of writes under way at once: bounds the copies here and the queue in the server
WINDOW = 256  # writes under way at once


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
        self._options: Any = {"user": user, "aname": aname, "token": token}
        self._timeout = timeout
        self._reconnect, self._closed = reconnect, False
        self._process = os.getpid()
        self._dialling = threading.Lock()
        self._now = self._connect(timeout)

    def _connect(self, timeout: float | None) -> Client:
        return connection.connect(self.label, msize=limits.MSIZE_MOST, timeout=timeout, **self._options)

    def reach(self, deadline: float | None) -> None:
        timeout = self._timeout
        if deadline is not None:  # at least a second: short waits would never reach a slow server
            timeout = min(max(deadline - time.monotonic(), 1.0), inf if timeout is None else timeout)
        try:
            self.connection(timeout)
        except Disconnected:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError from None
            raise

    def connection(self, timeout: float | None = None) -> Client:
        """Return the present connection, or a new one if that is lost. `timeout`: seconds for a new one, and for the
        wait while another thread connects. Raises Disconnected."""
        if self._process != os.getpid():  # before the lock, which a thread of the parent may hold
            raise Disconnected("connection of the parent process (expected a new one in the child)", final=True)
        if timeout is None:
            with self._dialling:  # no Ctrl-C comes between the lock and this block, as it may after `acquire`
                client = self._present(self._timeout)
            return client
        if not self._dialling.acquire(timeout=timeout):
            raise Disconnected(f"{self.label}: another thread connects")
        try:
            return self._present(timeout)
        finally:
            self._dialling.release()

    def _present(self, timeout: float | None) -> Client:
        if self._closed:
            raise Disconnected("the client was closed", final=True)
        if self._now.lost and self._reconnect:
            self._now.close()
            try:
                self._now = self._connect(timeout)
            except Disconnected as error:
                raise Disconnected(error.detail) from None
            except (OSError, MqfsError) as error:
                raise Disconnected(f"{self.label}: {error}") from None
        return self._now

    def open(self, path: str, mode: str) -> File:
        return self.connection().open(path, mode)

    def create(self, path: str) -> None:
        self.connection().create(path).close()

    def create_temporary(self, path: str) -> File:
        client = self.connection()
        file = client.create(path, "r+", TEMPORARY)
        try:
            client.chmod(path, TEMPORARY)  # a create clears the bits that the group's mode lacks
        except BaseException:
            file.close()
            raise
        return file

    def mkdir(self, path: str) -> None:
        self.connection().mkdir(path)

    def remove(self, path: str) -> None:
        self.connection().remove(path)

    def names(self, path: str) -> list[str]:
        return self.connection().list(path)

    def look_up(self, paths: Sequence[str]) -> Callable[[], list[bool]]:
        client = self.connection()
        return client.begin([client.caller.exists(path) for path in paths])[1]

    def direct(self, path: str) -> RingGroup | None:
        return None

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        results: list[MqfsError | None] = []
        clients = [cast(connection.File, file).client for file, _ in writes]
        at = 0
        while at < len(writes):
            end, size = at, 0
            while end < len(writes) and end - at < WINDOW and (end == at or size + len(writes[end][1]) <= WINDOW_BYTES):
                if clients[end] is not clients[at]:
                    break  # this file was opened after a reconnect
                size += len(writes[end][1])
                end += 1
            results += self._write_some(clients[at], writes[at:end])
            at = end
        return results

    def _write_some(self, client: Client, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        requests: list[Twrite | MqfsError] = []
        for file, data in writes:
            try:
                requests.append(cast(connection.File, file).channel.request(data))
            except TooLong as error:
                requests.append(error)
        slots = iter(client.send([request for request in requests if isinstance(request, Twrite)]))
        return [_error_of(client, next(slots)) if isinstance(r, Twrite) else r for r in requests]

    def close(self) -> None:
        if self._process != os.getpid():  # a forked child has closed its copies of the sockets
            return
        with self._dialling:
            self._closed = True
            self._now.close()


def _error_of(client: Client, slot: Slot) -> MqfsError | None:
    try:
        client.answer(slot)
    except MqfsError as error:
        return error
    return None
