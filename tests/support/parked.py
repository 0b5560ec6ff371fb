"""How many reads and writes an engine holds, counted where they are held."""

from __future__ import annotations

from mqfs.engine.tree.tree import Tree


def parked(tree: Tree) -> int:
    """The number of calls that wait in all groups. On the engine's thread only."""
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
