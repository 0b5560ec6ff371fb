"""Standard input, output and error that are closed, or cannot be read or written: one line, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import SERVE, Ready, Server, short_folder
from tests.support.server import environment as server_environment
from tests.support.tools import MODULES, environment, mq_cat, pin, say

CLOSED = {0: "<&-", 1: ">&-", 2: "2>&-"}


def shell(redirection: str, name: str, *arguments: object, **more: Any) -> Any:
    """Run a tool with a redirection of the shell."""
    command = [sys.executable, "-m", MODULES.get(name, name), *map(str, arguments)]
    settings: dict[str, Any] = {"cwd": ROOT, "env": environment(), "stdin": subprocess.DEVNULL, "timeout": HANG_S}
    return subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *command], capture_output=True, **settings)


def error_of(name: str, result: Any) -> str:
    """The one line on standard error, without the program's name."""
    line = str(result.stderr.decode())
    assert (line.count("\n"), line.partition(": ")[0]) == (1, name), line
    return line.partition(": ")[2][:-1]


@pytest.fixture
def group(server: Server, request: pytest.FixtureRequest) -> Path:
    """A group with three messages for a consumer; as its command the first would drop the others."""
    group = server.group(f"files {request.node.name.replace('/', ' ')}", "replay all", "consumer w s", streams=["s"])
    say(group / "s", "seek end\n", "second\n", "third\n")
    return group


def waiting(group: Path) -> int:
    return int(json.loads((group / ".stats").read_text())["consumers"]["w"]["waiting"])


OUTPUTS: dict[str, tuple[str, list[str]]] = {
    "ls": ("mq", ["ls", "{}"]),
    "stat": ("mq", ["stat", "{}"]),
    "peek": ("mq", ["peek", "{}/s"]),
    "ctl": ("mq", ["ctl", "{}"]),
    "put": ("mq", ["put", "-v", "{}/s", "fourth"]),
    "top": ("mq", ["top", "--interval", "10ms", "{}"]),
    "schedules": ("mq", ["schedule", "ls", "{}"]),
    "completion": ("mq", ["completion", "bash"]),
    "messages": ("mq-cat", ["-e", "{}"]),
    "order": ("mq-cat", ["-e", "--order", "{}"]),
    "claimed": ("mq-cat", ["-e", "--consumer", "w", "{}"]),
    "claimed records": ("mq-cat", ["-e", "-f", "record", "--consumer", "w", "{}"]),
}


@pytest.mark.parametrize(("redirection", "text"), [(">&-", "bad file descriptor"), (">/dev/full", "no space left")])
@pytest.mark.parametrize("output", OUTPUTS)
def test_output_that_cannot_be_written(group: Path, output: str, redirection: str, text: str) -> None:
    name, words = OUTPUTS[output]
    result = shell(redirection, name, *(word.format(group) for word in words))
    assert error_of(name, result).startswith(f"standard output: {text}")
    assert result.returncode == 1
    assert waiting(group) == 3 + (output == "put")


INPUTS: dict[str, tuple[str, list[str]]] = {
    "body": ("mq", ["put", "{}/s"]),
    "lines": ("mq", ["put", "-l", "{}/s"]),
    "settings": ("mq", ["ctl", "{}", "-"]),
}


@pytest.mark.parametrize("redirection", ["<&-", "0>/dev/null"])
@pytest.mark.parametrize("reads", INPUTS)
def test_input_that_cannot_be_read(group: Path, reads: str, redirection: str) -> None:
    name, words = INPUTS[reads]
    result = shell(redirection, name, *(word.format(group) for word in words))
    assert (error_of(name, result), result.returncode) == ("standard input: bad file descriptor", 1)
    assert waiting(group) == 3


@pytest.mark.parametrize("reads", INPUTS)
def test_input_that_has_no_end(group: Path, reads: str) -> None:
    name, words = INPUTS[reads]
    command = [sys.executable, "-m", MODULES[name], *(word.format(group) for word in words)]
    line = 'ulimit -v 1000000; exec "$@" </dev/zero'
    result = subprocess.run(
        ["sh", "-c", line, "sh", *command], cwd=ROOT, env=environment(), capture_output=True, timeout=HANG_S
    )
    assert "(expected at most 1044480 with a mount)" in error_of(name, result)
    assert (result.returncode, waiting(group)) == (1, 3)


@pytest.mark.parametrize("flag", ["-w", "-a"])
def test_input_of_a_session_that_cannot_be_read(server: Server, flag: str) -> None:
    id = f"no-input{flag}"
    assert pin("-c", "-m", server.path, id, "cat").returncode == 0
    result = shell("<&-", "pin", flag, "-m", server.path, id)
    assert (error_of("pin", result), result.returncode) == ("standard input: bad file descriptor", 1)
    assert mq_cat("-e", "--from", "first", server.path / id, "in").stdout == b""
    subprocess.run(["rm", "-r", str(server.path / id)], check=True)  # ends its host


@pytest.mark.parametrize("fd", CLOSED)
def test_a_session_made_with_a_file_closed(server: Server, fd: int) -> None:
    result = shell(CLOSED[fd], "pin", "-c", "-m", server.path, f"closed-{fd}", "sh", "-c", "tty; echo $?")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    shown = pin("-a", "-m", server.path, f"closed-{fd}", stdin=subprocess.DEVNULL).stdout
    assert shown.endswith(b"\r\n0\r\n")


@pytest.mark.parametrize("fd", CLOSED)
def test_commands_of_a_worker_with_a_file_closed(group: Path, fd: int) -> None:
    """No command has a file of the tree as its standard output or error."""
    command = "for fd in 1 2; do readlink /proc/self/fd/$fd; done >>" + f"'{group}/s'"
    result = shell(CLOSED[fd], "mq-work", "-n", 3, group / ".consumers" / "w", "--", "sh", "-c", f"true; {command}")
    assert (result.returncode, result.stderr) == (0, b"")
    rows = [json.loads(row)["body"] for row in mq_cat("-e", "--json", "--from", "first", group).stdout.splitlines()]
    assert len(rows) > 3
    assert not [row for row in rows[3:] if ".consumers" in row]


@pytest.mark.parametrize("fd", CLOSED)
def test_a_server_with_a_file_closed(fd: int) -> None:
    with short_folder() as folder:
        ready = Ready(folder)
        command = ["sh", "-c", f'exec "$@" {CLOSED[fd]}', "sh", *SERVE, "--listen", f"unix!{folder}/socket"]
        env = server_environment(NOTIFY_SOCKET=ready.address)
        log = folder / "log"
        with log.open("wb") as out, subprocess.Popen(command, stdin=out, stdout=out, stderr=out, env=env) as process:
            try:
                while (said := ready.next()) != "READY=1":
                    assert process.poll() is None, (process.returncode, log.read_text(), said)
                assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == os.devnull
                process.send_signal(signal.SIGTERM)
                assert process.wait(HANG_S) == 0
            finally:
                process.kill()
                ready.close()
