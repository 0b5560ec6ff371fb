"""The tree that the bench measures, and its groups there: of a running server, or of its own on a temporary store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import attrs

from mqfs.bench.drivers import Place, open_driver
from mqfs.bench.plan import Plan
from mqfs.client.outgoing import Durability
from mqfs.errors import BadAddress, Disconnected, MqfsError, NotFound

START_S = STOP_S = 30.0
_LOOK_S = 0.01
_PR_SET_PDEATHSIG = 1  # prctl(2)
_DISK = "/var/tmp"  # /tmp may be memory


@contextlib.contextmanager
def folder(plan: Plan) -> Iterator[str]:
    """A temporary folder on the disk to be measured."""
    above = plan.store or (_DISK if os.access(_DISK, os.W_OK) else None)
    path = tempfile.mkdtemp(prefix="mqfs-bench-", dir=above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def place(plan: Plan, path: str) -> Iterator[Place]:
    """The location of the tree; starts a server where the plan names none."""
    assert plan.transport is not None
    if plan.at is not None:
        yield Place(plan.transport, plan.at, wait=_wait_of(plan), prefetch=plan.prefetch)
    elif plan.mount is not None:
        yield Place("file", mount=plan.mount)
    elif plan.transport == "embedded":
        yield Place("embedded", store=os.path.join(path, "store"), wait=_wait_of(plan), prefetch=plan.prefetch)
    else:
        with _local_server(plan.transport, path) as found:
            yield attrs.evolve(found, wait=_wait_of(plan), prefetch=plan.prefetch)


def _wait_of(plan: Plan) -> Durability:
    return "published" if plan.wait == "published" else "committed"


@contextlib.contextmanager
def _local_server(transport: str, path: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="mqfs-bench-") as short:  # the path of a socket has little room
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
    """Seconds of processor time that a process has taken."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end_with_us() -> None:
    """In the child, before exec: have the kernel end the server if the bench is killed."""
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
def group(place: Place, lines: Sequence[str], streams: Sequence[str], left: list[str]) -> Iterator[str]:
    """A temporary group. Removed at the end, unless its server is the bench's own; `left` gets the name of one that
    could not be."""
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
                pass  # it was not made, or the server is gone
            except (MqfsError, OSError) as error:
                left.append(name)
                print(f"mqfs: cannot remove group {name!r}: {error}", file=sys.stderr)
            driver.close()


def _remove(place: Place, name: str, streams: Sequence[str]) -> None:
    """On a new connection: Ctrl-C may have left the other unusable."""
    driver = open_driver(place)
    try:
        driver.remove(name, streams)
    finally:
        driver.close()
