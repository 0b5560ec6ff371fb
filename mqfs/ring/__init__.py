"""The ring: shared memory in which processes of one machine publish and follow a group's records.

Its protocol is in docs/explanation/ring.md. It never touches the store, and has no names of streams, permissions or
limits: the server follows the ring and enforces those. It is implemented in C (`module.c`). Where that was not built,
everything else works, and using a name of this module raises errors.Unsupported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mqfs import errors
from mqfs.model import Buffer, RecordColumns

try:
    from mqfs.ring import _native
except ImportError as error:
    MISSING = str(error)  # the reason why there is no ring, or empty
else:
    MISSING = ""

EPHEMERAL = 4  # flag of a record: for readers of the ring, not for the log
OWN = 8  # flag of a record: the server's own, of which the ring has only a part

_NATIVE = ("HEAD_BYTES", "Consumer", "Ring", "attach", "bell", "crc32c", "create", "wait_any")
if not MISSING:
    HEAD_BYTES = _native.HEAD_BYTES
    Consumer = _native.Consumer
    Ring = _native.Ring
    attach, crc32c, create = _native.attach, _native.crc32c, _native.create
    bell, wait_any = _native.bell, _native.wait_any


def scan(buffer: Buffer, base: int = 0) -> RecordColumns:
    """Index the run of sound records at the head of `buffer`."""
    end, *columns = _need().scan(buffer, base)
    views: list[Any] = [memoryview(column) for column in columns]
    return RecordColumns(end, *(view.cast(code) for view, code in zip(views, "QqIIIHBB", strict=True)))


def is_ordered(rows: RecordColumns) -> bool:
    """Whether each sequence follows the one before it by 1, and no time is earlier than the one before it."""
    return bool(_need().ordered(rows.sequences, rows.times))


def is_plain(rows: RecordColumns, most: int, streams: range) -> bool:
    """Whether all rows are messages without headers that a client may publish: whole atomic batches or ephemeral
    messages, with bodies of 1 to `most` bytes, of streams with numbers in that range."""
    columns = rows.bodies, rows.headers, rows.kinds, rows.flags, rows.streams
    return bool(_need().plain(*columns, most, streams.start, streams.stop))


def moved(rows: RecordColumns, by: int) -> RecordColumns:
    """Return the same rows with positions `by` bytes further on; a negative `by` moves them back."""
    return rows._replace(positions=memoryview(_need().shift(rows.positions, by & 0xFFFFFFFF)).cast("I"))


def _need() -> Any:
    if MISSING:
        raise errors.Unsupported(
            "the ring's extension in C was not built (expected a C compiler and the Python headers: "
            f"apt install gcc libc6-dev python3-dev, then install mqfs again): {MISSING}"
        )
    return _native


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _NATIVE:
            return getattr(_need(), name)
        raise AttributeError(name)  # a submodule of this package, for example
