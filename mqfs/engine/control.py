"""`ctl`, and what every file has whose writes are command lines: whole lines, refusals that can be read.

Owns the carrying out of actions, all or nothing; the language itself is in ctl.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.ctl import Action, Settings, parse
from mqfs.engine.files import Open
from mqfs.types import Kind, Step

if TYPE_CHECKING:
    from mqfs.engine.group import Group


class Commands(Open):
    """A file whose writes are command lines and whose refusals can be read."""

    partial = b""
    refusal: bytes | None = None

    def lines_of(self, data: bytes) -> str:
        """The whole lines there are now; an unfinished one waits. Raises TooLong, BadCommand."""
        text = self.partial + data
        if len(text) > limits.CTL_BYTES:
            raise errors.TooLong(f"at most {limits.CTL_BYTES} bytes of commands at once")
        whole, newline, rest = text.rpartition(b"\n")
        self.partial = rest
        try:
            return (whole + newline).decode()
        except UnicodeDecodeError:
            raise errors.BadCommand("commands are valid UTF-8") from None

    def refused(self, error: errors.MqfsError) -> None:
        self.partial = b""
        self.refusal = f"{error}\n".encode()
        self.group.refuse(self.user, self.node.name, str(error))

    def told(self, count: int) -> bytes | None:
        """Why the last write was refused, once."""
        if self.refusal is None:
            return None
        text, rest = self.refusal[:count], self.refusal[count:]
        self.refusal = rest or None
        return text


class CtlHandle(Commands):
    """`ctl`: settings and actions of a group."""

    text: bytes | None = None

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.told(count)
        if told is not None:
            return told
        if self.text is None or offset == 0:
            self.text = "".join(f"{line}\n" for line in self.group.settings.lines()).encode()
        return self.text[offset : offset + count]

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            text = self.lines_of(data)
            return self._perform(text, len(data)) if text else len(data)
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _perform(self, text: str, value: int) -> Step[int]:
        steps = parse(text, self.group.settings)
        for settings, action in steps:
            if action is not None:
                check(self.group, settings, action)
        for settings, action in steps:
            if settings != self.group.settings:
                self.group.set(settings)
            if action is not None:
                perform(self.group, action)
        self.group.unblock()
        return self.group.promised(value)

    def _end(self) -> None:
        if self.partial:  # a last line without its newline: `printf 'replay all' >ctl` means it
            try:
                self._perform(self.partial.decode("utf-8", "replace"), 0)
            except errors.MqfsError as error:
                self.refused(error)


def check(group: Group, settings: Settings, action: Action) -> None:
    """Raises what would stop the action, before anything of its write is done."""
    if action.stream is not None and action.stream not in group.streams:
        raise errors.NotFound(f"{action.verb}: no stream {action.stream!r} in this group")
    if action.verb in ("clear", "drop") and settings.protect:
        raise errors.NotPermitted(f"{action.verb}: the group is protected; write 'protect off' first")
    if action.verb == "drop":
        stream = group.streams[action.stream or ""]
        if len(group.state.dropped) + len(action.sequences) > limits.DROPPED:
            raise errors.OverLimit(f"drop: at most {limits.DROPPED} messages dropped one by one")
        for sequence in action.sequences:
            found = group.bucket.peek(stream.number, sequence)
            gone = sequence < stream.kept_from() or sequence in group.state.dropped
            if gone or found is None or found[0] != sequence:
                raise errors.NotFound(f"drop: {stream.name} keeps no message {sequence}")


def perform(group: Group, action: Action) -> None:
    """Carry out an action that was checked."""
    if action.verb == "eof":
        group.write(group.streams[action.stream or ""], Kind.END, (b"",), 0)
    elif action.verb == "clear":
        named = [group.streams[action.stream]] if action.stream else list(group.streams.values())
        floors = [[stream.number, floor] for stream in named if (floor := stream.clear())]
        if floors:
            group.change({"do": "floor", "floors": floors})
    else:
        stream = group.streams[action.stream or ""]
        stream.advance()
        new = [s for s in dict.fromkeys(action.sequences) if s not in group.state.dropped]
        group.change({"do": "drop", "stream": stream.number, "sequences": new})
        stream.count = -1  # counted again when needed
        stream.advance()
