"""Requests per second over 9P: one at a time and pipelined, beside diod, in one run on one CPU.

One C client (ninep_client.c) sends the same 64-byte Treads and Twrites in 9P2000.L to mqfs over a unix socket and to
diod over TCP. A read of mqfs returns the next message, a read of diod the next 64 bytes of a file. Client and servers
are pinned to one CPU; otherwise the scheduler would decide the figures. Both are measured by turns, and the best of
several rounds counts, as other programs use the machine, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

HERE = Path(__file__).parent
WINDOW = 32
BODY = 64


def serve(store: str, path: str) -> None:
    """Run the server; its process ends with a signal."""
    import trio

    from mqfs.clock import SystemClock
    from mqfs.engine.tree.tree import Tree
    from mqfs.model import User
    from mqfs.ninep.server.connection import Server
    from mqfs.serving.accept import listen
    from mqfs.store.memory import MemoryStore
    from mqfs.store.store import DiskStore

    async def run() -> None:
        post = trio.lowlevel.current_trio_token().run_sync_soon
        opened = DiskStore(store, post) if store else MemoryStore()
        tree = Tree(opened, SystemClock(), owner=User(os.getuid(), os.getgid()))
        server = Server(tree)
        server.add(listen(f"unix!{path}"))
        await server.run()

    profile = os.environ.get("MQFS_PROFILE")
    if not profile:
        trio.run(run)
        return
    import cProfile
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cProfile.runctx("trio.run(run)", {"trio": trio, "run": run}, {}, profile)


class Bench:
    """The servers, and a client that measures them."""

    def __init__(self, folder: Path, requests: int, cpu: int, disk: bool) -> None:
        self.folder, self.requests, self.cpu, self.disk = folder, requests, cpu, disk
        self.client = folder / "client"
        subprocess.run(["gcc", "-O2", "-o", self.client, HERE / "ninep_client.c"], check=True)

    def pinned(self, *command: object) -> list[str]:
        return ["taskset", "-c", str(self.cpu), *map(str, command)]

    @contextlib.contextmanager
    def mqfs(self) -> Iterator[tuple[str, str]]:
        from mqfs.ninep.client import connection

        path = str(self.folder / "9p")
        store = str(self.folder / "store") if self.disk else ""
        server = subprocess.Popen(self.pinned(sys.executable, __file__, "--serve", f"{store}:{path}"))
        try:
            until(lambda: os.path.exists(path))
            with connection.connect(f"unix!{path}") as client:
                client.mkdir("b")
                with client.open("b/ctl", "w") as ctl:
                    ctl.write(b"replay all\nsync off\n")
                with client.create("b/read") as stream:
                    for _ in range(self.requests):
                        stream.write(bytes(BODY))
                client.create("b/write").close()
            yield "unix", path
        finally:
            server.terminate()
            server.wait()

    @contextlib.contextmanager
    def diod(self) -> Iterator[tuple[str, str]]:
        export = self.folder / "b"
        export.mkdir()
        (export / "read").write_bytes(bytes(BODY * self.requests))
        (export / "write").touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        options = ["-f", "-n", "-l", f"127.0.0.1:{port}", "-e", str(export), "-L", str(self.folder / "diod.log")]
        server = subprocess.Popen(self.pinned("diod", *options))
        try:
            until(lambda: answers(int(port)))
            yield "tcp", port
        finally:
            server.terminate()
            server.wait()

    def rate(self, where: tuple[str, str], what: str, aname: str, window: int) -> float:
        """Run the client once, and return requests per second."""
        command = self.pinned(self.client, *where, what, what, aname, self.requests, window)
        return self.requests / float(subprocess.run(command, check=True, capture_output=True).stdout)


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)


@click.command()
@click.option("--requests", default=50_000, help="of each kind")
@click.option("--rounds", default=5)
@click.option("--cpu", default=0, help="the CPU that all of it shares")
@click.option("--memory", is_flag=True, help="a store in memory instead of on disk")
@click.option("--serve", "serve_at", hidden=True)
def main(requests: int, rounds: int, cpu: int, memory: bool, serve_at: str | None) -> None:
    if serve_at is not None:
        serve(*serve_at.split(":"))
        return
    with tempfile.TemporaryDirectory(prefix="mqfs-bench-") as name:
        bench = Bench(Path(name), requests, cpu, not memory)
        print(
            f"{'64 bytes':8} {'mqfs':>10} {'diod':>10} {'ratio':>6} {f'{WINDOW} deep':>10} {'ratio':>6}   (requests/s)"
        )
        with bench.mqfs() as ours, contextlib.ExitStack() as stack:
            theirs = stack.enter_context(bench.diod()) if shutil.which("diod") else None
            for what in ("read", "write"):
                one = deep = diod = 0.0
                for _ in range(rounds):  # by turns, so that a busy moment affects all
                    one = max(one, bench.rate(ours, what, "/b", 1))
                    if theirs:
                        diod = max(diod, bench.rate(theirs, what, str(Path(name) / "b"), 1))
                    deep = max(deep, bench.rate(ours, what, "/b", WINDOW))
                diod = diod or float("nan")
                print(f"{what:8} {one:10,.0f} {diod:10,.0f} {one / diod:6.2f} {deep:10,.0f} {deep / one:6.2f}")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
