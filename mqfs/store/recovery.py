"""The recovery scan of a group's segments.

Owns the order: the newest whole segment, its tail, then the next sequence. Never looks into older segments than that
takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from mqfs import errors, limits
from mqfs.model import Kind
from mqfs.store.chain import Chain
from mqfs.store.group_commit import GroupCommit
from mqfs.store.segment.file import Segment
from mqfs.store.sequences import reserved_by


def recover(chain: Chain, commit: GroupCommit) -> int:
    """Fill the chain from its folder and return the next sequence. A newest segment that is not whole goes to
    quarantine/. Raises DiskFailed and OSError."""
    names = sorted(name for name in chain.disk.listdir(chain.folder) if name.endswith(".log"))
    firsts = [int(name[:-4]) for name in names]
    lost = 0  # the first sequence of a segment that is not whole
    while firsts:
        newest = chain.segment(firsts[-1])
        if newest.start(newest=True, only=len(firsts) == 1 and not lost):
            break
        newest.close_idle()
        lost = newest.first
        chain.context.quarantine.move(chain.group, lost, newest.path, "a segment without a whole state")
        firsts.pop()
    else:
        raise errors.DiskFailed(f"no segment of group {chain.group} is whole; see quarantine/")
    chain.segments, chain.firsts = [chain.segment(first) for first in firsts[:-1]] + [newest], firsts
    for older in chain.segments[:-1]:
        older.used = chain.disk.size_of(older.path)
        chain.sealed_bytes += older.used
    if newest.sealed:
        chain.sealed_bytes += newest.used
    else:
        _reopen(chain, commit, newest)
    chain.end.last_ns = newest.last_ns()
    return _next_sequence(chain, lost)


def _reopen(chain: Chain, commit: GroupCommit, segment: Segment) -> None:
    """Continue the segment that was open at the stop. After an unclean stop nothing is known to be on disk."""
    chain.open = segment
    segment.may_close_fd = commit.may_close
    commit.watch(segment, inf)
    if segment.idx.is_clean(segment.used):
        return
    commit.note_folder_change()
    unsure = [older for older in chain.segments[:-1] if not older.looks_sealed()]
    commit.watch_only({**dict.fromkeys(unsure, commit.written), segment: inf})
    for some in (*unsure, segment):
        some.may_close_fd = commit.may_close
        some.write_again()


def _next_sequence(chain: Chain, lost: int) -> int:
    """What the newest reserve record says, if no greater sequence is there."""
    bound = 1
    for segment in reversed(chain.segments):
        bounds = _reserves(chain, segment)
        newest = next(bounds, 0)
        bound = max(bound, segment.counts()[2] + 1, lost)
        if newest and not chain.damaged and not lost:
            return max(bound, newest)
        if newest:
            # Damage may have hidden the record that counts.
            return max(bound, newest, *bounds) + limits.SEQUENCE_BLOCK
    return bound + limits.SEQUENCE_BLOCK


def _reserves(chain: Chain, segment: Segment) -> Iterator[int]:
    """The bounds that its records reserve, the newest first."""
    rows = segment.rows()
    for number in reversed(rows.of_kind(Kind.CHANGE)):
        row = rows[number]
        if row.stream == 0 and row.body < 40:
            record = chain.record(segment, row)
            if record is not None and (bound := reserved_by(record.body)):
                yield bound


__all__ = ["recover"]
