"""HTTP on the port of fq: publishing, counters and checkpoints, with the answers of fq."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Any

import attrs

from mqfs import __version__, limits
from mqfs.engine.tree.attributes import CHANGE
from mqfs.engine.tree.tree import Tree
from mqfs.errors import Denied, MqfsError, NotFound
from mqfs.fq.codec import ID_BYTES, NAME_BYTES, Message
from mqfs.fq.connection import Client
from mqfs.fq.exchanges import Binding, BrokerCounts, Exchange, Exchanges
from mqfs.fq.publishing import Publisher, address, origin
from mqfs.fq.queues import Queue, Refused, owns, point, points
from mqfs.fq.users import Users
from mqfs.http.answers import JSON, Answer, as_json
from mqfs.http.gate import name_of
from mqfs.http.route import MESSAGE, Call, Route, Sends
from mqfs.http.routes import Table
from mqfs.http.target import Path, Target
from mqfs.model import User
from mqfs.serving.await_step import answered, await_step
from mqfs.syntax.lines import quote

KIND = "fq"
WEB = b"_web"  # the sender of requests without one
_SENDS = Sends((JSON,))
_POINT = ("qname", "cpname")


class Web:
    """The routes of one front end. `node`: our address in hops. `page`: scheme and port of the listener with the page,
    or None."""

    def __init__(self, exchanges: Exchanges, users: Users, node: bytes, page: tuple[str, int] | None = None) -> None:
        self._exchanges, self._users, self._node, self._page = exchanges, users, node, page
        self._points = Checkpoints(exchanges)

    def table(self) -> Table:
        points = [
            self._point("add_checkpoint", self._points.add, "Checkpoint added", "chkptid"),
            self._point("remove_checkpoint", self._points.remove, "Checkpoint removed"),
            self._point("reset_to_checkpoint", self._points.go_back, "'{qname}' reset to checkpoint '{cpname}'"),
        ]
        submits = [
            Route(method, KIND, "/submit", self._submit, "Publish.", "submit", body=MESSAGE, sends=_SENDS)
            for method in ("POST", "PUT")
        ]
        page = Route("GET", KIND, "/", self._lead_to_page, "Where the page is.", statuses=(302, 404))
        shown = Route("GET", KIND, "/stats.json", self._stats, "Counters.", "stats.json", ("*",), sends=_SENDS)
        both = (route for point in points for route in point)
        return Table((*submits, page, shown, *both), _resolve, problem=_problem)

    async def _submit(self, call: Call) -> Answer:
        """Publish the body of a request as one message."""
        given = call.request.headers
        if "content-length" not in given:
            return _error("no message")
        texts = {
            "route": given.get("x-fq-route"),
            "exchange": given.get("x-fq-exchange"),
            "sender": given.get("x-fq-sender") or given.get("x-fq-user") or WEB.decode(),
        }
        for what, text in texts.items():
            if text is None:
                return _error(f"missing {what}")
            if len(text.encode()) > NAME_BYTES:
                return _error(f"{what} too long")
        await call.front.await_step(answered(partial(self._users.require_name, call.user, str(texts["sender"]))))
        route, exchange, sender = (str(text).encode() for text in texts.values())
        counts = BrokerCounts()
        publisher = Publisher(self._exchanges, call.user, counts, self._node, call.front.await_step)
        head = origin(sender, self._node + address(call.account))
        message = Message(exchange, route, secrets.token_bytes(ID_BYTES), call.body)
        with closing(publisher):
            await publisher.publish([message], lambda _: head)
        names = ("routed", "dropped", "no_route", "no_exchange")
        return as_json({name: getattr(counts, name) for name in names})

    async def _lead_to_page(self, call: Call) -> Answer:
        if self._page is None:
            raise NotFound("no page here (expected --http ADDRESS, which has one at /.web/)")
        scheme, port = self._page
        host = name_of(call.request.headers.get("host", "localhost"))
        return Answer(302, headers=[("Location", f"{scheme}://{host}:{port}/.web/")])

    async def _stats(self, call: Call) -> Answer:
        return as_json(await stats(self._exchanges, call.user, call.front.pause))

    def _point(self, verb: str, do: Callable[..., Awaitable[None]], done: str, *options: str) -> tuple[Route, Route]:
        """Make the routes of a checkpoint command, which fq clients send by GET. `do`: a method of Checkpoints; it gets
        the values of `options` after the names."""

        async def perform(call: Call) -> Answer:
            try:
                await do(call.user, *_names(call), *(call.option(option) or "" for option in options))
            except (Refused, MqfsError) as error:
                return as_json({"status": "error", "message": str(error)})
            values = {name: call.option(name) for name in _POINT}
            return as_json({"status": "success", "message": done.format_map(values)})

        known = (*_POINT, *options)
        get, post = (
            Route(method, KIND, f"/{verb}", perform, "A checkpoint.", verb, known, changes=True, sends=_SENDS)
            for method in ("GET", "POST")
        )
        return get, post


def _names(call: Call) -> tuple[bytes, bytes]:
    """Return queue and checkpoint of a call. Raises Refused."""
    queue, name = (call.option(word) or "" for word in _POINT)
    if not queue or not name:
        raise Refused(f"missing {_POINT[0] if not queue else _POINT[1]}")
    return queue.encode(), name.encode()


def _error(text: str) -> Answer:
    return as_json({"error": text}, 500)


def _resolve(tree: Tree, user: User, path: Path) -> Target:
    """Resolve the path of a request. Raises NotFound, Standby."""
    _ = tree.root  # raises Standby
    if len(path.names) > 1 or (path.names and path.slash):
        raise NotFound(f"no page {path.text!r}")
    return Target(KIND, None, path.text, *path.names)


def _problem(error: MqfsError, plain: bool) -> tuple[str, bytes]:
    body: Any = as_json({"error": str(error)}).body
    return JSON, body


# ---------------------------------------------------------------- `/stats.json`: counters, as fq names them


async def stats(exchanges: Exchanges, user: User, pause: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Return the counters since the start: exchanges that a user may read, queues bound to one of them, and the user's
    own queues without a binding. `pause` is awaited for each, as there may be many."""
    shown: set[Exchange] = set()
    counters: dict[str, Any] = {}
    for exchange in exchanges:
        await pause()
        if not exchange.group.removed and _may_read(exchanges, user, exchange):
            shown.add(exchange)
            counters[_text(exchange.name)] = _exchange(exchange)
    counters["_aggregate"] = {
        **_counts(exchanges.counts),
        "no_exchange": exchanges.counts.no_exchange,
        "size_dropped": exchanges.counts.size_dropped,
    }
    queues: dict[str, Any] = {}
    for queue in list(exchanges.queues.values()):
        await pause()
        bound = list(queue.exchanges & shown)
        if bound or (not queue.exchanges and owns(user, queue.owner)):
            queues[_text(queue.name)] = _queue(queue, bound)
    return {"version": __version__, "exchanges": counters, "queues": queues}


