"""`mq peek`: read the waiting messages of a group, stream or consumer without a claim."""

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
    """Yield the body of each waiting message, and the message as one JSON object. Raises ToolError."""
    if target.kind == "group":
        return _by_cursor(target.group)
    if target.kind == "stream" and not _is_work_queue(target):
        return _by_cursor(target.group, target.name)
    return _by_file(target)


def _is_work_queue(target: TreePath) -> bool:
    return "consumer" in stats_of(target.group).get("streams", {}).get(target.name, {})


def _count_waiting(target: TreePath) -> int:
    """Return the number of messages that wait in a work queue or consumer. Raises ToolError.

    Return 0 if this user may not read every file of the group: some messages may be of such a stream.
    """
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
    """Yield the waiting messages of a work queue or consumer. Opened for reading only, it shows one a read, then EOF.

    An empty read is an empty message if more messages wait than were read; else it is the end of file.
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
    """Yield the present messages of a stream, or of the group without one. Raises ToolError."""
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
            return []  # messages were evicted before they were read; later ones remain
        raise ToolError(f"{cursor.group}: {reason(error)}") from error
