"""The part in C: all else is in pyproject.toml. Without a compiler the rest is installed, and the ring says so."""

from setuptools import Extension, setup

native = Extension(
    "mqfs.ring._native",
    ["mqfs/ring/_native.c"],
    depends=["mqfs/ring/core.h", "mqfs/ring/crc32c.h", "mqfs/ring/ring.h"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one file for this Python and all later ones
    extra_compile_args=["-std=c11", "-O2"],
    py_limited_api=True,
    optional=True,
)
setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp311"}})
