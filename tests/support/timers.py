"""The timers of a tree that a test uses without the rest of a server."""

from __future__ import annotations

import math

import trio

from mqfs.engine.tree.tree import Tree
from mqfs.server.app import LEAST_WAIT_S


async def ring_timers(tree: Tree) -> None:
    """Run the timers of a tree when they are due, without end. Timers also continue long steps."""
    while True:
        sooner = trio.Event()
        tree.timers.on_sooner = sooner.set
        tree.run_timers()
        due = tree.timers.next_due_ns
        wait_s = math.inf if due is None else max((due - tree.clock.engine_ns()) / 1e9, LEAST_WAIT_S)
        with trio.move_on_after(wait_s):
            await sooner.wait()
