"""Reads that can be continued after a restart: what connections attached with the mark `,mount` have in addition.

A mount of a remote server outlives that server, so it has to know the position of each open file:

- The data read from a file with a position begins with that position: u64, the sequence at which the next read starts.
  A Tread with an offset other than 0 continues there; a file opened again needs that.
- A server that stops sends such a connection no more replies: its mount repeats the requests at the next server.
- A read of 0 bytes returns the STATE of an open file and no message. With offset 0 it returns at once. With offset 1 it
  returns after the file became readable or writable, which it may be already: poll(2) waits for that. CLOSED says that
  the server stops: an end-of-file then means only that.
"""

from __future__ import annotations

import struct
from typing import Any

from mqfs.model import Step, Wait
from mqfs.ninep.server.fids import Fid
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
    """Return the reader of a handle: a PositionedReader if it has a position and claims nothing, else the handle."""
    return handle if takes or not hasattr(handle, "position") else PositionedReader(handle)


def state(handle: Any, reads: bool, writes: bool) -> bytes:
    """Return the STATE of an open file."""
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


def await_state(fid: Fid) -> Step[bytes]:
    """Wait until the file of a fid may have become readable or writable, then return its STATE.

    A fid has one such wait: a second one replaces it, and the first is then answered by its flush only.
    """
    handle: Any = fid.handle
    reads, writes = fid.reader is not None, fid.writer is not None

    def stop(wait: Wait[bytes]) -> bool:
        if fid.watched is wait:  # else the watch is that of the wait that replaced this one
            handle.watch(None)
        return True

    fid.watched = wait = Wait[bytes](stop)
    handle.watch(lambda: None if wait.settled else wait.resolve(state(handle, reads, writes)))
    return wait
