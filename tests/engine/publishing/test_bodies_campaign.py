"""Bodies in parts among other messages, workers that take, fail and die, kills of the server: each whole, none lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.model import Wait
from tests.engine.publishing.test_bodies import body
from tests.support.batches import Units, frame
from tests.support.campaign import seed, size

pytestmark = pytest.mark.slow

STEPS = 120
BIG = 1 << 16


class Campaign:
    """One store. A written body is known by its number; a worker reads just that, whole."""

    def __init__(self, path: Path, deliver: str, luck: random.Random) -> None:
        self.luck, self.deliver = luck, deliver
        more = ["deliver one", "ack next"] if deliver == "one" else []
        self.units = Units("retries 0", "backoff 0 0", *more, path=path)
        if deliver == "all":
            self.units.consumer("w")
        self.written: dict[int, bytes] = {}
        self.done: set[int] = set()
        self.workers: list[Any] = []

    def run(self) -> None:
        steps = [self.write] * 3 + [self.work] * 6 + [self.close] * 2 + [self.restart, self.trim]
        for _ in range(STEPS):
            self.luck.choice(steps)()
        self.close_all()
        while self.work_off():
            pass
        assert self.done == set(self.written), "lost"

    def write(self) -> None:
        frames = []
        for _ in range(self.luck.randint(1, 3)):
            number, stream = len(self.written), self.luck.choice("sst")
            pieces = [b"%d:" % number, *(b"x" * self.luck.randint(1, 9) for _ in range(self.luck.randint(0, 4)))]
            frames += body(stream, pieces) if len(pieces) > 1 else [frame(stream, pieces[0])]
            self.written[number] = b"".join(pieces)
        self.units.batch(*frames)

    def worker(self) -> Any:
        if len(self.workers) < 3:
            where = f".consumers/{'w'}" if self.deliver == "all" else self.luck.choice("st")
            handle = self.units.at(where, 2)
            if self.deliver == "all" and self.luck.random() < 0.3:
                handle.write(b"select s\n")
            self.workers.append([handle, 0, None])
        return self.luck.choice(self.workers)

    def take(self, worker: Any) -> int | None:
        """Read one message, in pieces; its number."""
        handle, offset, _ = worker
        data = b""
        while True:
            got = handle.read(self.luck.randint(1, 40) if not data else BIG, offset)
            if isinstance(got, Wait):
                assert got.cancel()
                return None
            worker[1] = offset = offset + len(got)
            data += got
            number = int(data.partition(b":")[0]) if b":" in data else -1
            if number >= 0 and len(data) >= len(self.written[number]):
                assert data == self.written[number], "not whole, or another's"
                assert number not in self.done, "had already"
                return number

    def work(self) -> None:
        worker = self.worker()
        handle, _, last = worker
        if self.deliver == "one":
            number = self.take(worker)
            if last is not None:
                self.done.add(last)  # the read acknowledged it
            worker[2] = number
            return
        if last is None:
            worker[2] = self.take(worker)
            return
        word = self.luck.choice(["ack", "ack", "release", "nack", "touch"])
        handle.write(f"{word}\n".encode())
        if word == "ack":
            self.done.add(last)
        if word != "touch":
            worker[2] = None

    def work_off(self) -> bool:
        """Take and acknowledge everything there is; whether there was something."""
        before = len(self.done)
        for where in [".consumers/w"] if self.deliver == "all" else ["s", "t"]:
            worker = [self.units.at(where, 2), 0, None]
            last = None
            while (number := self.take(worker)) is not None:
                if self.deliver == "all":
                    worker[0].write(b"ack\n")
                    self.done.add(number)
                elif last is not None:
                    self.done.add(last)
                last = number
            if self.deliver == "one" and last is not None:
                self.done.add(last)
            worker[0].close()
        return len(self.done) > before

    def close(self) -> None:
        if self.workers:
            self.workers.pop(self.luck.randrange(len(self.workers)))[0].close()

    def close_all(self) -> None:
        while self.workers:
            self.close()

    def trim(self) -> None:
        self.units.group.retention.trim(always=True)

    def restart(self) -> None:
        self.units.restart(clean=self.luck.random() < 0.5)
        self.workers.clear()


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_each_whole_and_none_lost(tmp_path: Path, deliver: str) -> None:
    for number in range(size(200)):
        path = tmp_path / str(number)
        campaign = Campaign(path, deliver, random.Random(f"{seed()} {deliver} {number}"))
        try:
            campaign.run()
        except (AssertionError, errors.MqfsError) as error:
            error.add_note(f"round {number}")
            raise
        campaign.units.tree.close()
        campaign.units.store.close()
        shutil.rmtree(path)
