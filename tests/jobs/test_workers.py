"""Workers of Celery, dramatiq and huey, started by their commands: results, delays, kills of them and of the server."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import attrs
import pytest

from mqfs.state.acks import Op
from tests.support import ROOT, campaign
from tests.support.ack_steps import ack_steps
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server, environment, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
WORKERS = 4


@attrs.frozen
class Library:
    """A library of jobs, with an application of the tests that has `publish` and `publish_later`."""

    app: str
    worker: tuple[str, ...]  # the command, behind `python -m`
    queue: tuple[str, str]  # its group and stream
    claimed: int  # jobs that a worker has claimed, and not acknowledged, at most


CELERY = Library(
    "tests.jobs.celery_app",
    ("celery", "-A", "tests.jobs.celery_app", "worker", "-P", "solo", "-l", "WARNING", "--without-mingle"),
    ("celery/queues", "celery"), 1,
)  # fmt: skip
DRAMATIQ = Library(
    "tests.jobs.dramatiq_app", ("dramatiq", "tests.jobs.dramatiq_app", "-p", "1", "-t", "4"),
    ("dramatiq", "default"), 8,
)  # fmt: skip
HUEY = Library(
    "tests.jobs.huey_app", ("huey.bin.huey_consumer", "tests.jobs.huey_app.huey", "-w", "4"),
    ("jobs/tasks", "queue"), 4,
)  # fmt: skip
USE_CELERY = """
results = [add.delay(n, n) for n in range(10)]
answers = [result.get(timeout=60) for result in results]
publish_later(7, 1)
print(json.dumps([answers, *app.control.inspect(timeout=5).ping().values()]))
"""
PING = "print(json.dumps(next(iter((app.control.inspect(timeout=2).ping() or {}).values()), None)))"
REMOVE_CONTROL = """
with app.connection() as connection:
    channel = connection.default_channel
    for _, _, queue in channel.get_table("celery.pidbox"): channel.queue_delete(queue)
