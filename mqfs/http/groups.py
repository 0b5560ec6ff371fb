"""Groups and streams made, listed and removed, and a group's own files."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from itertools import islice
from typing import Any

from mqfs import limits
from mqfs.engine.files import status_files
from mqfs.engine.group import Group
from mqfs.engine.routing.view import View
from mqfs.engine.stream import Stream
from mqfs.errors import BadRequest, Denied, Exists, NotFound
from mqfs.http import page, reading
from mqfs.http.answers import JSON, LINES, NO_STORE, SANDBOX, TEXT, Answer, accepted, as_json, json_answer
from mqfs.http.call import WHOLE, Call
from mqfs.http.refusals import NotTrue

GROUP_MODE, STREAM_MODE = 0o775, 0o664
LISTED = 1_000
_STATUS = {".stats": JSON, ".who": LINES, ".errors": LINES}
_TYPES = {Group: "group", Stream: "stream", View: "view"}


def mode(call: Call, directory: Any, most: int) -> int:
    """Of a new file, as 9P has it: no more than its group's own bits."""
    return most & call.tree.stat(directory).mode


async def show(call: Call) -> Answer:
    """List a group, for a browser by the page; with `select`, read several of its streams."""
    if call.option("select") is not None:
        return await reading.read(call)
    if not call.path.options and "text/html" in accepted(call.request.headers.get("accept", "")):
        return page.lead_to(call.path.text)
    count = call.number("count", limits.HTTP_LISTED) or LISTED
    types = _types(call.option("type"))
    group, after, detail = call.target.node, call.option("after"), call.flag("detail")
    nodes = await call.front.settle(group.portions.run(call.tree.entries(call.user, group)))
    at = 0 if after is None else bisect_right(nodes, after, key=lambda node: node.name)
    entries, last, more = list[str](), None, None
    for node in islice(nodes, at, None):
        if type(node) in types:
            if len(entries) == count:
                more = last
                break
            entry = {"name": node.name, "type": _TYPES[type(node)], **(_figures(call, node) if detail else {})}
            entries.append(json.dumps(entry, ensure_ascii=False))
            last = node.name
        await call.front.pause()
    head, end = (json.dumps(text, ensure_ascii=False) for text in (group.name, more))
    return json_answer(f'{{"group": {head}, "entries": [{", ".join(entries)}], "after": {end}}}\n')


def _types(word: str | None) -> list[type]:
    """Those of that name, all without one. Raises BadRequest."""
    if word not in (None, *_TYPES.values()):
        raise BadRequest(f"type {word!r} (expected {' or '.join(_TYPES.values())})")
    return [kind for kind, name in _TYPES.items() if word in (None, name)]


def _figures(call: Call, node: Any) -> dict[str, Any]:
    """What `.stats` counts of a stream, or of a group if the user may read it there."""
    if isinstance(node, Group):
        try:
            call.tree.access(call.user, call.tree.walk(call.user, node, ".stats"), os.R_OK)
        except Denied:
            return {}
    return status_files.figures(node)


async def add_slash(call: Call) -> Answer:
    """A group was named as a file is."""
    return Answer(308, headers=[("Location", call.path.text + "/")])


async def make_group(call: Call) -> Answer:
    directory = call.target.node
    await call.front.settle(call.tree.mkdir(call.user, directory, call.target.name, mode(call, directory, GROUP_MODE)))
    return Answer(201)


async def is_there(call: Call) -> Answer:
    """It was made before."""
    if call.request.headers.get("if-none-match") == "*":
        raise NotTrue(f"{call.target.name} is there")
    return Answer(200)


async def remove_group(call: Call) -> Answer:
    parent = call.tree.parent(call.target.node)
    await call.front.settle(call.tree.rmdir(call.user, parent, call.target.name))
    return Answer(204)


async def make_stream(call: Call, name: str = "") -> Any:
    """The stream of that name, made unless it is there by now."""
    group, name = call.target.node, name or call.target.name
    try:
        return await call.front.settle(call.tree.create(call.user, group, name, mode(call, group, STREAM_MODE)))
    except Exists:
        return call.tree.walk(call.user, group, name)


async def ensure_stream(call: Call, name: str) -> Any:
    """The stream or view of that name; a stream is made where there is nothing."""
    try:
        return call.own(name)
    except NotFound:
        return await make_stream(call, name)


async def unlink(call: Call) -> Answer:
    """Remove a stream or a consumer."""
    parent = call.tree.parent(call.target.node)
    await call.front.settle(call.tree.unlink(call.user, parent, call.target.name))
    return Answer(204)


async def text_of(call: Call, node: Any) -> bytes:
    handle = call.tree.open(call.user, node, os.O_RDONLY)
    try:
        return await call.front.settle(handle.read(WHOLE))
    finally:
        handle.close()


async def ctl(call: Call) -> Answer:
    """The settings."""
    return Answer(200, await text_of(call, call.target.node), TEXT, [*NO_STORE, SANDBOX])


async def command(call: Call) -> Answer:
    """Lines for `ctl`, all or none."""
    await write(call, call.target.node, call.body)
    return Answer(204)


async def write(call: Call, node: Any, data: bytes) -> None:
    """One whole write to a file."""
    handle = call.tree.open(call.user, node, os.O_WRONLY)
    try:
        handle.whole_below = WHOLE
        await call.front.settle(handle.write(data))
    finally:
        handle.close()


async def status(call: Call) -> Answer:
    """`.stats`, `.who`, `.errors`."""
    if call.option("streams") is not None and not call.flag("streams"):
        call.tree.access(call.user, call.target.node, os.R_OK)
        return json_answer(await call.front.settle(call.group.portions.run(status_files.totals(call.group, call.user))))
    return Answer(200, await text_of(call, call.target.node), _STATUS[call.target.name], [*NO_STORE, SANDBOX])


async def health(call: Call) -> Answer:
    return as_json({"status": "ok"})


async def ready(call: Call) -> Answer:
    """Whether the server can be sent work, else why not."""
    troubles = call.front.troubles()
    return as_json({"status": "not ready" if troubles else "ok", "reasons": troubles}, 503 if troubles else 200)
