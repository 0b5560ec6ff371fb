"""What can be told about a group before it is read: that it is one, and which streams it has."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from mq_tools.errors import ToolError, reason

_QUOTED = r"'(?:[^']|'')*'"


def check_group(group: str) -> None:
    """Raises ToolError where the path is not a group."""
    try:
        mode = os.stat(group).st_mode
    except FileNotFoundError:
        raise ToolError(f"{group}: no such group") from None
    except OSError as error:
        raise ToolError(f"{group}: {reason(error)}") from error
    if not stat.S_ISDIR(mode):
        raise ToolError(f"{group}: not a group but a file; give the group first, then its streams")
    if not os.path.lexists(os.path.join(group, "order")):
        raise ToolError(f"{group}: not a group: it has no file 'order'; is the tree mounted?")


def streams_of(group: str) -> list[str]:
    """The names of its streams, sorted."""
    try:
        with os.scandir(group) as entries:
            names = [e.name for e in entries if e.name not in ("ctl", "order") and e.name[0] != "." and not e.is_dir()]
    except OSError as error:
        raise ToolError(f"{group}: {reason(error)}") from error
    return sorted(names)


def views_of(group: str) -> dict[str, list[str]]:
    """What each view of a group is bound to; nothing where its ctl may not be read."""
    views: dict[str, list[str]] = {}
    try:
        with open(os.path.join(group, "ctl"), encoding="utf-8") as ctl:
            text = ctl.read()
    except (OSError, ValueError):
        return {}
    for line in text.splitlines():
        found = re.fullmatch(rf"bind\s+({_QUOTED}|\S+)\s+(.*)", line)
        if found:
            is_word = re.fullmatch(_QUOTED, found[2])  # else a program
            views.setdefault(unquoted(found[1]), []).append(unquoted(found[2]) if is_word else found[2])
    return views


def unquoted(word: str) -> str:
    """A word without the quotes of rc(1)."""
    return word[1:-1].replace("''", "'") if word.startswith("'") else word


def inodes(group: str) -> frozenset[int]:
    """What stands for its files whatever they are called."""
    with os.scandir(group) as entries:
        return frozenset(entry.inode() for entry in entries)


def check_streams(group: str, wanted: Sequence[str]) -> frozenset[int]:
    """The inodes of what is wanted. Raises ToolError, with what there is, where one of them is not there."""
    if not wanted:
        return frozenset()
    there = streams_of(group)
    for name in wanted:
        if name not in there:
            has = ", ".join(there) if there else "none"
            raise ToolError(f"{group}: no stream {name!r}; its streams: {has}")
    return frozenset(os.stat(os.path.join(group, name)).st_ino for name in wanted)
