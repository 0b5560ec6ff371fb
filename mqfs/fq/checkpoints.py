"""Checkpoints: places of a permanent queue with a name, to which it can be set back.

Each is a consumer that is never opened, in the group of every exchange that the queue is bound to: what is behind it is
kept.
"""

from __future__ import annotations

import os
import re
from typing import Any

from mqfs import limits
from mqfs.engine.tree.grants import CHANGE
from mqfs.fq.exchanges import Exchange, Exchanges
from mqfs.fq.queues import Queue, Refused, point, points
from mqfs.model import User
from mqfs.settle import settle
from mqfs.syntax.quoting import quote

RESERVED = b"fq"
_PLACE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})\Z")


class Checkpoints:
    """Of all queues."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    async def add(self, user: User, queue_name: bytes, name: bytes, place: str) -> None:
        """`place`: GROUP:SEQUENCE, a message that is not to be delivered again; of other groups it is where the queue
        is now. Raises Refused, MqfsError."""
        queue, found = self._find(user, queue_name, name)
        if (match := _PLACE.match(place)) is None:
            raise Refused("'chkptid' must be of format: [0-9]*:[0-9]*")
        number, sequence = int(match[1]), int(match[2])
        for exchange in found:
            group = exchange.group
            if len(points(queue, group.consumers)) >= limits.FQ_POINTS and point(queue, name) not in group.consumers:
                raise Refused(f"at most {limits.FQ_POINTS} checkpoints of a queue")
            end = group.log.end.next
            if group.number == number and not (group.log.reader.first - 1 <= sequence < end):
                raise Refused("'chkptid' is out of range of the queue")
        if all(exchange.group.number != number for exchange in found):
            raise Refused("'chkptid' is out of range of the queue")
        for exchange in found:
            now = exchange.consumer(queue).state.progress.ack_floor
            at = sequence + 1 if exchange.group.number == number else now
            line = f"consumer {quote(point(queue, name))} {quote(queue.view)}"
            await self._exchanges.command(user, exchange.group, line)
            await self._seek(user, exchange, point(queue, name), at)

    async def remove(self, user: User, queue_name: bytes, name: bytes) -> None:
        """Raises Refused, MqfsError."""
        queue, found = self._find(user, queue_name, name)
        for exchange in self._having(queue, name, found):
            await self._exchanges.command(user, exchange.group, f"remove {quote(point(queue, name))}")

    async def go_back(self, user: User, queue_name: bytes, name: bytes) -> None:
        """Deliver again what is behind it. Raises Refused, MqfsError."""
        queue, found = self._find(user, queue_name, name)
        for exchange in self._having(queue, name, found):
            floor = exchange.group.consumers[point(queue, name)].state.progress.ack_floor
            await self._seek(user, exchange, queue.consumer, floor)

    def _find(self, user: User, queue_name: bytes, name: bytes) -> tuple[Queue, list[Exchange]]:
        """The queue, and its exchanges. Raises Refused, Denied."""
        if name == RESERVED:
            raise Refused("'fq' is a reserved name, cannot be used for a checkpoint name")
        queue = self._exchanges.queues.get(queue_name)
        if queue is None:
            raise Refused(f"Cannot find registered queue '{queue_name.decode(errors='replace')}'")
        if not queue.permanent:
            raise Refused("Checkpoints on ephemeral queues not supported")
        if queue.wish.type == "mem":
            raise Refused("Checkpoints on memory queues not supported")
        found = [exchange for exchange in self._exchanges if exchange.consumer(queue) is not None]
        for exchange in found:
            self._exchanges.require(user, exchange, queue)
            self._exchanges.tree.access(user, exchange.group, CHANGE)  # as for a consumer that is made or moved
        return queue, found

    @staticmethod
    def _having(queue: Queue, name: bytes, found: list[Exchange]) -> list[Exchange]:
        mine = [exchange for exchange in found if point(queue, name) in exchange.group.consumers]
        if not mine:
            raise Refused("Checkpoint does not exist")
        return mine

    async def _seek(self, user: User, exchange: Exchange, consumer: str, at: int) -> None:
        tree = self._exchanges.tree
        folder: Any = tree.walk(user, exchange.group, ".consumers")
        handle = tree.open(user, tree.walk(user, folder, consumer), os.O_WRONLY)
        try:
            await settle(handle.write(f"seek {at}\n".encode()))
        finally:
            handle.close()
