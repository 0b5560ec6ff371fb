"""What a connection attached with the mark `,mount` has more than others: reads that can be continued after a restart.

A mount of a server elsewhere outlives that server. So it has to know how far each open file was:

- A read of a file with a position begins with it: u64, the sequence from which the next read looks. A Tread with
  another offset than 0 continues there, which a file opened again needs.
- A server that stops answers such a connection nothing any more: its mount asks the next one again.
- A read of 0 bytes returns the STATE of an open file, and takes nothing. With the offset 0 it comes at once, with 1
  after the file became readable or writable, which it may be already: what poll(2) waits for. CLOSED says that the
  server stops: an end-of-file then means no more than that.
"""

from __future__ import annotations

import struct
from typing import Any

from mqfs.model import Step, Wait
from mqfs.store.api import Handle

MARK = ",mount"  # after the aname
POSITION = struct.Struct("<Q")
STATE = struct.Struct("<QQI")  # position, size of the snapshot, flags
READABLE, WRITABLE, TAKES, PARKABLE, SEQUENTIAL, POSITIONED, SIZED, LINES, CLOSED = (1 << bit for bit in range(9))


class PositionedReader:
    """The reader of a fid whose file has a position."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def read(self, count: int, offset: int) -> Step[bytes]:
        handle = self._handle
        if offset:
            handle.position = offset
        step: Step[bytes] = handle.read(max(count - POSITION.size, 0), 0)
        if not isinstance(step, Wait):
            at: bytes = POSITION.pack(handle.position)
            return at + step
        positioned: Wait[bytes] = Wait(lambda _: step.cancel())

        def settled(wait: Wait[bytes]) -> None:
            try:
                data = wait.result()
            except Exception as error:
                positioned.fail(error)
            else:
                positioned.resolve(POSITION.pack(handle.position) + data)

        step.subscribe(settled)
        return positioned


def reader_of(handle: Handle, *, takes: bool) -> Any:
    """The reader of a handle: itself, or one that gives the position, where it has one and claims nothing."""
    return handle if takes or not hasattr(handle, "position") else PositionedReader(handle)


def state(handle: Any, reads: bool, writes: bool) -> bytes:
    """The STATE of an open file."""
    size = getattr(handle, "size", None)
    flags = (
        (READABLE if reads and handle.readable else 0)
        | (WRITABLE if writes and handle.writable else 0)
        | (TAKES if getattr(handle, "takes", False) else 0)
        | (PARKABLE if handle.parkable else 0)
        | (SEQUENTIAL if handle.sequential else 0)
        | (POSITIONED if reads and reader_of(handle, takes=handle.takes) is not handle else 0)
        | (SIZED if size is not None else 0)
        | (CLOSED if handle.closed else 0)
        | (LINES if writes and handle.publishes and handle.count_messages(b"\n\n") == 2 else 0)
    )
    return STATE.pack(getattr(handle, "position", 0), size or 0, flags)


def await_state(handle: Any, reads: bool, writes: bool) -> Step[bytes]:
    """The STATE, once the file may have become readable or writable. A file has one such wait: of two the first is
    answered by its flush only."""
    wait: Wait[bytes] = Wait(lambda _: handle.watch(None) or True)
    handle.watch(lambda: None if wait.settled else wait.resolve(state(handle, reads, writes)))
    return wait
