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
from pathlib import Path

from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, unmount

libc = ctypes.CDLL(None, use_errno=True)


def calls(pid: int, number: int) -> bool:
    """Whether the process sleeps in that system call."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] == str(number)
    except OSError:
        return False


READ, WRITE, FCNTL, FLOCK = 0, 1, 72, 73  # of x86-64


class Served:
    """A mount at `path`; its server is killed when a test hangs, which frees all who hang on it."""

    def __init__(self, path: Path, store: Path | None = None, command: list[str] | None = None) -> None:
        self.path = path
        with contextlib.suppress(OSError):  # it is there, perhaps under a dead mount
            path.mkdir()
        module = os.environ.get("MQFS_TEST_MOUNT", "tests.fuse.served")
        words = command or [sys.executable, "-m", module, str(path), *([str(store)] if store else [])]
        self.server = Server(cwd=path.parent, program=words)
        self.process = self.server.process
        self.guard = threading.Timer(HANG_S, self.process.kill)
        self.guard.start()

    def sizes(self) -> dict[str, int]:
        file = self.path.with_suffix(".sizes")
        file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        eventually(file.exists, "the sizes of its tables")
        found: dict[str, int] = json.loads(file.read_text())
        return found

    def stop(self) -> int:
        """As an operator stops it; its exit code."""
        try:
            return self.server.stop()
        finally:
            self.close()

    def close(self) -> None:
        """Whatever the test did: no process, no mount."""
        self.guard.cancel()
        self.server.close()
        unmount(self.path)

    def complaints(self) -> str:
        """What the server logged that it should not have."""
        return self.server.text()


# Call with alarms until the call has ended: on a busy machine the first may come before it has begun.
ALARMED = """
def alarmed(call, *arguments):
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        return call(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


class Child:
    """A python program with `mq`, a path, and `alarmed`, that prints lines; for what must be another process."""

    def __init__(self, mq: Path, program: str, *words: str) -> None:
        head = f"import os, sys, fcntl, signal, time, select, errno\nmq = {str(mq)!r}\n{ALARMED}"
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
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
