"""malloc and garbage: how much freed memory this process keeps and when it returns it, and when Python collects.

A request or a reply of a megabyte is allocated and freed many times a second. Memory returned to the system each time
would be mapped again page by page, each cleared, which costs more than the copying.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

from mqfs.limits import GARBAGE, GARBAGE_CONNECTIONS, KEPT_BYTES, LARGE_BYTES
from mqfs.quotas import UserLimits

_TRIM, _MMAP = -1, -3  # of <malloc.h>
_connections = 0  # accepted


def keep() -> None:
    """Keep freed memory of requests for the next ones, where the C library can."""
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    tune(_MMAP, LARGE_BYTES)
    tune(_TRIM, KEPT_BYTES)


def defer_collector() -> None:
    """Collect no garbage during the start, as the objects made then stay."""
    gc.disable()


def spare_collector() -> None:
    """Exempt the objects of the start from garbage collection, and collect others rarely.

    A full collection takes 100 ns an object and stops the server: 0.1 s with 30,000 parked reads.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*GARBAGE)


def count_connection() -> None:
    """Count an accepted connection, and collect young garbage after many of them.

    Python counts how many more objects were made than freed: none, where connections end as others begin. Then tens of
    thousands are young at the next collection, which stops the server for as many microseconds. A process with other
    thresholds, not the server's own, collects as it has set.
    """
    global _connections
    _connections += 1
    if _connections % GARBAGE_CONNECTIONS == 0 and gc.get_threshold() == GARBAGE:
        gc.collect(0 if _connections % (GARBAGE_CONNECTIONS * GARBAGE[1]) else 1)


def give_back(memory: UserLimits) -> None:
    """Return memory to the system once clients hold less than their peak by more than KEPT_BYTES.

    The C library does so by itself only at the end of the heap.
    """
    if memory.most - memory.used > KEPT_BYTES:
        memory.most = memory.used
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(KEPT_BYTES)
