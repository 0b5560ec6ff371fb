"""The model against the engine over a memory store and over a disk store."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings

from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests import campaign
from tests.engine.machine import Machine
from tests.engine.subject import TreeSubject


class OverMemory(Machine):
    def make(self) -> Any:
        return TreeSubject(MemoryStore())


class OverDisk(Machine):
    def make(self) -> Any:
        self.path = tempfile.mkdtemp(prefix="mqfs-model-")
        return TreeSubject(DiskStore(self.path))

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.path)


def run(machine: type[Machine], examples: int) -> Any:
    case = seed(campaign.seed())(machine.TestCase)
    case.settings = settings(
        max_examples=campaign.size(examples),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    return case


TestOverMemory = pytest.mark.timeout(1800)(run(OverMemory, 10_000))
TestOverDisk = pytest.mark.timeout(1800)(run(OverDisk, 2_000))
