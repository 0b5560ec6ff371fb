"""The ring: shared memory in which processes of one machine publish and follow a group's records.

Owns the shared memory and what processes do in it (docs/explanation/ring.md). Never touches the store and knows no
streams' names, permissions or limits: the server follows the ring and keeps those. The work is done in C (`module.c`);
where that part was not built everything else works, and using a name of this module raises errors.Unsupported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mqfs import errors
from mqfs.model import Buffer, Columns

try:
    from mqfs.ring import _native
except ImportError as error:
    MISSING = str(error)  # why there is no ring; empty where there is one
else:
    MISSING = ""

OWN = 8  # flag of a record: the server's, and more belongs to it than the ring has

if not MISSING:
    HEAD_BYTES = _native.HEAD_BYTES
    Consumer = _native.Consumer
    Ring = _native.Ring
    attach, crc32c, create = _native.attach, _native.crc32c, _native.create


def scan(buffer: Buffer, base: int = 0) -> Columns:
    """Index the run of records at the head of `buffer`, each checked as a start checks a log."""
    end, *columns = _need().scan(buffer, base)
    views: list[Any] = [memoryview(column) for column in columns]
    return Columns(end, *(view.cast(code) for view, code in zip(views, "QqIIIHBB", strict=True)))


def _need() -> Any:
    if MISSING:
        raise errors.Unsupported(
            "the ring's part in C was not built: install a C compiler and the Python headers "
            f"(Debian: apt install gcc libc6-dev python3-dev), then install mqfs again ({MISSING})"
        )
    return _native


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(_need(), name)
        raise AttributeError(name)  # a module of this package, say


__all__ = ["HEAD_BYTES", "MISSING", "OWN", "Columns", "Consumer", "Ring", "attach", "crc32c", "create", "scan"]
