"""What a user may do with a file: by its mode, and by the token that the user came with.

A token narrows its user's permissions to a scope and to a path: one file, or a group and all below it. Above the path
its groups can be walked through and nothing else. Any other name is Denied, whether it is there or not: "file does not
exist" would have to be answered for what does exist, and would make clients try to create it.
"""

from __future__ import annotations

from mqfs.engine.language.permissions import ADMIN, R, W, X, require, require_scope
from mqfs.engine.nodes.own_files import Meta
from mqfs.engine.nodes.places import Node, path_of
from mqfs.engine.nodes.txn_nodes import StagingFolder, TxnCtl
from mqfs.engine.tree.node_stat import attributes
from mqfs.errors import Denied
from mqfs.model import Grant, User
from mqfs.syntax.token_line import print_path

CHANGE = W | X | ADMIN  # of a directory


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
    """Check the token for what `.txn` does with parts, which has rules of its own for modes. Raises Denied."""
    if user.grant is not None:
        require_scope(user, W, directory.name)
        _require_path(user.grant, path_of(directory))


def permit_open(user: User, node: Node, reads: bool, writes: bool, *, made: bool) -> None:
    """Check an open(2). `made`: by this very call, so the mode does not bind the user. Raises Denied."""
    mask = (R if reads else 0) | (W if writes else 0)
    if user.grant is not None:
        require_scope(user, _scope_of(node, mask), node.name)
        _require_path(user.grant, path_of(node))
    if not made:
        require(user, attributes(node), mask, node.name)


def _scope_of(node: Node, mask: int) -> int:
    """The scope that it takes. A write to `.cursor` is its reader's own affair, a part of a transaction a publish."""
    if isinstance(node, StagingFolder):
        return mask & ~ADMIN
    if isinstance(node, Meta) and mask & W and not isinstance(node, TxnCtl):
        return {"ctl": mask | ADMIN, ".cursor": mask & ~W}.get(node.name, mask)
    return mask


def _require_path(grant: Grant, path: tuple[str, ...], *, through: bool = False) -> None:
    """Raises Denied outside of a token's path. `through`: the groups above it will do."""
    wanted = grant.path
    if path[: len(wanted)] != wanted and not (through and wanted[: len(path)] == path):
        raise Denied(f"token {grant.id} has path {print_path(wanted)}, not {print_path(path)}")
