"""Writes and reads per second through the mount, beside their upper bounds, in one run.

    python benchmarks/files.py [--quick]

The tree (`replay off`, `replay all`; `sync off`) is measured beside (a) an empty file system in plain pyfuse3, and (b)
the device loop with empty handles. Then `sync always`: writers of one stream beside a bare append + fdatasync. Server
and clients are pinned to one CPU; otherwise the scheduler would be measured. Without `sync` the rates are by the CPU
time of server and clients together: those of the clock on a CPU without other processes.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import pyfuse3  # noqa: E402
import trio  # noqa: E402

from mqfs.clock import SystemClock  # noqa: E402
from mqfs.engine.tree.tree import Tree  # noqa: E402
from mqfs.fuse.mount import FuseMount, mounted, unmount  # noqa: E402
from mqfs.model import User  # noqa: E402
from mqfs.store.memory import MemoryStore  # noqa: E402
from mqfs.store.store import DiskStore  # noqa: E402

CPU = max(os.sched_getaffinity(0))

# ---------------------------------------------------------------- servers


class Nothing(pyfuse3.Operations):
    """(a): every file exists, accepts all writes and returns zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[bytes, int] = {}

    async def getattr(self, inode: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_nlink = inode, 1
        entry.attr_timeout = entry.entry_timeout = 0
        entry.st_mode = (stat.S_IFDIR | 0o755) if inode == pyfuse3.ROOT_INODE else (stat.S_IFREG | 0o666)
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        if not name.startswith(b"s"):
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self.names.setdefault(name, len(self.names) + 2))

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> pyfuse3.EntryAttributes:
        return await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, direct_io=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return bytes(size)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return len(buf)


async def serve_nothing(path: str) -> None:
    pyfuse3.init(Nothing(), path, {"fsname=nothing"})
    print("ready", flush=True)
    await pyfuse3.main()


class NoHandle:
    """(b): an empty handle for the device loop."""

    sequential = parkable = readable = writable = True
    takes = False

    def read(self, count: int, offset: int = 0) -> bytes:
        return bytes(count)

    def write(self, data: bytes, offset: int = 0) -> int:
        return len(data)

    def push_back(self, data: bytes) -> None: ...

    def flush(self) -> int:
        return 0

    def watch(self, then: Callable[[], None] | None) -> None: ...

    def close(self) -> None: ...


async def serve_tree(path: str, store_path: str = "") -> None:
    """Serve the tree; without a store (b)."""
    store: Any = MemoryStore()
    if store_path:
        store = DiskStore(store_path, trio.lowlevel.current_trio_token().run_sync_soon)
    tree: Any = Tree(store, SystemClock(), owner=User(os.geteuid(), os.getegid()))
    if not store_path:
        tree.open = lambda user, node, flags, made=False: NoHandle()
    mount = FuseMount(tree, path)
    await mount.attach()
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.run)
        print("ready", flush=True)
        while not mount.ended.is_set():
            with trio.move_on_after(1):
                await mount.ended.wait()
            tree.tick()
        tree.close()
    store.close()


# ---------------------------------------------------------------- measuring


@contextmanager
def server(kind: str, base: Path, cpu: int = CPU) -> Iterator[tuple[Path, int]]:
    path = base / kind
    path.mkdir()
    words = ["taskset", "-c", str(cpu), sys.executable, __file__, "--serve", kind, str(path)]
    process = subprocess.Popen([*words, str(base / "store")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield path, process.pid
    finally:
        if mounted(str(path)):
            unmount(str(path), lazily=True)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def both_rates(program: Path, server: int, *words: object, cpu: int = CPU) -> list[tuple[float, float]]:
    """Run the client. Return its operations per second: by the clock, and by the processor time of client and
    server."""
    command = ["taskset", "-c", str(cpu), str(program), *map(str, words)]
    environment = {**os.environ, "SERVER": str(server)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True, env=environment)
    return [(float(clock), float(used)) for clock, used in map(str.split, done.stdout.splitlines())]


def rates(program: Path, server: int, *words: object) -> list[float]:
    """Run the client. Return its operations per second: by processor time, or without a server by the clock."""
    return [used if server else clock for clock, used in both_rates(program, server, *words)]


def median(program: Path, rounds: int, server: int, *words: object) -> list[float]:
    found = [rates(program, server, *words) for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def group(path: Path, name: str, *lines: str) -> Path:
    made = path / name
    made.mkdir()
    (made / "ctl").write_text("".join(f"{line}\n" for line in lines))
    return made


def plain(program: Path, base: Path, scale: float) -> None:
    print(f"{'operations a second':34}{'(a) pyfuse3':>13}{'(b) loop':>13}{'replay off':>13}{'replay all':>13}")
    found: dict[tuple[str, int, int], list[float]] = {}
    shapes = [(64, 1, 20_000), (64, 16, 2_000), (65_536, 1, 2_000), (65_536, 16, 120)]
    for kind in ("nothing", "loop", "tree"):
        with server(kind, base) as (path, pid):
            places = {kind: path}
            if kind == "tree":
                places = {}
                for replay in ("off", "all"):
                    places[replay] = group(path, replay, f"replay {replay}", "sync off")
            for name, place in places.items():
                for size, clients, count in shapes:
                    count = max(int(count * scale), 20)
                    rates(program, pid, place, clients, max(count // 10, 10), size)  # warms up
                    found[name, size, clients] = median(program, 5, pid, place, clients, count, size)
    for size, clients, _ in shapes:
        for i, verb in enumerate(("write", "read")):
            row = [found[name, size, clients][i] for name in ("nothing", "loop", "off", "all")]
            what = f"{verb} {size} B, {clients} client{'s' if clients > 1 else ''}"
            print(f"{what:34}" + "".join(f"{rate:13,.0f}" for rate in row), end="")
            a, b = ([rate / row[base] for rate in row[2:]] for base in (0, 1))
            print(f"   /(a) {a[0]:.2f} {a[1]:.2f}   /(b) {b[0]:.2f} {b[1]:.2f}")


def synced(program: Path, base: Path, scale: float) -> None:
    """Measure `sync always`, which uses group commit."""
    count = max(int(1_000 * scale), 50)
    with server("tree", base) as (path, _):
        place = group(path, "synced", "replay all", "sync always")
        (place / "s").touch()
        one, sixteen, bare = [], [], []
        for _ in range(3):
            bare += rates(program, 0, "-b", base / "bare", 1, count, 64)
            one += rates(program, 0, "-w", place, 1, count, 64)
            sixteen += rates(program, 0, "-w", place, 16, count // 4, 64)
    least, single, many = (statistics.median(column) for column in (bare, one, sixteen))
    bound = 1.5e6 / least + 100
    print(f"sync always, 64 B: bare append + fdatasync {1e6 / least:.0f} us; one writer {1e6 / single:.0f} us", end="")
    print(f" (aim: at most {bound:.0f}); 16 writers {many:,.0f}/s = {many / single:.1f} x one ({single:,.0f}/s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "MOUNT", "STORE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        kind, path, store = arguments.serve
        if kind == "nothing":
            trio.run(serve_nothing, path)
        else:
            trio.run(serve_tree, path, store if kind == "tree" else "")
        return
    base = Path(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"))
    try:
        program = base / "rate"
        subprocess.run(["cc", "-O2", "-o", program, HERE / "rate.c"], check=True)
        scale = 0.1 if arguments.quick else 1.0
        plain(program, base, scale)
        (base / "tree").rmdir()
        synced(program, base, scale)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
