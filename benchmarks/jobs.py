#!/usr/bin/env python3
"""Empty jobs a second of Celery, dramatiq and huey: one worker over mqfs, and over Redis.

    .venv/bin/python benchmarks/jobs.py [--count N] [--rounds N]

Jobs are published, then one worker runs them all. Redis has an append-only file, synced once a second or always, as
mqfs has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

APPS = {
    "celery": """
from celery import Celery
import mqfs.kombu
app = Celery("jobs", broker_url=URL, broker_transport_options={"address": MQFS} if MQFS else {})
app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=4)
@app.task
def note(n): done(n)
publish = note.delay
""",
    "dramatiq": """
import dramatiq
if MQFS:
    from mqfs.dramatiq import MqfsBroker
    broker = MqfsBroker(MQFS)
else:
    from dramatiq.brokers.redis import RedisBroker
    broker = RedisBroker(url=URL)
dramatiq.set_broker(broker)
@dramatiq.actor
def note(n): done(n)
publish = note.send
""",
    "huey": """
from huey import RedisHuey
from mqfs.huey import MqfsHuey
huey = MqfsHuey("jobs", address=MQFS) if MQFS else RedisHuey("jobs", url=URL)
@huey.task()
def note(n): done(n)
publish = note
""",
}
HEAD = """
import os, time
URL, MQFS, COUNT = os.environ["URL"], os.environ["MQFS"], int(os.environ["COUNT"])
def done(n):
    if n in (0, COUNT - 1):
        with open("times", "a") as file: file.write(f"{time.time()}\\n")
"""
WORKERS = {
    "celery": ["celery", "-A", "app", "worker", "-P", "solo", "-l", "ERROR", "--without-mingle", "--without-gossip"],
    "dramatiq": ["dramatiq", "app", "-p", "1", "-t", "1"],
    "huey": ["huey.bin.huey_consumer", "app.huey", "-w", "1", "-q"],
}
PUBLISH = "from app import *\nt = time.time()\nfor n in range(COUNT): publish(n)\nprint(time.time() - t)"
SYNCS = {"once a second": ("sync 1s", "everysec"), "always": ("sync always", "always")}


@contextmanager
def running(words: list[str], folder: Path, ready: Path) -> Iterator[None]:
    with (folder / "server.log").open("wb") as log, subprocess.Popen(words, cwd=folder, stdout=log, stderr=log) as made:
        try:
            while not ready.is_socket():
                time.sleep(0.01)
            yield
        finally:
            made.terminate()


def measure(library: str, url: str, address: str, count: int, folder: Path) -> tuple[float, float]:
    """Jobs a second: published, and run."""
    (folder / "app.py").write_text(HEAD + APPS[library])
    (folder / "times").unlink(missing_ok=True)
    env = {**os.environ, "URL": url, "MQFS": address, "COUNT": str(count), "PYTHONPATH": str(Path(__file__).parents[1])}
    made = subprocess.run([sys.executable, "-c", PUBLISH], cwd=folder, env=env, check=True, capture_output=True)
    with (folder / "worker.log").open("wb") as log:
        words = [sys.executable, "-m", *WORKERS[library]]
        worker = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        while not (times := (folder / "times")).exists() or len(lines := times.read_text().split()) < 2:
            time.sleep(0.05)
    finally:
        os.killpg(worker.pid, 9)
        worker.wait()
    return count / float(made.stdout), (count - 1) / (float(lines[1]) - float(lines[0]))


def over_mqfs(library: str, sync: str, count: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "mqfs", "serve", "--store", "st", "--listen", "unix!s", "--default", sync]
        with running(words, folder, folder / "s"):
            return measure(library, "mqfs://", f"unix!{folder}/s", count, folder)


def over_redis(library: str, sync: str, count: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            f"{folder}/r",
            "--appendonly",
            "yes",
            "--appendfsync",
            sync,
        ]
        with running([*words, "--appendfsync", sync], folder, folder / "r"):
            scheme = "redis+socket" if library == "celery" else "unix"
            return measure(library, f"{scheme}://{folder}/r", "", count, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not shutil.which("redis-server"):
        sys.exit("jobs: redis-server is missing: script/setup bench")
    print("| | synced | mqfs: published, run a second | Redis | ratio, run |\n|---|---|---|---|---|")
    for library in APPS:
        for name, (ours, theirs) in SYNCS.items():
            rounds = [
                (over_mqfs(library, ours, options.count), over_redis(library, theirs, options.count))
                for _ in range(options.rounds)
            ]
            (put, run), (peer_put, peer_run) = (
                [statistics.median(one[side][at] for one in rounds) for at in (0, 1)] for side in (0, 1)
            )
            mine, peer = f"{put:,.0f}, {run:,.0f}", f"{peer_put:,.0f}, {peer_run:,.0f}"
            print(f"| {library} | {name} | {mine} | {peer} | {run / peer_run:.2f} |", flush=True)


if __name__ == "__main__":
    main()
