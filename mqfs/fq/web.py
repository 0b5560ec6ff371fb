"""HTTP on the port of fq: publishing, counters, checkpoints. Nothing else is there.

Owns the table of these routes, and their answers, which are fq's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from mqfs.engine.tree.tree import Tree
from mqfs.errors import MqfsError, NotFound
from mqfs.fq.checkpoints import Checkpoints
from mqfs.fq.codec import ID_BYTES, NAME_BYTES, Message
from mqfs.fq.exchanges import Counts, Exchanges
from mqfs.fq.publishing import Publisher, address, origin
from mqfs.fq.queues import Refused
from mqfs.fq.stats import stats
from mqfs.fq.users import Users
from mqfs.http.answers import JSON, Answer, as_json
from mqfs.http.browser import name_of
from mqfs.http.call import Call
from mqfs.http.route import MESSAGE, Route, Sends
from mqfs.http.routes import Table
from mqfs.http.target import Path, Target
from mqfs.model import User

KIND = "fq"
WEB = b"_web"  # who sends what says no sender
_SENDS = Sends((JSON,))
_POINT = ("qname", "cpname")


class Web:
    """Of one front end. `node`: our address in hops. `page`: scheme and port of the listener that has the page, if one
    has."""

    def __init__(self, exchanges: Exchanges, users: Users, node: bytes, page: tuple[str, int] | None = None) -> None:
        self._exchanges, self._users, self._node, self._page = exchanges, users, node, page
        self._points = Checkpoints(exchanges)

    def table(self) -> Table:
        points = [
            self._point("add_checkpoint", self._add, "Checkpoint added", "chkptid"),
            self._point("remove_checkpoint", self._remove, "Checkpoint removed"),
            self._point("reset_to_checkpoint", self._reset, "'{qname}' reset to checkpoint '{cpname}'"),
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
        """The body is the payload."""
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
        self._users.require_name(call.user, str(texts["sender"]))
        route, exchange, sender = (str(text).encode() for text in texts.values())
        counts = Counts()
        publisher = Publisher(self._exchanges, call.user, counts, self._node)
        head = origin(sender, self._node + address(call.account))
        message = Message(exchange, route, secrets.token_bytes(ID_BYTES), call.body)
        try:
            await publisher.publish([message], lambda _: head)
        finally:
            publisher.close()
        names = ("routed", "dropped", "no_route", "no_exchange")
        return as_json({name: getattr(counts, name) for name in names})

    async def _lead_to_page(self, call: Call) -> Answer:
        if self._page is None:
            raise NotFound("no page here (expected --http ADDRESS, which has one at /.web/)")
        scheme, port = self._page
        host = name_of(call.request.headers.get("host", "localhost"))
        return Answer(302, headers=[("Location", f"{scheme}://{host}:{port}/.web/")])

    async def _stats(self, call: Call) -> Answer:
        return as_json(stats(self._exchanges, call.user))

    def _point(self, verb: str, do: Callable[[Call], Awaitable[None]], done: str, *options: str) -> tuple[Route, Route]:
        """The routes of a command, which is a GET for fq's clients."""

        async def perform(call: Call) -> Answer:
            try:
                await do(call)
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

    async def _add(self, call: Call) -> None:
        await self._points.add(call.user, *_names(call), call.option("chkptid") or "")

    async def _remove(self, call: Call) -> None:
        await self._points.remove(call.user, *_names(call))

    async def _reset(self, call: Call) -> None:
        await self._points.go_back(call.user, *_names(call))


def _names(call: Call) -> tuple[bytes, bytes]:
    """Raises Refused."""
    queue, name = (call.option(word) or "" for word in _POINT)
    if not queue or not name:
        raise Refused(f"missing {_POINT[0] if not queue else _POINT[1]}")
    return queue.encode(), name.encode()


def _error(text: str) -> Answer:
    return as_json({"error": text}, 500)


def _resolve(tree: Tree, user: User, path: Path) -> Target:
    """Raises NotFound."""
    if len(path.names) > 1 or (path.names and path.slash):
        raise NotFound(path.text)
    return Target(KIND, None, path.text, *path.names)


def _problem(error: MqfsError, plain: bool) -> tuple[str, bytes]:
    body: Any = as_json({"error": str(error)}).body
    return JSON, body
