"""Nodes of the tree: look-up by name, listing, stat(2), permissions, and chmod and chown."""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits
from mqfs.engine.core.portions import Work, in_order
from mqfs.engine.files.status import TEXTS
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import ADMIN, R, W, X, require, require_owner, require_scope
from mqfs.engine.nodes import (
    FOLDERS,
    META_FILES,
    Folder,
    Meta,
    Node,
    PartFolder,
    SnapshotNode,
    StagedStream,
    StagingFolder,
    TakeFile,
    TxnCtl,
    TxnFolder,
    path_of,
)
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.errors import Denied
from mqfs.model import Grant, Stat, Step, User
from mqfs.state.group import Attributes
from mqfs.syntax.lines import print_path

if TYPE_CHECKING:
    from mqfs.engine.tree.tree import Tree

_LISTED = 256  # names in one step
_BLOCK_BYTES = 4_096  # block size in the figures of a store in memory


def attributes(node: Node) -> Attributes:
    return node.state if isinstance(node, Group | Stream) else node.attributes


def stat_of(node: Node) -> Stat:
    own = attributes(node)
    kind = modes.S_IFDIR if node.directory else modes.S_IFREG
    mtime, ctime, kept, links = _times(node.stream if isinstance(node, SnapshotNode) else node)
    size = kept if isinstance(node, SnapshotNode) else 0
    return Stat(node.qid, kind | own.mode, own.uid, own.gid, size, kept, links, mtime, ctime, node.name)


def _times(node: Node) -> tuple[int, int, int, int]:
    """Return (mtime, ctime, bytes retained, links); times in wall ns."""
    if isinstance(node, Stream):
        made = node.state.made_ns
        if node.removed:
            return made, made, 0, 0
        node.kept.update_low_watermark()
        node.kept.newest_kept()
        return node.kept.mtime_ns or made, made, node.kept.size, 1
    if isinstance(node, StagingFolder | StagedStream):
        return node.times()
    group = node.group
    made, newest = group.state.made_ns, max(group.log.end.last_ns, group.state.made_ns)
    if isinstance(node, Group):
        return newest, made, group.log.upkeep.size, 0 if node.removed else 2 + len(FOLDERS) + len(node.groups)
    return newest, made, 0, 0 if node.removed else 2 if node.directory else 1


def find_in_group(group: Group, name: str) -> Node | None:
    """Return the file or directory of that name in a group, or None."""
    if name in META_FILES:
        return Meta(group, name)
    if name in FOLDERS:
        return TxnFolder(group) if name == ".txn" else Folder(group, name)
    return group.streams.get(name) or group.groups.get(name) or group.views.get(name)


def find_in_folder(folder: Folder, name: str) -> Node | None:
    """Return the file or part of that name in one of a group's own directories, or None."""
    if isinstance(folder, StagingFolder):
        return folder.find(name)
    if folder.name == ".consumers":
        taken = folder.group.streams.get(name[1:]) if name.startswith(".") else None
        return folder.group.consumers.get(name) or (TakeFile(taken) if taken is not None else None)
    stream = folder.group.streams.get(name)
    return SnapshotNode(stream) if stream is not None else None


def files_in(directory: Group | Folder) -> Work[list[Node]]:
    """Return all nodes of a directory, sorted by name, in steps."""
    found: dict[str, Node] = {}
    if directory.removed:
        return []
    rest = iter(_files_in(directory))
    while some := list(islice(rest, _LISTED)):
        if found:
            yield
        found.update((node.name, node) for node in some)
    names = yield from in_order(found)
    nodes: list[Node] = []
    while len(nodes) < len(names):
        if nodes:
            yield
        nodes += [found[name] for name in names[len(nodes) : len(nodes) + 16 * _LISTED]]
    return nodes


