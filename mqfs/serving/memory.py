"""malloc tuning: how much freed memory this process keeps, and when it returns it to the system.

Also when Python collects garbage. A request or a reply of a megabyte is allocated and freed many times a second. Memory
returned to the system each time would come back page by page, each cleared, which costs more than the copying.
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
    """Collect no garbage during the start, which makes objects that stay."""
    gc.disable()


def spare_collector() -> None:
    """Exempt the objects of the start from garbage collection, and collect the others rarely.

    A full collection takes 100 ns an object and stops the server: 0.1 s beside 30,000 parked reads.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*GARBAGE)


def count_connection() -> None:
    """Collect garbage among the young objects once there are many connections more.

    Python counts how many more objects were made than freed. Where connections end as others begin that is none: then
    tens of thousands are young at the next collection, which stops the server for as many microseconds. In a process
    that is not the server's own they are collected as it has set.
    """
    global _connections
    _connections += 1
    if _connections % GARBAGE_CONNECTIONS == 0 and gc.get_threshold() == GARBAGE:
        gc.collect(0 if _connections % (GARBAGE_CONNECTIONS * GARBAGE[1]) else 1)


def give_back(memory: UserLimits) -> None:
    """Return memory to the system once clients hold less by more than is kept for the next requests.

    The C library does so by itself only at the end of the heap.
    """
    if memory.most - memory.used > KEPT_BYTES:
        memory.most = memory.used
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(KEPT_BYTES)
