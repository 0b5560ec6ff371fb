"""Shares: how much of something bounded each user has, so that no single user can take all of it.

Owns counts and the rule: a user has at most half of the whole, and the last places are for root and the server's user.
A user is a number, or for clients that are nobody whatever tells them apart.
"""

from __future__ import annotations

import os
from collections.abc import Hashable

from mqfs import limits
from mqfs.errors import OverLimit


def require_share(what: str, total: int, user: Hashable, mine: int, used: int) -> None:
    """A user may have `mine`, and all users together `used`, of `total`. Raises OverLimit, which names `what`."""
    open_to_all = total if user in (0, os.geteuid()) else total - total // limits.SHARE_KEPT
    if mine > max(total // 2, 1) or used > open_to_all:
        raise OverLimit(f"at most {max(total // 2, 1)} {what} a user, {total} in all")


class Shares:
    """What users have of one thing. `limit` names its bound in limits.py, `what` the thing in an error."""

    __slots__ = ("_limit", "_taken", "_what", "most", "used")

    def __init__(self, what: str, limit: str) -> None:
        self.used = 0  # of all users
        self.most = 0  # that it was after a `change`; for others to set back
        self._what, self._limit = what, limit
        self._taken: dict[Hashable, int] = {}

    def of(self, user: Hashable) -> int:
        """What a user has."""
        return self._taken.get(user, 0)

    def check(self, user: Hashable, amount: int = 1) -> None:
        """A user may get so much more. Raises OverLimit."""
        total: int = getattr(limits, self._limit)
        require_share(self._what, total, user, self._taken.get(user, 0) + amount, self.used + amount)

    def take(self, user: Hashable, amount: int = 1) -> None:
        """A user gets so much more. Raises OverLimit, and then has what it had."""
        self.check(user, amount)
        self.give(user, -amount)

    def give(self, user: Hashable, amount: int = 1) -> None:
        """A user gives so much back."""
        self.used -= amount
        left = self._taken.get(user, 0) - amount
        if left:
            self._taken[user] = left
        else:
            self._taken.pop(user, None)

    def change(self, user: Hashable, before: int, after: int, *, refuse: bool = True) -> int:
        """What a user has for one purpose becomes `after`, which is returned. Raises OverLimit, if it may `refuse`."""
        if after > before and refuse:
            self.take(user, after - before)
            self.most = max(self.most, self.used)
        else:
            self.give(user, before - after)
        return after


__all__ = ["Shares", "require_share"]
