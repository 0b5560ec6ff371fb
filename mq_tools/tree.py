"""Groups, streams, views and consumers as paths: what a path names, which names a group has, where a tree begins.

Reads `ctl` and directories, never a message.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence

import attrs

from mq_tools.errors import ToolError, reason
from mq_tools.files import read_lines

CONSUMERS = ".consumers"
_DEFAULT_MOUNT = "./mq"
_QUOTED = r"'(?:[^']|'')*'"


@attrs.frozen
class TreePath:
    """A group, or a stream or consumer in it."""

    group: str
    name: str = ""
    kind: str = "group"  # group, stream or consumer

    @property
    def path(self) -> str:
        folder = os.path.join(self.group, CONSUMERS) if self.kind == "consumer" else self.group
        return os.path.join(folder, self.name) if self.name else folder

    def file(self, name: str) -> str:
        """Return the path of a file of the group, such as `ctl`."""
        return os.path.join(self.group, name)


# ---------------------------------------------------------------- what a path names


def is_group(path: str) -> bool:
    return os.path.lexists(os.path.join(path, "ctl")) and os.path.lexists(os.path.join(path, "order"))


def is_group_file(name: str) -> bool:
    """Whether a name in a group is reserved for the server: no stream has it."""
    return name in ("ctl", "order") or name.startswith(".")


def resolve(path: str) -> TreePath:
    """Return the group, stream or consumer of a path as typed, else below $MQFS. Raises ToolError outside of a tree."""
    mount = os.environ.get("MQFS")
    paths = [path] if os.path.isabs(path) or not mount else [path, os.path.join(mount, path)]
    matches = [match for match in map(_match, paths) if match is not None]
    if not matches:
        raise ToolError(f"{path}: {_mismatch(path)}")
    return next((match for match in matches if os.path.lexists(match.path)), matches[0])


def make_group_above(path: str) -> None:
    """Create the missing groups above a stream's path, if the path is in a tree. Raises ToolError."""
    mount = os.environ.get("MQFS")
    for place in [path] if os.path.isabs(path) or not mount else [path, os.path.join(mount, path)]:
        folder = present = os.path.dirname(place.rstrip("/"))
        while present and not os.path.lexists(present):
            present = os.path.dirname(present)
        if is_group(present or "."):
            try:
                os.makedirs(folder or ".", exist_ok=True)
            except OSError as error:
                raise ToolError(f"{folder}: {reason(error)}") from error
            return


def _match(path: str) -> TreePath | None:
    if is_group(path):
        return TreePath(path.rstrip("/") or "/")
    folder, name = os.path.split(path.rstrip("/"))
    folder = folder or "."
    if os.path.basename(folder) == CONSUMERS and is_group(os.path.dirname(folder) or "."):
        return TreePath(os.path.dirname(folder) or ".", name, "consumer")
    return TreePath(folder, name, "stream") if name and is_group(folder) else None


def _mismatch(path: str) -> str:
    try:
        os.stat(path)
    except FileNotFoundError:
        folder = os.path.dirname(path.rstrip("/")).removesuffix(f"/{CONSUMERS}")
        if folder and is_group(os.path.dirname(folder) or "."):
            return f"no such group (create it: mkdir {shlex.quote(folder)})"
        return "no such group, stream or consumer (is the tree mounted?)"
    except OSError as error:
        return reason(error)
    return "not in a tree of groups (is it mounted?)"


def resolve_group(path: str) -> str:
    """Return the path of the group that `path` names. Raises ToolError for any other path."""
    target = resolve(path)
    if target.kind != "group":
        exists = os.path.lexists(target.path)
        raise ToolError(wrong_kind(path, target, "group") if exists else f"{path}: no such group")
    return target.group


def wrong_kind(path: str, target: TreePath, expected: str) -> str:
    return f"{path}: a {target.kind} (expected a {expected})"


def check_exists(target: TreePath, path: str, hint: str = "") -> None:
    """Raise ToolError if the stream or consumer does not exist, or is a file of the group. `path`: as typed; `hint`:
    how to create it, in parentheses."""
    if not os.path.lexists(target.path):
        raise ToolError(f"{path}: no such {target.kind}{hint}")
    if target.kind == "stream" and is_group_file(target.name):
        raise ToolError(f"{path}: a file of the group (expected a stream)")


