"""Nodes of the tree: found by name, their parents, and what stat(2) says of them."""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Iterable
from itertools import islice

from mqfs import errors, limits
from mqfs.engine.group import Group
from mqfs.engine.log.portions import Work, in_order
from mqfs.engine.nodes.own_files import FOLDERS, META_FILES, Folder, Meta, SnapshotNode, TakeFile
from mqfs.engine.nodes.places import Node, group_of
from mqfs.engine.nodes.txn_nodes import StagedStream, StagingFolder, TxnFolder
from mqfs.engine.stream import Stream
from mqfs.group_state import Attributes
from mqfs.model import Stat

_LISTED = 256  # names in one step
_BLOCK_BYTES = 4_096  # of the figures of a store in memory


def attributes(node: Node) -> Attributes:
    return node.state if isinstance(node, Group | Stream) else node.attributes


def stat_of(node: Node) -> Stat:
    own = attributes(node)
    kind = modes.S_IFDIR if node.directory else modes.S_IFREG
    mtime, ctime, kept, links = _times(node.stream if isinstance(node, SnapshotNode) else node)
    size = kept if isinstance(node, SnapshotNode) else 0
    return Stat(node.qid, kind | own.mode, own.uid, own.gid, size, kept, links, mtime, ctime, node.name)


def _times(node: Node) -> tuple[int, int, int, int]:
    """(mtime, ctime, bytes kept, links)"""
    if isinstance(node, Stream):
        made = node.state.made_ns
        if node.removed:
            return made, made, 0, 0
        node.kept.update_low_watermark()
        node.kept.newest_kept()
        return node.kept.mtime_ns or made, made, node.kept.size, 1
    if isinstance(node, StagingFolder | StagedStream):
        return node.times()
    group = group_of(node)
    made, newest = group.state.made_ns, max(group.log.end.last_ns, group.state.made_ns)
    if isinstance(node, Group):
        return (
            newest,
            made,
            group.log.upkeep.size,
            0 if node.removed else 2 + len(FOLDERS) + len(node.groups),
        )
    return newest, made, 0, 0 if node.removed else 2 if node.directory else 1


def find_in_group(group: Group, name: str) -> Node | None:
    """The file or directory of that name in a group."""
    if name in META_FILES:
        return Meta(group, name)
    return _folder(group, name) or group.streams.get(name) or group.groups.get(name) or group.views.get(name)


def _folder(group: Group, name: str) -> Folder | None:
    if name not in FOLDERS:
        return None
    return TxnFolder(group) if name == ".txn" else Folder(group, name)


def find_in_folder(folder: Folder, name: str) -> Node | None:
    """The file or part of that name in one of a group's own directories."""
    if isinstance(folder, StagingFolder):
        return folder.find(name)
    if folder.name == ".consumers":
        taken = folder.group.streams.get(name[1:]) if name.startswith(".") else None
        return folder.group.consumers.get(name) or (TakeFile(taken) if taken is not None else None)
    stream = folder.group.streams.get(name)
    return SnapshotNode(stream) if stream is not None else None


def files_in(directory: Group | Folder) -> Work[list[Node]]:
    """Everything in a directory, by name."""
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
    """How many groups stand above it, the root not counted as one."""
    levels = 0
    while group.parent is not group:
        group, levels = group.parent, levels + 1
    return levels


def require_unprotected(group: Group) -> None:
    if group.settings.protect:
        raise errors.NotPermitted(f"{group.name} is protected; write 'protect off' to its ctl first")


def disk_space(path: str) -> os.statvfs_result:
    """The figures of a store's disk, for df and programs that look for free space; of a store in memory, which has no
    path, the bound of one group. Raises DiskFailed."""
    if not path:
        blocks = limits.MEMORY_BYTES // _BLOCK_BYTES
        files = limits.STREAMS
        return os.statvfs_result(
            (_BLOCK_BYTES, _BLOCK_BYTES, blocks, blocks, blocks, files, files, files, 0, limits.NAME_BYTES)
        )
    try:
        return os.statvfs(path)
    except OSError as error:
        raise errors.DiskFailed(f"{path}: {error}") from error
