"""Bounds of one user: a share of each bounded resource, and the quotas of the operator (`--limit`).

Shares: no single user can take all of a resource. A user gets at most half of it. The last places are for users of this
machine, whom the kernel identifies, and the very last for root and the server's user.

A user is a number, or a text that identifies clients without one: over TCP the address of their host. Addresses of one
block count as one user, as a host often has its neighbours' addresses, too (all of 127.0.0.0/8 is one).
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
    """Check that a user may have `mine` of `total`, and all users together `used`. Raises OverLimit, naming `what`."""
    kept = 0 if user in (0, os.geteuid()) else 1 if isinstance(user, int) else 2
    open_to_all = total - kept * (total // limits.SHARE_KEPT)
    if mine > max(total // 2, 1) or used > open_to_all:
        raise OverLimit(f"too many {what} (expected at most {max(total // 2, 1)} a user, {total} in all)")


@lru_cache(limits.HTTP_ADDRESSES)
def block_of(host: str) -> str:
    """Return the block of addresses that counts as one user. A text that is not an address is its own block."""
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
    """Return the user as it is counted: an address as its block."""
    return block_of(user) if isinstance(user, str) else user


class UserLimits:
    """The amounts that users have of one resource. `limit`: the name of its bound in limits.py; `what`: the resource in
    error texts."""

    __slots__ = ("_limit", "_taken", "_what", "most", "over", "used")

    def __init__(self, what: str, limit: str) -> None:
        self.used = 0  # the amount of all users
        self.most = 0  # the highest `used` after a `change`; `give_back` of serving/memory.py lowers it
        self.over: set[Hashable] = set()  # users found to have more than their share
        self._what, self._limit = what, limit
        self._taken: dict[Hashable, int] = {}

    def of(self, user: Hashable) -> int:
        """Return the amount that a user has."""
        return self._taken.get(counted(user), 0)

    @property
    def users(self) -> int:
        """The number of users with an amount."""
        return len(self._taken)

    def check(self, user: Hashable, amount: int = 1) -> None:
        """Check that a user may get `amount` more. Raises OverLimit."""
        total: int = getattr(limits, self._limit)
        user = counted(user)
        require_share(self._what, total, user, self._taken.get(user, 0) + amount, self.used + amount)

    def has_room(self, user: Hashable, amount: int) -> bool:
        """Whether a user may get `amount` more."""
        try:
            self.check(user, amount)
        except OverLimit:
            return False
        return True

    def note_over(self, user: Hashable) -> None:
        """Enter a user in `over` if it has more than its share, after an amount was given without a check."""
        if not self.has_room(user, 0):
            self.over.add(user)

    def require_none_over(self, user: Hashable) -> None:
        """Check that a user does not have more than its share. Raises OverLimit."""
        if user in self.over:
            self.check(user, 0)
            self.over.discard(user)

    def acquire(self, user: Hashable, amount: int = 1) -> None:
        """Give a user `amount` more. Raises OverLimit, and changes nothing then."""
        self.check(user, amount)
        self.release(user, -amount)

    def release(self, user: Hashable, amount: int = 1) -> None:
        """Take `amount` back from a user; below 0: give it without a check."""
        self.used -= amount
        user = counted(user)
        left = self._taken.get(user, 0) - amount
        if left:
            self._taken[user] = left
        else:
            self._taken.pop(user, None)

    def change(self, user: Hashable, before: int, after: int, *, refuse: bool = True) -> int:
        """Change a user's amount for one purpose from `before` to `after`, and return `after`. Raises OverLimit, only
        with `refuse`."""
        if after > before and refuse:
            self.acquire(user, after - before)
            self.most = max(self.most, self.used)
        else:
            self.release(user, before - after)
        return after


# ------------------------------------------------------------ quotas

# The operator's bounds for one user, at once or in a second, in lines of `--limit`: USER KEY=VALUE... USER is a name, a
# number, or `*` for each user without a line of its own, except root and the server's. A user without a quota is
# bounded by its shares only.

OTHERS = "*"


@attrs.frozen
class Quota:
    """The bounds of one user; 0: none."""

    messages: int = 0  # published, a second
    bytes: int = 0  # published, a second
    kept: int = 0  # bytes retained in the streams, and staged in the parts of transactions, that it owns
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
        """Return the user's quota, or None."""
        mine = self._users.get(uid)
        return self._others if mine is None and uid not in (0, os.geteuid()) else mine


def parse_quotas(lines: Sequence[str]) -> Quotas | None:
    """Parse the lines of `--limit`; None without lines. Raises BadConfig."""
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
