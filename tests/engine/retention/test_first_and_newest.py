"""The first and the newest message of a stream are those that a search of its log finds, whatever came before.

What the search leaves out, below the floor or by `is_deleted`, is for other tests.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from typing import Any

import pytest

from mqfs.engine.retention.retained import KeptRange
from mqfs.errors import MqfsError
from mqfs.model import Kind, Record, Wait
from mqfs.store import memory
from tests.support import campaign
from tests.support.queues import BIG, Queues, say

SETTINGS = ["replay all", "replay off", "replay last", "replay key", "deliver one"]
CHANGES = [*SETTINGS, "deliver all", "depth 3", "depth off", "clear s", "eof t"]


def searched(kept: KeptRange) -> tuple[int, int]:
    first = newest = 0
    at = kept.log.reader.before(kept.log.end.next, kept.number)
    while at is not None and at >= kept.state.floor:
        record: Record | None = kept.log.reader.find(kept.number, at)
        assert record is not None
        if not kept.is_deleted(at):
            first, newest = at, newest or (at if record.kind == Kind.MESSAGE else 0)
        at = kept.log.reader.before(at, kept.number)
    return first, newest


class Acts:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.queues = chance, Queues(chance.choice(SETTINGS))
        self.queues.stream("t")
        self.put = self.queues.at(".put", os.O_RDWR)
        self.workers: dict[str, Any] = {}
        self.readers: list[Any] = []

    def write(self) -> None:
        self.queues.write(self.chance.choice("st"), b"x")

    def put_one(self) -> None:
        key, value = self.chance.choice([("ttl", "1s"), ("ttl", "3s"), ("key", "a"), ("key", "b")])
        self.put.write(
            b'{"stream":"%s","%s":"%s"} x' % (self.chance.choice([b"s", b"t"]), key.encode(), value.encode())
        )

    def change(self) -> None:
        self.queues.ctl(self.chance.choice(CHANGES))

    def drop(self) -> None:
        self.queues.ctl(
            f"drop {self.chance.choice('st')} {self.chance.randrange(1, self.queues.group.log.end.next + 1)}"
        )

    def consume(self) -> None:
        name = self.chance.choice("ab")
        self.queues.consumer(name)
        self.workers[name] = self.queues.worker(name)

    def remove(self) -> None:
        self.queues.ctl(f"remove consumer {self.chance.choice('ab')}")

    def work(self) -> None:
        for worker in list(self.workers.values()):
            if isinstance(step := worker.read(BIG), Wait):
                step.cancel()
            else:
                say(worker, self.chance.choice(["ack", "ack", "ack", "nack 1s", "release"]))

    def seek(self) -> None:
        place = self.chance.choice(["first", "last", str(self.chance.randrange(1, 20))])
        for worker in list(self.workers.values())[:1]:
            say(worker, f"seek {place}")

    def open(self) -> None:
        self.readers.append(self.queues.at(self.chance.choice("st")))

    def close(self) -> None:
        if self.readers:
            self.readers.pop().close()

    def pass_time(self) -> None:
        self.queues.pass_time(1)

    def trim(self) -> None:
        """Begin or continue a trim, some steps of it."""
        retention = self.queues.group.retention
        if retention._trimming is None:
            retention._trimming = retention._trim(0, retention.expiry.expired_before(), True)
        for _ in range(self.chance.randrange(30)):
            if next(retention._trimming, True):  # its steps yield None
                retention._trimming = None
                break


def test_they_are_what_a_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STEPS", 3)
    monkeypatch.setattr(memory, "_STREAMS", 2)
    for seed in range(campaign.seed(), campaign.seed() + campaign.size(5_000)):
        acts = Acts(random.Random(seed))
        common = [acts.write] * 4 + [acts.put_one] * 3 + [acts.work] * 4
        for step in range(120):
            act = acts.chance.choice(
                [*common, acts.change, acts.drop, acts.consume, acts.remove, acts.seek, acts.open, acts.close,
                 acts.pass_time, acts.trim]
            )  # fmt: skip
            with suppress(MqfsError):  # a refusal
                act()
            for stream in acts.queues.group.streams.values():
                if (kept := stream.kept).count >= 0:
                    found = kept.first_kept(), kept.newest_kept()
                    assert found == searched(kept), f"seed {seed}, step {step}, stream {stream.name}: {act.__name__}"
