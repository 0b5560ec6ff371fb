"""`/stats.json`: counters of exchanges, routes, queues and clients, as fq names them."""

from __future__ import annotations

import os
import socket
from typing import Any

import attrs

from mqfs.errors import Denied
from mqfs.fq.connection import Client
from mqfs.fq.exchanges import Binding, Counts, Exchange, Exchanges
from mqfs.fq.queues import Queue, owns
from mqfs.model import User
from mqfs.version import __version__


def stats(exchanges: Exchanges, user: User) -> dict[str, Any]:
    """Of this run: the exchanges that a user may read, and the queues that are bound to one of them, or to none and its
    own."""
    shown = [exchange for exchange in exchanges if _may_read(exchanges, user, exchange)]
    names = {exchange.name for exchange in shown}
    queues = [
        queue
        for queue in exchanges.queues.values()
        if queue.exchanges & names or (not queue.exchanges and owns(user, queue.owner))
    ]
    return {
        "version": __version__,
        "exchanges": {
            **{_text(exchange.name): _exchange(exchange) for exchange in shown},
            "_aggregate": {
                **_counts(exchanges.counts),
                "no_exchange": exchanges.counts.no_exchange,
                "size_dropped": exchanges.counts.size_dropped,
            },
        },
        "queues": {_text(queue.name): _queue(queue, shown) for queue in queues},
    }


def _may_read(exchanges: Exchanges, user: User, exchange: Exchange) -> bool:
    try:
        exchanges.tree.access(user, exchange.group, os.R_OK)
    except Denied:
        return False
    return True


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _counts(counts: Counts) -> dict[str, int]:
    return {
        "messages": counts.msgs_in,
        "octets": counts.octets_in,
        "no_route": counts.no_route,
        "routed": counts.routed,
        "dropped": counts.dropped,
    }


def _exchange(exchange: Exchange) -> dict[str, Any]:
    routes = {str(binding.route): _route(binding, exchange) for binding in exchange.bindings.values()}
    group = exchange.group  # of which checkpoints speak
    return {**_counts(exchange.counts), "group": group.number, "next": group.log.end.next, "routes": routes}


def _route(binding: Binding, exchange: Exchange) -> dict[str, Any]:
    return {
        "route_id": binding.route,
        "prefix": binding.prefix,
        "queue": _text(binding.queue.name),
        "permanent": binding.permanent,
        "invocations": exchange.counts.msgs_in - binding.before,
        "avg_ns": 0,
        "program": binding.text,
    }


def _queue(queue: Queue, exchanges: list[Exchange]) -> dict[str, Any]:
    consumers = [exchange.consumer(queue) for exchange in exchanges if exchange.name in queue.exchanges]
    return {
        "private": queue.wish.private,
        "type": queue.wish.type or "disk",
        "policy": queue.wish.policy,
        "backlog_limit": queue.wish.backlog,
        "backlog": sum(consumer.backlog.size() for consumer in consumers if consumer is not None),
        "dropped_to": queue.dropped_to,
        "refcnt": len(queue.members) + 1,
        "clients": [_client(member) for member in queue.members if isinstance(member, Client)],
    }


def _client(client: Client) -> dict[str, Any]:
    found = {
        "user": _text(client.name),
        "remote_addr": socket.inet_ntoa(client.address),
        "remote_port": str(client.port),
    }
    if client.delivery is None:
        return found
    counts = attrs.asdict(client.counts)
    del counts["dropped_in"]
    return {**found, "mode": "peer" if client.is_peer else "client", **{key: str(n) for key, n in counts.items()}}
