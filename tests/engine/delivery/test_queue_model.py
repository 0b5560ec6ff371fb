"""The queue model against the engine over a memory store, over a disk store, and through a 9P connection."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from mqfs import limits
from mqfs.model import Wait
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.engine.delivery.subject import QueueNine, QueueSubject
from tests.models.work_queue_machine import Machine
from tests.support import campaign
from tests.support.copied import follow
from tests.support.temp_store import lowered

pytestmark = pytest.mark.slow


class OverMemory(Machine):
    def make(self, deliver: str) -> Any:
        return QueueSubject(MemoryStore(), deliver)


class OverNine(Machine):
    can_lose = False

    def make(self, deliver: str) -> Any:
        return QueueNine(deliver)


class OverDisk(Machine):
    path = ""

    def make(self, deliver: str) -> Any:
        self.path = tempfile.mkdtemp(prefix="mqfs-queues-")
        return QueueSubject(self.store_at(self.path), deliver)

    def store_at(self, path: str) -> DiskStore:
        return DiskStore(path)

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        """A clean stop gives claims back; after a kill they count as failed."""
        for wait in sorted(self.waits):
            self.stop(wait)
        self.keys.clear()
        self.subject.restart(self.store_at, self.path, clean)
        before = len(self.model.log)
        self.model.stop(clean, self.subject.group.log.end.next)
        self.in_its_order(before)
        self.same(None, None)
        self.look()

    def teardown(self) -> None:
        super().teardown()
        if self.path:
            shutil.rmtree(self.path)


class CopiedQueues(QueueSubject):
    """`sync replica`, with a replica that has everything before the next step: then all is as without one."""

    store: DiskStore

    def __init__(self, store: DiskStore, deliver: str) -> None:
        super().__init__(store, deliver)
        self.ctl("sync replica")

    def confirm(self) -> None:
        assert self.store.replication is not None
        while list(follow(self.store.replication)):
            pass

    def _try(self, call: Callable[[], Any], wait: int | None = None, done: Any = None) -> Any:
        def copied() -> Any:
            step = call()
            self.confirm()
            return step.result() if isinstance(step, Wait) and step.settled else step

        return super()._try(copied, wait, done)

    def tick(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            super().tick(1)
            self.confirm()

    def restart(self, maker: Callable[[str], Any], path: str, clean: bool) -> None:
        super().restart(maker, path, clean)
        self.confirm()

    def settle(self) -> None:
        self.confirm()


class OverCopied(OverDisk):
    def make(self, deliver: str) -> Any:
        self.path = tempfile.mkdtemp(prefix="mqfs-queues-")
        return CopiedQueues(self.store_at(self.path), deliver)

    def store_at(self, path: str) -> DiskStore:
        return DiskStore(path, replica=lambda: None)


class LongQueues(QueueSubject):
    """Each claim that passes over a message looks for its own in portions, which are all made before the next step."""

    def read(self, wait: int, key: str, count: int) -> Any:
        def done(data: bytes) -> None:
            self.offsets[key] += len(data)

        def settled() -> Any:
            with lowered(PASSED_MESSAGES=0):
                step = self.handles[key].read(count, self.offsets[key])
            self.group.waiting.left = limits.PASSED_MESSAGES  # of this claim alone
            self.settle()
            return step.result() if isinstance(step, Wait) and step.settled else step

        return self._try(settled, wait, done)

    def tick(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            super().tick(1)
            self.settle()

    def settle(self) -> None:
        """In no time: what the model has due in one second is to be due at one moment."""
        portions = self.group.portions
        while portions._queue:
            portions._alarm.at(self.clock.engine)
            self.tree.run_timers()


class OverPortions(Machine):
    def make(self, deliver: str) -> Any:
        return LongQueues(MemoryStore(), deliver)


def run(machine: type[Machine], examples: int) -> Any:
    case = seed(campaign.seed())(machine).TestCase  # on the machine: that of a TestCase counts for nothing
    case.settings = settings(
        max_examples=campaign.size(examples),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    return case


TestOverMemory = pytest.mark.timeout(3600)(run(OverMemory, 10_000))
TestOverNine = pytest.mark.timeout(3600)(run(OverNine, 2_000))
TestOverCopied = pytest.mark.timeout(3600)(run(OverCopied, 2_000))
TestOverPortions = pytest.mark.timeout(3600)(run(OverPortions, 2_000))
TestOverDisk = pytest.mark.timeout(3600)(run(OverDisk, 2_000))
