"""A group as the origin of messages: which transport a subscription reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from mqfs.client.subscription import CursorSubscription
from mqfs.client.types import Direct, File, Filters, Link, Patterns, Subscription


class Covering(Subscription, Protocol):
    """A subscription whose names can be changed."""

    def cover(self, names: Sequence[str]) -> None:
        """Read these from now on; none: everything."""
        ...


class Origin:
    """The messages of one group."""

    def __init__(self, link: Link, path: str, reconnect: bool | float) -> None:
        self._link, self._path, self._reconnect = link, path, reconnect

    def subscribe(
        self,
        patterns: Patterns,
        start: str,
        *,
        program: str = "",
        filters: Filters = (),
        reconnect: bool | float | None = None,
    ) -> Subscription:
        """From a position of `seek` on. `reconnect`: None: as the client does."""
        again = self._reconnect if reconnect is None else reconnect
        direct = self._direct if start in ("end", "first") and not program else None
        if direct is not None:
            found = direct.subscribe(patterns, existing=start == "first", filters=filters, reconnect=again)
            if found is not None:
                return found
        return CursorSubscription(
            self._link, self._path, patterns, start=start, program=program, filters=filters, reconnect=again
        )

    def cover(self, names: Sequence[str]) -> Covering:
        """From now on; the names need not be there yet."""
        direct, again = self._direct, self._reconnect
        found = direct.subscribe((), existing=False, filters=(), reconnect=again) if direct is not None else None
        if found is not None:
            return cast(Covering, found)  # of a ring
        return CursorSubscription(self._link, self._path, names, start="end", reconnect=again, covers=True)

    def cursor(self) -> File:
        return self._link.open(f"{self._path}/.cursor", "r+")

    def end(self) -> int:
        """The next sequence, where it is known without asking the server; else 0."""
        return self._direct.end() if self._direct is not None else 0

    @property
    def _direct(self) -> Direct | None:
        return self._link.direct(self._path)
