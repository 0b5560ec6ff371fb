"""The alarms of a group's consumers: when each has a lease or delay that ends, or claims to requeue."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from mqfs.engine.log import faults
from mqfs.engine.log.faults import Faults
from mqfs.engine.log.timers import CONSUMERS, Alarm, Timers

_AGAIN_NS = 10**9  # after a failure


class Redelivery(Protocol):
    def on_timer(self, now_ns: int) -> None: ...


class Sleeper(Protocol):
    """A consumer."""

    @property
    def name(self) -> str: ...

    @property
    def redelivery(self) -> Redelivery: ...


class AlarmedGroup(faults.Group, Protocol):
    """The group."""

    faults: Faults
    timers: Timers


class Alarms:
    """Of one group."""

    def __init__(self, group: AlarmedGroup) -> None:
        self._group = group
        self._due: dict[Sleeper, int] = {}  # engine time
        self._alarm = Alarm(group.timers, group, CONSUMERS, "ending leases and delays", self._ring)

    def set(self, consumer: Sleeper, due_ns: int) -> None:
        """Call its `on_timer` then, if not before."""
        due = self._due.get(consumer)
        if due is None or due_ns < due:
            self._due[consumer] = due_ns
        self._alarm.at(due_ns)

    def remove(self, consumer: Sleeper) -> None:
        self._due.pop(consumer, None)

    def _ring(self, now_ns: int) -> None:
        """In the order in which they were set, whatever is due first."""
        group = self._group
        for consumer, due in list(self._due.items()):
            if due <= now_ns:
                del self._due[consumer]
                what = f"ending leases and delays of {consumer.name}"
                if not group.faults.contain(group, what, partial(consumer.redelivery.on_timer, now_ns)):
                    self.set(consumer, now_ns + _AGAIN_NS)
        if self._due:
            self._alarm.at(min(self._due.values()))
