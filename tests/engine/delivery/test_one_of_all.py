"""Messages for one taker, taken in every way at once: each is one's at a time, and none is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs.model import Wait
from tests.support import campaign
from tests.support.queues import BIG, Queues, say

pytestmark = pytest.mark.slow

STEPS = 60
WAYS = {"takes": ".consumers/.s", "group": ".consumers/a", "over": ".consumers/b", "reader": "s"}
SETTINGS = [("replay all",), ("replay off",), ("replay last",), ("deliver one",), ("keep ring", "replay all")]


class Story:
    """Random steps, and for each message for one taker who has it. Bodies are numbers."""

    def __init__(self, chance: random.Random, path: Path) -> None:
        self.chance = chance
        lines = chance.choice(SETTINGS)
        self.q = Queues(*lines, "retries 0", "backoff 1s 1s", path=path)
        self.lasting = "keep ring" not in lines
        self.handles: dict[Any, str] = {}
        self.open: dict[int, Any] = {}  # not done: who has it
        self.sequences: dict[int, int] = {}
        self.waits: dict[Any, Wait[bytes]] = {}
        self.said: list[str] = [" ".join(lines)]
        self.count = 0
        if chance.random() < 0.7:
            self.q.consumer("a")

    def run(self) -> None:
        steps: list[Callable[[], None]] = [self.put, self.put, self.write, self.read, self.read, self.read, self.settle]
        steps += [self.settle, self.open_one, self.close_one, self.trim, self.again, self.consumer]
        try:
            for _ in range(STEPS):
                step = self.chance.choice(steps)
                self.said.append(step.__name__)
                step()
                self.look()
            self.finish()
        except BaseException as error:
            error.add_note("\n".join(self.said))
            raise

    def note(self, *what: object) -> None:
        self.said.append("  " + " ".join(map(str, what)))

    # ------------------------------------------------------------ steps

    def put(self) -> None:
        self.count += 1
        self.open[self.count] = None
        self.sequences[self.count] = self.q.put(b"%d" % self.count, single=True)

    def write(self) -> None:
        self.q.write("s", b"plain")

    def open_one(self) -> None:
        way = self.chance.choice(list(WAYS))
        if way in ("takes", "reader") or WAYS[way][-1] in self.q.group.consumers:
            handle = self.q.taker() if way == "reader" else self.q.at(WAYS[way], os.O_RDWR)
            self.handles[handle] = way
            self.note(way, id(handle) % 9973)

    def a_handle(self) -> Any:
        return self.chance.choice(list(self.handles)) if self.handles else None

    def read(self) -> None:
        handle = self.a_handle()
        if handle is None or handle in self.waits:
            return
        step = handle.read(BIG)
        if isinstance(step, Wait):
            self.waits[handle] = step
        else:
            self.had(handle, step)

    def look(self) -> None:
        """Take the messages that came for the handles that wait."""
        for handle, step in list(self.waits.items()):
            if step.settled:
                del self.waits[handle]
                self.had(handle, step.result())

    def had(self, handle: Any, body: bytes) -> None:
        way = self.handles[handle]
        self.note(way, id(handle) % 9973, "gets", body)
        assert body
        if body == b"plain":
            assert way != "takes" or self.q.group.settings.deliver == "one"
            if way != "reader":
                say(handle, "ack")
            return
        number = int(body)
        assert number in self.open, f"{number} was acknowledged, and is given to {way}"
        assert self.open[number] is None, f"{number} is another's, and is given to {way}"
        if way == "reader":
            del self.open[number]
        else:
            self.open[number] = handle

    def settle(self) -> None:
        held = [number for number, handle in self.open.items() if handle is not None]
        if held:
            number = self.chance.choice(held)
            handle = self.open[number]
            verb, *delay = self.chance.choice([["ack"], ["nack", "1s"], ["nack", "0"], ["release"]])
            self.note(verb, number)
            self.open[number] = None
            if verb == "ack":
                del self.open[number]
            say(handle, " ".join([verb, str(self.sequences[number]), *delay]))

    def close_one(self) -> None:
        if (handle := self.a_handle()) is not None:
            self.close(handle)

    def close(self, handle: Any) -> None:
        if (wait := self.waits.pop(handle, None)) is not None:
            assert wait.cancel()
        for number, holder in self.open.items():
            if holder is handle:
                self.open[number] = None
        handle.close()
        del self.handles[handle]

    def trim(self) -> None:
        self.q.pass_time(self.chance.choice([0, 1, 2]))
        self.q.group.retention.trim(always=True)

    def consumer(self) -> None:
        if "b" not in self.q.group.consumers:
            self.q.consumer("b", "s")
        elif "over" not in self.handles.values():
            self.q.ctl("remove b")

    def again(self) -> None:
        if self.lasting and self.chance.random() < 0.5:
            for wait in self.waits.values():
                assert wait.cancel()
            self.waits.clear()
            self.handles.clear()
            self.open = dict.fromkeys(self.open)
            self.q.restart(clean=self.chance.choice([True, False]))

    def finish(self) -> None:
        """Whoever is left gets all that is not done."""
        for handle in list(self.handles):
            self.close(handle)
            self.look()
        self.q.pass_time(3)
        self.q.group.retention.trim(always=True)
        for way in ("takes", "group", "over"):
            if way != "takes" and WAYS[way][-1] not in self.q.group.consumers:
                continue
            handle = self.q.at(WAYS[way], os.O_RDWR)
            self.handles[handle] = way
            while not isinstance(step := handle.read(BIG), Wait):
                self.had(handle, step)
            assert step.cancel()
        assert [number for number, holder in self.open.items() if holder is None] == []
        self.q.close()


@pytest.mark.timeout(3600)
def test_each_is_for_one_and_none_is_lost(tmp_path: Path) -> None:
    seed = campaign.seed()
    for turn in range(campaign.size(2_000)):
        Story(random.Random(f"{seed} {turn}"), tmp_path / str(turn)).run()
