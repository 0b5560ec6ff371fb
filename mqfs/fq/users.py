"""The system user of an fq client: `--fq-users`, and tokens as passwords.

The file of users has lines USER SYSTEM-USER; USER is the name that an fq client authenticates with.
"""

from __future__ import annotations

from mqfs import limits
from mqfs.errors import BadConfig, Denied
from mqfs.http.gate import Gate
from mqfs.model import User
from mqfs.net import identity
from mqfs.net.peer import Peer


def read_users(path: str) -> dict[str, str]:
    """Read the file of `--fq-users`: the system user by client name. Raises BadConfig."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(limits.CONFIG_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise BadConfig(f"--fq-users {path}: {reason} (expected a readable file)") from None
    if len(text) > limits.CONFIG_BYTES:
        raise BadConfig(f"--fq-users {path}: too long (expected at most {limits.CONFIG_BYTES} characters)")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or identity.user_number(words[1]) is None or words[0] in found:
            raise BadConfig(f"--fq-users {path}: line {number} (expected USER SYSTEM-USER, each USER once)")
        found[words[0]] = words[1]
    return found


class Users:
    """The authentication of fq clients. `names`: from `--fq-users`; None without it. `checks`: whether there is a token
    file."""

    def __init__(self, gate: Gate, names: dict[str, str] | None = None, *, checks: bool = False) -> None:
        self._gate, self._names, self._checks = gate, names, checks

    def user(self, peer: Peer, name: bytes, password: bytes) -> User:
        """Return the user of a client. Without a token file a password is ignored, as by fq itself. Raises
        Unauthorized, Denied, NotAnswered."""
        authorization = None
        if peer.tokens is not None and password:
            authorization = f"Bearer {password.decode('latin-1')}"
        user = self._gate.user(peer, authorization)
        text = name.decode(errors="replace")
        if self._names is not None and text not in self._names:
            raise Denied(f"unknown user {text!r}")
        if user.grant is not None:
            wanted = text if self._names is None else self._names[text]
            if identity.user_number(wanted) != user.uid:
                raise Denied(f"user {text!r}: wrong password (expected a token of this user)")
        else:
            self.require_name(user, text)
        return user

    def require_name(self, user: User, text: str) -> None:
        """Check that a user may send messages with a sender's name from the file. Raises Denied, NotAnswered."""
        known = self._names.get(text) if self._checks and self._names is not None else None
        if known is not None and identity.user_number(known) != user.uid:
            raise Denied(f"user {text!r}: no password (expected a token of this user)")
