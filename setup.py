"""The parts in C; all else is in pyproject.toml.

Without a compiler the rest is installed: the ring says so, and the codec is done in Python.
"""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, setup

SOURCES = {
    "records": ["_native.c", "batch.c", "columns.c", "crc32c.c", "frames.c", "messages.c", "postings.c", "ready.c"],
    "ring": ["module.c", "ring.c", "consumer.c", "scan.c", "core.c", "../records/crc32c.c"],
}


def native(package: str) -> Extension:
    folder, records = Path("mqfs", package), Path("mqfs/records")
    read = sorted({*folder.glob("*.[ch]"), *records.glob("*.h"), records / "crc32c.c"})
    return Extension(
        f"mqfs.{package}._native",
        [os.path.normpath(folder / name) for name in SOURCES[package]],
        depends=[str(path) for path in read],
        # One file for this Python and all later ones; and from which source it was built, for a test.
        define_macros=[
            ("Py_LIMITED_API", "0x030B0000"),
            ("SOURCE", f'"{hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()}"'),
        ],
        extra_compile_args=["-std=c11", "-O2"],
        py_limited_api=True,
        optional=True,
    )


setup(ext_modules=[native(package) for package in SOURCES], options={"bdist_wheel": {"py_limited_api": "cp311"}})
