"""`mqfs bridge fsq` beside qlobber-fsq itself, in one run.

    python benchmarks/fsq.py [--quick]

qlobber-fsq: one process publishes small messages, 16 at a time, and another receives them. Into the group: files that
are present when the bridge starts, from the first message to the last. Latency: from a publish of qlobber-fsq to a
subscriber of the group, one at a time. Idle: CPU time of a bridge over a folder whose messages are all imported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from processes import cpu_s, resident_mb  # noqa: E402

from mqfs.bridge.folder import (  # noqa: E402
    MULTI,
    Folder,
    Topics,
)
from tests.bridge.rig import Bridge, Rig, rig  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402

HOUR_MS = 3_600_000
LANES = 16


def of_fsq(count: int) -> float:
    """Return messages per second from one process of qlobber-fsq to another."""
    with rig() as r:
        reader, writer = r.node(poll_interval=1000), r.node(poll_interval=1000)
        reader.subscribe()
        began = time.perf_counter()
        writer.tell("many", topic="s", count=count, first=10_000_000, lanes=LANES, ttl=HOUR_MS)
        eventually(lambda: len(reader.events) >= count + 2, "the messages")
        return count / (time.perf_counter() - began)


def fill(r: Rig, count: int) -> None:
    """Write files into the folder directly: qlobber-fsq would take minutes."""
    folder, topics = Folder(str(r.folder)), Topics()
    for _ in range(count):
        name, _ = topics.name("s", MULTI, int(time.time() * 1000) + HOUR_MS, os.urandom(16).hex())
        Path(folder.message_path(folder.bucket_of(str(name)), str(name))).write_bytes(b"\0" + b"x" * 64)


def imported(r: Rig) -> int:
    return int(r.group.stats().written)


def into_the_group(count: int) -> tuple[float, float, float]:
    """Return messages per second and, of a bridge that has imported all, seconds of CPU per second, and MiB of
    memory."""
    with rig("dedup 1m") as r:
        r.node().kill()
        fill(r, count)
        bridge = Bridge(r, "--in", "--window", "0")
        eventually(lambda: imported(r), "the first message")
        before, began = imported(r), time.perf_counter()
        eventually(lambda: imported(r) >= count, "the messages", lambda seconds: time.sleep(0.05))
        rate = (count - before) / (time.perf_counter() - began)
        time.sleep(15)  # two scans of all directories: the second finds them unchanged
        used, seconds = cpu_s(bridge.process.pid), 30
        time.sleep(seconds)
        idle = (cpu_s(bridge.process.pid) - used) / seconds
        return rate, idle, resident_mb(bridge.process.pid)


def latencies_ms(count: int) -> list[float]:
    """Return the times from a publish of qlobber-fsq to the receipt by a subscriber, in ms."""
    with rig() as r:
        node = r.node()
        Bridge(r, "--in")
        found = []
        with r.group.subscribe() as messages:
            node.publish("s", "first")
            messages.get(60)
            for number in range(count):
                began = time.perf_counter()
                node.tell("publish", topic="s", body=str(number))
                messages.get(60)
                found.append((time.perf_counter() - began) * 1e3)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    tenth = 10 if parser.parse_args().quick else 1
    theirs = of_fsq(5_000 // tenth)
    print(f"qlobber-fsq to itself       {theirs:8,.0f} messages/s")
    waiting = 100_000 // tenth
    rate, idle, memory = into_the_group(waiting)
    print(f"a folder into a group       {rate:8,.0f} messages/s, {rate / theirs:.1f} x (aim: 3)")
    print(f"idle over {waiting:7,} files   {100 * idle:8.2f} % of a CPU (aim: 1), {memory:,.0f} MiB")
    found = latencies_ms(1_000 // tenth)
    tail = statistics.quantiles(found, n=100)[98]
    print(f"publish to subscriber       {statistics.median(found):8.1f} ms p50 (aim: 20), {tail:.1f} ms p99")


if __name__ == "__main__":
    main()
