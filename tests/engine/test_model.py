"""The model against the engine over a memory store, over a disk store, and through a 9P connection."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.engine.nine import NineSubject
from tests.engine.subject import TreeSubject
from tests.models.pubsub_machine import Machine
from tests.support import campaign

pytestmark = pytest.mark.slow


class OverMemory(Machine):
    def make(self) -> Any:
        return TreeSubject(MemoryStore())


class OverNine(Machine):
    def make(self) -> Any:
        return NineSubject()


class OverDisk(Machine):
    def make(self) -> Any:
        self.path = tempfile.mkdtemp(prefix="mqfs-model-")
        return TreeSubject(DiskStore(self.path))

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        """Nobody is there afterwards, so what only they had not had is gone; the rest is as it was."""
        for wait in sorted(self.waits):
            self.stop(wait)
        for key in sorted(self.keys):
            self.same(self.model.close(key), self.subject.close(key))
        self.keys.clear()
        if self.model.blocked:
            return  # an unfinished line that waits for room would be lost, as it may be
        self.model.settle_kept()
        self.subject.restart(DiskStore, self.path, clean)
        self.model.next = self.subject.group.log.end.next

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.path)


def run(machine: type[RuleBasedStateMachine], examples: int) -> Any:
    case = seed(campaign.seed())(machine).TestCase  # on the machine: that of a TestCase counts for nothing
    case.settings = settings(
        max_examples=campaign.size(examples),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    return case


TestOverMemory = pytest.mark.timeout(1800)(run(OverMemory, 10_000))
TestOverNine = pytest.mark.timeout(1800)(run(OverNine, 2_000))
TestOverDisk = pytest.mark.timeout(1800)(run(OverDisk, 2_000))
