"""`.batch`: many messages in one write, as one unit.

Owns what such a write is made of messages for; the layout of a frame is in frames.py.
"""

from __future__ import annotations

from mqfs import errors, headers
from mqfs.engine import frames
from mqfs.engine.control import Commands
from mqfs.engine.permission import W, require
from mqfs.engine.stream import Stream
from mqfs.engine.unit import MESSAGE, Tally, Unit, log_bytes, require_fit
from mqfs.types import Draft, Step, User


def sent_by(user: User, frame: frames.Frame) -> bytes:
    """The headers of a message, the server's own among them. What has none is as written plainly: nobody is named."""
    return headers.encode({headers.SENDER: str(user.uid)}) + frame.head if frame.head else b""


class BatchHandle(Commands):
    """An open `.batch`."""

    text: bytes | None = None  # the sequence of the last unit's first message

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.told(count)
        if told is not None:
            return told
        text, self.text = self.text or b"", None
        self.text = text[count:] or None
        return text[:count]

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            return self._post(list(frames.parse(data)), len(data))
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _post(self, messages: list[frames.Frame], value: int) -> Step[int]:
        drafts: list[Draft] = []
        tallies: dict[Stream, Tally] = {}
        room = 0
        for ordinal, frame in enumerate(messages):
            stream = self._stream(frame.name)
            head = sent_by(self.user, frame)
            drafts.append(Draft(MESSAGE, stream.number, frame.body, head))
            tally = tallies.setdefault(stream, Tally())
            tally.messages += 1
            tally.size += len(frame.body)
            tally.last = ordinal
            room += log_bytes(len(head), len(frame.body))
        require_fit(len(drafts), room)
        unit = Unit(self.group, drafts, tallies, room, value, any(draft.headers for draft in drafts))
        unit.done = lambda: self._tell(unit)
        return unit.write()

    def _stream(self, name: str) -> Stream:
        stream = self.group.streams.get(name)
        if stream is None:
            raise errors.NotFound(f"no stream {name!r} in this group")
        require(self.user, stream.state, W, name)
        return stream

    def _tell(self, unit: Unit) -> None:
        self.text = f"{unit.first}\n".encode() if unit.first else None


__all__ = ["BatchHandle", "sent_by"]
