"""Upkeep of a bucket: trimming, compaction, idle caches, and its end.

Each portion of a tick is bounded; a failed one is repeated by the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from mqfs import errors, limits
from mqfs.model import Record
from mqfs.store.api import Wanted
from mqfs.store.appender import Appender
from mqfs.store.chain import Chain
from mqfs.store.compaction import Compaction, SegmentRemoval, trim
from mqfs.store.group_commit import GroupCommit
from mqfs.store.recovery import History
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import CLEAN
from mqfs.store.segment.liveness import Liveness

log = logging.getLogger("mqfs.store")


class DiskUpkeep:
    """See `LogUpkeep` in mqfs/store/api.py."""

    def __init__(self, chain: Chain, commit: GroupCommit, appender: Appender) -> None:
        self._chain, self._commit, self._appender = chain, commit, appender
        self._liveness = Liveness()
        self._removal = SegmentRemoval(chain, commit)
        self.compaction = Compaction(chain, commit, self._liveness, self._removal)
        self.sync, self.replicate, self.fail = commit.sync, commit.replicate, commit.fail
        self._seen = 0  # bytes appended at the last tick
        self._closed = False
        self._trim_due = False  # the last trim failed
        self.lost: list[str] = []
        self._is_state_old = False  # the state at the head of the newest segment is damaged

    @property
    def size(self) -> int:
        return self._chain.size

    @property
    def damaged(self) -> int:
        return self._chain.damaged

    @property
    def lag(self) -> tuple[int, float] | None:
        copy = self._commit.copy
        return (copy.lag_bytes, copy.lag_s) if copy is not None else None

    @property
    def is_final(self) -> bool:
        return self._commit.copy is None and not self._removal.is_pending

    def on_rolled(self, then: Callable[[], None]) -> None:
        self._appender.on_rolled = then

    def history(self) -> tuple[bytes | None, Iterable[Record]]:
        history = History(reversed(self._chain.segments))
        self.lost, self._is_state_old = history.lost, not history.is_newest
        return history.state, history

    def trim(self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None = None) -> Iterator[None]:
        self._liveness.update(floors, dropped, wanted, self._chain.end.next)
        self._trim()
        return iter(())

    def _trim(self) -> None:
        """Trim; after a failure, try again at the next tick: a full disk may have room then."""
        try:
            if not self._renew_state():
                return
            trim(self._chain, self._liveness, self._removal, self._appender)
        except (OSError, errors.MqfsError) as error:
            if not self._trim_due:
                log.warning("group %d was not trimmed: %s", self._chain.group, error)
            self._trim_due = True
        else:
            self._trim_due = False

    def _renew_state(self) -> bool:
        """Whether older segments may be removed. If an older segment has the newest whole state, the state is written
        again first. Raises DiskFull, DiskFailed."""
        opened = self._chain.open
        if self._is_state_old and self._chain.end.failed is None:
            if opened is not None and self._appender.would_use_up_a_number(opened):
                return False  # the next call tries again
            self._appender.roll()
            self._is_state_old = False
        return not self._is_state_old

    # ------------------------------------------------------------ for the store

    def tick(self, until: float) -> None:
        """Do a portion of upkeep; compaction stops at that moment of the monotonic clock."""
        if self._chain.end.failed is not None or self._closed:
            return
        try:
            self._commit.ask_again()
            self._removal.resume()
            self._rest_when_idle()
            if self._trim_due:
                self._trim()
            if self._liveness.is_known and self._renew_state():
                self.compaction.tick(until)
        except (OSError, errors.MqfsError) as error:
            self.compaction.cancel()
            log.warning("group %d: maintenance failed: %s", self._chain.group, error)

    def _rest_when_idle(self) -> None:
        """Write the index of an idle bucket to disk, and drop it from memory if the bucket is not read either."""
        segment, seen, commit = self._chain.open, self._seen, self._commit
        self._seen = commit.written
        if segment is None or commit.written != commit.synced or seen != commit.written:
            return
        if segment.used - segment.idx.covered > limits.SEGMENT_FIRST_BYTES:
            self._extend_index(segment)
        elif not segment.recent:
            segment.drop_index_cache()
        segment.recent = False

    def _extend_index(self, segment: Segment, flags: int = 0) -> None:
        messages, others = segment.counts()[0], segment.count_others()
        segment.extend(segment.used, messages, others, self._chain.end.last_ns, flags)

    def rebuild(self) -> None:
        """Load every segment, so that each has its index."""
        for segment in self._chain.segments:
            segment.load()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        if self._closed:
            return
        self._commit.pause()
        self.compaction.cancel()
        if self._chain.end.failed is None:
            self._stop_cleanly()
        self._stop()

    def retire(self) -> None:
        """Stop upkeep: the log records that the group was removed, and nothing more is appended."""
        self.compaction.cancel()
        self._closed = True

    def abandon(self) -> None:
        """Close the log of a removed group, and answer callers that wait for a sync without an error."""
        self.compaction.cancel()
        self._stop()
        self._commit.answer_all(None)

    def _stop(self) -> None:
        self._closed = True
        self._commit.close()
        if (copy := self._commit.copy) is not None:
            copy.detach()
        self._removal.close()
        self._chain.close()

    def _stop_cleanly(self) -> None:
        """Sync everything, including the exact next sequence, and write the index to the end."""
        try:
            if self._commit.synced != self._commit.written:
                self._commit.sync_now()  # makes the next record SETTLED: all before it was on disk
                self._commit.settle_all()
            self._appender.reserve_at_stop()
            self._commit.sync_now()
        except (OSError, errors.MqfsError) as error:
            log.warning("group %d was not stopped cleanly: %s", self._chain.group, error)
            return
        self._commit.settle_all()
        segment = self._chain.open
        if segment is None:
            return
        try:
            segment.shrink()
            self._extend_index(segment, CLEAN)
        except (OSError, errors.MqfsError) as error:
            log.warning("group %d: its index was not written: %s", self._chain.group, error)
