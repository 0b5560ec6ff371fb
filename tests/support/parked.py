"""A count of the blocked reads and writes of an engine."""

from __future__ import annotations

from mqfs.engine.tree.tree import Tree


def parked(tree: Tree) -> int:
    """Return the number of blocked calls in all groups. Only on the engine's thread."""
    count = 0
    for group in tree.groups.values():
        waits = [group.fanout.order_waits, group.fanout.cursor_waits, *group.fanout.view_waits.values()]
        for stream in group.streams.values():
            waits.append(stream.waits)
            count += len(stream.blocked) + (
                len(stream.default_consumer.reads.parked) if stream.default_consumer is not None else 0
            )
        count += sum(room.count_reads() for room in waits)
        count += sum(len(consumer.reads.parked) for consumer in group.consumers.values())
    return count
