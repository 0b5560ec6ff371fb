"""Who acts: the names and numbers of users and groups, and on whose behalf a connection may attach.

Owns a small cache of the system's names for numbers, and the rule of Identity in mqfs(4): over a unix socket a client
is who the socket says; over TCP everybody without a token is one configured user.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mqfs import limits
from mqfs.errors import BadRequest, Denied
from mqfs.model import User

if TYPE_CHECKING:
    from mqfs.net.tokens import Tokens

NOBODY = 65_534
NONUNAME = 0xFFFF_FFFF  # instead of a number: who is meant has a name only


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
    found: int | None = _recent(_user_number, name, _period())
    return found


def group_number(name: str) -> int | None:
    """The number of a group by name (or by number in digits); None where there is none."""
    found: int | None = _recent(_group_number, name, _period())
    return found


def _user_number(name: str) -> int | None:
    return _number(name, lambda text: pwd.getpwnam(text).pw_uid)


def _group_number(name: str) -> int | None:
    return _number(name, lambda text: grp.getgrnam(text).gr_gid)


def _period() -> int:
    return int(time.monotonic() / limits.NAMES_S)


@lru_cache(maxsize=1_024)
def _recent(look_up: Callable[[Any], Any], of: Any, period: int) -> Any:
    """What the system says, asked once in a period: it may have to ask a directory service, and everybody waits."""
    return look_up(of)


def group_wanted(name: str, user: User) -> int:
    """The number of a group that a client named: one that it is in, or for root any."""
    for own in (user.gid, *user.groups):
        if name in (group_name(own), str(own)):
            return own
    gid = group_number(name) if user.uid == 0 or name.isdigit() else None
    if gid is None:
        raise BadRequest(f"no group is called {name!r}")
    return gid


def _membership(of: tuple[int, int | None]) -> tuple[int, frozenset[int]]:
    """Primary and supplementary groups; the second of `of` is what the socket says of a user the system does not
    know."""
    uid, gid = of
    try:
        known = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return (NOBODY if gid is None else gid), frozenset()
    return known.pw_gid, frozenset(os.getgrouplist(known.pw_name, known.pw_gid))


def user(uid: int, where: str, *, gid: int | None = None, pid: int = 0) -> User:
    """A user with the groups the system's database gives."""
    primary, groups = _recent(_membership, (uid, gid), _period())
    return User(uid, primary, groups, pid, where)


_looked_up: dict[int, int] = {}  # each user, and in which period


class Peer:
    """Who is at the other end of one connection."""

    def __init__(
        self,
        where: str,
        uid: int,
        gid: int | None = None,
        pid: int = 0,
        *,
        groups: frozenset[int] | None = None,
        fixed: bool = False,
        host: str = "",
        tokens: Tokens | None = None,
    ) -> None:
        """`fixed`: whatever a client says, it acts as `uid` (TCP), but for one with a token. `host`: where it is.
        `groups`: those that the peer's process has, with `gid`; None: those the system's database gives."""
        self.where, self.uid, self.gid, self.pid, self.fixed, self.tokens = where, uid, gid, pid, fixed, tokens
        self.groups = groups
        self.account: Hashable = host or uid  # whose share its connection, and what that holds, comes from

    def attach(self, uname: str, n_uname: int) -> User:
        """The user of an attach; Denied if this peer may not act as that one."""
        if self.fixed or self._is_itself(uname, n_uname):
            return self.itself()
        if self.uid not in (0, os.geteuid()):
            wanted = uname if n_uname == NONUNAME else n_uname  # not its name: nobody asks the system for that here
            raise Denied(f"user {user_name(self.uid)} cannot attach as {wanted}")
        uid = user_number(uname) if n_uname == NONUNAME else n_uname
        if uid is None:
            raise Denied(f"no user is called {uname!r}")
        return self.itself() if uid == self.uid else user(uid, self.where, pid=self.pid)

    def _is_itself(self, uname: str, n_uname: int) -> bool:
        """Whether an attach names the peer, or nobody. Asks nobody about a name that a client chose."""
        if n_uname != NONUNAME:
            return n_uname == self.uid
        return uname in ("", user_name(self.uid), str(self.uid))

    @property
    def is_known(self) -> bool:
        """Whether what the system says of it was looked up lately."""
        return _looked_up.get(self.uid) == _period()

    def look_up(self) -> None:
        """Ask the system for all that an attach needs. On any thread: it may take long."""
        user_name(self.uid)
        group_name(self.itself().gid)
        if len(_looked_up) >= 1_024:
            _looked_up.clear()
        _looked_up[self.uid] = _period()

    def itself(self) -> User:
        """Who the other end is."""
        if self.groups is None or self.gid is None:
            return user(self.uid, self.where, gid=self.gid, pid=self.pid)
        return User(self.uid, self.gid, self.groups, self.pid, self.where)
