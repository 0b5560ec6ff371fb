"""A mounted tree in a process of its own, that no test can leave behind or hang on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 60.0

libc = ctypes.CDLL(None, use_errno=True)


def until(what: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until `what()` is true; its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def calls(pid: int, number: int) -> bool:
    """Whether the process sleeps in that system call."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] == str(number)
    except OSError:
        return False


READ, WRITE, FCNTL, FLOCK = 0, 1, 72, 73  # of x86-64


class Served:
    """A mount at `path`; its server is killed at the latest after PATIENCE_S, which frees all who hang on it."""

    def __init__(self, path: Path, store: Path | None = None, command: list[str] | None = None) -> None:
        self.path = path
        with contextlib.suppress(OSError):  # it is there, perhaps under a dead mount
            path.mkdir()
        words = command or [sys.executable, "-m", "tests.fuse.served", str(path), *([str(store)] if store else [])]
        self.log = path.with_suffix(".log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        self.guard = threading.Timer(PATIENCE_S, self.process.kill)
        self.guard.start()
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            self.close()
            raise AssertionError(self.log.read_text())

    def sizes(self) -> dict[str, int]:
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR1)
        found: dict[str, int] = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> int:
        """As an operator stops it; its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.close()

    def close(self) -> None:
        """Whatever the test did: no process, no mount."""
        self.guard.cancel()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if os.geteuid() == 0:
            libc.umount2(os.fsencode(self.path), 2)
        else:
            subprocess.run(["fusermount3", "-uqz", "--", self.path], check=False)

    def complaints(self) -> str:
        """What the server logged that it should not have."""
        return self.log.read_text()


class Child:
    """A python program with `mq`, a path, that prints lines; for what must be another process."""

    def __init__(self, mq: Path, program: str, *words: str) -> None:
        head = f"import os, sys, fcntl, signal, time, select, errno\nmq = {str(mq)!r}\n"
        self.process = subprocess.Popen(
            [*words, sys.executable, "-u", "-c", head + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self) -> None:
        """Let its next input() go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
