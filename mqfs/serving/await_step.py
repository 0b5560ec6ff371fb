"""await_step(step): the one place where a trio task parks.

It joins the engine's one-shot `Wait` and trio's cancellation. A cancelled wait has consumed nothing. A wait that can no
longer be cancelled (a message delivered, a write appended) is awaited to its end.
"""

from __future__ import annotations

from typing import TypeVar

import trio

from mqfs.model import Step, Wait

T = TypeVar("T")


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
        return trio.lowlevel.Abort.SUCCEEDED if step.cancel() else trio.lowlevel.Abort.FAILED

    step.subscribe(settled)
    await trio.lowlevel.wait_task_rescheduled(abort)
    return step.result()
