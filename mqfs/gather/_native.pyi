"""What _native.c gives; mqfs/gather/__init__.py says what it is for."""

from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Streams: TypeAlias = tuple[array[int], array[int], array[int], bytes]  # numbers, bounds, ends of the names, names

def columns(
    data: Buffer, begin: int, streams: Streams, asked: int, strangers: bool, allocate: Callable[[int], bytearray], /
) -> tuple[Any, ...]: ...
def pick(data: Buffer, numbers: array[int], /) -> tuple[Any, ...]: ...

SOURCE: str  # SHA-256 of what it was built from; empty where setup.py did not build it
