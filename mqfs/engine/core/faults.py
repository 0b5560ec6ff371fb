"""Faults of single groups: an exception in start, maintenance or stop of a group is logged and ends nothing else.

Requests of clients are answered by their front end.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mqfs import errors, limits
from mqfs.clock import Clock
from mqfs.errors import shortened

if TYPE_CHECKING:
    from mqfs.engine.group import Group

log = logging.getLogger("mqfs.engine")


class Faults:
    """The faults of a tree: contained, counted and logged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._silent_until: dict[int, int] = {}  # group number -> engine ns

    def contain(self, group: Group, what: str, call: Callable[[], object]) -> bool:
        """Whether `call` succeeded. After a bug the group is read-only: what is in memory may be half changed."""
        try:
            call()
        except (errors.MqfsError, OSError) as error:
            self.report(group.number, f"{what} failed: {error}")
        except Exception as error:
            self._fail(group, f"{what} failed: {error!r}")
        else:
            return True
        return False

    def _fail(self, group: Group, text: str) -> None:
        """Log the bug being handled with its traceback, once a group."""
        line = f"{text}; the group is read-only until the next start"
        if group.log.end.failed is None:
            self._silent_until[group.number] = self._clock.engine_ns() + limits.LOG_AGAIN_S * 10**9
            log.exception("group %d: %s", group.number, line)
        else:
            self.report(group.number, line)
        group.log.upkeep.fail(OSError(errno.EIO, text))

    def report(self, number: int, text: str) -> None:
        """Log a line about a group, unless there was one a moment ago."""
        now = self._clock.engine_ns()
        if now >= self._silent_until.get(number, now):
            self._silent_until[number] = now + limits.LOG_AGAIN_S * 10**9
            log.error("group %d: %s", number, text)


def report_unserved(number: int, why: object) -> None:
    """Log that a group is left alone."""
    log.error("group %d is not served: %s; run mqfs check --fix on the stopped store", number, why)


# ------------------------------------------------------------ refusals

# Why writes to a group's files were refused, for `.errors`. The refusals of one user never push out those of another.


class Refused(NamedTuple):
    """One line of `.errors`."""

    time_ns: int
    uid: int
    pid: int
    file: str
    text: str


class Refusals:
    """The last refusals of each user in one group."""

    def __init__(self) -> None:
        self._users: dict[int, deque[Refused]] = {}  # who was refused last stands last

    def add(self, refused: Refused) -> None:
        mine = self._users.pop(refused.uid, None)
        if mine is None:
            mine = deque(maxlen=limits.ERRORS)
            while len(self._users) >= limits.ERROR_USERS:
                del self._users[next(iter(self._users))]
        mine.append(refused._replace(text=shortened(refused.text)))
        self._users[refused.uid] = mine

    def of(self, uid: int) -> list[Refused]:
        """Those of one user, oldest first."""
        return list(self._users.get(uid, ()))

    def all(self) -> list[Refused]:
        """Those of all users, oldest first."""
        return sorted((row for mine in self._users.values() for row in mine), key=lambda row: row.time_ns)
