"""`mqfs token`: make, list and revoke the tokens of a file. A running server reads it again within a second."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from mqfs import limits
from mqfs.errors import BadCommand, BadConfig, NotFound
from mqfs.model import SCOPES
from mqfs.net import identity
from mqfs.net.tokens import is_token, parse_lines, parse_token, read_bytes
from mqfs.server.options import read_file
from mqfs.store.disk import Disk, removed_on_error
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.lines import (
    MARK,
    TokenLine,
    digest,
    new_secret,
    parse_moment,
    parse_path,
    parse_scope,
    print_line,
    print_moment,
    print_path,
)

_HASHED = re.compile(rb"\s*\S+\s+%b([0-9A-Za-z]{1,32}):" % MARK.encode())  # at the beginning of a line


def _of_file(do: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose first argument is the path of the file that two options name."""

    @click.option("--token-file", metavar="FILE", help="File of tokens, as of serve.")
    @click.option("--config", metavar="FILE", help="TOML file of serve that names the file of tokens.")
    @functools.wraps(do)
    def command(token_file: str | None, config: str | None, **arguments: Any) -> None:
        if token_file is None and config is not None:
            token_file = read_file(config).get("token_file")
        if token_file is None:
            raise click.UsageError("no file of tokens (expected --token-file FILE, or --config FILE with token-file)")
        do(os.path.realpath(token_file), **arguments)

    return command


@click.group()
def token() -> None:
    """Manage bearer tokens, the credentials of clients over TCP and TLS."""


@token.command()
@click.argument("user")
@click.option("--scope", default="admin", metavar="SCOPE", show_default=True, help=f"Scope: {', '.join(SCOPES)}.")
@click.option("--path", default="/", metavar="PATH", show_default=True, help="Group or file that it is limited to.")
@click.option("--expires", metavar="WHEN", help="End: YYYY-MM-DD, YYYY-MM-DDTHH:MM:SSZ (UTC), or a duration from now.")
@click.option("--note", default="", metavar="TEXT", help="Comment in the file.")
@_of_file
def new(file: str, user: str, scope: str, path: str, expires: str | None, note: str) -> None:
    """Add a token of USER. Prints the secret, which is stored nowhere."""
    if identity.user_number(user) is None:
        raise BadConfig(f"unknown user {user!r} (expected one of getent passwd)")
    if not note.isprintable():
        raise BadConfig("--note: control characters (expected one line)")
    try:
        parsed, rights = parse_path(path), parse_scope(scope)
        until = math.inf if expires is None else _moment(expires)
    except BadCommand as error:
        raise BadConfig("--" + error.detail) from None
    with locked(file, make=True) as lines:
        known = {parse_token(file, number, line).id for number, line in enumerate(lines, 1) if is_token(line)}
        made, secret = new_secret()
        while made in known:
            made, secret = new_secret()
        line = print_line(TokenLine(user, made, digest(secret.encode()), rights, parsed, until, note)).encode()
        lines.append(line)
    try:
        click.echo(secret)
    except OSError:  # a token without its secret is of no use
        with locked(file, check=False) as lines:
            lines.remove(line)
        raise
    _warn(file, lines)


@token.command()
@_of_file
def ls(file: str) -> None:
    """List the tokens: ID, user, scope, path, expiry, note."""
    lines = _lines(file)
    for number, line in enumerate(lines, 1):
        if not is_token(line):
            continue
        try:
            parsed = parse_token(file, number, line)
        except BadConfig:
            continue  # reported below
        until = "" if parsed.expires == math.inf else print_moment(parsed.expires)
        until += " (expired)" if parsed.expires <= time.time() else ""
        row = (parsed.id, parsed.user, parsed.scope, print_path(parsed.path), until or "never", parsed.note)
        click.echo("\t".join(row).rstrip())
    parse_lines(file, b"\n".join(lines))


