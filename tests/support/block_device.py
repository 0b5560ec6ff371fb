"""A disk whose power can be cut: the file `disk` in a mount of its own, to be used by a loop device.

python -m tests.support.block_device MOUNTPOINT DURABLE BYTES

Writes before an fsync that has returned are in the file DURABLE. `cut SEED` on standard input cuts the power: a random
choice of the sectors written since the last fsync is written to DURABLE, too, and later calls fail. `on` restores the
power: the disk then has the content of DURABLE.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
from typing import Any

import pyfuse3
import trio

DISK = 2
SECTOR = 512


class BlockDevice(pyfuse3.Operations):
    def __init__(self, durable: str, size: int) -> None:
        super().__init__()
        self.size = size
        self.durable = os.open(durable, os.O_RDWR)
        self.cache = os.open(os.path.dirname(durable), os.O_TMPFILE | os.O_RDWR)
        self.pending: list[tuple[int, bytes]] = []
        self.on()

    def on(self) -> None:
        """Restore the power: fill the cache from the durable file; holes stay holes."""
        self.cut_off, at = False, 0
        self.pending.clear()
        os.truncate(self.cache, 0)
        os.truncate(self.cache, self.size)
        while True:
            try:
                at = os.lseek(self.durable, at, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(self.durable, at, os.SEEK_HOLE)
            while at < end:
                at += os.pwrite(self.cache, os.pread(self.durable, min(1 << 20, end - at), at), at)

    def cut(self, luck: random.Random) -> None:
        self.cut_off = True
        for offset, data in self.pending:
            kept = luck.choice([0.0, 0.5, 1.0])
            for at in range(0, len(data), SECTOR):
                if luck.random() < kept:
                    os.pwrite(self.durable, data[at : at + SECTOR], offset + at)
        self.pending.clear()

    def _alive(self) -> None:
        if self.cut_off:
            raise pyfuse3.FUSEError(errno.EIO)

    # ------------------------------------------------------------ the mount

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
        if name != b"disk":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(DISK)

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFREG | 0o600 if inode == DISK else stat.S_IFDIR | 0o700
        entry.st_size = self.size if inode == DISK else 0
        entry.st_nlink = 1
        entry.entry_timeout = entry.attr_timeout = 3_600
        return entry

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> Any:
        return await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        return pyfuse3.FileInfo(fh=DISK, keep_cache=False)  # data lost by a cut must not be read from the page cache

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return os.pread(self.cache, size, offset)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        self._alive()
        os.pwrite(self.cache, data, offset)
        self.pending.append((offset, bytes(data)))
        return len(data)

    async def fsync(self, fh: int, datasync: bool) -> None:
        self._alive()
        for offset, data in self.pending:
            os.pwrite(self.durable, data, offset)
        self.pending.clear()


async def serve(device: BlockDevice) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        print("ready", flush=True)
        async for line in trio.lowlevel.FdStream(os.dup(0)):
            what, *seed = line.decode().split()
            if what == "cut":
                device.cut(random.Random(int(seed[0])))
            else:
                device.on()
            print(what, flush=True)
        pyfuse3.terminate()


if __name__ == "__main__":
    disk = BlockDevice(sys.argv[2], int(sys.argv[3]))
    options = set(pyfuse3.default_options) | {"fsname=power"}
    pyfuse3.init(disk, sys.argv[1], options)
    try:
        trio.run(serve, disk)
    finally:
        pyfuse3.close(unmount=True)
