"""Consumer: the messages of `.consumers/NAME`, each acked after output.

Never waits: a read returns messages, nothing yet, or end of file.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mq_tools.cursor import Cursor, Message, read_all
from mq_tools.errors import ToolError, reason
from mq_tools.parts import PartMissing, whole

_COMMAND_SEQUENCES = 1000  # the length of a command is limited


class Consumer(Cursor):
    """An open consumer. It claims one message at a time; with `records`, as many as a read returns. `warn` prints a
    line for a person."""

    def __init__(self, group: str, name: str, warn: Callable[[str], None], *, records: bool) -> None:
        self._warn = warn
        self.format = "record" if records else "json"
        self._line = b""
        self.path = os.path.join(group, ".consumers", name)
        if "/" in name or name in ("", ".", ".."):
            raise ToolError(f"invalid consumer {name!r} (expected the name of a file in {group}/.consumers)")
        if os.path.lexists(os.path.dirname(self.path)) and not os.path.lexists(self.path):
            raise ToolError(f"{group}: no consumer {name!r} (create it: touch {self.path})")
        super().__init__(group, os.path.join(".consumers", name), records=records)

    def read(self) -> list[Message] | None:
        """Claim and return the next messages; None if there are none yet. Raises EOFError at the end, OSError."""
        claimed = super().read() if self.format == "record" else self._read_line()
        return None if claimed is None else list(self._whole(claimed))

    def _read_line(self) -> list[Message] | None:
        while not self._line.endswith(b"\n"):  # a large message takes two reads
            data = read_all(self.fd)
            if data is None:
                return None
            if not data:
                raise EOFError
            self._line += data
        line, self._line = self._line, b""
        return [message_of(line)]

    def _whole(self, claimed: list[Message]) -> Iterator[Message]:
        """Yield the messages with complete bodies. A message without all its parts is never acked:
        it becomes a dead letter, or is requeued."""
        for message in claimed:
            try:
                yield whole(self.group, message)
            except PartMissing as error:
                self._fail(message, f"dead {message.sequence} {error}", str(error))
            except (ToolError, OSError) as error:
                text = reason(error) if isinstance(error, OSError) else str(error)
                self._fail(message, f"nack {message.sequence}", f"cannot read its parts: {text}")

    def _fail(self, message: Message, command: str, text: str) -> None:
        self._warn(f"{message.stream} {message.sequence}: {text}, not acknowledged")
        for line in (command, f"nack {message.sequence}"):  # `dead` is refused for a dead letter, or for lack of room
            try:
                os.write(self.fd, f"{line}\n".encode())
                return
            except OSError:
                read_all(self.fd)  # the error text: left unread, it would be taken for the next message

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Ack the messages. Raises ToolError. A lost claim is no error: the message is redelivered."""
        self._settle("ack", messages)

    def release(self, messages: Sequence[Message]) -> None:
        """Requeue the messages immediately; errors are ignored."""
        with suppress(ToolError):
            self._settle("release", messages)

    def _settle(self, verb: str, messages: Sequence[Message]) -> None:
        for at in range(0, len(messages), _COMMAND_SEQUENCES):
            self._settle_some(verb, messages[at : at + _COMMAND_SEQUENCES])

    def _settle_some(self, verb: str, messages: Sequence[Message]) -> None:
        try:
            os.write(self.fd, f"{verb} {' '.join(str(message.sequence) for message in messages)}\n".encode())
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise ToolError(f"{self.path}: {verb}: {reason(error)}") from error
            read_all(self.fd)  # the error text: left unread, it would be taken for the next message


def message_of(line: bytes) -> Message:
    """Return the message of a line in `format json`. Raises ValueError, KeyError."""
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
