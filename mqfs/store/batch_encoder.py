"""An atomic batch to records, a piece at a time.

Owns the marks MORE and INNER of the records. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mqfs import errors, limits
from mqfs.log.batch import finalize
from mqfs.log.record import INNER, MORE, Row, encode, padded
from mqfs.log.record_batch import RecordBatch
from mqfs.model import Columns, Draft, Kind
from mqfs.store.segment.index import OpenIndex

_END = int(Kind.END)


def measure(drafts: Sequence[Draft]) -> tuple[int, int]:
    """(bytes they take, how many take a sequence)."""
    if isinstance(drafts, RecordBatch):
        return drafts.stored_bytes, drafts.sequence_count
    need = sum(padded(32 + len(draft.headers) + len(draft.body)) for draft in drafts)
    return need, sum(draft.kind <= _END for draft in drafts)


class BatchEncoder:
    """The records of one atomic batch, encoded piece by piece: it may be too large to hold."""

    __slots__ = ("_drafts", "_marks", "_position", "_sequence", "_time_ns", "first", "messages", "others", "stamped")

    def __init__(self, drafts: Sequence[Draft], sequence: int, time_ns: int, position: int, marks: int) -> None:
        self.stamped: list[Columns] = []
        self.messages: OpenIndex | None = None
        self.others: list[Row] = []
        self.first = -1  # sequence in the first record
        self._drafts, self._sequence, self._time_ns = drafts, sequence, time_ns
        self._position, self._marks = position, marks | MORE

    def encoded(self) -> Iterator[bytes]:
        drafts: Sequence[Draft] = self._drafts
        if isinstance(drafts, RecordBatch):
            yield from self._stamped(drafts)
            drafts = drafts.tail
        if len(drafts):
            yield from self._encoded(drafts)

    def _stamped(self, drafts: RecordBatch) -> Iterator[bytes]:
        """The unsequenced records, finalized."""
        left = drafts.sequence_count if not drafts.tail else 0
        for blanks, numbers in drafts.pieces():
            try:
                data, rows = finalize(
                    blanks, numbers, self._sequence + 1, self._time_ns, self._marks, MORE | INNER, left, self._position
                )
            except ValueError as error:
                raise errors.DiskFailed(f"staged records cannot be read back: {error}") from None
            if not rows.end:
                continue
            yield data
            count = len(rows.sequences)
            self._sequence += count
            self._position += rows.end
            left = max(left - count, 0)
            self._begun(rows.sequences[0])
            self.stamped.append(rows)

    def _begun(self, sequence: int) -> None:
        self.first = sequence if self.first < 0 else self.first
        self._marks = MORE | INNER  # none of the others is marked SETTLED

    def _encoded(self, drafts: Sequence[Draft]) -> Iterator[bytes]:
        index = self.messages = OpenIndex()
        sequence, time_ns, position = self._sequence, self._time_ns, self._position
        parts: list[bytes] = []
        size, last, marks = 0, len(drafts) - 1, self._marks
        for number, (kind, stream, body, headers) in enumerate(drafts):
            sequence += kind <= _END
            if number == last:
                marks &= ~MORE
            data = encode(sequence, time_ns, stream, kind, marks, headers, body)
            if kind <= _END:
                index.sequences.append(sequence)
                index.positions.append(position)
                index.bodies.append(len(body))
                index.streams.append(stream)
                index.headers.append(len(headers))
                index.kinds.append(kind)
            else:
                self.others.append(Row(sequence, time_ns, position, len(body), stream, len(headers), kind, marks))
            if not number:
                self._begun(sequence)
                marks = self._marks
            parts.append(data)
            size += len(data)
            position += len(data)
            if size >= limits.UNIT_PIECE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        index.times.extend([time_ns] * len(index))
        if parts:
            yield b"".join(parts)


__all__ = ["BatchEncoder", "measure"]
