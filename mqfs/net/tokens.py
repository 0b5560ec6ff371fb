"""Tokens: secrets that identify TCP clients, each written to the fid of a Tauth.

Owns the token file and the state of one such fid. The server chooses the connections that may use them.
"""

from __future__ import annotations

import hmac
import os
import stat

from mqfs import limits
from mqfs.errors import BadConfig, BadRequest, Denied, TooLong
from mqfs.net import identity
from mqfs.net.identity import NONUNAME

FORM = "USER SECRET, the secret at least {least} bytes without blanks"


class Tokens:
    """Secrets and their users. A user may have several."""

    def __init__(self, secrets: list[tuple[int, bytes]]) -> None:
        self._secrets = secrets

    def user(self, secret: bytes) -> int | None:
        """The user of a secret. Takes equally long for every secret, also an unknown one."""
        found = None
        for uid, one in self._secrets:
            if hmac.compare_digest(one, secret):
                found = uid
        return found


def read_file(path: str) -> Tokens:
    """The tokens of a file with no access for group and others. Raises BadConfig."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(limits.TOKEN_FILE_BYTES + 1)
    except OSError as error:
        raise BadConfig(f"--token-file {path}: {error.strerror} (expected a readable file)") from None
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise BadConfig(f"--token-file {path}: open to others (expected mode 600, owned by the server's user or root)")
    if len(data) > limits.TOKEN_FILE_BYTES:
        raise BadConfig(f"--token-file {path}: too long (expected at most {limits.TOKEN_FILE_BYTES} bytes)")
    return Tokens([entry for number, line in enumerate(data.splitlines(), 1) if (entry := _entry(path, number, line))])


def _entry(path: str, number: int, line: bytes) -> tuple[int, bytes] | None:
    """User and secret of a line; None for an empty line or a comment. The secret is in no error."""
    words = line.split()
    if not words or words[0].startswith(b"#"):
        return None
    if len(words) != 2 or not limits.TOKEN_LEAST_BYTES <= len(words[1]) <= limits.TOKEN_BYTES:
        form = FORM.format(least=limits.TOKEN_LEAST_BYTES)
        raise BadConfig(f"--token-file {path}, line {number}: malformed (expected {form})")
    name = words[0].decode("utf-8", "replace")
    uid = identity.user_number(name)
    if uid is None:
        raise BadConfig(f"--token-file {path}, line {number}: unknown user {name!r} (expected one of getent passwd)")
    return uid, words[1]


class Proof:
    """The fid of a Tauth: the user it names, and whether the secret was written."""

    def __init__(self, tokens: Tokens, uname: str, n_uname: int) -> None:
        self._tokens, self._uname, self._n_uname = tokens, uname, n_uname
        self.uid: int | None = None  # once proven

    def write(self, data: bytes) -> int:
        """Check the secret, whole; a newline may follow. Raises Denied, TooLong, BadRequest."""
        if self.uid is not None:
            raise BadRequest("token already written")
        if len(data) > limits.TOKEN_BYTES + 1:
            raise TooLong(f"token of {len(data)} bytes (expected at most {limits.TOKEN_BYTES})")
        uid = self._tokens.user(data.rstrip(b"\r\n"))
        if uid is None or not self._asked_for(uid):
            raise Denied("unknown token" + (f" for user {self._uname!r}" if self._uname else ""))
        self.uid = uid
        return len(data)

    def _asked_for(self, uid: int) -> bool:
        """Whether the Tauth named that user, or none."""
        if self._n_uname != NONUNAME:
            return self._n_uname == uid
        return self._uname in ("", identity.user_name(uid), str(uid))

    def user(self, uname: str, n_uname: int) -> int:
        """The user of an attach with this fid. Raises Denied."""
        if self.uid is None:
            raise Denied("no token written to the fid of Tauth")
        if (uname, n_uname) != (self._uname, self._n_uname):
            raise Denied("Tattach names another user than its Tauth")
        return self.uid


__all__ = ["Proof", "Tokens", "read_file"]
