"""Pythons that do not have the package, and the package as it goes along with a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

NEEDED = ("attr", "attrs", "google_crc32c", "google_crc32c.libs", "numpy", "numpy.libs", "pyarrow", "pyarrow.libs")
OURS = ("mqfs", "pyspark_mqfs")


def python(folder: Path, *, ours: bool = False) -> Path:
    """A Python of its own with what the package needs; `ours`: and with the package."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True, stdin=subprocess.DEVNULL)
    (packages,) = folder.glob("lib/python*/site-packages")
    import numpy

    theirs = Path(numpy.__file__).parent.parent
    for path in [*(theirs / name for name in NEEDED), *(ROOT / name for name in OURS if ours)]:
        if path.exists():
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


def zipped(folder: Path) -> Path:
    """The package in a zip."""
    made = folder / "mqfs.zip"
    subprocess.run([sys.executable, "-m", "zipfile", "-c", str(made), *OURS], cwd=ROOT, check=True)
    return made


__all__ = ["python", "zipped"]
