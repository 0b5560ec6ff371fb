"""The same random steps through the model and a subject: every answer must be the same, in the same order."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.models.pubsub import WAIT, Model

NAMES = st.sampled_from(["a", "b", "c"])
BODIES = st.sampled_from([b"x", b"yy\n", b"one\ntwo\nthr", b"0123456789", b"\n", b"3\n4\n", b"tail", b""])
KEYS = st.sampled_from(["", "k", "k", "l"])
COUNTS = st.sampled_from([1, 3, 64, 64, 64, 4096])
MODES = st.sampled_from([os.O_RDONLY, os.O_RDWR, os.O_WRONLY])

ENDS = (b"", "NotFound")

SETTINGS = st.one_of(
    st.tuples(st.just("replay"), st.sampled_from(["off", "last", "key", "all"])),
    st.tuples(st.just("full"), st.sampled_from(["drop-old", "drop-new", "block", "reject"])),
    st.tuples(st.just("depth"), st.integers(0, 4)),
    st.tuples(st.just("size"), st.integers(5, 30)),
    st.tuples(st.just("ttl"), st.sampled_from([0, 5, 20])),
    st.tuples(st.just("data"), st.sampled_from(["message", "line", "coalesce"])),
)


def as_lines(settings: dict[str, Any]) -> list[str]:
    """As `ctl` has them."""
    lines = [f"{key} {value}{'s' if key == 'ttl' else ''}" for key, value in settings.items() if key != "size"]
    return [*lines, f"depth {settings['size']}B"] if "size" in settings else lines


def as_set(settings: dict[str, Any]) -> dict[str, Any]:
    """As the model has them: one bound takes the place of the other."""
    if "size" in settings:
        return {**settings, "depth": 0}
    return {**settings, "size": 0} if "depth" in settings else settings


def in_order(answers: list[Any]) -> list[Any]:
    """Ends of files first, which come to all that wait in no order."""
    ends = sorted(answer for answer in answers if answer[1] in ENDS)
    return ends + [answer for answer in answers if answer[1] not in ENDS]


class Machine(RuleBasedStateMachine):
    """Subclasses say which subject."""

    ends_mixed = False  # other answers may come with the ends of files

    def make(self) -> Any:
        raise NotImplementedError

    def make_model(self) -> Model:
        return Model()

    def __init__(self) -> None:
        super().__init__()
        self.model = self.make_model()
        self.subject = self.make()
        self.keys: dict[str, str] = {}  # handle -> kind
        self.waits: set[int] = set()
        self.by: dict[int, str] = {}  # wait -> handle
        self.count = 0
        self.broken = False  # a difference was found: what is left is not to be tidied up

    def number(self) -> int:
        self.count += 1
        return self.count

    def same(self, mine: Any, its: Any) -> None:
        self.subject.settle()
        self.broken = True
        assert its == mine, f"model {mine!r}, subject {its!r}"
        answers, self.model.answers = self.model.answers, []
        got, self.subject.answers = self.subject.answers, []
        if self.ends_mixed or all(result in ENDS for _, result in answers):  # a file's end comes in no order
            answers, got = in_order(answers), in_order(got)
        assert got == answers, f"answers: model {answers!r}, subject {got!r}"
        self.waits -= {wait for wait, _ in answers}
        self.broken = False

    @initialize(
        replay=st.sampled_from(["off", "last", "key", "all"]),
        data=st.sampled_from(["message", "message", "line", "coalesce"]),
        full=st.sampled_from(["drop-old", "drop-new", "block", "reject"]),
        depth=st.sampled_from([0, 1, 3]),
    )
    def begin(self, replay: str, data: str, full: str, depth: int) -> None:
        for name in ("a", "b"):
            self.same(self.model.create(name), self.subject.create(name))
        self.set(replay=replay, data=data, full=full, depth=depth)
        for name, mode in (("a", os.O_WRONLY), ("b", os.O_WRONLY), ("a", os.O_RDWR), ("a", os.O_RDONLY)):
            self.open(name, mode)

    def set(self, **settings: Any) -> None:
        self.same(self.model.ctl(**as_set(settings)), self.subject.ctl(*as_lines(settings)))

    def create(self, name: str) -> None:
        self.same(self.model.create(name), self.subject.create(name))

    def remove(self, name: str) -> None:
        self.same(self.model.remove(name), self.subject.remove(name))

    def rename(self, old: str, new: str) -> None:
        self.same(self.model.rename(old, new), self.subject.rename(old, new))

    def clear(self, name: str) -> None:
        self.same(self.model.clear(name), self.subject.ctl(f"clear {name}"))

    def drop(self, name: str, sequence: int) -> None:
        self.same(self.model.drop(name, sequence), self.subject.ctl(f"drop {name} {sequence}"))

    def tick(self, seconds: int) -> None:
        self.subject.tick(seconds)
        self.model.tick(seconds)
        self.same(None, None)

    @rule(data=st.data(), name=NAMES)
    def churn(self, data: st.DataObject, name: str) -> None:
        """One of the things that happen seldom: one rule, so that most steps are reads and writes."""
        what = data.draw(st.sampled_from(["create", "clear", "drop", "tick", "tick", "set", "set", "rename", "remove"]))
        if what == "set":
            setting = dict([data.draw(SETTINGS)])
            if self.model.set["replay"] == "key" and setting.get("replay") in ("all", "last"):
                return  # the log may still have messages that were replaced or removed a key
            self.set(**setting)
        elif what == "rename":
            self.rename(name, data.draw(NAMES))
        elif what == "drop":
            self.drop(name, data.draw(st.integers(1, max(self.model.next, 2))))
        elif what == "tick":
            self.tick(data.draw(st.sampled_from([1, 4, 10])))
        else:
            getattr(self, what)(name)

    @rule(name=st.one_of(NAMES, st.sampled_from(["order", "cursor"])), mode=MODES)
    def open_one(self, name: str, mode: int) -> None:
        if len(self.keys) < 8:
            self.open(name, mode)

    def open(self, name: str, mode: int) -> None:
        key = f"h{self.number()}"
        mode = {"order": os.O_RDONLY, "cursor": os.O_RDWR}.get(name, mode)
        mine = self.model.open(key, name, reads=mode != os.O_WRONLY)
        self.same(mine, self.subject.open(key, name, mode))
        if mine is None:
            kind = {os.O_RDWR: "both", os.O_RDONLY: "reader", os.O_WRONLY: "writer"}[mode]
            self.keys[key] = name if name in ("order", "cursor") else kind

    def pick(self, data: st.DataObject, *kinds: str) -> str | None:
        keys = [key for key, kind in self.keys.items() if kind in kinds]
        return data.draw(st.sampled_from(keys)) if keys else None

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        for wait in sorted(wait for wait in self.waits if self.by[wait] == key):
            self.stop(wait)
        self.model.close(key)
        self.same(None, self.subject.close(key))
        del self.keys[key]

    def read(self, data: st.DataObject, count: int) -> None:
        key = self.pick(data, "reader", "both", "order", "cursor")
        if key is None or len(self.waits) > 8:
            return
        if self.keys[key] in ("reader", "order") and any(p[1] == key for p in self.model.parked):
            return  # where offsets count, the next one is known only when the read before was answered
        wait = self.number()
        self.by[wait] = key
        mine = self.model.read(wait, key, count)
        self.same(mine, self.subject.read(wait, key, count))
        if mine == WAIT:
            self.waits.add(wait)
            if self.model.blocked:
                self.tick(1)  # until then a writer may wait for the room of an end mark that this reader passed

    def write(self, data: st.DataObject, body: bytes) -> None:
        key = self.pick(data, "both", "writer")
        if key is None or len(self.waits) > 8:
            return
        wait = self.number()
        self.by[wait] = key
        mine = self.model.write(wait, key, body)
        self.same(mine, self.subject.write(wait, key, body))
        if mine == WAIT:
            self.waits.add(wait)

    def put(self, name: str, key: str | None, body: bytes) -> None:
        """`key` None: its lines are messages."""
        if len(self.waits) > 8:
            return
        wait = self.number()
        self.by[wait] = ""
        told = {"stream": name, **({"key": key} if key else {"lines": key is None})}
        text = json.dumps(told).encode() + b" " + body
        mine = self.model.put(wait, name, key, body, len(text))
        self.same(mine, self.subject.put(wait, text))
        if mine == WAIT:
            self.waits.add(wait)

    # Each a few times over: that is its weight.
    put_1 = rule(name=NAMES, key=KEYS, body=BODIES)(put)
    put_2 = rule(name=NAMES, key=st.none() | KEYS, body=BODIES)(put)
    read_1 = rule(data=st.data(), count=COUNTS)(read)
    read_2 = rule(data=st.data(), count=COUNTS)(read)
    read_3 = rule(data=st.data(), count=COUNTS)(read)
    write_1 = rule(data=st.data(), body=BODIES)(write)
    write_2 = rule(data=st.data(), body=BODIES)(write)
    write_3 = rule(data=st.data(), body=BODIES)(write)

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.stop(data.draw(st.sampled_from(sorted(self.waits))))

    def stop(self, wait: int) -> None:
        """Cancel it, unless what was cancelled before it let it go on."""
        if wait not in self.waits:
            return
        assert self.subject.cancel(wait)
        self.model.cancel(wait)
        self.waits.discard(wait)
        self.same(None, None)

    @precondition(lambda self: "cursor" in self.keys.values())
    @rule(
        data=st.data(),
        where=st.one_of(st.sampled_from(["first", "last", "end"]), st.integers(-4, -1), st.integers(1, 12)),
    )
    def seek(self, data: st.DataObject, where: Any) -> None:
        self.command(data, "seek", where)

    @precondition(lambda self: "cursor" in self.keys.values())
    @rule(data=st.data(), word=st.sampled_from(["raw", "line", "nul", "each"]))
    def format(self, data: st.DataObject, word: str) -> None:
        self.command(data, "format", word)

    @precondition(lambda self: "cursor" in self.keys.values())
    @rule(data=st.data(), names=st.lists(NAMES, max_size=2, unique=True))
    def select(self, data: st.DataObject, names: list[str]) -> None:
        self.command(data, "select", names)

    @precondition(lambda self: "cursor" in self.keys.values())
    @rule(data=st.data(), bound=st.one_of(st.just("end"), st.integers(0, 12)))
    def until(self, data: st.DataObject, bound: Any) -> None:
        self.command(data, "until", bound)

    def command(self, data: st.DataObject, verb: str, value: Any) -> None:
        key = self.pick(data, "cursor")
        assert key is not None
        for wait in [p[0] for p in self.model.parked if p[1] == key]:
            self.stop(wait)  # a command while a read waits is tested elsewhere
        mine = self.model.command(key, verb, value)
        line = " ".join([verb, *value]) if isinstance(value, list) else f"{verb} {value}"
        its = self.subject.command(key, line)
        self.same(mine, its)
        if mine is not None:
            self.model.handles[key]["text"] = None
            self.subject.read(self.number(), key, 4096)

    @invariant()
    def counted(self) -> None:
        """The waiting calls are those of the model."""
        written = [b[0] for b in self.model.blocked] + [b[0] for b in self.model.unshown]
        assert self.waits == {p[0] for p in self.model.parked} | {wait for wait in written if wait > 0}

    def teardown(self) -> None:
        if not self.broken:
            for wait in sorted(self.waits):
                self.stop(wait)
            self.subject.end()
