"""Files that take commands, line by line: a write is all or nothing, and a refusal is the next read."""

from __future__ import annotations

import contextlib

from mqfs import errors, limits
from mqfs.audit import REFUSALS
from mqfs.engine.files.handle import OpenFile
from mqfs.errors import shortened
from mqfs.wait import Step


class CommandFile(OpenFile):
    """A file whose writes are command lines and whose refusals can be read."""

    refusal: bytes | None = None  # why the last write was refused
    pending: bytes | None = None  # the text that a command asked for, `info` say

    def lines_of(self, data: bytes) -> str:
        """The whole lines there are now; an unfinished one waits. Raises TooLong, BadCommand."""
        text = self.partial + data
        if len(text) > limits.CTL_BYTES:
            raise errors.TooLong(f"at most {limits.CTL_BYTES} bytes of commands at once")
        whole, newline, rest = text.rpartition(b"\n")
        if len(data) < self.whole_below:
            whole, newline, rest = text, b"", b""
        if rest or self.partial:
            self.keep(rest)
        try:
            return (whole + newline).decode()
        except UnicodeDecodeError:
            raise errors.BadCommand("commands are valid UTF-8") from None

    def refused(self, error: errors.MqfsError) -> None:
        if self.partial:
            self.keep(b"")
        self.refusal = f"{shortened(str(error))}\n".encode()
        self.group.refuse(self.user, self.node.name, str(error))
        if isinstance(error, REFUSALS):
            self.audit("write", error.detail, status="refused")

    def flush(self) -> Step[int]:
        return self.write(b"\n") if self.partial else 0

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(errors.MqfsError):  # it is in `.errors`
                self.flush()
        super().close()

    def take_response(self, count: int) -> bytes | None:
        """What the next read returns first, once: why a write was refused, then what a command asked for."""
        text = None
        if self.refusal is not None:
            text, self.refusal = self.refusal[:count], self.refusal[count:] or None
        elif self.pending is not None:
            text, self.pending = self.pending[:count], self.pending[count:] or None
        return text


class PrintedCommands(CommandFile):
    """A file of commands that prints, read from its beginning, how things stand."""

    text: bytes | None = None

    def print(self) -> str:
        raise NotImplementedError

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.take_response(count)
        if told is not None:
            return told
        if self.text is None or offset == 0:
            self.text = self.print().encode()
        return self.text[offset : offset + count]
