"""Where the bench finds its tree: a server that runs, or one of its own on a store that is gone afterwards.

Owns that server, its folder, and the groups of the bench in either.
"""

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
from mqfs.client.group import Kept
from mqfs.errors import BadAddress, Disconnected, MqfsError

START_S = STOP_S = 30.0
_LOOK_S = 0.01
_PR_SET_PDEATHSIG = 1  # prctl(2)
_DISK = "/var/tmp"  # /tmp may be memory


@contextlib.contextmanager
def folder(plan: Plan) -> Iterator[str]:
    """A folder for all the bench writes, on the disk that is to be measured."""
    above = plan.store or (_DISK if os.access(_DISK, os.W_OK) else None)
    path = tempfile.mkdtemp(prefix="mqfs-bench-", dir=above)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def place(plan: Plan, path: str) -> Iterator[Place]:
    """Where the tree is, with a server there if need be."""
    assert plan.transport is not None
    if plan.at is not None:
        yield Place(plan.transport, plan.at, wait=_wait_of(plan))
    elif plan.mount is not None:
        yield Place("file", mount=plan.mount)
    elif plan.transport == "embedded":
        yield Place("embedded", store=os.path.join(path, "store"), wait=_wait_of(plan))
    else:
        with _served(plan.transport, path) as found:
            yield attrs.evolve(found, wait=_wait_of(plan))


def _wait_of(plan: Plan) -> Kept:
    return "published" if plan.wait == "published" else "committed"


@contextlib.contextmanager
def _served(transport: str, path: str) -> Iterator[Place]:
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
                yield Place(transport, address, mount)
            finally:
                _end(server)


def _end_with_us() -> None:
    """In the server, before it is one: if the bench is killed the kernel ends it too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(server: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with open(log, errors="replace") as file:
            lines = file.read().splitlines()
        if "mqfs: ready" in lines:
            return
        if server.poll() is not None or time.monotonic() > deadline:
            last = lines[-1].removeprefix("mqfs: ") if lines else f"nothing was said in {START_S:g} s"
            raise BadAddress(f"the bench's own server did not start: {last}")
        time.sleep(_LOOK_S)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextlib.contextmanager
def group(where: Place, lines: Sequence[str], streams: Sequence[str]) -> Iterator[str]:
    """A group of the bench's own. Nothing of it is left, in a server that goes on."""
    name = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    way = open_driver(where)
    try:
        way.prepare(name, lines, streams)
        if where.transport == "embedded":
            way.close()  # the store is for the process that measures
        yield name
    finally:
        if where.transport != "embedded":
            with contextlib.suppress(
                Disconnected, BadAddress, OSError
            ):  # the server is gone, and its groups are its own
                _remove(where, name, streams)
            way.close()


def _remove(where: Place, name: str, streams: Sequence[str]) -> None:
    """On a connection of its own: the one it was made by may be used no more after Ctrl-C."""
    way = open_driver(where)
    try:
        way.remove(name, streams)
    except MqfsError as error:
        print(f"mqfs: the group {name} is left behind: {error}", file=sys.stderr)
    finally:
        way.close()