def _may_read(exchanges: Exchanges, user: User, exchange: Exchange) -> bool:
    try:
        exchanges.tree.access(user, exchange.group, os.R_OK)
    except Denied:
        return False
    return True


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _counts(counts: BrokerCounts) -> dict[str, int]:
    return {
        "messages": counts.msgs_in,
        "octets": counts.octets_in,
        "no_route": counts.no_route,
        "routed": counts.routed,
        "dropped": counts.dropped,
    }


def _exchange(exchange: Exchange) -> dict[str, Any]:
    routes = {str(binding.route): _route(binding, exchange) for binding in exchange.bindings.values()}
    group = exchange.group  # its number and sequences are needed for checkpoints
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


def _queue(queue: Queue, bound: list[Exchange]) -> dict[str, Any]:
    consumers = [exchange.consumer(queue) for exchange in bound if not exchange.group.removed]
    return {
        "private": queue.options.private,
        "type": queue.options.type or "disk",
        "policy": queue.options.policy,
        "backlog_limit": queue.options.backlog,
        "backlog": sum(_backlog(consumer) for consumer in consumers if consumer is not None),
        "dropped_to": queue.dropped_to,
        "refcnt": len(queue.members) + 1,
        "clients": [_client(member) for member in queue.members if isinstance(member, Client)],
    }


def _backlog(consumer: Any) -> int:
    """Return the number of unacked messages of a consumer: maintained if it has a backlog bound, else counted."""
    return int(consumer.backlog.size() if consumer.state.backlog else consumer.backlog.count())


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


# ---------------------------------------------------------------- checkpoints

