"""STORE/replica: what a store records about its replicated log, replaced by rename.

    position   after a frame whose effects are synced on this disk, and all before it
    have       of each group, what the log had there: the name of its newest segment and how many bytes of it
    runs       the runs of servers on this store that may own the log; a takeover by another one fences them
    primary    it may have more than the log; a standby has exactly as much

A start reads the frames after the position. The file is written after a sync of what it says, never before.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import attrs

from mqfs.errors import BadStore
from mqfs.replica.frame import Entry
from mqfs.replica.log import Position
from mqfs.store.disk import Disk, read_file, replace_file
from mqfs.store.replication import LogBytes, Removed
from mqfs.store.store import refusing

NAME = "replica"
_RUNS = 16  # runs that are remembered
Have = dict[int, tuple[int, int]]


@attrs.define
class ReplicaState:
    position: Position
    have: Have
    runs: list[uuid.UUID]
    primary: bool

    def add_run(self, run: uuid.UUID) -> None:
        """Record a run before it takes over."""
        self.runs = [*self.runs, run][-_RUNS:]


class End(NamedTuple):
    """A run of bytes without its data: the segment's name, and where the run ends in it."""

    group: int
    first: int
    position: int


def note(have: Have, entries: Iterable[Entry | End]) -> None:
    """Record in `have` that the log has these entries, too."""
    for entry in entries:
        if isinstance(entry, LogBytes | End):
            end = entry.first, entry.position + (len(entry.data) if isinstance(entry, LogBytes) else 0)
            have[entry.group] = max(end, have.get(entry.group, end))
        elif isinstance(entry, Removed):
            have.pop(entry.group, None)


def encode_position(position: Position) -> dict[str, Any]:
    """Encode a position as an object of JSON."""
    return {**attrs.asdict(position), "store": str(position.store) if position.store else ""}


def decode_position(found: dict[str, Any]) -> Position:
    """Decode a position from an object of JSON. Raises ValueError, KeyError, TypeError for other objects."""
    numbers = {name: int(found[name]) for name in ("number", "crc", "epoch", "own", "time_ns")}
    store = uuid.UUID(found["store"]) if found["store"] else None
    return Position(store=store, address=str(found["address"]), **numbers)


def encode_have(have: Have) -> list[list[int]]:
    return [[group, *end] for group, end in sorted(have.items())]


def decode_have(found: Any) -> Have:
    return {int(group): (int(first), int(position)) for group, first, position in found}


def write(path: str, state: ReplicaState, disk: Disk | None = None) -> None:
    """Replace the file in the store at that path, durably. Raises DiskFull, DiskFailed."""
    disk = disk or Disk()
    text = {
        "position": encode_position(state.position),
        "have": encode_have(state.have),
        "runs": [str(run) for run in state.runs],
        "primary": state.primary,
    }
    with refusing(path):
        replace_file(disk, f"{path}/{NAME}", f"{path}/staging/{NAME}", json.dumps(text).encode())
        disk.sync_folder(path)


def read(path: str, disk: Disk | None = None) -> ReplicaState | None:
    """Return the state of the store at that path; None if it has none. Raises BadStore."""
    disk = disk or Disk()
    if not disk.exists(f"{path}/{NAME}"):
        return None
    try:
        found = json.loads(read_file(disk, f"{path}/{NAME}"))
        position, have = decode_position(found["position"]), decode_have(found["have"])
        return ReplicaState(position, have, [uuid.UUID(run) for run in found["runs"]], bool(found["primary"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path}/{NAME}: unreadable: {error} (move the file away: the store is copied again)"
        raise BadStore(text) from None


def remove(path: str, disk: Disk | None = None) -> None:
    """Remove the file, durably. Raises OSError."""
    disk = disk or Disk()
    if disk.exists(f"{path}/{NAME}"):
        disk.unlink(f"{path}/{NAME}")
        disk.sync_folder(path)
