"""Who acts: the names and numbers of users and groups, and on whose behalf a connection may attach.

Owns a small cache of the system's names for numbers, and the rule of Identity in mqfs(4): over a unix socket a client
is who the socket says; over TCP everybody without a token is one configured user.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TYPE_CHECKING

from mqfs.errors import BadRequest, Denied
from mqfs.ninep.messages import NONUNAME
from mqfs.types import User

if TYPE_CHECKING:
    from mqfs.ninep.tokens import Tokens

NOBODY = 65_534


@lru_cache(maxsize=1_024)
def user_name(uid: int) -> str:
    """The name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


@lru_cache(maxsize=1_024)
def group_name(gid: int) -> str:
    """The name of a group, or the number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return str(gid)


def _number(name: str, find: Callable[[str], int]) -> int | None:
    with contextlib.suppress(KeyError, ValueError):
        return find(name)
    return int(name) if name.isascii() and name.isdigit() and int(name) < NONUNAME else None


def user_number(name: str) -> int | None:
    """The number of a user by name (or by number in digits); None where there is none."""
    return _number(name, lambda text: pwd.getpwnam(text).pw_uid)


def group_number(name: str) -> int | None:
    """The number of a group by name (or by number in digits); None where there is none."""
    return _number(name, lambda text: grp.getgrnam(text).gr_gid)


def group_wanted(name: str) -> int:
    """The number of a group that a client named."""
    gid = group_number(name)
    if gid is None:
        raise BadRequest(f"no group is called {name!r}")
    return gid


def _membership(uid: int, gid: int | None) -> tuple[int, frozenset[int]]:
    """Primary and supplementary groups; `gid` is what the socket says of a user the system does not know."""
    try:
        known = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return (NOBODY if gid is None else gid), frozenset()
    return known.pw_gid, frozenset(os.getgrouplist(known.pw_name, known.pw_gid))


def user(uid: int, where: str, *, gid: int | None = None, pid: int = 0) -> User:
    """A user with the groups the system's database gives."""
    primary, groups = _membership(uid, gid)
    return User(uid, primary, groups, pid, where)


class Peer:
    """Who is at the other end of one connection."""

    def __init__(
        self,
        where: str,
        uid: int,
        gid: int | None = None,
        pid: int = 0,
        *,
        fixed: bool = False,
        host: str = "",
        tokens: Tokens | None = None,
    ) -> None:
        """`fixed`: whatever a client says, it acts as `uid` (TCP), but for one with a token. `host`: where it is."""
        self.where, self.uid, self.gid, self.pid, self.fixed, self.tokens = where, uid, gid, pid, fixed, tokens
        self.account: Hashable = host or uid  # whose share its connection, and what that holds, comes from

    def attach(self, uname: str, n_uname: int) -> User:
        """The user of an attach; Denied if this peer may not act as that one."""
        uid = self.uid if self.fixed else self._wanted(uname, n_uname)
        if uid == self.uid:
            return user(uid, self.where, gid=self.gid, pid=self.pid)
        if self.uid not in (0, os.geteuid()):
            raise Denied(f"user {user_name(self.uid)} cannot attach as {user_name(uid)}")
        return user(uid, self.where, pid=self.pid)

    def _wanted(self, uname: str, n_uname: int) -> int:
        if n_uname != NONUNAME:
            return n_uname
        if not uname:
            return self.uid
        uid = user_number(uname)
        if uid is None:
            raise Denied(f"no user is called {uname!r}")
        return uid
