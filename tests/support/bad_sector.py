"""A file on a disk with a bad sector, in a mount of its own. Needs root.

python -m tests.support.bad_sector MOUNTPOINT SOURCE GOOD

The mount has one file, `file`, with the bytes of SOURCE. Reads after its first GOOD bytes, a multiple of the page, fail
with EIO.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.power import run, unmount
from tests.support.server import environment


@contextlib.contextmanager
def bad_sector(path: Path, good: int, folder: Path) -> Iterator[None]:
    """Make a file unreadable after its first `good` bytes, within the block. `folder`: an empty one for the mount."""
    source, at = folder / "source", folder / "mount"
    source.write_bytes(path.read_bytes())
    at.mkdir()
    command = [sys.executable, "-m", "tests.support.bad_sector", str(at), str(source), str(good)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            run("mount", "--bind", at / "file", path)
            try:
                yield
            finally:
                unmount(path)
        finally:
            unmount(at)
            process.wait(HANG_S)


def serve(at: str, data: bytes, good: int) -> None:
    import pyfuse3
    import trio

    class BadSector(pyfuse3.Operations):
        async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
            if name != b"file":
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(2)

        async def getattr(self, inode: int, ctx: Any = None) -> Any:
            entry = pyfuse3.EntryAttributes()
            entry.st_ino, entry.st_nlink = inode, 1
            entry.st_mode, entry.st_size = (0o40700, 0) if inode == 1 else (0o100600, len(data))
            entry.entry_timeout = entry.attr_timeout = 3_600
            return entry

        async def open(self, inode: int, flags: int, ctx: Any) -> Any:
            return pyfuse3.FileInfo(fh=inode)

        async def read(self, fh: int, offset: int, size: int) -> bytes:
            if offset + size > good:  # after a failed readahead the kernel reads the pages one by one
                raise pyfuse3.FUSEError(errno.EIO)
            return data[offset : offset + size]

    pyfuse3.init(BadSector(), at, set(pyfuse3.default_options) | {"fsname=bad-sector"})
    try:
        print("ready", flush=True)
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]).read_bytes(), int(sys.argv[3]))
