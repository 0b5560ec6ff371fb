"""A replica that a test drives by hand: entries taken from a store's replication count as copied."""

from __future__ import annotations

from collections.abc import Iterator

from mqfs.store.replication import Entry, Replication


def follow(replication: Replication, most_bytes: int = 1 << 20) -> Iterator[Entry]:
    """Copy all entries present at the call, and yield each. Entries written meanwhile stay for the next call."""
    while (portion := replication.take(most_bytes)) is not None:
        yield from portion.entries
        if not portion.more:
            replication.confirm()
            return
