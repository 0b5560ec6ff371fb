"""kill -9 of the server while workers share a consumer with `order key` and a limit: over all kills no message is
delivered before those of its key that were written before it are done, and none is lost."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

import mqfs
from mqfs.errors import MqfsError, NotFound
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]

WORKERS, LIMIT, KEYS, A_ROUND = 4, 3, "abcde", 60
GONE = (OSError, EOFError, MqfsError, TimeoutError)


class Jobs:
    """What all workers have seen together."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.written: dict[str, int] = defaultdict(int)
        self.done: dict[str, set[int]] = defaultdict(set)  # an acknowledgement was sent, perhaps in vain
        self.out: set[str] = set()  # keys
        self.wrong: list[str] = []

    def begin(self, key: str, number: int) -> None:
        with self.lock:
            if key in self.out:
                self.wrong.append(f"two of {key} at once")
            if missing := set(range(number)) - self.done[key]:
                self.wrong.append(f"{key}{number} came before {key}{min(missing)} was done")
            self.out.add(key)
            if len(self.out) > LIMIT:
                self.wrong.append(f"{len(self.out)} at once")

    def end(self, key: str, number: int, *, done: bool) -> None:
        with self.lock:
            self.out.discard(key)
            if done:
                self.done[key].add(number)

    def left(self) -> int:
        with self.lock:
            return sum(self.written.values()) - sum(map(len, self.done.values()))


def work(address: str, jobs: Jobs, luck: random.Random, stop: threading.Event) -> None:
    """Claim, and acknowledge or not, until the server is gone."""
    ahead = luck.choice((1, 8))
    with (
        contextlib.suppress(*GONE),
        mqfs.connect(address, reconnect=False) as tree,
        tree.group("g").consume("w", prefetch=ahead, create=False, reconnect=False) as claims,
    ):
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                claim = claims.get(0.2)
                key, number, is_done = claim.message.key, int(claim.body), luck.random() < 0.8
                jobs.begin(key, number)
                time.sleep(luck.uniform(0, 0.003))  # the work
                jobs.end(key, number, done=is_done)
                if is_done:
                    claim.ack()
                else:
                    claim.nack(luck.choice((0, 0.01)))


def publish(server: Server, jobs: Jobs, luck: random.Random) -> None:
    with mqfs.connect(server.address) as tree:
        group = tree.group("g")
        for _ in range(A_ROUND):
            key = luck.choice(KEYS)
            group.publish("s", str(jobs.written[key]), key=key, priority=luck.choice((None, 5)))
            jobs.written[key] += 1


def test_killed_under_keys_and_a_limit() -> None:
    luck, jobs = random.Random(seed()), Jobs()
    with short_folder() as folder, Server.at(Path(folder)) as server:
        with mqfs.connect(server.address) as tree:
            tree.group("g", create=True).ctl(
                "retries 0", "backoff 1ms 1ms", "consumer w s order key", f"limit w {LIMIT}"
            )
        for round_ in range(size(200, least=4) + 1):
            is_last, stop = round_ == size(200, least=4), threading.Event()
            publish(server, jobs, luck)
            threads = [
                threading.Thread(
                    target=work, args=(server.address, jobs, random.Random(luck.random()), stop), daemon=True
                )
                for _ in range(WORKERS)
            ]
            for thread in threads:
                thread.start()
            if is_last:
                eventually(lambda: jobs.left() == 0)
                stop.set()
            else:
                time.sleep(luck.uniform(0.02, 0.3))
                server.restart()
                stop.set()
            for thread in threads:
                thread.join(HANG_S)
            jobs.out.clear()  # what was claimed from the server before
            assert jobs.wrong == []
        with mqfs.connect(server.address) as tree:
            with pytest.raises(NotFound):
                tree.group("g").consumer("x").info()
            info = tree.group("g").consumer("w").info()
            assert (info.lag, info.held_back) == (0, None)
