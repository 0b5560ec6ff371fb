"""A clone of the project in which script/run serves."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.clone import clone, installed
from tests.server.process import mounted, unmount, until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    folder = installed(clone(tmp_path / "mqfs"))
    process = subprocess.Popen(
        [folder / "script" / "run"], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: mounted(folder / "mq"), "a mount", 60)
        yield folder
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        unmount(folder / "mq")
