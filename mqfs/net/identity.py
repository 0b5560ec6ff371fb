"""Names and numbers of users and groups, by a small cache of the system's database. Decides no permission."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mqfs import limits
from mqfs.errors import BadRequest
from mqfs.model import Grant, User

NOBODY = 65_534
NONUNAME = 0xFFFF_FFFF  # no number: the user has a name only
NAME_BYTES = 256  # of a user or group: the bound of Linux (LOGIN_NAME_MAX)


def file_mask() -> int:
    """The umask of this process. Read, not set: other threads may create files meanwhile."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        found = re.search(r"^Umask:\s*([0-7]+)", file.read(), re.MULTILINE)
    return int(found[1], 8) if found else 0o022


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
    digits = name.isascii() and name.isdigit() and len(name) <= len(str(NONUNAME))  # int() refuses thousands of them
    return int(name) if digits and int(name) < NONUNAME else None


def user_number(name: str) -> int | None:
    """The number of a user by name (or by number in digits); None where there is none."""
    found: int | None = _recent(_user_number, name, period()) if len(name) <= NAME_BYTES else None
    return found


def group_number(name: str) -> int | None:
    """The number of a group by name (or by number in digits); None where there is none."""
    found: int | None = _recent(_group_number, name, period()) if len(name) <= NAME_BYTES else None
    return found


def _user_number(name: str) -> int | None:
    return _number(name, lambda text: pwd.getpwnam(text).pw_uid)


def _group_number(name: str) -> int | None:
    return _number(name, lambda text: grp.getgrnam(text).gr_gid)


def period() -> int:
    return int(time.monotonic() / limits.NAMES_S)


@lru_cache(maxsize=1_024)
def _recent(look_up: Callable[[Any], Any], of: Any, period: int) -> Any:
    """An answer of the system's database, cached for a period: a directory service may be slow."""
    return look_up(of)


def group_wanted(name: str, user: User) -> int:
    """The number of a group that a client named: one of the user's own, or any for root. Raises BadRequest."""
    for own in (user.gid, *user.groups):
        if name in (group_name(own), str(own)):
            return own
    gid = group_number(name) if user.uid == 0 or name.isdigit() else None
    if gid is None:
        raise BadRequest(f"unknown group {name!r} (expected one of the user's groups)")
    return gid


def _membership(of: tuple[int, int | None]) -> tuple[int, frozenset[int]]:
    """Primary and supplementary groups of (user, its group by the socket); the latter stands in for an unknown user."""
    uid, gid = of
    try:
        known = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return (NOBODY if gid is None else gid), frozenset()
    return known.pw_gid, frozenset(os.getgrouplist(known.pw_name, known.pw_gid))


def user(uid: int, where: str, *, gid: int | None = None, pid: int = 0, grant: Grant | None = None) -> User:
    """A user with its groups in the system's database. `grant`: of its token."""
    primary, groups = _recent(_membership, (uid, gid), period())
    return User(uid, primary, groups, pid, where, grant)
