"""`mq peek`: what waits in a group, a stream or a consumer, taken from nobody."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator

from mq_cat.output import as_json
from mq_tools.cursor import Cursor, Message
from mq_tools.errors import ToolError, reason
from mq_tools.files import READ_BYTES, opened, stats_of
from mq_tools.place import Place


def peek(place: Place) -> Iterator[tuple[bytes, bytes]]:
    """Each message that waits: its body, and one JSON object about it."""
    if place.kind == "group":
        return _by_cursor(place, "")
    if place.kind == "stream" and not _is_shared(place):
        return _by_cursor(place, place.name)
    return _by_file(place)


def _is_shared(place: Place) -> bool:
    """Whether it is a work queue, which itself shows what waits."""
    return "consumer" in stats_of(place.group).get("streams", {}).get(place.name, {})


def _by_file(place: Place) -> Iterator[tuple[bytes, bytes]]:
    """Opened for reading only, it shows what waits, a message a read, then the end."""
    with opened(place.path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        while True:
            try:
                body = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ToolError(f"{place.path}: {reason(error)}") from error
            if not body:
                return
            yield body, body_as_json(body)


def body_as_json(body: bytes) -> bytes:
    try:
        return json.dumps({"body": body.decode()}, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return json.dumps({"body_base64": base64.b64encode(body).decode()}).encode()


def _by_cursor(place: Place, stream: str) -> Iterator[tuple[bytes, bytes]]:
    cursor = Cursor(place.group)
    try:
        if stream:
            cursor.select([stream])
        cursor.command("seek first")
        cursor.command("until end")
        while (messages := _take(cursor)) is not None:
            for message in messages:
                yield message.body, as_json(message)
    finally:
        cursor.close()


def _take(cursor: Cursor) -> list[Message] | None:
    try:
        return cursor.take()
    except EOFError:
        return None
    except OSError as error:
        raise ToolError(f"{cursor.group}: {reason(error)}") from error
