"""Workers in plain shell, and their server, killed with -9 in the middle of jobs: every job is done, few twice."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.campaign import seed, size
from tests.support.eventually import eventually
from tests.support.server import Server, unmount

pytestmark = pytest.mark.fuse

# A job is done when its line is written; only then it is acknowledged.
WORKER = """
while :; do
  if exec 3<>"$JOBS/.consumers/mailer" && echo 'format line' >&3; then
    while IFS= read -r -u3 job; do
      sleep 0.00$((RANDOM % 10)) 3>&- && echo "$job" >>"$DONE" && echo ack >&3 || echo nack >&3 || read -r -u3 why
    done
  fi
  sleep 0.02
done 2>/dev/null
"""
WORKERS = 2


class Scene:
    """A server on a disk, and workers of one consumer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mount, self.done = folder, folder / "mq", folder / "done"
        self.jobs = self.mount / "jobs"
        self.mount.mkdir()
        self.done.touch()
        self.put_so_far = 0
        self.workers: list[subprocess.Popen[bytes]] = []
        self.serve()
        self.jobs.mkdir()
        (self.jobs / "ctl").write_text("replay all\nlease 1m\nretries 0\nbackoff 1ms 1ms\nconsumer mailer mail\n")
        (self.jobs / "mail").touch()

    def serve(self) -> None:
        self.server = Server("--store", "store", "--mount", "mq", cwd=self.folder)

    def work(self) -> None:
        """Have all workers that there should be."""
        while len(self.workers) < WORKERS:
            env = {**os.environ, "JOBS": str(self.jobs), "DONE": str(self.done)}
            self.workers.append(subprocess.Popen(["bash", "-c", WORKER], env=env))

    def put(self, count: int) -> None:
        with open(self.jobs / "mail", "wb", buffering=0) as mail:
            for _ in range(count):
                mail.write(b"job %d\n" % self.put_so_far)
                self.put_so_far += 1

    def stats(self) -> Any:
        return json.loads((self.jobs / ".stats").read_text())["consumers"]["mailer"]

    def all_acknowledged(self) -> bool:
        told = self.stats()
        return bool(told["waiting"] == told["claimed"] == 0)

    def twice(self) -> int:
        """How often a job was done again. Every job must have been done."""
        done = collections.Counter(self.done.read_text().splitlines())
        assert set(done) == {f"job {number}" for number in range(self.put_so_far)}
        return done.total() - len(done)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.server.kill()
        unmount(self.mount)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        made = Scene(tmp_path)
        stack.callback(made.close)
        yield made
    assert "Traceback" not in made.server.text()


@pytest.mark.timeout(600)
def test_workers_killed_in_the_middle_of_jobs(scene: Scene) -> None:
    luck, kills = random.Random(seed()), 0
    while kills < size(200, least=10) or not scene.stats()["failed"]:  # none was in the middle of a job yet
        scene.put(4)
        scene.work()
        time.sleep(luck.uniform(0, 0.06))  # the moment, not something waited for
        kills += 1
        victim = scene.workers.pop(luck.randrange(WORKERS))
        victim.kill()
        victim.wait()
    scene.work()
    eventually(scene.all_acknowledged, "all jobs acknowledged")
    told = scene.stats()
    assert scene.twice() <= kills
    assert told["failed"] <= kills, "each held one claim at most"
    assert told["dead"] == 0


@pytest.mark.timeout(900)
def test_the_server_killed_in_the_middle_of_jobs(scene: Scene) -> None:
    luck, kills = random.Random(seed()), size(200, least=4)
    for _ in range(kills):
        scene.put(20)
        scene.work()
        time.sleep(luck.uniform(0, 0.15))  # the moment
        scene.server.kill()
        scene.serve()
    eventually(scene.all_acknowledged, "all jobs acknowledged")
    assert scene.twice() <= kills * WORKERS, "each worker held one claim at most"
