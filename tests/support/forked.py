"""Servers forked from one process that has imported them: most of what a start takes is importing.

    python -m tests.support.forked DESCRIPTOR

A message of the socket is a request: arguments, folder and environment of `mqfs`, with four descriptors: standard
input, output and error, and a pipe for how it ends. The answer is its process number.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from select import select
from typing import NoReturn

REQUEST_BYTES = 1 << 20


class Forked:
    """As subprocess.Popen, of one such server."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self.returncode = pid, None  # type: int, int | None
        self._status, self._lock = status, threading.Lock()

    def __del__(self) -> None:
        os.close(self._status)

    def poll(self) -> int | None:
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        if (found := self._read(timeout)) is None:
            raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0)
        return found

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select([self._status], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:  # empty: the process that forked it has ended
                    self.returncode = int(os.read(self._status, 32) or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that forks them; one in each process of pytest, started with the first server."""

    _one: Forker | None = None

    def __init__(self, environment: dict[str, str]) -> None:
        self.pid = os.getpid()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.forked", str(other.fileno())]
        with other:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
            )

    @classmethod
    def one(cls, environment: dict[str, str]) -> Forker:
        if cls._one is None or cls._one.pid != os.getpid():
            cls._one = cls(environment)
        return cls._one

    def start(self, arguments: list[str], folder: Path, environment: dict[str, str], log: int) -> Forked:
        """`mqfs` with those arguments; what it prints goes to the descriptor `log`."""
        sys.audit("subprocess.Popen", "mqfs", arguments, folder, environment)  # see Guard in conftest.py
        status, ended = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        request = json.dumps([arguments, str(folder), environment]).encode()
        try:
            socket.send_fds(self._socket, [request], [nothing, log, log, ended])
        finally:
            os.close(nothing)
            os.close(ended)
        return Forked(int(self._socket.recv(32)), status)


def serve(link: socket.socket) -> None:
    """Fork a server for each request, and pass on how each ends; until the link ends."""
    ends: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select([link.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4_096)
            reap(ends)
        if link.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(link, REQUEST_BYTES, 4)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (link.detach(), woken, wake, *ends.values()):
                    os.close(descriptor)
                arguments, folder, environment = json.loads(request)
                run(arguments, folder, environment, list(descriptors))
            *standard, ends[pid] = descriptors
            for descriptor in standard:
                os.close(descriptor)
            link.send(b"%d" % pid)


def reap(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = ends.pop(pid)
        os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(end)


def run(arguments: list[str], folder: str, environment: dict[str, str], descriptors: list[int]) -> NoReturn:
    """Be `mqfs` with those arguments: `main` exits, and with it this process."""
    from mqfs.cli.main import main

    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["mqfs", *arguments]
    main()


def import_all() -> None:
    """What a server may need, whatever its options."""
    import mqfs

    for room in ("server", "engine", "store", "ninep", "http", "fq", "fuse", "ring"):
        package = importlib.import_module(f"mqfs.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"mqfs.{room}."):
            importlib.import_module(module.name)
    assert mqfs


if __name__ == "__main__":
    import_all()
    serve(socket.socket(fileno=int(sys.argv[1])))
