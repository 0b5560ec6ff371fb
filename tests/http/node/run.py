"""Programs of Node in this folder, with the packages that script/setup installs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import environment

PACKAGES = ROOT / ".cache" / "node-tests" / "node_modules"


@contextmanager
def node(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One that runs until it is killed."""
    process = subprocess.Popen(
        ["node", str(Path(__file__).parent / program), *arguments],
        env=environment(PACKAGES=str(PACKAGES)),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)
        assert process.stdout is not None
        process.stdout.close()


class Events:
    """What a program prints: an object a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.lines = process.stdout
        self.errors: list[dict[str, str]] = []

    def next(self) -> dict[str, str]:
        line = self.lines.readline()
        assert line, "the program ended"
        return dict(json.loads(line))

    def message(self) -> dict[str, str]:
        """The next message; errors before it are kept."""
        while (event := self.next())["type"] != "message":
            self.errors.append(event)
        return event
