"""Wait: the one-shot promise by which the synchronous engine says "nothing yet"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


class Wait(Generic[T]):
    """A result that is not there yet. Settled exactly once, by the engine, with a value or an error.

    The waker hands the value over: whoever settles has already taken the value for this waiter, so there is no second
    look and no race. `subscribe` calls its function at once if the result is there, else from inside the engine's
    stretch that settles it: such a function must not call back into the engine, except `Handle.push_back`.
    """

    __slots__ = ("_cancel", "_error", "_settled", "_then", "_value")

    def __init__(self, cancel: Callable[[Wait[T]], bool] | None = None) -> None:
        self._cancel = cancel
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._then: Callable[[Wait[T]], None] | None = None

    @property
    def settled(self) -> bool:
        return self._settled

    def result(self) -> T:
        """The value, or raises the error. Only after it was settled."""
        assert self._settled
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def subscribe(self, then: Callable[[Wait[T]], None]) -> None:
        """Call `then(self)` once, when settled. One subscriber."""
        if self._settled:
            then(self)
        else:
            assert self._then is None
            self._then = then

    def settle(self, value: T) -> None:
        assert not self._settled
        self._settled, self._value = True, value
        if self._then is not None:
            self._then(self)

    def fail(self, error: BaseException) -> None:
        assert not self._settled
        self._settled, self._error = True, error
        if self._then is not None:
            self._then(self)

    def follow(self, step: T | Wait[T]) -> None:
        """Settle or fail as a step does."""
        if not isinstance(step, Wait):
            self.settle(step)
        else:
            step.subscribe(self._follow)

    def _follow(self, done: Wait[T]) -> None:
        if done._error is None:
            self.settle(done.result())
        else:
            self.fail(done._error)

    def cancel(self) -> bool:
        """Stop waiting. True: nothing was consumed or done, and `then` will never be called. False: too late, the
        thing is done (a message handed over, a write appended) and the result comes as if nothing had been asked."""
        if self._settled or self._cancel is None or not self._cancel(self):
            return False
        self._then = None
        return True


Step: TypeAlias = T | Wait[T]  # what engine calls return
