"""Ids of `.put`: the same id of the same user within `dedup` is accepted and not appended again.

Owns how long and how many are remembered; they are in the group's state.
"""

from __future__ import annotations

from typing import NamedTuple

from mqfs import errors, limits
from mqfs.engine.log.group_log import GroupLog
from mqfs.group_state import ANYONE, Change, Known
from mqfs.seams import Clock
from mqfs.shares import require_share


class PutId(NamedTuple):
    """Whose id it is, and its text."""

    uid: int
    text: str


class DeduplicationWindow:
    """Of one group."""

    def __init__(self, log: GroupLog, clock: Clock) -> None:
        self._log, self._clock = log, clock

    def find_duplicate(self, put_id: PutId) -> int:
        """The sequence of the message that was put under that id not long ago; 0 if none was."""
        ids, now = self._log.state.ids, self._clock.engine_ns()
        for uid in (put_id.uid, ANYONE):
            known = ids.get(uid, {}).get(put_id.text)
            if known is not None and known.until_ns > now:
                return known.sequence
        return 0

    def note(self, put_id: PutId, sequence: int) -> Change:
        """The change by which an id is remembered. Raises OverLimit."""
        try:
            self._require_room(put_id.uid)
        except errors.OverLimit:
            self.forget()
            self._require_room(put_id.uid)
        until = self._clock.engine_ns() + self._log.settings.dedup
        return {"do": "id", "id": put_id.text, "uid": put_id.uid, "until": until, "sequence": sequence}

    def _require_room(self, uid: int) -> None:
        ids = self._log.state.ids
        mine, used = len(ids.get(uid, ())) + 1, sum(map(len, ids.values())) + 1
        require_share("ids within 'dedup'", limits.DEDUP_IDS, uid, mine, used)

    def forget(self) -> None:
        """Those whose time is over."""
        now = self._clock.engine_ns()
        ids = self._log.state.ids
        for uid, mine in list(ids.items()):
            _forget_old(mine, now)
            if not mine:
                del ids[uid]


def _forget_old(mine: dict[str, Known], now: int) -> None:
    while mine and (first := next(iter(mine)), mine[first].until_ns)[1] <= now:
        del mine[first]
