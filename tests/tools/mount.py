"""A real server with a real mount, and the tools run against it as a user runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.anyone import python_for_anyone

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
MODULES = {"mq": "mq_tools.mq", "mq-cat": "mq_cat", "mq-work": "mq_tools.work", "pin": "mq_tools.pin"}


def until(true: Callable[[], Any], what: str = "it", seconds: float = DEADLINE_S) -> Any:
    """Look again and again until `true()` is; the value. Fails at the deadline."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.005)
    return value


def environment(**more: str) -> dict[str, str]:
    """As a user's shell with the tools in its PATH has it; mq-cat and pin are scripts in tests/tools/bin."""
    env = {key: value for key, value in os.environ.items() if key not in ("MQFS", "PIN", "PIN_DETACH")}
    env |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "TERM": "dumb", "SHELL": "/bin/sh", "PS1": "$ "}
    env["PATH"] = f"{ROOT / 'tests/tools/bin'}:{env['PATH']}"
    return env | more


class Server:
    """`mqfs serve --store STORE --mount MOUNT` as a process."""

    def __init__(self, folder: Path) -> None:
        self.store, self.mount = folder / "store", folder / "mq"
        self.mount.mkdir()
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mqfs", "serve", "--foreground"]
        command += ["--store", str(self.store), "--mount", str(self.mount)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, env=environment())
        until(self._serves, "the mount")

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        return os.path.lexists(self.mount / ".cursor")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal. After SIGKILL the dead mount stays, as it does for a user."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(DEADLINE_S)
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.stop()
        subprocess.run(["umount", "-l", str(self.mount)], stderr=subprocess.DEVNULL, check=False)
        text = self.log.read_text()
        assert "Traceback" not in text, text

    def group(self, name: str, *ctl: str, streams: Sequence[str] = ()) -> Path:
        """A new group with those settings and streams."""
        path = self.mount / name
        path.mkdir()
        if ctl:
            (path / "ctl").write_text("".join(f"{line}\n" for line in ctl))
        for stream in streams:
            (path / stream).touch()
        return path


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """A new folder that other users may enter (pytest's own they may not)."""
    with tempfile.TemporaryDirectory(prefix="mqfs-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server for as long as the block runs."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse here that we may open: nothing can be mounted")
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()


def say(stream: Path, *bodies: str | bytes) -> None:
    """One message for each body."""
    fd = os.open(stream, os.O_WRONLY)
    try:
        for body in bodies:
            os.write(fd, body.encode() if isinstance(body, str) else body)
    finally:
        os.close(fd)


def tool(name: str, *arguments: object, env: Mapping[str, str] | None = None, **more: Any) -> Any:
    """Run a tool to its end."""
    command, more = _command(name, arguments, more)
    settings: dict[str, Any] = {"capture_output": True, "timeout": DEADLINE_S, "check": False, "cwd": ROOT}
    settings["env"] = environment(**(env or {}))
    return subprocess.run(command, **(settings | more))


def _command(name: str, arguments: Sequence[object], more: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """How to run a tool. With `user` in `more`, by a Python that this user may run."""
    words = ["-m", MODULES[name], *map(str, arguments)]
    if "user" not in more:
        return [sys.executable, *words], more
    python, packages = python_for_anyone()
    return [python, *words], more | {"env": environment(PYTHONPATH=packages)}


def mq_cat(*arguments: object, **more: Any) -> Any:
    return tool("mq-cat", *arguments, **more)


def mq(*arguments: object, **more: Any) -> Any:
    return tool("mq", *arguments, **more)


def mq_work(*arguments: object, **more: Any) -> Any:
    return tool("mq-work", *arguments, **more)


def pin(*arguments: object, **more: Any) -> Any:
    return tool("pin", *arguments, **more)


@contextmanager
def running(name: str, *arguments: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A tool while it runs; it is killed at the end if it still does."""
    command, more = _command(name, arguments, more)
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "bufsize": 0}
    settings["env"] = environment()
    process = subprocess.Popen(command, **(settings | more))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def lines(pipe: IO[bytes] | None, count: int) -> list[bytes]:
    """The next lines of an unbuffered pipe."""
    assert pipe is not None
    return [pipe.readline() for _ in range(count)]


def opened(group: Path, file: str, count: int = 1) -> Callable[[], bool]:
    """Whether that many handles are open on a file of the group."""

    def look() -> bool:
        rows = (group / ".who").read_text().splitlines()
        return sum(f'"file": "{file}"' in row for row in rows) >= count

    return look
