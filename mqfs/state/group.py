"""The state of a group: how it is recorded as STATE, CHANGE and CLOCK records, checked, and changed.

`apply` changes a State when a record is written and when a log is read again, so the two cannot differ. JSON from
a log is checked first: its types and ranges, then the shape of each record.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import attrs

from mqfs import limits
from mqfs.clock import Anchor
from mqfs.state import acks
from mqfs.state.acks import REQUEUE, AckState, step
from mqfs.state.rules import NO_RULES, Rules

ROOT = 1  # the number of the root group
_PLACE = re.compile(rb'\{"group":(\d+),"parent":(\d+),"name":("(?:[^"\\]|\\.)*"),')  # how a state begins
Shape = Callable[[Any], bool]

_MOST = 1 << 63  # every number of a log fits a signed field of 64 bits


def is_number(value: Any) -> bool:
    """Whether the value is a count, sequence, mode or file number."""
    return type(value) is int and 0 <= value < _MOST


def is_time_ns(value: Any) -> bool:
    """Whether the value is a time or duration. It may be negative: the engine clock may begin anywhere."""
    return type(value) is int and -_MOST <= value < _MOST


def is_flag(value: Any) -> bool:
    return type(value) is bool or (type(value) is int and value in (0, 1))


def is_text(value: Any) -> bool:
    """Whether the value is a string that UTF-8 can encode."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def optional(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def listed(shape: Shape) -> Shape:
    return lambda value: isinstance(value, list) and all(map(shape, value))


def row(*shapes: Shape, least: int = -1) -> Shape:
    """Return the shape of a list of values in that order: all of them, or at least `least`."""
    fewest = least if least >= 0 else len(shapes)

    def check(value: Any) -> bool:
        fits = isinstance(value, list) and fewest <= len(value) <= len(shapes)
        return fits and all(shape(item) for shape, item in zip(shapes, value, strict=False))

    return check


def require(value: Any, keys: Mapping[str, Shape], given: Mapping[str, Shape]) -> None:
    """Check an object: `keys` are required, `given` are optional. Raises ValueError naming the key."""
    if not isinstance(value, dict):
        raise ValueError(f"unexpected {type(value).__name__} (expected an object)")
    for key, shape in keys.items():
        if key not in value:
            raise ValueError(f"no key {key!r}")
        _require_shape(key, shape, value)
    for key, shape in given.items():
        if key in value:
            _require_shape(key, shape, value)


def _require_shape(key: str, shape: Shape, value: Mapping[str, Any]) -> None:
    if not shape(value[key]):
        raise ValueError(f"{key!r}: invalid value {str(value[key])[:80]!r}")


def fits(keys: Mapping[str, Shape]) -> Shape:
    """Return the shape of an object that may have these keys, and others."""
    return lambda value: isinstance(value, dict) and all(keys[key](one) for key, one in value.items() if key in keys)


def place_of(body: bytes) -> tuple[int, int, str] | None:
    """Return (number, parent, name) of a group, from the beginning of its state; None if it does not begin with
    these."""
    found = _PLACE.match(body)
    return None if found is None else (int(found[1]), int(found[2]), json.loads(found[3]))


# ------------------------------------------------------------ group shapes

# The shapes of the body of a STATE record, and of the values of changes. Data of a log that does not fit them is
# refused.

_OWNED = {"mode": is_number, "uid": is_number, "gid": is_number}
_STREAM = row(is_number, is_number, is_number, is_number, is_text, is_time_ns, is_number, least=6)
_ENTRY = row(is_number, is_number, is_number, is_time_ns, is_flag)
_CONSUMER = row(
    is_number, is_number, is_number, is_number, is_text, is_text, is_time_ns, is_flag, is_flag, is_number,
    is_number, listed(row(is_number, is_number)), listed(_ENTRY), is_text, is_flag, least=13,
)  # fmt: skip
_PACE = row(is_number, is_number)
_RULES = fits(
    {
        "ordered": is_flag,
        "limit": is_number,
        "key_limit": is_number,
        "rate": _PACE,
        "breaker": _PACE,
        "paused": is_time_ns,
    }
)
_ANCHOR = (is_time_ns, is_time_ns, is_time_ns, is_text, is_time_ns)
STATE: dict[str, Shape] = {
    **_OWNED,
    "group": is_number,
    "parent": is_number,
    "name": is_text,
    "made": is_time_ns,
    "ctl": listed(is_text),
    "streams": listed(_STREAM),
    "next_stream": is_number,
    "files": listed(row(is_number, is_number, is_number, is_number)),
    "dropped": listed(row(is_number, is_number)),
    "clock": listed(row(is_number, *_ANCHOR, least=3)),
}
STATE_GIVEN: dict[str, Shape] = {
    "consumers": listed(_CONSUMER),
    "views": listed(row(is_number, is_text, is_time_ns, listed(is_text))),
    "ids": listed(row(is_text, is_time_ns, is_number)),
    "id_users": listed(is_time_ns),
    "producers": listed(row(is_text, is_number, is_number, is_time_ns)),
    "rules": listed(row(is_number, _RULES)),
    "newest": row(is_number, listed(row(is_number, listed(is_number)))),
    "removed": listed(row(is_number, is_number)),
}


