"""Queues of fq: types and parameters, the check of a request against an existing queue, and bindings.

The words and the texts of refusals are those of fq. A queue is a consumer of the same name in the group of each
exchange that it is bound to.
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

VIEW = "%q."  # prefix of a queue's view: no route has such a name
POINT, POINT_SEPARATOR = "%c.", "%."  # in the names of checkpoints
DEFAULT_BACKLOG = 16_384
_DIGITS = re.compile(r"\s*\+?0*([0-9]{1,11})", re.ASCII)


class Refused(Exception):
    """The refusal of a client's request; its text is sent to the client."""


@attrs.frozen
class QueueOptions:
    """Type and parameters of a queue, as in `mem:public,drop,backlog=100,permanent`. `permanent` None: not given."""

    type: str = ""  # "": not known, as the queue was made in an earlier run
    private: bool = True
    policy: str = "drop"
    backlog: int = DEFAULT_BACKLOG  # 0: no bound
    permanent: bool | None = None


def parse_options(kind: bytes) -> QueueOptions:
    """Parse the type and parameters of a request. Raises Refused."""
    text = kind.decode(errors="replace")
    name, _, words = text.partition(":")
    options = QueueOptions(name or "mem")
    if options.type not in ("mem", "disk"):
        raise Refused(f"invalid queue type: {options.type}")
    for word in filter(None, words.split(",")):
        if word in ("private", "public"):
            options = attrs.evolve(options, private=word == "private")
        elif word in ("drop", "block"):
            options = attrs.evolve(options, policy=word)
        elif word in ("permanent", "transient"):
            options = attrs.evolve(options, permanent=word == "permanent")
        elif word.startswith("backlog="):
            options = attrs.evolve(options, backlog=_number(word.removeprefix("backlog=")))
        else:
            raise Refused(f"invalid queue param: {word}")
    return options


def _number(word: str) -> int:
    """Parse a number as atoi(3) into 32 bits does, up to the first character that is not a digit. -1 becomes 0."""
    digits = _DIGITS.match(word)
    value = int(digits[1]) if digits is not None else 0
    return value if value < 1 << 31 else 0


@attrs.define(eq=False)
class Queue:
    """A queue. `owner`: the uid that made it. `exchanges`: the exchanges that it is bound to; `unbound`: exchanges from
    which it was unbound since it has clients. `holds`: by exchange, a function that closes an open consumer: a
    transient consumer is removed with its last handle, but has to stay while the queue has clients. `dropped_to`:
    messages dropped for lack of room in this run."""

    name: bytes
    owner: int
    options: QueueOptions
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

    def admit(self, options: QueueOptions) -> None:
        """Check that another client may join with these parameters. A different backlog is ignored. Raises Refused."""
        if self.options.private and self.members:
            raise Refused("requested queue is private and in use")
        if self.options.type and options.type != self.options.type:
            raise Refused(f"requested type {options.type}, queue is {self.options.type}")
        if options.private != self.options.private:
            words = ("public", "private")
            raise Refused(f"requested {words[options.private]}, queue is {words[self.options.private]}")
        if options.policy != self.options.policy:
            raise Refused(f"request {options.policy}, queue is {self.options.policy}")
        if len(self.members) >= limits.FQ_QUEUE_CLIENTS:
            raise Refused(f"too many clients of the queue (expected at most {limits.FQ_QUEUE_CLIENTS})")

    def require_same_permanence(self, user: User, consumer: Any | None) -> None:
        """Check that an existing consumer of the queue's name has its permanence, or that the user owns it. Raises
        NotPermitted."""
        if consumer is None or consumer.state.transient != self.permanent or owns(user, consumer.state.uid):
            return
        raise NotPermitted(f"consumer {consumer.name} is another's (expected a queue of another name)")

    def line(self, consumer: Any | None) -> str:
        """Return the line of `ctl` that makes or changes the queue's consumer. That of a transient queue is in memory
        only, unless it was permanent before."""
        options = self.options
        memory = not self.permanent and (consumer is None or consumer.state.memory)
        words = ["consumer", quote(self.consumer), quote(self.view)]
        words += ["transient"] * (not self.permanent) + ["private"] * options.private + ["memory"] * memory
        words += ["backlog", str(options.backlog)] if options.backlog else []
        return " ".join([*words, "full", "block" if options.policy == "block" else "drop-new"])

    def release(self, exchange: Exchange) -> None:
        """Close the handle that holds the queue's consumer in an exchange."""
        if (close := self.holds.pop(exchange, None)) is not None:
            close()

    def on_bound(self, exchange: Exchange) -> None:
        """Enter an exchange to which the queue is bound now, and notify its clients."""
        self.exchanges.add(exchange)
        for member in self.members:
            member.on_bound(exchange)


def owns(user: User, owner: int) -> bool:
    """Whether a user may change the permanence of a queue of that owner."""
    return user.uid in (0, owner)


def point(queue: Queue, name: bytes = b"") -> str:
    """Return the consumer of a checkpoint; without a name the prefix of all checkpoints of the queue."""
    return POINT + queue.consumer + POINT_SEPARATOR + (escape(name) if name else "")


def points(queue: Queue, names: Iterable[str]) -> list[str]:
    """Return the checkpoints of a queue among the consumers of a group."""
    return [name for name in names if name.startswith(point(queue))]
