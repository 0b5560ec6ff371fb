"""The model against the engine over a memory store, over a disk store, and through a 9P connection."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from mqfs.errors import MqfsError
from mqfs.model import Wait
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.engine.nine import NineSubject
from tests.engine.subject import TreeSubject
from tests.models.pubsub import Model
from tests.models.pubsub_machine import Machine, as_lines, as_set
from tests.support import campaign
from tests.support.copied import follow

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


class CopiedSubject(TreeSubject):
    """Over a store with a replica, which is made to follow by hand."""

    store: DiskStore

    def __init__(self, store: DiskStore) -> None:
        super().__init__(store)
        self.ctl("sync replica")

    def confirm(self) -> None:
        assert self.store.replication is not None
        for _ in follow(self.store.replication):
            pass

    def _try(self, call: Any, wait: int | None = None, done: Any = None) -> Any:
        if wait is not None:
            return super()._try(call, wait, done)
        answers: list[Any] = []

        def settled(step: Wait[Any]) -> None:
            try:
                answers.append(step.result())
            except MqfsError as error:
                answers.append(type(error).__name__)

        try:
            step = call()
        except MqfsError as error:
            return type(error).__name__
        if not isinstance(step, Wait):
            return step
        step.subscribe(settled)
        self.confirm()
        (answer,) = answers
        return answer


class OverCopied(OverDisk):
    """`sync replica`: what is written is shown when the replica has it, and not before."""

    ends_mixed = True

    def make_model(self) -> Model:
        return Model(copied=True)

    def make(self) -> Any:
        self.path = tempfile.mkdtemp(prefix="mqfs-model-")
        return CopiedSubject(DiskStore(self.path, replica=lambda: None))

    @rule()
    def confirm(self) -> None:
        self.model.confirm()
        self.same(None, self.subject.confirm())

    def after(self, mine: Any, call: Callable[[], Any]) -> None:
        """A change of names or settings: its caller waits for the replica, and so for all that was written before."""
        if mine is None:
            self.model.confirm()
        self.same(mine, call())

    def set(self, **settings: Any) -> None:
        self.after(self.model.ctl(**as_set(settings)), lambda: self.subject.ctl(*as_lines(settings)))

    def create(self, name: str) -> None:
        self.after(self.model.create(name), lambda: self.subject.create(name))

    def remove(self, name: str) -> None:
        self.after(self.model.remove(name), lambda: self.subject.remove(name))

    def rename(self, old: str, new: str) -> None:
        if old == new:
            super().rename(old, new)  # nothing is written
            return
        self.after(self.model.rename(old, new), lambda: self.subject.rename(old, new))

    def clear(self, name: str) -> None:
        self.after(self.model.clear(name), lambda: self.subject.ctl(f"clear {name}"))

    def drop(self, name: str, sequence: int) -> None:
        self.after(self.model.drop(name, sequence), lambda: self.subject.ctl(f"drop {name} {sequence}"))

    def stop(self, wait: int) -> None:
        """A write that was appended cannot be cancelled: it is answered when the replica has it."""
        if wait in self.waits and any(wait == entry[0] for entry in self.model.unshown):
            self.confirm()
        else:
            super().stop(wait)

    def restart(self, clean: bool) -> None:
        """What a standby has is tested elsewhere."""

    def teardown(self) -> None:
        if not self.broken:
            self.confirm()
        super().teardown()


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
TestOverCopied = pytest.mark.timeout(1800)(run(OverCopied, 2_000))
TestOverDisk = pytest.mark.timeout(1800)(run(OverDisk, 2_000))
