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
MQFS = ROOT / "mqfs"
NATIVE = [MQFS / "records", MQFS / "ring"]  # each with an extension in C


def compiler(*arguments: str | Path) -> None:
    done = subprocess.run([os.environ.get("CC", "cc"), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def sources(folder: Path) -> list[Path]:
    """Those of the extension of a package."""
    return sorted({*folder.glob("*.c"), folder.parent / "records" / "crc32c.c"})


def module(folder: Path, *flags: str) -> Path:
    """Compile the C of `folder` there."""
    made = folder / "_native.abi3.so"
    include = sysconfig.get_paths()["include"]
    compiler("-std=c11", "-O1", "-fPIC", "-shared", LIMITED, f"-I{include}", *flags, *sources(folder), "-o", made)
    return made


def driver(made: Path, *flags: str) -> Path:
    """Compile the C driver of the ring's core."""
    core, crc = MQFS / "ring" / "core.c", MQFS / "records" / "crc32c.c"
    compiler("-std=c11", "-g", *flags, f"-I{core.parent}", HERE / "driver.c", core, crc, "-o", made, "-pthread")
    return made


def found(library: str) -> str:
    """The path of one of the compiler's own libraries."""
    command = [os.environ.get("CC", "cc"), f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
