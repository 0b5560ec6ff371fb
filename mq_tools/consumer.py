"""Consumer: a group's messages through `.consumers/NAME`, each acknowledged once it was written out.

Owns claims and what is said about them. Never waits: as with a cursor, a read has messages, or nothing yet, or the end.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress

from mq_tools.cursor import Cursor, Message, read_all
from mq_tools.errors import ToolError, reason

_AT_ONCE = 1000  # messages in one command, whose length has a limit


class Consumer(Cursor):
    """An open consumer. One message is claimed at a time; where whole records are wanted, as many as a read gives."""

    def __init__(self, group: str, name: str, *, records: bool) -> None:
        self.format = "record" if records else "json"
        self._line = b""
        self.path = os.path.join(group, ".consumers", name)
        if "/" in name or name in ("", ".", ".."):
            raise ToolError(f"{name!r} is no consumer's name; consumers are the files in {group}/.consumers")
        if os.path.lexists(os.path.dirname(self.path)) and not os.path.lexists(self.path):
            raise ToolError(f"{group}: no consumer {name!r}; make it with: touch {self.path}")
        super().__init__(group, os.path.join(".consumers", name), records=records)

    def take(self) -> list[Message] | None:
        """Claim the next messages; None where there is nothing yet. Raises EOFError at the end, OSError."""
        if self.format == "record":
            return super().take()
        while not self._line.endswith(b"\n"):  # a long message comes in two reads
            data = read_all(self.fd)
            if data is None:
                return None
            if not data:
                raise EOFError
            self._line += data
        line, self._line = self._line, b""
        return [message_of(line)]

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """They are done. Raises ToolError; says nothing where the claim is gone: then they come again."""
        self._say("ack", messages)

    def give_back(self, messages: Sequence[Message]) -> None:
        """Others shall have them, at once."""
        with suppress(ToolError):
            self._say("release", messages)

    def _say(self, verb: str, messages: Sequence[Message]) -> None:
        for at in range(0, len(messages), _AT_ONCE):
            self._say_some(verb, messages[at : at + _AT_ONCE])

    def _say_some(self, verb: str, messages: Sequence[Message]) -> None:
        try:
            os.write(self.fd, f"{verb} {' '.join(str(message.sequence) for message in messages)}\n".encode())
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise ToolError(f"{self.path}: {verb}: {reason(error)}") from error
            read_all(self.fd)  # why: else it would be the next message


def message_of(line: bytes) -> Message:
    """The message of a line of `format json`."""
    row = json.loads(line, parse_float=str)
    whole, _, part = str(row["time"]).partition(".")
    body = row["body"].encode() if "body" in row else base64.b64decode(row["body_base64"])
    return Message(
        row["sequence"],
        int(whole) * 1_000_000_000 + int(part.ljust(9, "0")[:9]),
        row["stream"],
        body,
        row.get("headers", {}),
        deliveries=row.get("deliveries", 0),
    )
