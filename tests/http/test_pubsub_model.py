"""The model of pub-sub against the front end: every request is an open, a read or a write, and a close of the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mqfs import errors
from mqfs.http.publishing import lines
from tests.engine.test_model import run
from tests.http.subject import HttpSubject, Reply
from tests.models.pubsub import WAIT, Model
from tests.models.pubsub_machine import KEYS, NAMES, SETTINGS

pytestmark = pytest.mark.slow
TAILS = st.sampled_from(["", "\n", "\ntwo\nthr", " and more"])
PLACES = st.one_of(st.sampled_from(["first", "first", "last", "end"]), st.integers(-4, -1), st.integers(1, 12))
SELECTED = st.lists(NAMES, max_size=2, unique=True)
UNTIL = st.sampled_from([None, "end", 3, 6])
CHURN = st.sampled_from(["create", "clear", "drop", "tick", "tick", "set", "set", "rename", "remove"])


def status(name: str) -> int:
    """The status of an error of the model."""
    return int(getattr(errors, name).http)


class OverHttp(RuleBasedStateMachine):
    """`waits`: requests without an answer yet, each with the model's handle if it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.subject = Model(), HttpSubject()
        self.waits: dict[int, str | None] = {}
        self.untils: dict[str, Any] = {}  # what a page asked for, by handle
        self.unknown = False  # without `replay all` what no reader waited for leaves no trace
        self.count = 0
        self.broken = False

    def number(self) -> int:
        self.count += 1
        return self.count

    @initialize(
        replay=st.sampled_from(["off", "last", "key", "all", "all"]),
        data=st.sampled_from(["message", "message", "line", "coalesce"]),
        full=st.sampled_from(["drop-old", "drop-new", "block", "reject"]),
        depth=st.sampled_from([0, 1, 3]),
    )
    def begin(self, **settings: Any) -> None:
        self.set(sync="off")
        for name in ("a", "b"):
            self.create(name)
        self.set(**settings)

    # ------------------------------------------------------------ answers

    def same(self, mine: Any, its: Any) -> None:
        """Compare an answer, and those that came to waiting requests meanwhile."""
        self.broken = True
        assert its == mine, f"model {mine!r}, subject {its!r}"
        self.subject.settle()
        while self.model.answers:  # the rest of a page may make room for a writer
            answers, self.model.answers = self.model.answers, []
            writers = sum(self.waits[wait] is None for wait, _ in answers)
            for wait, result in answers:
                wanted = self.finish(wait, result)
                got = [reply for number, reply in self.subject.answers if number == wait]
                assert len(got) == 1, f"{wait} waits; model {wanted!r}"
                shown = self.shown(got[0], wanted)
                if writers > 1 and isinstance(wanted, list) and shown:
                    wanted = wanted[: len(shown)]  # a page may be answered between two of them
                assert shown == wanted, f"answer to {wait}: model {wanted!r}, subject {got[0]!r}"
                self.subject.answers = [one for one in self.subject.answers if one[0] != wait]
        assert self.subject.answers == []
        self.broken = False

    def finish(self, wait: int, result: Any) -> Any:
        """What a request comes to whose wait is over."""
        key = self.waits.pop(wait)
        return self.published(wait, result) if key is None else self.page(key, [result])

    def shown(self, reply: Reply, wanted: Any) -> Any:
        """A reply in the form of what the model has."""
        if isinstance(wanted, list):
            assert reply.status in (200, 204), reply
            return [(line["sequence"], line["stream"], line["body"]) for line in reply.lines if "lost" not in line]
        if isinstance(wanted, tuple):
            return reply.status, reply.body
        return reply.status

    # ------------------------------------------------------------ publishing

    def publish(self, data: st.DataObject, name: str, tail: str) -> None:
        wait = self.number()
        body = f"{wait}:{tail}".encode()
        bodies = list(lines(body)) if self.model.set["data"] == "line" else [body]
        result = self.append(wait, name, bodies)
        wanted = WAIT if result == WAIT else self.published(wait, result)
        its = self.subject.ask(wait, data.draw(st.sampled_from(["POST", "PUT"])), name, body)
        self.same(wanted, its if its == WAIT else self.shown(its, wanted))

    def append(self, wait: int, name: str, bodies: list[bytes], key: str | None = None) -> Any:
        """What a publish comes to. One that is refused leaves no new stream."""
        is_new = self.model.create(name) is None
        result = self.model.append(wait, self.model.names[name], bodies, sum(map(len, bodies)), key=key)
        if result == WAIT and self.never_fits(bodies):  # a batch is refused at once
            self.model.cancel(wait)
            result = "TooLong"
        if result == WAIT:
            self.waits[wait] = None
        elif is_new and isinstance(result, str):
            self.model.remove(name)
        return result

    def never_fits(self, bodies: list[bytes]) -> bool:
        size, depth = self.model.set["size"], self.model.set["depth"]
        return bool(size and sum(map(len, bodies)) > size) or bool(depth and len(bodies) > depth)

    @rule(name=NAMES, key=KEYS.filter(bool), removes=st.booleans())
    def publish_with_key(self, name: str, key: str, removes: bool) -> None:
        """A message, or an empty one: that takes the key out, and is answered at once."""
        removes = removes and self.model.set["full"] != "block"
        wait, before = self.number(), self.model.next
        body = b"" if removes else b"%d:" % wait
        result = self.append(wait, name, [body], key)
        wanted = WAIT if result == WAIT else self.published(wait, result)
        if removes and not isinstance(result, str) and self.model.next > before:
            wanted = 201, b"%d\n" % before
        its = self.subject.ask(wait, "POST", f"{name}?key={key}", body)
        self.same(wanted, its if its == WAIT else self.shown(its, wanted))

    publish_1 = rule(data=st.data(), name=NAMES, tail=TAILS)(publish)
    publish_2 = rule(data=st.data(), name=NAMES, tail=TAILS)(publish)
    publish_3 = rule(data=st.data(), name=NAMES, tail=TAILS)(publish)

    def published(self, wait: int, result: Any) -> Any:
        if isinstance(result, str):
            return status(result)
        mine = [m["seq"] for m in self.model.log if m["body"].startswith(b"%d:" % wait)]
        return 201, b"%d\n" % mine[0] if mine else b"discarded\n"

    # ------------------------------------------------------------ reading

    def read(self, names: list[str], since: Any, until: Any, wait: bool) -> None:
        number, query = self.number(), [f"since={since}", "format=json"]
        if until is not None:
            query.append(f"until={until}")
        if wait:
            query.append("wait=1h")
        path = f"{names[0]}?" if len(names) == 1 else f"?{''.join(f'select={name}&' for name in names) or 'select=&'}"
        its = self.subject.ask(number, "GET", path + "&".join(query))
        told = its != WAIT and b'{"lost":' in its.body
        wanted = self.reading(number, names, since, until, wait, told)
        self.same(wanted, its if its == WAIT else self.shown(its, wanted))

    read_1 = rule(names=SELECTED, since=PLACES, until=st.none(), wait=st.just(False))(read)
    read_2 = rule(names=SELECTED, since=PLACES, until=st.none(), wait=st.just(True))(read)
    read_3 = rule(names=st.just([]), since=PLACES, until=UNTIL, wait=st.booleans())(read)

    def reading(self, number: int, names: list[str], since: Any, until: Any, wait: bool, told: bool) -> Any:
        """A page of the model: messages, or a status; WAIT. `told`: a gap was reported, so there is no wait."""
        model, key = self.model, f"h{number}"
        if any(name not in model.names for name in names):
            return status("NotFound")
        model.open(key, "cursor")
        is_beyond = isinstance(since, int) and since > model.next  # as of a group that was there before: all, and a gap
        since = "first" if is_beyond else since
        for verb, value in (("select", names), ("format", "json"), ("seek", since)):
            assert model.command(key, verb, value) is None
        if isinstance(until, int):
            model.command(key, "until", until)
        self.untils[key] = until
        gone = {m["why"] for m in model.log if m["why"] and isinstance(since, int) and m["seq"] >= since >= 1}
        assert (gone or self.unknown or is_beyond) if told else not (is_beyond or self.is_cut(key, since, until))
        if told or not wait:
            return self.page(key, [])
        first = model.read(number, key, 1 << 20)
        if first == WAIT:
            self.waits[number] = key
            return WAIT
        return self.page(key, [first])

    def is_cut(self, key: str, since: Any, until: Any) -> bool:
        """Whether a bound or `clear` took something from what is asked for."""
        mine = self.model.selection(self.model.handles[key])
        cuts = [m["seq"] for m in self.model.log if m["why"] == "cut" and m["stream"] in mine]
        last = until if isinstance(until, int) else self.model.next
        return isinstance(since, int) and since >= 1 and any(since <= seq <= last for seq in cuts)

    def page(self, key: str, pieces: list[Any]) -> list[Any]:
        """What a handle of the model gets up to the end that is bound now."""
        model, until, got = self.model, self.untils[key], list[Any]()
        model.command(key, "until", "end" if until in (None, "end") else min(until, model.next - 1))
        while not pieces or pieces[-1] != b"":
            pieces.append(model.read(0, key, 1 << 20))
        for piece in pieces[:-1]:
            if piece != "FellBehind":
                row = json.loads(piece)
                got.append((row["sequence"], row["stream"], row["body"]))
        model.close(key)
        return got

    @rule(name=NAMES)
    def look(self, name: str) -> None:
        wanted = str(self.model.next) if name in self.model.names else None
        reply = self.subject.ask(0, "HEAD", name)
        self.same(wanted, reply.headers.get("Mqfs-Next"))

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.stop(data.draw(st.sampled_from(sorted(self.waits))))

    def stop(self, wait: int) -> None:
        if wait in self.waits:
            self.subject.cancel(wait)
            key = self.waits.pop(wait)
            self.model.cancel(wait)
            if key is not None:
                self.model.close(key)
            self.same(None, None)

    # ------------------------------------------------------------ names and settings

    @rule(data=st.data(), name=NAMES)
    def churn(self, data: st.DataObject, name: str) -> None:
        what = data.draw(CHURN)
        if what == "set":
            setting = dict([data.draw(SETTINGS)])
            if self.model.set["replay"] == "key" and setting.get("replay") in ("all", "last"):
                return  # the log may still have messages that were replaced or removed a key
            self.set(**setting)
        elif what == "rename":
            new = data.draw(NAMES)
            if name in self.model.names and new not in self.model.names:
                self.model.rename(name, new)
                self.subject.rename(name, new)
                self.same(None, None)
        elif what == "drop":
            sequence = data.draw(st.integers(1, max(self.model.next, 2)))
            self.ctl(self.model.drop(name, sequence), f"drop {name} {sequence}")
        elif what == "clear":
            self.ctl(self.model.clear(name), f"clear {name}")
        elif what == "tick":
            seconds = data.draw(st.sampled_from([1, 4, 10]))
            self.model.tick(seconds)
            self.subject.tick(seconds)
            self.same(None, None)
        else:
            getattr(self, what)(name)

    def create(self, name: str) -> None:
        wanted = 200 if self.model.create(name) == "Exists" else 201
        self.same(wanted, self.subject.ask(0, "PUT", name).status)

    def remove(self, name: str) -> None:
        wanted = status("NotFound") if self.model.remove(name) == "NotFound" else 204
        self.same(wanted, self.subject.ask(0, "DELETE", name).status)

    def set(self, **settings: Any) -> None:
        rows = [f"{key} {value}{'s' if key == 'ttl' else ''}" for key, value in settings.items() if key != "size"]
        if "size" in settings:
            rows.append(f"depth {settings['size']}B")
            settings["depth"] = 0
        elif "depth" in settings:
            settings["size"] = 0
        self.ctl(self.model.ctl(**settings), *rows)
        self.unknown = self.unknown or self.model.set["replay"] != "all"

    def ctl(self, wanted: Any, *rows: str) -> None:
        reply = self.subject.ask(0, "POST", "ctl", "\n".join(rows).encode())
        self.same(204 if wanted is None else status(wanted), reply.status)

    def teardown(self) -> None:
        if self.broken:
            self.subject.abandon()
            return
        for wait in sorted(self.waits):
            self.stop(wait)
        self.subject.end()


TestOverHttp = pytest.mark.timeout(3600)(run(OverHttp, 2_000))