@token.command()
@click.argument("token_id", metavar="ID")
@_of_file
def revoke(file: str, token_id: str) -> None:
    """Remove the token of this ID. A running server ends its connections within a second."""
    with locked(file, check=False) as lines:
        left = [line for number, line in enumerate(lines, 1) if _id_of(file, number, line) != token_id]
        if len(left) == len(lines):
            raise NotFound(f"no token {token_id!r} in {file} (expected an ID of mqfs token ls)")
        lines[:] = left
    try:
        _warn(file, lines)
    except BadConfig as error:
        raise BadConfig(f"{error} (token {token_id} is removed, but stays in force until the file is valid)") from None


def _id_of(file: str, number: int, line: bytes) -> str | None:
    """Return the ID of the token on a line, also of a malformed one, or None if there is none."""
    if not is_token(line):
        return None
    try:
        return parse_token(file, number, line).id
    except BadConfig:
        found = _HASHED.match(line)
        return found[1].decode() if found is not None else None


def _warn(file: str, lines: list[bytes]) -> None:
    """Warn of each line whose user the system does not know. Raises BadConfig for a malformed line."""
    for where, line in parse_lines(file, b"\n".join(lines)):
        if identity.user_number(line.user) is None:
            why = (
                f"unknown user {line.user!r}: its token is not valid unless it is in force, and a server does not start"
            )
            click.echo(f"mqfs: {where}: {why} (expected one of getent passwd)", err=True)


def _lines(file: str) -> list[bytes]:
    """Return the lines as the server reads them. Root may edit the file of any server's user."""
    try:
        owner = os.stat(file).st_uid if os.geteuid() == 0 else os.geteuid()
    except OSError as error:
        raise _unreadable(file, error) from None
    return read_bytes(file, owner).splitlines()


def _unreadable(file: str, error: OSError) -> BadConfig:
    return BadConfig(f"--token-file {file}: {error.strerror} (expected a readable file)")


def _moment(word: str) -> float:
    """Return the UNIX time of a date or of a duration from now. Raises BadConfig."""
    try:
        is_duration = word[:1].isdigit() and word[-1] in "smhd"
        until = time.time() + parse_duration(word) / 1e9 if is_duration else parse_moment(word)
    except BadCommand:
        expected = "YYYY-MM-DD, YYYY-MM-DDTHH:MM:SSZ or a duration such as 30d"
        raise BadConfig(f"--expires {word!r}: invalid time (expected {expected})") from None
    if until <= time.time():
        raise BadConfig(f"--expires {word!r}: in the past (expected a later time)")
    return until


@contextlib.contextmanager
def locked(file: str, *, make: bool = False, check: bool = True) -> Iterator[list[bytes]]:
    """Yield the lines of a file, to be edited by one process at a time.

    The file is replaced by a rename, with its owner and mode 600. `make`: make it if it does not exist. Raises
    BadConfig, and leaves the file as it was, if the server could not read the result, or, with `check`, would refuse
    it.
    """
    descriptor = _lock(file, os.O_CREAT if make else 0)
    try:
        lines = _lines(file)
        yield lines
        data = b"".join(line + b"\n" for line in lines)
        if len(data) > limits.TOKEN_FILE_BYTES:
            raise BadConfig(f"--token-file {file}: too long (expected at most {limits.TOKEN_FILE_BYTES} bytes)")
        if check:
            parse_lines(file, data)
        try:
            _replace(file, data, os.fstat(descriptor))
        except OSError as error:
            raise OSError(error.errno, error.strerror, file) from None
    finally:
        os.close(descriptor)


def _replace(file: str, data: bytes, status: os.stat_result) -> None:
    """Replace the file with a new one of the same owner, on disk: a power cut must not bring a revoked token back."""
    disk, folder = Disk(), os.path.dirname(file)
    made, beside = tempfile.mkstemp(prefix=f"{os.path.basename(file)}.", dir=folder)  # of mode 600
    with removed_on_error(disk, beside):
        with open(made, "wb") as out:
            if status.st_uid != os.geteuid():
                os.fchown(out.fileno(), status.st_uid, status.st_gid)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.rename(beside, file)
    disk.sync_folder(folder)


def _lock(file: str, flags: int) -> int:
    """Return a descriptor of the locked file. Open it again if an editor replaced it meanwhile. Raises BadConfig."""
    while True:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | flags, 0o600)
        except OSError as error:
            raise _unreadable(file, error) from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        os.close(descriptor)
