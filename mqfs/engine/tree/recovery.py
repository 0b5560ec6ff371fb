"""The start of a tree: the state of each group is read from its log.

A group that cannot be read is not served, nor are the groups inside it. All others are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mqfs import errors, limits
from mqfs.clock import Clock
from mqfs.engine.core.timers import report_unserved
from mqfs.engine.group import Group
from mqfs.model import User
from mqfs.state import salvage
from mqfs.state.group import ROOT, Attributes, GroupState, place_of
from mqfs.store.api import Bucket, Store
from mqfs.syntax.names import with_suffix


class Place(NamedTuple):
    """The place of a group that is not served. `parent` None: any older group may be its parent. `known`: whether the
    name is current; else the group may have been renamed since."""

    parent: int | None = None
    name: str | None = None
    known: bool = False


class Unserved:
    """The groups that are not served. Their names stay taken until the groups are served or removed by hand. While the
    name of one is not known, no group can be made where it may be."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._retried: set[int] = set()  # groups that the disk could not read: a later try may succeed
        self._due_ns = 0
        self._pause_ns = 10**9

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def leave(self, number: int, error: Exception, place: Place | None = None) -> None:
        """Enter a group as not served; it can still be repaired. Raises BadStore for the root."""
        if number == ROOT:
            raise errors.BadStore(f"root group: {error} (run mqfs check --fix)") from error
        if number not in self._places:
            report_unserved(number, error)
        self._places[number] = place or self._places.get(number, Place())
        if isinstance(error, errors.DiskFailed) or (place is not None and place.parent in self._retried):
            self._retried.add(number)

    def require_free(self, parent: int, name: str) -> None:
        """Check that no group that is not served has that name. Raises DiskFailed."""
        for number, place in self._places.items():
            if place[:2] == (parent, name):
                raise errors.DiskFailed(f"cannot open {name!r}: group {number} is not served (see the server's log)")

    def require_known(self, parent: int, what: str) -> None:
        """Check that no group with an unknown name may be in the group `parent`. Raises DiskFailed, naming `what`."""
        for number, place in self._places.items():
            if not place.known and (place.parent == parent or (place.parent is None and parent < number)):
                raise errors.DiskFailed(f"cannot {what}: group {number} cannot be read (see the server's log)")

    def require_empty(self, parent: int, name: str) -> None:
        """Check that no group that is not served is, or may be, in the group `parent`. Raises DiskFailed."""
        self.require_known(parent, f"remove {name!r}")
        for number, place in self._places.items():
            if place.parent == parent:
                raise errors.DiskFailed(f"cannot remove {name!r}: group {number} in it is not served")

    def read_again(self, store: Store, now_ns: int, build: Callable[[Bucket, GroupState], None]) -> None:
        """Try again to read the groups that the disk could not read, and `build` those that it can. Does nothing until
        a pause is over, which grows from one second."""
        if not self._retried or now_ns < self._due_ns:
            return
        self._due_ns, self._pause_ns = now_ns + self._pause_ns, min(2 * self._pause_ns, limits.LOG_AGAIN_S * 10**9)
        for number in sorted(self._retried):
            try:
                bucket = store.open(number)
                state = read_state(bucket)
            except errors.NotFound:  # removed by hand
                self._forget(number)
                continue
            except Exception as error:
                self.leave(number, error)
                continue
            self._forget(number)
            build(bucket, state)

    def _forget(self, number: int) -> None:
        self._retried.discard(number)
        del self._places[number]


def read_states(
    store: Store, unserved: Unserved, progress: Callable[[int, int], None] | None
) -> list[tuple[Bucket, GroupState]]:
    """Return bucket and state of every group that can be read, by number, so each after its parent, which is older.
    `progress` is called with the number read and the total; an exception of it ends the start."""
    read: list[tuple[Bucket, GroupState]] = []
    numbers = sorted(store.groups())
    for done, number in enumerate(numbers):
        if progress is not None:
            progress(done, len(numbers))
        try:
            bucket = store.open(number)
            read.append((bucket, read_state(bucket)))
        except errors.NotFound:  # removed, as its log says
            continue
        except Exception as error:
            unserved.leave(number, error, _place(store, number, numbers))
    return read


def _place(store: Store, number: int, numbers: Sequence[int]) -> Place:
    """Return the place of a group that cannot be read, from the heads of its segments. Its parent is still the same if
    it exists, but the group may have been renamed since."""
    for head in store.heads(number):
        if (found := place_of(head)) is not None and found[0] == number and found[1] in numbers:
            return Place(*found[1:])
    return Place()


def read_state(bucket: Bucket) -> GroupState:
    """Read the state of a group from its log: the newest STATE record and the changes after it. A group with a damaged
    state becomes read-only. Raises BadStore."""
    body, records = bucket.upkeep.history()
    if body is None and bucket.id == ROOT:
        raise errors.BadStore("no state is whole (see quarantine/)")  # the root's permissions concern all users
    owner = Attributes(0o700, os.geteuid(), os.getegid())
    try:
        state = salvage.unknown(bucket.id, owner) if body is None else GroupState.decode(body)
        salvage.replay(state, records, bucket.upkeep.lost, owner, bucket.metrics.streams)
    except (ValueError, LookupError) as error:
        raise errors.BadStore(f"group {bucket.id}: {error} (run mqfs check)") from error
    if state.group != bucket.id:
        raise errors.BadStore(f"group {bucket.id}: has the state of group {state.group} (run mqfs check)")
    if lost := bucket.upkeep.lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        bucket.upkeep.fail(OSError(f"state is damaged: {lost[0]}{more} (stop the server and run mqfs check --fix)"))
    return state


def new_state(clock: Clock, ctl: list[str], number: int, parent: int, name: str, mode: int, user: User) -> GroupState:
    """Make the state of a new group."""
    return GroupState(
        mode=mode & 0o7777,
        uid=user.uid,
        gid=user.gid,
        group=number,
        parent=parent,
        name=name,
        made_ns=clock.wall_ns(),
        ctl=list(ctl),
        anchors=[(1, clock.anchor())],
    )


def adopt(group: Group, groups: Mapping[int, Group]) -> None:
    """Enter a group that was read from the store in its parent, under a free name."""
    if group.number == ROOT:
        return
    parent = groups.get(group.state.parent, groups[ROOT])
    taken = parent.groups.keys() | parent.streams.keys() | parent.views.keys()
    if group.name in taken or parent.number != group.state.parent:
        # Only one of two renames reached the disk, or the parent was lost: keep both groups, visibly.
        group.state.name = with_suffix(group.name, f".lost-{group.number}")
        group.state.parent = parent.number
    group.parent = parent
    parent.groups[group.name] = group
    parent.catalog_version += 1
