"""The C extensions; all else is in pyproject.toml.

Without a compiler mqfs is installed without them: the codec then runs in Python, and the ring reports that it is
missing.
"""

import hashlib
import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

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
        # One file for this Python and all later versions. SOURCE is a digest of the source, for a test.
        define_macros=[
            ("Py_LIMITED_API", "0x030B0000"),
            ("SOURCE", f'"{hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()}"'),
        ],
        extra_compile_args=["-std=c11", "-O2", "-g0"],  # -g0: no names of folders, so that builds are identical
        py_limited_api=True,
        optional=True,
    )


class Everything(sdist):
    """The source archive: all files of git, also tests and documents."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        if Path(".git").exists():
            rest = subprocess.check_output(["git", "ls-files", "-z"], text=True).split("\0")
        else:  # in a source archive, or a copy of the files of git
            built = {"build", "mqfs.egg-info", base_dir}
            rest = [str(path) for path in Path().rglob("*") if path.parts[0] not in built]
        super().make_release_tree(base_dir, sorted({*files, *filter(os.path.isfile, rest)}))


setup(
    ext_modules=[native(package) for package in SOURCES],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"sdist": Everything},
)
