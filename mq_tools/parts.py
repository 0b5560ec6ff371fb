"""Bodies in parts: a body larger than one message is several adjacent messages of its stream, see mqfs(4).

Formats `json` and `record` of a consumer show only the last part, whose claim settles the whole body. This module reads
the earlier parts by a cursor.
"""

from __future__ import annotations

import os
import re

from mq_tools.cursor import Cursor, Message

_PLACE = re.compile(r"([1-9][0-9]*)(?:/([1-9][0-9]*))?")


class PartMissing(Exception):
    """A body is not complete."""


def place_of(message: Message) -> tuple[int, int]:
    """Return the number of a part and the total, which is 0 if its header has none; (0, 0) for a whole body."""
    match = _PLACE.fullmatch(message.headers.get("part", ""))
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def whole(group: str, last: Message) -> Message:
    """Return a consumer's message with its whole body, and with the records of all parts if it has its record.

    Raises PartMissing if the body is incomplete, ToolError and OSError if its parts cannot be read.
    """
    number, total = place_of(last)
    if (number, total) in ((0, 0), (1, 1)):
        return last
    if number != total:  # of a complete body the last part is claimed
        raise PartMissing(f"part {number} of a body that is not complete")
    parts: list[Message] = []
    cursor = Cursor(group, records=bool(last.record))
    try:
        cursor.command(f"seek {max(last.sequence - total + 1, 1)}")
        cursor.command(f"until {last.sequence}")
        os.set_blocking(cursor.fd, True)
        while len(parts) < total:
            parts += cursor.read() or []
    except EOFError:
        pass
    finally:
        cursor.close()
    rows = [(part.sequence, place_of(part)[0]) for part in parts]
    if rows != [(last.sequence - total + at, at) for at in range(1, total + 1)]:
        raise PartMissing(f"part {total} of a body that is not complete")
    record = b"".join(part.record for part in parts[:-1]) + last.record
    return last._replace(body=b"".join(part.body for part in parts), record=record)
