"""Tests of this folder once more, over the mount of a server in another process: see tests/fuse/served_elsewhere.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import environment

pytestmark = pytest.mark.process
# Its mount ends with the one process that such a server has.
NOT_THERE = "tests/fuse/test_interrupts.py::test_a_killed_server_frees_its_readers_and_the_next_one_cleans_up"


@pytest.mark.parametrize("names", [("queues",), ("interrupts", "locks", "shared_locks")], ids=" ".join)
def test_over_a_server_elsewhere(names: tuple[str, ...]) -> None:
    files = [f"tests/fuse/test_{name}.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files, f"--deselect={NOT_THERE}"],
        cwd=ROOT, env=environment(MQFS_TEST_MOUNT="tests.fuse.served_elsewhere"), capture_output=True, text=True,
        timeout=2 * HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5_000:]
