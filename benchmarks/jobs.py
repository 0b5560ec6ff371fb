#!/usr/bin/env python3
"""Empty jobs per second of Celery, dramatiq and huey: one worker over mqfs, over Redis, and with Celery over RabbitMQ.

    .venv/bin/python benchmarks/jobs.py [--count N] [--rounds N] [--only LIBRARY] [--before CLONE]

Jobs are published, then one worker runs them all; the brokers are measured by turns. Redis has an append-only file. It
is synced once a second or always, as is mqfs; RabbitMQ syncs before it confirms. `--before` also runs the sources of
another clone.
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
from collections.abc import Callable
from pathlib import Path

import peer_servers
from queue_peers import running

APPS = {
    "celery": """
from celery import Celery
import mqfs.kombu
options = {"address": MQFS} if MQFS else {"confirm_publish": True} if URL.startswith("amqp") else {}
app = Celery("jobs", broker_url=URL, broker_transport_options=options)
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
from itertools import count
URL, MQFS, COUNT = os.environ["URL"], os.environ["MQFS"], int(os.environ["COUNT"])
jobs = count(1)
def done(n):
    if next(jobs) in (1, COUNT):
        with open("times", "a") as file: file.write(f"{time.time()}\\n")
"""
WORKERS = {
    "celery": ["celery", "-A", "app", "worker", "-P", "solo", "-l", "ERROR", "--without-mingle", "--without-gossip"],
    "dramatiq": ["dramatiq", "app", "-p", "1", "-t", "1"],
    "huey": ["huey.bin.huey_consumer", "app.huey", "-w", "1", "-q"],
}
PUBLISH = "from app import *\nt = time.time()\nfor n in range(COUNT): publish(n)\nprint(time.time() - t)"
LIMIT_S = 300  # longest time of one measurement
SYNCS = {"once a second": ("sync 1s", "everysec"), "always": ("sync always", "always")}
HERE = Path(__file__).resolve().parents[1]
Broker = Callable[[str, Path], "tuple[float, float]"]  # (library, folder) → jobs per second: published, run


def measure(library: str, url: str, address: str, count: int, folder: Path, source: Path) -> tuple[float, float]:
    """Return jobs per second: published, and run."""
    (folder / "app.py").write_text(HEAD + APPS[library])
    env = {**os.environ, "URL": url, "MQFS": address, "COUNT": str(count), "PYTHONPATH": str(source)}
    made = subprocess.run(
        [sys.executable, "-c", PUBLISH], cwd=folder, env=env, check=True, stdout=subprocess.PIPE, timeout=LIMIT_S
    )
    times, log, until = folder / "times", folder / "worker.log", time.monotonic() + LIMIT_S
    with log.open("wb") as to:
        words = [sys.executable, "-m", *WORKERS[library]]
        worker = subprocess.Popen(words, cwd=folder, env=env, stdout=to, stderr=to, start_new_session=True)
    try:
        while not times.exists() or len(lines := times.read_text().split()) < 2:
            if worker.poll() is not None or time.monotonic() > until:
                sys.exit(f"jobs: the worker of {library} did not run all: {log.read_text()[-2_000:]}")
            time.sleep(0.05)
    finally:
        os.killpg(worker.pid, 9)
        worker.wait()
    return count / float(made.stdout), (count - 1) / (float(lines[1]) - float(lines[0]))


def mqfs(sync: str, count: int, source: Path) -> Broker:
    def run(library: str, folder: Path) -> tuple[float, float]:
        words = [sys.executable, "-P", "-m", "mqfs", "serve", "--store", f"{folder}/st", "--listen", f"unix!{folder}/s"]
        environ = {**os.environ, "PYTHONPATH": str(source)}
        with running([*words, "--default", sync], (folder / "s").exists, environ):
            return measure(library, "mqfs://", f"unix!{folder}/s", count, folder, source)

    return run


def redis(sync: str, count: int) -> Broker:
    def run(library: str, folder: Path) -> tuple[float, float]:
        words = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/r", "--dir", str(folder), "--save", ""]
        with running([*words, "--appendonly", "yes", "--appendfsync", sync], (folder / "r").exists):
            scheme = "redis+socket" if library == "celery" else "unix"
            return measure(library, f"{scheme}://{folder}/r", "", count, folder, HERE)

    return run


def rabbitmq(count: int) -> Broker:
    def run(library: str, folder: Path) -> tuple[float, float]:
        with peer_servers.rabbitmq(folder, True) as at:
            return measure(library, f"amqp://guest:guest@{at}//", "", count, folder, HERE)

    return run


def medians(broker: dict[str, Broker], library: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median rates of each broker, measured by turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in broker}
    for _ in range(rounds):
        for name, run in broker.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run(library, Path(folder)))
    return {
        name: (statistics.median(put for put, _ in row), statistics.median(run for _, run in row))
        for name, row in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=APPS, action="append")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    if not shutil.which("redis-server") or not Path(peer_servers.RABBITMQ).exists():
        sys.exit("jobs: redis-server or rabbitmq-server is missing: script/setup bench")
    print("| | synced | broker | published a second | run a second | mqfs / it, run |\n|---|---|---|---|---|---|")
    for library in options.only or APPS:
        for name, (ours, theirs) in SYNCS.items():
            brokers = {"mqfs": mqfs(ours, options.count, HERE), "Redis": redis(theirs, options.count)}
            if options.before:
                brokers["mqfs before"] = mqfs(ours, options.count, options.before)
            if library == "celery" and name == "always":
                brokers["RabbitMQ"] = rabbitmq(options.count)
            found = medians(brokers, library, options.rounds)
            for broker, (put, run) in found.items():
                print(
                    f"| {library} | {name} | {broker} | {put:,.0f} | {run:,.0f} | {found['mqfs'][1] / run:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
