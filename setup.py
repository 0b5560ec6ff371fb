"""The parts in C, each the `*.c` of its package: all else is in pyproject.toml. Without a compiler the rest is
installed: the ring says so, and what the codec does is done in Python."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup


def native(folder: Path) -> Extension:
    sources = sorted({*folder.glob("*.[ch]"), *Path("mqfs/log").glob("*.h")})
    source = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return Extension(
        f"mqfs.{folder.name}._native",
        sorted(map(str, folder.glob("*.c"))),
        depends=[str(path) for path in sources],
        # One file for this Python and all later ones; and from which source it was built, for a test.
        define_macros=[("Py_LIMITED_API", "0x030B0000"), ("SOURCE", f'"{source}"')],
        extra_compile_args=["-std=c11", "-O2"],
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[native(path.parent) for path in sorted(Path("mqfs").glob("*/_native.c"))],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
