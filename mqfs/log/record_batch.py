"""An atomic batch whose messages are encoded already, but for what only the log knows (batch.py), and read a piece at a
time: they may be too many for memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from mqfs.log.batch import decode_batch
from mqfs.log.record import HEAD_BYTES, padded
from mqfs.model import Draft


@attrs.frozen
class Source:
    """Unsequenced messages. `pieces` reads them, whole ones in each piece, every time it is called."""

    messages: int
    stored_bytes: int  # that they take in a log
    numbers: array[int]  # of each place the stream's
    pieces: Callable[[], Iterable[bytes]]


class RecordBatch(Sequence[Draft]):
    """The messages of several sources, in order, and behind them other records. Iterated, all of them are drafts."""

    def __init__(self, sources: Sequence[Source], tail: Sequence[Draft] = ()) -> None:
        self._sources, self.tail = sources, tail
        self.sequence_count = sum(source.messages for source in sources)  # messages: the tail takes no sequence
        self.stored_bytes = sum(source.stored_bytes for source in sources)
        self.stored_bytes += sum(padded(HEAD_BYTES + len(draft.body)) for draft in tail)

    def with_tail(self, tail: Sequence[Draft]) -> RecordBatch:
        return RecordBatch(self._sources, [*self.tail, *tail])

    def __len__(self) -> int:
        return self.sequence_count + len(self.tail)

    def pieces(self) -> Iterator[tuple[bytes, array[int]]]:
        """The unsequenced messages, some at a time, and of each place the stream's number."""
        for source in self._sources:
            for data in source.pieces():
                yield data, source.numbers

    def messages(self) -> Iterator[Draft]:
        for data, numbers in self.pieces():
            yield from decode_batch(data, numbers)

    def __iter__(self) -> Iterator[Draft]:
        yield from self.messages()
        yield from self.tail

    def __getitem__(self, at: Any) -> Any:
        raise TypeError("a record batch is iterated")
