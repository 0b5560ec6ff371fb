"""Where a file is in the tree: its group, the directory that it is in, its path."""

from __future__ import annotations

from typing import Any, cast

from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.group import Group
from mqfs.engine.nodes.own_files import Folder, Meta, SnapshotNode, TakeFile
from mqfs.engine.nodes.txn_nodes import PartFolder, StagedStream, TxnCtl, TxnFolder
from mqfs.engine.routing.view import View
from mqfs.engine.stream import Stream
from mqfs.syntax.token_line import print_path

Node = Group | Stream | View | Consumer | Meta | Folder | SnapshotNode | TakeFile | StagedStream


def group_of(node: Node) -> Group:
    """The group that a file is in. Streams and consumers know it by no more than they need of it."""
    group: Any = node.group
    return cast(Group, group)


def parent(node: Node) -> Group | Folder:
    """The directory it is in; the root is in itself."""
    if isinstance(node, Group):
        return node.parent
    if isinstance(node, StagedStream):
        return PartFolder(group_of(node), node.part)
    if isinstance(node, PartFolder | TxnCtl):
        return TxnFolder(group_of(node))
    if isinstance(node, Consumer | TakeFile):
        return Folder(group_of(node), ".consumers")
    return Folder(group_of(node), ".kept") if isinstance(node, SnapshotNode) else group_of(node)


def path_of(node: Node) -> tuple[str, ...]:
    """The names from the root to it, by now."""
    names: list[str] = []
    while (above := parent(node)) is not node:
        names.append(node.name)
        node = above
    return tuple(reversed(names))


def path_text(node: Node) -> str:
    """The same, as it is printed."""
    return print_path(path_of(node))
