"""Commits that wait for room, against a model: each is appended once, and none after a higher one of its producer."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mqfs.model import Wait
from tests.support.batches import Units
from tests.support.campaign import size

pytestmark = pytest.mark.slow

STREAMS = ("s", "t")


class Commit(NamedTuple):
    producer: str
    number: int
    part: str


class Model:
    """Streams that keep one message, and the commits that wait for each, in their order."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.waiting: dict[str, list[Commit]] = {stream: [] for stream in STREAMS}
        self.committed: dict[str, int] = {}

    def commit(self, stream: str, commit: Commit) -> bool:
        """Whether it is over at once."""
        if self._is_repeat(commit):
            return True
        if self.waiting[stream] or stream in self.kept:
            self.waiting[stream].append(commit)
            return False
        self._append(stream, commit)
        return True

    def _is_repeat(self, commit: Commit) -> bool:
        return commit.number <= self.committed.get(commit.producer, -1)

    def _append(self, stream: str, commit: Commit) -> None:
        self.kept[stream], self.committed[commit.producer] = commit.part, commit.number

    def retry(self) -> None:
        """Until nothing changes: the first that waits for a stream is tried."""
        before = None
        while before != (before := sum(map(len, self.waiting.values()))):
            for stream, waiting in self.waiting.items():
                while waiting and (self._is_repeat(waiting[0]) or stream not in self.kept):
                    if not self._is_repeat(first := waiting.pop(0)):
                        self._append(stream, first)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.units, self.count = Model(), Units("depth 1", "full block"), 0
        self.waits: dict[str, Wait[Any]] = {}  # by the part

    def _retry(self) -> None:
        for _ in STREAMS:
            self.units.group.unblock()
        self.model.retry()

    @rule(producer=st.sampled_from("xy"), number=st.integers(0, 5), stream=st.sampled_from(STREAMS))
    def commit(self, producer: str, number: int, stream: str) -> None:
        self.count += 1
        commit = Commit(producer, number, f"p{self.count}")
        self.units.stage(commit.part, stream, commit.part.encode())
        wait = self.units.say(f"commit {producer}.{number} {commit.part}")
        assert (wait is None) == self.model.commit(stream, commit)
        if wait is not None:
            self.waits[commit.part] = wait
        self._retry()

    @rule(stream=st.sampled_from(STREAMS))
    def clear(self, stream: str) -> None:
        self.units.ctl(f"clear {stream}")
        self.model.kept.pop(stream, None)
        self._retry()

    @rule(stream=st.sampled_from(STREAMS), at=st.integers(0, 5))
    def cancel(self, stream: str, at: int) -> None:
        for commit in self.model.waiting[stream][at : at + 1]:
            assert self.waits.pop(commit.part).cancel()
            self.units.say(f"abort {commit.part}")
            self.model.waiting[stream].remove(commit)
        self._retry()

    @invariant()
    def what_is_there(self) -> None:
        waiting = {commit.part for some in self.model.waiting.values() for commit in some}
        assert dict(self.units.log()) == self.model.kept
        assert self.units.committed() == self.model.committed
        assert set(self.units.parts()) == waiting == {part for part, wait in self.waits.items() if not wait.settled}

    def teardown(self) -> None:
        for wait in self.waits.values():
            if wait.settled:
                wait.result()
        self.units.tree.close()
        assert self.units.tree.staging.bytes.used == 0


def test_commits_that_wait_as_modelled() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(max_examples=size(1_000), stateful_step_count=40, deadline=None)
    )
