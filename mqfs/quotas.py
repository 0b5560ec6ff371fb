"""What one user may have at once: a share of each bounded resource, and what the operator allows (`--limit`).

Shares: no single user can take all of a resource. A user gets at most half of the whole. Of the last places some are
for users of this machine, whom the kernel names, and the very last for root and the server's user.

A user is a number, or what distinguishes clients without one: over TCP the block of addresses of their host, as one
who has an address has its neighbours, too (of 127.0.0.0/8 every user of this machine has all).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Hashable, Sequence
from functools import lru_cache

import attrs

from mqfs import limits
from mqfs.errors import BadCommand, BadConfig, OverLimit
from mqfs.net import identity
from mqfs.syntax.duration import MOST, parse_number, parse_size
from mqfs.syntax.lines import split


def require_share(what: str, total: int, user: Hashable, mine: int, used: int) -> None:
    """Check that a user may have `mine` of `total`, and all users `used`. Raises OverLimit, which names `what`."""
    kept = 0 if user in (0, os.geteuid()) else 1 if isinstance(user, int) else 2
    open_to_all = total - kept * (total // limits.SHARE_KEPT)
    if mine > max(total // 2, 1) or used > open_to_all:
        raise OverLimit(f"too many {what} (expected at most {max(total // 2, 1)} a user, {total} in all)")


@lru_cache(limits.HTTP_ADDRESSES)
def block_of(host: str) -> str:
    """The block of addresses that counts as one user. A text that is no address is its own block."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    bits = limits.BLOCK_BITS_IPV4 if address.version == 4 else limits.BLOCK_BITS_IPV6
    return str(ipaddress.ip_network(f"{str(address).partition('%')[0]}/{bits}", strict=False))


def counted(user: Hashable) -> Hashable:
    """The one that a user counts as: of an address its block."""
    return block_of(user) if isinstance(user, str) else user


class UserLimits:
    """The shares of one resource. `limit` names its bound in limits.py, `what` the resource in an error."""

    __slots__ = ("_limit", "_taken", "_what", "most", "over", "used")

    def __init__(self, what: str, limit: str) -> None:
        self.used = 0  # of all users
        self.most = 0  # highest after a `change`; serving/accept.py resets it
        self.over: set[Hashable] = set()  # users who were found to have more than their share
        self._what, self._limit = what, limit
        self._taken: dict[Hashable, int] = {}

    def of(self, user: Hashable) -> int:
        """The amount that a user has."""
        return self._taken.get(counted(user), 0)

    @property
    def users(self) -> int:
        """How many users have some."""
        return len(self._taken)

    def check(self, user: Hashable, amount: int = 1) -> None:
        """Check that a user may get more. Raises OverLimit."""
        total: int = getattr(limits, self._limit)
        user = counted(user)
        require_share(self._what, total, user, self._taken.get(user, 0) + amount, self.used + amount)

    def has_room(self, user: Hashable, amount: int) -> bool:
        """Whether a user may get more."""
        try:
            self.check(user, amount)
        except OverLimit:
            return False
        return True

    def note_over(self, user: Hashable) -> None:
        """Enter a user in `over`, where it has more than its share: it was given without a check."""
        if not self.has_room(user, 0):
            self.over.add(user)

    def require_none_over(self, user: Hashable) -> None:
        """Check that a user does not have more than its share. Raises OverLimit."""
        if user in self.over:
            self.check(user, 0)
            self.over.discard(user)

    def acquire(self, user: Hashable, amount: int = 1) -> None:
        """Give a user more. Raises OverLimit, and changes nothing then."""
        self.check(user, amount)
        self.release(user, -amount)

    def release(self, user: Hashable, amount: int = 1) -> None:
        """Take an amount back from a user."""
        self.used -= amount
        user = counted(user)
        left = self._taken.get(user, 0) - amount
        if left:
            self._taken[user] = left
        else:
            self._taken.pop(user, None)

    def change(self, user: Hashable, before: int, after: int, *, refuse: bool = True) -> int:
        """Change a user's amount for one purpose to `after`, and return that. Raises OverLimit, if it may `refuse`."""
        if after > before and refuse:
            self.acquire(user, after - before)
            self.most = max(self.most, self.used)
        else:
            self.release(user, before - after)
        return after


# ------------------------------------------------------------ quotas

# What the operator lets one user have at once and do in a second, in lines of `--limit`: USER KEY=VALUE... USER is a
# name, a number, or `*` for each user without a line of its own but root and the server's. A user without a quota is
# bounded by its shares alone.

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
    """The quotas of all users."""

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