"""
USE_DRAMATIQ = """
for n in range(10): publish(n)
note.send_with_options(args=(10,), delay=300)
fail.send()
broker.join("default", timeout=60_000)
print(json.dumps(broker.group.stats().dead_letters))
"""
USE_HUEY = """
results = [add(n, n) for n in range(10)]
publish_later(7, 1)
print(json.dumps([result.get(blocking=True, timeout=60) for result in results]))
"""
PUBLISH = "for n in range({}): publish(n)"
PUBLISH_LATER = "print(json.dumps({{n: publish_later(n, 2 + n % {}) for n in range({}, {})}}))"


@attrs.frozen
class Run:
    """A job that ran: its line in the file."""

    number: int
    time: float
    worker: int


class Jobs:
    """A server, its workers, and the file that they write to."""

    def __init__(self, server: Server, folder: Path, address: str = "") -> None:
        """`address`: where they find the server, if not at its own."""
        self.server, self._done = server, folder / "done"
        self._environment = environment(JOBS_ADDRESS=address or server.address, JOBS_DONE=str(self._done))
        self._workers: list[subprocess.Popen[bytes]] = []
        self.kills: list[tuple[float, float, int]] = []  # between when and when, and which worker; 0: the server
        self.outages: list[tuple[float, float]] = []  # of the server, from and to

    def start(self, library: Library, *more: str) -> int:
        """A worker. What it begins is a process group of its own, with its number."""
        number = len(self._workers)
        named = ("-n", f"{number}@%h") if library is CELERY else ()
        words = [sys.executable, "-m", *library.worker, *named, *more]
        with self._done.with_name(f"worker{number}.log").open("wb") as log:
            worker = subprocess.Popen(
                words, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self._workers.append(worker)
        return worker.pid

    def kill(self, worker: int) -> None:
        began = time.time()
        os.killpg(worker, signal.SIGKILL)
        self.kills.append((began, time.time(), worker))

    def restart_server(self) -> None:
        began = time.time()
        self.server.kill()
        self.kills.append((began, time.time(), 0))
        self.server.start()
        self.outages.append((began, time.time()))

    def use(self, library: Library, code: str) -> str:
        """What a program of the application prints."""
        words = [sys.executable, "-c", f"import json\nfrom {library.app} import *\n{code}"]
        return subprocess.run(
            words, cwd=ROOT, env=self._environment, check=True, stdout=subprocess.PIPE, text=True, timeout=HANG_S
        ).stdout

    def runs(self) -> list[Run]:
        lines = self._done.read_text().splitlines() if self._done.exists() else []
        rows = (line.split() for line in lines)
        return [Run(int(number), float(time), int(worker)) for number, time, worker in rows]

    def numbers(self) -> list[int]:
        return [run.number for run in self.runs()]

    def log(self, number: int) -> str:
        return self._done.with_name(f"worker{number}.log").read_text()

    def is_running(self, number: int) -> bool:
        return self._workers[number].poll() is None

    def left(self, library: Library) -> int:
        group, queue = library.queue
        with self.server.connect() as client:
            stats = client.group(group).stats()
        consumer = stats.streams[queue].consumer
        return stats.held + (consumer.lag if consumer is not None else 0)

    def acknowledged(self) -> list[Counter[int]]:
        """How often each message was, of each consumer, in the log of the server, which is stopped. A sequence
        that was never claimed is a gap, as where a delayed one was put: after a kill it is acknowledged again."""
        claimed, found = set[tuple[Path, int, int]](), defaultdict[tuple[Path, int], Counter[int]](Counter)
        assert self.server.stop() == 0
        for bucket in self.server.store.glob("buckets/*/*"):
            for step in ack_steps(bucket):
                if step.op is Op.CLAIM:
                    claimed.add((bucket, step.consumer, step.last))
                elif step.op is Op.ACK and (bucket, step.consumer, step.last) in claimed:
                    found[bucket, step.consumer][step.last] += 1
        return [*found.values()]

    def close(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
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
    assert json.loads(jobs.use(CELERY, USE_CELERY)) == [[2 * n for n in range(10)], {"ok": "pong"}]
    eventually(lambda: jobs.numbers() == [7])


def test_celery_retries_a_task_of_any_size(jobs: Jobs) -> None:
    jobs.start(CELERY)
    jobs.use(CELERY, "for n, size in enumerate((1, 1_050_000, 2_500_000)): fail_once.delay(n, 'x' * size)")
    eventually(lambda: len(jobs.numbers()) == 3)
    assert sorted(jobs.numbers()) == [0, 1, 2]
    eventually(lambda: jobs.left(CELERY) == 0)


def test_celery_knows_what_is_redelivered(jobs: Jobs) -> None:
    jobs.use(CELERY, "note_redelivery.delay()")
    jobs.start(CELERY)
    eventually(lambda: jobs.numbers() == [0])
    jobs.start(CELERY)
    eventually(lambda: jobs.numbers() == [0, 1])
    eventually(lambda: jobs.left(CELERY) == 0)


def test_a_job_that_runs_is_not_purged(jobs: Jobs, tmp_path: Path) -> None:
    end = tmp_path / "end"
    worker = jobs.start(CELERY, "--prefetch-multiplier", "1")
    jobs.use(CELERY, f"work.delay(1, {str(end)!r})")
    eventually(lambda: jobs.numbers() == [1])
    assert json.loads(jobs.use(CELERY, "publish(2); publish(3); print(json.dumps(app.control.purge()))")) == 2
    jobs.kill(worker)
    end.touch()
    jobs.start(CELERY)
    eventually(lambda: jobs.left(CELERY) == 0)
    assert jobs.numbers() == [1, 1]


def test_a_worker_ends_while_its_server_is_away(jobs: Jobs) -> None:
    """Its heartbeats, which it would try again until then, do not stop it."""
    worker = jobs.start(CELERY, "--heartbeat-interval", "1", "--loglevel", "INFO")
    jobs.use(CELERY, "publish(1)")
    eventually(lambda: jobs.numbers() == [1])
    eventually(lambda: "succeeded" in jobs.log(0))
    jobs.server.kill()
    eventually(lambda: "an event was dropped" in jobs.log(0))
    os.kill(worker, signal.SIGTERM)
    eventually(lambda: not jobs.is_running(0))


def test_a_worker_hears_its_control_after_its_queue_expired(jobs: Jobs) -> None:
    """While it was away: its queue and its binding were removed, as those of one that was killed."""
    worker = jobs.start(CELERY)
    eventually(lambda: json.loads(jobs.use(CELERY, PING)) == {"ok": "pong"})
    os.kill(worker, signal.SIGSTOP)
    jobs.server.restart()
    jobs.use(CELERY, REMOVE_CONTROL)
    os.kill(worker, signal.SIGCONT)
    eventually(lambda: json.loads(jobs.use(CELERY, PING)) == {"ok": "pong"})


def test_dramatiq(jobs: Jobs) -> None:
    jobs.start(DRAMATIQ)
    assert json.loads(jobs.use(DRAMATIQ, USE_DRAMATIQ)) == 1
    assert sorted(jobs.numbers()) == [*range(11)]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_huey(jobs: Jobs, kind: str) -> None:
    jobs.start(HUEY, "-k", kind)
    assert json.loads(jobs.use(HUEY, USE_HUEY)) == [2 * n for n in range(10)]
    eventually(lambda: jobs.numbers() == [7])


def was_unacked(first: Run, again: Run, jobs: Jobs, runs: list[Run], most: int) -> bool:
    """Whether a job was with its worker, of `most` that it had, when that or the server was killed before it ran again.
    What a worker had claimed before the server was killed it runs afterwards, and cannot acknowledge."""
    of_worker = [run.time for run in runs if run.worker == first.worker]
    return any(
        began <= again.time and sum(1 for at in of_worker if first.time < at < began or ended < at < first.time) <= most
        for began, ended, killed in jobs.kills
        if killed in (0, first.worker)
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("library", [CELERY, DRAMATIQ, HUEY], ids=["celery", "dramatiq", "huey"])
def test_no_job_is_lost_by_kills(jobs: Jobs, library: Library) -> None:
    """Workers are killed while they work, and the server. Some jobs are due later: they run at their time."""
    count, chance = campaign.size(10_000), random.Random(campaign.seed())
    rounds, timed = max(2, count // 500), count // 50
    jobs.use(library, PUBLISH.format(count - timed))
    workers = [jobs.start(library) for _ in range(WORKERS)]
    due = json.loads(jobs.use(library, PUBLISH_LATER.format(max(2, count // 200), count - timed, count)))
    for number in range(rounds):
        goal = (count - timed) * (number + 1) // (rounds + 1)
        eventually(lambda goal=goal: len({*jobs.numbers()}) >= goal)
        jobs.kill(workers.pop(chance.randrange(WORKERS)))
        if number % 2:
            jobs.restart_server()
        workers.append(jobs.start(library))
    eventually(lambda: jobs.left(library) == 0)
    runs = jobs.runs()
    by_job = defaultdict[int, list[Run]](list)
    for run in runs:
        by_job[run.number].append(run)
    assert {*by_job} == {*range(count)}
    pairs = [pair for of_job in by_job.values() for pair in pairwise(of_job)]
    assert [pair for pair in pairs if not was_unacked(*pair, jobs, runs, library.claimed)] == []
    acknowledged = jobs.acknowledged()
    assert max(len(of_consumer) for of_consumer in acknowledged) >= count  # huey moves what is not due to its schedule
    assert {times for of_consumer in acknowledged for times in of_consumer.values()} == {1}
    late = []
    for number, at in due.items():
        served = max([at, *(end for begin, end in jobs.outages if begin <= at <= end)])
        assert by_job[int(number)][0].time >= at
        late.append(by_job[int(number)][0].time - served)
    print(
        f"{count} jobs, {len(pairs)} of them run again; {rounds} workers and {len(jobs.outages)} servers were killed; "
        f"{timed} were due later, the last one ran {max(late):.3f} s after its time"
    )
    assert max(late) < patient(5)  # under a full load some 3
