"""Faults of single groups: an exception in start, maintenance or stop of a group is logged and ends nothing else.

Requests of clients are answered by their front end.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Protocol

from mqfs import errors, limits
from mqfs.engine.log.group_log import GroupLog
from mqfs.seams import Clock

log = logging.getLogger("mqfs.engine")


class Group(Protocol):
    """Whose fault it is."""

    number: int
    log: GroupLog
    removed: bool

    def unblock(self) -> None: ...


class Faults:
    """Of one tree."""

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
