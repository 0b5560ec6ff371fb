"""Quotas: what the operator lets one user have at once and do in a second, in lines of `--limit`.

Owns that language: USER KEY=VALUE..., USER a name, a number, or `*` for each user without a line of its own but root
and the server's. A user without a quota is bounded by its shares alone: shares.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from mqfs.errors import BadCommand, BadConfig
from mqfs.net import identity
from mqfs.syntax.quoting import split
from mqfs.syntax.size import MOST, parse_number, parse_size

OTHERS = "*"


@attrs.frozen
class Quota:
    """The bounds of one user; 0: none."""

    messages: int = 0  # published, a second
    bytes: int = 0  # published, a second
    kept: int = 0  # bytes, in the streams and parts of transactions that it owns
    parked: int = 0  # reads that wait
    handles: int = 0  # open files
    claims: int = 0  # held, over all of its handles


KEYS = tuple(field.name for field in attrs.fields(Quota))


class Quotas:
    """Of all users."""

    def __init__(self, users: dict[int, Quota], others: Quota | None = None) -> None:
        self._users, self._others = users, others
        self.bound_kept = any(quota.kept for quota in (*users.values(), others) if quota is not None)

    def of(self, uid: int) -> Quota | None:
        """The user's quota, if it has one."""
        mine = self._users.get(uid)
        return self._others if mine is None and uid not in (0, os.geteuid()) else mine


def parse_quotas(lines: Sequence[str]) -> Quotas | None:
    """None: there are no lines. Raises BadConfig."""
    users: dict[int, Quota] = {}
    others = None
    for line in lines:
        name, quota = _parse_line(line)
        uid = None if name == OTHERS else identity.user_number(name)
        if name != OTHERS and uid is None:
            raise BadConfig(f"--limit {line!r}: unknown user {name!r} (expected one of getent passwd, or *)")
        if uid in users or (uid is None and others is not None):
            raise BadConfig(f"--limit {line!r}: a second line of {name!r} (expected one line a user)")
        if uid is None:
            others = quota
        else:
            users[uid] = quota
    return Quotas(users, others) if lines else None


def _parse_line(line: str) -> tuple[str, Quota]:
    try:
        name, *words = split(line)
        pairs = [word.partition("=") for word in words]
        values = {key: parse_size(value) or parse_number(value) for key, _, value in pairs}
        if not pairs or len(values) < len(pairs) or not set(values) <= set(KEYS) or max(values.values()) > MOST:
            raise ValueError
    except (BadCommand, ValueError):
        keys = ", ".join(KEYS)
        raise BadConfig(
            f"--limit {line!r}: malformed (expected USER KEY=NUMBER..., keys {keys}, 10M for sizes)"
        ) from None
    return name, Quota(**values)
