"""Whose files a command works on: run by root, it acts as their owner, as their server does.

What root would make among them, the server's user could not read, and the next start would be refused:

    /var/lib/mqfs   mqfs:mqfs 700      check --fix, by root     its repaired segments belong to mqfs

Modules that are still to be imported may be closed to that user: import them first.
"""

from __future__ import annotations

import os
import pwd

from mqfs.errors import BadConfig


def become(user: str) -> None:
    """Be another user, with its groups.

    Args:
        user: A name, or a number in decimal.

    Raises:
        BadConfig: There is no such user.
    """
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, OverflowError):
        raise BadConfig(f"uid={user}: unknown user (expected one of getent passwd)") from None
    if entry.pw_uid != os.geteuid():
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)


def become_owner(path: str) -> str:
    """As root, be the owner of a file or directory; of one that does not exist, of the directory nearest above it.

    Args:
        path: The file or directory; links are followed.

    Returns:
        The name of the user, or its number where it has none; empty where this process stays who it is.

    Raises:
        OSError: It cannot be looked at.
    """
    if os.geteuid() != 0:
        return ""
    path = os.path.realpath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    status = os.lstat(path)
    if status.st_uid == 0:
        return ""
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        os.setgroups([])
        os.setgid(status.st_gid)
        os.setuid(status.st_uid)
        return str(status.st_uid)
    become(user)
    return user
