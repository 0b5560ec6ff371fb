"""One run of the bench: the group, the processes, the end, the figures. display.py shows them.

It measures the tree of a running server, or its own tree on a temporary store.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from mqfs import limits
from mqfs.bench import payload
from mqfs.bench.actors import CONSUMER, PERCENTILES, PING, PONG, STREAM, Histogram, Load, Place, open_driver
from mqfs.bench.children import Crew
from mqfs.bench.plan import Plan
from mqfs.errors import BadAddress, Disconnected, MqfsError, NotFound

START_S = STOP_S = 30.0
_LOOK_S = 0.01
_PR_SET_PDEATHSIG = 1  # prctl(2)
_DISK = "/var/tmp"  # /tmp may be memory


@contextlib.contextmanager
def open_folder(plan: Plan) -> Iterator[str]:
    """Yield a temporary folder on the disk to be measured."""
    above = plan.store or (_DISK if os.access(_DISK, os.W_OK) else None)
    path = tempfile.mkdtemp(prefix="mqfs-bench-", dir=above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def open_place(plan: Plan, path: str) -> Iterator[Place]:
    """Yield the location of the tree. Starts a server if the plan names none."""
    assert plan.transport is not None
    if plan.at is not None:
        yield Place(plan.transport, plan.at, wait=plan.wait, prefetch=plan.prefetch)
    elif plan.mount is not None:
        yield Place("file", mount=plan.mount)
    elif plan.transport == "embedded":
        yield Place("embedded", store=os.path.join(path, "store"), wait=plan.wait, prefetch=plan.prefetch)
    else:
        with _local_server(plan.transport, path) as found:
            yield attrs.evolve(found, wait=plan.wait, prefetch=plan.prefetch)


@contextlib.contextmanager
def _local_server(transport: str, path: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="mqfs-bench-") as short:  # a socket's path must be short
        address, mount = f"unix!{short}/socket", os.path.join(short, "mount")
        command = [sys.executable, "-P", "-m", "mqfs", "serve"]  # -P: nothing is imported from the current folder
        command += ["--store", os.path.join(path, "store"), "--listen", address]
        if transport == "file":
            os.mkdir(mount)
            command += ["--mount", mount]
        with open(os.path.join(path, "server.log"), "w+b") as log:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_us,
            )
            try:
                _wait(server, log.name)
                yield Place(transport, address, mount, server=server.pid)
            finally:
                _end(server)


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end_with_us() -> None:
    """Have the kernel end the server if the bench is killed. Runs in the child, before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(server: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with open(log, errors="replace") as file:
            lines = file.read().splitlines()
        if "mqfs: ready" in lines:
            return
        if server.poll() is not None or time.monotonic() > deadline:
            last = lines[-1].removeprefix("mqfs: ") if lines else f"no output in {START_S:g} s"
            raise BadAddress(f"bench failed: its server did not start: {last}")
        time.sleep(_LOOK_S)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextlib.contextmanager
def open_group(place: Place, lines: Sequence[str], streams: Sequence[str], left: list[str]) -> Iterator[str]:
    """Yield the name of a temporary group, and remove the group at the end, unless the engine is embedded. If that
    fails, append its name to `left`."""
    name = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    driver = open_driver(place)
    try:
        driver.prepare(name, lines, streams)
        if place.transport == "embedded":
            driver.close()  # the child process opens the store
        yield name
    finally:
        if place.transport != "embedded":
            try:
                _remove(place, name, streams)
            except (NotFound, Disconnected, FileNotFoundError):
                pass  # not made, or the server has ended
            except (MqfsError, OSError) as error:
                left.append(name)
                print(f"mqfs: cannot remove group {name!r}: {error}", file=sys.stderr)
            driver.close()


def _remove(place: Place, name: str, streams: Sequence[str]) -> None:
    """Remove a group on a new connection: Ctrl-C may have left the other unusable."""
    with contextlib.closing(open_driver(place)) as driver:
        driver.remove(name, streams)


ROUND_TRIPS_S = 5.0  # at most
_SECOND_NS = 10**9


@attrs.define
class Results:
    """The figures and the checks of a run."""

    plan: Plan
    published: int = 0
    received: int = 0
    publishing_s: float = 0.0  # from the first publish to the end of the last
    receiving_s: float = 0.0  # from the first publish to the last receipt
    lost: int = 0
    twice: int = 0
    disordered: int = 0
    damaged: int = 0
    unacknowledged: int = 0  # received by workers, but not acknowledged in the tree's own statistics
    bench_cpu_s: float = 0.0  # of the bench's own processes
    server_cpu_s: float | None = None  # None: the bench did not start the server
    interrupted: bool = False
    stalled: str = ""  # why the run was ended after BENCH_STALL_S
    left: list[str] = attrs.Factory(list)  # groups that could not be removed
    histograms: dict[str, Histogram] = attrs.Factory(dict)  # publish, delivery, round trip

    @property
    def sound(self) -> bool:
        return not (self.lost or self.twice or self.disordered or self.damaged or self.unacknowledged or self.stalled)

    def as_dict(self) -> dict[str, Any]:
        """Return the results for the JSON output."""
        return {
            "options": self.plan.as_dict(),
            "interrupted": self.interrupted,
            "published": {**_rates(self.published, self.publishing_s, self.plan.size)},
            "received": {**_rates(self.received, self.receiving_s, self.plan.size)},
            "checked": {
                "lost": self.lost,
                "twice": self.twice,
                "out_of_order": self.disordered,
                "damaged": self.damaged,
                "unacknowledged": self.unacknowledged,
            },
            "processor_s": {"bench": self.bench_cpu_s, "server": self.server_cpu_s},
            "latency_us": {name: latencies(histogram) for name, histogram in self.histograms.items()},
            "histogram_us": {name: [[ns / 1000, n] for ns, n in each.bars()] for name, each in self.histograms.items()},
        }


def _rates(count: int, seconds: float, size: int) -> dict[str, float]:
    rate = count / seconds if seconds else 0.0
    return {"messages": count, "seconds": seconds, "rate": rate, "mb_per_s": rate * size / 1e6}


def latencies(histogram: Histogram) -> dict[str, float]:
    """Return count, percentiles and maximum, in microseconds."""
    results = {f"p{percent:g}": histogram.percentile(percent) / 1000 for percent in PERCENTILES}
    return {"count": len(histogram), **results, "max": histogram.most / 1000}


Progress = Callable[[str], None]  # shows the progress


def measure(plan: Plan, progress: Progress) -> Results:
    """Run the plan. Ctrl-C ends it with the figures so far. Raises MqfsError."""
    with open_folder(plan) as folder, open_place(plan, folder) as place:
        left: list[str] = []
        results = _load(plan, place, folder, progress, left)
        if plan.round_trips and not (results.interrupted or results.stalled):
            progress(f"measuring {plan.round_trips:,} round trips")
            _round_trips(plan, place, folder, results, left)
        results.left = left
        return results


def _load(plan: Plan, place: Place, folder: str, progress: Progress, left: list[str]) -> Results:
    kept = "replay off" if plan.workers else "replay all"
    consumer = [f"consumer {CONSUMER} {STREAM}"] if plan.workers else []
    with open_group(place, [kept, f"sync {plan.sync}", *consumer, *plan.ctl], [STREAM], left) as group:
        load = Load(group, plan.producers, plan.size, plan.batch, plan.messages, plan.seconds, plan.rate)
        load = attrs.evolve(load, marks=not plan.workers)
        receiver = "worker" if plan.workers else "consumer"
        roles = [(receiver, i) for i in range(plan.receivers)] + [("producer", i) for i in range(plan.producers)]
        with Crew(place, load, folder, roles) as crew:
            return Measurement(plan, place, load, crew, progress).execute()


class Stall:
    """The time for which no message moves."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._last: tuple[int, ...] = ()

    def lasts(self, moved: tuple[int, ...], pause_s: float = 0.0) -> bool:
        """Whether the counts have not changed for BENCH_STALL_S and the pause between two messages."""
        if moved != self._last:
            self._at, self._last = time.monotonic(), moved
        return time.monotonic() - self._at > limits.BENCH_STALL_S + pause_s


class Measurement:
    """A run of producers and receivers, until all messages are received."""

    def __init__(self, plan: Plan, place: Place, load: Load, crew: Crew, progress: Progress) -> None:
        self.plan, self.place, self.load, self.crew, self.progress = plan, place, load, crew, progress
        self.receiver = "worker" if plan.workers else "consumer"
        self.is_partial = self.interrupted = False
        self.stalled = ""

    def execute(self) -> Results:
        crew = self.crew
        self.server_began_s = processor_s(self.place.server) if self.place.server else 0.0
        crew.begin()
        try:
            is_moving = self._wait_for("producer")
            if is_moving:
                self._mark_ends()
                is_moving = self._wait_for(self.receiver)
            self.stalled = "" if is_moving else f"no message moved for {limits.BENCH_STALL_S:g} s"
        except KeyboardInterrupt:
            self.interrupted = True
            self._end_early()
        if crew.is_running(self.receiver) or crew.is_running("producer"):
            self.is_partial = True
            crew.collect()
        return self._results()

    def _wait_for(self, role: str, seconds: float = math.inf) -> bool:
        """Wait until no actor of the role runs, at most `seconds`; actors of one process end together. Return False if
        no message moved for BENCH_STALL_S."""
        load, until = self.load, time.monotonic() + seconds
        pause_s = load.batch / load.rate if load.rate is not None else 0.0
        stall = Stall()
        while self.crew.is_running(role) and time.monotonic() < until:
            self.crew.poll()
            self._show()
            moved = self.crew.count("producer"), self.crew.count(self.receiver)
            if stall.lasts(moved, pause_s if self.crew.is_running("producer") else 0.0):
                return False
        return True

    def _show(self) -> None:
        published, received = self.crew.count("producer"), self.crew.count(self.receiver)
        self.progress(f"published {published:,}   received {received:,}")

    def _mark_ends(self) -> None:
        """Publish an end mark for each worker, after all messages."""
        if self.place.transport == "embedded" or not self.plan.workers:
            return
        with contextlib.closing(open_driver(self.place)) as driver:
            publish, _ = driver.publisher(self.load.group, STREAM)
            for _ in range(self.plan.workers):
                publish(payload.make(0, 0, 0, payload.tail(self.plan.size), payload.END))

    def _end_early(self) -> None:
        """Stop publishing, and wait for the remaining messages, at most BENCH_DRAIN_S."""
        self.crew.send("stop")
        deadline = time.monotonic() + limits.BENCH_DRAIN_S
        while self.crew.is_running("producer") and time.monotonic() < deadline:
            self.crew.poll()
        if not self.crew.is_running("producer"):
            self._mark_ends()
            self._wait_for(self.receiver, limits.BENCH_DRAIN_S)

    # ------------------------------------------------------------ figures

    def _results(self) -> Results:
        producers, receivers = self.crew.reports("producer"), self.crew.reports(self.receiver)
        begun_ns = min(report["begun_ns"] for report in producers)
        results = Results(self.plan, interrupted=self.interrupted, stalled=self.stalled)
        results.published = sum(report["count"] for report in producers)
        results.received = sum(report["count"] for report in receivers)
        results.publishing_s = (max(report["ended_ns"] for report in producers) - begun_ns) / _SECOND_NS
        ended_ns = max((report["ended_ns"] for report in receivers if report["count"]), default=begun_ns)
        results.receiving_s = (ended_ns - begun_ns) / _SECOND_NS
        results.bench_cpu_s = sum(report.get("cpu_s", 0.0) for report in (*producers, *receivers))
        if self.place.server:
            results.server_cpu_s = processor_s(self.place.server) - self.server_began_s
        results.histograms = {"publish": _merge_histograms(producers)}
        if receivers:
            results.histograms["delivery"] = _merge_histograms(receivers)
            self._check(results, [report["count"] for report in producers], receivers)
        return results

    def _count_acknowledged(self, receivers: list[dict[str, Any]]) -> int:
        if self.place.transport == "embedded":
            return sum(report.get("acknowledged", 0) for report in receivers)
        with contextlib.closing(open_driver(self.place)) as driver:
            return driver.count_acknowledged(self.load.group)

    def _check(self, results: Results, sent: list[int], receivers: list[dict[str, Any]]) -> None:
        for report in receivers:
            results.twice += report["checks"]["twice"]
            results.disordered += report["checks"]["disordered"]
            results.damaged += report["checks"]["damaged"]
        if self.plan.workers:
            parts = [[Path(path).read_bytes() for path in report["receipts"]] for report in receivers]
            results.lost, twice = payload.audit_shares(parts, sent)
            results.twice += twice
            if not self.is_partial:
                marks = self.plan.workers
                results.unacknowledged = results.received + marks - self._count_acknowledged(receivers)
        else:
            results.lost = sum(payload.count_lost(report["next"], report["missing"], sent) for report in receivers)
        if self.interrupted and self.is_partial:
            results.lost = 0  # the remaining messages were not awaited


def _merge_histograms(reports: list[dict[str, Any]]) -> Histogram:
    all_ = Histogram()
    for report in reports:
        all_.merge(Histogram.from_list(report["histogram"]))
    return all_


def _round_trips(plan: Plan, place: Place, folder: str, results: Results, left: list[str]) -> None:
    """Measure round trips, with no other load."""
    with open_group(place, ["replay all", f"sync {plan.sync}", *plan.ctl], [PING, PONG], left) as group:
        load = Load(group, 1, plan.size, round_trips=plan.round_trips, seconds=ROUND_TRIPS_S)
        with Crew(place, load, folder, [("echo", 0), ("pinger", 0)]) as crew:
            crew.begin()
            stall = Stall()
            try:
                while crew.is_running("pinger") and not stall.lasts((crew.count("pinger"),)):
                    crew.poll()
            except KeyboardInterrupt:
                results.interrupted = True
            if crew.is_running("pinger"):
                results.stalled = "" if results.interrupted else f"no round trip for {limits.BENCH_STALL_S:g} s"
                crew.collect()
            results.histograms["round trip"] = _merge_histograms(crew.reports("pinger"))
