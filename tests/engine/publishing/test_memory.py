"""Memory of requests is kept for the next ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import resource, sys
import pytest

from mqfs.serving import memory
if sys.argv[1] == "keep":
    memory.keep()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    held = [bytes([1]) * (1 << 18) for _ in range(4)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str) -> int:
    """Pages that a hundred times a megabyte cost."""
    return int(subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, check=True).stdout)


def test_what_is_let_go_of_is_taken_again() -> None:
    assert faults("keep") * 4 < faults("no")
