"""The part in C: all else is in pyproject.toml. Without a compiler the rest is installed, and the ring says so."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

ring = Path("mqfs/ring")
sources = sorted([*ring.glob("*.c"), *ring.glob("*.h")])
source = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
native = Extension(
    "mqfs.ring._native",
    ["mqfs/ring/_native.c"],
    depends=[str(path) for path in sources],
    # One file for this Python and all later ones; and from which source it was built, for a test.
    define_macros=[("Py_LIMITED_API", "0x030B0000"), ("RING_SOURCE", f'"{source}"')],
    extra_compile_args=["-std=c11", "-O2"],
    py_limited_api=True,
    optional=True,
)
setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp311"}})
