"""Places in a tree: which group a path belongs to, what it names there, and where a tree begins.

Owns the finding of paths. Opens nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs

from mq_tools.errors import ToolError, reason

CONSUMERS = ".consumers"
_DEFAULT_MOUNT = "./mq"


@attrs.frozen
class Place:
    """A group, or a stream or consumer in it."""

    group: str
    name: str = ""
    kind: str = "group"  # group, stream or consumer

    @property
    def path(self) -> str:
        folder = os.path.join(self.group, CONSUMERS) if self.kind == "consumer" else self.group
        return os.path.join(folder, self.name) if self.name else folder

    def file(self, name: str) -> str:
        """One of its group's own files."""
        return os.path.join(self.group, name)


def is_group(path: str) -> bool:
    return os.path.lexists(os.path.join(path, "ctl")) and os.path.lexists(os.path.join(path, "order"))


def place_of(path: str) -> Place:
    """What a path names: as it stands, else below $MQFS. Raises ToolError where it is in no tree."""
    mount = os.environ.get("MQFS")
    tries = [path] if os.path.isabs(path) or not mount else [path, os.path.join(mount, path)]
    places = [place for place in map(_look, tries) if place is not None]
    if not places:
        raise ToolError(f"{path}: {_why_not(path)}")
    return next((place for place in places if os.path.lexists(place.path)), places[0])


def _look(path: str) -> Place | None:
    if is_group(path):
        return Place(path.rstrip("/") or "/")
    folder, name = os.path.split(path.rstrip("/"))
    folder = folder or "."
    if os.path.basename(folder) == CONSUMERS and is_group(os.path.dirname(folder) or "."):
        return Place(os.path.dirname(folder) or ".", name, "consumer")
    return Place(folder, name, "stream") if name and is_group(folder) else None


def _why_not(path: str) -> str:
    try:
        os.stat(path)
    except FileNotFoundError:
        return "no such group, and nothing in one; is the tree mounted?"
    except OSError as error:
        return reason(error)
    return "not in a tree of groups; is it mounted?"


def group_of(path: str) -> Place:
    """Raises ToolError where it is no group."""
    place = place_of(path)
    if place.kind != "group":
        what = "no such group" if not os.path.lexists(place.path) else f"a {place.kind}, where a group is needed"
        raise ToolError(f"{path}: {what}")
    return place


def stream_of(path: str) -> Place:
    """Raises ToolError where it is no stream, or is not there."""
    place = place_of(path)
    if place.kind != "stream":
        raise ToolError(f"{path}: a {place.kind}, where a stream is needed")
    check_there(place, path)
    return place


def check_there(place: Place, given: str) -> None:
    """Raises ToolError where the stream or consumer is not there."""
    if not os.path.lexists(place.path):
        raise ToolError(f"{given}: no such {place.kind}")
    if place.kind == "stream" and (place.name in ("ctl", "order") or place.name.startswith(".")):
        raise ToolError(f"{given}: not a stream, but one of the group's own files")


def root_of(path: str) -> str:
    """Where the tree begins in which the group is."""
    path = os.path.abspath(path)
    while is_group(parent := os.path.dirname(path)) and parent != path:
        path = parent
    return path


def default_group() -> str:
    """What is meant where no group is given: $MQFS, the tree we are in, or ./mq. Raises ToolError."""
    mount = os.environ.get("MQFS")
    if mount:
        if not is_group(mount):
            raise ToolError(f"MQFS={mount}: no tree is mounted there")
        return mount
    if is_group("."):
        return root_of(os.getcwd())
    if is_group(_DEFAULT_MOUNT):
        return _DEFAULT_MOUNT
    raise ToolError("no GROUP given, MQFS is not set, and no tree is mounted at ./mq")


def groups_below(group: str) -> Iterator[str]:
    """The group and all groups in it, each before those inside."""
    yield group
    for name in sorted(subgroups(group)):
        yield from groups_below(os.path.join(group, name))


def subgroups(group: str) -> list[str]:
    try:
        with os.scandir(group) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []
