"""The part of the FUSE protocol that the device loop speaks itself: request numbers, flags, structs.

Numbers and layouts of linux/fuse.h, version 7; no behaviour. Everything is little-endian: FUSE has the byte order of
its machine, and this package is for little-endian ones.
"""

from __future__ import annotations

import struct

# Requests
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18
FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = 20, 25, 26, 27, 28, 29, 30
GETLK, SETLK, SETLKW, ACCESS, CREATE, INTERRUPT = 31, 32, 33, 34, 35, 36
POLL, BATCH_FORGET, FALLOCATE, RENAME2 = 40, 42, 43, 45

NAMES = {
    globals()[name]: name
    for name in (
        "LOOKUP", "FORGET", "GETATTR", "SETATTR", "READLINK", "SYMLINK", "MKNOD", "MKDIR", "UNLINK", "RMDIR", "RENAME",
        "LINK", "OPEN", "READ", "WRITE", "STATFS", "RELEASE", "FSYNC", "FLUSH", "INIT", "OPENDIR", "READDIR",
        "RELEASEDIR", "FSYNCDIR", "GETLK", "SETLK", "SETLKW", "ACCESS", "CREATE", "INTERRUPT", "POLL", "BATCH_FORGET",
        "FALLOCATE", "RENAME2",
    )
}  # fmt: skip

# Flags of INIT
POSIX_LOCKS, ATOMIC_O_TRUNC, BIG_WRITES = 1 << 1, 1 << 3, 1 << 5
SPLICES = 1 << 7 | 1 << 8 | 1 << 9
FLOCK_LOCKS, ASYNC_DIO, PARALLEL_DIROPS, HANDLE_KILLPRIV, MAX_PAGES = 1 << 10, 1 << 15, 1 << 18, 1 << 19, 1 << 22

FOPEN_DIRECT_IO, FOPEN_STREAM = 1 << 0, 1 << 4
READ_LOCKOWNER = 1 << 1  # of a READ: a process reads; else the kernel itself, to fill its pages
POLL_SCHEDULE_NOTIFY = 1 << 0
FALLOC_FL_KEEP_SIZE = 1 << 0
GETATTR_FH = 1 << 0
SET_MODE, SET_UID, SET_GID, SET_BY_FH = 1 << 0, 1 << 1, 1 << 2, 1 << 6  # of SETATTR: what to set; by an open file
RENAME_NOREPLACE = 1 << 0
LK_FLOCK = 1 << 0
RELEASE_FLOCK_UNLOCK = 1 << 1
NOTIFY_POLL = 1

# A request: its header, then its body. HOT is the header and the beginning of READ, WRITE, READDIR at once.
IN_HEADER = 40
HEADER = struct.Struct("<IIQQIII")  # length, opcode, unique, nodeid, uid, gid, pid
HOT = struct.Struct("<4xIQ24xQQII8xI")  # opcode, unique, fh, offset, size, read or write flags, flags
WRITE_DATA = IN_HEADER + 40  # where the bytes of a WRITE begin
USER, THREAD = 24, 32  # positions of the uid and the pid in the header
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
GETATTR_IN = struct.Struct("<I4xQ")  # flags, fh
LOCK_IN = struct.Struct("<QQQQIII")  # fh, owner, start, end (inclusive), type, pid, flags
POLL_IN = struct.Struct("<QQII")  # fh, kh, flags, events
RELEASE_IN = struct.Struct("<QIIQ")  # fh, flags, release flags, lock owner
FLUSH_IN = struct.Struct("<Q8xQ")  # fh, lock owner
OPEN_IN = struct.Struct("<I4x")  # flags
CREATE_IN = struct.Struct("<II8x")  # flags, mode; the name follows
MKNOD_IN = struct.Struct("<I12x")  # mode; the name follows
MKDIR_IN = struct.Struct("<I4x")  # mode; the name follows
RENAME_IN = struct.Struct("<Q")  # nodeid of the new directory; both names follow
RENAME2_IN = struct.Struct("<QI4x")  # the same, flags; both names follow
ACCESS_IN = struct.Struct("<I4x")  # mask
SETATTR_IN = struct.Struct("<I64xI4xII4x")  # which fields to set, mode, uid, gid

# A reply: its header, then its body.
OUT_HEADER = 16
REPLY = struct.Struct("<IiQ")  # length, -errno, unique
WRITTEN = struct.Struct("<IiQII")  # REPLY, size, padding
OPENED = struct.Struct("<IiQQII")  # REPLY, fh, open flags, padding
OPEN_OUT = struct.Struct("<QII")  # fh, open flags, padding: in the reply to a CREATE
# blocks, free, available, files, free, block bytes, name bytes, fragment bytes
STATFS_OUT = struct.Struct("<QQQQQIII28x")
POLLED = struct.Struct("<IiQII")  # REPLY, events, padding
LOCKED = struct.Struct("<IiQQQII")  # REPLY, start, end, type, pid
NOTIFIED = struct.Struct("<IiQQ")  # REPLY with the code as errno and unique 0, kh
DIRENT = struct.Struct("<QQII")  # ino, offset of the next, name bytes, type
# major, minor, read ahead, flags, background, congestion, write, time grain, pages, alignment, flags2
INIT_OUT = struct.Struct("<IIIIHHIIHHI")
ENTRY = struct.Struct("<QQQQII")  # nodeid, generation, seconds and nanoseconds for which name and attributes are valid
ATTR_TIMES = struct.Struct("<QII")  # seconds and nanoseconds for which the attributes are valid, padding
# ino, size, blocks, atime, mtime, ctime, their nanoseconds, mode, links, uid, gid, rdev, block bytes, flags
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
FORGET_ONE = struct.Struct("<QQ")  # nodeid, lookups
