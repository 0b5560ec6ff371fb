"""mqfs beside its peers, in one run: publish and subscribe, work queues, durable publishing, round trips.

    python benchmarks/peers.py [--short] [--rounds 3] [--only NAME]... [--peer NAME]... [--json FILE]

`script/setup bench` installs the peers. This program starts every server, in a folder and on a socket of its own. One
way is measured at a time, by turns, and medians are shown beside those of mqfs in the same run. A missing peer is
reported. Every message must be received once; a peer that delivers messages out of order is marked. `aims.py` has the
aims.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import peer_clients as clients  # noqa: E402
from peer_servers import INSTALLS, processor_s, serving, versions  # noqa: E402

CPUS = sorted(os.sched_getaffinity(0))
LONGEST_S = 60.0  # longest time of one run: a peer that takes longer has lost messages
END = b"end"
MILLION = 1_000_000  # messages of a run, if these take less than MILLION_S: enough that a slow reader is overtaken
MILLION_S = 10.0
BLOCK = 65_536


class Kind(NamedTuple):
    """A way: a server, and its client."""

    server: str
    end: Any  # the class, or the name of a way without one


WAYS: dict[str, Kind] = {
    "mqfs ring, no server": Kind("bare", "ring"),
    "mqfs ring, no server, batches": Kind("bare", "ring"),
    "mqfs library, ring": Kind("mqfs", clients.LibraryRing),
    "mqfs library, ring, batches": Kind("mqfs", clients.LibraryRing64),
    "mqfs library, 9P": Kind("mqfs", clients.Library),
    "mqfs library, 9P, batches": Kind("mqfs", clients.Library64),
    "mqfs library, ring, replay off": Kind("mqfs", clients.LibraryRingOff),
    "mqfs mount": Kind("mqfs", clients.Mount),
    "mqfs library": Kind("mqfs", clients.WorkLibrary),
    "mqfs library, batches": Kind("mqfs", clients.WorkLibrary64),
    "mqfs mount, ack next": Kind("mqfs", clients.WorkMountNext),
    "mqfs mount, consumer": Kind("mqfs", clients.WorkMountAck),
    "mqfs 9P, ack next": Kind("mqfs", clients.WorkNinepNext),
    "mqfs 9P, consumer": Kind("mqfs", clients.WorkNinepAck),
    "Redis pub/sub": Kind("redis", clients.RedisPubSub),
    "Redis pub/sub, pipelined": Kind("redis", clients.RedisPubSub64),
    "Redis stream": Kind("redis", clients.RedisAdd),
    "Redis streams": Kind("redis", clients.WorkRedis),
    "NATS": Kind("nats", clients.Nats),
    "NATS JetStream": Kind("nats", clients.JetStream),
    "beanstalkd": Kind("beanstalkd", clients.WorkBeanstalk),
    "beanstalkd, batches": Kind("beanstalkd", clients.WorkBeanstalk64),
    "Redis streams, batches": Kind("redis", clients.WorkRedis64),
    "JetStream, batches": Kind("nats", clients.JetStream64),
    "Celery's transport on Redis": Kind("redis", clients.Kombu),
    "RabbitMQ": Kind("rabbitmq", clients.Rabbit),
    "mosquitto QoS 0": Kind("mosquitto", clients.Mqtt),
    "mosquitto QoS 1": Kind("mosquitto", clients.Mqtt1),
    "mosquitto, shared, QoS 1": Kind("mosquitto", clients.MqttShared),
    "ZeroMQ ipc": Kind("zmq", clients.Zmq),
    "disruptor in node": Kind("node", clients.Disruptor),
    "qlobber-fsq, files": Kind("fsq", clients.FsqFiles),
    "qlobber-fsq, disruptor": Kind("fsq", clients.FsqDisruptor),
    "bare append + fdatasync": Kind("bare", "append"),
    "bare pwrite": Kind("bare", "pwrite"),
}
LIBRARY = ["mqfs library, ring", "mqfs library, 9P"]
LIBRARY64 = ["mqfs library, ring, batches", "mqfs library, 9P, batches"]
LIVE = [
    *("mqfs ring, no server", "mqfs ring, no server, batches", *LIBRARY, *LIBRARY64, "mqfs mount"),
    *("disruptor in node", "ZeroMQ ipc", "NATS", "Redis pub/sub", "Redis pub/sub, pipelined"),
    *("mosquitto QoS 0", "mosquitto QoS 1", "qlobber-fsq, files", "qlobber-fsq, disruptor"),
]
ECHOES = [way for way in LIVE if not way.endswith(("batches", "pipelined"))]
WORK = [
    *("mqfs library", "mqfs library, batches"),
    *("mqfs mount, ack next", "mqfs mount, consumer", "mqfs 9P, ack next", "mqfs 9P, consumer"),
    *("beanstalkd", "Redis streams", "NATS JetStream", "mosquitto, shared, QoS 1", "RabbitMQ"),
    *("Celery's transport on Redis", "beanstalkd, batches", "Redis streams, batches", "JetStream, batches"),
]
DURABLE = ["Redis stream", "beanstalkd", "NATS JetStream", "mosquitto QoS 1", "RabbitMQ", "qlobber-fsq, files"]
DURABLE64 = [way for way in DURABLE if way not in ("beanstalkd", "RabbitMQ")]  # their clients wait for each answer
BARE = "bare append + fdatasync"


class Scenario(NamedTuple):
    """A measurement, for several ways."""

    title: str
    kind: str  # live, work, durable, echo
    ways: list[str]
    size: int
    senders: int = 1
    takers: int = 1
    batch: int = 1
    synced: bool | str = False


RING, RING64, BODIES = LIVE[2], LIVE[4], LIVE[0]
SCENARIOS = {
    "64": Scenario("1→1, 64 B, messages/s", "live", LIVE, 64),
    "1k": Scenario("1→1, 1 KiB, messages/s", "live", LIVE, 1024),
    "fan": Scenario("1→8, 1 KiB, deliveries/s", "live", LIVE, 1024, takers=8),
    "work": Scenario("2→4, a work queue, 1 KiB, each acknowledged, messages/s", "work", WORK, 1024, 2, 4),
    "durable-1": Scenario(
        "1 publishes, 1 KiB, each synced before the answer, messages/s",
        "durable",
        [*LIBRARY, "mqfs mount", *DURABLE, BARE],
        1024,
        synced=True,
    ),
    "durable-1-64": Scenario(
        "1 publishes, in batches of 64", "durable", [*LIBRARY, *DURABLE64, BARE], 1024, batch=64, synced=True
    ),
    "durable-16": Scenario(
        "16 publish, 1 KiB, each synced before the answer, messages/s",
        "durable",
        [*LIBRARY, "mqfs mount", *DURABLE, BARE],
        1024,
        16,
        synced=True,
    ),
    "durable-16-64": Scenario(
        "16 publish, in batches of 64", "durable", [*LIBRARY, *DURABLE64, BARE], 1024, 16, batch=64, synced=True
    ),
    "10ms": Scenario("16 publish, 64 B, in batches of 64, sync 10ms", "durable", LIBRARY, 64, 16, 1, 64, "10ms"),
    "echo": Scenario("round trip, 64 B, µs p50 · p99", "echo", ECHOES, 64),
}
NOT_SYNCED = {
    "NATS JetStream": "not synced",
    "mosquitto QoS 1": "in memory",
    "qlobber-fsq, files": "not synced",
}

# ---------------------------------------------------------------- a process


class Spec(NamedTuple):
    """The task of a process."""

    way: str
    what: str  # for peers in node: the kind
    where: str
    name: str
    role: str
    synced: bool | str
    size: int
    count: int
    batch: int = 1
    first: int = 0
    takers: int = 1
    index: int = 0


def bodies(spec: Spec) -> Iterator[bytes]:
    rest = bytes(spec.size - 8)
    return (b"%08d" % number + rest for number in range(spec.first, spec.first + spec.count))


def repeated(spec: Spec) -> Iterator[bytes]:
    """Return bodies that are made before the clock starts; after BLOCK bodies they repeat."""
    rest = bytes(spec.size - 8)
    return islice(cycle([b"%08d" % number + rest for number in range(min(spec.count, BLOCK))]), spec.count)


def checked(heads: list[bytes], size: int, spec: Spec) -> dict[str, int]:
    """Count missing and disordered messages, after the clock has stopped."""
    wanted = [head[:8] for head in repeated(spec._replace(size=8))]
    wrong = 0 if heads == wanted else sum((Counter(wanted) - Counter(heads)).values())
    disordered = 0 if heads == wanted else sum(map(ne, heads, wanted))
    return {"disordered": disordered, "wrong": wrong + (size != spec.count * spec.size)}


def client(spec: Spec) -> None:
    """Report readiness, wait for the start, perform the role, and report the result."""
    act = {"send": send, "hear": hear, "put": put, "make": make, "take": take, "ping": ping, "echo": echo}[spec.role]
    steps = act(spec)
    next(steps)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.time()
    found = next(steps)
    print(json.dumps({"begun": begun, "ended": found.pop("ended", None) or time.time(), **found}), flush=True)
    sys.stdin.readline()
    sys.stdout.flush()
    os._exit(0)  # threads of clients may never end


def end_of(spec: Spec, role: str, more: str = "") -> clients.Way:
    way: clients.Way = WAYS[spec.way].end(spec.where, spec.name + more, role, spec.synced, spec.takers)
    return way


Steps = Iterator[dict[str, Any]]


def send(spec: Spec) -> Steps:
    end, all_of_them = end_of(spec, "send"), repeated(spec)
    yield {}
    end.send_all(all_of_them)
    yield {}


def hear(spec: Spec) -> Steps:
    end = end_of(spec, "hear")
    yield {}
    heads, size = end.hear(spec.count)
    yield {"ended": time.time(), **checked(heads, size, spec)}


def put(spec: Spec) -> Steps:
    end = end_of(spec, "send")
    yield {}
    end.put_all(bodies(spec), spec.batch)
    yield {}


def make(spec: Spec) -> Steps:
    """Act as the producer of a work queue: send one by one; the client waits for answers if its way does."""
    end = end_of(spec, "send")
    yield {}
    for body in bodies(spec):
        end.send(body)
    end.flush()
    yield {}


def take(spec: Spec) -> Steps:
    end = end_of(spec, "take")
    yield {}
    found: list[int] = []
    ended = time.time()
    while (body := end.take()) != END:
        assert len(body) == spec.size, len(body)
        found.append(int(body[:8]))
        end.done()
        ended = time.time()
    end.done()
    yield {"found": found, "ended": ended}


def ping(spec: Spec) -> Steps:
    there, back = end_of(spec, "send", "a"), end_of(spec, "hear", "b")
    yield {}
    took = []
    for body in bodies(spec):
        begun = time.perf_counter_ns()
        there.send(body)
        assert back.take() == body
        took.append((time.perf_counter_ns() - begun) / 1000)
    yield {"took": took}


def echo(spec: Spec) -> Steps:
    # As in `ping`, the sender is opened first: either process may bind first, and neither waits for the other.
    back, there = end_of(spec, "send", "b"), end_of(spec, "hear", "a")
    yield {}
    for _ in range(spec.count):
        back.send(there.take())
    yield {}


# ---------------------------------------------------------------- one run


class Failed(Exception):
    """The reason for a missing figure."""


class Run:
    """One run of a scenario with one way."""

    def __init__(self, scenario: Scenario, way: str, where: str, name: str, count: int) -> None:
        self.scenario, self.way, self.where, self.name = scenario, way, where, name
        self.end = WAYS[way].end
        self.in_node = issubclass(self.end, clients.Node)
        self.count = max(count // scenario.senders // scenario.batch, 1) * scenario.batch  # messages of each sender
        self.processes: list[subprocess.Popen[str]] = []
        self.log = Path(where if os.path.isdir(where) else os.path.dirname(where) or "/var/tmp") / f"{name}.log"
        if "://" in where:
            self.log = Path(tempfile.gettempdir()) / f"{name}.log"

    def spec(self, role: str, first: int = 0, count: int = 0, index: int = 0) -> Spec:
        scenario = self.scenario
        what = self.end.what if self.in_node else ""
        takers = 1 if scenario.kind == "echo" else scenario.takers
        rest = (scenario.size, count or self.count, scenario.batch, first, takers, index)
        return Spec(self.way, what, self.where, self.name, role, scenario.synced, *rest)

    def start(self, spec: Spec, cpu: int | None) -> subprocess.Popen[str]:
        pin = [] if cpu is None else ["taskset", "-c", str(CPUS[cpu % len(CPUS)])]
        if self.in_node:
            command = ["node", str(HERE / "peer_node.js"), json.dumps(spec._asdict())]
        else:
            command = [sys.executable, __file__, "--client", json.dumps(spec)]
        with open(self.log, "a") as log:
            process = subprocess.Popen(
                [*pin, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.processes.append(process)
        return process

    def measure(self) -> dict[str, Any]:
        try:
            self.prepare()
            return getattr(self, self.scenario.kind)()  # type: ignore[no-any-return]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    with contextlib.suppress(OSError):
                        pipe.close()
            with contextlib.suppress(Exception):
                self.remove()
            self.log.unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [f"{self.name}{more}" for more in ("ab" if self.scenario.kind == "echo" else [""])]

    def prepare(self) -> None:
        if self.in_node:
            command = ["node", str(HERE / "peer_node.js"), json.dumps(self.spec("prepare")._asdict())]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
            if done.returncode:
                raise Failed(done.stderr.strip().splitlines()[-1])
        else:
            for name in self.names():
                self.end(self.where, name, "", self.scenario.synced).prepare()

    def remove(self) -> None:
        if self.in_node:
            for more in ("", "a", "b", "f"):
                Path(f"/dev/shm/{self.name}{more}").unlink(missing_ok=True)
            shutil.rmtree(Path(self.where) / self.name, ignore_errors=True)
        else:
            for name in self.names():
                self.end(self.where, name, "", self.scenario.synced).remove()

    # ------------------------------------------------------------ the kinds

    def live(self) -> dict[str, Any]:
        takers = [self.start(self.spec("hear", index=i), 1) for i in range(self.scenario.takers)]
        sender = self.start(self.spec("send", index=self.scenario.takers), 0)
        self.go()
        sent, *heard = [self.result(process) for process in (sender, *takers)]
        used = self.used_s()
        wrong = sum(one["wrong"] for one in heard)
        if wrong:
            raise Failed(f"{wrong} messages lost or doubled")
        seconds = max(one["ended"] for one in heard) - sent["begun"]
        count = self.count * self.scenario.takers
        disordered = sum(one["disordered"] for one in heard)
        return {"rate": count / seconds, "cpu_us": used / count * 1e6, "disordered": disordered}

    def durable(self) -> dict[str, Any]:
        senders = [self.start(self.spec("put", i * self.count), None) for i in range(self.scenario.senders)]
        self.go()
        sent = [self.result(process) for process in senders]
        used, count = self.used_s(), self.count * len(sent)
        seconds = max(one["ended"] for one in sent) - min(one["begun"] for one in sent)
        return {"rate": count / seconds, "cpu_us": used / count * 1e6}

    def work(self) -> dict[str, Any]:
        scenario = self.scenario
        workers = [self.start(self.spec("take"), None) for _ in range(scenario.takers)]
        makers = [self.start(self.spec("make", i * self.count), None) for i in range(scenario.senders)]
        self.go()
        sent = [self.result(process) for process in makers]
        last = self.end(self.where, self.name, "send", scenario.synced, scenario.takers)
        took = []
        for _ in range(scenario.takers):  # one after the other, so that each worker gets one
            last.send(END)
            took.append(self.result(self.first_of(workers)))
        used = self.used_s()
        found = sorted(number for one in took for number in one["found"])
        if found != list(range(self.count * scenario.senders)):
            raise Failed(f"{len(set(found))} of {self.count * scenario.senders} came, {len(found)} with those doubled")
        seconds = max(one["ended"] for one in took) - min(one["begun"] for one in sent)
        return {"rate": len(found) / seconds, "cpu_us": used / len(found) * 1e6}

    def echo(self) -> dict[str, Any]:
        echoing = self.start(self.spec("echo", index=1), 1)
        pinging = self.start(self.spec("ping", index=0), 0)
        self.go()
        took = sorted(self.result(pinging)["took"])
        self.result(echoing)
        p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
        return {"rate": 1e6 / p50, "p50": p50, "p99": p99}

    # ------------------------------------------------------------ what they say

    def go(self) -> None:
        for process in self.processes:
            assert self.out(process) == "ready"
        self.used = processor_s()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def used_s(self) -> float:
        """Return the processor seconds of all processes, also of servers, since `go`."""
        return processor_s() - self.used

    def result(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out(process))
        return found

    def out(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], LONGEST_S)[0]:
            raise Failed(f"not done after {LONGEST_S:g} s")
        line = process.stdout.readline()
        if not line:
            said = self.log.read_text().strip().splitlines()
            raise Failed(said[-1] if said else "a process ended early")
        return line.rstrip("\n")

    def first_of(self, waiting: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
        said, _, _ = select.select([process.stdout for process in waiting], [], [], LONGEST_S)
        if not said:
            raise Failed("no worker got the end mark")
        process = next(process for process in waiting if process.stdout is said[0])
        waiting.remove(process)
        return process


def bare_ring(scenario: Scenario, way: str, count: int) -> dict[str, Any]:
    """Measure the ring alone between processes, as ring.py does."""
    import ring

    if scenario.kind == "echo":
        p50, p99 = ring.round_trips("block", count)
        return {"rate": 1e6 / p50, "p50": p50, "p99": p99}
    ns = ring.throughput(scenario.size, 1, scenario.takers, 64 if way.endswith("batches") else 1, "block", count)
    return {"rate": scenario.takers * 1e9 / ns}


def bare_append(scenario: Scenario, folder: Path, count: int, synced: bool) -> dict[str, Any]:
    """Measure appends of one process: a batch is one write; if not synced, a write has 64 KiB."""
    batch = scenario.batch if synced else max(65_536 // scenario.size, 1)
    body, writes = bytes(scenario.size * batch), max(count // batch, 1)
    file = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    begun, used = time.monotonic(), time.process_time()
    for _ in range(writes):
        os.write(file, body)
        if synced:
            os.fdatasync(file)
    seconds, used = time.monotonic() - begun, time.process_time() - used
    os.close(file)
    return {"rate": writes * batch / seconds, "cpu_us": used / (writes * batch) * 1e6}


# ---------------------------------------------------------------- all runs


class Bench:
    """The requested scenarios and peers."""

    def __init__(self, rounds: int, seconds: float, peers: list[str]) -> None:
        self.rounds, self.seconds, self.peers = rounds, seconds, peers
        self.number = 0
        self.until = math.inf  # time.monotonic() after which no run begins
        self.found: dict[str, Any] = {}

    def wanted(self, ways: list[str]) -> list[str]:
        """Return our ways, and those of the requested peers."""
        return [way for way in ways if not self.peers or is_ours(way) or any(name in way for name in self.peers)]

    def scenario(self, key: str, base: Path) -> None:
        scenario = SCENARIOS[key]
        rows = self.measure(scenario, base / key)
        self.found[key] = {"title": scenario.title, "ways": rows, "ratios": ratios(rows)}
        show(scenario, rows)

    def measure(self, scenario: Scenario, folder: Path) -> dict[str, dict[str, Any]]:
        """Return the medians of each way. `folder` is made for the files of the servers, and removed."""
        ways = self.wanted(scenario.ways)
        rows: dict[str, dict[str, Any]] = {way: {"runs": []} for way in ways}
        with serving(folder, {WAYS[way].server for way in ways}, bool(scenario.synced)) as (where, lacking):
            for way in ways:
                if WAYS[way].server in lacking:
                    rows[way]["missing"] = lacking[WAYS[way].server]
            counts = {
                way: self.calibrate(scenario, way, where, rows[way]) for way in ways if "missing" not in rows[way]
            }
            for _ in range(self.rounds):
                for way, count in counts.items():
                    self.once(scenario, way, where, rows[way], count)
        shutil.rmtree(folder, ignore_errors=True)
        for row in rows.values():
            middle(row)
        return rows

    def calibrate(self, scenario: Scenario, way: str, where: dict[str, str], row: dict[str, Any]) -> int:
        """Return how many messages take about the time of one run. This also warms up."""
        count = 200 * scenario.batch if scenario.senders < 16 else 64 * scenario.senders * scenario.batch // 4
        for _ in range(3 if self.rounds else 1):
            got = self.once(scenario, way, where, row, count)
            if got is None or not self.rounds:
                return 0
            row["runs"].clear()
            rate = got["rate"] / (scenario.takers if scenario.kind == "live" else 1)
            wanted = int(max(rate * self.seconds, 200 * scenario.batch))
            if scenario.kind == "live" and rate * MILLION_S > MILLION * scenario.takers:
                wanted = MILLION
            if wanted < 4 * count:
                return wanted
            count = wanted
        return count

    def once(
        self, scenario: Scenario, way: str, where: dict[str, str], row: dict[str, Any], count: int
    ) -> dict[str, Any] | None:
        if time.monotonic() > self.until:
            row.setdefault("late", "out of time")
        if "failed" in row or "late" in row:
            return None
        self.number += 1
        end, place = WAYS[way].end, where[WAYS[way].server]
        try:
            if end == "ring":
                got = bare_ring(scenario, way, max(count, 2_000))
            elif end in ("append", "pwrite"):
                got = bare_append(scenario, Path(place), count, end == "append")
            else:
                name = f"mqfsbench{os.getpid()}x{self.number}"
                got = Run(scenario, way, place, name, count).measure()
        except Exception as error:
            row["failed"] = f"{error}" or type(error).__name__
            return None
        row["runs"].append(got)
        return got


def is_ours(way: str) -> bool:
    return way.startswith(("mqfs", "bare"))


def middle(row: dict[str, Any]) -> None:
    """Add the medians of its runs to a row."""
    for key in ("rate", "p50", "p99", "disordered", "cpu_us"):
        values = [run[key] for run in row["runs"] if key in run]
        if values:
            row[key] = statistics.median(values)


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the ratios of the rates of our ways to those of the peers."""
    rated = {way: row["rate"] for way, row in rows.items() if "rate" in row}
    ours = [way for way in rated if way.startswith("mqfs")]
    return {way: {peer: rated[way] / rated[peer] for peer in rated if peer not in ours} for way in ours}