def _files_in(directory: Group | Folder) -> Iterable[Node]:
    group = directory.group
    if isinstance(directory, StagingFolder):
        return directory.files()
    if isinstance(directory, Group):
        own = [node for name in (*META_FILES, *FOLDERS) if (node := find_in_group(group, name))]
        return [*own, *group.streams.values(), *group.groups.values(), *group.views.values()]
    if directory.name == ".consumers":
        return list(group.consumers.values())
    return map(SnapshotNode, list(group.streams.values()))


def depth(group: Group) -> int:
    """Return the number of steps from a group up to the root: 0 for the root."""
    levels = 0
    while group.parent is not group:
        group, levels = group.parent, levels + 1
    return levels


def require_unprotected(group: Group) -> None:
    if group.settings.protect:
        raise errors.NotPermitted(f"group {group.name!r}: protected (write 'protect off' to its ctl first)")


def is_snapshot(node: Node) -> bool:
    """Whether an open for reading shows the file as of one moment, with a size."""
    return isinstance(node, SnapshotNode) or (isinstance(node, Meta) and node.name in TEXTS)


def disk_space(path: str) -> os.statvfs_result:
    """Return the figures of the disk at `path`, for df and programs that check for free space. A store in memory has no
    path ("") and the bound of one group as its size. Raises DiskFailed."""
    if not path:
        blocks = limits.MEMORY_BYTES // _BLOCK_BYTES
        files = limits.STREAMS
        return os.statvfs_result(
            (_BLOCK_BYTES, _BLOCK_BYTES, blocks, blocks, blocks, files, files, files, 0, limits.NAME_BYTES)
        )
    try:
        return os.statvfs(path)
    except OSError as error:
        raise errors.DiskFailed(f"{path}: {error.strerror}") from error


# ------------------------------------------------------------ grants

# The permissions of a user on a file depend on its mode, and on the user's token, if there is one.
#
# A token narrows its user's permissions to a scope and to a path: one file, or a group and all below it. The groups
# above the path can be walked through, nothing else. Any other name is Denied, whether it exists or not: "file does not
# exist" would be false for files that exist, and would make clients try to create them.

CHANGE = W | X | ADMIN  # to make, remove or rename a file in a directory


def permit(user: User, node: Node, mask: int) -> None:
    """Check a mask of R, W, X and ADMIN. Raises Denied."""
    if user.grant is not None:
        require_scope(user, _scope_of(node, mask), node.name)
        _require_path(user.grant, path_of(node), through=mask == X)
    require(user, attributes(node), mask & ~ADMIN, node.name)


def permit_walk(user: User, directory: Node, name: str) -> None:
    """Check a step from a directory to one of its names. Raises Denied."""
    if user.grant is not None and name != "..":
        _require_path(user.grant, (*path_of(directory), name), through=True)
    require(user, attributes(directory), X, directory.name)


def permit_staging(user: User, directory: StagingFolder) -> None:
    """Check only the token for a change of parts in `.txn`, which checks modes itself. Raises Denied."""
    if user.grant is not None:
        require_scope(user, W, directory.name)
        _require_path(user.grant, path_of(directory))


def permit_open(user: User, node: Node, reads: bool, writes: bool, *, made: bool) -> None:
    """Check an open(2). `made`: the same call made the file, so the mode is not checked. Raises Denied."""
    mask = (R if reads else 0) | (W if writes else 0)
    if user.grant is not None:
        require_scope(user, _scope_of(node, mask), node.name)
        _require_path(user.grant, path_of(node))
    if not made:
        require(user, attributes(node), mask, node.name)


def _scope_of(node: Node, mask: int) -> int:
    """Return the mask that a token's scope must allow. `ctl` needs ADMIN, a write to `.cursor` only R, as it affects
    no other reader. Changes of a part need W, as a publish does."""
    if isinstance(node, StagingFolder):
        return mask & ~ADMIN
    if isinstance(node, Meta) and mask & W and not isinstance(node, TxnCtl):
        return {"ctl": mask | ADMIN, ".cursor": mask & ~W}.get(node.name, mask)
    return mask


