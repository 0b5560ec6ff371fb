"""The way to a server over 9P: where it is, as whom, and how long a failure is tried again.

Owns connections and their repetition. What is asked over them is the callers'. Every call that goes through `retried`
must be one that may be made twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import attrs
from pyspark import TaskContext

from mqfs import limits
from mqfs.errors import BadAddress, Denied, Disconnected
from mqfs.net.address import ADDRESS_FORMS, TcpAddress, is_loopback, parse_address
from mqfs.ninep import blocking
from mqfs.ninep.blocking import Client
from pyspark_mqfs.options import OptionError, Options, bad

T = TypeVar("T")

RETRY_S = 60.0  # a server that is started anew is back well within it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@attrs.frozen
class Server:
    """Where and as whom; small, and pickled with every task. The token is not printed."""

    address: str
    user: str = ""
    token: str = attrs.field(default="", repr=False)
    retry_s: float = RETRY_S
    msize: int = limits.MSIZE_MOST

    @classmethod
    def of(cls, options: Options) -> Server:
        """What the common options say; OptionError."""
        address = options.needed("address", ADDRESS_FORMS)
        try:
            parse_address(address)
        except BadAddress:
            raise bad("address", address, ADDRESS_FORMS) from None
        msize = options.size("msize", limits.MSIZE_MOST) or limits.MSIZE_MOST
        if not limits.MSIZE_LEAST <= msize <= limits.MSIZE_MOST:
            raise bad("msize", options.text("msize"), f"a size from {limits.MSIZE_LEAST} to {limits.MSIZE_MOST}")
        retry_s = options.seconds("retrySeconds", RETRY_S)
        return cls(address, options.text("user"), options.text("token"), retry_s, msize)

    def link(self) -> Link:
        return Link(self)


class Link:
    """A connection that is made when it is needed, and made anew after it broke. One thread at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: Client | None = None

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def client(self) -> Client:
        """The connection there is, or a new one; not repeated here."""
        if self._client is None:
            server = self.server
            try:
                self._client = blocking.connect(
                    server.address,
                    user=server.user,
                    msize=server.msize,
                    timeout=max(server.retry_s, limits.TOKEN_DELAY_S + 1.0),  # a wrong token is answered late
                    token=server.token,
                )
            except BadAddress as error:  # nobody answers there, now
                raise Disconnected(str(error)) from None
            except Denied as error:
                what = "token" if server.token else "user"
                raise OptionError(f"option {what} was refused by the server at {server.address!r}: {error}") from None
        return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def retried(self, act: Callable[[Client], T]) -> T:
        """What `act` returns; repeated over a new connection while the server is away, until the deadline."""
        deadline, pause = time.monotonic() + self.server.retry_s, FIRST_PAUSE_S
        while True:
            try:
                return act(self.client())
            except (OSError, Disconnected) as error:
                self.close()
                if time.monotonic() + pause > deadline:
                    raise self.given_up(error) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def given_up(self, error: Exception) -> OptionError:
        """What is raised when the server was away for too long."""
        server = self.server
        return OptionError(
            f"no server answered at option address {server.address!r} for {server.retry_s:g} s (option retrySeconds):"
            f" {error}{self._elsewhere()}"
        )

    def _elsewhere(self) -> str:
        """Of a task, that it may be on another machine than its driver."""
        where = parse_address(self.server.address)
        if TaskContext.get() is None or (isinstance(where, TcpAddress) and not is_loopback(where.host)):
            return ""
        return "; from a worker on another machine than the server's, tcp!HOST!PORT with a host that it knows is right"


__all__ = ["Link", "Server"]