def check_group(group: str) -> None:
    """Raise ToolError if the path is not a group."""
    try:
        mode = os.stat(group).st_mode
    except FileNotFoundError:
        raise ToolError(f"{group}: no such group") from None
    except OSError as error:
        raise ToolError(f"{group}: {reason(error)}") from error
    if not stat.S_ISDIR(mode):
        raise ToolError(f"{group}: a file (expected GROUP, then its streams, or GROUP/STREAM)")
    if not os.path.lexists(os.path.join(group, "order")):
        raise ToolError(f"{group}: not a group: no file 'order' in it (is the tree mounted?)")


# ---------------------------------------------------------------- groups of a tree


def default_group() -> str:
    """Return the group of a command without GROUP: $MQFS, the root of the current tree, or ./mq. Raises ToolError."""
    mount = os.environ.get("MQFS")
    if mount:
        if not is_group(mount):
            raise ToolError(f"$MQFS {mount!r}: no tree mounted there (start a server, or unset it)")
        return mount
    if is_group("."):
        return _root(os.getcwd())
    if is_group(_DEFAULT_MOUNT):
        return _DEFAULT_MOUNT
    raise ToolError("missing argument GROUP: MQFS is not set and no tree is mounted at ./mq")


def _root(path: str) -> str:
    """Return the root group of the tree that an absolute path is in."""
    while is_group(parent := os.path.dirname(path)) and parent != path:
        path = parent
    return path


def groups_below(group: str) -> Iterator[str]:
    """Yield the group and all groups inside it, each before its subgroups."""
    yield group
    for name in sorted(subgroups(group)):
        yield from groups_below(os.path.join(group, name))


def subgroups(group: str) -> list[str]:
    try:
        with os.scandir(group) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []


# ---------------------------------------------------------------- names in a group


def streams_of(group: str) -> list[str]:
    """Return the names of a group's streams and views, sorted. Raises ToolError."""
    try:
        with os.scandir(group) as entries:
            return sorted(entry.name for entry in entries if not is_group_file(entry.name) and not entry.is_dir())
    except OSError as error:
        raise ToolError(f"{group}: {reason(error)}") from error


def ctl_of(group: str) -> list[str]:
    """Return the lines of a group's settings; none if they cannot be read."""
    try:
        return read_lines(os.path.join(group, "ctl"))
    except ToolError:
        return []


def views_of(group: str) -> dict[str, list[str]]:
    """Return the programs and patterns bound to each view of a group; empty if its ctl cannot be read."""
    views: dict[str, list[str]] = {}
    for line in ctl_of(group):
        match = re.fullmatch(rf"bind\s+({_QUOTED}|\S+)\s+(.*)", line)
        if match:
            is_word = re.fullmatch(_QUOTED, match[2])  # else a program
            views.setdefault(unquote(match[1]), []).append(unquote(match[2]) if is_word else match[2])
    return views


def unquote(word: str) -> str:
    """Return a word without its rc(1) quotes."""
    return word[1:-1].replace("''", "'") if word.startswith("'") else word


def inodes(group: str) -> frozenset[int]:
    """Return the inodes of a group's files. A rename keeps the inode. Raises OSError."""
    with os.scandir(group) as entries:
        return frozenset(entry.inode() for entry in entries)


def is_pattern(group: str, name: str) -> bool:
    """Whether a name has a wildcard of the group: those of the line `words` in its ctl, else * and #."""
    form = re.compile(rf"words (?:{_QUOTED}|\S) ({_QUOTED}|\S) ({_QUOTED}|\S)")
    words = next(filter(None, map(form.fullmatch, ctl_of(group))), None)
    return any(unquote(wildcard) in name for wildcard in (words.groups() if words else "*#"))


def check_streams(group: str, names: Sequence[str]) -> frozenset[int]:
    """Return the inodes of these streams; empty if a name is a pattern, which may match streams made later. Raises
    ToolError, with the streams of the group, if a stream does not exist."""
    if not names or any(is_pattern(group, name) for name in names):
        return frozenset()
    return frozenset(_inode(group, name) for name in names)


def _inode(group: str, name: str) -> int:
    """Return the inode of a stream or view. Raises ToolError."""
    try:
        status = os.stat(os.path.join(group, name))
    except FileNotFoundError:
        status = None
    except OSError as error:
        raise ToolError(f"{os.path.join(group, name)}: {reason(error)}") from error
    if status is None or stat.S_ISDIR(status.st_mode) or is_group_file(name) or "/" in name:
        raise ToolError(f"{group}: no stream {name!r} (expected one of: {', '.join(streams_of(group)) or 'none'})")
    return status.st_ino
