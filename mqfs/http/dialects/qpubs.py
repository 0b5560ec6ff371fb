"""The dialect of qpubs below `/.qpubs/GROUP/`: `listen`, `once`, `ignore` and `emit`.

This module has the open listens, so that `ignore` can end one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import cast

import attrs

from mqfs import limits
from mqfs.engine.files.cursor import Cursor
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadRequest, Denied, NotFound
from mqfs.http import answers, publishing, reading
from mqfs.http.answers import Answer
from mqfs.http.groups import with_stream
from mqfs.http.route import VALUE, Call, Calls, Route
from mqfs.http.routes import Table
from mqfs.http.target import Path, Target, group_at
from mqfs.model import User
from mqfs.syntax.names import check_name
from mqfs.syntax.patterns import is_pattern

ROOT = ".qpubs"
_LISTEN = ("name", "data", "last_event_id")


def resolve(others: Callable[[Tree, User, Path], Target], tree: Tree, user: User, path: Path) -> Target:
    """Return the target of a path below ROOT; `others` resolves any other path. Raises NotFound, Denied,
    NotDirectory."""
    if path.names[:1] != (ROOT,):
        return others(tree, user, path)
    if len(path.names) < 3 or path.slash:
        raise NotFound(f"no page {path.text!r} (expected /{ROOT}/GROUP/listen, once, ignore or emit)")
    return Target("qpubs", group_at(tree, user, path.names[1:-1]), path.text, path.names[-1])


def _name(call: Call) -> str:
    if not (name := call.option("name")):
        raise BadRequest("name: missing (expected name=STREAM)")
    return name


def _listened(call: Call, words: reading.Wish) -> reading.AnswerMessages:
    """Open the messages of a stream, view or pattern; a missing stream may be made later."""
    name = _name(call)
    waits = not is_pattern(name, call.group.settings.words) and not reading.exists(call, check_name(name))
    return reading.open_source(call, [name], words, "cover" if waits else "select")


class Listens:
    """The open listens of a front end, by id: each with its user, the name or pattern it selects, and its cursor."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, str, Cursor]] = {}

    async def listen(self, call: Call) -> Answer:
        """Answer with messages from now on as events, until `ignore`; the first event has the id for it."""
        id, words = secrets.token_hex(8), reading.wish(call)
        end = call.group.log.end.next
        since = int(words.since) if words.since.isdigit() else end  # after the client's last event, or now
        place = since - 1 if since <= end else 0  # the client's last event; 0 if it is beyond the end
        first = answers.event(json.dumps({"id": id}), name="listen", sequence=place)
        form = answers.choose("sse", "", call.option("data"))
        form = attrs.evolve(form, begin=form.begin + first)
        words = attrs.evolve(words, form=form, since=str(since), follow=True)
        source = _listened(call, words)
        answer = await reading.answer(call, source, words)
        self._open[id] = call.user.uid, _name(call), source.cursor
        answer.done = partial(self._done, id, cast(Callable[[bool], None], answer.done))
        return answer

    def _done(self, id: str, then: Callable[[bool], None], sent: bool) -> None:
        self._open.pop(id, None)
        then(sent)

    async def ignore(self, call: Call) -> Answer:
        """End a listen of the same user. Raises NotFound, Denied."""
        uid, name, cursor = self._open.get(id := call.option("id") or "", (-1, "", None))
        if cursor is None or call.option("name") not in (None, name):
            raise NotFound(f"unknown id of a listen {id!r}")
        if uid != call.user.uid:
            raise Denied("id: another user's listen")
        cursor.write(b"until 0\n")
        cursor.end()
        return Answer(204)


async def once(call: Call) -> Answer:
    """Answer with the next message, or 204 if none was written within `wait`."""
    form = answers.choose(call.option("format") or "json", "")
    if form.beat is not None or form is answers.RECORD:
        raise BadRequest("format: unknown (expected json, raw, line or nul)")
    wait = call.seconds("wait")
    words = reading.Wish(form, "end", count=1, wait=limits.HTTP_ONCE_S if wait is None else wait)
    return await reading.answer(call, _listened(call, words), words)


async def emit(call: Call) -> Answer:
    """Publish `value`, or the body."""
    value = call.option("value")
    body = call.body if value is None else value.encode()
    if not body:
        raise BadRequest("emit: empty (expected value=TEXT or a body)")
    group, name = call.group, _name(call)
    frames = await publishing.gathered(call, publishing.framed(group, name, body))
    sequence = await with_stream(call, name, partial(publishing.append, call, group, ".batch", frames))
    return publishing.published(call, sequence, group.streams.get(name))


def beside(table: Table) -> Table:
    """Return a table with these routes added."""
    listens = Listens()

    def route(
        method: str, verb: str, call: Calls, about: str, *options: str, body: str = "", changes: bool = True
    ) -> Route:
        path, statuses = f"/{ROOT}/shop/{verb}", (200, 201, 204)
        return Route(method, "qpubs", path, call, about, verb, options, body, statuses, changes)

    routes = (
        route("GET", "listen", listens.listen, "Follow streams.", *_LISTEN, changes=False),
        route("GET", "once", once, "Wait for one message.", "name", "wait", "format", changes=False),
        *(route(method, "ignore", listens.ignore, "End a listen.", "name", "id") for method in ("GET", "POST")),
        *(route(method, "emit", emit, "Publish.", "name", "value", "wait", body=VALUE) for method in ("GET", "POST")),
    )
    return attrs.evolve(table, routes=(*table.routes, *routes), resolve=partial(resolve, table.resolve))
