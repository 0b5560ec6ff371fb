"""Small limits for a while, so that a test of a few hundred steps reaches several segments, parts and blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqfs import limits
from mqfs.store.store import DiskStore

SMALL = {
    "SEGMENT_BYTES": 2_048,
    "SEGMENT_RECORDS": 40,
    "SEGMENT_FIRST_BYTES": 256,
    "INDEX_STRIDE_BYTES": 512,
    "SEQUENCE_BLOCK": 16,
    "GROUP_NUMBER_BLOCK": 2,
    "STATE_RECORD_BYTES": 64,
}


@contextlib.contextmanager
def lowered(**values: int) -> Iterator[None]:
    """Set limits within the block, as in `lowered(**SMALL)`."""
    before = {name: getattr(limits, name) for name in values}
    for name, value in values.items():
        setattr(limits, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(limits, name, value)


def abandon(store: DiskStore) -> None:
    """Close descriptors and the lock without a write, as a kill does."""
    segments: Any = store.descriptors._open
    for segment in segments:
        if segment.fd >= 0:
            os.close(segment.fd)
            segment.fd = -1
        segment.index = None
    os.close(store._lock)


def damage(folder: Path, text: bytes) -> None:
    """Change the first bytes of a text in each file that has it."""
    for path in folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(text)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"is")
