"""10,000 blocked readers: their costs for the server, and the time until one write has reached all of them.

    python benchmarks/readers.py [--readers N]

The server is the real one, with a store on disk. The readers are threads of a few processes, each with an open file.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from processes import cpu_s, resident_mb  # noqa: E402

from mqfs.fuse.mount import mounted, unmount  # noqa: E402

PROCESSES = 10
IDLE_S = 5.0


class Cost(NamedTuple):
    opened_s: float
    resident_mb: float
    each_kib: float
    idle: float  # share of a processor
    wrote_s: float
    took_s: float
    failed: bool


def run(base: Path, readers: int) -> Cost:
    program, path = base / "readers", base / "mq"
    path.mkdir()
    subprocess.run(["cc", "-O2", "-pthread", "-o", program, HERE / "readers.c"], check=True)
    command = [sys.executable, "-m", "mqfs", "serve", "--store", str(base / "store"), "--mount", str(path)]
    server = subprocess.Popen(command, cwd=HERE.parent, stderr=subprocess.DEVNULL)
    clients: list[subprocess.Popen[str]] = []
    try:
        while not (mounted(str(path)) and (path / "ctl").exists()):
            assert server.poll() is None, "the server ended"
            time.sleep(0.05)
        (path / "s").touch()
        before = resident_mb(server.pid)
        begun = time.monotonic()
        words = [str(program), str(path / "s"), str(readers // PROCESSES)]
        clients = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "waiting\n"
        opened = time.monotonic() - begun
        time.sleep(1)
        used, resident = cpu_s(server.pid), resident_mb(server.pid)
        time.sleep(IDLE_S)
        idle = (cpu_s(server.pid) - used) / IDLE_S
        begun = time.monotonic()
        (path / "s").write_text("to all")
        wrote = time.monotonic() - begun
        ends = [client.wait(60) for client in clients]
        took = time.monotonic() - begun
        each = (resident - before) * 1024 / readers
        return Cost(opened, resident, each, idle, wrote, took, any(ends))
    finally:
        for client in clients:
            client.kill()
            client.wait()
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if mounted(str(path)):
            unmount(str(path), lazily=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=10_000)
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    base = Path(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"))
    try:
        cost = run(base, arguments.readers)
        print(f"{arguments.readers:,} waiting readers: opened in {cost.opened_s:.1f} s; server RSS", end=" ")
        print(f"{cost.resident_mb:.0f} MB ({cost.each_kib:.2f} KiB each); idle CPU {cost.idle:.1%};", end=" ")
        print(f"one write returned after {cost.wrote_s:.2f} s, all were answered after {cost.took_s:.2f} s")
        sys.exit(cost.failed or cost.resident_mb >= 400 or cost.idle >= 0.02 or cost.took_s >= 10)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
