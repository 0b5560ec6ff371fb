"""The directory of a store: its label, its lock and its folders.

Owns their names. Refuses what is not a store of this version before anything is changed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable

from mqfs import errors
from mqfs.store.disk import Disk, read_file, remove_tree, write_all, write_file

VERSION = 1
FOLDERS = ("staging", "buckets", "quarantine")


def prepare(disk: Disk, path: str) -> None:
    """Make the directory if there is none. Raises BadStore for one that holds something else."""
    try:
        if not disk.exists(path):
            disk.mkdir(path)
            disk.sync_folder(os.path.dirname(path))
        names = set(disk.listdir(path))
        if disk.is_open_to_others(path):
            raise errors.BadStore(f"{path} is open to other users (expected: ours, mode 700)")
    except FileNotFoundError as error:
        raise errors.BadStore(f"{path}: the folder {os.path.dirname(path)} does not exist") from error
    except NotADirectoryError as error:
        raise errors.BadStore(f"{path} is not a store: not a directory") from error
    except OSError as error:
        raise errors.BadStore(f"{path}: {error.strerror}") from error
    if "mqfs" not in names and names - {"lock", *FOLDERS, "lost+found"}:
        raise errors.BadStore(f"{path} is not empty and not a store: name an empty or new directory")
    if "mqfs" in names:
        read_label(disk, path)


def begin(disk: Disk, path: str) -> tuple[str, int]:
    """Make missing folders and the label, and empty staging/. Returns the label, as `read_label`."""
    is_new = not disk.exists(f"{path}/mqfs")
    uuid_, number = (str(uuid.uuid4()), 1) if is_new else read_label(disk, path)
    for name in FOLDERS:
        if not disk.exists(f"{path}/{name}"):
            disk.mkdir(f"{path}/{name}")
        elif not disk.is_folder(f"{path}/{name}"):
            raise errors.BadStore(f"{path}/{name} is not a folder")
    for name in disk.listdir(f"{path}/staging"):
        remove_tree(disk, f"{path}/staging/{name}")
    if is_new:
        disk.sync_folder(path)
        write_label(disk, path, uuid_, number)
    return uuid_, number


def group_folders(disk: Disk, path: str) -> Iterable[tuple[int, str]]:
    """The number and the folder of each bucket."""
    for spread in disk.listdir(f"{path}/buckets"):
        for name in disk.listdir(f"{path}/buckets/{spread}"):
            if name.isdecimal():
                yield int(name), f"{path}/buckets/{spread}/{name}"


def write_label(disk: Disk, path: str, uuid_: str, number: int) -> None:
    """Replace the label, durably."""
    staged = f"{path}/staging/mqfs"
    write_file(disk, staged, label(uuid_, number))
    disk.rename(staged, f"{path}/mqfs")
    disk.sync_folder(path)


def label(uuid_: str, number: int) -> bytes:
    return f"mqfs {VERSION}\nuuid {uuid_}\ngroups {number}\n".encode()


def read_label(disk: Disk, path: str) -> tuple[str, int]:
    """The uuid and the first group number that is not reserved. Raises BadStore."""
    if not disk.exists(f"{path}/mqfs"):
        raise errors.BadStore(f"{path} {'is not a store' if disk.exists(path) else 'does not exist'}")
    try:
        lines = read_file(disk, f"{path}/mqfs").decode().splitlines()
        words = dict(line.split(" ", 1) for line in lines)
        version = int(words["mqfs"])
    except (OSError, ValueError, KeyError) as error:
        raise errors.BadStore(f"{path}/mqfs does not say what store this is") from error
    if version != VERSION:
        raise errors.BadStore(f"{path} is of version {version}; this server reads version {VERSION}")
    try:
        return words["uuid"], int(words["groups"])
    except (ValueError, KeyError) as error:
        raise errors.BadStore(f"{path}/mqfs lacks its uuid or groups line") from error


def take_lock(disk: Disk, path: str, *, write: bool = True) -> int:
    """The lock's descriptor, with our process number in the file; with `write` off that is left as it is."""
    try:
        if write:
            fd = disk.lock(f"{path}/lock")
        else:
            fd = disk.lock(f"{path}/lock" if disk.exists(f"{path}/lock") else path, os.O_RDONLY)
    except BlockingIOError:
        holder = read_file(disk, f"{path}/lock").decode(errors="replace").strip()
        raise errors.BadStore(f"{path} is in use by process {holder or 'unknown'}") from None
    except OSError as error:
        raise errors.BadStore(f"{path}/lock: {error.strerror}") from error
    if write:
        disk.truncate(fd, 0)
        write_all(disk, fd, b"%d\n" % os.getpid(), 0)
    return fd


def folder_of(path: str, number: int) -> str:
    """The folder of a bucket."""
    return f"{path}/buckets/{number & 255:02x}/{number}"


__all__ = [
    "FOLDERS",
    "VERSION",
    "begin",
    "folder_of",
    "group_folders",
    "label",
    "prepare",
    "read_label",
    "take_lock",
    "write_label",
]
