"""Messages that are written once: `.put` of each group, and the ids under which a mount writes."""

from __future__ import annotations

import json
import os
import secrets
from collections import OrderedDict
from itertools import count as counter
from typing import TYPE_CHECKING

from mqfs import limits
from mqfs.errors import BadCommand, MqfsError
from mqfs.model import User
from mqfs.ninep.client.machine import check
from mqfs.ninep.codec import messages as m
from mqfs.remote.link import Link
from mqfs.remote.session import Procedure, drop
from mqfs.syntax.duration import parse_duration

if TYPE_CHECKING:
    from mqfs.remote.tree import RemoteNode, RemoteTree

CHANNELS = 256  # open `.put` files without a writer
REOPEN_PAUSES_S = 0.3, 0.7  # between attempts to open a file again

_mount_id = secrets.token_hex(8)
_numbers = counter(1)


def next_id() -> bytes:
    """Return an id for one message."""
    return b"mount-%s.%d" % (_mount_id.encode(), next(_numbers))


def with_id(data: bytes, id: bytes) -> bytes:
    """Add an id to a write to `.put`, unless it has one. A write that cannot be parsed is left to the server, as is a
    schedule without a name, which the server refuses."""
    head = data[: limits.PUT_BYTES].decode("utf-8", "surrogateescape")
    try:
        value, _ = json.JSONDecoder().raw_decode(head)
    except (ValueError, RecursionError):
        return data
    if not isinstance(value, dict) or not value or not value.keys().isdisjoint(("id", "every", "cron")):
        return data
    return b'{"id":"%s",%s' % (id, data[1:])


def read_settings(tree: RemoteTree, node: RemoteNode, link: Link) -> Procedure[dict[str, str]]:
    """Return the one-word settings of the group that a file is in."""
    assert node.parent is not None
    ctl, _ = yield from tree.lookup_as(None, node.parent, "ctl", link)
    fid, replies = yield from tree.opened_with(
        link, None, ctl, os.O_RDONLY, lambda fid: [m.Tread(0, fid, 0, limits.CTL_BYTES)]
    )
    drop(link, fid)
    text: str = check(replies[0]).data.decode("utf-8", "replace")  # type: ignore[attr-defined]
    return {words[0]: words[1] for line in text.split("\n") if len(words := line.split()) == 2}


def read_dedup(tree: RemoteTree, put: RemoteNode, link: Link) -> Procedure[float]:
    """Return for how many seconds the group of a `.put` remembers an id."""
    settings = yield from read_settings(tree, put, link)
    if "dedup" not in settings:
        raise BadCommand("ctl: no dedup")
    return parse_duration(settings["dedup"]) / 1e9


class PutChannel:
    """`.put` of a group, open for a user's messages to all its streams."""

    def __init__(self, tree: RemoteTree, user: User, node: RemoteNode) -> None:
        self.tree, self.user, self.node = tree, user, node
        self.users = 0
        self.fid, self.link = -1, None  # type: int, Link | None
        self.dedup_s = float("inf")

    def open(self, link: Link) -> Procedure[None]:
        """Open it on a connection. Raises why that fails."""
        fid, _ = yield from self.tree.opened_with(link, self.user, self.node, os.O_WRONLY, lambda fid: [])
        try:
            self.dedup_s = min(self.dedup_s, (yield from read_dedup(self.tree, self.node, link)))
        except MqfsError:
            drop(link, fid)
            raise
        self.fid, self.link = fid, link

    def reopen(self, link: Link) -> Procedure[None]:
        """Open it on a new connection. If that fails, so do its writes."""
        self.link = None
        for pause_s in (*REOPEN_PAUSES_S, 0.0):
            try:
                yield from self.open(link)
            except MqfsError:
                if pause_s:  # a stopping server may refuse it: then this connection ends
                    yield pause_s
            else:
                return

    def on_ready(self) -> None:
        """Do nothing when all files are open again."""

    def on_closed(self) -> None:
        """Do nothing when the mount ends."""

    def close(self) -> None:
        self.tree.session.files.pop(self, None)
        if self.link is not None:
            drop(self.link, self.fid)


class PutChannels:
    """The channels of a mount, by user and group. Some stay open without a writer, for the next one."""

    def __init__(self, tree: RemoteTree) -> None:
        self._tree = tree
        self._by_key: OrderedDict[tuple[int, int], PutChannel] = OrderedDict()

    def find(self, link: Link, user: User, stream: RemoteNode) -> Procedure[PutChannel | None]:
        """Return the channel for a stream, or None if the user may not use it."""
        group = stream.parent
        assert group is not None
        key = user.uid, group.qid.path
        channel = self._by_key.get(key)
        if channel is None or channel.link is not link:
            try:
                node, _ = yield from self._tree.lookup_as(user, group, ".put", link)
                channel = PutChannel(self._tree, user, node)
                yield from channel.open(link)
            except MqfsError:
                return None
            if key in self._by_key and self._by_key[key].link is link:  # made meanwhile
                drop(link, channel.fid)
                channel = self._by_key[key]
            else:
                self._by_key[key] = channel
                self._tree.session.files[channel] = None
        channel.users += 1
        self._by_key.move_to_end(key)
        self._trim()
        return channel

    def release(self, channel: PutChannel) -> None:
        channel.users -= 1
        if not channel.users and channel not in self._by_key.values():
            channel.close()

    def _trim(self) -> None:
        for key, channel in list(self._by_key.items())[: max(len(self._by_key) - CHANNELS, 0)]:
            del self._by_key[key]
            if not channel.users:
                channel.close()
