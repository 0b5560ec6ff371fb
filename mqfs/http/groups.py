"""Make, list and remove groups and streams; read and write a group's own files."""

from __future__ import annotations

import json
import os
import re
from base64 import urlsafe_b64encode
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from typing import Any, TypeVar, cast

from mqfs import limits
from mqfs.engine.files import status as status_files
from mqfs.engine.files.stream import SnapshotHandle
from mqfs.engine.group import Group
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.errors import BadRequest, Denied, Exists, MqfsError, NotFound
from mqfs.http import reading
from mqfs.http.answers import (
    JSON,
    LINES,
    NO_STORE,
    RAW,
    SANDBOX,
    TEXT,
    Answer,
    BadRange,
    Cut,
    Headers,
    NotTrue,
    accepted,
    as_json,
    json_answer,
)
from mqfs.http.route import WHOLE, Call

T = TypeVar("T")

GROUP_MODE, STREAM_MODE = 0o775, 0o664
LISTED = 1_000
TYPES = {Group: "group", Stream: "stream", View: "view"}


def mode(call: Call, directory: Any, most: int) -> int:
    """Return the mode of a new file, as in 9P: no more than its directory's own bits."""
    return most & call.tree.stat(directory).mode


async def show(call: Call) -> Answer:
    """List a group; a browser is redirected to the page. With `select`, read several of its streams."""
    if call.option("select") is not None:
        return await reading.read(call)
    if not call.path.options and "text/html" in accepted(call.request.headers.get("accept", "")):
        return lead_to(call.path.text)
    count = call.number("count", limits.HTTP_LISTED) or LISTED
    types = _types(call.option("type"))
    group, after, detail = call.target.node, call.option("after"), call.flag("detail")
    nodes = await call.front.await_step(group.portions.run(call.tree.entries(call.user, group)))
    at = 0 if after is None else bisect_right(nodes, after, key=lambda node: node.name)
    entries, last, more = list[str](), None, None
    for node in islice(nodes, at, None):
        if type(node) in types:
            if len(entries) == count:
                more = last
                break
            entry = {"name": node.name, "type": TYPES[type(node)], **(await _figures(call, node) if detail else {})}
            entries.append(json.dumps(entry, ensure_ascii=False))
            last = node.name
        await call.front.pause()
    head, end = (json.dumps(text, ensure_ascii=False) for text in (group.name, more))
    return json_answer(f'{{"group": {head}, "entries": [{", ".join(entries)}], "after": {end}}}\n')


def _types(word: str | None) -> list[type]:
    """Return the types of nodes with that name, or all types for None. Raises BadRequest."""
    if word not in (None, *TYPES.values()):
        raise BadRequest(f"type {word!r} (expected {' or '.join(TYPES.values())})")
    return [kind for kind, name in TYPES.items() if word in (None, name)]


async def _figures(call: Call, node: Any) -> dict[str, Any]:
    """Return the counters that `.stats` has of a stream or view, or of a group if the user may read its `.stats`."""
    if isinstance(node, Group):
        try:
            call.tree.access(call.user, call.tree.walk(call.user, node, ".stats"), os.R_OK)
        except (Denied, NotFound):  # removed since it was listed
            return {}
    found: dict[str, Any] = await call.front.await_step(node.group.portions.run(status_files.figures(node)))
    return found


async def add_slash(call: Call) -> Answer:
    """Redirect a path of a group without its slash at the end."""
    _, mark, query = call.request.target.partition("?")
    return Answer(308, headers=[("Location", f"{call.path.text}/{mark}{query}")])


async def make_group(call: Call) -> Answer:
    directory, name = call.target.node, call.target.name
    try:
        await call.front.await_step(call.tree.mkdir(call.user, directory, name, mode(call, directory, GROUP_MODE)))
    except Exists:
        if name not in directory.groups:
            raise
        return await is_there(call)  # made meanwhile
    return Answer(201)


