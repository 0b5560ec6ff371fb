"""After an answer: let the client run, which asks again sooner than it could be waited for.

Where a client can run now, a yield and a read cost less than an empty read, epoll and two changes of the task. Beside
other programs the kernel lets those run first, and each yield takes milliseconds. So after a slow one there is none for
a while: beside four busy programs on two CPUs that is five times as many requests by the clock.
"""

from __future__ import annotations

import os
from time import perf_counter

_SLOW_S = 0.0005
_PAUSE_S = 0.1  # after a slow one

_from = 0.0  # no yield before that time


def let_client_run() -> bool:
    """Yield the CPU. Whether that was done: else wait for the client, which had no chance to ask again."""
    global _from
    began = perf_counter()
    if began < _from:
        return False
    os.sched_yield()
    if perf_counter() - began > _SLOW_S:
        _from = began + _PAUSE_S
    return True
