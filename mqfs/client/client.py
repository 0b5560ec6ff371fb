"""A client: a tree that is reached somehow, and its groups.

Owns the choice of the transport by address.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType

from mqfs.client.group import Group, make_groups, require_group
from mqfs.client.types import Link
from mqfs.client.words import file_name
from mqfs.errors import BadRequest, Unsupported

TRANSPORTS = ("auto", "ring", "9p")


def connect(
    address: str,
    *,
    transport: str = "auto",
    user: str = "",
    aname: str = "",
    timeout: float | None = 10.0,
    reconnect: bool | float = True,
    token: str = "",
) -> Client:
    """A client of the server at an address, `unix!PATH` or `tcp!HOST!PORT`.

    `transport`: "9p"; "ring": messages go through shared memory with a server on this machine, and where a group's
    cannot the error says why; "auto": they do where they can. `aname`: the group that is to be the root. `timeout`:
    seconds, of connecting. `reconnect`: whether a connection that was lost is made anew by the next call, and
    subscriptions and consumers wait for the server and go on (a number: so many seconds at most). `token`: over TCP,
    the secret that says who this is. Raises BadAddress where nobody answers.
    """
    if transport not in TRANSPORTS:
        raise BadRequest(f"transport {transport!r}; one of {', '.join(TRANSPORTS)} is right")
    if transport != "9p":
        from mqfs.client.transport.ring import RingLink, why_not

        reason, required = why_not(address, user), transport == "ring"
        if not reason:
            ringed = RingLink(address, user=user, aname=aname, timeout=timeout, reconnect=reconnect, required=required)
            return Client(ringed, reconnect)
        if required:
            raise Unsupported(f"transport 'ring': {reason}; 'auto' and '9p' are right")
    from mqfs.client.transport.ninep import NinepTransport

    link = NinepTransport(
        address, user=user, aname=aname, timeout=timeout, reconnect=reconnect is not False, token=token
    )
    return Client(link, reconnect)


def open(store: str | os.PathLike[str] | None, *, defaults: Sequence[str] = ()) -> Client:
    """A client of a store that no server has: the engine runs in this process, which has the store until `close`.

    The store is made if there is none; None: in memory. Raises BadStore where another process has it; that says how to
    reach it. `defaults`: ctl lines of new groups.
    """
    from mqfs.client.transport.embedded import EmbeddedTransport

    return Client(EmbeddedTransport(None if store is None else os.fspath(store), defaults), False)


class Client:
    """A tree; `mqfs.connect` and `mqfs.open` give it. Any number of threads may use it."""

    def __init__(self, link: Link, reconnect: bool | float) -> None:
        self._link, self._reconnect = link, reconnect
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<mqfs client of {self._link.where}>"

    def group(self, path: str = "", *, create: bool = False, ctl: Sequence[str] = ()) -> Group:
        """A group by its path from the root. `create`: it, and those above it, are made if they are missing. `ctl`:
        settings it is then to have. NotFound where there is none."""
        path = "/".join(file_name(name) for name in path.split("/") if name)
        if create and path:
            make_groups(self._link, path)
        else:
            require_group(self._link, path)
        with self._lock:
            group = self._groups.setdefault(path, Group(self._link, path, self._reconnect))
        if ctl:
            group.ctl(*ctl)
        return group

    def remove_group(self, path: str) -> None:
        """Remove a group that holds no streams and groups."""
        path = "/".join(file_name(name) for name in path.split("/") if name)
        with self._lock:
            group = self._groups.pop(path, None)
        if group is not None:
            group.close()
        self._link.remove(path)

    def close(self) -> None:
        """End everything that was begun here; messages that were published stay."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
