"""The state of a group from its log, even if a part of the log is damaged.

The content of a missing record is unknown. So everything is retained then, and streams whose record is missing get a
name: no intact message is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mqfs.model import Kind, Record
from mqfs.state.group import FIRST_STREAM, Attributes, GroupState, StreamState, decode_change

_RETAIN = {"replay": "all", "depth": "0", "ttl": "0", "idle": "0", "keep": "disk"}  # settings that remove nothing


def unknown(number: int, owner: Attributes) -> GroupState:
    """Return a state for a group that lost its own. `owner`: its attributes, mostly for the owner alone."""
    return GroupState(owner.mode, owner.uid, owner.gid, number, 1, f"recovered-{number}" if number > 1 else "", 0)


def replay(
    start: GroupState,
    records: Iterable[Record],
    lost: list[str],
    owner: Attributes,
    streams: Callable[[], Iterable[int]],
) -> GroupState:
    """Apply the records after a state, and return the state. If some are `lost`, which is known after the last record,
    retain everything: `streams` returns the numbers of streams that have messages. Raises ValueError and
    LookupError."""
    fresh, highest = start.next_stream, 0
    removed: set[int] = set()
    for record in records:
        highest = max(highest, record.stream)
        if record.kind in (Kind.CHANGE, Kind.CLOCK):
            change = decode_change(record.body)
            start.apply(change)
            if change.get("do") == "remove":
                removed.add(change["stream"])
        elif record.kind == Kind.ACK:
            start.acknowledge(record.stream, record.body)
    if lost:
        retain_all(start, owner, {number for number in streams() if number >= fresh} - removed)
        start.next_stream = max(start.next_stream, highest + 1)
    return start


def retain_all(state: GroupState, owner: Attributes, streams: Iterable[int]) -> None:
    """Have the state retain all messages, also those of streams that it does not know."""
    names = {stream.name for stream in state.streams.values()}
    for number in sorted(streams):
        if number >= FIRST_STREAM and number not in state.streams:
            name = f"recovered-{number}"
            while name in names or name in state.views:
                name += "-"
            names.add(name)
            state.streams[number] = StreamState(0o600, owner.uid, owner.gid, number, name, 0)
            state.next_stream = max(state.next_stream, number + 1)
    state.ctl = [line for line in state.ctl if line.split(" ", 1)[0] not in _RETAIN]
    state.ctl += [f"{word} {value}" for word, value in _RETAIN.items()]
