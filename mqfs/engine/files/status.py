"""The texts of `ctl`, `.stats`, `.who` and `.errors`, and the files that show them. Reads the tree, changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import attrs

from mqfs.engine.core.portions import Work, exhaust, in_order
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.delivery.flow import KEY
from mqfs.engine.files.handle import OpenFile, PreparedFile
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import sees
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.model import Step, User
from mqfs.store.api import Bucket

T = TypeVar("T")
_SOME = 8  # lines of `ctl` between two looks at the clock: some 20 us
_STEPS = 256  # messages between two looks at the clock: some 0.05 ms
_TRIES = 3  # attempts to print it as of one moment
_MARGIN = "\n  "
_encode = json.JSONEncoder(ensure_ascii=False).encode


class Form(NamedTuple):
    """The layout of an object of objects: of one row, and of all rows together."""

    row: Callable[[str, dict[str, Any]], str]
    whole: Callable[[list[str]], str]


_ONE_LINE = Form(lambda name, row: f"{_encode(name)}: {_encode(row)}", lambda rows: f"{{{', '.join(rows)}}}")
_LINES = Form(
    lambda name, row: f"{_encode(name)}: {_indented(row, 3)}",
    lambda rows: f"{{\n  {f',{_MARGIN}'.join(rows)}\n }}" if rows else "{}",
)


def stats(group: Group, user: User) -> Work[str]:
    """Return `.stats`, one JSON object: the group, then its streams, views and consumers by name. Counters start with
    the server."""
    counts: dict[object, int] = {}
    head = _indented((yield from _totals(group, user))).removesuffix("\n}")
    quotas = yield from _quotas(group, user, _LINES)
    more = f',\n "quotas": {quotas}' if quotas else ""
    streams = yield from _rows(group.streams, lambda one: _stream(one, counts), _LINES, lambda one: _seen(one, user))
    views, readers = yield from _readers(group, user, counts, _LINES)
    return f'{head}{more},\n "streams": {streams},\n "views": {views},\n "consumers": {readers}\n}}\n'


def totals(group: Group, user: User) -> Work[str]:
    """Return `.stats` without the streams, in one line."""
    head = _encode((yield from _totals(group, user))).removesuffix("}")
    quotas = yield from _quotas(group, user, _ONE_LINE)
    more = f', "quotas": {quotas}' if quotas else ""
    views, readers = yield from _readers(group, user, {}, _ONE_LINE)
    return f'{head}{more}, "views": {views}, "consumers": {readers}}}\n'


def _seen(stream: Stream, user: User) -> bool:
    return not stream.removed and sees(user, stream.group.state, stream.state)


def _rows(
    items: Mapping[str, T], row: Callable[[T], Work[dict[str, Any]]], form: Form, has: Callable[[T], bool] | None = None
) -> Work[str]:
    """Return the text of an object of objects inside `.stats`, sorted by name. In steps."""
    rows = []
    for name in (yield from in_order(list(items))):
        one = items.get(name)
        if one is not None and (has is None or has(one)):
            rows.append(form.row(name, (yield from row(one))))
        yield
    return form.whole(rows)


def figures(node: Group | Stream | View) -> Work[dict[str, Any]]:
    """Return the part of `.stats` about a stream or view, or about a group as a whole. In steps."""
    if isinstance(node, Stream):
        return (yield from _stream(node, {}))
    if isinstance(node, View):
        return {"readers": len(node.readers)}
    bucket, counts = node.log.bucket, node.counts
    return {
        "written": counts.written,
        "written_bytes": counts.written_bytes,
        "log_bytes": bucket.upkeep.size,
        "read_only": bucket.end.failed is not None,
        "disk_full": node.number in node.tree.store.full,
    }


def _totals(group: Group, user: User) -> Work[dict[str, Any]]:
    bucket = group.log.bucket
    failed = bucket.end.failed
    return {
        **(yield from _log(group)),
        "read_only": failed is not None,
        "disk_full": group.number in group.tree.store.full,
        "failure": str(failed) if failed is not None else None,
        "damaged": bucket.upkeep.damaged,
        **attrs.asdict(group.counts),
        **(lag_of(bucket) or {}),
        "order_readers": len(group.fanout.log_readers) - sum(len(view.readers) for view in group.views.values()),
        "cursors": len(group.fanout.cursors),
        "held": len(group.held),
        "schedules": _schedules(group, user),
        "dead_letters": _dead_letters(group, user),
        **_keys(group),
    }


def _keys(group: Group) -> dict[str, int]:
    """Return the number of keys whose newest message `replay key` retains; empty under another `replay`."""
    if (newest := group.retention.newest) is None:
        return {}
    newest.follow()
    return {"keys": newest.count}


def lag_of(bucket: Bucket) -> dict[str, int | float] | None:
    """Return how far the replica of a log is behind. None: the store has no replica."""
    lag = bucket.upkeep.lag
    return {"replica_lag_bytes": lag[0], "replica_lag_seconds": round(lag[1], 3)} if lag is not None else None


def _schedules(group: Group, user: User) -> dict[str, Any]:
    """Return the schedules for streams that the user may see, the next one first."""
    rows = {}
    for run in sorted(group.held.schedules, key=attrgetter("due_ns", "name")):
        stream = group.numbers.get(run.stream)
        if stream is not None and _seen(stream, user):
            due = {"next": run.next_ns / 1e9, "sequence": run.sequence, "uid": run.uid}
            rows[run.name] = {"stream": stream.name, **run.schedule.texts(), **due}
    return rows


def _dead_letters(group: Group, user: User) -> int:
    """Count the dead letters that the user may see."""
    stream = group.streams.get(group.settings.dead)
    if stream is None or not _seen(stream, user):
        return 0
    stream.kept.update_low_watermark()
    return stream.kept.count


def _readers(group: Group, user: User, counts: dict[object, int], form: Form) -> Work[tuple[str, str]]:
    views = yield from _rows(group.views, figures, form)
    shows = lambda one: not one.removed and _shown(one, user)  # noqa: E731
    return views, (yield from _rows(group.consumers, lambda one: _consumer(one, counts), form, shows))


def _quotas(group: Group, user: User, form: Form) -> Work[str]:
    """Return the user's quota, or those of all users for root and the server's user. Empty: there are none."""
    rows = []
    for uid, used in group.tree.open_files.quota_use(None if user.uid in (0, os.geteuid()) else user.uid):
        rows.append(form.row(uid, used))
        yield
    return form.whole(rows) if rows else ""


def _indented(value: Any, depth: int = 1) -> str:
    """As json.dumps(value, indent=1), but with the encoder in C: the one in Python takes ten times as long."""
    margin = "\n" + " " * depth
    if isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values()):
        rows = [f"{_encoder(depth)(key)}: {_indented(one, depth + 1)}" for key, one in value.items()]
        text = f"{{{f',{margin}'.join(rows)}}}"
    else:
        text = _encoder(depth)(value)
        if not isinstance(value, dict | list) or not value:
            return text
    return f"{text[0]}{margin}{text[1:-1]}{margin[:-1]}{text[-1]}"


@cache
def _encoder(depth: int) -> Callable[[Any], str]:
    return json.JSONEncoder(ensure_ascii=False, separators=(",\n" + " " * depth, ": ")).encode


def ctl(group: Group, user: User) -> Work[str]:
    """Return the text of `ctl`: settings, views, consumers. It has all changes of a write, or none."""
    for _ in range(_TRIES):
        count = group.commands.count
        text = yield from _printed(group, user)
        if group.commands.count == count:
            return text
    return exhaust(_printed(group, user))


def _printed(group: Group, user: User) -> Work[str]:
    rows = group.settings.lines()
    for count, view in enumerate(list(group.views.values())):
        rows += view.lines()
        if count % _SOME == _SOME - 1:
            yield
    for count, consumer in enumerate(list(group.consumers.values())):
        if not consumer.removed and _shown(consumer, user):
            rows += consumer.lines()
        if count % _SOME == _SOME - 1:
            yield
    return "".join(f"{row}\n" for row in rows)


def _shown(consumer: Consumer, user: User) -> bool:
    stream = _over(consumer)
    return stream is None or sees(user, consumer.group.state, stream.state)


def _over(consumer: Consumer) -> Stream | None:
    """Return the stream that a consumer is over, or whose default consumer it is; None: neither."""
    return consumer.group.streams.get(consumer.state.over) or consumer.group.numbers.get(consumer.number)


def places(group: Group, user: User) -> Work[bytes]:
    """Return the part of `.stats` with which a reader plans. No messages are counted for it, however many there are."""
    log = yield from _log(group)
    head = json.dumps({**log, "words": group.settings.words.listed, "streams": {}}, ensure_ascii=False)
    text = bytearray(head.removesuffix("}}").encode())  # joining the rows at the end would take 15 ms in one piece
    comma = ""
    for stream in list(group.streams.values()):
        if _seen(stream, user):
            row = f"{comma}{json.dumps(stream.name, ensure_ascii=False)}: {json.dumps(_place(stream))}"
            text += row.encode()
            comma = ", "
        yield
    text += b"}}\n"
    return bytes(text)


def _log(group: Group) -> Work[dict[str, Any]]:
    bucket = group.log.bucket
    return {
        "store": group.tree.store.uuid,
        "group": group.number,
        "groups": sorted(group.groups),
        "next": bucket.end.next,
        "log_bytes": bucket.upkeep.size,
        "plain": (yield from _plain(group)),
    }


def _plain(group: Group) -> Work[bool]:
    """Whether every message in the log at or above its stream's floor can be read, so that log and floors alone show
    the readable messages. Messages below the floors do not count, however long they are remembered."""
    if group.settings.keep != "disk" or group.log.shown is not None or group.retention.newest is not None:
        return False
    for stream in list(group.streams.values()):
        if not stream.removed and stream.shared:
            return False
        yield
    yield from group.ranks.load()
    ranked = ((sequence, rank.stream) for sequence, rank in group.ranks.over(lambda stream: True))
    special = chain(list(group.retention.lapsed.items()), list(group.state.dropped.items()), ranked)
    streams = group.numbers
    for count, (sequence, number) in enumerate(special, 1):
        if number in streams and sequence >= streams[number].state.floor:
            return False
        if count % _STEPS == 0:
            yield
    return True


def cut(stream: Stream) -> int:
    """Return the sequence after the newest message that a bound or `clear` removed unread."""
    stream.kept.update_low_watermark()
    settings = stream.group.log.settings
    bounds_only = settings.deliver == "all" and settings.replay == "all" and not settings.ttl
    return stream.state.floor if bounds_only else stream.kept.evicted_before


def _place(stream: Stream) -> dict[str, int | None]:
    cut_before = cut(stream)
    newest = stream.kept.newest_kept()
    return {
        "number": stream.number,
        "floor": stream.state.floor,
        "cut": cut_before,
        "first": stream.kept.first_kept() or None,
        "newest": newest if newest >= stream.state.floor and newest else None,
    }


def _stream(stream: Stream, counts: dict[object, int]) -> Work[dict[str, Any]]:
    row: dict[str, Any] = {
        **_place(stream),
        "messages": stream.kept.count,
        "bytes": stream.kept.size,
        "written": stream.written,
        "readers": len(stream.readers),
        "waiting": stream.waits.count_reads(),
        "blocked": len(stream.blocked),
    }
    if stream.group.log.settings.deliver == "one":
        row["consumer"] = yield from _consumer(stream.shown_consumer(), counts)
    elif any(singles := _singles(stream)):
        row["singles"] = dict(zip(("first", "parked"), singles, strict=True))
    return row


def _singles(stream: Stream) -> tuple[int, int]:
    """Return (the first exclusive message that waits, or 0; parked reads that wait only for exclusive messages)."""
    own = stream.default_consumer
    return stream.exclusives.first_waiting(), len(own.reads.parked) if own is not None else 0


def _consumer(consumer: Consumer, counts: dict[object, int]) -> Work[dict[str, Any]]:
    """Return the row of a consumer. `waiting`: messages neither acknowledged nor claimed, of which `delayed` are not
    due yet. `oldest`: the time of the oldest waiting message; None: it is not among the next messages, or there is
    none."""
    waiting, delayed = yield from consumer.backlog.count_unclaimed(counts)
    oldest, _ = consumer.backlog.unclaimed()
    return {
        "over": consumer.state.over if consumer.state.name else consumer.name,
        "low": consumer.low,
        "claimed": len(consumer.claims),
        "waiting": waiting,
        "delayed": delayed,
        "oldest": oldest.time_ns / 1e9 if oldest is not None else None,
        "handles": consumer.opens,
        "parked": len(consumer.reads.parked),
        **({"held_back": held_back(consumer)} if consumer.flow is not None else {}),
        **attrs.asdict(consumer.counts),
    }


def held_back(consumer: Consumer) -> str | None:
    """Return the rule that holds back messages of a consumer with rules. None: no rule does."""
    assert consumer.flow is not None
    return consumer.flow.reason() or (KEY if consumer.dispatcher.held_by_key else None)


def who(group: Group, user: User) -> Work[str]:
    """Return `.who`: a line with a JSON object for each open file of the group."""
    lines = []
    for handle in list(group.tree.open_files.of(group)):
        yield
        if handle.closed:
            continue
        stream = _stream_of(handle)
        if stream is not None and not sees(user, group.state, stream.state):
            continue
        mode = ("r" if handle.reads else "") + ("w" if handle.writes else "")
        row: dict[str, Any] = {
            "file": handle.node.name,
            "mode": mode,
            "uid": handle.user.uid,
            "pid": handle.user.pid,
            "where": handle.user.where,
            "since": handle.opened_ns / 1e9,
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


def _stream_of(handle: OpenFile) -> Stream | None:
    """Return the stream whose name or reader a row of an open file reveals: the file itself, a stream in a part, or the
    stream of a `.kept` file or a consumer. None: there is none."""
    node = handle.node
    if isinstance(node, Stream):
        return node
    if isinstance(node, Consumer):
        return _over(node)
    return getattr(node, "stream", None) or handle.group.streams.get(node.name)


def refusals(group: Group, user: User) -> Work[str]:
    """Return `.errors`: a line with a JSON object for each refused write, the user's own, or all for the owner."""
    everything = user.uid in (0, group.state.uid)
    known = group.refusals.all() if everything else group.refusals.of(user.uid)
    rows = ({"time": r.time_ns / 1e9, "uid": r.uid, "pid": r.pid, "file": r.file, "text": r.text} for r in known)
    yield
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# ------------------------------------------------------------ text

TEXTS: dict[str, Callable[[Group, User], Work[str]]] = {".stats": stats, ".who": who, ".errors": refusals, "ctl": ctl}


class TextHandle(PreparedFile):
    """A text made when the file is opened: `.stats`, `.who`, `.errors`; seekable. `ctl` is made again by a read of its
    beginning."""

    parkable = True
    _begun = False  # its beginning was read

    def on_opened(self) -> None:
        self._make(refuse=True)
        super().on_opened()

    def _make(self, *, refuse: bool) -> None:
        self.make(TEXTS[self.node.name](self.group, self.user), refuse=refuse)

    def keep_made(self, made: str, *, refuse: bool) -> None:
        data = made.encode()
        self.hold(len(data), refuse=refuse)
        self._text, self.size = data, len(data)

    def piece(self, count: int, offset: int) -> bytes:
        return self._text[offset : offset + count]

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        if self._begun and not offset and self.is_made and self.node.name == "ctl":
            self._make(refuse=False)
        self._begun = self._begun or not offset
        return super().read(count, offset)
