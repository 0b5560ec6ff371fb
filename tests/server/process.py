"""`mqfs serve` as a real process, for tests: started, waited for until it is ready, ended, killed, cleaned up after."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.patience import HANG_S, patient

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "mqfs"]
START_S = STOP_S = patient(60.0)


def environment(**more: str) -> dict[str, str]:
    """Ours, with the sources found from any directory."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until `true()`, or fail."""
    deadline = time.monotonic() + patient(seconds)
    while not true():
        assert time.monotonic() < deadline, f"after {patient(seconds)} s still not: {what}"
        time.sleep(0.01)


def mqfs(*arguments: str, cwd: Path, timeout: float = HANG_S, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command that is to end by itself; standard input is empty."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(timeout),
    )


class Ready:
    """A NOTIFY_SOCKET."""

    def __init__(self, folder: Path, *, abstract: bool = False) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = f"@mqfs-test-{os.getpid()}-{id(self)}" if abstract else str(folder / f".notify-{id(self):x}")
        self.socket.bind("\0" + self.address[1:] if abstract else self.address)
        self.socket.settimeout(0.05)

    def next(self) -> str | None:
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None

    def close(self) -> None:
        self.socket.close()
        if not self.address.startswith("@"):
            os.unlink(self.address)


class Running:
    """A server that is ready. Its standard error is in `log`."""

    def __init__(self, *arguments: str, cwd: Path, program: list[str] | None = None, **more: str) -> None:
        self.log = cwd / "server.log"
        ready = Ready(cwd)
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [*(program or [*COMMAND, "serve"]), *arguments],
                    cwd=cwd,
                    env=environment(NOTIFY_SOCKET=ready.address, **more),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            deadline = time.monotonic() + START_S
            while ready.next() != "READY=1":
                assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
                if time.monotonic() > deadline:
                    self.process.kill()
                    raise AssertionError(f"not ready after {START_S} s: {self.text()}")
        finally:
            ready.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)


@contextlib.contextmanager
def serving(*arguments: str, cwd: Path, mount: Path | None = None, **more: str) -> Iterator[Running]:
    """A server for the time of a `with`, whatever becomes of it there."""
    server = Running(*arguments, *([] if mount is None else ["--mount", str(mount)]), cwd=cwd, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        if mount is not None:
            unmount(mount)
    assert "Traceback" not in server.text(), server.text()


def mounted(path: Path) -> bool:
    """Is something mounted there, be it dead or alive?"""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return any(line.split()[4].replace("\\040", " ") == str(path.absolute()) for line in file)


def unmount(path: Path) -> None:
    """Clean up after a server that was killed."""
    while mounted(path):
        command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, str(path)], check=True, capture_output=True)
