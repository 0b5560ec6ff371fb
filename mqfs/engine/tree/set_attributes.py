"""chmod and chown of a file of the tree."""

from __future__ import annotations

from mqfs import errors
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import ADMIN, require_owner
from mqfs.engine.nodes.own_files import Folder, SnapshotNode, TakeFile
from mqfs.engine.nodes.places import Node
from mqfs.engine.nodes.txn_nodes import StagedStream
from mqfs.engine.routing.view import View
from mqfs.engine.tree.grants import permit
from mqfs.engine.tree.node_stat import attributes
from mqfs.model import User
from mqfs.wait import Step


def set_attributes(user: User, node: Node, mode: int | None, uid: int | None, gid: int | None) -> Step[None]:
    """For the owner; a new owner only by root, a new group only one of the user's. Raises NotFound, NotPermitted,
    Denied."""
    own = attributes(node)
    if node.removed:
        raise errors.NotFound(f"{node.name} was removed")
    if isinstance(node, Folder | SnapshotNode | TakeFile | View | StagedStream):
        raise errors.NotPermitted(f"{node.name} has the permissions of what it shows")
    permit(user, node, ADMIN)
    require_owner(user, own, node.name)
    if uid is not None and uid != own.uid and user.uid != 0:
        raise errors.NotPermitted("only root gives a file to another owner")
    if gid is not None and gid != own.gid and user.uid != 0 and gid not in (user.gid, *user.groups):
        raise errors.NotPermitted("a file can only be given to a group that you are in")
    new = [own.mode if mode is None else mode & 0o7777, own.uid if uid is None else uid, own.gid]
    if gid is not None:
        new[2] = gid
    if new == [own.mode, own.uid, own.gid]:
        return None
    number = 0 if isinstance(node, Group) else node.number
    node.group.log.change({"do": "attributes", "file": number, "mode": new[0], "uid": new[1], "gid": new[2]})
    return node.group.log.after_metadata_sync(None)
