"""How this process keeps memory that it let go of.

Owns one call of the C library. A request or a reply of a megabyte is made and let go of many times a second; what the
library gives back to the system each time comes back page by page, each cleared, which costs more than the copying.
"""

from __future__ import annotations

import ctypes

from mqfs.limits import KEPT_BYTES, LARGE_BYTES

_TRIM, _MMAP = -1, -3  # of <malloc.h>


def keep() -> None:
    """Memory of requests is kept for the next ones. Where the C library has no such call nothing is done."""
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    tune(_MMAP, LARGE_BYTES)
    tune(_TRIM, KEPT_BYTES)


__all__ = ["keep"]