def show(scenario: Scenario, rows: dict[str, dict[str, Any]]) -> None:
    ours = [way for way, row in rows.items() if "rate" in row and way.startswith("mqfs")]
    heads = [
        way.removeprefix("mqfs ").replace(", batches", " ×64").replace("ring, no server", "bare ring") for way in ours
    ]
    print(f"\n{scenario.title}; in the columns: how many times that mqfs does")
    print(f"{'':32}{'':>22}{'cpu us':>9}", *(f"{head:>18}" for head in heads))
    for way, row in rows.items():
        cells = columns(way, row, rows, ours) if "rate" in row else ()
        used = f"{row['cpu_us']:9.2f}" if "cpu_us" in row else f"{'':9}"
        print(f"{way:32}{figure(row):>22}{used}", *cells, note(scenario, way, row), flush=True)


def figure(row: dict[str, Any]) -> str:
    if "p50" in row:
        return f"{row['p50']:,.1f} · {row['p99']:,.1f}"
    return f"{row['rate']:,.0f}" if "rate" in row else "—"


def columns(way: str, row: dict[str, Any], rows: dict[str, dict[str, Any]], ours: list[str]) -> Iterator[str]:
    for our in ours:
        other = "rate" in row and not way.startswith("mqfs")
        yield f"{rows[our]['rate'] / row['rate']:18.3g}" if other else f"{'':18}"


