"""Where a trio task waits: await_step(step) for the engine, answered(call) for the system's database of users; and
post_to_loop(), by which other threads call functions on the loop.

await_step joins the engine's one-shot `Wait` and trio's cancellation. A cancelled wait has consumed nothing. A wait
that can no longer be cancelled (a message delivered, a write appended) is awaited to its end. So is a search of the
existing messages when its caller's time has ended: if it finds none, it fails as cancelled after all.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import TypeVar

import trio

from mqfs import limits
from mqfs.errors import Interrupted
from mqfs.model import Step, Wait
from mqfs.net.identity import NotAnswered
from mqfs.store.group_commit import Post, run_posted

T = TypeVar("T")

log = logging.getLogger("mqfs")


async def await_step(step: Step[T], until: float = math.inf) -> T:
    """Return the value of a step, at once or when it is resolved. `until`: a time of trio's clock; a later cancellation
    lets a search of the existing messages complete. Raises the engine's error, or trio.Cancelled."""
    if not isinstance(step, Wait):
        return step
    if step.settled:
        return step.result()
    task = trio.lowlevel.current_task()

    def settled(wait: Wait[T]) -> None:
        trio.lowlevel.reschedule(task)

    def abort(_: object) -> trio.lowlevel.Abort:
        try:
            cancelled = step.cancel(Interrupted() if trio.current_time() >= until else None)
        except Exception:  # trio calls this, and would end with the exception
            log.exception("a wait was not cancelled")
            cancelled = False
        return trio.lowlevel.Abort.SUCCEEDED if cancelled else trio.lowlevel.Abort.FAILED

    step.subscribe(settled)
    await trio.lowlevel.wait_task_rescheduled(abort)
    try:
        return step.result()
    except Interrupted:
        await trio.lowlevel.checkpoint_if_cancelled()
        raise


def post_to_loop() -> Post:
    """Return a function by which other threads have a function called on this loop's thread, which is the engine's."""
    soon = trio.lowlevel.current_trio_token().run_sync_soon
    return lambda call: soon(run_posted, call)


def answered(call: Callable[[], T]) -> Step[T]:
    """Return or raise the outcome of a call, which may need the system's database of users.

    While the call raises NotAnswered, it is repeated when the database has answered. After limits.HANDSHAKE_S the step
    fails with NotAnswered.
    """
    try:
        return call()
    except NotAnswered as error:
        cancelled = trio.Event()

        def cancel(_: Wait[T]) -> bool:
            cancelled.set()
            return True

        wait: Wait[T] = Wait(cancel)
        trio.lowlevel.spawn_system_task(_call_again, call, error, wait, cancelled)
        return wait


async def _call_again(call: Callable[[], T], error: NotAnswered, wait: Wait[T], cancelled: trio.Event) -> None:
    post, until = post_to_loop(), trio.current_time() + limits.HANDSHAKE_S
    while not cancelled.is_set() and not wait.settled:
        retry = trio.Event()
        error.subscribe(lambda retry=retry: _post_if_running(post, retry.set))  # type: ignore[misc]
        with trio.move_on_at(min(until, trio.current_time() + error.within_s)):
            await retry.wait()
        if not cancelled.is_set():
            try:
                if (again := _try_again(call, wait)) is not None and trio.current_time() >= until:
                    wait.fail(again)
            except Exception:  # of a subscriber: this task serves all callers
                log.exception("a request failed when its user was known")
            else:
                error = again or error


def _try_again(call: Callable[[], T], wait: Wait[T]) -> NotAnswered | None:
    try:
        value = call()
    except NotAnswered as error:
        return error
    except Exception as error:
        wait.fail(error)
    else:
        wait.resolve(value)
    return None


def _post_if_running(post: Post, call: Callable[[], None]) -> None:
    with contextlib.suppress(trio.RunFinishedError):
        post(call)
