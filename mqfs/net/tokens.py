"""Tokens: who a client over TCP is, by a secret that it writes to the fid of its Tauth.

Owns the file of tokens and what is known of one such fid. Which connections may use them is the server's choice.
"""

from __future__ import annotations

import hmac
import os
import stat

from mqfs import limits
from mqfs.errors import BadConfig, BadRequest, Denied, TooLong
from mqfs.net import identity
from mqfs.net.identity import NONUNAME

RIGHT = "a line is USER SECRET, the secret at least {least} bytes without blanks"


class Tokens:
    """Secrets, and whose they are. A user may have several."""

    def __init__(self, secrets: list[tuple[int, bytes]]) -> None:
        self._secrets = secrets

    def user(self, secret: bytes) -> int | None:
        """Whose secret that is. It takes as long whichever it is, or none."""
        found = None
        for uid, one in self._secrets:
            if hmac.compare_digest(one, secret):
                found = uid
        return found


def read_file(path: str) -> Tokens:
    """The tokens of a file that only its owner can read or write. Raises BadConfig."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(limits.TOKEN_FILE_BYTES + 1)
    except OSError as error:
        raise BadConfig(f"--token-file {path}: {error.strerror}; a file that can be read is right") from None
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise BadConfig(
            f"--token-file {path} is open to others; chmod 600, and the server's user or root as its owner, is right"
        )
    if len(data) > limits.TOKEN_FILE_BYTES:
        raise BadConfig(f"--token-file {path}: at most {limits.TOKEN_FILE_BYTES} bytes is right")
    return Tokens([entry for number, line in enumerate(data.splitlines(), 1) if (entry := _entry(path, number, line))])


def _entry(path: str, number: int, line: bytes) -> tuple[int, bytes] | None:
    """What a line says; nothing where it is empty or a comment. The secret is in no error."""
    words = line.split()
    if not words or words[0].startswith(b"#"):
        return None
    if len(words) != 2 or not limits.TOKEN_LEAST_BYTES <= len(words[1]) <= limits.TOKEN_BYTES:
        raise BadConfig(f"--token-file {path}, line {number}: {RIGHT.format(least=limits.TOKEN_LEAST_BYTES)}")
    name = words[0].decode("utf-8", "replace")
    uid = identity.user_number(name)
    if uid is None:
        raise BadConfig(
            f"--token-file {path}, line {number}: no user is called {name!r}; name one that getent passwd lists"
        )
    return uid, words[1]


class Proof:
    """A fid of Tauth: for whom, and whether the secret came."""

    def __init__(self, tokens: Tokens, uname: str, n_uname: int) -> None:
        self._tokens, self._uname, self._n_uname = tokens, uname, n_uname
        self.uid: int | None = None  # who it is, once that is proven

    def write(self, data: bytes) -> int:
        """The secret, whole; a newline may follow."""
        if self.uid is not None:
            raise BadRequest("the token was written already")
        if len(data) > limits.TOKEN_BYTES + 1:
            raise TooLong(f"a token has at most {limits.TOKEN_BYTES} bytes")
        uid = self._tokens.user(data.rstrip(b"\r\n"))
        if uid is None or not self._asked_for(uid):
            raise Denied("the token is not one of this server's" + (f" for user {self._uname}" if self._uname else ""))
        self.uid = uid
        return len(data)

    def _asked_for(self, uid: int) -> bool:
        """Whether the Tauth named that user, or nobody."""
        if self._n_uname != NONUNAME:
            return self._n_uname == uid
        return self._uname in ("", identity.user_name(uid), str(uid))

    def user(self, uname: str, n_uname: int) -> int:
        """Who an attach with it acts as. Raises Denied."""
        if self.uid is None:
            raise Denied("no token was written to the fid of Tauth")
        if (uname, n_uname) != (self._uname, self._n_uname):
            raise Denied("Tauth was for another user than this Tattach")
        return self.uid


__all__ = ["Proof", "Tokens", "read_file"]
