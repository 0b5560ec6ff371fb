"""Removing segments without a live message.

Owns the order: what made the messages unwanted is on disk before a segment goes, and of those that one replaces each
goes before the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable

from mqfs import limits
from mqfs.store.appender import Appender
from mqfs.store.chain import Chain
from mqfs.store.group_commit import GroupCommit
from mqfs.store.segment.file import Segment
from mqfs.store.segment.liveness import Liveness

log = logging.getLogger("mqfs.store")


class SegmentRemoval:
    """Removes files, and takes their segments out of the chain."""

    __slots__ = ("_chain", "_closed", "_commit", "_replaced", "_syncing", "paused")

    def __init__(self, chain: Chain, commit: GroupCommit) -> None:
        self._chain, self._commit = chain, commit
        self.paused = False  # a compaction has chosen segments: none may go meanwhile
        self._replaced: deque[Segment] = deque()  # their messages are in another segment
        self._syncing = False  # a sync is under way after which the first of them goes
        self._closed = False

    def remove(self, segments: list[Segment]) -> None:
        """Remove them after a sync. Those that are still needed then stay."""
        self._commit.sync(lambda error: None if error else self._remove_now(segments))

    def _remove_now(self, segments: list[Segment]) -> None:
        if self.paused:
            return  # perhaps one of them; the next trim asks again
        for segment in segments:
            if segment in self._chain.segments and not self._commit.has_unsynced(segment) and not self._closed:
                self._chain.remove(segment)
                self._remove_files(segment)
        self._chain.lowest = None

    def replace(self, run: list[Segment], used: int, put_in_place: Callable[[], None]) -> None:
        """Replace a run of segments by one of that length, which has the name of the first."""
        assert run[0] in self._chain.segments
        put_in_place()
        for segment in run:
            segment.index = None
            segment.close_idle()
        made = self._chain.segment(run[0].first)
        made.used = used
        self._chain.replace(run, made)
        self._commit.note_folder_change()
        self._replaced.extend(run[1:])
        self.resume()

    def resume(self) -> None:
        """Continue with the replaced ones; one that could not be removed is tried again."""
        if self._replaced and not self._syncing:
            self._syncing = True
            self._commit.sync(self._remove_replaced)

    def _remove_replaced(self, error: OSError | None) -> None:
        """Each is gone from the disk before the next: else one that is left would answer for the next one's numbers."""
        self._syncing = False
        if error is None and self._replaced and not self._closed and self._remove_files(self._replaced[0]):
            self._replaced.popleft()
            self._commit.note_folder_change()
            self.resume()

    def _remove_files(self, segment: Segment) -> bool:
        """Returns whether its log is gone."""
        segment.index = None
        segment.close_idle()
        for path in (segment.idx.path, segment.path):
            try:
                self._unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("group %d: %s was not removed: %s", self._chain.group, path, error)
                return False
        return True

    def _unlink(self, path: str) -> None:
        """The room of a file is freed with its last descriptor, in 16 ms for 64 MiB: on the committer's thread."""
        fd = -1
        with contextlib.suppress(OSError):
            fd = self._chain.disk.open(path, os.O_RDONLY)
        try:
            self._chain.disk.unlink(path)
        finally:
            if fd >= 0:
                self._chain.context.close_later(fd)

    def close(self) -> None:
        """Remove nothing any more."""
        self._closed = True


# ------------------------------------------------------------ trimming

# Trimming: whole segments without a live message go.
#
# Owns the choice of those segments, a few at each call. Segments with live messages are compaction.py's.

_LOOKS = 4  # segments of which one trim reads the index


def trim(chain: Chain, liveness: Liveness, removal: SegmentRemoval, appender: Appender) -> None:
    """Remove segments without a live message. Raises OSError, MqfsError."""
    opened, looks, unwanted = chain.open, _LOOKS, []
    for segment in chain.segments:
        if segment is opened or liveness.confirms(segment.liveness):
            continue
        looks -= 1
        if looks >= 0 and not liveness.has_live(segment.liveness, segment.load()):
            unwanted.append(segment)
    if opened is not None and _is_worth_a_roll(opened, appender) and chain.end.failed is None:
        opened.liveness.cursor = 0
        are_others_unwanted = len(unwanted) == len(chain.segments) - 1
        if are_others_unwanted and not _has_live(liveness, opened):
            appender.roll_for_removal()
            unwanted.append(opened)
    if chain.open is None:
        unwanted = [
            segment for segment in unwanted if segment is not chain.segments[-1]
        ]  # the last holds the newest state
    if unwanted and not removal.paused and chain.end.failed is None:
        removal.remove(unwanted)


def _has_live(liveness: Liveness, segment: Segment) -> bool:
    return liveness.confirms(segment.liveness) or liveness.has_live(segment.liveness, segment.load())


def _is_worth_a_roll(segment: Segment, appender: Appender) -> bool:
    """Whether a new segment, which begins with the state, takes less than this one gives back."""
    grown = segment.used - segment.head
    return grown > max(limits.SEGMENT_FIRST_BYTES * 16, segment.head) and not appender.would_use_up_a_number(segment)


__all__ = ["SegmentRemoval", "trim"]
