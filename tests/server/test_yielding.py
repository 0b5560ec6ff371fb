"""A client is let run after its answer, but not at the cost of every other one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.eventually import eventually
from tests.support.server import environment

pytestmark = pytest.mark.process

WORK = """
import os, sys
from mqfs.net.sockets import let_client_run
os.sched_setaffinity(0, {int(sys.argv[1])})
while let_client_run():
    pass
"""


def test_beside_busy_programs_it_yields_no_more() -> None:
    """They have the CPU for milliseconds then, and a client that asks waits as long."""
    cpu = max(os.sched_getaffinity(0))
    busy = [subprocess.Popen(["taskset", "-c", str(cpu), "sh", "-c", "while :; do :; done"]) for _ in range(2)]
    try:
        with subprocess.Popen([sys.executable, "-c", WORK, str(cpu)], env=environment()) as yielding:
            try:
                eventually(lambda: yielding.poll() is not None)
            finally:
                yielding.kill()
        assert yielding.returncode == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