async def is_there(call: Call) -> Answer:
    """Answer that the target exists. Raises NotTrue for `If-None-Match: *`."""
    if call.request.headers.get("if-none-match") == "*":
        raise NotTrue(f"{call.target.name!r} is there")
    return Answer(200)


async def remove_group(call: Call) -> Answer:
    parent = call.tree.parent(call.target.node)
    await call.front.await_step(call.tree.rmdir(call.user, parent, call.target.name))
    return Answer(204)


async def make_stream(call: Call, name: str = "", most: int = STREAM_MODE) -> Any:
    """Make a stream unless it exists, and return it. `most`: the bits of its mode, less those that its group lacks."""
    group, name = call.target.node, name or call.target.name
    try:
        return await call.front.await_step(call.tree.create(call.user, group, name, mode(call, group, most)))
    except Exists:
        return call.tree.walk(call.user, group, name)


async def with_stream(call: Call, name: str, write: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a write to a stream, which is made where nothing has that name.

    A refused write leaves no stream: the write is tried first, and a stream made for it is removed if it fails."""
    try:
        return await write()
    except NotFound:
        try:
            call.own(name)
        except NotFound:
            pass
        else:
            raise
    try:
        stream: Any = await call.front.await_step(
            call.tree.create(call.user, call.group, name, mode(call, call.group, STREAM_MODE))
        )
    except Exists:
        return await write()
    try:
        return await write()
    except BaseException:  # also where the client has disconnected
        call.tree.unmake(stream)
        raise


async def unlink(call: Call) -> Answer:
    """Remove a stream, view or consumer."""
    parent = call.tree.parent(call.target.node)
    await call.front.await_step(call.tree.unlink(call.user, parent, call.target.name))
    return Answer(204)


async def text_of(call: Call, node: Any) -> bytes:
    with closing(call.tree.open(call.user, node, os.O_RDONLY)) as handle:
        return await call.front.await_step(handle.read(WHOLE))


async def ctl(call: Call) -> Answer:
    """Return the settings of a group, or the parts and producers of `.txn/ctl`."""
    return Answer(200, await text_of(call, call.target.node), TEXT, [*NO_STORE, SANDBOX])


async def command(call: Call) -> Answer:
    """Write the lines of the body to `ctl` or `.txn/ctl`, all or none."""
    await write(call, call.target.node, call.body)
    return Answer(204)


async def write(call: Call, node: Any, data: bytes) -> None:
    """Write `data` to a file as one whole write."""
    with closing(call.tree.open(call.user, node, os.O_WRONLY)) as handle:
        handle.whole_below = WHOLE
        await call.front.await_step(handle.write(data))


async def status(call: Call) -> Answer:
    """Return `.stats`, `.who` or `.errors`; with `streams=no`, `.stats` without its streams."""
    if call.option("streams") is not None and not call.flag("streams"):
        call.tree.access(call.user, call.target.node, os.R_OK)
        return json_answer(
            await call.front.await_step(call.group.portions.run(status_files.totals(call.group, call.user)))
        )
    return Answer(
        200,
        await text_of(call, call.target.node),
        JSON if call.target.name == ".stats" else LINES,
        [*NO_STORE, SANDBOX],
    )


async def health(call: Call) -> Answer:
    return as_json({"status": "ok"})


async def ready(call: Call) -> Answer:
    """Answer whether the server can be sent work, else why not. A silent replica is only a warning: without it no other
    server could take over. So is a full disk: acknowledgements make room."""
    troubles, copies = call.front.server.troubles(), call.tree.store.replication
    silent_s = copies.silent_s() if copies is not None else 0.0
    warnings = [f"the replica has not answered for {silent_s:.0f} s"] if silent_s >= limits.REPLICA_SILENT_S else []
    if copies is not None and copies.has_no_checkpoint:
        warnings.append("no checkpoint of the replica was made (the server's log says why)")
    if call.tree.store.full:
        warnings.append("no space left on device: writes are refused until there is room")
    status = "not ready" if troubles else "ok"
    return as_json({"status": status, "reasons": troubles, "warnings": warnings}, 503 if troubles else 200)


# ---------------------------------------------------------------- `.kept/STREAM` as a file: ranges and entity tags

PIECE_BYTES = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


async def read(call: Call) -> Answer:
    """Return the whole file, or a range of it."""
    handle = cast(SnapshotHandle, call.tree.open(call.user, call.target.node, os.O_RDONLY))
    try:
        await call.front.await_step(handle.opening)
        handle.read(0)  # raises the error if the snapshot could not be made
        return _answer(call, handle)
    except BaseException:
        handle.close()
        raise


def _answer(call: Call, handle: SnapshotHandle) -> Answer:
    given, size = call.request.headers, handle.size or 0
    kept = handle.node.stream.kept
    tag = f'"{kept.first_kept()}-{kept.newest_kept()}-{size}"'
    head: Headers = [("ETag", tag), ("Accept-Ranges", "bytes"), ("Cache-Control", "no-cache"), SANDBOX]
    if call.has_tag(tag):
        handle.close()
        return Answer(304, headers=head)
    first, last, status = 0, size - 1, 200
    if (wanted := given.get("range")) is not None and given.get("if-range", tag) == tag:
        found = _range(wanted, size)
        if found is not None:
            first, last, status = *found, 206
            head.append(("Content-Range", f"bytes {first}-{last}/{size}"))
    head.append(("Content-Length", str(last + 1 - first)))
    return Answer(status, _pieces(call, handle, first, last + 1), RAW.kind, head, lambda _: handle.close())


def _range(text: str, size: int) -> tuple[int, int] | None:
    """Return the first and last byte, or None for a Range to ignore: malformed, or several ranges. Raises BadRange."""
    match = _RANGE.match(text)
    if match is None or text == "bytes=-":
        return None
    begin, end = match[1], match[2]
    if begin and end and int(begin) > int(end):
        return None
    first = int(begin) if begin else max(size - int(end), 0)
    last = min(int(end), size - 1) if begin and end else size - 1
    if first > last:
        raise BadRange(size)
    return first, last


async def _pieces(call: Call, handle: SnapshotHandle, at: int, end: int) -> AsyncIterator[bytes]:
    while at < end:
        try:
            data = handle.read(min(PIECE_BYTES, end - at), at)
        except MqfsError as error:  # a message was removed meanwhile
            raise Cut from error
        assert isinstance(data, bytes)
        if not data:
            raise Cut
        at += len(data)
        yield data
        await call.front.pause()


# ---------------------------------------------------------------- the page at `/.web/`: files of the package

PLACE = "/.web/"
MODULES = ("page.js", "views.js", "messages.js", "controls.js", "requests.js", "elements.js")  # each uses later ones
KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    **dict.fromkeys(MODULES, "text/javascript; charset=utf-8"),
    "icon.svg": "image/svg+xml",
}
_SECURE: Headers = [
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
]


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file of the page, and its entity tag."""
    data = files("mqfs.http").joinpath("web", name).read_bytes()
    return data, f'"{urlsafe_b64encode(sha256(data).digest()[:12]).decode()}"'


async def serve(call: Call) -> Answer:
    """Answer with a file of the page. Raises NotFound."""
    if call.path.text + "/" == PLACE:
        return Answer(308, headers=[("Location", PLACE)])
    name = call.target.name or "index.html"
    if name not in KINDS:
        raise NotFound(f"no page {name!r}")
    data, tag = _file(name)
    head = [("ETag", tag), *_SECURE]
    if call.has_tag(tag):
        return Answer(304, headers=head)
    return Answer(200, data, KINDS[name], head)


def lead_to(path: str) -> Answer:
    """Redirect to the page, at a group."""
    return Answer(303, headers=[("Location", f"{PLACE}#{path}"), ("Vary", "Accept"), ("Cache-Control", "no-store")])
