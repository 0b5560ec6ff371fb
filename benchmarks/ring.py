"""The ring between processes, beside its core in C at both ends, a bare memcpy, and a pipe, in one run.

usage: .venv/bin/python benchmarks/ring.py [MESSAGES]      (2,000,000; publishers on CPU 0, consumers on CPU 1)
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mqfs.ring import Ring, attach, create  # noqa: E402

RING_BYTES = 1 << 22
WAYS = ("spin", "yield", "block")
CPUS = sorted(os.sched_getaffinity(0))


def fork(ring: Ring, cpu: int, act: Callable[[Ring], None]) -> int:
    fd = os.dup(ring.fileno())
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        os.sched_setaffinity(0, {CPUS[cpu % len(CPUS)]})
        act(attach(fd))
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


def wait(pids: list[int]) -> None:
    for pid in pids:
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a process of the bench failed")


def publish(count: int, size: int, batch: int, ready: int, go: int) -> Callable[[Ring], None]:
    def act(ring: Ring) -> None:
        body = bytes(size)
        os.write(ready, b"r")
        os.read(go, 1)
        if batch == 1:
            put = ring.publish
            for _ in range(count):
                put(1, body)
        else:
            bodies, put_many = [body] * batch, ring.publish_many
            for _ in range(count // batch):
                put_many(1, bodies)

    return act


def consume(count: int, batch: int, way: str, ready: int) -> Callable[[Ring], None]:
    def act(ring: Ring) -> None:
        consumer = ring.consumer(gates=True, wait=way)  # type: ignore[arg-type]
        os.write(ready, b"r")
        if batch == 1:
            take = consumer.body
            for _ in range(count):
                take()
        else:
            left = count
            while left:
                left -= len(consumer.bodies(batch))

    return act


def throughput(size: int, publishers: int, consumers: int, batch: int, way: str, count: int) -> float:
    """Return nanoseconds per published message, from the first publisher's start to the last consumer's end."""
    ring = create(RING_BYTES)
    reads, ready = os.pipe()
    each = count // publishers // batch * batch
    waits, go = os.pipe()
    pids = [fork(ring, 1, consume(each * publishers, batch, way, ready)) for _ in range(consumers)]
    pids += [fork(ring, 0, publish(each, size, batch, ready, waits)) for _ in range(publishers)]
    for _ in pids:
        os.read(reads, 1)
    began = time.perf_counter_ns()
    os.write(go, bytes(publishers))
    wait(pids)
    took = time.perf_counter_ns() - began
    for fd in (reads, ready, waits, go):
        os.close(fd)
    return took / (each * publishers)


def in_c(driver: Path, size: int, batch: int, way: int, count: int) -> float:
    ring = create(RING_BYTES)
    fd = ring.fileno()
    count = count // batch * batch
    command = ["taskset", "-c", str(CPUS[-1]), str(driver), "consume", str(fd), str(count), str(way)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as consumer:
        assert consumer.stdout
        consumer.stdout.readline()
        began = time.perf_counter_ns()
        arguments = ["publish", str(fd), str(count), str(size), str(batch)]
        subprocess.run(["taskset", "-c", str(CPUS[0]), str(driver), *arguments], pass_fds=[fd], check=True)
        consumer.wait()
        return (time.perf_counter_ns() - began) / count


def pipe(size: int, count: int) -> float:
    ring = create(1 << 16)
    reads, writes = os.pipe()

    def act(_: Ring) -> None:
        for _ in range(count):
            os.read(reads, size)

    pid = fork(ring, 1, act)
    body = bytes(size)
    began = time.perf_counter_ns()
    for _ in range(count):
        os.write(writes, body)
    wait([pid])
    os.close(reads)
    os.close(writes)
    return (time.perf_counter_ns() - began) / count


def round_trips(way: str, count: int) -> tuple[float, float]:
    """Return p50 and p99 of round trips, in microseconds."""
    there, back = create(1 << 20), create(1 << 20)
    back_fd = os.dup(back.fileno())
    reads, ready = os.pipe()

    def echo(ring: Ring) -> None:
        consumer, answers = ring.consumer(gates=True, wait=way), attach(back_fd)  # type: ignore[arg-type]
        os.write(ready, b"r")
        for _ in range(count):
            answers.publish(1, consumer.body() or b"")

    pid = fork(there, 1, echo)
    os.read(reads, 1)
    answers = back.consumer(gates=True, wait=way)  # type: ignore[arg-type]
    body, took = bytes(64), []
    for _ in range(count):
        began = time.perf_counter_ns()
        there.publish(1, body)
        answers.body()
        took.append((time.perf_counter_ns() - began) / 1000)
    wait([pid])
    for fd in (back_fd, reads, ready):
        os.close(fd)
    took.sort()
    return took[count // 2], took[count * 99 // 100]


def wake_ups(count: int, through_pipe: bool) -> tuple[float, float]:
    """Return p50 and p99 from a publish (or a write to a pipe) to the return of a sleeping reader, in microseconds."""
    ring = create(1 << 20)
    reads, told = os.pipe()
    source, sink = os.pipe()

    def sleeper(again: Ring) -> None:
        consumer, took = again.consumer(wait="block"), []
        os.write(told, b"r")
        for _ in range(count):
            sent = int((os.read(source, 64) if through_pipe else consumer.body()) or b"0")
            took.append(time.perf_counter_ns() - sent)
        took.sort()
        os.write(told, b"%d %d" % (took[count // 2], took[count * 99 // 100]))

    pid = fork(ring, 1, sleeper)
    os.read(reads, 1)
    for _ in range(count):
        time.sleep(0.001)
        if through_pipe:
            os.write(sink, b"%d" % time.perf_counter_ns())
        else:
            ring.publish(1, b"%d" % time.perf_counter_ns())
    wait([pid])
    p50, p99 = (int(text) / 1000 for text in os.read(reads, 99).split())
    for fd in (reads, told, source, sink):
        os.close(fd)
    return p50, p99


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(3))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    os.sched_setaffinity(0, {CPUS[0]})
    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder) / "driver"
        ring, records = ROOT / "mqfs" / "ring", ROOT / "mqfs" / "records"
        sources = ROOT / "tests" / "ring" / "memory" / "driver.c", ring / "core.c", records / "crc32c.c"
        subprocess.run(["cc", "-O2", "-std=c11", f"-I{ring}", *sources, "-o", driver, "-pthread"], check=True)
        for size in (64, 1024):
            ended = subprocess.run([driver, "copy", "20000000", str(size)], capture_output=True, text=True, check=True)
            bare = float(ended.stdout)
            through = median(lambda size=size: pipe(size, count // 10))  # type: ignore[misc]
            print(f"{size} B: memcpy and a store {bare:.1f} ns, pipe {through:.0f} ns", flush=True)
            for batch in (1, 64):
                for number, way in enumerate(WAYS):
                    native = median(lambda: in_c(driver, size, batch, number, count))  # noqa: B023
                    line = f"  batch {batch:3} {way:5}  C 1→1 {native:6.0f} ns"
                    for publishers, consumers in ((1, 1), (1, 4), (4, 1)):
                        if way == "spin" and consumers > 1:
                            continue  # four would spin on one CPU
                        few = count // (1 if batch > 1 else 4)
                        ours = median(lambda: throughput(size, publishers, consumers, batch, way, few))  # noqa: B023
                        line += f" | {publishers}→{consumers} {ours:6.0f} ns = {1e3 / ours:5.2f} M/s"
                        if publishers == consumers == 1:
                            line += f", {ours / native:.1f} × C, pipe {through / ours:.1f} ×"
                    print(line, flush=True)
    for way in WAYS:
        p50, p99 = round_trips(way, 20_000)
        print(f"round trip {way:5} p50 {p50:.1f} µs, p99 {p99:.1f} µs", flush=True)
    for name, through_pipe in (("ring", False), ("pipe", True)):
        p50, p99 = wake_ups(3_000, through_pipe)
        print(f"a sleeping reader wakes, {name}: p50 {p50:.1f} µs, p99 {p99:.1f} µs", flush=True)


if __name__ == "__main__":
    main()
