"""The store beside bare system calls, in one run; and the start of a store with 1,000,000 messages.

python benchmarks/store.py [FOLDER]      (default: a new folder in the current one, removed at the end)
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from mqfs.store.store import DiskStore

BODY = b"x" * 64
RECORD = b"x" * 96
COUNT = 200_000
SYNCS = 500
GROUPS, MESSAGES = 100, 10_000


def timed(name: str, count: int, work: Callable[[], None]) -> float:
    """Print and return the time of one operation, in microseconds."""
    start = time.perf_counter()
    work()
    each = (time.perf_counter() - start) / count * 1e6
    print(f"{name:42} {each:10.2f} us {1e6 / each:12,.0f} /s", flush=True)
    return each


def bare(folder: str) -> dict[str, float]:
    """Measure the same bytes without a store."""
    fd = os.open(f"{folder}/bare", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, COUNT * len(RECORD))

    def write() -> None:
        for number in range(COUNT):
            os.pwrite(fd, RECORD, number * len(RECORD))

    def read() -> None:
        for number in range(COUNT):
            os.pread(fd, len(RECORD), number * len(RECORD))

    def sync() -> None:
        for number in range(SYNCS):
            os.pwrite(fd, RECORD, number * len(RECORD))
            os.fdatasync(fd)

    result = {
        "append": timed("bare pwrite", COUNT, write),
        "find": timed("bare pread", COUNT, read),
        "sync": timed("bare pwrite + fdatasync", SYNCS, sync),
    }
    os.close(fd)
    return result


def through_store(folder: str) -> dict[str, float]:
    store = DiskStore(f"{folder}/store")
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"

    def append() -> None:
        for number in range(COUNT):
            bucket.writer.append(1, 16 + number % 10, number, BODY)

    def find() -> None:
        for number in range(1, COUNT + 1):
            bucket.reader.find(16 + (number - 1) % 10, number)

    def peek() -> None:
        for number in range(1, COUNT + 1):
            bucket.reader.locate(16, number)

    def sync() -> None:
        for number in range(SYNCS):
            bucket.writer.append(1, 16, number, BODY)
            bucket.upkeep.sync()

    result = {"append": timed("append", COUNT, append), "find": timed("find", COUNT, find)}
    timed("peek", COUNT, peek)
    result["sync"] = timed("append + sync", SYNCS, sync)
    store.close()
    return result


def fill(path: str) -> None:
    store = DiskStore(path)
    for _ in range(GROUPS):
        bucket = store.make(store.number(), b'{"name":"group"}')
        bucket.writer.state = lambda: b'{"name":"group"}'
        for number in range(MESSAGES):
            bucket.writer.append(1, 16 + number % 1_000, number, BODY)
        bucket.upkeep.sync()
    if path.endswith("killed"):
        os._exit(0)
    store.close()


def start(path: str) -> None:
    """Start a store and show time and memory; runs in a process of its own, to measure only its memory."""
    begin = time.perf_counter()
    store = DiskStore(path)
    buckets = [store.open(number) for number in store.groups()]
    for bucket in buckets:
        bucket.upkeep.history()
    opened = time.perf_counter() - begin
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"start, {GROUPS} groups, {GROUPS * MESSAGES:,} messages: {opened:.3f} s, RSS {rss >> 10} MB")
    begin = time.perf_counter()
    sequence, count = 0, 0
    while (record := buckets[0].reader.find(20, sequence)) is not None:
        sequence, count = record.sequence + 1, count + 1
    print(f"first read of one stream of {count} among 1,000: {(time.perf_counter() - begin) * 1e3:.2f} ms")
    os._exit(0)


def main() -> None:
    if len(sys.argv) == 3:
        {"fill": fill, "start": start}[sys.argv[1]](sys.argv[2])
        return
    folder = tempfile.mkdtemp(prefix="bench-store-", dir=sys.argv[1] if len(sys.argv) > 1 else ".")
    try:
        ours, theirs = bare(folder), through_store(folder)
        print("ratio to bare: " + ", ".join(f"{name} {theirs[name] / ours[name]:.2f}" for name in ours))
        for stop in ("clean", "killed"):
            for step in ("fill", "start"):
                print(f"{stop}: ", end="", flush=True) if step == "start" else None
                subprocess.run([sys.executable, __file__, step, f"{folder}/{stop}"], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
