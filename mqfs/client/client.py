"""Clients: a tree and its groups, and the choice of the transport."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from mqfs.client.group import Group
from mqfs.client.info import Settings, setting_lines
from mqfs.client.prefetch import close_all
from mqfs.client.types import Link
from mqfs.client.waiting import Backoff
from mqfs.errors import BadName, BadRequest, Busy, Denied, Exists, MqfsError, NotDirectory, NotFound, Unsupported
from mqfs.net.sockets import UnixAddress, default_address, parse_addresses
from mqfs.syntax.names import check_file_name, stream_name

TRANSPORTS = ("auto", "ring", "9p")
SETTINGS_S = 5.0  # changing settings is retried for this time while the group is busy


def connect(
    address: str | None = None,
    *,
    transport: str = "auto",
    user: str = "",
    aname: str = "",
    timeout: float | None = 10.0,
    reconnect: bool | float = True,
    token: str = "",
) -> Client:
    """Connect to a server.

    Over TLS, MQFS_CA in the environment is the file of trusted authorities (else the system's), and MQFS_CERT the file
    of the client's certificate and key.

    Args:
        address: `unix:PATH`, `tcp://HOST:PORT`, `tls://HOST:PORT`, `HOST:PORT`, or as servers print it: `unix!PATH`,
            `tcp!HOST!PORT`, `tls!HOST!PORT`. Several, with commas between, are a primary and its standbys: the client
            uses the one that serves, and after a takeover the next. None: $MQFS_ADDRESS, else ./mqfs.sock, else
            mqfs.sock in the user's runtime folder.
        transport: "9p"; "ring": shared memory of a server on this machine; "auto": shared memory where possible.
        user: The name of the user. Empty: the user of the process, or of the token.
        aname: The group to be the root. Empty: the root of the tree.
        timeout: The most seconds to connect. None: without limit.
        reconnect: Whether calls reconnect after a lost connection, and subscriptions and consumers wait for the server;
            a number: at most that many seconds.
        token: The secret that identifies a client over TCP or TLS. Empty: none.

    Returns:
        A client.

    Raises:
        Disconnected: No server answers.
        BadAddress: The address is invalid.
        BadConfig: A certificate cannot be read.
        BadRequest: The transport is unknown, or a token is given with a unix socket.
        Unsupported: With `transport="ring"`: rings cannot be used; the text has the reason.
        Denied: The user, or the token, is refused.
    """
    if address is None:
        address = default_address()
    if token and any(isinstance(one, UnixAddress) for one in parse_addresses(address)):  # it would not be sent
        raise BadRequest(f"token with {address}: not used on a unix socket (expected tcp!HOST!PORT or tls!HOST!PORT)")
    if transport not in TRANSPORTS:
        raise BadRequest(f"invalid transport {transport!r} (expected {', '.join(TRANSPORTS)})")
    if transport != "9p":
        from mqfs.client.transport.ring import RingLink, why_not

        reason, required = why_not(address, user), transport == "ring"
        if not reason:
            ringed = RingLink(address, user=user, aname=aname, timeout=timeout, reconnect=reconnect, required=required)
            return Client(ringed, reconnect)
        if required:
            raise Unsupported(f"transport 'ring': {reason} (expected 'auto' or '9p')")
    from mqfs.client.transport.ninep import NinepTransport

    link = NinepTransport(
        address, user=user, aname=aname, timeout=timeout, reconnect=reconnect is not False, token=token
    )
    return Client(link, reconnect)


def open(store: str | os.PathLike[str] | None, *, defaults: Settings | Sequence[str] = ()) -> Client:
    """Open a store with the engine in this process, which locks it until `close`.

    Args:
        store: The store's folder, made if it is missing. None: in memory.
        defaults: Settings of new groups, or lines of ctl.

    Returns:
        A client.

    Raises:
        BadStore: Another process has the store open; the text says how to reach it. Or the store has a replicated log,
            or is damaged.
        BadCommand: A line is invalid.
    """
    from mqfs.client.transport.embedded import EmbeddedTransport

    lines = defaults.lines() if isinstance(defaults, Settings) else require_lines("defaults", defaults)
    return Client(EmbeddedTransport(None if store is None else os.fspath(store), lines), False)


def require_lines(what: str, lines: Sequence[str]) -> Sequence[str]:
    """Return lines. Raises TypeError for a single text, each character of which would be a line."""
    if isinstance(lines, str | bytes):
        raise TypeError(f"invalid {what} {lines!r} (expected a list of lines)")
    return lines


class Client:
    """A tree, from `mqfs.connect` or `mqfs.open`. Thread-safe. A `with` block closes it."""

    def __init__(self, link: Link, reconnect: bool | float) -> None:
        self._link, self._reconnect = link, reconnect
        self._groups: dict[tuple[str, bool], Group] = {}  # by path, and whether it escapes names
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<mqfs client of {self._link.label}{', closed' if self._closed else ''}>"

    def group(
        self,
        path: str = "",
        *,
        create: bool = False,
        settings: Settings | None = None,
        ctl: Sequence[str] = (),
        escape: bool = False,
    ) -> Group:
        """Open a group.

        Args:
            path: The group's path from the root. Empty: the root.
            create: Whether the group, and groups above it, are made where they are missing.
            settings: Settings to change. If they are refused, nothing is made. None: none.
            ctl: More lines to write to its ctl: mqfs(4).
            escape: Whether its calls accept any text as the name of a stream, and escape it as `mqfs.escape` does;
                `Message.topic` is the text.

        Returns:
            The group; the same object for the same path and `escape`.

        Raises:
            NotFound: The group is missing.
            BadCommand: A setting is invalid.
            Denied: The user may not make the group, or write its ctl.
        """
        path = "/".join(check_file_name(name) for name in path.split("/") if name)
        lines, made = setting_lines(settings, require_lines("ctl", ctl)), []
        if create and path:
            made = make_groups(self._link, path)
        else:
            require_group(self._link, path)
        with self._lock:
            group = self._groups.get((path, escape))
            if group is None:
                group = self._groups[path, escape] = Group(self._link, path, self._reconnect, escape)
        if lines:
            try:
                group.ctl(*lines)
            except BaseException:
                self._unmake(made)
                raise
        return group

    def _require(self, path: str, settings: Sequence[str]) -> Group:
        """Return a group for a library of jobs, with `escape=True`; a missing group is made.

        Without the first of the settings jobs would be lost. If the group lacks it, all are written: its maker has not
        written them yet, was killed before that, or has set others. Raises Busy or Denied if that fails."""
        group = self.group(path, escape=True, create=True)
        try:
            lacks = bool(settings) and settings[0] not in group._ctl_lines()
        except Denied:  # this program has the right to publish only
            lacks = False
        if lacks:
            try:
                Backoff(SETTINGS_S, threading.Event()).retry(partial(group.ctl, *settings), Busy)
            except (Busy, Denied) as error:
                raise type(error)(f"group {path!r} loses jobs without {settings[0]!r}: {error}") from error
        return group

    def _unmake(self, made: Sequence[str]) -> None:
        """Remove groups that were just made: with the default settings they would lose messages silently."""
        for path in reversed(made):
            with suppress(MqfsError):  # others use the group already
                self.remove_group(path)

    def remove_group(self, path: str, *, recursive: bool = False) -> None:
        """Remove a group.

        Args:
            path: The group's path from the root.
            recursive: Whether its streams, their messages, and the groups inside are removed, too.

        Raises:
            NotFound: The group is missing.
            NotEmpty: It has streams or groups, without `recursive`.
            NotPermitted: It has `protect on`, or is the root.
        """
        path = "/".join(check_file_name(name) for name in path.split("/") if name)
        if recursive and path:
            group = self.group(path)
            for name in group.groups():
                self.remove_group(f"{path}/{name}", recursive=True)
            for stream in group.streams():
                with suppress(NotFound):
                    group.remove(stream)
        self._link.remove(path)
        with self._lock:
            groups = [self._groups.pop((path, escape), None) for escape in (False, True)]
        for known in groups:
            if known is not None:
                known.close()

    def close(self) -> None:
        """End the handlers, and close the connection or the store."""
        with self._lock:
            groups, self._groups, self._closed = list(self._groups.values()), {}, True
        for group in groups:
            group.close()
        close_all(self._link)
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


def require_group(link: Link, path: str) -> None:
    """Check that a group exists at a path. Raises NotFound."""
    try:
        link.open(f"{path}/.stats", "r").close()
    except (NotFound, NotDirectory):
        raise NotFound(f"no group {path!r} (make it: create=True)") from None
    except Denied:
        pass  # it exists; each call checks its permission


def require_queue(group: Group, queue: str) -> None:
    """Check the queue of a library of jobs. Raises BadName if its stream is the group's dead-letter stream."""
    try:
        dead = group.settings().dead
    except Denied:  # this program has the right to publish only
        return
    if stream_name(queue) == dead:
        raise BadName(f"queue {queue!r}: group {group.path!r} has its dead letters there (expected another name)")


def make_groups(link: Link, path: str) -> list[str]:
    """Make a group and the groups above it where they are missing; existing ones need no permission. Returns the paths
    of those made."""
    made: list[str] = []
    try:
        require_group(link, path)
    except NotFound:
        above = path.rpartition("/")[0]
        if above:
            made = make_groups(link, above)
        with suppress(Exists):
            link.mkdir(path)
            made.append(path)
    return made
