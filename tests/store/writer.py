"""A process that appends to a store as fast as it can, and prints what is on disk as reported, until it is killed.

python -m tests.store.writer STORE ROUND
"""

from __future__ import annotations

import os
import queue
import random
import sys
from collections.abc import Callable

from mqfs.model import Draft, Kind
from mqfs.store.api import Bucket
from mqfs.store.store import DiskStore
from tests.support.temp_store import SMALL, lowered

Call = Callable[[], None]


class Writer:
    def __init__(self, path: str, number: int) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.random = random.Random(number)
        self.round = number
        self.count = 0
        self.store = DiskStore(path, self.calls.put)
        groups = self.store.groups()
        self.buckets = [self.store.open(n) for n in groups] or [
            self.store.make(self.store.number(), b"{}") for _ in "ab"
        ]
        for bucket in self.buckets:
            bucket.writer.state = lambda: b"{}"

    def run(self) -> None:
        print("ready", flush=True)
        while True:
            for bucket in self.buckets:
                self.step(bucket)
            self.store.tick()
            self.calls.get()()  # at least one result, so that it is not all append
            while not self.calls.empty():
                self.calls.get()()

    def step(self, bucket: Bucket) -> None:
        unit = [Draft(Kind.MESSAGE, 16, self.body()) for _ in range(self.random.choice([1, 1, 3]))]
        first = (
            bucket.writer.append_batch(unit, 0)
            if len(unit) > 1
            else bucket.writer.append(Kind.MESSAGE, 16, 0, unit[0].body)
        )
        told = b"".join(b"%d %d %s\n" % (bucket.id, first + n, draft.body) for n, draft in enumerate(unit))
        bucket.writer.append(Kind.ACK, 1, 0, bytes(24))
        bucket.upkeep.sync(lambda error: None if error else self.tell(told))
        if self.random.random() < 0.02:
            bucket.upkeep.trim({16: max(1, bucket.end.next - 500)}, frozenset())

    def tell(self, told: bytes) -> None:
        os.write(1, told)

    def body(self) -> bytes:
        self.count += 1
        return b"%d.%d" % (self.round, self.count) + b"." * self.random.randint(0, 100)


if __name__ == "__main__":
    with lowered(**{**SMALL, "SEQUENCE_BLOCK": 64, "SEGMENT_BYTES": 8_192}):
        Writer(sys.argv[1], int(sys.argv[2])).run()
