"""10,000 readers that wait: what they cost the server, and how long one write takes to reach them all.

    python benchmarks/readers.py [--readers N]

The server is the real one, with a store on disk; the readers are threads of a few processes, an open each.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from mqfs.fuse.mount import mounted, unmount  # noqa: E402

PROCESSES = 10
IDLE_S = 5.0


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(base: Path, readers: int) -> bool:
    program, path = base / "readers", base / "mq"
    path.mkdir()
    subprocess.run(["cc", "-O2", "-pthread", "-o", program, HERE / "readers.c"], check=True)
    command = [sys.executable, "-m", "mqfs", "serve", "--store", str(base / "store"), "--mount", str(path)]
    server = subprocess.Popen(command, cwd=HERE.parent)
    clients: list[subprocess.Popen[str]] = []
    try:
        while not (mounted(str(path)) and (path / "ctl").exists()):
            if server.poll() is not None:
                return False
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
        print(f"{readers:,} waiting readers: opened in {opened:.1f} s; server RSS {resident:.0f} MB", end="")
        print(f" ({(resident - before) * 1024 / readers:.2f} KiB each); idle CPU {idle:.1%}; ", end="")
        print(f"one write returned after {wrote:.2f} s, all were answered after {took:.2f} s")
        return not any(ends) and resident < 400 and idle < 0.02 and took < 10
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
        sys.exit(0 if run(base, arguments.readers) else 1)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
