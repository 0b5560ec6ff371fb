"""The user of a command that works on files: run by root, it acts as their owner, as their server does.

The server's user could not read files that root makes among its own, and the next start would be refused:

    /var/lib/mqfs   mqfs:mqfs 700      check --fix, by root     its repaired segments belong to mqfs

That user may not be able to read modules that are imported later: import them first.

Also values of the command line: callbacks of click, which report an invalid one as a usage error.
"""

from __future__ import annotations

import os
import pwd

import click

from mqfs.errors import BadAddress, BadCommand, BadConfig
from mqfs.net.sockets import parse_addresses
from mqfs.syntax.duration import parse_duration


def become(user: str) -> None:
    """Act as another user, with its groups.

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
    """If root, act as the owner of a file or directory; if it does not exist, of the nearest directory above.

    Args:
        path: The file or directory; links are followed.

    Returns:
        The name of the user, or its number if it has no name; empty if this process keeps its user.

    Raises:
        OSError: The path cannot be examined.
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


# ------------------------------------------------------------ values of the command line


def duration(context: click.Context, option: click.Parameter, value: str) -> int:
    """Return the nanoseconds of a duration, as a callback of click. Raises BadParameter."""
    try:
        return parse_duration(value)
    except BadCommand as error:
        raise click.BadParameter(error.detail) from None


def duration_s(context: click.Context, option: click.Parameter, value: str) -> float:
    """Return the seconds of a duration, as `duration` does."""
    return duration(context, option, value) / 1e9


def more_than_0(context: click.Context, option: click.Parameter, value: str) -> int:
    """Return the nanoseconds of a duration that is not 0, as `duration` does."""
    if not (ns := duration(context, option, value)):
        raise click.BadParameter(f"{value!r} (expected more than 0)")
    return ns


def wait_s(context: click.Context, option: click.Parameter, value: str) -> float:
    """Return the seconds of a duration that is not 0, as `more_than_0` does."""
    return more_than_0(context, option, value) / 1e9


def addresses(context: click.Context, argument: click.Parameter, value: str | None) -> str | None:
    """Return the address of a server, or several separated by commas, as a callback of click; None: not given. Raises
    BadParameter."""
    try:
        if value is not None:
            parse_addresses(value)
    except BadAddress as error:
        raise click.BadParameter(error.detail) from None
    return value
