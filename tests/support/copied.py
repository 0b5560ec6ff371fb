"""A replica that is made to follow by hand: what a test takes from a store's replication is copied."""

from __future__ import annotations

from collections.abc import Iterator

from mqfs.store.replication import Entry, Replication


def follow(replication: Replication, most_bytes: int = 1 << 20) -> Iterator[Entry]:
    """Copy all that was written when this is called; what is written meanwhile is left. Each entry, as it comes."""
    while (portion := replication.take(most_bytes)) is not None:
        yield from portion.entries
        if not portion.more:
            replication.confirm()
            return