# ------------------------------------------------------------ group state

FIRST_STREAM = 16  # numbers below are the group's own files
CTL, ORDER, CURSOR, STATS, WHO, ERRORS = 1, 2, 3, 4, 5, 6
CONSUMERS, KEPT, PUT, BATCH, TXN, TXN_CTL = 7, 8, 9, 10, 11, 12

Change = dict[str, Any]


@attrs.define
class Attributes:
    """Owner, group and permission bits of one file."""

    mode: int
    uid: int
    gid: int


@attrs.define
class StreamState(Attributes):
    """One stream of a group. `floor`: its low watermark; messages below this sequence are not retained."""

    number: int
    name: str
    made_ns: int
    floor: int = 0

    def raise_floor(self, floor: int) -> int:
        """Raise the floor to that sequence, unless it is higher; return the floor."""
        self.floor = max(self.floor, floor)
        return self.floor


_stream_row = attrgetter(*(field.name for field in attrs.fields(StreamState)))  # astuple takes seven times as long


@attrs.define
class ConsumerState(Attributes):
    """A consumer. A stream's default consumer has no name and the stream's number; the one with the number PUT is over
    the delayed messages. `over`: a stream's or view's name; "" the whole group."""

    number: int
    name: str
    over: str
    made_ns: int
    transient: bool = False
    private: bool = False
    backlog: int = 0  # messages; 0 = no bound
    full: str = ""  # the policy at its backlog; "": the group's
    memory: bool = False  # its progress is not in the log
    rules: Rules = NO_RULES  # the rules that hold back its messages
    progress: AckState = attrs.Factory(AckState)

    def set_options(self, change: Change) -> None:
        self.transient, self.private, self.backlog = change["transient"], change["private"], change["backlog"]
        self.full, self.memory = change.get("full", ""), change.get("memory", False)
        if "rules" in change:
            self.rules = Rules.decode(change["rules"])

    def options(self) -> Change:
        """Return the options as a change has them."""
        more: Change = {"full": self.full} if self.full else {}
        more |= {"memory": True} if self.memory else {}
        return {"transient": self.transient, "private": self.private, "backlog": self.backlog, **more}


@attrs.define
class ViewState:
    """A view: the messages of streams that one of its patterns matches, or that one of its programs selects."""

    number: int
    name: str
    made_ns: int
    patterns: dict[str, None] = attrs.Factory(dict)  # in the order of their lines


class Commit(NamedTuple):
    """The highest transaction that a producer has committed through `.txn/ctl`. `engine_ns`: when."""

    number: int
    engine_ns: int


class Known(NamedTuple):
    """The message of an idempotency key. `until_ns`: engine time."""

    until_ns: int
    sequence: int


Slot = int | list[int]  # a message, or a body in parts: the first and the last
Newest = tuple[int, list[list[Any]]]  # a sequence; [stream, its messages below that no newer one replaces]
ANYONE = -1  # the user of an id in an older log, which has none


