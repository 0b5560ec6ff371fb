"""Queues of fq: their types and parameters, what of a request for one does not agree with it, and its bindings.

The words and the texts of refusals are fq's own. A queue is a consumer of the same name in the group of
each exchange that it is bound to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs

from mqfs import limits
from mqfs.errors import NotPermitted
from mqfs.model import User
from mqfs.syntax.lines import quote
from mqfs.syntax.names import escape

if TYPE_CHECKING:
    from mqfs.fq.connection import Client
    from mqfs.fq.exchanges import Exchange

VIEW = "%q."  # and the queue: no route has such a name
POINT, POINT_SEPARATOR = "%c.", "%."  # of checkpoints
DEFAULT_BACKLOG = 16_384
_DIGITS = re.compile(r"\s*\+?0*([0-9]{1,11})", re.ASCII)


class Refused(Exception):
    """A request of a client is refused; the text is sent to it."""


@attrs.frozen
class Wish:
    """A type and parameters, as in `mem:public,drop,backlog=100,permanent`. `permanent`: None where nothing says."""

    type: str = ""  # of a queue that was made before this run: not known any more
    private: bool = True
    policy: str = "drop"
    backlog: int = DEFAULT_BACKLOG  # 0: no bound
    permanent: bool | None = None


def parse_wish(kind: bytes) -> Wish:
    """Raises Refused."""
    text = kind.decode(errors="replace")
    name, _, words = text.partition(":")
    wish = Wish(name or "mem")
    if wish.type not in ("mem", "disk"):
        raise Refused(f"invalid queue type: {wish.type}")
    for word in filter(None, words.split(",")):
        if word in ("private", "public"):
            wish = attrs.evolve(wish, private=word == "private")
        elif word in ("drop", "block"):
            wish = attrs.evolve(wish, policy=word)
        elif word in ("permanent", "transient"):
            wish = attrs.evolve(wish, permanent=word == "permanent")
        elif word.startswith("backlog="):
            wish = attrs.evolve(wish, backlog=_number(word.removeprefix("backlog=")))
        else:
            raise Refused(f"invalid queue param: {word}")
    return wish


def _number(word: str) -> int:
    """As atoi(3) into 32 bits reads it, up to what is no digit: -1 is no bound."""
    digits = _DIGITS.match(word)
    value = int(digits[1]) if digits is not None else 0
    return value if value < 1 << 31 else 0


@attrs.define(eq=False)
class Queue:
    """`owner`: the user who made it. `exchanges`: those that it is bound to; `unbound`: those that it was bound to,
    since it has clients. `holds`: by exchange, how to close an open consumer; a transient one goes with its last
    handle, and is to stay while the queue has clients.
    `dropped_to`: messages that had no room, in this run."""

    name: bytes
    owner: int
    wish: Wish
    permanent: bool = False
    members: list[Client] = attrs.Factory(list)
    exchanges: set[Exchange] = attrs.Factory(set)
    unbound: set[Exchange] = attrs.Factory(set)
    holds: dict[Exchange, Callable[[], None]] = attrs.Factory(dict)
    dropped_to: int = 0

    @property
    def consumer(self) -> str:
        return escape(self.name)

    @property
    def view(self) -> str:
        return VIEW + self.consumer

    def admit(self, wish: Wish) -> None:
        """Check that one more client may have it. Raises Refused. Another backlog is ignored."""
        if self.wish.private and self.members:
            raise Refused("requested queue is private and in use")
        if self.wish.type and wish.type != self.wish.type:
            raise Refused(f"requested type {wish.type}, queue is {self.wish.type}")
        if wish.private != self.wish.private:
            words = ("public", "private")
            raise Refused(f"requested {words[wish.private]}, queue is {words[self.wish.private]}")
        if wish.policy != self.wish.policy:
            raise Refused(f"request {wish.policy}, queue is {self.wish.policy}")
        if len(self.members) >= limits.FQ_QUEUE_CLIENTS:
            raise Refused(f"too many clients of the queue (expected at most {limits.FQ_QUEUE_CLIENTS})")

    def require_same_permanence(self, user: User, consumer: Any | None) -> None:
        """Raises NotPermitted where a consumer of its name was made by another to stay, or to go."""
        if consumer is None or consumer.state.transient != self.permanent or owns(user, consumer.state.uid):
            return
        raise NotPermitted(f"consumer {consumer.name} is another's (expected a queue of another name)")

    def line(self, consumer: Any | None) -> str:
        """The line of `ctl` that makes its consumer, or changes the one that is there. A transient queue needs nothing
        on disk; one that was permanent stays there."""
        wish = self.wish
        memory = not self.permanent and (consumer is None or consumer.state.memory)
        words = ["consumer", quote(self.consumer), quote(self.view)]
        words += ["transient"] * (not self.permanent) + ["private"] * wish.private + ["memory"] * memory
        words += ["backlog", str(wish.backlog)] if wish.backlog else []
        return " ".join([*words, "full", "block" if wish.policy == "block" else "drop-new"])

    def release(self, exchange: Exchange) -> None:
        """Hold its consumer of that exchange no longer."""
        if (close := self.holds.pop(exchange, None)) is not None:
            close()

    def tell(self, exchange: Exchange) -> None:
        """It is bound to that exchange now."""
        self.exchanges.add(exchange)
        for member in self.members:
            member.on_bound(exchange)


def owns(user: User, owner: int) -> bool:
    """Whether a user may say how long a queue of that owner lasts."""
    return user.uid in (0, owner)


def point(queue: Queue, name: bytes = b"") -> str:
    """The consumer of a checkpoint; without a name what all of a queue's begin with."""
    return POINT + queue.consumer + POINT_SEPARATOR + (escape(name) if name else "")


def points(queue: Queue, names: Iterable[str]) -> list[str]:
    """Those of a queue among the consumers of a group."""
    return [name for name in names if name.startswith(point(queue))]
