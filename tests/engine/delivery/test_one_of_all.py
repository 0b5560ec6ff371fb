"""Messages for one taker, taken in every way at once: each is one's at a time, and none is lost."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs.engine.tree.tree import Tree
from mqfs.errors import MqfsError
from mqfs.model import Wait
from mqfs.store.store import DiskStore
from tests.support import campaign
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk
from tests.support.queues import BIG, Queues, say
from tests.support.temp_store import SMALL, lowered

pytestmark = pytest.mark.slow

STEPS = 60
WAYS = {
    "takes": ".consumers/.s", "group": ".consumers/a", "over": ".consumers/b", "memory": ".consumers/m",
    "transient": ".consumers/t", "view": ".consumers/v", "reader": "s",
}  # fmt: skip
OPTIONS = {
    "over": ["s", "s", "s backlog 2 full drop-old", "s order key"], "memory": ["memory"], "transient": ["transient"],
    "view": ["view"],
}  # fmt: skip
SETTINGS = [("replay all",), ("replay off",), ("replay last",), ("deliver one",), ("keep ring", "replay all")]


class Story:
    """Random steps, for each message for one taker who has it, and of the others what each consumer is to get. Bodies
    are numbers, those of the others below 0."""

    def __init__(self, chance: random.Random, path: Path) -> None:
        self.chance = chance
        lines = chance.choice(SETTINGS)
        self.q = self.make(path)
        self.q.ctl(*lines, "retries 0", "backoff 1s 1s", "bind view s")
        self.lasting = "keep ring" not in lines
        self.handles: dict[Any, str] = {}
        self.open: dict[int, Any] = {}  # not done: who has it
        self.plain: dict[tuple[Any, int], None] = {}  # claims of the others
        self.due: dict[str, set[int]] = {}  # what consumers have not acked of them
        self.sequences: dict[int, int] = {}
        self.waits: dict[Any, Wait[bytes]] = {}
        self.said: list[str] = [" ".join(lines)]
        self.count = 0
        if chance.random() < 0.7:
            self.q.consumer("a")
            self.due["group"] = set()

    def make(self, path: Path) -> Queues:
        return Queues(path=path)

    def do(self, step: Callable[[], None]) -> None:
        step()

    def run(self) -> None:
        steps: list[Callable[[], None]] = [self.put, self.put, self.write, self.read, self.read, self.read, self.settle]
        steps += [self.settle, self.settle_plain, self.settle_plain, self.open_one, self.open_one, self.close_one]
        steps += [self.trim, self.again, self.consumer, self.consumer, self.seek, self.bind, self.pause]
        try:
            for _ in range(STEPS):
                step = self.chance.choice(steps)
                self.said.append(step.__name__)
                self.do(step)
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
        more: dict[str, Any] = self.chance.choice([{}, {}, {"priority": 8}, {"key": "k"}])
        self.sequences[self.count] = self.q.put(b"%d" % self.count, single=True, **more)

    def write(self) -> None:
        self.count += 1
        self.sequences[-self.count] = self.q.put(b"%d" % -self.count)
        for due in self.due.values():
            due.add(-self.count)

    def open_one(self) -> None:
        way = self.chance.choice(list(WAYS))
        if self.is_there(way):
            handle = self.q.taker() if way == "reader" else self.q.at(WAYS[way], os.O_RDWR)
            self.handles[handle] = way
            self.note(way, id(handle) % 9973)

    def is_there(self, way: str) -> bool:
        return way in ("takes", "reader") or WAYS[way][-1] in self.q.group.consumers

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
        if (plain := int(body)) < 0:
            assert way != "takes" or self.q.group.settings.deliver == "one"
            if way != "reader":
                self.plain[handle, plain] = None
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

    def settle_plain(self) -> None:
        if self.plain:
            handle, number = self.chance.choice(list(self.plain))
            verb = self.chance.choice(["ack", "ack", "nack", "release"])
            self.note(verb, number, "of", self.handles[handle])
            del self.plain[handle, number]
            if verb == "ack":
                self.due.get(self.handles[handle], set()).discard(number)
            say(handle, f"{verb} {self.sequences[number]}")

    def seek(self) -> None:
        """Claims of all receivers of that consumer are void."""
        moving = [handle for handle, way in self.handles.items() if way not in ("takes", "reader")]
        if moving:
            handle = self.chance.choice(moving)
            way, place = self.handles[handle], self.chance.choice(["first", "last", "end"])
            self.note(way, place)
            mine = [other for other in self.handles if self.handles[other] == way]
            self.voided(mine)
            if way in self.due:
                self.due[way] = set()
            say(handle, f"seek {place}")

    def voided(self, handles: list[Any]) -> None:
        self.open = {number: None if holder in handles else holder for number, holder in self.open.items()}
        self.plain = {claim: None for claim in self.plain if claim[0] not in handles}

    def bind(self) -> None:
        self.q.ctl("unbind view s" if "view" in self.q.group.views else "bind view s")

    def pause(self) -> None:
        if "group" in self.due:
            self.q.ctl(self.chance.choice(["pause a", "resume a"]))

    def close_one(self) -> None:
        if (handle := self.a_handle()) is not None:
            self.close(handle)

    def close(self, handle: Any) -> None:
        if (wait := self.waits.pop(handle, None)) is not None:
            assert wait.cancel()
        self.voided([handle])
        handle.close()
        del self.handles[handle]

    def trim(self) -> None:
        self.q.pass_time(self.chance.choice([0, 1, 2]))
        self.q.group.retention.trim(always=True)

    def consumer(self) -> None:
        way = self.chance.choice(list(OPTIONS))
        name, options = WAYS[way][-1], self.chance.choice(OPTIONS[way])
        if name not in self.q.group.consumers:
            self.q.consumer(name, options)
            if way in ("over", "memory") and "backlog" not in options:
                self.due[way] = set()
        elif way not in self.handles.values() and not self.q.group.consumers[name].claims:
            self.due.pop(way, None)
            self.q.ctl(f"remove {name}")

    def again(self) -> None:
        if self.lasting and self.chance.random() < 0.5:
            for wait in self.waits.values():
                assert wait.cancel()
            self.waits.clear()
            self.handles.clear()
            self.open = dict.fromkeys(self.open)
            self.plain.clear()
            if "memory" in self.due:
                self.due["memory"] = set()
            self.q.restart(clean=self.chance.choice([True, False]))

    def finish(self) -> None:
        """Whoever is left gets all that is not done."""
        for handle in list(self.handles):
            self.close(handle)
            self.look()
        if "group" in self.due:
            self.q.ctl("resume a")
        self.q.pass_time(3)
        self.q.group.retention.trim(always=True)
        for way in WAYS:
            if way != "reader" and self.is_there(way):
                handle = self.q.at(WAYS[way], os.O_RDWR)
                self.handles[handle] = way
                while not isinstance(step := handle.read(BIG), Wait):
                    self.had(handle, step)
                    say(handle, f"ack {self.sequences[int(step)]}")
                    self.due.get(way, set()).discard(int(step))
                assert step.cancel()
        assert {way: due for way, due in self.due.items() if due} == {}
        assert [number for number, holder in self.open.items() if holder is None] == []
        self.q.close()


class FillingDisk(LyingDisk):
    """It has no room for the write of that number, counted from now on; 0: for all."""

    full_at = 0

    def _count(self, what: str, *, reads: bool = False) -> None:
        if what == "pwrite" and self.full_at:
            self.full_at -= 1
            if not self.full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._count(what, reads=reads)

    def after_kill(self) -> FillingDisk:
        return FillingDisk(self.root)


class OverFillingDisk(Queues):
    disk: FillingDisk

    def __init__(self) -> None:
        self.clock, self.path = ManualClock(), None
        self.start(FillingDisk())
        self.group = self.mkdir("g")
        self.ctl("sync off")
        self.stream("s")

    def start(self, disk: FillingDisk) -> None:
        self.disk = disk
        self.store = DiskStore("/s/store", disk=disk)
        self.tree = Tree(self.store, self.clock, owner=ROOT)

    def restart(self, *, clean: bool = True, while_down: Any = None) -> None:
        if clean:
            self.close()
        self.start(self.disk.after_kill())
        self.group = self.tree.root.groups["g"]


class FilledStory(Story):
    """What the disk refuses has not happened, or is done later. A close is never refused."""

    q: OverFillingDisk

    def make(self, path: Path) -> Queues:
        return OverFillingDisk()

    def do(self, step: Callable[[], None]) -> None:
        if self.waits or step == self.again or self.chance.random() < 0.6:
            step()
            return
        before = dict(self.open), dict(self.plain), {way: set(due) for way, due in self.due.items()}
        self.q.disk.full_at = self.chance.choice([1, 1, 2])
        try:
            step()
        except MqfsError as error:
            self.note("refused:", error)
            assert step != self.close_one
            self.open, self.plain, self.due = before
            self.look_again()
        finally:
            self.q.disk.full_at = 0

    def look_again(self) -> None:
        """Whose the claims are: a `seek` gives them back one by one."""
        holders = {sequence: handle for handle in self.handles for sequence in getattr(handle, "claims", ())}
        self.open = {number: holders.get(self.sequences[number]) for number in self.open}
        self.plain = {claim: None for claim in self.plain if self.sequences[claim[1]] in claim[0].claims}
        self.due = {way: due for way, due in self.due.items() if self.is_there(way)}
        for handle in self.handles:
            if getattr(handle, "refusal", None) is not None:
                assert handle.read(BIG)


@pytest.mark.timeout(3600)
def test_each_is_for_one_and_none_is_lost(tmp_path: Path) -> None:
    seed = campaign.seed()
    for turn in range(campaign.size(2_000)):
        Story(random.Random(f"{seed} {turn}"), tmp_path / str(turn)).run()


@pytest.mark.timeout(3600)
def test_none_is_lost_where_the_disk_is_full_at_times(tmp_path: Path) -> None:
    seed = campaign.seed()
    with lowered(**SMALL):
        for turn in range(campaign.size(20_000)):
            FilledStory(random.Random(f"{seed} {turn}"), tmp_path).run()