@attrs.define
class GroupState(Attributes):
    """The state of a group: enough to serve the group from it and the records after it."""

    group: int
    parent: int
    name: str
    made_ns: int
    ctl: list[str] = attrs.Factory(list)  # settings as ctl lines
    streams: dict[int, StreamState] = attrs.Factory(dict)
    next_stream: int = FIRST_STREAM
    files: dict[int, Attributes] = attrs.Factory(dict)  # meta files whose attributes were changed
    dropped: dict[int, int] = attrs.Factory(dict)  # sequence -> stream of messages dropped one by one
    anchors: list[tuple[int, Anchor]] = attrs.Factory(list)  # (first sequence it holds for, anchor), oldest first
    consumers: dict[int, ConsumerState] = attrs.Factory(dict)
    views: dict[str, ViewState] = attrs.Factory(dict)
    ids: dict[int, OrderedDict[str, Known]] = attrs.Factory(dict)  # by user and id, in the order in which they came
    producers: dict[int, dict[str, Commit]] = attrs.Factory(dict)  # by user and name, the last to commit last
    removed: dict[int, int] = attrs.Factory(dict)  # owners of removed streams with delayed messages
    newest: Newest | None = None  # under `replay key`

    def encode(self) -> bytes:
        """Return the body of a STATE record."""
        rules = [[c.number, c.rules.encode()] for c in self.consumers.values() if c.rules is not NO_RULES]
        return _dump(
            {
                "group": self.group,
                "parent": self.parent,
                "name": self.name,
                "made": self.made_ns,
                "mode": self.mode,
                "uid": self.uid,
                "gid": self.gid,
                "ctl": self.ctl,
                "streams": list(map(_stream_row, self.streams.values())),
                "next_stream": self.next_stream,
                "files": [[n, f.mode, f.uid, f.gid] for n, f in self.files.items()],
                "dropped": sorted(self.dropped.items()),
                "clock": [[sequence, *anchor] for sequence, anchor in self.anchors],
                "consumers": [_consumer_row(c) for c in self.consumers.values()],
                **({"rules": rules} if rules else {}),  # without rules the record is as in earlier versions
                **({"newest": self.newest} if self.newest else {}),
                **({"removed": [*self.removed.items()]} if self.removed else {}),
                "views": [[v.number, v.name, v.made_ns, [*v.patterns]] for v in self.views.values()],
                "ids": [[id_, *known] for mine in self.ids.values() for id_, known in mine.items()],
                "id_users": [uid for uid, mine in self.ids.items() for _ in mine],
                "producers": [
                    [name, commit.number, uid, commit.engine_ns]
                    for uid, mine in self.producers.items()
                    for name, commit in mine.items()
                ],
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> GroupState:
        """Return the state in the body of a STATE record. Raises ValueError."""
        try:
            d = json.loads(body)
            require(d, STATE, STATE_GIVEN)
            streams = (StreamState(*row) for row in d["streams"])
            consumers = {c.number: c for c in (_consumer(*row) for row in d.get("consumers", ()))}
            for number, rules in d.get("rules", ()):
                if number in consumers:
                    consumers[number].rules = Rules.decode(rules)
            views = [ViewState(n, name, made, dict.fromkeys(texts)) for n, name, made, texts in d.get("views", ())]
            return cls(
                mode=d["mode"],
                uid=d["uid"],
                gid=d["gid"],
                group=d["group"],
                parent=d["parent"],
                name=d["name"],
                made_ns=d["made"],
                ctl=list(d["ctl"]),
                streams={s.number: s for s in streams},
                next_stream=d["next_stream"],
                files={n: Attributes(mode, uid, gid) for n, mode, uid, gid in d["files"]},
                dropped=dict(d["dropped"]),
                anchors=[(sequence, Anchor(*anchor)) for sequence, *anchor in d["clock"]],
                consumers=consumers,
                views={v.name: v for v in views},
                ids=_ids(d.get("ids", []), d.get("id_users", [])),
                producers=_producers(d.get("producers", [])),
                removed=dict(d.get("removed", ())),
                newest=tuple(d["newest"]) if "newest" in d else None,
            )
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a state: {error}") from error

    def apply(self, change: Change) -> None:
        """Apply a change. A change to a deleted file has no effect."""
        do = change.get("do")
        if do is not None:
            _CHANGES[do].apply(self, change)

    def acknowledge(self, number: int, body: bytes) -> None:
        """Apply an ACK record of a log. A record of a deleted consumer has no effect. Raises ValueError."""
        acks.check(body)
        consumer = self.consumers.get(number) or self.nameless(number)
        if consumer is not None:
            consumer.progress.apply(body)

    def nameless(self, number: int) -> ConsumerState | None:
        """Return the default consumer of a stream, made if it does not exist yet; None if there is no such stream."""
        found = self.consumers.get(number)
        if found is None and (number == PUT or number in self.streams):
            found = self.consumers[number] = ConsumerState(0, 0, 0, number, "", "", 0)
        return found

    def anchor_at(self, sequence: int) -> Anchor | None:
        """Return the anchor by which the wall time of a message becomes engine time; None if there is none."""
        found = bisect_right(self.anchors, sequence, key=itemgetter(0))
        return self.anchors[max(found - 1, 0)][1] if self.anchors else None


def _consumer_row(c: ConsumerState) -> list[Any]:
    options = [int(c.transient), int(c.private), c.backlog]
    more = [c.full, int(c.memory)] if c.full or c.memory else []  # an older server does not know these
    return [c.mode, c.uid, c.gid, c.number, c.name, c.over, c.made_ns, *options, *c.progress.encode(), *more]


def _consumer(*row: Any) -> ConsumerState:
    mode, uid, gid, number, name, over, made, transient, private, backlog, low, runs, entries, *more = row
    full, memory = more or ("", False)
    return ConsumerState(
        mode, uid, gid, number, name, over, made, bool(transient), bool(private), backlog, full, bool(memory),
        NO_RULES, AckState.decode(low, runs, entries),
    )  # fmt: skip


def _ids(rows: list[list[Any]], uids: list[int]) -> dict[int, OrderedDict[str, Known]]:
    """Return the ids by user. `uids`: the user of each row; an older server has written none."""
    owners = uids if len(uids) == len(rows) else [ANYONE] * len(rows)
    found: dict[int, OrderedDict[str, Known]] = {}
    for uid, (id_, *known) in zip(owners, rows, strict=True):
        found.setdefault(uid, OrderedDict())[id_] = Known(*known)
    return found


def _producers(rows: list[list[Any]]) -> dict[int, dict[str, Commit]]:
    found: dict[int, dict[str, Commit]] = {}
    for name, number, uid, engine_ns in rows:
        found.setdefault(uid, {})[name] = Commit(number, engine_ns)
    return found


def encode_change(change: Change) -> bytes:
    return _dump(change)


def decode_change(body: bytes) -> Change:
    """Return a recorded change. Raises ValueError for an invalid or unknown change."""
    try:
        change: Change = json.loads(body)
        require(change, {}, {"do": _CHANGES.__contains__})
        if "do" in change:
            kind = _CHANGES[change["do"]]
            require(change, kind.keys, kind.given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a change: {error}: {body[:80]!r}") from error
    return change


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _make(state: GroupState, c: Change) -> None:
    n = c["stream"]
    state.streams[n] = StreamState(c["mode"], c["uid"], c["gid"], n, c["name"], c["time"])
    state.next_stream = max(state.next_stream, n + 1)


def _remove(state: GroupState, c: Change) -> None:
    stream = state.streams.pop(c["stream"], None)
    if stream is not None and c.get("held"):
        state.removed[stream.number] = stream.uid
    state.consumers.pop(c["stream"], None)


def _rename(state: GroupState, c: Change) -> None:
    target = state if c["stream"] == 0 else state.streams.get(c["stream"])
    if target is None:
        return
    for consumer in state.consumers.values() if c["stream"] else ():
        if consumer.over == target.name:
            consumer.over = c["name"]
    target.name = c["name"]


def _attributes(state: GroupState, c: Change) -> None:
    file, new = c["file"], Attributes(c["mode"], c["uid"], c["gid"])
    old = state if file == 0 else state.streams.get(file) or state.consumers.get(file)
    if 0 < file < FIRST_STREAM:
        state.files[file] = new
    elif old is not None:
        old.mode, old.uid, old.gid = new.mode, new.uid, new.gid


def _ctl(state: GroupState, c: Change) -> None:
    state.ctl = list(c["lines"])
    if "replay key" not in state.ctl:
        state.newest = None  # replaced messages are visible again


def _floor(state: GroupState, c: Change) -> None:
    for number, sequence in c["floors"]:
        stream = state.streams.get(number)
        if stream is not None:
            stream.raise_floor(sequence)


def _drop(state: GroupState, c: Change) -> None:
    state.dropped.update(dict.fromkeys(c["sequences"], c["stream"]))


def _clock(state: GroupState, c: Change) -> None:
    state.anchors.append((c["sequence"], Anchor(*c["anchor"])))
    if len(state.anchors) > limits.ANCHORS:
        # The second oldest now covers the messages of the oldest: their age is slightly wrong, nothing is lost.
        first, _ = state.anchors.pop(0)
        state.anchors[0] = (first, state.anchors[0][1])


def _consume(state: GroupState, c: Change) -> None:
    """Make a consumer, or change its options."""
    number = c["number"]
    found = state.consumers.get(number)
    if found is not None:
        found.set_options(c)
        return
    state.consumers[number] = c.get("state") or new_consumer(c)
    state.next_stream = max(state.next_stream, number + 1)


def new_consumer(c: Change) -> ConsumerState:
    """Return the consumer that a change makes. If it was made before, the change has it as `state`."""
    made = ConsumerState(
        c["mode"], c["uid"], c["gid"], c["number"], c["name"], c["over"], c["time"], progress=AckState(c["low"])
    )
    made.set_options(c)
    for slot in c.get("open", ()):
        made.progress.apply(step(REQUEUE, *bounds_of(slot)))
    return made


def bounds_of(slot: Slot) -> tuple[int, int]:
    """Return the first and the last sequence of a slot."""
    return (slot, slot) if isinstance(slot, int) else (slot[0], slot[1])


def _forget(state: GroupState, c: Change) -> None:
    state.consumers.pop(c["number"], None)


def _bind(state: GroupState, c: Change) -> None:
    view = state.views.get(c["name"])
    if view is None:
        view = state.views[c["name"]] = ViewState(c["number"], c["name"], c["time"])
        state.next_stream = max(state.next_stream, c["number"] + 1)
    view.patterns[c["pattern"]] = None


def _unbind(state: GroupState, c: Change) -> None:
    view = state.views.get(c["name"])
    if view is None:
        return
    if c["pattern"] is not None:
        view.patterns.pop(c["pattern"], None)
    if c["pattern"] is None or not view.patterns:
        del state.views[c["name"]]


def _id(state: GroupState, c: Change) -> None:
    mine = state.ids.setdefault(c.get("uid", ANYONE), OrderedDict())
    mine.pop(c["id"], None)
    mine[c["id"]] = Known(c["until"], c["sequence"])


def _commit(state: GroupState, c: Change) -> None:
    """Record that a transaction of the producer was appended together with this change."""
    mine = state.producers.setdefault(c["uid"], {})
    known = mine.pop(c["producer"], None)
    mine[c["producer"]] = Commit(max(c["number"], known.number if known is not None else 0), c["engine"])


def _forget_producers(state: GroupState, c: Change) -> None:
    """Remove producers. `uids`: the user of each; without them, as an older server writes it, the producers of that
    name of all users."""
    for n, producer in enumerate(c["producers"]):
        for uid in c["uids"][n : n + 1] if "uids" in c else list(state.producers):
            mine = state.producers.get(uid, {})
            mine.pop(producer, None)
            if not mine:
                state.producers.pop(uid, None)


def _is_slot(value: Any) -> bool:
    return is_number(value) or row(is_number, is_number)(value)


class _Kind(NamedTuple):
    """A kind of change: its effect, its required keys, and its optional keys."""

    apply: Callable[[GroupState, Change], None]
    keys: Mapping[str, Shape]
    given: Mapping[str, Shape] = {}


_CHANGES = {
    "make": _Kind(_make, {**_OWNED, "stream": is_number, "name": is_text, "time": is_time_ns}),
    "remove": _Kind(_remove, {"stream": is_number}, {"held": is_flag}),
    "rename": _Kind(_rename, {"stream": is_number, "name": is_text}),
    "attributes": _Kind(_attributes, {**_OWNED, "file": is_number}),
    "ctl": _Kind(_ctl, {"lines": listed(is_text)}),
    "floor": _Kind(_floor, {"floors": listed(row(is_number, is_number))}),
    "drop": _Kind(_drop, {"stream": is_number, "sequences": listed(is_number)}),
    "clock": _Kind(_clock, {"sequence": is_number, "anchor": row(*_ANCHOR, least=2)}),
    "consumer": _Kind(
        _consume,
        {"number": is_number, "transient": is_flag, "private": is_flag, "backlog": is_number},
        {
            **_OWNED,
            "name": is_text,
            "over": is_text,
            "time": is_time_ns,
            "low": is_number,
            "open": listed(_is_slot),
            "full": is_text,
            "memory": is_flag,
            "rules": _RULES,
        },
    ),
    "forget": _Kind(_forget, {"number": is_number}),
    "bind": _Kind(_bind, {"number": is_number, "name": is_text, "pattern": is_text, "time": is_time_ns}),
    "unbind": _Kind(_unbind, {"name": is_text, "pattern": optional(is_text)}),
    "id": _Kind(_id, {"id": is_text, "until": is_time_ns, "sequence": is_number}, {"uid": is_number}),
    "commit": _Kind(_commit, {"producer": is_text, "number": is_number, "uid": is_number, "engine": is_time_ns}),
    "forget producers": _Kind(_forget_producers, {"producers": listed(is_text)}, {"uids": listed(is_number)}),
}
