"""The user of a request, from its header and /proc.

Owns no state. The kernel names uid, gid and thread; supplementary groups and the process are looked up where they
matter, when a file is named or opened, never for a read or a write.
"""

from __future__ import annotations

from mqfs.model import User


def user(uid: int, gid: int, thread: int, *, process: bool = False) -> User:
    """The user of a request. Root needs no groups; `process` has the process looked up for root too."""
    if uid == 0 and not process:
        return User(uid, gid, frozenset(), thread, "fuse")
    pid, groups = membership(thread)
    return User(uid, gid, groups, pid, "fuse")


def membership(thread: int) -> tuple[int, frozenset[int]]:
    """(process, supplementary groups) of a thread; what is known where it is gone or in another pid namespace."""
    pid, groups = thread, frozenset[int]()
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    pid = int(line[5:])
                elif line.startswith(b"Groups:"):
                    groups = frozenset(map(int, line[7:].split()))
                    break
    except (OSError, ValueError):
        pass
    return pid, groups
