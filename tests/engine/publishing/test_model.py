"""Batches, parts and commits against a page of lists, over memory and disk, with kills of the server in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mqfs import errors
from tests.support.batches import Units, frame
from tests.support.campaign import size
from tests.support.hand import ROOT

pytestmark = pytest.mark.slow

STREAMS = ("s", "t", "u")
PARTS = ("p", "q", "r")
PRODUCERS = ("x", "y.z")
Messages = list[tuple[str, str]]


class Model:
    """A model of the kept messages, the staged parts and the commits."""

    def __init__(self) -> None:
        self.streams, self.log = {"s", "t"}, Messages()
        self.parts: dict[str, Messages] = {}
        self.committed: dict[str, int] = {}

    def append(self, messages: Messages) -> bool:
        if any(stream not in self.streams for stream, _ in messages):
            return False
        self.log += messages
        return True

    def stage(self, part: str, messages: Messages) -> bool:
        if part not in self.parts or any(stream not in self.streams for stream, _ in messages):
            return False
        self.parts[part] += messages
        return True

    def commit(self, producer: str, number: int, parts: list[str]) -> bool:
        if number <= self.committed.get(producer, -1):
            for part in parts:
                self.parts.pop(part, None)
            return True
        known = len(set(parts)) == len(parts) and all(part in self.parts for part in parts)
        if not known or not self.append([message for part in parts for message in self.parts[part]]):
            return False
        self.committed[producer] = number
        for part in parts:
            del self.parts[part]
        return True

    def remove(self, stream: str) -> None:
        self.streams.discard(stream)
        self.log = [message for message in self.log if message[0] != stream]


frames = st.lists(st.tuples(st.sampled_from(STREAMS), st.text("abc", min_size=1, max_size=3)), max_size=5)


class Machine(RuleBasedStateMachine):
    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.path = Path(tempfile.mkdtemp(prefix="mqfs-units-")) if self.on_disk else None
        self.units = Units(path=self.path / "store" if self.path else None)

    def _same(self, expected: bool, call: Any) -> None:
        try:
            call()
            done = True
        except errors.MqfsError:
            done = False
        assert done == expected

    @staticmethod
    def _encode(messages: Messages) -> list[bytes]:
        return [frame(stream, body.encode()) for stream, body in messages]

    @rule(messages=frames)
    def batch(self, messages: Messages) -> None:
        self._same(self.model.append(messages), lambda: self.units.batch(*self._encode(messages)))

    @rule(part=st.sampled_from(PARTS))
    def open_part(self, part: str) -> None:
        self._same(part not in self.model.parts, lambda: self.units.part(part))
        self.model.parts.setdefault(part, [])

    @rule(part=st.sampled_from(PARTS), messages=frames)
    def stage(self, part: str, messages: Messages) -> None:
        def write() -> None:
            handle = self.units.at(f".txn/{part}/.batch", 1)
            try:
                handle.write(b"".join(self._encode(messages)))
            finally:
                handle.close()

        self._same(self.model.stage(part, messages), write)

    @rule(
        producer=st.sampled_from(PRODUCERS),
        number=st.integers(0, 6),
        parts=st.lists(st.sampled_from(PARTS), max_size=3),
    )
    def commit(self, producer: str, number: int, parts: list[str]) -> None:
        expected = self.model.commit(producer, number, parts)
        self._same(expected, lambda: self.units.say(" ".join(["commit", f"{producer}.{number}", *parts])))

    @rule(part=st.sampled_from(PARTS))
    def abort(self, part: str) -> None:
        self._same(self.model.parts.pop(part, None) is not None, lambda: self.units.say(f"abort {part}"))

    @rule(stream=st.sampled_from(STREAMS))
    def make(self, stream: str) -> None:
        if stream not in self.model.streams:
            self.units.stream(stream)
            self.model.streams.add(stream)

    @rule(stream=st.sampled_from(STREAMS))
    def remove(self, stream: str) -> None:
        if stream in self.model.streams:
            self.units.tree.unlink(ROOT, self.units.group, stream)
            self.model.remove(stream)

    @precondition(lambda self: self.on_disk)
    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.units.restart(clean=clean)
        self.model.parts.clear()

    @invariant()
    def what_is_kept(self) -> None:
        assert self.units.log() == self.model.log
        assert sorted(self.units.parts()) == sorted(self.model.parts)
        assert self.units.committed() == self.model.committed

    def teardown(self) -> None:
        self.units.tree.close()
        assert self.units.tree.staging.bytes.used == 0
        self.units.store.close()
        if self.path:
            shutil.rmtree(self.path)


class OnDisk(Machine):
    on_disk = True


@pytest.mark.parametrize("machine", [Machine, OnDisk])
def test_units_as_modelled(machine: type[Machine]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=size(400), stateful_step_count=30, deadline=None)
    )
