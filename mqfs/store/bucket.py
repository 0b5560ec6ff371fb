"""One group's log on disk: composition of its parts, and nothing else."""

from __future__ import annotations

from mqfs import limits
from mqfs.store.appender import Appender
from mqfs.store.chain import Chain
from mqfs.store.context import StoreContext
from mqfs.store.group_commit import GroupCommit
from mqfs.store.log_reader import DiskLogReader
from mqfs.store.range_writer import DiskRangeWriter
from mqfs.store.recovery import recover
from mqfs.store.sequences import SequenceBlocks
from mqfs.store.upkeep import DiskUpkeep


class DiskBucket:
    """See `Bucket` in mqfs/seams.py. With `fresh` its segment was just made, with a block of sequences, and synced."""

    __slots__ = ("chain", "commit", "end", "id", "metrics", "ranges", "reader", "upkeep", "writer")

    def __init__(self, context: StoreContext, number: int, folder: str, *, fresh: bool = False) -> None:
        self.id = number
        self.chain = chain = Chain(context, number, folder)
        self.commit = commit = GroupCommit(chain)
        self.end = chain.end
        self.end.next = recover(chain, commit)
        sequences = SequenceBlocks(self.end.next)
        if fresh:
            self.end.next, sequences.refill = 1, 1 + limits.SEQUENCE_BLOCK // 2
            commit.start_synced()
        self.reader = self.metrics = DiskLogReader(chain)
        self.writer = Appender(chain, commit, sequences)
        self.ranges = DiskRangeWriter(chain, commit, sequences, self.writer)
        self.upkeep = DiskUpkeep(chain, commit, self.writer)


__all__ = ["DiskBucket"]
