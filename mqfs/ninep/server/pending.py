"""Replies that wait: what an operation returns for one, and what the session keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mqfs.ninep.codec.messages import Fcall
from mqfs.wait import Step, Wait

if TYPE_CHECKING:
    from mqfs.ninep.server.fids import Fid


class Later(NamedTuple):
    """A reply that waits: `then` makes it from the wait's result. It calls the tree only if `calls`."""

    wait: Wait[Any]
    then: Callable[[Any], Fcall]
    fid: Fid | None = None
    calls: bool = False


class Pending:
    """A request that waits, and the tags of the flushes that wait for it."""

    __slots__ = ("calls", "counted", "fid", "flushes", "tag", "then", "wait")

    def __init__(self, tag: int, later: Later) -> None:
        self.tag = tag
        self.wait, self.then, self.fid, self.calls = later
        self.flushes: list[int] = []
        self.counted = True  # among what its user has waiting


def later(step: Step[Any], then: Callable[[Any], Fcall], *, calls: bool = False) -> Fcall | Later:
    """The reply to a step, now or when it is settled. `calls`: making the reply calls the tree."""
    return Later(step, then, None, calls) if isinstance(step, Wait) else then(step)


def both(first: Step[Any], second: Step[Any]) -> Step[None]:
    """A step that is done when two are; neither can be taken back."""
    waits = [step for step in (first, second) if isinstance(step, Wait)]
    if len(waits) < 2:
        return waits[0] if waits else None
    whole: Wait[None] = Wait()

    def settled(wait: Wait[Any]) -> None:
        waits.remove(wait)
        try:
            wait.result()
        except Exception as error:
            if not whole.settled:
                whole.fail(error)
        if not waits and not whole.settled:
            whole.settle(None)

    for wait in tuple(waits):
        wait.subscribe(settled)
    return whole
