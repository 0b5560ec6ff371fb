"""The meaning of a request's target: a node of the tree, the verb after it, the options.

The kind of the node decides about the next segment: below a file it is a verb, below a group a name.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes

from mqfs import limits
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.group import Group
from mqfs.engine.nodes import PartFolder, SnapshotNode, StagedStream, TakeFile, TxnCtl
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadRequest, NotDirectory, NotFound
from mqfs.model import User
from mqfs.syntax.names import cache_short

OWN = {
    ".health": "health",
    ".ready": "ready",
    ".metrics": "metrics",
    ".openapi.json": "openapi",
    ".asyncapi.json": "asyncapi",
    ".web": "web",
}
_BAD_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_OPTIONS = 1_024  # of one query: as many names as `select` accepts
_KINDS: dict[type, str] = {
    Group: "group",
    Stream: "stream",
    View: "view",
    Consumer: "consumer",
    TakeFile: "consumer",
    SnapshotNode: "kept",
    PartFolder: "part",
    StagedStream: "staged",
    TxnCtl: "txn ctl",
}
_MISSING = {"group": "new", ".consumers": "new consumer", ".txn": "new part"}


class Path(NamedTuple):
    """A parsed target. `text` is the path as it was sent."""

    text: str
    names: tuple[str, ...]
    slash: bool  # at the end: the path is a group's
    options: tuple[tuple[str, str], ...]


class Target(NamedTuple):
    """The target of a request. Where no file of that `name` exists, `node` is the directory that lacks it."""

    kind: str
    node: Any
    name: str
    verb: str = ""


@cache_short(limits.HTTP_TARGETS, limits.HTTP_TARGET_BYTES)
def parse(target: str) -> Path:
    """Parse the target of a request. Raises BadRequest."""
    if target.startswith(("http://", "https://")):  # the form for proxies
        target = "/" + target.split("/", 3)[3] if target.count("/") > 2 else "/"
    if not target.startswith("/"):
        raise BadRequest(f"invalid target {target!r} (expected a path)")
    text, _, query = target.partition("?")
    names = text[1:].split("/")
    slash = names[-1] == ""
    if slash:
        names.pop()
    try:
        options = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_OPTIONS) if query else ()
    except ValueError as error:
        raise BadRequest(f"invalid query: {error}") from None
    return Path(text, tuple(map(_name, names)), slash, tuple(options))


def _name(segment: str) -> str:
    if _BAD_ESCAPE.search(segment):
        raise BadRequest(f"invalid escape in {segment!r} (expected % and two hexadecimal digits)")
    raw = unquote_to_bytes(segment)
    if b"/" in raw or b"\0" in raw or raw in (b"", b".", b".."):
        raise BadRequest(f"invalid name {unquote(segment)!r} (expected one without slash or NUL, not empty, . or ..)")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"invalid path segment {segment!r} (expected UTF-8)") from None


def resolve(tree: Tree, user: User, path: Path) -> Target:
    """Return the target of a path. Raises NotFound, Denied, NotDirectory, BadRequest."""
    names = path.names
    if names and names[0] in OWN:
        if len(names) > 1 and names[0] != ".web":
            raise NotFound(f"no file {'/'.join(names)!r}")
        return Target(OWN[names[0]], None, "/".join(names[1:]))
    node: Any = tree.root
    for at, name in enumerate(names):
        if not node.directory:
            return _verb(node, names[at:], path.slash)
        try:
            node = tree.walk(user, node, name)
        except NotFound:
            if at < len(names) - 1:
                raise absent(_missing(node, name, slash=True), names[: at + 1]) from None
            return _missing(node, name, path.slash)
    if path.slash and not node.directory:
        raise NotDirectory(f"{_not_a_group(node)} (expected no slash at the end)")
    kind = _kind(node)
    return Target("bare group" if kind == "group" and names and not path.slash else kind, node, node.name)


def group_at(tree: Tree, user: User, names: tuple[str, ...]) -> Group:
    """Return the group at a path. Raises NotFound, Denied."""
    node: Any = tree.root
    for name in names:
        node = tree.walk(user, node, name)
    if not isinstance(node, Group):
        raise NotFound(_not_a_group(node))
    return node


def absent(target: Target, names: tuple[str, ...]) -> NotFound:
    """Return the error for a target that does not exist, or has no such verb. It says how to make the target."""
    path, kind, name = "/".join(map(quote, names)), target.kind.removeprefix("new "), repr(target.name)
    if target.verb and target.node is not None and not target.node.directory:
        return NotFound(_not_a_group(target.node))
    if kind == "group":
        return NotFound(f"no group {'/'.join(names)!r} (make it: PUT /{path}/)")
    if kind == "stream" and len(names) == 1:
        return NotFound(f"no group or stream {name} (make a group: PUT /{path}/)")
    if kind == "part":
        return NotFound(f"no part {name} (begin it: PUT /{path}/)")
    if kind in ("stream", "consumer"):
        group = "/".join(names[: -1 if kind == "stream" else -2]) or "/"
        return NotFound(f"no {kind} {name} in group {group!r} (make it: PUT /{path})")
    return NotFound(f"no file {'/'.join(names)!r}")


def _not_a_group(node: Any) -> str:
    kind = _kind(node)
    return f"{node.name!r} is a {kind if kind in ('stream', 'view', 'consumer') else 'file'}, not a group"


def _kind(node: Any) -> str:
    return _KINDS.get(type(node)) or str(node.name)


def _verb(node: Any, rest: tuple[str, ...], slash: bool) -> Target:
    if len(rest) > 1 or slash:
        raise NotDirectory(_not_a_group(node))
    return Target(_kind(node), node, node.name, rest[0])


def _missing(node: Any, name: str, slash: bool) -> Target:
    kind = _MISSING.get(_kind(node), "nothing")
    if kind == "new":
        kind = "new group" if slash else "new stream"
    return Target(kind, node, name)
