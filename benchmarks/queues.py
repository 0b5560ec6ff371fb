"""Work queues: 2 producers, 4 workers, 1 KiB, each message acknowledged; beside beanstalkd and Redis streams.

    python benchmarks/queues.py [--quick] [--cpus 0]

Each producer and worker is a Python process of its own. There are two levels of durability, the same for all in one
run: an accepted message is in the page cache (mqfs `sync off`, beanstalkd -F, Redis appendfsync no), or synced before
the answer (`sync always`, -f0, appendfsync always). All servers run at once; one is measured at a time, by turns, and
medians are shown. Every message must arrive exactly once. Rates are messages per second by the clock, and by the CPU
time of all processes concerned: those of the clock on one CPU without other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from queue_peers import OURS, WAYS, missing, servers  # noqa: E402

PRODUCERS, WORKERS = 2, 4
BODY = 1_024
END = b"end"
LEVELS = {False: "in the page cache", True: "synced before the answer"}

# ---------------------------------------------------------------- a process


def client(way: str, where: str, name: str, role: str, first: int, count: int, synced: bool) -> None:
    """Report readiness, wait for the start, perform the role, and report the result."""
    end = WAYS[way](where, name, role, synced)
    print("ready", flush=True)
    sys.stdin.readline()
    found: list[int] = []
    ended = begun = time.monotonic()
    used = time.process_time()
    if role == "send":
        for number in range(first, first + count):
            end.send(b"%08d" % number + bytes(BODY - 8))
        end.flush()
    else:
        take, done = end.take, end.done
        while (body := take()) != END:
            found.append(int(body[:8]))
            assert len(body) == BODY, len(body)
            done()
            ended = time.monotonic()
        done()
    result = {"begun": begun, "ended": ended, "cpu": time.process_time() - used, "found": found}
    print(json.dumps(result), flush=True)
    sys.stdin.readline()  # the last message stays claimed until all processes are done


# ---------------------------------------------------------------- measuring


def server_cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Run:
    """One run of one way."""

    def __init__(self, way: str, where: tuple[str, int], name: str, count: int, synced: bool, pin: list[str]) -> None:
        self.way, (self.where, self.pid), self.name = way, where, name
        self.count, self.synced, self.pin = count, synced, pin
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, first: int = 0, count: int = 0) -> subprocess.Popen[str]:
        what = json.dumps([self.way, self.where, self.name, role, first, count, self.synced])
        command = [*self.pin, sys.executable, __file__, "--client", what]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def measure(self) -> tuple[float, float]:
        """Return messages per second: by the clock, and by CPU time."""
        bench = WAYS[self.way](self.where, self.name, "", self.synced)
        bench.prepare()
        try:
            return self._measure()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            bench.remove()

    def _measure(self) -> tuple[float, float]:
        each = self.count // PRODUCERS
        workers = [self.start("take") for _ in range(WORKERS)]
        producers = [self.start("send", i * each, each) for i in range(PRODUCERS)]
        for process in self.processes:
            assert out(process) == "ready"
        last = WAYS[self.way](self.where, self.name, "send", self.synced)
        used = server_cpu(self.pid)
        for process in self.processes:
            tell(process)
        sent = [json.loads(out(process)) for process in producers]
        took = []
        for _ in range(WORKERS):  # one after the other, so that each worker gets one
            last.send(END)
            last.flush()
            took.append(json.loads(out(first_of(workers))))
        used = server_cpu(self.pid) - used + sum(one["cpu"] for one in sent + took)
        for process in self.processes:
            tell(process)
        check(Counter(number for one in took for number in one["found"]), each * PRODUCERS)
        elapsed = max(one["ended"] for one in took) - min(one["begun"] for one in sent)
        return each * PRODUCERS / elapsed, each * PRODUCERS / used


def out(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a process ended early"
    return line.rstrip("\n")


def first_of(waiting: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Wait for output of a process, remove the process from the list, and return it."""
    said, _, _ = select.select([process.stdout for process in waiting], [], [], 60)
    assert said, "no worker got the end mark"
    process = next(process for process in waiting if process.stdout is said[0])
    waiting.remove(process)
    return process


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def check(found: Counter[int], count: int) -> None:
    """Assert that every message was received exactly once."""
    twice = [number for number, times in found.items() if times > 1]
    lost = count - len(found)
    assert not twice, f"{len(twice)} more than once"
    assert set(found) == set(range(count)), f"{lost} lost"


def bare(base: Path, count: int) -> float:
    """Return appends of one message with fdatasync per second."""
    file = os.open(base / "bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    begun = time.monotonic()
    for _ in range(count):
        os.write(file, bytes(BODY))
        os.fdatasync(file)
    elapsed = time.monotonic() - begun
    os.close(file)
    return count / elapsed


def level(base: Path, synced: bool, ways: list[str], count: int, rounds: int, pin: list[str]) -> None:
    base.mkdir()
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    appends: list[float] = []
    with servers(base, synced, pin) as places:
        for turn in range(rounds + 1):
            if synced:
                appends.append(bare(base, 200))
            for way in ways:
                few = count // 4 if turn == 0 else count  # the first turn warms up
                found = Run(way, places[way], f"q{turn}{ways.index(way)}", few, synced, pin).measure()
                if turn:
                    rates[way].append(found)
    show(synced, rates, appends)


def show(synced: bool, rates: dict[str, list[tuple[float, float]]], appends: list[float]) -> None:
    middle = {way: [statistics.median(column) for column in zip(*found, strict=True)] for way, found in rates.items()}
    peers = [way for way in middle if way in list(WAYS)[OURS:]]
    print(f"\n{LEVELS[synced]:26}{'msg/s, clock':>14}{'by CPU':>10}", *(f"{'/ ' + peer:>24}" for peer in peers))
    for way, (clock, cpu) in middle.items():
        ratios = (f"{clock / middle[peer][0]:.2f} · {cpu / middle[peer][1]:.2f}" for peer in peers)
        print(f"{way:26}{clock:14,.0f}{cpu:10,.0f}", *(f"{ratio:>24}" for ratio in ratios))
    if appends:
        print(f"{'bare append + fdatasync':26}{statistics.median(appends):14,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of it")
    parser.add_argument("--cpus", default="", help="the CPUs that all share, as for taskset -c; all if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=20_000, help="messages in a round, synced a quarter")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only this one; repeatable")
    parser.add_argument("--level", choices=["cache", "synced"], help="only this one")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(*json.loads(given.client))
        return
    if missing():
        sys.exit(f"needed, and not here: {' '.join(missing())}; script/setup bench installs them")
    rounds = 3 if given.quick else given.rounds
    count = given.count // 4 if given.quick else given.count
    pin = ["taskset", "-c", given.cpus] if given.cpus else []
    base = Path(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"))
    try:
        for synced in (False, True):
            if given.level in (None, "synced" if synced else "cache"):
                level(base / str(synced), synced, given.way or list(WAYS), count // (4 if synced else 1), rounds, pin)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
