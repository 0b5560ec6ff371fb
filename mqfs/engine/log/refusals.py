"""Why writes to a group's files were refused, for `.errors`.

Owns the last ones of each user: the refusals of one user never push out those of another.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from mqfs import limits
from mqfs.errors import shortened


class Refused(NamedTuple):
    """One line of `.errors`."""

    time_ns: int
    uid: int
    pid: int
    file: str
    text: str


class Refusals:
    """Of one group."""

    def __init__(self) -> None:
        self._users: dict[int, deque[Refused]] = {}  # who was refused last stands last

    def add(self, refused: Refused) -> None:
        mine = self._users.pop(refused.uid, None)
        if mine is None:
            mine = deque(maxlen=limits.ERRORS)
            while len(self._users) >= limits.ERROR_USERS:
                del self._users[next(iter(self._users))]
        mine.append(refused._replace(text=shortened(refused.text)))
        self._users[refused.uid] = mine

    def of(self, uid: int) -> list[Refused]:
        """Those of one user, oldest first."""
        return list(self._users.get(uid, ()))

    def all(self) -> list[Refused]:
        """Those of all users, oldest first."""
        return sorted((row for mine in self._users.values() for row in mine), key=lambda row: row.time_ns)
