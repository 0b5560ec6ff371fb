"""`.kept/STREAM` as a file of the web: ranges and entity tags."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from typing import Any, cast

from mqfs.engine.files.snapshot_file import SnapshotHandle
from mqfs.errors import MqfsError
from mqfs.http.answers import RAW, SANDBOX, Answer, Cut, Headers
from mqfs.http.call import Call
from mqfs.http.refusals import BadRange

PIECE_BYTES = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


async def read(call: Call) -> Answer:
    """The whole file, or a range of it."""
    handle = cast(SnapshotHandle, call.tree.open(call.user, call.target.node, os.O_RDONLY))
    try:
        return _answer(call, handle)
    except BaseException:
        handle.close()
        raise


def entity_tag(stream: Any, size: int) -> str:
    return f'"{stream.kept.first_kept()}-{stream.kept.newest_kept()}-{size}"'


def _answer(call: Call, handle: SnapshotHandle) -> Answer:
    given, size = call.request.headers, handle.size
    tag = entity_tag(handle.node.stream, size)
    head: Headers = [("ETag", tag), ("Accept-Ranges", "bytes"), ("Cache-Control", "no-cache"), SANDBOX]
    if call.has_tag(tag):
        handle.close()
        return Answer(304, headers=head)
    first, last, status = 0, size - 1, 200
    if (wanted := given.get("range")) is not None and given.get("if-range", tag) == tag:
        found = _range(wanted, size)
        if found is not None:
            first, last, status = *found, 206
            head.append(("Content-Range", f"bytes {first}-{last}/{size}"))
    head.append(("Content-Length", str(last + 1 - first)))
    return Answer(status, _pieces(call, handle, first, last + 1), RAW.kind, head, lambda _: handle.close())


def _range(text: str, size: int) -> tuple[int, int] | None:
    """First and last byte; None where it is to be ignored: malformed, or several. Raises BadRange."""
    match = _RANGE.match(text)
    if match is None or text == "bytes=-":
        return None
    begin, end = match[1], match[2]
    if begin and end and int(begin) > int(end):
        return None
    first = int(begin) if begin else max(size - int(end), 0)
    last = min(int(end), size - 1) if begin and end else size - 1
    if first > last:
        raise BadRange(size)
    return first, last


async def _pieces(call: Call, handle: SnapshotHandle, at: int, end: int) -> AsyncIterator[bytes]:
    while at < end:
        try:
            data = handle.read(min(PIECE_BYTES, end - at), at)
        except MqfsError as error:  # it went meanwhile
            raise Cut from error
        assert isinstance(data, bytes)
        if not data:
            raise Cut
        at += len(data)
        yield data
        await call.front.pause()
