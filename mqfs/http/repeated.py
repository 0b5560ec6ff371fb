"""A publish like the one before it on the same connection: its head was checked then, and its stream stays open.

Owns what must not have changed since: the bytes of the head but for the length of the body, and the state of each group
from the stream's to the root. Whatever is no such request is parsed and checked as any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from mqfs.engine.files.handle import OpenFile
from mqfs.http.answers import Answer
from mqfs.http.call import Call
from mqfs.http.publishing import is_plain, keys, place_of, publish, publish_to, put_there
from mqfs.http.route import Route

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"


class RepeatedPublish:
    """`before` and `behind`: the head around the length of the body."""

    def __init__(self, call: Call, before: bytes, behind: bytes) -> None:
        self._call, self._before, self._behind = call, before, behind
        self.request = call.request
        self._place = place_of(call)
        self._handle: OpenFile | None = None
        self._logs = [(group.log, group.log.changes) for group in _up(call.group)]

    def take(self, data: bytes) -> bool:
        """Whether that is one more such request, whole and alone; its body is then the request's."""
        end = data.find(b"\r", len(self._before))
        body = end + len(self._behind)
        head = b"%b%d%b" % (self._before, len(data) - body, self._behind)
        if len(data) == body or not data.startswith(head):
            return False
        if any(log.changes != changes for log, changes in self._logs) or self._call.group.ring is not None:
            return False
        self.request.body = data[body:]
        return True

    async def publish(self) -> Answer:
        """Raises MqfsError."""
        call, handle = self._call, self._handle
        if handle is None or handle.closed:
            handle = self._handle = call.tree.open(call.user, call.target.node, os.O_WRONLY)
        answer = await publish_to(handle, call, self._place)
        return answer if answer is not None else await publish(call)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()


def _up(group: Any) -> Iterator[Any]:
    """The group and those above it, to the root."""
    yield group
    while group.parent is not group:
        group = group.parent
        yield group


def repeatable(call: Call, route: Route, data: bytes) -> RepeatedPublish | None:
    """For more publishes like that one, which is done. `data`: the bytes it came in, whole and alone."""
    request = call.request
    if route.call not in (publish, put_there) or call.target.kind == "new stream" or not request.keep_alive:
        return None
    quota = call.tree.quotas.of(call.user.uid) if call.tree.quotas is not None else None
    if quota is not None and quota.handles:
        return None  # the stream would count as open
    found, end = _LENGTH.search(data), data.find(_HEAD_END) + len(_HEAD_END)
    if found is None or found.end() > end or keys(call) or not is_plain(call.group) or request.expects_continue:
        return None
    return RepeatedPublish(call, data[: found.start(1)], data[found.end(1) : end])
