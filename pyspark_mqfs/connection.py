"""Connections to a server over 9P: address, user and retries.

A call through `with_retry` may be made twice, so it must be idempotent. A call has no deadline, as a commit may wait
for room (`full block`). But a connection is closed if the server answers nothing, not even a stat, and no byte moves:

    call     commit ----------------------------------- Disconnected
    _Watch          ..... stat of the root --- no answer
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import attrs
from pyspark import TaskContext

from mqfs import limits
from mqfs.errors import BadAddress, Denied, Disconnected, MqfsError
from mqfs.net.sockets import ADDRESS_FORMS, UnixAddress, is_loopback, parse_addresses
from mqfs.ninep.client import connection
from mqfs.ninep.client.connection import Client, progress
from pyspark_mqfs.options import OptionError, Options, invalid

T = TypeVar("T")
log = logging.getLogger(__name__)

RETRY_S = 60.0  # longer than a restart of the server takes
ANSWER_S = 3.0  # for a stat: enough for a loaded machine, and longer than the reply to a wrong token takes
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@attrs.frozen
class Server:
    """The address and user of a connection. It is small, as it is pickled with each task; its repr has no token."""

    address: str
    user: str = ""
    token: str = attrs.field(default="", repr=False)
    retry_s: float = RETRY_S
    msize: int = limits.MSIZE_MOST

    @classmethod
    def of(cls, options: Options) -> Server:
        """Return the server of the common options. Raises OptionError."""
        address = options.required("address", ADDRESS_FORMS)
        try:
            parse_addresses(address)
        except BadAddress:
            raise invalid("address", address, ADDRESS_FORMS) from None
        if options.text("path") and len(parse_addresses(address)) > 1:  # their disks differ
            raise OptionError("option path: not with several addresses (expected that of the server on this disk)")
        msize = options.size("msize", limits.MSIZE_MOST) or limits.MSIZE_MOST
        if not limits.MSIZE_LEAST <= msize <= limits.MSIZE_MOST:
            raise invalid("msize", options.text("msize"), f"a size from {limits.MSIZE_LEAST} to {limits.MSIZE_MOST}")
        retry_s = options.seconds("retrySeconds", RETRY_S)
        return cls(address, options.text("user"), options.text("token"), retry_s, msize)

    def link(self) -> Link:
        return Link(self)


class Link:
    """A connection made on demand, and made again after a failure. It is not thread-safe."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: Client | None = None
        self._watch: _Watch | None = None

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def client(self) -> Client:
        """Return the present connection, or a new one, without retries. Raises Disconnected, OptionError."""
        if self._client is None:
            server = self.server
            try:
                self._client = connection.connect(
                    server.address,
                    user=server.user,
                    msize=server.msize,
                    timeout=max(server.retry_s, ANSWER_S),
                    token=server.token,
                )
            except Denied as error:
                option = "token" if server.token else "user"
                raise OptionError(f"option {option}: refused by the server at {server.address!r}: {error}") from None
            self._watch = _Watch(self._client, max(server.retry_s / 2, ANSWER_S))
        return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            if self._watch is not None:
                self._watch.end()
            client.close()

    def with_retry(self, act: Callable[[Client], T]) -> T:
        """Return the result of `act`, repeated on new connections until the deadline. Raises OptionError after it."""
        deadline, pause = time.monotonic() + self.server.retry_s, FIRST_PAUSE_S
        while True:
            try:
                return act(self.client())
            except (OSError, Disconnected) as error:
                self.close()
                if time.monotonic() + pause > deadline:
                    raise self.timeout_error(error) from None
                if pause == FIRST_PAUSE_S:
                    log.warning("option address: %s; trying again for %g s", error, self.server.retry_s)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def timeout_error(self, error: Exception) -> OptionError:
        """Return the error to raise at the deadline."""
        server = self.server
        return OptionError(
            f"option address: no answer from {server.address!r} for {server.retry_s:g} s (option retrySeconds):"
            f" {error}{self._remote_hint()}"
        )

    def _remote_hint(self) -> str:
        """Return advice for a task, which may run on another machine than the server; "" where it does not apply."""
        addresses = parse_addresses(self.server.address)
        is_local = any(isinstance(where, UnixAddress) or is_loopback(where.host) for where in addresses)
        if TaskContext.get() is None or not is_local:
            return ""
        return " (expected tcp!HOST!PORT or tls!HOST!PORT, for workers on other machines)"


def read_text(client: Client, path: str) -> str:
    """Read a whole file of the tree."""
    with client.open(path) as file:
        return b"".join(iter(file.receive, b"")).decode()


def write_text(client: Client, path: str, text: str) -> None:
    """Write to a file of the tree, once."""
    with client.open(path, "w") as file:
        file.write(text.encode())


class _Watch:
    """A thread that closes a connection whose server answers nothing."""

    def __init__(self, client: Client, pause_s: float) -> None:
        """`pause_s`: seconds between two stats, and the longest time without a byte until one is answered."""
        self._client, self._pause_s = client, pause_s
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="mqfs-watch", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            # Ask in another thread: sending may block, too, behind a write that the server does not receive.
            asked = threading.Thread(target=self._ask, name="mqfs-ask", daemon=True)
            asked.start()
            while asked.is_alive() and not self._client.lost:
                before = progress(self._client)  # on a slow link the stat waits behind long requests and replies
                asked.join(self._pause_s)
                if asked.is_alive() and progress(self._client) == before:
                    self._client.close(f"no answer in {self._pause_s:g} s")
            if self._client.lost:
                return

    def _ask(self) -> None:
        with suppress(MqfsError, OSError):  # the connection has ended
            self._client.stat("")
