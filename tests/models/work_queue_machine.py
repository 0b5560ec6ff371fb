"""The same random steps through the queue model and a subject: every answer must be the same, and all that is shown."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.delivery.subject import progress_of, rows_of
from tests.models.work_queue import BY_HAND, WAIT, Model, consumer, had

NAMES = st.sampled_from(["a", "b", "c"])
WORKERS = ["u", "v", "w"]
VIEWS = ["p", "q"]
TAILS = st.sampled_from(["", "\n", " and more\n"])
COUNTS = st.sampled_from([1, 4096, 4096, 4096])
SOME = st.sampled_from
PLACES = st.one_of(SOME(["first", "last", "end"]), st.integers(-4, -1), st.integers(1, 12))
KEYS = SOME([None, None, "k", "k", "l"])
RULES = st.one_of(
    st.tuples(st.just("limit"), SOME([0, 1, 1, 2])),
    st.tuples(st.just("key_limit"), SOME([0, 1, 2])),
    st.tuples(st.just("rate"), SOME([(0, 0), (1, 1), (2, 1), (30, 1), (1, 3)])),
    st.tuples(st.just("breaker"), SOME([(0, 0), (1, 2), (1, 20), (2, 20)])),
    st.tuples(st.just("paused"), SOME([0, 0, BY_HAND, 1, 3])),
)
CHURN = SOME(
    [
        "create",
        "clear",
        "drop",
        "set",
        "set",
        "rename",
        "remove",
        "redrive",
        "consumer",
        "consumer",
        "gone",
        "rule",
        "rule",
        "rule",
    ]
)

SETTINGS = st.one_of(
    st.tuples(st.just("replay"), SOME(["off", "last", "all"])),
    st.tuples(st.just("full"), SOME(["drop-old", "drop-new", "block", "reject"])),
    st.tuples(st.just("depth"), st.integers(0, 4)),
    st.tuples(st.just("size"), st.integers(5, 30)),
    st.tuples(st.just("ttl"), SOME([0, 5, 20])),
    st.tuples(st.just("lease"), SOME([0, 1, 3])),
    st.tuples(st.just("retries"), SOME([0, 1, 2, 3])),
    st.tuples(st.just("backoff"), SOME([(1, 1), (1, 2), (2, 7)])),
    st.tuples(st.just("order"), SOME(["sequence", "expiry"])),
    st.tuples(st.just("dedup"), SOME([0, 4])),
)
DURATIONS = ("ttl", "lease", "dedup")


def rule_line(name: str, rule: str, value: Any) -> str:
    """As a line of ctl."""
    if rule == "paused":
        return f"resume {name}" if not value else f"pause {name}" if value == BY_HAND else f"pause {name} {value}s"
    if rule in ("rate", "breaker"):
        return f"{rule} {name} {value[0]}/{value[1]}s" if value[0] else f"{rule} {name} 0"
    return f"limit {name} {value}{' key' if rule == 'key_limit' else ''}"


def row_of(value: Any) -> Any:
    """An answer in JSON as its object, without the time, which the model does not know; any other as it is."""
    if isinstance(value, bytes) and value.startswith(b'{"sequence"'):
        row = json.loads(value)
        row.pop("time", None)
        return row
    return value


def agree(mine: Any, its: Any) -> bool:
    """Whether two answers are the same, but for what the model does not know."""
    mine, its = row_of(mine), row_of(its)
    if isinstance(mine, dict) and isinstance(its, dict):
        return like(mine.pop("headers", {}), its.pop("headers", {})) and mine == its
    return bool(mine == its)


def plain_headers(headers: dict[str, str]) -> dict[str, str]:
    return {key: "some" if key == "ttl" else value for key, value in headers.items()}


def like(mine: dict[str, Any], its: dict[str, Any]) -> bool:
    """Whether headers are the same; a reason that the model does not tell may be any."""
    mine, its = dict(mine), plain_headers(its)
    if "@" in its.get("id", ""):  # of a schedule: with a time by the wall clock
        its["id"] = its["id"].partition("@")[0] + "@"
    if "reason" in mine and mine["reason"] is None:
        del mine["reason"]
        its.pop("reason", None)
    return mine == its


class Machine(RuleBasedStateMachine):
    """Subclasses say which subject."""

    can_lose = True  # it can learn that an answer was not delivered

    def make(self, deliver: str) -> Any:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, str] = {}  # handle -> kind
        self.waits: set[int] = set()
        self.by: dict[int, str] = {}  # wait -> handle, or "put"
        self.counts: dict[int, int] = {}  # wait of a read -> count
        self.count = 0
        self.broken = False  # a difference was found: what is left is not to be tidied up

    def number(self) -> int:
        self.count += 1
        return self.count

    def same(self, mine: Any, its: Any) -> None:
        self.subject.settle()
        self.broken = True
        assert agree(mine, its), f"model {mine!r}, subject {its!r}"
        answers, self.model.answers = dict(self.model.answers), []
        got, self.subject.answers = dict(self.subject.answers), []
        assert answers.keys() == got.keys(), f"answers: model {answers!r}, subject {got!r}"
        assert all(agree(answers[wait], got[wait]) for wait in answers), f"answers: model {answers!r}, subject {got!r}"
        self.waits -= answers.keys()
        for c in self.model.consumers:
            if c["over"] in VIEWS:
                self.model.pass_over(c, progress_of(self.subject.tree, c["name"]))
        self.broken = False

    def alike(self, mine: Any, its: Any, what: str) -> None:
        self.broken = True
        assert its == mine, f"{what}: model {mine!r}, subject {its!r}"
        self.broken = False

    @initialize(data=st.data(), deliver=SOME(["one", "one", "all"]), full=SOME(["drop-old", "block", "reject"]))
    def begin(self, data: st.DataObject, deliver: str, full: str) -> None:
        self.model = Model(deliver)
        self.subject = self.make(deliver)
        replay, depth = data.draw(SOME(["off", "last", "all"])), data.draw(SOME([0, 0, 0, 1, 3]))
        self.set(full=full, replay=replay, depth=0 if deliver == "all" and replay == "last" else depth)
        self.set(retries=data.draw(SOME([0, 1, 2, 3])), lease=data.draw(SOME([0, 2])), backoff=(1, 4))
        if deliver == "one":
            self.set(ack=data.draw(SOME(["read", "next"])))
        for name in ("a", "b"):
            self.create(name)
        in_order = data.draw(SOME([(), ("order key",)]))
        self.consumer("u", None, *in_order)
        over = data.draw(SOME([None, "a", "p"]))
        if over == "p":
            self.same(self.model.bind("p", "a"), self.subject.ctl("bind p a"))
        if over:
            self.consumer("v", over, *in_order)
        self.open("a", "writer")
        if over == "p":  # whose messages it shows later, perhaps
            self.open("b", "writer")
        for name in ("a", "b", "a", "b") if in_order else ():
            # The consumer of a view may pass what lies before a message with its own ttl: the model does not know it.
            ttl = 0 if over == "p" else data.draw(SOME([0, 0, 6]))
            self.put(data, name, None, "k", priority=5, ttl=ttl, delay=0, id=None, headers={})
        for key in [*reversed(self.keys)] * 3:
            self.write_to(key, "\n")
        self.open("v" if over == "p" else "u", "worker")
        self.open("v" if over == "p" else "u", "worker")
        if deliver == "one":
            self.open("a", "taker")
            self.open("a", "taker")

    # ------------------------------------------------------------ names and settings

    def set(self, **settings: Any) -> None:
        lines = []
        for key, value in settings.items():
            if key == "backoff":
                lines.append(f"backoff {value[0]}s {value[1]}s")
            elif key == "size":
                lines.append(f"depth {value}B")
            else:
                lines.append(f"{key} {value}{'s' if key in DURATIONS else ''}")
        if "size" in settings:
            settings["depth"] = 0
        elif "depth" in settings:
            settings["size"] = 0
        self.same(self.model.ctl(**settings), self.subject.ctl(*lines))

    def create(self, name: str) -> None:
        self.same(self.model.create(name), self.subject.create(name))

    def consumer(self, name: str, over: str | None, *options: str, touch: bool = False, **bound: Any) -> None:
        late = self.model.named(name) is None and self.model.set["replay"] != "off"
        if late and self.had_by_all(consumer(name, over, None, 0), "first"):
            return
        flags: Any = {option: option in options for option in ("transient", "private")}
        flags["ordered"] = {"order key": True, "order sequence": False}.get(" ".join(options))
        mine = self.model.make_consumer(name, over, touch=touch, **flags, **bound)
        words = ["consumer", name, *([over] if over else []), *options]
        words += [str(word) for key, value in bound.items() if value for word in (key, value)]
        self.same(mine, self.subject.touch(name) if touch else self.subject.ctl(" ".join(words)))

    def tick(self, seconds: int) -> None:
        self.subject.tick(seconds)
        self.model.tick(seconds)
        self.same(None, None)

    @rule(data=st.data(), name=NAMES, worker=SOME(WORKERS))
    def churn(self, data: st.DataObject, name: str, worker: str) -> None:
        """One of the things that happen seldom: one rule, so that most steps are reads, writes and commands."""
        model, subject = self.model, self.subject
        bounded = any(c["backlog"] for c in model.consumers) or model.set["depth"] or model.set["size"]
        what = data.draw(CHURN)
        if what == "set":
            setting = dict([data.draw(SETTINGS)])
            if not ((model.held or model.schedules) and setting.keys() & {"depth", "size"}) and self.fits(setting):
                self.set(**setting)
        elif what == "create":
            self.create(name)
        elif what == "rename":
            new = data.draw(NAMES)
            if new in model.names or new not in [c["over"] for c in model.consumers]:
                names = {new if key == name else key: stream for key, stream in model.names.items()}
                if not self.shows_what_all_had(names=names):
                    self.same(model.rename(name, new), subject.rename(name, new))
        elif what == "remove":
            self.same(model.remove(name), subject.remove(name))
        elif what == "clear":
            name = data.draw(SOME([name, "dead"]))
            self.same(model.clear(name), subject.ctl(f"clear {name}"))
        elif what == "drop":
            name, sequence = data.draw(SOME([name, "dead"])), data.draw(self.a_sequence())
            if self.lies_between(sequence):
                return
            lines = [f"drop {name} {sequence}"] * data.draw(SOME([1, 1, 2]))
            self.same(model.drop(name, sequence), subject.ctl(*lines))
        elif what == "redrive":
            if not bounded:
                words: list[Any] = data.draw(SOME([[], *[[n] for n in model.names], *[[n, 1] for n in model.names]]))
                self.same(model.redrive(*words), subject.ctl(" ".join(["redrive", *map(str, words)])))
        elif what == "rule":
            rule, value = data.draw(RULES)
            self.same(model.rule(worker, **{rule: value}), subject.ctl(rule_line(worker, rule, value)))
        elif what == "gone":
            mine = model.remove_consumer(worker)
            by = data.draw(SOME(["unlink", "remove"]))
            self.same(mine, subject.unlink(worker) if by == "unlink" else subject.ctl(f"remove {worker}"))
        elif data.draw(st.booleans()):
            self.consumer(worker, None, touch=True)
        else:
            over = data.draw(SOME([None, "a", "b", "dead", *VIEWS]))
            options = data.draw(
                SOME([(), ("order key",), ("order key",), ("order sequence",), ("transient",), ("private",)])
            )
            backlog = 0 if model.held or model.schedules else data.draw(SOME([0, 0, 2]))
            full = data.draw(SOME(["", "", "drop-old", "drop-new", "block", "reject"]))
            self.consumer(worker, over, *options, backlog=backlog, full=full)

    @rule(data=st.data(), how=SOME(["drop", "drop", "clear"]))
    def remove_first_of_key(self, data: st.DataObject, how: str) -> None:
        """One goes for which others of its key may wait: in its back-off, or as a reader may not have it."""
        model, first = self.model, dict[str, Any]()
        for m in model.kept():
            if (key := m["headers"].get("key")) and not self.lies_between(m["seq"]):
                first.setdefault(key, m)
        names = {stream: name for name, stream in model.names.items()}
        if first:
            m = data.draw(SOME(list(first.values())))
            name, sequence = names[m["stream"]], m["seq"]
            if how == "drop":
                self.same(model.drop(name, sequence), self.subject.ctl(f"drop {name} {sequence}"))
            else:
                self.same(model.clear(name), self.subject.ctl(f"clear {name}"))

    @rule(how=SOME(["bind", "bind", "unbind", "end"]), view=SOME(["p", "p", "q"]), pattern=SOME(["a", "b", "c", "*"]))
    def bind(self, how: str, view: str, pattern: str) -> None:
        """A view, and so its consumers, show other streams."""
        model = self.model
        if how != "bind":
            which = [pattern] if how == "unbind" else []
            self.same(model.unbind(view, *which), self.subject.ctl(" ".join(["unbind", view, *which])))
        elif not self.shows_what_all_had(views={**model.views, view: {*model.views.get(view, ()), pattern}}):
            self.same(model.bind(view, pattern), self.subject.ctl(f"bind {view} {pattern}"))

    def shows_what_all_had(self, **change: Any) -> bool:
        """Whether views would show with that what all have had: whether it is there still is not defined."""
        model = copy.copy(self.model)
        vars(model).update(change)
        over = [c for c in model.consumers if c["over"] in VIEWS]
        gone = [m for m in model.log if m["why"] == "had"]
        return any(model.covers(c, m["stream"]) and not had(c, m) for c in over for m in gone)

    def had_by_all(self, c: Any, where: Any) -> bool:
        """Whether going back there may or may not show again what all have had: that is not defined."""
        gone = (m for m in self.model.log if m["why"] == "had" and self.model.covers(c, m["stream"]))
        return any(not isinstance(where, int) or where < 0 or m["seq"] >= where for m in gone)

    def lies_between(self, sequence: int) -> bool:
        """Whether all have had it, though perhaps not one before it: under `replay last` that is not defined."""
        had = (m for m in self.model.log if m["seq"] == sequence and m["why"] == "had")
        return self.model.set["replay"] == "last" and any(had)

    def fits(self, setting: dict[str, Any]) -> bool:  # PENDING
        new = {**self.model.set, **setting}
        return not (new["deliver"] == "all" and new["replay"] == "last" and (new["depth"] or new["size"]))

    def a_sequence(self) -> st.SearchStrategy[int]:
        kept = [m["seq"] for m in self.model.kept()]
        recent = [m["seq"] for m in self.model.log[-4:]]
        return SOME([*kept, *recent, 1])

    @rule(seconds=SOME([1, 1, 2, 5]))
    def pass_time(self, seconds: int) -> None:
        self.tick(seconds)

    @rule(years=SOME([-10, 10]))
    def jump(self, years: int) -> None:
        """Somebody sets the wall clock: nothing expires, nothing is redelivered."""
        self.subject.jump(years)
        self.subject.tick(0)
        self.same(None, None)

    # ------------------------------------------------------------ handles

    @rule(data=st.data(), kind=SOME(["writer", "taker", "taker", "worker", "worker"]))
    def open_one(self, data: st.DataObject, kind: str) -> None:
        if len(self.keys) < 8:
            names = WORKERS if kind == "worker" else ["a", "b", "c", *(["dead"] if kind == "taker" else [])]
            if kind == "worker" and self.model.set["deliver"] == "one":
                names = [*names, ".a", ".a", ".b", ".dead"]  # a stream's own consumer
            if kind == "taker" and self.model.set["deliver"] == "all":
                kind = "writer"
            name = data.draw(SOME(names))
            if not (kind == "writer" and name == "dead"):
                self.open(name, kind)

    def open(self, name: str, kind: str) -> None:
        key = f"h{self.number()}"
        mine = self.model.open(key, name, kind)
        self.same(mine, self.subject.open(key, name, kind))
        if mine is None:
            self.keys[key] = kind

    def pick(self, data: st.DataObject, *kinds: str) -> str | None:
        keys = [key for key, kind in self.keys.items() if kind in kinds]
        return data.draw(SOME(keys)) if keys else None

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.end_of(data.draw(SOME(sorted(self.keys))))

    def end_of(self, key: str) -> None:
        self.stop_of(key)
        self.same(self.model.close(key), self.subject.close(key))
        del self.keys[key]

    def stop_of(self, key: str) -> None:
        for wait in sorted(wait for wait in self.waits if self.by[wait] == key):
            self.stop(wait)

    def stop(self, wait: int) -> None:
        """Cancel it, unless what was cancelled before it let it go on."""
        if wait not in self.waits:
            return
        assert self.subject.cancel(wait)
        self.model.cancel(wait)
        self.waits.discard(wait)
        self.same(self.model.go(None), None)

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.stop(data.draw(SOME(sorted(self.waits))))

    # ------------------------------------------------------------ reading and writing

    def read(self, data: st.DataObject, count: int) -> None:
        key = self.pick(data, "taker", "worker")
        if key is None or len(self.waits) > 8:
            return
        h = self.model.handles[key]
        if h["format"] == "json":
            count = 4096
        others = [wait for wait in self.waits if self.by[wait] == key and wait in self.counts]
        # Where offsets count, or a rest would be for the next of those who wait: that is tested elsewhere.
        short = count != 4096 or any(self.counts[wait] != 4096 for wait in others)
        if others and (h["format"] == "each" or h["kind"] == "taker" or short):
            return
        wait = self.number()
        self.by[wait], self.counts[wait] = key, count
        self.waits.add(wait)
        mine = self.model.read(wait, key, count)
        if mine != WAIT:
            self.waits.discard(wait)
        self.same(mine, self.subject.read(wait, key, count))

    read_1 = rule(data=st.data(), count=COUNTS)(read)
    read_2 = rule(data=st.data(), count=COUNTS)(read)
    read_3 = rule(data=st.data(), count=COUNTS)(read)
    read_4 = rule(data=st.data(), count=COUNTS)(read)

    def write(self, data: st.DataObject, tail: str) -> None:
        key = self.pick(data, "writer", "taker")
        if key is None or len(self.waits) > 8:
            return
        if self.model.handles[key]["of"] != self.model.names.get("dead"):
            self.write_to(key, tail)

    def write_to(self, key: str, tail: str) -> None:
        wait = self.number()
        self.by[wait] = key
        self.waits.add(wait)
        body = f"{wait}{tail}".encode()
        mine = self.model.write(wait, key, body)
        if mine != WAIT:
            self.waits.discard(wait)
        self.same(mine, self.subject.write(wait, key, body))

    write_1 = rule(data=st.data(), tail=TAILS)(write)
    write_2 = rule(data=st.data(), tail=TAILS)(write)
    write_3 = rule(data=st.data(), tail=TAILS)(write)

    @rule(data=st.data())
    def end_mark(self, data: st.DataObject) -> None:
        key = self.pick(data, "writer")
        if key is not None and self.model.set["deliver"] == "one":
            self.same(self.model.write(0, key, b""), self.subject.write(self.number(), key, b""))

    @rule(
        data=st.data(), name=NAMES, priority=SOME([5, 5, 0, 9]), ttl=SOME([0, 0, 2, 6]), delay=SOME([0, 0, 0, 1, 3]),
        id=SOME([None, None, "i", "j"]), headers=SOME([{}, {}, {"k": "v"}]), ahead=SOME([None, None, None, 0, 0, 1]),
        key=KEYS,
    )  # fmt: skip
    def put(self, data: st.DataObject, name: str, ahead: int | None, key: str | None, **more: Any) -> None:
        """`ahead`: how far what it expects is from the newest message."""
        model = self.model
        if key is not None:
            more["headers"] = {**more["headers"], "key": key}
        if ahead is not None and not more["delay"] and name in model.names:
            more["expect"] = model.newest(model.names[name]) + ahead
        bounded = any(c["backlog"] for c in model.consumers) or model.set["depth"] or model.set["size"]
        if more["delay"] and bounded:
            return  # what comes due finds room
        if more["id"] is not None and any(b[5] == more["id"] for b in model.blocked):
            return  # of two with one id that wait for room: tested elsewhere
        wait = self.number()
        row: dict[str, Any] = {"stream": name}
        row.update({key: more[key] for key in ("id", "headers") if more[key]})
        row.update({key: f"{more[key]}s" for key in ("ttl", "delay") if more[key]})
        if more["priority"] != 5:
            row["priority"] = more["priority"]
        if "expect" in more:
            row["expect"] = more["expect"]
        body = f"{wait} put".encode()
        text = json.dumps(row).encode() + data.draw(SOME([b" ", b"\n", b"\t"])) + body
        self.by[wait] = "put"
        self.waits.add(wait)
        mine = model.put(wait, name, body, len(text), **more)
        if mine != WAIT:
            self.waits.discard(wait)
        self.same(mine, self.subject.put(wait, text))
        if isinstance(mine, int) and model.put_seq is not None:
            self.alike(f"{model.put_seq}\n".encode(), self.subject.put_answer(), "put")
        elif isinstance(mine, str) and mine != WAIT:
            assert self.subject.put_answer()  # why it was refused

    @rule(name=NAMES, id=SOME(["i", "k"]), every=SOME([1, 2, 5, 0]), body=SOME([b"tick", b"tock"]))
    def schedule(self, name: str, id: str, every: int, body: bytes) -> None:
        """`every` 0: remove it."""
        model = self.model
        if not every:
            self.same(model.unschedule(id), self.subject.ctl(f"unschedule {id}"))
            return
        if any(c["backlog"] for c in model.consumers) or model.set["depth"] or model.set["size"]:
            return  # what comes due finds room
        text = json.dumps({"stream": name, "every": f"{every}s", "id": id}).encode() + b" " + body
        wait = self.number()
        mine = model.schedule(id, name, body, len(text), every)
        self.same(mine, self.subject.put(wait, text))
        answer = self.subject.put_answer()
        if isinstance(mine, int):
            self.alike(f"{model.put_seq}\n".encode(), answer, "put")

    @rule(data=st.data(), then=SOME(["read", "close"]))
    def lose(self, data: st.DataObject, then: str) -> None:
        """An answer that could not be delivered."""
        key = self.pick(data, "taker", "worker")
        if key is None or not self.can_lose or any(self.by[wait] == key for wait in self.waits):
            return
        h = self.model.handles[key]
        if h["format"] in ("json", "each") or h["rest"] or h["due"]:
            return
        mine = self.model.read(self.number(), key, 4096)
        self.same(mine, self.subject.read(self.count, key, 4096))
        if mine == WAIT:
            self.by[self.count] = key
            self.waits.add(self.count)
            self.stop(self.count)
        elif isinstance(mine, bytes) and mine:
            self.model.push_back(key, mine, then == "close")
            self.subject.push_back(key, mine)
            if then == "close":
                self.end_of(key)
            else:
                self.same(self.model.read(0, key, 4096), self.subject.read(self.number(), key, 4096))

    # ------------------------------------------------------------ commands

    def refused(self, key: str, result: Any) -> None:
        """The text of a refusal is the handle's next read."""
        if result is not None:
            text = self.subject.read(self.number(), key, 4096)
            assert isinstance(text, bytes)
            assert text.endswith(b"\n")
            if result == "Stale":
                assert b"claimed" in text or b"removed" in text, text

    def settle_claim(self, data: st.DataObject, verb: str) -> None:
        key = self.pick(data, "worker")
        if key is None:
            return
        held = self.model.claims(key)
        how = data.draw(SOME(["last", "last", "one", "all", "any", "range"]))
        seqs: list[int] = []
        words = [verb]
        if how == "one" and held:
            seqs = [data.draw(SOME(held))]
        elif how == "all" and verb in ("ack", "release", "touch"):
            seqs = held
        elif how == "any":
            seqs = [data.draw(self.a_sequence())]
        elif how == "range" and verb in ("ack", "release", "touch"):
            first = data.draw(SOME(held)) if held else data.draw(self.a_sequence())
            seqs = [*range(first, first + data.draw(st.integers(1, 3)))]
            words.append(f"{first}-{seqs[-1]}")
        more: dict[str, Any] = {}
        words += map(str, seqs if len(words) == 1 else [])
        if verb == "nack" and data.draw(st.booleans()):
            more["delay"] = data.draw(st.integers(0, 3))
            words.append(f"{more['delay']}s")
        if verb == "dead" and (data.draw(st.booleans())):
            more["reason"] = "it is broken"
            words.append(more["reason"])
        mine = self.model.command(key, verb, seqs, **more)
        self.same(mine, self.subject.command(key, " ".join(words)))
        self.refused(key, mine)

    ack_1 = rule(data=st.data(), verb=st.just("ack"))(settle_claim)
    ack_2 = rule(data=st.data(), verb=st.just("ack"))(settle_claim)
    back_1 = rule(data=st.data(), verb=SOME(["nack", "release", "dead", "touch"]))(settle_claim)
    back_2 = rule(data=st.data(), verb=st.just("nack"))(settle_claim)

    @rule(
        data=st.data(),
        what=st.one_of(
            st.tuples(st.just("seek"), PLACES),
            st.tuples(st.just("format"), SOME(["raw", "line", "nul", "each", "json"])),
            st.tuples(st.just("select"), st.lists(NAMES, max_size=2, unique=True)),
            st.tuples(st.just("until"), st.one_of(st.just("end"), st.integers(1, 12))),
        ),
    )
    def place(self, data: st.DataObject, what: tuple[str, Any]) -> None:
        key = self.pick(data, "worker")
        if key is None:
            return
        verb, value = what
        if verb == "seek" and isinstance(value, int):
            value = min(value, self.model.next)
        h = self.model.handles[key]
        moves = verb == "seek" and h["c"]["stream"] is None  # a stream's own consumer refuses it
        if moves and (h["select"] is not None or (value != "end" and self.had_by_all(h["c"], value))):
            return
        self.stop_of(key)  # a command while a read waits is tested elsewhere
        mine = getattr(self.model, verb)(key, value)
        line = " ".join([verb, *value]) if isinstance(value, list) else f"{verb} {value}"
        self.same(mine, self.subject.command(key, line))
        self.refused(key, mine)

    @rule(data=st.data())
    def info(self, data: st.DataObject) -> None:
        key = self.pick(data, "worker")
        if key is None or any(self.by[wait] == key for wait in self.waits):
            return
        h = self.model.handles[key]
        if len(h["last"]) != 1 or h["last"][0] not in self.model.claims(key) or h["rest"] or h["due"]:
            return
        m = self.model.message(h["last"][0])
        if m["stream"] not in self.model.names.values():
            return
        self.same(None, self.subject.command(key, "info"))
        text = self.subject.read(self.number(), key, 4096).decode()
        assert text.endswith("\n\n")
        its = dict(line.split(" ", 1) for line in text.splitlines() if line)
        name = next(n for n, s in self.model.names.items() if s == m["stream"])
        mine = {"sequence": str(m["seq"]), "stream": name, "deliveries": str(h["c"]["open"][m["seq"]]["failed"] + 1)}
        self.alike(mine, {k: its[k] for k in mine} if "stream" not in m["headers"] else mine, "info")

    # ------------------------------------------------------------ what is shown

    @rule()
    def look(self) -> None:
        """The contents that a mere look shows; looking changes nothing."""
        model, subject = self.model, self.subject
        stats = json.loads(b"".join(subject.everything(".stats")))
        named = [c for c in model.consumers if c["name"]]
        self.alike(sorted(c["name"] for c in named), sorted(stats["consumers"]), "consumers")
        for c in named:
            its = stats["consumers"][c["name"]]
            mine = model.stats(c)
            self.alike(mine, {key: its[key] for key in mine}, f"stats of {c['name']}")
            self.alike(c["over"] or "", its["over"] or "", "over")
            if not c["transient"]:
                self.alike(model.peek(c), subject.everything(f".consumers/{c['name']}"), f"waits for {c['name']}")
        if model.set["deliver"] == "one":
            for name in model.names:
                c = next(c for c in model.consumers if c["stream"] == model.names[name])
                its = stats["streams"][name]["consumer"]
                mine = model.stats(c)
                self.alike(mine, {key: its[key] for key in mine if key in its}, f"queue {name}")
                self.alike(model.peek(c), subject.everything(name), f"waits in {name}")
        self.look_at_log()
        self.same(None, None)

    def rows(self) -> list[tuple[int, str, bytes, dict[str, str]]]:
        """All that a cursor sees."""
        commands = ("seek first", "until end", "format json")
        return rows_of(b"".join(self.subject.everything(".cursor", os.O_RDWR, *commands)))

    def in_its_order(self, before: int) -> None:
        """Dead letters made since then at one instant, of several consumers: in any order."""
        letters = self.model.log[before:]
        if len(letters) < 2:
            return
        rows = rows_of(
            b"".join(self.subject.everything(".cursor", os.O_RDWR, "seek first", "until end", "format json"))
        )
        place = {
            tuple(headers.get(key) for key in ("stream", "sequence", "consumer")): sequence
            for sequence, _, _, headers in rows
        }
        for m in letters:
            m["seq"] = place.get(tuple(m["headers"].get(key) for key in ("stream", "sequence", "consumer")), m["seq"])
        letters.sort(key=lambda m: m["seq"])
        self.model.log[before:] = letters

    def look_at_log(self) -> None:
        """All that is kept; of pub-sub streams only the dead letters: what else is kept was seen by peeking."""
        model = self.model
        rows = self.rows()
        for name in model.names if model.set["deliver"] == "one" else {"dead"} & set(model.names):
            mine = model.dump(name)
            its = [(sequence, body, headers) for sequence, stream, body, headers in rows if stream == name]
            self.alike([row[:2] for row in mine], [row[:2] for row in its], f"kept in {name}")
            for (sequence, _, wanted), (_, _, got) in zip(mine, its, strict=True):
                self.broken = True
                assert like(wanted, got), f"headers of {sequence}: model {wanted}, subject {got}"
                self.broken = False

    @invariant()
    def counted(self) -> None:
        """The waiting calls are those of the model."""
        if hasattr(self, "model"):
            assert self.waits == {p[0] for p in self.model.parked} | {b[0] for b in self.model.blocked}

    def teardown(self) -> None:
        if not self.broken and hasattr(self, "model"):
            self.look()
            for wait in sorted(self.waits):
                self.stop(wait)
            self.subject.end()
