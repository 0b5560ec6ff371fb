"""What can be told about a group before it is read: that it is one, and which streams it has."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from mq_cat.problem import Problem, reason


def check_group(group: str) -> None:
    """Raises Problem where the path is not a group."""
    try:
        mode = os.stat(group).st_mode
    except FileNotFoundError:
        raise Problem(f"{group}: no such group") from None
    except OSError as error:
        raise Problem(f"{group}: {reason(error)}") from error
    if not stat.S_ISDIR(mode):
        raise Problem(f"{group}: not a group but a file; give the group first, then its streams")
    if not os.path.lexists(os.path.join(group, "order")):
        raise Problem(f"{group}: not a group: it has no file 'order'; is the tree mounted?")


def streams_of(group: str) -> list[str]:
    """The names of its streams, sorted."""
    try:
        with os.scandir(group) as entries:
            names = [e.name for e in entries if e.name not in ("ctl", "order") and e.name[0] != "." and not e.is_dir()]
    except OSError as error:
        raise Problem(f"{group}: {reason(error)}") from error
    return sorted(names)


def inodes(group: str) -> frozenset[int]:
    """What stands for its files whatever they are called."""
    with os.scandir(group) as entries:
        return frozenset(entry.inode() for entry in entries)


def check_streams(group: str, wanted: Sequence[str]) -> frozenset[int]:
    """The inodes of what is wanted. Raises Problem, with what there is, where one of them is not there."""
    if not wanted:
        return frozenset()
    there = streams_of(group)
    for name in wanted:
        if name not in there:
            has = ", ".join(there) if there else "none"
            raise Problem(f"{group}: no stream {name!r}; its streams: {has}")
    return frozenset(os.stat(os.path.join(group, name)).st_ino for name in wanted)
