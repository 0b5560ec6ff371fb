"""The C compiler, as the tests use it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from tests.support import ROOT

STRICT = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
LIMITED = "-DPy_LIMITED_API=0x030B0000"
HERE = Path(__file__).resolve().parent
RING = ROOT / "mqfs" / "ring"


def compiler(*arguments: str | Path) -> None:
    done = subprocess.run([os.environ.get("CC", "cc"), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def module(folder: Path, *flags: str) -> Path:
    """Compile the C of `folder` there."""
    made = folder / "_native.abi3.so"
    include = sysconfig.get_paths()["include"]
    compiler("-std=c11", "-O1", "-fPIC", "-shared", LIMITED, f"-I{include}", *flags, *folder.glob("*.c"), "-o", made)
    return made


def driver(made: Path, *flags: str) -> Path:
    """Compile the C driver of the ring's core."""
    compiler("-std=c11", "-g", *flags, f"-I{RING}", HERE / "driver.c", "-o", made, "-pthread")
    return made


def found(library: str) -> str:
    """The path of one of the compiler's own libraries."""
    command = [os.environ.get("CC", "cc"), f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