RESERVED = b"fq"
_PLACE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})\Z")


class Checkpoints:
    """The checkpoints: named positions of permanent queues, to which a queue can be set back.

    A checkpoint is a consumer that is never read, in the group of every exchange that the queue is bound to. So the
    messages after it are retained.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    async def add(self, user: User, queue_name: bytes, name: bytes, place: str) -> None:
        """Add a checkpoint, or move it. `place`: GROUP:SEQUENCE, the last message that is not redelivered; in other
        groups the checkpoint is at the queue's present position. Raises Refused, MqfsError."""
        async with self._exchanges.changing(queue_name):
            queue, found = self._find(user, queue_name, name)
            number, sequence = self._place(queue, name, place, found)
            for exchange in found:
                if (consumer := exchange.consumer(queue)) is None:
                    raise Refused(f"'{exchange.group.name}' has no consumer of the queue any more")
                at = sequence + 1 if exchange.group.number == number else consumer.state.progress.ack_floor
                line = f"consumer {quote(point(queue, name))} {quote(queue.view)}"
                await self._exchanges.command(user, exchange.group, line)
                await self._seek(user, exchange, point(queue, name), at)

    @staticmethod
    def _place(queue: Queue, name: bytes, place: str, found: list[Exchange]) -> tuple[int, int]:
        """Parse and check a place: the number of a group, and a sequence in it. Raises Refused."""
        if (match := _PLACE.match(place)) is None:
            raise Refused("'chkptid' must be of format: [0-9]*:[0-9]*")
        number, sequence = int(match[1]), int(match[2])
        for exchange in found:
            group = exchange.group
            if len(points(queue, group.consumers)) >= limits.FQ_POINTS and point(queue, name) not in group.consumers:
                raise Refused(f"too many checkpoints of the queue (expected at most {limits.FQ_POINTS})")
            end = group.log.end.next
            if group.number == number and not (group.log.reader.first - 1 <= sequence < end):
                raise Refused("'chkptid' is out of range of the queue")
        if all(exchange.group.number != number for exchange in found):
            raise Refused("'chkptid' is out of range of the queue")
        return number, sequence

    async def remove(self, user: User, queue_name: bytes, name: bytes) -> None:
        """Remove a checkpoint. Raises Refused, MqfsError."""
        async with self._exchanges.changing(queue_name):
            queue, found = self._find(user, queue_name, name, removes=True)
            for exchange in self._having(queue, name, found):
                await self._exchanges.command(user, exchange.group, f"remove {quote(point(queue, name))}")

    async def go_back(self, user: User, queue_name: bytes, name: bytes) -> None:
        """Set a queue back to a checkpoint: the messages after it are redelivered. Raises Refused, MqfsError."""
        async with self._exchanges.changing(queue_name):
            queue, found = self._find(user, queue_name, name)
            for exchange in self._having(queue, name, found):
                if (consumer := exchange.group.consumers.get(point(queue, name))) is None:
                    raise Refused(f"'{exchange.group.name}' has no such checkpoint any more")
                await self._seek(user, exchange, queue.consumer, consumer.state.progress.ack_floor)

    def _find(
        self, user: User, queue_name: bytes, name: bytes, *, removes: bool = False
    ) -> tuple[Queue, list[Exchange]]:
        """Return the queue and its exchanges, after a check of permissions. `removes`: also for a queue that may not
        have checkpoints any more. Raises Refused, Denied."""
        if name == RESERVED:
            raise Refused("'fq' is a reserved name, cannot be used for a checkpoint name")
        queue = self._exchanges.queues.get(queue_name)
        if queue is None:
            raise Refused(f"Cannot find registered queue '{queue_name.decode(errors='replace')}'")
        if not queue.permanent and not removes:
            raise Refused("Checkpoints on ephemeral queues not supported")
        if queue.options.type == "mem" and not removes:
            raise Refused("Checkpoints on memory queues not supported")
        found = [exchange for exchange in self._exchanges if exchange.consumer(queue) is not None]
        for exchange in found:
            self._exchanges.require(user, exchange, queue)
            self._exchanges.tree.access(user, exchange.group, CHANGE)  # as to make or move a consumer
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
        with closing(tree.open(user, tree.walk(user, folder, consumer), os.O_WRONLY)) as handle:
            await await_step(handle.write(f"seek {at}\n".encode()))
