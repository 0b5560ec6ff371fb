"""await_step(step): the one place where a trio task parks; post_to_loop(): where another thread calls in.

It joins the engine's one-shot `Wait` and trio's cancellation. A cancelled wait has consumed nothing. A wait that can no
longer be cancelled (a message delivered, a write appended) is awaited to its end.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import trio

from mqfs.model import Step, Wait
from mqfs.store.commit_thread import Post, run_posted

T = TypeVar("T")

log = logging.getLogger("mqfs")


async def await_step(step: Step[T]) -> T:
    """The value of a step, at once or when it is resolved. Raises the engine's error, or trio.Cancelled."""
    if not isinstance(step, Wait):
        return step
    if step.settled:
        return step.result()
    task = trio.lowlevel.current_task()

    def settled(wait: Wait[T]) -> None:
        trio.lowlevel.reschedule(task)

    def abort(_: object) -> trio.lowlevel.Abort:
        try:
            cancelled = step.cancel()
        except Exception:  # trio calls this, and would end with it
            log.exception("a wait was not cancelled")
            cancelled = False
        return trio.lowlevel.Abort.SUCCEEDED if cancelled else trio.lowlevel.Abort.FAILED

    step.subscribe(settled)
    await trio.lowlevel.wait_task_rescheduled(abort)
    return step.result()


def post_to_loop() -> Post:
    """What other threads call to have a function called on the thread of this loop, which is the engine's."""
    soon = trio.lowlevel.current_trio_token().run_sync_soon
    return lambda call: soon(run_posted, call)
