"""An interactive bash that a test types into, as a reader of a page does.

This module handles the terminal and the prompt. The tests have the lines to type and their expected output.
"""

from __future__ import annotations

import os
import re
import signal
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pexpect

from tests.support.eventually import HANG_S
from tests.support.java import SHORT_LIVED

PROMPT = r"<<(\d+)>>"
JOB = re.compile(r"\[\d+\]")  # reports of an interactive shell about its jobs


class Shell:
    """A shell, seen from its terminal."""

    def __init__(self, folder: Path, path: str = "/usr/bin:/bin", *, inside: Sequence[str] = (), **more: str) -> None:
        """Start the shell. `inside`: the command that runs bash in a network namespace."""
        known = {"PATH": path, "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8", "SHELL": "/bin/bash"}
        # Pages set no number of partitions, and Spark would shuffle their few rows in 200 tasks.
        known["SPARK_SUBMIT_OPTS"] = f"{SHORT_LIVED} -Dspark.sql.shuffle.partitions=2"
        known["SPARK_LOCAL_IP"] = "127.0.0.1"  # else Spark resolves the name of the machine
        program, *words = [*inside, "bash", "--norc", "--noprofile", "--noediting"]
        self.terminal = pexpect.spawn(
            program,
            words,
            cwd=str(folder),
            env={**known, "PS1": "<<$?>>", "PS2": "", **more},
            echo=False,
            encoding="utf-8",
            timeout=HANG_S,
            use_poll=True,
        )
        self.terminal.delaybeforesend = None
        self.code = 0  # exit code of the last command
        self.said: list[str] = []
        self.prompt()

    def begin(self, line: str) -> None:
        """Type a line, and do not wait for its end."""
        self.terminal.sendline(line)

    def prompted(self, seconds: float = HANG_S) -> bool:
        """Whether the prompt appears within that time. Then `said` has the lines before it."""
        if self.terminal.expect([PROMPT, pexpect.TIMEOUT], timeout=seconds) != 0:
            return False
        self.code = int(self.terminal.match[1])
        rows = self.terminal.before.replace("\r", "").split("\n")
        self.said = [row for row in rows if row and not JOB.match(row)]
        return True

    def prompt(self) -> list[str]:
        """Wait for the prompt, and return the lines before it."""
        assert self.prompted(), f"no prompt within {HANG_S} s, but: {self.terminal.before!r}"
        return self.said

    def type(self, line: str) -> list[str]:
        """Type a command that ends by itself, and return its output."""
        self.begin(line)
        return self.prompt()

    def shows(self, *wanted: str, prompt: bool = False) -> None:
        """Wait for these lines and, with `prompt`, for the prompt. Asserts that there are no other lines until then."""
        shown: list[str] = []
        while len(shown) < len(wanted) or prompt:
            if self.terminal.expect([PROMPT, "\r\n"]) == 0:
                self.code, prompt = int(self.terminal.match[1]), False
            line = self.terminal.before.strip("\r")
            if line and not JOB.match(line):
                shown.append(line)
        assert shown == list(wanted)

    def end(self) -> None:
        """Hang up. Kill all other processes of the session: a server that a failed test left ignores the hangup."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(process.name)) == self.terminal.pid != int(process.name):
                    os.kill(int(process.name), signal.SIGKILL)
        self.terminal.close(force=True)

    def raw(self) -> bool:
        """Whether the running program reads every key itself."""
        return not termios.tcgetattr(self.terminal.child_fd)[3] & termios.ISIG

    def interrupt(self) -> list[str]:
        """Type Ctrl-C, and wait for the prompt."""
        self.terminal.sendintr()
        return self.prompt()


def hang_up(terminal: pexpect.spawn) -> None:
    """Close the terminal of a program. `os.close` of its number would have pexpect close that again later, when another
    file may have it; `terminal.close` would send signals."""
    terminal.ptyproc.fileobj.close()


@contextmanager
def shell(folder: Path, path: str = "/usr/bin:/bin", *, inside: Sequence[str] = (), **more: str) -> Iterator[Shell]:
    """Run a shell for the block."""
    it = Shell(folder, path, inside=inside, **more)
    try:
        yield it
    finally:
        it.end()
