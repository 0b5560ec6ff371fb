"""`mq peek`: the waiting messages of a group, stream or consumer; none is claimed."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterator
from itertools import count

from mq_cat.output import as_json
from mq_tools.cursor import Cursor, Message
from mq_tools.errors import ToolError, reason
from mq_tools.files import READ_BYTES, open_file, stats_of
from mq_tools.tree import TreePath


def peek(target: TreePath) -> Iterator[tuple[bytes, bytes]]:
    """Each waiting message: its body, and the message as one JSON object. Raises ToolError."""
    if target.kind == "group":
        return _by_cursor(target.group)
    if target.kind == "stream" and not _is_work_queue(target):
        return _by_cursor(target.group, target.name)
    return _by_file(target)


def _is_work_queue(target: TreePath) -> bool:
    return "consumer" in stats_of(target.group).get("streams", {}).get(target.name, {})


def _count_waiting(target: TreePath) -> int:
    """How many messages wait in a work queue or consumer; 0 where some may be of streams that this user may not read.
    Raises ToolError."""
    try:
        with os.scandir(target.group) as entries:
            if not all(os.access(entry.path, os.R_OK) for entry in entries):
                return 0
    except OSError:
        return 0
    rows = stats_of(target.group).get("streams" if target.kind == "stream" else "consumers", {})
    row = rows.get(target.name, {})
    return int((row.get("consumer", {}) if target.kind == "stream" else row).get("waiting", 0))


def _by_file(target: TreePath) -> Iterator[tuple[bytes, bytes]]:
    """A work queue or consumer, open for reading only: a waiting message a read, then end of file.

    A read of an empty message looks like the end of file; it is one where more messages wait than were read.
    """
    path = target.path
    with open_file(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        for number in count():
            try:
                body = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ToolError(f"{path}: {reason(error)}") from error
            if not body and number >= _count_waiting(target):
                return
            yield body, body_as_json(body)


def body_as_json(body: bytes) -> bytes:
    try:
        return json.dumps({"body": body.decode()}, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return json.dumps({"body_base64": base64.b64encode(body).decode()}).encode()


def _by_cursor(group: str, stream: str = "") -> Iterator[tuple[bytes, bytes]]:
    cursor = Cursor(group)
    try:
        for message in by_cursor(cursor, stream):
            yield message.body, as_json(message)
    finally:
        cursor.close()


def by_cursor(cursor: Cursor, stream: str) -> Iterator[Message]:
    """The messages of a stream, or of the group, that are there now. Raises ToolError."""
    if stream:
        cursor.select([stream])
    cursor.command("seek first")
    cursor.command("until end")
    while (messages := _read(cursor)) is not None:
        yield from messages


def _read(cursor: Cursor) -> list[Message] | None:
    try:
        return cursor.read()
    except EOFError:
        return None
    except OSError as error:
        if error.errno == errno.EPIPE:
            return []  # evicted before they were read: those after them are still there
        raise ToolError(f"{cursor.group}: {reason(error)}") from error
