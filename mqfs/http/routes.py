"""The routes of the front end: one table, from which the documentation of the interface is made, too.

A row has the method of a call, the kind and verb of its target, and its options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from mqfs.engine.tree.tree import Tree
from mqfs.errors import Conflict, IsDirectory, MqfsError
from mqfs.http import consuming, groups, metrics, openapi, publishing, reading
from mqfs.http.answers import FORMATS, JSON, RAW, TEXT, Answer, BadRange, Headers, NotAllowed, problem
from mqfs.http.answers import LINES as JSON_LINES
from mqfs.http.gate import CHALLENGES
from mqfs.http.metrics import OPEN_METRICS
from mqfs.http.route import BATCH, COMMANDS, LINES, MESSAGE, STAGED, Route, Sends
from mqfs.http.target import Path, Target, absent, resolve
from mqfs.http.wire import Request
from mqfs.model import User

_PUBLISH = (
    "create", "wait", "reply", "delay", "at", "ttl", "priority", "single", "id", "key", "every", "cron", "expect", "h-",
)  # fmt: skip
_LIST = ("after", "type", "detail", "select", *reading.OPTIONS)
_CONSUMER = ("over", "transient", "private", "memory", "backlog", "full", "order")
_PLACES = ("Mqfs-First", "Mqfs-Next")
_MESSAGES = tuple(dict.fromkeys(form.kind for form in FORMATS.values()))
_READ = Sends(_MESSAGES, (*_PLACES, "Mqfs-Sequence", "Mqfs-Time"))
_PUBLISHED = Sends((TEXT, JSON), ("Mqfs-Sequence", "Location", "ETag", "Mqfs-Retained"))
_JSON, _TEXT, _JSON_LINES = Sends((JSON,)), Sends((TEXT,)), Sends((JSON_LINES,))
_BODY = "3 lamps"


def _settling(verb: str, *options: str) -> Route:
    return Route(
        "POST",
        "consumer",
        f"/shop/.consumers/mail/{verb}",
        consuming.settle,
        f"`{verb}` of claimed messages: their tokens, one a line.",
        verb,
        options,
        LINES,
        (204, 410),
        example="1.17.1.FGqvFBuVeGR9-sTGnGlsTg",
    )


ROUTES: tuple[Route, ...] = (
    Route("GET", "group", "/shop/", groups.show, "List a group, or read what `select` names.",
          options=_LIST, statuses=(200, 303), sends=Sends((JSON, *_MESSAGES), _PLACES)),
    Route("GET", "bare group", "/shop", groups.add_slash, "Where the group is.",
          options=_LIST, statuses=(308,)),
    Route("PUT", "new group", "/shop/", groups.make_group, "Make a group.", statuses=(201,)),
    Route("PUT", "group", "/shop/", groups.is_there, "The group is there.", statuses=(200, 412)),
    Route("DELETE", "group", "/shop/", groups.remove_group, "Remove an empty group.", statuses=(204, 409)),
    Route("PUT", "new stream", "/shop/orders", publishing.put, "Make a stream; with a body, publish.",
          options=_PUBLISH, body=MESSAGE, statuses=(201, 400, 412, 504), sends=_PUBLISHED, example=_BODY),
    Route("PUT", "stream", "/shop/orders", publishing.put_there, "Publish the body; without one the stream is there.",
          options=_PUBLISH, body=MESSAGE, statuses=(200, 201, 412, 504), sends=_PUBLISHED, example=_BODY),
    Route("POST", "new stream", "/shop/orders", publishing.publish, "Make a stream, and publish the body.",
          options=_PUBLISH, body=MESSAGE, statuses=(201, 404, 412, 504), sends=_PUBLISHED, example=_BODY),
    Route("POST", "stream", "/shop/orders", publishing.publish, "Publish the body as one message.",
          options=_PUBLISH, body=MESSAGE, statuses=(200, 201, 412, 504), sends=_PUBLISHED, example=_BODY),
    Route("DELETE", "stream", "/shop/orders", groups.unlink, "Remove a stream.", statuses=(204,)),
    Route("DELETE", "view", "/shop/view", groups.unlink, "Remove a view.", statuses=(204,)),
    Route("GET", "stream", "/shop/orders", reading.read, "Read messages; takes none.",
          options=reading.OPTIONS, statuses=(200, 204, 404, 410), sends=_READ),
    Route("GET", "view", "/shop/view", reading.read, "Read what a view selects.",
          options=reading.OPTIONS, statuses=(200, 204, 410), sends=_READ),
    Route("GET", "new stream", "/shop/orders", reading.absent, "No such stream.",
          options=reading.OPTIONS, statuses=(204, 404)),
    Route("HEAD", "stream", "/shop/orders", reading.look, "Where a stream begins and ends.", options=reading.OPTIONS,
          sends=Sends((RAW.kind,), (*_PLACES, "Mqfs-Messages", "Mqfs-Bytes", "Mqfs-Written", "ETag"))),
    Route("HEAD", "view", "/shop/view", reading.look, "Where the next message will be.", options=reading.OPTIONS,
          sends=Sends((RAW.kind,), ("Mqfs-Next",))),
    Route("GET", "kept", "/shop/.kept/orders", groups.read, "The retained messages of a stream, as a file.",
          statuses=(200, 206, 304, 416), sends=Sends((RAW.kind,), ("ETag", "Accept-Ranges", "Content-Range"))),
    Route("POST", ".batch", "/shop/.batch", publishing.batch, "Publish many messages, all or none.",
          options=("wait",), body=BATCH, statuses=(201,), sends=Sends((TEXT, JSON), ("Mqfs-Sequence", "Mqfs-Retained")),
          example='{"stream":"orders","body":"3 lamps"}\n'),
    Route("PUT", "new part", "/shop/.txn/PART/", publishing.make_part, "Begin a part of a transaction.",
          statuses=(201,)),
    Route("PUT", "part", "/shop/.txn/PART/", groups.is_there, "The part is there."),
    Route("DELETE", "part", "/shop/.txn/PART/", groups.remove_group, "Drop a part.", statuses=(204,)),
    Route("POST", "staged", "/shop/.txn/PART/orders", publishing.stage, "Write a message, or a batch, into a part.",
          body=STAGED, statuses=(202,), example=_BODY),
    Route("GET", "txn ctl", "/shop/.txn/ctl", groups.ctl, "Parts and producers.", sends=_TEXT),
    Route("POST", "txn ctl", "/shop/.txn/ctl", groups.command, "Commit or abort parts.", body=LINES,
          statuses=(204,), example="commit app.1 PART"),
    Route("GET", "ctl", "/shop/ctl", groups.ctl, "The settings of a group.", sends=_TEXT),
    Route("POST", "ctl", "/shop/ctl", groups.command, "Change settings: lines, all or none.", body=COMMANDS,
          statuses=(204, 400), example="depth 1000\nreplay all\n"),
    Route("GET", ".stats", "/shop/.stats", groups.status, "Counters.", options=("streams",), sends=_JSON),
    Route("GET", ".who", "/shop/.who", groups.status, "Open files.", sends=_JSON_LINES),
    Route("GET", ".errors", "/shop/.errors", groups.status, "Refused writes.", sends=_JSON_LINES),
    Route("PUT", "new consumer", "/shop/.consumers/mail", consuming.make, "Make a consumer.",
          options=_CONSUMER, statuses=(201,)),
    Route("PUT", "consumer", "/shop/.consumers/mail", consuming.change, "The consumer is there: change its options.",
          options=_CONSUMER, statuses=(200, 409, 412)),
    Route("DELETE", "consumer", "/shop/.consumers/mail", groups.unlink, "Remove a consumer.", statuses=(204, 409)),
    Route("GET", "consumer", "/shop/.consumers/mail", consuming.peek, "The backlog, with deliveries.",
          options=("after", "count", "format"), sends=Sends((JSON_LINES, RAW.kind, TEXT))),
    Route("POST", "consumer", "/shop/.consumers/mail/claim", consuming.claim, "Claim messages.", "claim",
          ("max", "wait", "lease"), statuses=(200, 204, 429), sends=_JSON_LINES),
    _settling("ack"),
    _settling("nack", "after"),
    _settling("release"),
    _settling("dead", "reason"),
    _settling("touch", "lease"),
    Route("POST", "consumer", "/shop/.consumers/mail/seek", consuming.seek, "Move a consumer: a word of `seek`.",
          "seek", body=COMMANDS, statuses=(204,), example="end"),
    Route("POST", "stream", "/shop/jobs/take", consuming.take, "Take from a stream under `deliver one`.", "take",
          ("max", "wait", "format"), statuses=(200, 204, 409),
          sends=Sends((RAW.kind, TEXT, JSON_LINES))),
    Route("GET", "web", "/.web/", groups.serve, "The page, for a browser.", statuses=(200, 304, 404),
          sends=Sends((groups.KINDS["index.html"],), ("ETag",))),
    Route("GET", "health", "/.health", groups.health, "Whether the process lives.", sends=_JSON),
    Route("GET", "ready", "/.ready", groups.ready, "Whether it can be sent work.", statuses=(200, 503), sends=_JSON),
    Route("GET", "metrics", "/.metrics", metrics.show, "Counters of the groups that the user may read, for Prometheus.",
          options=("streams",), sends=Sends((TEXT, OPEN_METRICS))),
    Route("GET", "openapi", "/.openapi.json", partial(openapi.serve, lambda: ROUTES), "This document.",
          statuses=(200, 304), sends=Sends((JSON,), ("ETag",))),
    Route("GET", "asyncapi", "/.asyncapi.json", openapi.serve_streams, "The streams, as an AsyncAPI document.",
          sends=_JSON),
)  # fmt: skip


def in_header(request: Request, path: Path, encrypted: bool) -> str | None:
    """Return the Authorization header of a request."""
    return request.headers.get("authorization")


@attrs.frozen
class Table:
    """The routes of a listener, with its ways to resolve targets, read credentials and write errors."""

    routes: tuple[Route, ...]
    resolve: Callable[[Tree, User, Path], Target] = resolve
    credentials: Callable[[Request, Path, bool], str | None] = in_header
    problem: Callable[[MqfsError, bool], tuple[str, bytes]] = problem
    _by_key: dict[Any, Route] = attrs.field(init=False)

    @_by_key.default
    def _index(self) -> dict[Any, Route]:
        own = {(route.method, route.kind, route.verb): route for route in self.routes}
        gets = [route for route in self.routes if route.method == "GET" and not route.changes]
        for route in gets:
            own.setdefault(("HEAD", route.kind, route.verb), route)
        return own

    def methods(self, target: Target) -> tuple[str, ...]:
        """Return the methods of a target. HEAD comes with each GET, unless that changes something."""
        return tuple(method for method, *key in self._by_key if key == [target.kind, target.verb])

    def find(self, method: str, target: Target, path: Path) -> Route:
        """Return the route of a request. Raises NotFound for a missing target, NotAllowed for another method than its
        own, IsDirectory for a group without its slash."""
        route = self._by_key.get((method, target.kind, target.verb))
        if route is not None:
            return route
        if target.kind == "bare group":
            raise IsDirectory(f"{target.name!r} is a group (expected a slash at the end)")
        allowed = self.methods(target)
        if not allowed or (target.kind.startswith("new ") and method not in allowed):
            raise absent(target, path.names)
        raise NotAllowed(f"{method} (expected {' or '.join(allowed)})", allowed)

    def refuse(self, request: Request, error: MqfsError) -> Answer:
        """Return the answer to a failed request."""
        accept = request.headers.get("accept", "*/*")
        plain = accept.startswith(("*/*", "text/plain"))
        kind, body = self.problem(error, plain)
        headers: Headers = [("Cache-Control", "no-store")]
        if isinstance(error, NotAllowed):
            headers.append(("Allow", ", ".join(error.allowed)))
        elif isinstance(error, Conflict):
            headers.append(("ETag", f'"{error.newest}"'))
        elif isinstance(error, BadRange):
            headers.append(("Content-Range", f"bytes */{error.size}"))
        elif error.http == 401:
            headers += CHALLENGES
        elif isinstance(error, (publishing.ReplyEnded, publishing.ReplyRefused)):
            pass  # the message is published: a client that obeyed Retry-After would publish it twice
        elif error.http in (429, 503):
            headers.append(("Retry-After", "1"))
        return Answer(error.http, body, kind, headers)


TREE = Table(ROUTES)
