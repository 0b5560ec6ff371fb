"""The codec in C: batch.py and columns.py say what it is for."""

from array import array
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview
Rows: TypeAlias = list[tuple[int, int, int, int]]  # place, messages, bytes of their bodies, which is the last
Streams: TypeAlias = tuple[array[int], array[int], array[int], bytes]  # numbers, bounds, ends of the names, names

def pack(
    frames: Buffer,
    known: dict[bytes, int],
    more: dict[bytes, int],
    sender: bytes,
    reserved: tuple[bytes, ...],
    at: int,
    stop: int,
    always: bool,
    most: int,
    most_head: int,
    /,
) -> tuple[bytes, int, list[bytes], Rows, int, int] | None:
    """(unsequenced records, messages, names not known, rows, whether some have headers, the end of those taken); None
    where the first frame is unusual."""

def frames(data: Buffer, /) -> int: ...
def stamp(
    blanks: Buffer, numbers: Buffer, sequence: int, time_ns: int, first: int, rest: int, left: int, base: int, /
) -> tuple[bytes, ...]:
    """The records, and their columns as `scan` of the ring has them. ValueError where these are no blanks."""

def unit(data: Buffer, at: int, base: int, /) -> tuple[int, tuple[bytes, ...], bytes, int] | None:
    """(its end, columns of its messages, its other records as they lie in an index, the time of the last of these)"""

def tally(streams: Buffer, bodies: Buffer, /) -> Rows: ...
def total(column: Buffer, width: int, ordinals: Buffer, /) -> int: ...
def postings(streams: Buffer, begin: int, /) -> list[tuple[int, bytes]]: ...
def columns(
    data: Buffer, begin: int, streams: Streams, asked: int, strangers: bool, allocate: Callable[[int], bytearray], /
) -> tuple[Any, ...]: ...
def pick(data: Buffer, numbers: array[int], /) -> tuple[Any, ...]: ...
def search(data: Buffer, begin: int, positions: Buffer, sizes: Buffer, keys: tuple[bytes, ...], /) -> list[int]: ...
def messages(
    data: bytes, at: int, names: Mapping[int, str | None], type: type[T], to: list[T], none: object, since: int, /
) -> tuple[int, int, int, int]:
    """Where the first record begins that is no sound message of a named stream; of those before it: the last sequence,
    all flags, and whether some made here have headers."""

class Ready:
    """The base of an iterator: `_pop` gives the next item; where it is None or raises IndexError, `_wait_next`."""

    _pop: Callable[[], Any] | None
    def __next__(self) -> Any: ...

SOURCE: str  # SHA-256 of what it was built from; empty where setup.py did not build it
