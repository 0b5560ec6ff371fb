"""The start: what each group was, read from its log.

A group that cannot be read, and the groups inside it, are not served; the others are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mqfs import errors, salvage
from mqfs.engine.group import Group
from mqfs.engine.log.faults import report_unserved
from mqfs.group_state import Attributes, State
from mqfs.seams import Bucket, Store
from mqfs.syntax.names import with_suffix

ROOT = 1


class Unserved(set[int]):
    """The numbers of groups that are not served."""

    def leave(self, number: int, error: Exception) -> None:
        """Do not serve a group: it can still be repaired. Raises BadStore where it is the root."""
        if number == ROOT:
            raise errors.BadStore(f"the root group: {error}; run mqfs check --fix") from error
        self.add(number)
        report_unserved(number, error)


def read_states(store: Store, unserved: Unserved) -> list[tuple[Bucket, State]]:
    """Every group that can be read, by number: a group is younger than its parent."""
    read: list[tuple[Bucket, State]] = []
    for number in sorted(store.groups()):
        try:
            bucket = store.open(number)
            read.append((bucket, read_state(bucket)))
        except Exception as error:
            unserved.leave(number, error)
    return read


def read_state(bucket: Bucket) -> State:
    """A group as its log tells it: the newest state and the changes behind it. One whose state is not whole is
    read-only. Raises BadStore."""
    body, records = bucket.upkeep.history()
    if body is None and bucket.id == ROOT:
        raise errors.BadStore("no state is whole; see quarantine/")  # its permissions are everybody's
    owner = Attributes(0o700, os.geteuid(), os.getegid())
    try:
        state = salvage.unknown(bucket.id, owner) if body is None else State.decode(body)
        salvage.replay(state, records, bucket.upkeep.lost, owner, bucket.metrics.streams)
    except (ValueError, LookupError) as error:
        raise errors.BadStore(f"group {bucket.id}: {error}; run mqfs check") from error
    if state.group != bucket.id:
        raise errors.BadStore(f"group {bucket.id}: its state is that of group {state.group}; run mqfs check")
    if lost := bucket.upkeep.lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        bucket.upkeep.fail(OSError(f"state is damaged: {lost[0]}{more} (stop the server and run mqfs check --fix)"))
    return state


def adopt(group: Group, groups: Mapping[int, Group]) -> None:
    """Put a group that was read from the store into its parent, under a free name."""
    if group.number == ROOT:
        return
    parent = groups.get(group.state.parent, groups[ROOT])
    taken = parent.groups.keys() | parent.streams.keys() | parent.views.keys()
    if group.name in taken or parent.number != group.state.parent:
        # Two renames of which only one reached the disk, or a parent that was lost: keep both, seen.
        group.state.name = with_suffix(group.name, f".lost-{group.number}")
        group.state.parent = parent.number
    group.parent = parent
    parent.groups[group.name] = group
