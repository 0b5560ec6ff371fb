"""The command-line tools, run as by a user against a mounted server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support import ROOT
from tests.support.anyone import python_for_anyone
from tests.support.server import NO_FUSE, Server, can_mount, run, start

NOT_OURS = {"MQFS", "PIN", "PIN_DETACH", "COLUMNS", "LINES"}  # the terminal of a test has its own size
MODULES = {"mq": "mq_tools.mq", "mq-cat": "mq_cat", "mq-work": "mq_tools.work", "pin": "mq_tools.pin"}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user with the tools in PATH; mq-cat and pin are scripts in tests/tools/bin."""
    env = {key: value for key, value in os.environ.items() if key not in NOT_OURS}
    env |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "TERM": "dumb", "SHELL": "/bin/sh", "PS1": "$ "}
    env["PATH"] = f"{ROOT / 'tests/tools/bin'}:{env['PATH']}"
    return env | more


@contextmanager
def tools_server(folder: Path) -> Iterator[Server]:
    """Run a mounted server for the block."""
    if not can_mount():
        pytest.skip(NO_FUSE)
    with Server.at(folder, mount=True) as server:
        yield server


def say(stream: Path, *bodies: str | bytes) -> None:
    """Write each body to a stream as a message."""
    fd = os.open(stream, os.O_WRONLY)
    try:
        for body in bodies:
            os.write(fd, body.encode() if isinstance(body, str) else body)
    finally:
        os.close(fd)


def tool(name: str, *arguments: object, env: Mapping[str, str] | None = None, **more: Any) -> Any:
    """Run a tool until it ends."""
    command, more = _command(name, arguments, more)
    settings: dict[str, Any] = {"cwd": ROOT, "env": environment(**(env or {}))}
    return run(command, **(settings | more))


def _command(name: str, arguments: Sequence[object], more: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the command and arguments for a tool. With `user` in `more`, that user may run the command's Python."""
    words = ["-m", MODULES[name], *map(str, arguments)]
    if "user" not in more:
        return [sys.executable, *words], more
    python, packages = python_for_anyone()
    return [python, *words], more | {"env": environment(PYTHONPATH=packages)}


mq, mq_cat, mq_work, pin = (partial(tool, name) for name in MODULES)


@contextmanager
def running(name: str, *arguments: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a tool for the block; it is killed at the end if it still runs."""
    command, more = _command(name, arguments, more)
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "bufsize": 0}
    settings["env"] = environment()
    process = start(command, **(settings | more))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def lines(pipe: IO[bytes] | None, count: int) -> list[bytes]:
    """Read the next `count` lines of an unbuffered pipe."""
    assert pipe is not None
    return [pipe.readline() for _ in range(count)]


def opened(group: Path, file: str, count: int = 1) -> Callable[[], bool]:
    """Return a function: whether at least `count` handles are open on a file of the group."""

    def look() -> bool:
        rows = (group / ".who").read_text().splitlines()
        return sum(f'"file": "{file}"' in row for row in rows) >= count

    return look