def note(scenario: Scenario, way: str, row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"missing: {row['missing']}"
    if "failed" in row:
        return f"failed: {row['failed']}"
    if row.get("disordered"):
        return f"{row['disordered']:,.0f} out of order"
    return f"({NOT_SYNCED[way]})" if scenario.kind == "durable" and way in NOT_SYNCED else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="whether all of it runs: so few messages that figures mean little"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run, about")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="this scenario; repeatable")
    parser.add_argument("--peer", action="append", default=[], metavar="TEXT", help="peers so named only; repeatable")
    parser.add_argument("--json", metavar="FILE", help="all figures; - is standard output, and the table goes nowhere")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(Spec(*json.loads(given.client)))
        return
    if shutil.which("taskset") is None:
        sys.exit(f"no taskset; {INSTALLS}")
    bench = Bench(0 if given.short else given.rounds, given.seconds, given.peer)
    base = Path(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"))
    known = versions()
    quiet = contextlib.redirect_stdout(io.StringIO()) if given.json == "-" else contextlib.nullcontext()
    try:
        with quiet:
            print(", ".join(f"{name} {version}" for name, version in known.items()))
            for key in given.only or SCENARIOS:
                bench.scenario(key, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    told = json.dumps({"versions": known, "cpus": len(CPUS), "scenarios": bench.found}, indent=1) + "\n"
    if given.json == "-":
        sys.stdout.write(told)
    elif given.json:
        Path(given.json).write_text(told)


if __name__ == "__main__":
    main()
