"""fq's protocol: one publisher to one queue, a round trip, and round trips beside a blocked queue.

    python benchmarks/fq.py [--quick] [--fqd PID PORT]

The client is that of the tests, in Python, and sends many messages at once, so that the server is measured: messages
per second of its CPU time, and by the clock. With --fqd, an fqd on a port of loopback is measured, too, with a queue in
memory. It must be built by hand, as it needs jlog, which no distribution has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from processes import TICKS, cpu_s  # noqa: E402

from mqfs.fq import codec  # noqa: E402
from mqfs.fq.codec import Message  # noqa: E402
from tests.fq.client import Client  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.server import Server  # noqa: E402

SIZE = 64
AT_ONCE = 100
KIND = "backlog=1000000"


def rate(pid: int, address: str | tuple[str, int], kind: str, count: int) -> str:
    """Return a line with messages per second of the server's CPU time, and by the clock."""
    block = b"".join(codec.published(Message(b"rate", b"r", os.urandom(16), bytes(SIZE))) for _ in range(AT_ONCE))
    with Client(address, f"rate-{kind}", f"{kind}:public,{KIND}") as reads, Client(address, kind="mem") as writes:
        reads.bind("rate")
        reader = threading.Thread(target=reads.receive, args=(count,))
        began, cpu = time.perf_counter(), cpu_s(pid)
        reader.start()
        for _ in range(count // AT_ONCE):
            writes.data.sendall(block)
        reader.join()
        by_cpu, by_clock = count / max(cpu_s(pid) - cpu, 1 / TICKS), count / (time.perf_counter() - began)
        return f"{kind:4} 1 to 1, {SIZE} B: {by_cpu:,.0f} a second of CPU, {by_clock:,.0f} by the clock"


def round_trip_us(client: Client, exchange: str, count: int) -> float:
    """Return the median of round trips, in µs."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        client.publish(exchange, "r", b"ping")
        client.receive()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def beside_a_blocked_queue(address: str, count: int) -> tuple[float, float]:
    """Return round trips in µs before another queue blocks its publisher, and while it does."""
    with (
        Client(address, "fast") as fast,
        Client(address, "slow", "mem:public,block,backlog=10", with_data=False) as slow,
    ):
        fast.bind("blocks", "exact:r")
        slow.bind("blocks", "exact:slow")
        before = round_trip_us(fast, "blocks", count)
        with Client(address, kind="mem") as stopped:
            stopped.publish("blocks", "slow", *[bytes(SIZE)] * 1_000)
            eventually(lambda: stopped.counts()["routed"] == 10)
            return before, round_trip_us(fast, "blocks", count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages")
    parser.add_argument("--fqd", type=int, nargs=2, metavar=("PID", "PORT"), help="of an fqd on this machine")
    given = parser.parse_args()
    scale = 10 if given.quick else 1
    with tempfile.TemporaryDirectory(prefix="mqfs-fq-") as name:
        folder = Path(name)
        with Server.at(folder, "--fq", f"unix!{folder}/fq") as server:
            address = f"{folder}/fq"
            for kind in ("mem", "disk"):
                print("mqfs", rate(server.pid, address, kind, 200_000 // scale))
            if given.fqd:
                pid, port = given.fqd
                print("fqd ", rate(pid, ("127.0.0.1", port), "mem", 200_000 // scale))
                with Client(("127.0.0.1", port), "trip") as client:
                    client.bind("trip")
                    print(f"fqd  round trip, median: {round_trip_us(client, 'trip', 500 // scale):.0f} us")
            with Client(address, "trip") as client:
                client.bind("trip")
                print(f"mqfs round trip, median: {round_trip_us(client, 'trip', 5_000 // scale):.0f} us")
            before, beside = beside_a_blocked_queue(address, 5_000 // scale)
            print(f"the same beside a blocked queue: {beside:.0f} us, before {before:.0f} us")


if __name__ == "__main__":
    main()
