"""How this process keeps memory that it let go of, and when it gives it back to the system.

Owns two calls of the C library, and when Python looks for garbage. A request or a reply of a megabyte is made and
dropped many times a second; what the library gives back to the system each time comes back page by page, each cleared,
which costs more than the copying.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

from mqfs.limits import GARBAGE, KEPT_BYTES, LARGE_BYTES
from mqfs.shares import Shares

_TRIM, _MMAP = -1, -3  # of <malloc.h>


def keep() -> None:
    """Memory of requests is kept for the next ones. Where the C library has no such call nothing is done."""
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    tune(_MMAP, LARGE_BYTES)
    tune(_TRIM, KEPT_BYTES)


def spare_collector() -> None:
    """What is there now, after the start, is not looked through for garbage in circles again, and what comes is rarely.

    A look at everything takes 100 ns an object, in which nobody is served: 0.1 s beside 30,000 reads that wait.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE)


def give_back(memory: Shares) -> None:
    """Give memory back once what clients made the server hold has fallen by more than is kept for the next requests.

    The C library does so by itself only where nothing younger lies behind it.
    """
    if memory.most - memory.used > KEPT_BYTES:
        memory.most = memory.used
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(KEPT_BYTES)


__all__ = ["give_back", "keep", "spare_collector"]
