"""A clone of the project in which script/run serves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.typed import Served
from tests.support.clone import clone, installed
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import mounted, unmount


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder, port = installed(clone(tmp_path / "mqfs")), free_port()
    process = subprocess.Popen(
        [folder / "script" / "run"],
        cwd=tmp_path,
        env={**os.environ, "MQFS_PORT": str(port)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: mounted(folder / "mq"), "a mount")
        yield Served(folder, port)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        unmount(folder / "mq")
