"""`.batch`: many messages in one write, as one unit.

Owns what such a write is made of messages for; the layout of a frame is in batch_frames.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from mqfs import errors
from mqfs.engine.files.command_file import CommandFile
from mqfs.engine.language import batch_frames
from mqfs.engine.language.permissions import W, require
from mqfs.engine.publishing.admission import Stream as Target
from mqfs.engine.publishing.atomic_batch import AtomicBatch, StreamTotals, require_fit
from mqfs.engine.stream import Stream
from mqfs.log import batch, headers
from mqfs.log.record_batch import Source
from mqfs.wait import Step


class FramesFile(CommandFile):
    """A file to which frames are written, those of one write together."""

    publishes = True
    _prepared: batch_frames.Packing | None = None

    @property
    def places(self) -> Mapping[bytes, int]:
        """The streams that are known by their place already."""
        return {}

    def stream(self, name: str) -> Any:
        """One that its user may write to. Raises NotFound, Denied."""
        raise NotImplementedError

    def _post(self, packed: batch.EncodedBatch, value: int) -> Step[int]:
        """Take the messages of a write, which returns that value."""
        raise NotImplementedError

    def count_messages(self, data: bytes) -> int:
        return batch.count_frames(data)

    def prepare(self, data: bytes) -> Iterator[None]:
        """Check in steps what a write of that data then finds done. Raises what the write would."""
        self.require(reading=False)
        try:
            self._prepared = self._packing(data)
            yield from self._prepared.steps()
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        packing, self._prepared = self._prepared, None
        try:
            if packing is None or packing.data is not data or packing.outdated:
                packing = self._packing(data)
            return self._post(packing.whole(), len(data))
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _packing(self, data: bytes) -> batch_frames.Packing:
        sender, always = headers.of_sender(self.user.uid), self.group.settings.sender
        return batch_frames.Packing(data, self.places, sender, always, self.stream)


class BatchHandle(FramesFile):
    """An open `.batch`."""

    text: bytes | None = None  # the sequence of the last unit's first message

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.take_response(count)
        if told is not None:
            return told
        text, self.text = self.text or b"", None
        self.text = text[count:] or None
        return text[:count]

    def _post(self, packed: batch.EncodedBatch, value: int) -> Step[int]:
        streams = [self.stream(name) for name in packed.fresh]
        tallies: dict[Target, StreamTotals] = {
            streams[row.place]: StreamTotals(row.messages, row.size, row.last) for row in packed.rows
        }
        require_fit(packed.messages, len(packed.data))
        numbers = array("I", [stream.number for stream in streams])
        source = Source(packed.messages, len(packed.data), numbers, lambda: [packed.data])
        unit = AtomicBatch(self.group.publisher, [source], tallies, value)
        unit.done = lambda: self._tell(unit)
        return unit.write()

    def stream(self, name: str) -> Stream:
        stream = self.group.streams.get(name)
        if stream is None:
            raise errors.NotFound(f"no stream {name!r} in this group")
        require(self.user, stream.state, W, name)
        return stream

    def _tell(self, unit: AtomicBatch) -> None:
        self.text = f"{unit.first}\n".encode() if unit.first else None
