"""The semantics of work queues in one group, in lists and dicts: the oracle for consumers on every store and face.

Slow and obvious on purpose. Every call returns bytes, a number, None, WAIT, or the name of an error; `answers` collects
what waiting calls came to. After every step whatever can be served is served: readers first come first served, each
with the best message that it may have. Plain readers of pub-sub streams are the other model's matter, pubsub.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypedDict

from mqfs.state.acks import AckState

WAIT = "wait"
LETTER = ("stream", "sequence", "deliveries", "reason", "consumer")  # headers of a dead letter
FOREVER = 1 << 60
SECOND = 10**9
SLACK_NS = 10**8  # of a rate
BY_HAND, BY_BREAKER = -1, -2  # of `paused`, else the second until when
RULES: dict[str, Any] = {  # a rate and a breaker: (number, seconds)
    "ordered": False, "limit": 0, "key_limit": 0, "rate": (0, 0), "breaker": (0, 0), "paused": 0,
}  # fmt: skip
Answer = bytes | int | str | None
Consumer = dict[str, Any]  # see `consumer`
Handle = dict[str, Any]  # see `Model.open`
Unacked = dict[str, Any]  # see `consumer`: its `open`


class Kept(TypedDict):
    """A message of the log."""

    seq: int
    stream: int
    body: bytes
    at: int
    headers: dict[str, str]
    ttl: int
    why: str | None  # it is gone; None while it is kept


class Model:
    def __init__(self, deliver: str) -> None:
        self.set: dict[str, Any] = {
            "deliver": deliver, "ack": "read", "replay": "off", "depth": 0, "size": 0, "ttl": 0, "full": "drop-old",
            "lease": 0, "retries": 5, "backoff": (1, 300), "dead": "dead", "order": "sequence", "dedup": 120,
        }  # fmt: skip
        self.now = 0  # engine seconds
        self.next = 1
        self.log: list[Kept] = []
        self.names: dict[str, int] = {}  # name -> stream id
        self.made = 0
        self.views: dict[str, set[str]] = {}  # name -> patterns: names, and "*" for all
        self.consumers: list[Consumer] = []  # the nameless ones of streams among them
        self.handles: dict[str, Handle] = {}
        # (key of the wait, handle key, count), in the order in which they began to wait
        self.parked: list[tuple[int, str, int]] = []
        # (key of the wait, stream id, body, headers, ttl, id, result, expected newest)
        self.blocked: list[tuple[int, int, bytes, dict[str, str], int, str | None, int]] = []
        self.held: list[dict[str, Any]] = []  # puts that are not due: dicts
        self.schedules: dict[str, dict[str, Any]] = {}  # by id: every, due, seq, stream, body
        self.claimed = 0
        self.alarms = 0  # that were set
        self.ids: dict[str, tuple[int, int]] = {}  # id of a put -> (until, seq)
        self.put_seq: int | None = None  # the result of the last put
        self.answers: list[tuple[int, Answer]] = []  # (key of the wait, result)

    # -------------------------------------------------------- what is kept

    def kept(self, stream: int | None = None) -> list[Kept]:
        return [m for m in self.log if m["why"] is None and stream in (None, m["stream"])]

    def settle_kept(self) -> None:
        newest = {m["stream"]: m for m in self.kept() if not self.expired(m)}
        dead = self.names.get(self.set["dead"])
        for m in self.kept():
            if m["stream"] not in self.names.values():
                m["why"] = "removed"
            elif self.expired(m):
                m["why"] = "expired"
            elif self.wanted(m):
                pass
            elif self.set["deliver"] == "one":
                m["why"] = "had"
            elif self.set["replay"] == "all" or m["stream"] == dead:
                pass
            elif self.set["replay"] == "off" or m["seq"] < newest[m["stream"]]["seq"]:
                m["why"] = "had"

    def wanted(self, m: Kept) -> bool:
        """Whether a consumer has not had it."""
        return any(self.covers(c, m["stream"]) and not had(c, m) for c in self.consumers)

    def expiry(self, m: Kept) -> int:
        ends = [m["at"] + ttl for ttl in (self.set["ttl"], m["ttl"]) if ttl]
        return min(ends, default=FOREVER)

    def expired(self, m: Kept) -> bool:
        return self.expiry(m) <= self.now

    # -------------------------------------------------------- names and settings

    def create(self, name: str) -> Answer:
        if name in self.names:
            return "Exists"
        self.made += 1
        self.names[name] = self.made
        if self.set["deliver"] == "one":
            self.consumers.append(consumer(None, None, self.made, self.next))
        return None

    def remove(self, name: str) -> Answer:
        if name not in self.names:
            return "NotFound"
        stream = self.names.pop(name)
        for c in [c for c in self.consumers if c["stream"] == stream]:
            self.forget(c)
        for wait, blocked, *_ in list(self.blocked):
            if blocked == stream:
                self.answer(wait, "NotFound")
        return self.go(None)

    def rename(self, old: str, new: str) -> Answer:
        if old not in self.names:
            return "NotFound"
        if old != new and new in self.names:
            return "Exists"
        self.names[new] = self.names.pop(old)
        for c in self.consumers:
            if c["over"] == old:
                c["over"] = new
        return self.go(None)

    def bind(self, view: str, pattern: str) -> Answer:
        self.views.setdefault(view, set()).add(pattern)
        return self.go(None)

    def unbind(self, view: str, pattern: str | None = None) -> Answer:
        patterns = self.views.get(view, set())
        if not patterns or (pattern is not None and pattern not in patterns):
            return "NotFound"
        patterns -= {pattern} if pattern is not None else set(patterns)
        return self.go(None)

    def ctl(self, **settings: Any) -> Answer:
        self.set.update(settings)
        if settings.keys() & {"depth", "size", "full"} and self.set["full"] == "drop-old":
            for name, stream in self.names.items():
                while name != self.set["dead"] and not self.fits(stream, 0, 0):
                    self.kept(stream)[0]["why"] = "cut"
        return self.go(None)

    def clear(self, name: str) -> Answer:
        if name not in self.names:
            return "NotFound"
        for m in self.kept(self.names[name]):
            m["why"] = "cut"
        return self.go(None)

    def drop(self, name: str, seq: int) -> Answer:
        found = [m for m in self.kept(self.names.get(name)) if m["seq"] == seq]
        if name not in self.names or not found:
            return "NotFound"
        found[0]["why"] = "dropped"
        return self.go(None)

    def redrive(self, name: str | None = None, count: int = FOREVER) -> Answer:
        dead = self.names.get(self.set["dead"], 0)
        taken = {seq for c in self.consumers if c["stream"] == dead for seq, e in c["open"].items() if e["claim"]}
        for m in self.kept(dead):
            origin = m["headers"].get("stream") if m["seq"] not in taken else None
            if origin in self.names and name in (None, origin) and count > 0:
                count -= 1
                m["why"] = "redriven"
                headers = {key: value for key, value in m["headers"].items() if key not in LETTER}
                self.enter(self.names[origin], m["body"], headers, m["ttl"])
        return self.go(None)

    def tick(self, seconds: int) -> None:
        """Time passes by seconds: puts come due, then leases end and delays are over, then there may be room."""
        for _ in range(seconds):
            self.now += 1
            self.settle_kept()
            for put in sorted(self.held, key=lambda put: (put["due"], put["seq"])):
                if put["due"] <= self.now:
                    self.held.remove(put)
                    if put["stream"] in self.names.values():
                        headers = {**put["headers"], "held": str(put["seq"])}
                        self.enter(put["stream"], put["body"], headers, put["ttl"])
                        self.serve()
            self.run_schedules()
            due = [c for c in self.consumers if c["alarm"] is not None and c["alarm"] <= self.now]
            for c in sorted(due, key=lambda c: c["since"]):
                c["alarm"] = None
                self.wake(c)
            self.go(None)

    def run_schedules(self) -> None:
        """Each that is due: its message, and directly after it the one that waits for the next time."""
        for id, s in sorted(self.schedules.items(), key=lambda item: (item[1]["due"], item[1]["seq"])):
            if s["due"] <= self.now and s["stream"] not in self.names.values():
                del self.schedules[id]
            elif s["due"] <= self.now:
                headers = {"sender": "0", "id": f"{id}@", "held": str(s["seq"])}
                s["due"] += s["every"]
                s["seq"] = self.next + 1
                self.enter(s["stream"], s["body"], headers, 0)
                self.next += 1
                self.serve()

    def schedule(self, id: str, name: str, body: bytes, count: int, every: int) -> Answer:
        """Put a schedule; `count`: what the write returns. The very same stays as it was."""
        if name not in self.names:
            return "NotFound"
        new = {"every": every, "stream": self.names[name], "body": body}
        old = self.schedules.get(id, {})
        if any(old.get(key) != new[key] for key in new):
            self.schedules[id] = {**new, "due": self.now + every, "seq": self.next}
            self.next += 1
        self.put_seq = self.schedules[id]["seq"]
        return self.go(count)

    def unschedule(self, id: str) -> Answer:
        s = self.schedules.get(id)
        if s is None or s["stream"] not in self.names.values():
            return "NotFound"
        del self.schedules[id]
        return self.go(None)

    def wake(self, c: Consumer) -> None:
        """Leases and delays of one consumer that end now, in their order; then its readers are served, those of others
        only where there is a dead letter for them."""
        before = self.next
        while c["timers"] and c["timers"][0][0] <= self.now:
            _, seq = c["timers"].pop(0)
            e = c["open"].get(seq)
            if e and e["claim"] and e["until"] is not None and e["until"] <= self.now:
                self.fail(c, seq, "the lease ran out")
            elif e and not e["claim"] and e["due"] <= self.now:
                e["due"] = 0
        if c["timers"]:
            self.set_alarm(c, c["timers"][0][0])
        self.serve(c if self.next == before else None)

    def set_timer(self, c: Consumer, when: int, seq: int) -> None:
        c["timers"] = sorted([*c["timers"], (when, seq)])
        self.set_alarm(c, when)

    def set_alarm(self, c: Consumer, when: int) -> None:
        """Wake a consumer that has later work; of several at once, the one that has had it longest since its wake."""
        if c["alarm"] is None:
            self.alarms += 1
            c["since"], c["alarm"] = self.alarms, when
        c["alarm"] = min(c["alarm"], when)

    # -------------------------------------------------------- writing

    def write(self, wait: int, key: str, body: bytes) -> Answer:
        stream = self.handles[key]["of"]
        if stream not in self.names.values():
            return "NotFound"
        if not body:
            return 0  # an end mark: no reader here could be given it
        return self.go(self.append(wait, stream, body, {}, 0, None, len(body)))

    def put(
        self,
        wait: int,
        name: str,
        body: bytes,
        count: int,
        *,
        delay: int = 0,
        ttl: int = 0,
        priority: int = 5,
        id: str | None = None,
        headers: dict[str, str] | None = None,
        expect: int | None = None,
    ) -> Answer:
        """`count`: what the write returns."""
        if name not in self.names:
            return "NotFound"
        headers = {"sender": "0", **(headers or {})}
        if priority != 5:
            headers["priority"] = str(priority)
        if ttl:
            headers["ttl"] = "some"
        if id is not None:
            headers["id"] = id
            if self.known(id):
                self.put_seq = self.ids[id][1]
                return count
        if delay:
            put = {"due": self.now + delay, "seq": self.next, "stream": self.names[name], "body": body}
            self.held.append({**put, "headers": headers, "ttl": ttl})
            self.remember(id)
            self.next += 1
            return self.go(count)  # a read may be `until` there
        return self.go(self.append(wait, self.names[name], body, headers, ttl, id, count, expect))

    def newest(self, stream: int) -> int:
        """The sequence of the newest message that the stream keeps; 0: none."""
        return max((m["seq"] for m in self.kept(stream)), default=0)

    def known(self, id: str | None) -> bool:
        return id is not None and id in self.ids and self.ids[id][0] > self.now

    def remember(self, id: str | None) -> None:
        self.put_seq = self.next
        if id is not None and self.set["dedup"]:
            self.ids[id] = (self.now + self.set["dedup"], self.next)

    def append(
        self,
        wait: int,
        stream: int,
        body: bytes,
        headers: dict[str, str],
        ttl: int,
        id: str | None,
        result: int,
        expect: int | None = None,
        again: bool = False,
    ) -> Answer:
        full, parked = self.set["full"], (wait, stream, body, headers, ttl, id, result, expect)
        if expect is not None and expect != self.newest(stream):
            return "Conflict"
        if not again and any(b[1] == stream for b in self.blocked):
            self.put_seq = None
            return self.park(parked)
        if self.set["size"] and len(body) > self.set["size"]:
            return "TooLong"
        self.put_seq = None
        over = [c for c in self.consumers if self.covers(c, stream)]
        stopping = {c["full"] or full for c in over if self.tight(c)}
        if not self.fits(stream, 1, len(body)):
            if full == "drop-new":
                return result
            stopping = {full} if full in ("reject", "block") else stopping
        if "reject" in stopping:
            return "StreamFull"
        if "block" in stopping:
            return WAIT if again else self.park(parked)
        tight = [c for c in over if self.tight(c)]
        if self.known(id):
            return result  # it was accepted while this one waited
        self.remember(id)
        m = self.enter(stream, body, headers, ttl)
        for c in tight:
            if (c["full"] or full) == "drop-new":
                self.done(c, m["seq"])
                continue
            unclaimed = [o for o in self.mine(c) if not c["open"].get(o["seq"], {}).get("claim")]
            for o in unclaimed[: max(len(self.mine(c)) - c["backlog"], 0)]:
                self.done(c, o["seq"])
        self.serve()  # what is cut is counted after the delivery: one that no consumer gets takes no place
        while not self.fits(stream, 0, 0):
            self.kept(stream)[0]["why"] = "cut"
        return result

    def park(self, parked: tuple[Any, ...]) -> Answer:
        self.blocked.append(parked)
        return WAIT

    def tight(self, c: Consumer) -> bool:
        """Whether it has no room for another message."""
        return bool(c["backlog"] and len(self.mine(c)) >= c["backlog"])

    def enter(self, stream: int, body: bytes, headers: dict[str, str], ttl: int) -> Kept:
        """A new message, whatever is there already."""
        m: Kept = {
            "seq": self.next,
            "stream": stream,
            "body": body,
            "at": self.now,
            "headers": headers,
            "ttl": ttl,
            "why": None,
        }
        self.next += 1
        self.log.append(m)
        return m

    def fits(self, stream: int, new: int, size: int) -> bool:
        kept = self.kept(stream)
        if self.set["depth"] and len(kept) + new > self.set["depth"]:
            return False
        return not (self.set["size"] and sum(len(m["body"]) for m in kept) + size > self.set["size"])

    # -------------------------------------------------------- consumers

    def covers(self, c: Consumer, stream: int) -> bool:
        if c["stream"] is not None:
            return bool(c["stream"] == stream)
        if stream == self.names.get(self.set["dead"]) and c["over"] != self.set["dead"]:
            return False  # dead letters are not for who made them
        over = [c["over"], *self.views.get(c["over"], ())]
        return None in over or any(self.names.get(name) == stream for name in self.names if {name, "*"} & {*over})

    def mine(self, c: Consumer) -> list[Kept]:
        """The kept messages that it has not had, claimed or not."""
        return [m for m in self.kept() if self.covers(c, m["stream"]) and not had(c, m)]

    def offer_again(self, c: Consumer, mine: list[Kept]) -> None:
        """Messages that everyone had, after one of their stream that is kept, are for a new consumer, too."""
        first = {m["stream"]: m["seq"] for m in reversed(mine)}
        for m in self.log:
            if m["why"] == "had" and not had(c, m) and m["seq"] > first.get(m["stream"], m["seq"]):
                m["why"] = None

    def named(self, name: str) -> Consumer | None:
        return next((c for c in self.consumers if c["name"] == name), None)

    def make_consumer(
        self,
        name: str,
        over: str | None = None,
        transient: bool = False,
        private: bool = False,
        backlog: int = 0,
        full: str = "",
        touch: bool = False,
        ordered: bool | None = None,
    ) -> Answer:
        c = self.named(name)
        if c is not None and (touch or c["over"] != over):
            return "Exists"
        if c is None:
            c = consumer(name, over, None, self.next)
            mine = [m for m in self.kept() if self.covers(c, m["stream"])]
            if self.set["replay"] == "all":
                c["low"] = 0
            elif self.set["replay"] == "last":
                streams = [s for s in self.names.values() if self.covers(c, s)]
                whole = consumer(None, None, None, 0)  # where its stream or view is not there yet: of all
                shown = [m for m in self.kept() if self.covers(c if streams else whole, m["stream"])]
                c["low"] = max([m["seq"] for m in shown], default=self.next)
            if mine and self.set["replay"] != "off":
                self.offer_again(c, mine)
            self.consumers.append(c)
        c.update(transient=transient, private=private, backlog=backlog, full=full)
        self.set_rules(c, **({} if ordered is None else {"ordered": ordered}))
        return self.go(None)

    # -------------------------------------------------------- rules of consumers

    def rule(self, name: str, **rules: Any) -> Answer:
        """limit, key_limit, rate, breaker, or paused: 0, BY_HAND, or for how many seconds."""
        c = self.named(name)
        if c is None:
            return "NotFound"
        if rules.get("paused", 0) > 0:
            rules["paused"] += self.now
        self.set_rules(c, **rules)
        return self.go(None)

    def set_rules(self, c: Consumer, **rules: Any) -> None:
        if all(c[key] == value for key, value in rules.items()):
            return
        c.update(rules, dead=[])
        c["next_ns"] = min(c["next_ns"], self.now * SECOND + self.interval(c)) if c["rate"][0] else 0

    def interval(self, c: Consumer) -> int:
        return int(c["rate"][1] * SECOND // c["rate"][0])

    def held_back(self, c: Consumer) -> str | None:
        """The rule by which nothing goes now."""
        if c["paused"] < 0 or c["paused"] > self.now:
            if c["paused"] > 0:
                self.set_alarm(c, c["paused"])
            return "breaker" if c["paused"] == BY_BREAKER else "paused"
        if c["limit"] and sum(1 for e in c["open"].values() if e["claim"]) >= c["limit"]:
            return "limit"
        if c["rate"][0]:
            slack = max(SLACK_NS - self.interval(c), 0)
            if c["next_ns"] - slack > self.now * SECOND:
                self.set_alarm(c, -(-(c["next_ns"] - slack) // SECOND))
                return "rate"
        return None

    def may_go(self, c: Consumer, m: Kept) -> bool:
        """Whether it is the next of its key, if that counts."""
        key, most = m["headers"].get("key"), 1 if c["ordered"] else c["key_limit"]
        if key is None or not most:
            return True
        out = {seq: e for seq, e in c["open"].items() if self.message(seq)["headers"].get("key") == key}
        if sum(1 for e in out.values() if e["claim"]) >= most:
            return False
        mine = {o["seq"]: o for o in self.mine(c) if o["headers"].get("key") == key}
        failed = [seq for seq, e in out.items() if not e["claim"] and seq in mine]
        if c["ordered"] and failed:
            return bool(m["seq"] == min(failed))
        free = [o for o in mine.values() if o["seq"] not in out or not (out[o["seq"]]["claim"] or out[o["seq"]]["due"])]
        return all(self.rank(m) <= self.rank(o) for o in free)

    def note_dead(self, c: Consumer) -> None:
        """A message of it became a dead letter."""
        most, seconds = c["breaker"]
        c["dead"] = [at for at in (*c["dead"], self.now) if at > self.now - seconds]
        if most and len(c["dead"]) > most:
            self.set_rules(c, paused=BY_BREAKER)

    def remove_consumer(self, name: str) -> Answer:
        c = self.named(name)
        if c is None:
            return "NotFound"
        if any(e["claim"] for e in c["open"].values()):
            return "Busy"
        self.forget(c)
        return self.go(None)

    def forget(self, c: Consumer) -> None:
        self.consumers.remove(c)
        c["gone"] = True
        c["open"].clear()
        c["alarm"] = None

    def claims(self, key: str) -> list[int]:
        """The sequences that a handle holds, in the order in which it came to them."""
        c = self.handles[key]["c"]
        mine = [(e["place"], seq) for seq, e in c["open"].items() if e["claim"] == key] if c else []
        return [seq for _, seq in sorted(mine)]

    def done(self, c: Consumer, seq: int) -> None:
        c["open"].pop(seq, None)
        c["had"] |= {seq, *(passed for passed, by in c["slots"].items() if by == seq)}

    def pass_over(self, c: Consumer, progress: AckState) -> None:
        """A view shows what it is bound to later from behind the newest message that was claimed. Whether any before
        that, or one that came back while the view did not show it, counts as had is only known from the subject: had by
        now, or with another (`slots`: by sequence, of the other), or not at all."""
        c["slots"] = {}
        for m in self.kept():
            seq, e, covered = m["seq"], c["open"].get(m["seq"]), self.covers(c, m["stream"])
            if not covered and not (e and e["claim"]) and (e or seq < c["newest"]):
                c["passed"].add(seq)
            is_acked = progress.is_acked(seq) and seq not in progress.unacked
            if seq in c["passed"] and is_acked and not (e and e["claim"]):
                c["open"].pop(seq, None)
                c["had"].add(seq)
            if seq in c["passed"] and not had(c, m) and not e:
                for last, slot in progress.unacked.items():
                    if slot.first <= seq < last:
                        c["slots"][seq] = last

    def message(self, seq: int) -> Kept:
        return next(m for m in self.log if m["seq"] == seq)

    def is_letter(self, m: Kept) -> bool:
        return m["stream"] == self.names.get(self.set["dead"])

    def renew(self, c: Consumer, seq: int) -> None:
        lease = self.set["lease"]
        c["open"][seq]["until"] = self.now + lease if lease else None
        if lease:
            self.set_timer(c, self.now + lease, seq)

    def backoff(self, failed: int) -> int:
        least, most = self.set["backoff"]
        return int(min(most, least * 2 ** (failed - 1)))

    def fail(self, c: Consumer, seq: int, reason: str | None, delay: int | None = None, dead: bool = False) -> None:
        """A delivery failed. `delay`: seconds until the next, None: as `backoff` says. `dead`: there is to be none."""
        e, m = c["open"][seq], self.message(seq)
        e["claim"] = None
        if m["why"] not in (None, "had"):  # not with what else may be in its slot: that is not acknowledged yet
            c["open"].pop(seq)
            c["had"].add(seq)
            return
        e["failed"] += 1
        over = dead or (self.set["retries"] and e["failed"] >= self.set["retries"])
        if over and not self.covers(c, m["stream"]) and not self.is_letter(m):  # its view shows it no more
            self.done(c, seq)
            return
        if over and not self.is_letter(m):
            name = next(n for n, s in self.names.items() if s == m["stream"])
            letter: dict[str, Any] = {
                "stream": name,
                "sequence": str(seq),
                "deliveries": str(e["failed"]),
                "reason": reason,
            }
            if c["name"]:
                letter["consumer"] = c["name"]
            self.create(self.set["dead"])
            self.done(c, seq)
            headers = {key: value for key, value in m["headers"].items() if key != "ttl"}  # it is to be looked at
            self.enter(self.names[self.set["dead"]], m["body"], {**headers, **letter}, 0)
            self.note_dead(c)
            return
        delay = self.backoff(e["failed"]) if delay is None else delay
        e["due"] = self.now + delay if delay else 0
        if delay:
            self.set_timer(c, e["due"], seq)

    # -------------------------------------------------------- handles

    def open(self, key: str, name: str, kind: str) -> Answer:
        """`kind`: writer, or taker (of a stream under deliver one); both of a stream. worker: of a consumer, also of
        the nameless one of a stream ("." before its name)."""
        h: Handle = {"kind": kind, "of": None, "c": None, "rest": b"", "due": False, "last": [], "lost": None}
        h.update(select=None, until=None, format="raw")
        if kind == "worker":
            nameless = (c for c in self.consumers if name[:1] == "." and c["stream"] == self.names.get(name[1:], -1))
            h["c"] = c = self.named(name) or next(nameless, None)
            if c is None:
                return "NotFound"
            if c["private"] and any(other["c"] is c for other in self.handles.values()):
                return "Busy"
        else:
            if name not in self.names:
                return "NotFound"
            h["of"] = self.names[name]
            if kind == "taker":
                h["c"] = next(c for c in self.consumers if c["stream"] == h["of"])
        self.handles[key] = h
        return None

    def close(self, key: str) -> Answer:
        for wait in [p[0] for p in self.parked if p[1] == key]:
            self.cancel(wait)
        h, claims, retries = self.handles[key], self.claims(key), self.set["retries"]
        last = [seq for seq in claims if retries and h["c"]["open"][seq]["failed"] + 1 >= retries]
        for seq in last:
            self.fail(h["c"], seq, "its reader ended", delay=0)
            self.serve()
        for seq in claims:
            if seq not in last:
                self.fail(h["c"], seq, "its reader ended", delay=0)
        self.serve()  # the first of all that came back, not of each
        del self.handles[key]
        c = h["c"]
        if c and c["transient"] and not c["gone"] and not any(other["c"] is c for other in self.handles.values()):
            self.forget(c)
        return self.go(None)

    def stop(self, clean: bool, next_after: int) -> None:
        """The server stops, or is killed, and starts again."""
        assert not self.parked
        assert not self.blocked
        self.handles.clear()
        for c in [c for c in self.consumers if c["transient"]]:
            self.forget(c)
        first = len(self.log)
        for c in list(self.consumers):
            c.update(next_ns=0, dead=[])
            for seq, e in sorted(c["open"].items()):
                if e["claim"] and clean:
                    e.update(claim=None, due=0)
                elif e["claim"]:
                    self.fail(c, seq, None, delay=0)
                    e["killed"] = True  # the log has no more of it than its claim, which each start counts
                elif e.get("killed"):
                    e["failed"] -= 1
                    self.fail(c, seq, None, delay=0)
        for i, m in enumerate(reversed(self.log[first:]), 1):
            m["seq"] = next_after - i
        self.next = next_after
        self.go(None)

    # -------------------------------------------------------- reading

    def read(self, wait: int, key: str, count: int) -> Answer:
        h = self.handles[key]
        if h["rest"]:
            data: bytes = h["rest"][:count]
            h["rest"] = h["rest"][count:]
            return data
        if h["due"]:
            h["due"] = False
            return b""
        if h["kind"] == "taker" and self.set["ack"] == "next":
            for seq in self.claims(key):
                self.done(h["c"], seq)
        result: bytes | None = None
        if not any(p[1] == key for p in self.parked):
            result = self.take(key, count)
            if result is None:  # what was acknowledged just now may have made room for a writer
                self.go(None)
                result = self.take(key, count)
        if result is None:
            self.parked.append((wait, key, count))
        return self.go(WAIT if result is None else result)

    def take(self, key: str, count: int) -> bytes | None:
        """The data of a read, or None: wait."""
        h = self.handles[key]
        c = h["c"]
        if c["gone"] or (h["select"] is not None and not set(h["select"]) & set(self.names.values())):
            return b""
        found = sorted((m for m in self.mine(c) if self.available(h, m)), key=self.rank)
        if self.held_back(c):
            found = []
        if not found:
            return b"" if h["until"] is not None and self.next >= h["until"] else None
        m = found[0]
        e = c["open"].setdefault(m["seq"], {"failed": 0, "due": 0})
        self.claimed += 1
        e.update(claim=key, place=self.claimed, killed=False, until=None)
        c["newest"] = max(c["newest"], m["seq"])
        c["passed"].discard(m["seq"])
        by = c["slots"].pop(m["seq"], None)  # what of that slot lies before it stays with it
        c["slots"].update({seq: m["seq"] for seq in c["slots"] if seq < m["seq"] and c["slots"][seq] == by})
        if c["rate"][0]:
            c["next_ns"] = max(c["next_ns"], self.now * SECOND) + self.interval(c)
        h["last"], h["lost"] = [m["seq"]], None
        data = self.shape(h, m, e)
        if h["kind"] == "taker" and self.set["ack"] == "read":
            h["lost"] = e
            self.done(c, m["seq"])
        else:
            self.renew(c, m["seq"])
        h["rest"], h["due"] = data[count:], h["format"] == "each"
        return data[:count]

    def available(self, h: Handle, m: Kept) -> bool:
        e = h["c"]["open"].get(m["seq"])
        if e and (e["claim"] or e["due"]):
            return False
        mine = (h["select"] is None or m["stream"] in h["select"]) and (h["until"] is None or m["seq"] < h["until"])
        return mine and self.may_go(h["c"], m)

    def rank(self, m: Kept) -> tuple[int, int, int]:
        expiry = self.expiry(m) if self.set["order"] == "expiry" else 0
        return (-int(m["headers"].get("priority", "5")), expiry, m["seq"])

    def shape(self, h: Handle, m: Kept, e: Unacked) -> bytes:
        if h["format"] == "line":
            return m["body"].removesuffix(b"\n") + b"\n"
        if h["format"] == "nul":
            return m["body"] + b"\0"
        if h["format"] == "json":
            name = next(n for n, s in self.names.items() if s == m["stream"])
            row = {"sequence": m["seq"], "stream": name, "deliveries": e["failed"] + 1, "body": m["body"].decode()}
            return json.dumps({**row, "headers": m["headers"]}).encode()
        return m["body"]

    def push_back(self, key: str, data: bytes, then_close: bool) -> None:
        """The answer of the last read, a whole message, could not be delivered."""
        h = self.handles[key]
        if then_close and h["lost"] is not None:  # ack read: it was not handed to anyone
            (seq,), m = h["last"], self.message(h["last"][0])
            h["c"]["had"].discard(seq)
            h["c"]["open"][seq] = h["lost"]
            if m["why"] == "had":
                m["why"] = None
        h["rest"] = data

    def go(self, result: Answer) -> Answer:
        """Serve whatever can be served, then let writers go on for whom there is room, and so on."""
        self.serve()
        while self.unblock():
            self.serve()
        return result

    def serve(self, only: Consumer | None = None) -> None:
        """The reads that wait: takers of a stream first, then workers, each in the order in which they came. `only`:
        those of this consumer."""
        self.settle_kept()
        for wait, key, count in sorted(self.parked, key=lambda read: self.handles[read[1]]["c"]["stream"] is None):
            data = self.take(key, count) if only is None or self.handles[key]["c"] is only else None
            if data is not None:
                self.answer(wait, data)
                self.settle_kept()

    def unblock(self) -> bool:
        for stream in sorted({b[1] for b in self.blocked}):
            blocked = next(b for b in self.blocked if b[1] == stream)
            wait, got = blocked[0], self.append(*blocked, again=True)
            if got != WAIT:
                self.answer(wait, got)
                return True
        return False

    def answer(self, wait: int, result: Answer) -> None:
        self.cancel(wait)
        self.answers.append((wait, result))

    def cancel(self, wait: int) -> None:
        self.parked = [p for p in self.parked if p[0] != wait]
        self.blocked = [b for b in self.blocked if b[0] != wait]

    # -------------------------------------------------------- commands

    def command(
        self, key: str, verb: str, seqs: Sequence[int] = (), *, delay: int | None = None, reason: str | None = None
    ) -> Answer:
        """ack, nack, release, dead, touch; without sequences: of the last read."""
        h = self.handles[key]
        c, claimed = h["c"], self.claims(key)
        asked = list(seqs) or h["last"]
        if c["gone"] or not asked or any(seq not in claimed for seq in asked):
            return "Stale"
        if verb == "dead" and any(self.is_letter(self.message(seq)) for seq in asked):
            return "BadCommand"
        if verb != "touch" and set(h["last"]) & set(asked):
            h["rest"], h["due"] = b"", False
        for seq in asked:
            e = c["open"][seq]
            if verb == "ack":
                self.done(c, seq)
            elif verb == "nack":
                self.fail(c, seq, None, delay)
            elif verb == "dead":
                self.fail(c, seq, reason, dead=True)
            elif verb == "release":
                e.update(claim=None, due=0)
            else:
                self.renew(c, seq)
            if verb in ("nack", "dead"):  # one after the other; the others all at once
                self.serve()
        return self.go(None)

    def format(self, key: str, word: str) -> Answer:
        h = self.handles[key]
        if h["c"]["gone"]:
            return "Stale"
        h["format"], h["rest"], h["due"] = word, b"", False
        return None

    def select(self, key: str, names: Sequence[str]) -> Answer:
        if self.handles[key]["c"]["gone"]:
            return "Stale"
        if any(name not in self.names for name in names):
            return "NotFound"
        self.handles[key]["select"] = [self.names[name] for name in names] or None
        return None

    def until(self, key: str, bound: Any) -> Answer:
        if self.handles[key]["c"]["gone"]:
            return "Stale"
        self.handles[key]["until"] = self.next if bound == "end" else bound + 1
        return None

    def seek(self, key: str, where: Any) -> Answer:
        """first, last, end, a sequence, or -N. Everything the consumer knew is forgotten, all claims are void."""
        h = self.handles[key]
        c = h["c"]
        if c["gone"]:
            return "Stale"
        if c["stream"] is not None:
            return "BadCommand"
        mine = [m["seq"] for m in self.kept() if self.covers(c, m["stream"])]
        if where == "end" or (not mine and not (isinstance(where, int) and where >= 0)):
            c["low"] = self.next
        elif where in ("first", "last"):
            c["low"] = mine[0 if where == "first" else -1]
        else:
            c["low"] = where if where >= 0 else mine[max(where, -len(mine))]
        c["had"], h["until"], h["rest"], h["due"] = set(), None, b"", False
        c.update(newest=0, passed=set(), slots={})
        c["open"].clear()
        c["timers"] = []
        return self.go(None)

    # -------------------------------------------------------- what is shown

    def peek(self, c: Consumer) -> list[bytes]:
        """What a read-only open of a consumer, or of a stream under deliver one, shows: what waits, due or not."""
        return [m["body"] for m in self.mine(c) if not c["open"].get(m["seq"], {}).get("claim")]

    def stats(self, c: Consumer) -> dict[str, Any]:
        claimed = sum(1 for e in c["open"].values() if e["claim"])
        mine = [c["open"].get(m["seq"], {"claim": None, "due": 0}) for m in self.mine(c)]
        delayed = sum(1 for e in mine if not e["claim"] and e["due"])
        waiting = sum(1 for e in mine if not e["claim"])
        handles = [key for key, h in self.handles.items() if h["c"] is c]
        parked = sum(1 for p in self.parked if p[1] in handles)
        row = {"claimed": claimed, "waiting": waiting, "delayed": delayed, "handles": len(handles), "parked": parked}
        why = self.held_back(c)
        return {**row, "held_back": why} if why else row

    def dump(self, name: str) -> list[tuple[int, bytes, dict[str, str]]]:
        """All that a stream keeps: (sequence, body, headers)."""
        return [(m["seq"], m["body"], m["headers"]) for m in self.kept(self.names[name])]


def consumer(name: str | None, over: str | None, stream: int | None, low: int) -> Consumer:
    """Over a stream by number (the nameless one of deliver one), one or a view by name, or over the whole group."""
    return {
        "name": name, "over": over, "stream": stream, "low": low, "had": set(),
        "newest": 0, "passed": set(), "slots": {},  # under a view: see `pass_over`
        "timers": [],  # (when, seq) of leases and delays, perhaps outdated
        "alarm": None, "since": 0,  # when it is woken, also where nothing is to be done any more
        "open": {},  # seq -> failed, due, claim (handle key or None), until (end of the lease or None)
        "transient": False, "private": False, "backlog": 0, "full": "", "gone": False,
        **RULES, "next_ns": 0, "dead": [],
    }  # fmt: skip


def had(c: Consumer, m: Kept) -> bool:
    return m["seq"] < c["low"] or m["seq"] in c["had"]
