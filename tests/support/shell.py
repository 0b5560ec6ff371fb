"""An interactive bash that a test types into, as the reader of a page would.

It has the terminal and the prompt. The lines to type and their expected output are in the tests.
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
JOB = re.compile(r"\[\d+\]")  # what an interactive shell tells of its jobs


class Shell:
    """A shell, as far as it can be seen from the outside."""

    def __init__(self, folder: Path, path: str = "/usr/bin:/bin", *, inside: Sequence[str] = (), **more: str) -> None:
        """`inside`: the command that runs bash, for one in a network of its own."""
        known = {"PATH": path, "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8", "SHELL": "/bin/bash"}
        # A page says nothing of partitions, and Spark would shuffle its few rows by 200 tasks.
        known["SPARK_SUBMIT_OPTS"] = f"{SHORT_LIVED} -Dspark.sql.shuffle.partitions=2"
        known["SPARK_LOCAL_IP"] = "127.0.0.1"  # else Spark looks for the address of the machine by its name
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
        self.code = 0  # of what was typed last
        self.said: list[str] = []
        self.prompt()

    def begin(self, line: str) -> None:
        """Type a line, and do not wait for its end."""
        self.terminal.sendline(line)

    def prompted(self, seconds: float = HANG_S) -> bool:
        """Has the prompt come within that time? Then `said` are the lines that came before it."""
        if self.terminal.expect([PROMPT, pexpect.TIMEOUT], timeout=seconds) != 0:
            return False
        self.code = int(self.terminal.match[1])
        rows = self.terminal.before.replace("\r", "").split("\n")
        self.said = [row for row in rows if row and not JOB.match(row)]
        return True

    def prompt(self) -> list[str]:
        """Wait for the prompt; the lines that came before it."""
        assert self.prompted(), f"no prompt within {HANG_S} s, but: {self.terminal.before!r}"
        return self.said

    def type(self, line: str) -> list[str]:
        """Type a line that ends by itself; what it shows."""
        self.begin(line)
        return self.prompt()

    def shows(self, *wanted: str, prompt: bool = False) -> None:
        """Wait until these lines have come, and the prompt if it is asked for; nothing else does until then."""
        shown: list[str] = []
        while len(shown) < len(wanted) or prompt:
            if self.terminal.expect([PROMPT, "\r\n"]) == 0:
                self.code, prompt = int(self.terminal.match[1]), False
            line = self.terminal.before.strip("\r")
            if line and not JOB.match(line):
                shown.append(line)
        assert shown == list(wanted)

    def end(self) -> None:
        """Hang up; also on a server that runs here because a test failed, and does not mind."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getsid(int(process.name)) == self.terminal.pid != int(process.name):
                    os.kill(int(process.name), signal.SIGKILL)
        self.terminal.close(force=True)

    def raw(self) -> bool:
        """Does what runs now take every key itself?"""
        return not termios.tcgetattr(self.terminal.child_fd)[3] & termios.ISIG

    def interrupt(self) -> list[str]:
        """Ctrl-C, and wait for the prompt."""
        self.terminal.sendintr()
        return self.prompt()


@contextmanager
def shell(folder: Path, path: str = "/usr/bin:/bin", *, inside: Sequence[str] = (), **more: str) -> Iterator[Shell]:
    """For as long as the block runs."""
    it = Shell(folder, path, inside=inside, **more)
    try:
        yield it
    finally:
        it.end()
