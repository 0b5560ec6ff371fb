"""The model of work queues against the front end: a claim is a handle of the model, which lives until all of it is
settled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mqfs import errors
from tests.engine.test_model import run
from tests.http.subject import HttpSubject, Reply
from tests.models.work_queue import WAIT, Model
from tests.models.work_queue_machine import NAMES, RULES, SOME, WORKERS, plain_headers, rule_line

pytestmark = pytest.mark.slow
BIG = 1 << 20
SETTINGS = st.one_of(
    st.tuples(st.just("retries"), SOME([0, 1, 2, 3])),
    st.tuples(st.just("lease"), SOME([0, 1, 3])),
    st.tuples(st.just("ttl"), SOME([0, 5, 20])),
    st.tuples(st.just("full"), SOME(["drop-old", "block", "reject"])),
    st.tuples(st.just("depth"), SOME([0, 0, 2, 4])),
    st.tuples(st.just("order"), SOME(["sequence", "expiry"])),
    st.tuples(st.just("dedup"), SOME([0, 4])),
)


def status(name: str) -> int:
    """The status of an error of the model."""
    return int(getattr(errors, name).http)


class OverHttp(RuleBasedStateMachine):
    """`waits`: requests without an answer yet, each with what it becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.subject = HttpSubject()
        self.waits: dict[int, str] = {}  # "publish", or the model's handle of a claim
        self.tokens: dict[str, dict[int, str]] = {}  # by the model's handle, of what it holds
        self.spent: list[str] = []
        self.count = 0
        self.broken = False

    def number(self) -> int:
        self.count += 1
        return self.count

    @initialize(deliver=SOME(["one", "one", "all"]), full=SOME(["drop-old", "block", "reject"]), depth=SOME([0, 0, 3]))
    def begin(self, deliver: str, full: str, depth: int) -> None:
        self.model = Model(deliver)
        self.ctl(None, f"deliver {deliver}", "sync off")
        self.set(replay="all", full=full, depth=depth, retries=2, lease=0, backoff=(1, 4))
        for name in ("a", "b"):
            assert self.model.create(name) is None
            self.same(201, self.subject.ask(0, "PUT", name).status)
        self.make("u", "")
        self.make("v", "?over=a")
        for name in ("a", "b", "a", "a")[: depth or 4]:
            self.publish(name, id=None)

    # ------------------------------------------------------------ answers

    def same(self, mine: Any, its: Any) -> None:
        """Compare an answer, and those that came to waiting requests meanwhile."""
        self.broken = True
        assert its == mine, f"model {mine!r}, subject {its!r}"
        self.subject.settle()
        answers, self.model.answers = self.model.answers, []
        for wait, result in answers:
            key = self.waits.pop(wait)
            replies = [reply for number, reply in self.subject.answers if number == wait]
            assert len(replies) == 1, f"{wait} waits; model {result!r}"
            self.subject.answers = [one for one in self.subject.answers if one[0] != wait]
            if key == "publish":
                wanted = self.published(wait, result)
                assert self.shown(replies[0], wanted) == wanted, f"model {wanted}, subject {replies[0]}"
            else:
                self.claimed(key, [result] if result else [], replies[0])
        assert self.subject.answers == []
        self.broken = False

    def shown(self, reply: Reply, wanted: Any) -> Any:
        return (reply.status, reply.body) if isinstance(wanted, tuple) else reply.status

    # ------------------------------------------------------------ publishing

    def publish(self, name: str, key: str | None = None, **more: Any) -> None:
        more |= {"headers": {"key": key}} if key else {}
        wait, model, given = (
            self.number(),
            self.model,
            {key: more[key] for key in more if more[key] not in (None, 0, 5)},
        )
        if name not in model.names or (given.get("delay") and model.set["depth"]):
            return  # what comes due finds room
        ahead = given.pop("ahead", more.pop("ahead", None))
        if ahead is not None and "delay" not in given:
            given["expect"] = more["expect"] = model.newest(model.names[name]) + ahead - 1
        if more["id"] is not None and any(b[5] == more["id"] for b in model.blocked):
            return  # of two with one id that wait for room: tested elsewhere
        body = f"{wait}:".encode()
        if given:
            result = model.put(wait, name, body, len(body), **more)
        else:
            result = model.go(model.append(wait, model.names[name], body, {}, 0, None, len(body)))
        if result == WAIT:
            self.waits[wait] = "publish"
        wanted = WAIT if result == WAIT else self.published(wait, result)
        fields = {f"Mqfs-{key}": f"{value}s" for key, value in given.items() if key in ("ttl", "delay")}
        fields |= {"Idempotency-Key": given["id"]} if "id" in given else {}
        fields |= {"Mqfs-Priority": "9"} if "priority" in given else {}
        fields |= {"Mqfs-Key": key} if key else {}
        fields |= {"If-Match": f'"{given["expect"]}"'} if "expect" in given else {}
        its = self.subject.ask(wait, "POST", name, body, **fields)
        self.same(wanted, its if its == WAIT else self.shown(its, wanted))

    plain_1 = rule(name=NAMES, id=st.none())(publish)
    plain_2 = rule(name=NAMES, id=st.none())(publish)
    put = rule(
        name=NAMES, ttl=SOME([0, 0, 2, 6]), delay=SOME([0, 0, 0, 1, 3]), priority=SOME([5, 5, 9]), id=SOME([None, "i"]),
        ahead=SOME([None, None, 1, 1, 2]), key=SOME([None, "k", "k", "l"]),
    )(publish)  # fmt: skip

    def published(self, wait: int, result: Any) -> Any:
        """A status and a body; of a message that was known by its key, or is held, the body alone differs."""
        if isinstance(result, str):
            return status(result)
        mine = [m["seq"] for m in self.model.log if m["body"] == b"%d:" % wait]
        sequence = mine[0] if mine else self.model.put_seq
        return 201, b"%d\n" % sequence if sequence is not None else b"discarded\n"

    # ------------------------------------------------------------ claiming

    @rule(name=SOME(WORKERS), most=SOME([1, 1, 2, 5]), wait=st.booleans())
    def claim(self, name: str, most: int, wait: bool) -> None:
        number, model = self.number(), self.model
        key, most = f"h{number}", 1 if wait else most  # of several that wait for more, any may come first
        refused = model.open(key, name, "worker")
        if refused is not None:
            self.same(status(str(refused)), self.subject.ask(0, "POST", f".consumers/{name}/claim").status)
            return
        model.format(key, "json")
        pieces: list[Any] = []
        while len(pieces) < most and (piece := model.read(number, key, BIG)) != WAIT:
            pieces.append(piece)
        if len(pieces) < most and (pieces or not wait):
            model.cancel(number)
        path = f".consumers/{name}/claim?max={most}&lease=12h" + ("&wait=1h" if wait else "")
        its = self.subject.ask(number, "POST", path)
        if not pieces and wait:
            self.waits[number] = key
            self.same(WAIT, its)
            return
        self.claimed(key, pieces, its)
        self.same(None, None)

    def claimed(self, key: str, pieces: list[Any], reply: Any) -> None:
        """Compare messages that a handle of the model came to; remember their tokens."""
        self.broken = True
        assert reply != WAIT, pieces
        if not pieces:
            assert reply.status == 204, reply
            self.model.close(key)
            return
        wanted, got = [json.loads(piece) for piece in pieces], reply.lines
        for mine, its in zip(wanted, got, strict=True):
            shown = {field: its[field] for field in ("sequence", "stream", "deliveries", "body")}
            assert shown == {field: mine[field] for field in shown}
            theirs = plain_headers(its.get("headers", {}))
            if "reason" in mine["headers"] and mine["headers"]["reason"] is None:
                theirs["reason"] = None  # the model does not tell
            assert theirs == mine["headers"]
        self.tokens[key] = {line["sequence"]: line["token"] for line in got}
        self.broken = False

    def held(self) -> list[tuple[str, int]]:
        return [(key, sequence) for key, tokens in self.tokens.items() for sequence in tokens]

    def settle(self, data: st.DataObject, verb: str) -> None:
        if not self.held():
            return
        key = data.draw(SOME(sorted(self.tokens)))
        chosen = data.draw(st.lists(SOME(sorted(self.tokens[key])), min_size=1, unique=True))
        number = self.tokens[key][chosen[0]].partition(".")[0]
        old = data.draw(SOME([None, None, None, *self.spent[-1:], *self.spent_of(number)]))
        consumer = self.model.handles[key]["c"]
        if consumer["gone"]:
            del self.tokens[key]  # its path is gone, too
            return
        more: dict[str, Any] = {}
        query = ""
        if verb == "nack" and (delay := data.draw(SOME([None, 0, 2]))) is not None:
            more["delay"], query = delay, f"?after={delay}s"
        elif verb == "dead":
            more["reason"], query = "it is broken", "?reason=it%20is%20broken"
        elif verb == "touch":
            query = "?lease=12h"
        of_this = old is not None and old in self.spent_of(number)
        body = "\n".join([self.tokens[key][sequence] for sequence in chosen] + ([old] if old else []))
        mine = "Stale" if of_this else self.model.command(key, verb, chosen, **more)
        wanted = status(str(mine)) if mine is not None else 410 if old else 204
        if mine is None and verb != "touch":
            self.spent += [self.tokens[key].pop(sequence) for sequence in chosen]
            if not self.tokens[key]:
                del self.tokens[key]
                self.model.close(key)
        reply = self.subject.ask(0, "POST", f".consumers/{consumer['name']}/{verb}{query}", body.encode())
        self.same(wanted, reply.status)

    def spent_of(self, number: str) -> list[str]:
        """Tokens of the same claim request that were settled."""
        return [token for token in self.spent if token.partition(".")[0] == number][-2:]

    ack_1 = rule(data=st.data(), verb=st.just("ack"))(settle)
    ack_2 = rule(data=st.data(), verb=st.just("ack"))(settle)
    back = rule(data=st.data(), verb=SOME(["nack", "nack", "release", "dead", "touch"]))(settle)

    @rule(name=NAMES, most=SOME([1, 2, 5]))
    def take(self, name: str, most: int) -> None:
        model, key = self.model, f"h{self.number()}"
        if model.set["deliver"] != "one" or name not in model.names:
            return
        assert model.open(key, f".{name}", "worker") is None
        pieces: list[bytes] = []
        while len(pieces) < most and (piece := model.read(0, key, BIG)) != WAIT:
            assert isinstance(piece, bytes)
            pieces.append(piece)
        if len(pieces) < most:
            model.cancel(0)
        if pieces:
            model.command(key, "ack", model.claims(key))
        model.close(key)
        reply = self.subject.ask(0, "POST", f"{name}/take?max={most}")
        self.same((200, b"".join(pieces)) if pieces else (204, b""), (reply.status, reply.body))

    @rule(name=SOME(WORKERS))
    def peek(self, name: str) -> None:
        consumer = self.model.named(name)
        if consumer is not None:
            self.model.settle_kept()
            reply = self.subject.ask(0, "GET", f".consumers/{name}?format=line")
            self.same(self.model.peek(consumer), reply.body.splitlines())

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.stop(data.draw(SOME(sorted(self.waits))))

    def stop(self, wait: int) -> None:
        if wait in self.waits:
            self.subject.cancel(wait)
            key = self.waits.pop(wait)
            self.model.cancel(wait)
            if key != "publish":
                self.model.close(key)
            self.model.go(None)
            self.same(None, None)

    # ------------------------------------------------------------ names, settings, time

    def make(self, name: str, query: str) -> None:
        over = query.removeprefix("?over=") or None
        there = self.model.named(name)
        if there is None:
            self.model.make_consumer(name, over)
        wanted = 201 if there is None else 200 if over in (None, there["over"]) else 409
        self.same(wanted, self.subject.ask(0, "PUT", f".consumers/{name}{query}").status)

    @rule(data=st.data(), name=SOME(WORKERS), stream=NAMES)
    def churn(self, data: st.DataObject, name: str, stream: str) -> None:
        model, what = self.model, data.draw(SOME(["set", "set", "make", "gone", "clear", "remove", "rule", "rule"]))
        if what == "set":
            self.set(**dict([data.draw(SETTINGS)]))
        elif what == "rule":
            rule, value = data.draw(RULES)
            self.ctl(model.rule(name, **{rule: value}), rule_line(name, rule, value))
        elif what == "make":
            self.make(name, data.draw(SOME(["", "?over=a"])))
        elif what == "gone":
            refused = model.remove_consumer(name)
            wanted = 204 if refused is None else status(str(refused))
            self.same(wanted, self.subject.ask(0, "DELETE", f".consumers/{name}").status)
        elif what == "clear":
            self.ctl(model.clear(stream), f"clear {stream}")
        elif stream in model.names and stream not in [c["over"] for c in model.consumers]:
            model.remove(stream)
            self.same(204, self.subject.ask(0, "DELETE", stream).status)

    @rule(seconds=SOME([1, 1, 2, 5]))
    def tick(self, seconds: int) -> None:
        self.model.tick(seconds)
        for _ in range(seconds):
            self.subject.tick(1)
        self.same(None, None)

    def set(self, **settings: Any) -> None:
        rows = []
        for key, value in settings.items():
            if key == "backoff":
                rows.append(f"backoff {value[0]}s {value[1]}s")
            else:
                rows.append(f"{key} {value}{'s' if key in ('ttl', 'lease', 'dedup') else ''}")
        if "depth" in settings:
            settings["size"] = 0
        self.ctl(self.model.ctl(**settings), *rows)

    def ctl(self, wanted: Any, *rows: str) -> None:
        reply = self.subject.ask(0, "POST", "ctl", "\n".join(rows).encode())
        self.same(204 if wanted is None else status(wanted), reply.status)

    def teardown(self) -> None:
        if self.broken:
            self.subject.abandon()
            return
        for wait in sorted(self.waits):
            self.stop(wait)
        # Those that the end of the group's lease has voided are dropped when they are met.
        self.subject.end(sum(bool(self.model.claims(key)) for key in self.tokens), len(self.tokens))


TestOverHttp = pytest.mark.timeout(3600)(run(OverHttp, 2_000))
