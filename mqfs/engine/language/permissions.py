"""Permissions of users on files: the POSIX class rule, the same for every front end."""

from __future__ import annotations

import stat
from typing import Any

from mqfs.errors import Denied, NotPermitted
from mqfs.model import QTDIR, QTFILE, SCOPES, Qid, User
from mqfs.state.group import Attributes

R, W, X = 4, 2, 1
ADMIN = 8  # make, remove, rename, set: checked against the scope of a token, never against a file's mode


def allowed(user: User, file: Attributes, mask: int) -> bool:
    """Whether the class of bits that applies to the user has all of `mask`. Root is allowed everything."""
    if user.uid == 0:
        return True
    if user.uid == file.uid:
        bits = file.mode >> 6
    elif user.gid == file.gid or file.gid in user.groups:
        bits = file.mode >> 3
    else:
        bits = file.mode
    return bits & mask == mask


def require(user: User, file: Attributes, mask: int, what: str) -> None:
    if not allowed(user, file, mask):
        verbs = [verb for bit, verb in ((R, "read"), (W, "write"), (X, "enter")) if mask & bit]
        mode = f"mode {file.mode & 0o777:03o} of uid {file.uid}"
        raise Denied(f"cannot {' and '.join(verbs)} {what!r}: {mode} excludes uid {user.uid}")


def require_scope(user: User, mask: int, what: str) -> None:
    """Check the scope of the user's token, if any. Raises Denied."""
    grant = user.grant
    if grant is not None and mask & ~SCOPES[grant.scope]:
        needed = next(scope for scope, bits in SCOPES.items() if not mask & ~bits)
        raise Denied(f"token {grant.id} has scope {grant.scope} for {what} (expected {needed})")


def sees(user: User, group: Attributes, stream: Attributes) -> bool:
    """Whether a group's own files show the user the name and counts of a stream. A user who may not list the group
    sees the streams that it may read."""
    return user.uid == group.uid or allowed(user, group, R) or allowed(user, stream, R)


def require_owner(user: User, file: Attributes, what: str) -> None:
    if user.uid not in (0, file.uid):
        raise NotPermitted(f"{what}: owned by uid {file.uid} (expected that user or root, not uid {user.uid})")


def require_unsticky(user: User, directory: Attributes, file: Attributes, name: str) -> None:
    """Check that a sticky directory lets the user remove the file: only root and the owners of either may. Raises
    NotPermitted."""
    if directory.mode & stat.S_ISVTX and user.uid not in (0, file.uid, directory.uid):
        raise NotPermitted(f"{name!r}: in a sticky directory (expected its owner, or the directory's)")


def bits_for_writers(mode: int) -> int:
    """Return r and w for each class that has w in `mode`."""
    return sum(0o6 << shift for shift in (0, 3, 6) if mode >> shift & 0o2)


class Numbered:
    """A mixin for streams, consumers, views and a group's own files: files with a number in their group."""

    __slots__ = ()
    directory = False

    @property
    def qid(self: Any) -> Qid:  # of a class with a group and a number
        return Qid(QTDIR if self.directory else QTFILE, 0, self.group.number << 32 | self.number)
