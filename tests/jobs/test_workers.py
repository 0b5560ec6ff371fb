"""Workers of Celery and of dramatiq as their commands start them: results, delays, kills of them and of the server."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import ROOT, campaign
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, environment, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
CELERY = ("celery", "-A", "tests.jobs.celery_app", "worker", "-P", "solo", "-l", "WARNING", "--without-mingle")
DRAMATIQ = ("dramatiq", "tests.jobs.dramatiq_app", "-p", "1", "-t", "4")
APPS = {CELERY: "celery_app", DRAMATIQ: "dramatiq_app"}
USE_CELERY = """
results = [add.delay(n, n) for n in range(10)]
answers = [result.get(timeout=60) for result in results]
note.apply_async((7,), countdown=1)
print(json.dumps([answers, *app.control.inspect(timeout=5).ping().values()]))
"""
USE_DRAMATIQ = """
for n in range(10): note.send(n)
note.send_with_options(args=(10,), delay=300)
fail.send()
broker.join("default", timeout=60_000)
print(json.dumps(broker.group.stats().dead_letters))
"""


class Jobs:
    """A server, its workers, and the file that they write to."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self._done = server, folder / "done"
        self._environment = environment(JOBS_ADDRESS=server.address, JOBS_DONE=str(self._done))
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        number = len(self._workers)
        words = [sys.executable, "-m", *command, *(("-n", f"{number}@%h") if command is CELERY else ())]
        with self._done.with_name(f"worker{number}.log").open("wb") as log:
            self._workers.append(subprocess.Popen(words, cwd=ROOT, env=self._environment, stdout=log, stderr=log))
        return self._workers[-1]

    def run(self, command: Sequence[str], code: str) -> str:
        """What a program of the application prints."""
        program = f"import json\nfrom tests.jobs.{APPS[tuple(command)]} import *\n{code}"
        words = [sys.executable, "-c", program]
        return subprocess.run(
            words, cwd=ROOT, env=self._environment, check=True, stdout=subprocess.PIPE, text=True, timeout=HANG_S
        ).stdout

    def numbers(self) -> list[int]:
        return [int(line) for line in self._done.read_text().splitlines()] if self._done.exists() else []

    def left(self, group: str, queue: str) -> int:
        with self.server.connect() as client:
            stats = client.group(group).stats()
        consumer = stats.streams[queue].consumer
        return stats.held + (consumer.lag if consumer is not None else 0)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with short_folder() as folder, Server.at(folder) as server:
        jobs = Jobs(server, tmp_path)
        try:
            yield jobs
        finally:
            jobs.close()


def test_celery(jobs: Jobs) -> None:
    jobs.start(CELERY)
    assert json.loads(jobs.run(CELERY, USE_CELERY)) == [[2 * n for n in range(10)], {"ok": "pong"}]
    eventually(lambda: jobs.numbers() == [7])


def test_dramatiq(jobs: Jobs) -> None:
    jobs.start(DRAMATIQ)
    assert json.loads(jobs.run(DRAMATIQ, USE_DRAMATIQ)) == 1
    assert sorted(jobs.numbers()) == [*range(11)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("command", "publish", "queue"),
    [(CELERY, "note.delay", ("celery/queues", "celery")), (DRAMATIQ, "note.send", ("dramatiq", "default"))],
)
def test_no_job_is_lost_by_kills(jobs: Jobs, command: Sequence[str], publish: str, queue: tuple[str, str]) -> None:
    """Workers are killed while they work, and the server."""
    count, chance = campaign.size(10_000), random.Random(campaign.seed())
    jobs.run(command, f"for n in range({count}): {publish}(n)")
    rounds = max(2, count // 500)
    for number in range(rounds):
        workers = [jobs.start(command) for _ in range(2)]
        goal = count * (number + 1) // (rounds + 1)
        eventually(lambda goal=goal: len({*jobs.numbers()}) >= goal)
        chance.shuffle(workers)
        workers[0].kill()
        if number % 2:
            jobs.server.restart()
        workers[1].kill()
    jobs.start(command)
    eventually(lambda: jobs.left(*queue) == 0)
    assert {*jobs.numbers()} == {*range(count)}
    print(f"{count} jobs, {len(jobs.numbers()) - count} of them run again; {2 * rounds} workers were killed")