def _require_path(grant: Grant, path: tuple[str, ...], *, through: bool = False) -> None:
    """Check that a path is within a token's path; with `through` also the groups above it. Raises Denied."""
    wanted = grant.path
    if path[: len(wanted)] != wanted and not (through and wanted[: len(path)] == path):
        raise Denied(f"{print_path(path)}: outside the path of token {grant.id} (expected {print_path(wanted)})")


# ------------------------------------------------------------ set attributes


def set_attributes(user: User, node: Node, mode: int | None, uid: int | None, gid: int | None) -> Step[None]:
    """Change mode, owner or group of a file; see Tree.setattr."""
    own = attributes(node)
    if node.removed:
        raise errors.NotFound(f"{node.name!r}: removed")
    if isinstance(node, Folder | SnapshotNode | TakeFile | View | StagedStream):
        raise errors.NotPermitted(f"cannot change {node.name!r}: {_why_fixed(node)}")
    permit(user, node, ADMIN)
    require_owner(user, own, node.name)
    if uid is not None and uid != own.uid and user.uid != 0:
        raise errors.NotPermitted("cannot change the owner (expected root)")
    if gid is not None and gid != own.gid and user.uid != 0 and gid not in (user.gid, *user.groups):
        raise errors.NotPermitted(f"cannot give the file to gid {gid} (expected a group of the user)")
    new = [own.mode if mode is None else mode & 0o7777, own.uid if uid is None else uid, own.gid]
    if gid is not None:
        new[2] = gid
    if new == [own.mode, own.uid, own.gid]:
        return None
    number = 0 if isinstance(node, Group) else node.number
    node.group.log.change({"do": "attributes", "file": number, "mode": new[0], "uid": new[1], "gid": new[2]})
    return node.group.log.after_metadata_sync(None)


def _why_fixed(node: Folder | SnapshotNode | TakeFile | View | StagedStream) -> str:
    """Return why the attributes of a node cannot be changed, for an error text."""
    if isinstance(node, View):
        return "a view has mode 444"
    if isinstance(node, PartFolder):
        return "a part keeps the mode with which it was made"
    if isinstance(node, TxnFolder):
        return "it has mode 1777"
    if isinstance(node, StagedStream):
        return "it has its part's mode"
    if isinstance(node, SnapshotNode | TakeFile):
        return "it has its stream's mode"
    return "it has its group's mode"


# ------------------------------------------------------------ listing

# Open directories, for all front ends: each has a copy of its names from when it was read from its beginning.
#
# So a removal meanwhile does not make a reader skip or repeat a name. The names are charged to the user's share of the
# server's memory.


class Listing:
    """One open directory."""

    __slots__ = ("_account", "_closed", "_held", "_tree", "is_there", "node", "nodes", "user")

    def __init__(self, tree: Tree, user: User, node: Any, account: Hashable) -> None:
        """Open a directory. `node`: a group, or one of its folders. `account`: the user whose share of memory is
        charged. Raises OverLimit."""
        self._tree, self._account, self.user, self.node = tree, account, user, node
        self.nodes: list[Node] = []
        self.is_there = False  # whether `nodes` were read
        self._closed = False
        self._held = tree.memory.change(account, 0, limits.LISTING_BYTES)

    def begin(self) -> Step[None]:
        """Read the present nodes of the directory. Raises Denied, OverLimit."""
        group: Group = self.node.group
        return group.portions.run(self._read(self._tree.entries(self.user, self.node)))

    def _read(self, entries: Work[list[Node]]) -> Work[None]:
        nodes = yield from entries
        if self._closed:
            return
        self._hold(limits.LISTING_BYTES + len(nodes) * limits.LISTED_BYTES)
        self.nodes, self.is_there = nodes, True

    @property
    def parent(self) -> Node:
        return self._tree.parent(self.node)

    def close(self) -> None:
        self._closed, self.nodes = True, []
        self._hold(0)

    def _hold(self, size: int) -> None:
        self._held = self._tree.memory.change(self._account, self._held, size)
