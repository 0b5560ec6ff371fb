"""The modules in C as Python uses them, built with gcc's address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ring.memory import build
from tests.support import ROOT
from tests.support.anyone import OURS
from tests.support.campaign import seed, whole

pytestmark = [pytest.mark.process, pytest.mark.slow]

SHORT = ["tests/records"]
LONG = [
    "tests/records", "tests/ring/memory", "tests/ring/server/test_full.py", "tests/ring/server/test_nonsense.py",
    "tests/ring/server/test_hostile_memory.py",
]  # fmt: skip
OF_BUILDS = ["tests/ring/memory/test_build.py", "tests/ring/memory/test_sanitizers.py"]


FUZZED_S = 600 if whole() else 0.5  # each function


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with its C built with sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    for name in OURS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    for native in build.NATIVE:
        build.module(folder / "mqfs" / native.name, *flags)
    return folder


def run(folder: Path, *arguments: str) -> None:
    """Run Python on the copy."""
    libraries = [build.found(f"lib{name}.so") for name in ("asan", "ubsan")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python itself leaves much behind
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object by itself, so that what is read beyond its end is seen
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MQFS_TEST_PATIENCE": "10",
        "PYTEST_TIMEOUT": "1800",
        "MQFS_SOAK": "0",  # a part: all is some times slower
    }
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8_000:]
    assert "AddressSanitizer" not in said, said[-8_000:]
    assert "runtime error" not in said, said[-8_000:]


@pytest.mark.timeout(3_600)
def test_under_sanitizers(sanitized: Path) -> None:
    chosen = LONG if whole() else SHORT
    run(sanitized, "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"--ignore={name}" for name in OF_BUILDS), *chosen)


@pytest.mark.timeout(3 * 3_600)
def test_every_function_on_generated_input(sanitized: Path) -> None:
    """A failure names its seed; MQFS_SEED begins elsewhere."""
    run(sanitized, "tests.records.fuzz", str(FUZZED_S), str(1_000_000 * seed()))
