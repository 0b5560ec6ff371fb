"""A group as the origin of messages: the choice of the transport for a subscription."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, cast

from mqfs.client.subscription import CursorSubscription
from mqfs.client.types import File, Filters, Link, Patterns, Subscription, parse_answer, read_whole
from mqfs.errors import MqfsError

if TYPE_CHECKING:
    from mqfs.client.transport.ring import RingGroup

log = logging.getLogger("mqfs.client")


class Origin:
    """The messages of one group."""

    def __init__(self, link: Link, path: str, reconnect: bool | float) -> None:
        self._link, self._path, self._reconnect = link, path, reconnect
        self._checked: set[str] = set()  # warnings whose condition was checked

    def subscribe(
        self,
        patterns: Patterns,
        start: str,
        *,
        program: str = "",
        filters: Filters = (),
        reconnect: bool | float | None = None,
        is_patient: bool = False,
    ) -> Subscription:
        """Subscribe from `start` on, a position of `seek`. `reconnect`: None: as the client. `is_patient`: see
        `CursorSubscription`."""
        if start == "first":
            self.warn_of_loss("existing=True")
        again = self._reconnect if reconnect is None else reconnect
        direct = self._direct if start in ("end", "first") and not program else None
        if direct is not None:
            found = direct.subscribe(patterns, existing=start == "first", filters=filters, reconnect=again)
            if found is not None:
                return found
        return CursorSubscription(
            self._link, self._path, patterns, start=start, program=program, filters=filters, reconnect=again,
            is_patient=is_patient,
        )  # fmt: skip

    def cover(self, names: Sequence[str]) -> CursorSubscription:
        """Subscribe from now on to patterns, and streams that need not exist yet. From a ring all streams are read."""
        direct, again = self._direct, self._reconnect
        found = direct.subscribe((), existing=False, filters=(), reconnect=again) if direct is not None else None
        if found is not None:
            return cast(CursorSubscription, found)  # of a ring
        return CursorSubscription(self._link, self._path, names, start="end", reconnect=again, covers=True)

    def cursor(self) -> File:
        return self._link.open(f"{self._path}/.cursor", "r+")

    def end(self) -> int:
        """Return the next sequence if it is known without asking the server, else 0."""
        return self._direct.end() if self._direct is not None else 0

    # ------------------------------------------------------------ warnings: each once, as they cost round trips

    def warn_of_loss(self, what: str) -> None:
        """Log a warning for a late reader if messages were written before that are not retained for it. With
        `deliver one` messages are retained until they are acknowledged."""
        if not self._is_first("loss"):
            return
        settings = self._settings()
        if b"replay off" in settings and b"deliver one" not in settings and self._next() > 1:
            log.warning(
                "%s in group %r: 'replay off' keeps no message for later readers (expected 'replay all' in ctl, or "
                "readers before publishers)", what, self._path or "/",
            )  # fmt: skip

    def warn_of_sharing(self) -> None:
        """Log a warning for a handler in a group with `deliver one`: it gets all messages, it does not share them."""
        if self._is_first("sharing") and b"deliver one" in self._settings():
            log.warning(
                "on in group %r: with 'deliver one', too, each handler gets every message (expected single=True for "
                "handlers that share them)", self._path or "/",
            )  # fmt: skip

    def _is_first(self, warning: str) -> bool:
        self._checked, before = {*self._checked, warning}, self._checked
        return warning not in before

    def _settings(self) -> list[bytes]:
        try:
            return read_whole(self._link, f"{self._path}/ctl").split(b"\n")
        except MqfsError:  # the caller's own request reports it
            return []

    def _next(self) -> int:
        try:
            with closing(self.cursor()) as file:
                return int(parse_answer(file.ask(b"selected\n"))["next"])
        except MqfsError:  # a call does not fail for a warning
            return 0

    @property
    def _direct(self) -> RingGroup | None:
        return self._link.direct(self._path)
