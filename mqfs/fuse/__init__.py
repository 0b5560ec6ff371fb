"""The FUSE front end: the tree as a mounted file system.

The server uses `FuseMount` of mount.py only. device_loop.py answers reads and writes on the device, handlers.py all
other requests. device.py has the waiting requests, backend.py the tree and the kernel's numbers of files, protocol.py
the structs. pyfuse3 agrees with the kernel on the protocol.

Without pyfuse3, or the library that it needs, its import raises MountError.
"""

from mqfs.errors import MountError

try:
    import pyfuse3  # noqa: F401
except ImportError as error:
    needed = "gcc, pkg-config, python3-dev and libfuse3-dev installed, then pip install 'pyfuse3>=3.5'"
    raise MountError(f"cannot mount: {error} (expected {needed})") from None
