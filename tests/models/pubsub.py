"""The semantics of one group, in lists and dicts: the oracle for the engine, every store and every face.

Slow and obvious on purpose. Every call returns bytes, a number, None, WAIT, or the name of an error; `answers` collects
what waiting calls came to, in the order in which they were answered.
"""

from __future__ import annotations

import json
from typing import Any, NotRequired, TypedDict

WAIT = "wait"
UNSHOWN = "unshown"  # written, and its call waits for the replica
Answer = bytes | int | str | None


class Kept(TypedDict):
    """A message of the log."""

    seq: int
    stream: int
    end: bool
    body: bytes
    at: int
    key: str  # "": it has none
    over: bool  # a newer message of its key came, or it removed its key
    why: str | None  # it is gone; None while it is kept


class Handle(TypedDict):
    of: Any  # the number of a stream, "order" or "cursor"
    pos: int
    rest: bytes
    partial: bytes
    told: set[int]
    select: list[int] | None
    until: int | None
    format: str
    due: bool
    text: str | None
    shown: Kept | None
    place: NotRequired[int]
    since: int  # under `replay key`: it came when this was the next sequence


class Lines(TypedDict):
    """A blocked write of lines, and the unfinished line before and after it."""

    h: Handle
    bodies: list[bytes]
    before: bytes
    after: bytes


class Model:
    """`copied`: under `sync replica`, what is written is shown by `confirm`; until then its calls wait."""

    def __init__(self, copied: bool = False) -> None:
        self.copied = copied
        self.unshown: list[tuple[int, int, list[bytes], int, int, str | None]] = []  # as `append` has them, and when
        self.tail: dict[int, int] = {}  # of each stream: below it all readers had everything, under `replay key`
        self.set: dict[str, Any] = {
            "data": "message",
            "replay": "off",
            "depth": 0,
            "size": 0,
            "ttl": 0,
            "full": "drop-old",
        }
        self.now = 0  # engine seconds
        self.next = 1
        self.closed = 0  # handles with an unfinished line
        self.log: list[Kept] = []
        self.names: dict[str, int] = {}  # name -> stream id
        self.made = 0
        self.handles: dict[str, Handle] = {}
        self.parked: list[tuple[int, str, int]] = []  # (key of the wait, handle key, count)
        self.blocked: list[tuple[int, int, list[bytes], int, str | None]] = []  # as `append` has them
        self.lines: dict[int, Lines] = {}  # by the key of the wait
        self.answers: list[tuple[int, Answer]] = []  # (key of the wait, result)

    # -------------------------------------------------------- what is kept

    def kept(self, stream: int | None = None) -> list[Kept]:
        self.settle_kept()
        return [m for m in self.log if m["why"] is None and stream in (None, m["stream"])]

    def had_by_all(self, stream: int) -> int:
        """All that are open have had what is below."""
        mine = [h["pos"] for h in self.handles.values() if h["of"] in ("order", "cursor", stream)]
        self.tail[stream] = max(self.tail.get(stream, 0), min([self.next, *mine]))
        return self.tail[stream]

    def settle_kept(self) -> None:
        newest = {m["stream"]: m for m in self.log if m["why"] is None and not m["end"] and not self.expired(m)}
        had = {s: self.had_by_all(s) for s in self.names.values()} if self.set["replay"] == "key" else {}
        for m in self.log:
            if m["why"] is not None:
                continue
            if m["stream"] not in self.names.values():
                m["why"] = "removed"
            elif self.expired(m):
                m["why"] = "expired"
            elif self.set["replay"] == "key":
                if m["over"] and m["seq"] < had[m["stream"]]:
                    m["why"] = "had"
            elif self.set["replay"] != "all" and not self.wanted(m):
                last = newest.get(m["stream"])
                if self.set["replay"] == "off" or last is None or m["seq"] < last["seq"]:
                    m["why"] = "had"

    def expired(self, m: Kept) -> bool:
        return bool(self.set["ttl"]) and m["at"] + self.set["ttl"] <= self.now

    def wanted(self, m: Kept) -> bool:
        """Whether a handle open now has still to get it."""
        return any(h["pos"] <= m["seq"] and h["of"] in ("order", "cursor", m["stream"]) for h in self.handles.values())

    def cut(self, m: Kept) -> None:
        m["why"] = "had" if m["end"] else "cut"  # an end mark is no loss to anyone

    def behind(self, h: Handle) -> bool:
        """Whether a reader has to get a report now that messages before it were cut; then it gets it."""
        mine = self.selection(h) if isinstance(h["of"], str) else {h["of"]}
        cuts = {m["seq"] for m in self.log if m["why"] == "cut" and m["stream"] in mine}
        new = {seq for seq in cuts if seq >= h["pos"]} - h["told"]
        h["told"] |= cuts
        if new and isinstance(h["of"], int):
            h["pos"] = max(new) + 1
        return bool(new)

    # -------------------------------------------------------- names and settings

    def create(self, name: str) -> Answer:
        if name in self.names:
            return "Exists"
        self.made += 1
        self.names[name] = self.made
        return None

    def remove(self, name: str) -> Answer:
        if name not in self.names:
            return "NotFound"
        stream = self.names.pop(name)
        for wait, key, _ in list(self.parked):
            if self.over(self.handles[key]):
                self.answer(wait, b"")
        for wait, blocked, *_ in list(self.blocked):
            if blocked == stream:
                self.answer(wait, "NotFound")
        return None

    def rename(self, old: str, new: str) -> Answer:
        if old not in self.names:
            return "NotFound"
        if old != new and new in self.names:
            return "Exists"
        self.names[new] = self.names.pop(old)
        return None

    def ctl(self, **settings: Any) -> Answer:
        self.settle_kept()
        if settings.get("replay", "key") != "key":
            self.tail = {}
        self.set.update(settings)
        for stream in (
            self.names.values() if self.set["full"] == "drop-old" and {"depth", "size", "full"} & set(settings) else ()
        ):
            while not self.fits(stream, 0, 0):
                self.cut(self.kept(stream)[0])
        self.unblock()
        return None

    def clear(self, name: str) -> Answer:
        if name not in self.names:
            return "NotFound"
        for m in self.kept(self.names[name]):
            self.cut(m)
        self.unblock()
        return None

    def drop(self, name: str, seq: int) -> Answer:
        found = [m for m in self.kept(self.names.get(name)) if m["seq"] == seq]
        if name not in self.names or not found:
            return "NotFound"
        found[0]["why"] = "dropped"
        self.unblock()
        return None

    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.unblock()

    # -------------------------------------------------------- writing

    def write(self, wait: int, handle: str, body: bytes) -> Answer:
        h = self.handles[handle]
        if h["of"] not in self.names.values():
            return "NotFound"
        if body and self.set["data"] == "line":
            *lines, rest = (h["partial"] + body).split(b"\n")
            bodies = [line + b"\n" for line in lines]
            result = self.append(wait, h["of"], bodies, len(body)) if lines else len(body)
            if result == WAIT:
                self.lines[wait] = {"h": h, "bodies": bodies, "before": h["partial"], "after": rest}
            if result not in ("TooLong", "StreamFull"):
                h["partial"] = rest
            return WAIT if result == UNSHOWN else result
        result = self.append(wait, h["of"], [body], len(body))
        return WAIT if result == UNSHOWN else result

    def put(self, wait: int, name: str, key: str | None, body: bytes, size: int) -> Answer:
        """A message with a key, "" for none, or with None, messages that are its lines. `size`: bytes of the write."""
        *lines, rest = body.split(b"\n")
        if key is None and (rest or not lines):
            return "BadCommand"
        if name not in self.names:
            return "NotFound"
        bodies = [line + b"\n" for line in lines] if key is None else [body]
        result = self.append(wait, self.names[name], bodies, size, key=key)
        return WAIT if result == UNSHOWN else result

    def replaces(self, stream: int, key: str | None) -> Kept | None:
        """The message that a new one with that key takes the place of."""
        self.settle_kept()
        for m in self.log:
            mine = m["why"] is None and m["stream"] == stream and not m["over"] and not m["end"]
            if self.set["replay"] == "key" and mine and m["key"] == (key or "") and m["seq"] < self.had_by_all(stream):
                return m
        return None

    def append(
        self, wait: int, stream: int, bodies: list[bytes], result: int, again: bool = False, key: str | None = None
    ) -> Answer:
        """`key`: of a message by `.put`; None: of a plain write, of which an empty one is an end mark."""
        depth, size, full = self.set["depth"], self.set["size"], self.set["full"]
        new, total = len(bodies), sum(map(len, bodies))
        if bodies != [b""] or key is not None:
            if full == "block" and not again and any(b[1] == stream for b in self.blocked):
                self.blocked.append((wait, stream, bodies, result, key))
                return WAIT
            if (size and total > size) or (depth and new > depth and full != "drop-old"):
                return "TooLong"
            gone = self.replaces(stream, key) if depth or size else None
            if gone is not None:
                new, total = new - 1, total - len(gone["body"])
            cut_after = full == "drop-old" and self.set["replay"] == "key"  # once it is known what was replaced
            while not cut_after and not self.fits_with_unshown(stream, new, total):
                if full == "reject":
                    return "StreamFull"
                if full == "drop-new":
                    return result
                if full == "block":
                    if not again:
                        self.blocked.append((wait, stream, bodies, result, key))
                    return WAIT
                kept = self.kept(stream)
                if not kept:
                    break
                self.cut(kept[0])
        elif full == "drop-old" and self.set["replay"] != "key":  # an end mark is never refused, and takes room
            while not self.fits_with_unshown(stream, 1, 0) and (kept := self.kept(stream)):
                self.cut(kept[0])
        if self.copied and bodies:
            self.unshown.append((wait, stream, bodies, result, self.now, key))
            return UNSHOWN
        self.show(stream, bodies, self.now, key)
        return result

    def show(self, stream: int, bodies: list[bytes], at: int, key: str | None) -> None:
        for body in bodies:
            m: Kept = {
                "seq": self.next,
                "stream": stream,
                "end": body == b"" and key is None,
                "body": body,
                "at": at,
                "key": key or "",
                "over": body == b"" and bool(key),
                "why": None,
            }
            for older in self.log:  # an end mark stays as long as nothing follows it
                if older["stream"] == stream and (older["end"] or (older["key"] == m["key"] and not m["end"])):
                    older["over"] = True
            self.next += 1
            self.log.append(m)
            self.hand_over()
        while self.set["full"] == "drop-old" and not self.fits(stream, 0, 0):
            self.cut(self.kept(stream)[0])

    def confirm(self) -> None:
        """The replica has all that was written until now: it is shown, and its writers are answered."""
        for _ in range(len(self.unshown)):
            wait, stream, bodies, result, at, key = self.unshown.pop(0)
            if stream in self.names.values():
                self.show(stream, bodies, at, key)
            else:
                self.next += len(bodies)
            self.unblock()
            self.answer(wait, result)

    def fits_with_unshown(self, stream: int, new: int, total: int) -> bool:
        """As `fits`, beside messages that are not shown yet."""
        held = [body for _, written, bodies, *_ in self.unshown for body in bodies if written == stream]
        return self.fits(stream, new + len(held), total + sum(map(len, held)))

    def fits(self, stream: int, new: int, total: int) -> bool:
        kept = self.kept(stream)
        if self.set["depth"] and len(kept) + new > self.set["depth"]:
            return False
        return not (self.set["size"] and sum(len(m["body"]) for m in kept) + total > self.set["size"])

    def unblock(self) -> None:
        for stream in sorted({b[1] for b in self.blocked}):
            while mine := [b for b in self.blocked if b[1] == stream]:
                wait, _, bodies, result, key = mine[0]
                got = self.append(wait, stream, bodies, result, again=True, key=key)
                if got == WAIT:
                    break
                if got == UNSHOWN:
                    self.lines.pop(wait, None)
                    self.blocked = [b for b in self.blocked if b[0] != wait]
                    continue
                if isinstance(got, str):
                    self.undo(wait)
                self.lines.pop(wait, None)
                self.answer(wait, got)

    def answer(self, wait: int, result: Answer) -> None:
        self.parked = [p for p in self.parked if p[0] != wait]
        self.blocked = [b for b in self.blocked if b[0] != wait]
        if wait > 0:
            self.answers.append((wait, result))

    def undo(self, wait: int) -> None:
        """A write of lines was refused: what follows it begins with the unfinished line that was there before."""
        mine = self.lines.pop(wait, None)
        if mine is None:
            return
        before, size = mine["before"], len(mine["after"])
        behind = [w for key, w in self.lines.items() if key > wait and w["h"] is mine["h"]]
        if behind:
            behind[0]["before"] = before + behind[0]["before"][size:]
            behind[0]["bodies"][0] = before + behind[0]["bodies"][0][size:]
        else:
            mine["h"]["partial"] = before + mine["h"]["partial"][size:]

    def cancel(self, wait: int) -> None:
        self.undo(wait)
        self.parked = [p for p in self.parked if p[0] != wait]
        firsts = {b[1]: b[0] for b in reversed(self.blocked)}.values()
        self.blocked = [b for b in self.blocked if b[0] != wait]
        if wait in firsts:  # a writer behind others, or a reader, makes no room by going
            self.unblock()

    # -------------------------------------------------------- reading

    def open(self, key: str, of: str, reads: bool = True) -> Answer:
        """`of`: a stream's name, "order" or "cursor"."""
        if of not in ("order", "cursor") and of not in self.names:
            return "NotFound"
        what = self.names.get(of, of)
        mine = [m for m in self.kept() if what in ("order", "cursor", m["stream"])]
        pos = self.next
        if self.set["replay"] in ("all", "key") and mine:
            pos = mine[0]["seq"]
        if self.set["replay"] == "last" and (told := [m for m in mine if not m["end"]]):
            pos = told[-1]["seq"]
        self.handles[key] = {
            "of": what, "pos": pos if reads else self.next + 10**9, "rest": b"", "partial": b"",
            "told": {m["seq"] for m in self.log if m["why"] == "cut"},
            "select": None, "until": None, "format": "raw", "due": False, "text": None, "shown": None,
            "since": self.since(),
        }  # fmt: skip
        return None

    def close(self, key: str) -> None:
        h = self.handles.pop(key)
        self.parked = [p for p in self.parked if p[1] != key]
        if h["partial"] and h["of"] in self.names.values():
            self.closed += 1
            self.append(-self.closed, h["of"], [h["partial"]], 0)  # it may wait for room, with no writer behind it
        self.unblock()

    def since(self) -> int:
        """Below it those who come now get only the newest message of each key."""
        return self.next if self.set["replay"] == "key" else 0

    def left_out(self, h: Handle, m: Kept) -> bool:
        return m["over"] and m["seq"] < h["since"] and self.set["replay"] == "key"

    def over(self, h: Handle) -> bool:
        """Whether all that a handle could show was removed."""
        of = [h["of"]] if isinstance(h["of"], int) else h["select"]
        return of is not None and not set(of) & set(self.names.values())

    def selection(self, h: Handle) -> set[int]:
        return set(self.names.values()) if h["select"] is None else set(h["select"]) & set(self.names.values())

    def ahead(self, h: Handle) -> Kept | None:
        """What a handle is to get next, or None."""
        for m in self.kept():
            if m["seq"] < h["pos"] or (h["until"] is not None and m["seq"] >= h["until"]):
                continue
            if self.left_out(h, m):
                continue
            if h["of"] == m["stream"]:
                return m
            if not m["end"] and (h["of"] == "order" or (h["of"] == "cursor" and m["stream"] in self.selection(h))):
                return m
        return None

    def read(self, wait: int, key: str, count: int) -> Answer:
        h = self.handles[key]
        if h["text"] is not None:
            text, h["text"] = h["text"][:count], h["text"][count:] or None
            return text
        rest = self.take_rest(h, count)
        if rest is not None:
            return rest + self.take_more(h, count - len(rest)) if rest else b""
        if self.over(h):
            return b""
        if not any(p[1] == key for p in self.parked):
            self.settle_kept()
            if self.behind(h):
                return "FellBehind"
            taken = self.take(h, count)
            if taken is not None:
                self.unblock()
                return taken
        if not any(p[1] == key for p in self.parked):
            h["place"] = wait
        self.parked.append((wait, key, count))
        self.have_had()
        return WAIT

    def take_rest(self, h: Handle, count: int) -> bytes | None:
        """The rest of the message before, or its end, where that is due; None: the next message is."""
        if h["rest"]:
            data, h["rest"] = h["rest"][:count], h["rest"][count:]
            return data
        if h["due"]:
            h["due"] = False
            return b""
        return None

    def have_had(self) -> None:
        """A waiting reader has had everything there is."""
        for _, key, _ in self.parked:
            self.handles[key]["pos"] = max(self.handles[key]["pos"], self.next)

    def take(self, h: Handle, count: int) -> bytes | None:
        """The data of a read, or None: wait."""
        pieces: list[bytes] = []
        coalesce = self.set["data"] == "coalesce" and h["of"] != "cursor"
        while m := self.ahead(h):
            if m["end"] and pieces:
                break
            h["pos"], h["shown"] = m["seq"] + 1, m
            pieces.append(self.shape(h, m))
            if m["end"] or not coalesce or sum(map(len, pieces)) >= count:
                break
        if pieces and m is None:
            h["pos"] = max(h["pos"], self.next)  # it looked to the end, and nothing on the way was for it
        if not pieces and h["until"] is not None and not self.before_until(h):
            h["pos"] = max(h["pos"], min(self.next, h["until"]))
            return b""
        if not pieces:
            return None
        data = b"".join(pieces)
        h["rest"] = data[count:]
        h["due"] = h["format"] == "each" and h["of"] == "cursor"
        return data[:count]

    def take_more(self, h: Handle, count: int) -> bytes:
        """Where bytes are one stream: what is there behind the rest of a message."""
        if not count or self.set["data"] != "coalesce" or h["of"] == "cursor" or self.over(h):
            return b""
        self.settle_kept()
        told = set(h["told"])
        was_at = h["pos"]
        if self.behind(h):  # the next read reports it
            h["told"], h["pos"] = told, was_at
            return b""
        following = self.ahead(h)
        if following is None or following["end"]:
            return b""
        data = self.take(h, count)
        assert data is not None
        self.unblock()
        return data

    def before_until(self, h: Handle) -> bool:
        return h["until"] is not None and max(h["pos"], self.next) < h["until"]

    def shape(self, h: Handle, m: Kept) -> bytes:
        name = next(n for n, s in self.names.items() if s == m["stream"])
        if h["of"] == "order":
            return name.encode() + b"\0"
        if h["of"] != "cursor" or h["format"] in ("raw", "each"):
            return m["body"]
        if h["format"] == "line":
            return m["body"].removesuffix(b"\n") + b"\n"
        if h["format"] == "nul":
            return m["body"] + b"\0"
        return json.dumps({"sequence": m["seq"], "stream": name, "body": m["body"].decode("latin-1")}).encode()

    def hand_over(self) -> None:
        """Answer waiting reads, first come first served: streams, then order, then cursors; one read of each handle
        gets the message, further ones its rest."""
        served = set[str]()
        rank = {"order": 1, "cursor": 2}
        kinds = [(rank.get(self.handles[p[1]]["of"], 0), self.handles[p[1]]["place"], p) for p in self.parked]
        for _, _, (wait, key, count) in sorted(kinds):
            h = self.handles[key]
            self.settle_kept()
            data = self.take_rest(h, count) if key in served else self.take(h, count)
            if data is not None:
                served.add(key)
                self.answer(wait, data)
        self.have_had()
        for wait, key, _ in list(self.parked):
            if self.handles[key]["until"] is not None and not self.before_until(self.handles[key]):
                self.answer(wait, b"")

    # -------------------------------------------------------- cursors

    def command(self, key: str, verb: str, value: Any = None) -> Answer:
        h = self.handles[key]
        if verb == "select":
            if any(name not in self.names for name in value):
                h["text"] = "NotFound"
                return "NotFound"
            h["select"] = [self.names[name] for name in value] or None
        elif verb == "format":
            h["format"], h["rest"], h["due"] = value, b"", False
        elif verb == "until":
            h["until"] = self.next if value == "end" else value + 1
        else:
            self.settle_kept()
            h["since"] = self.since()
            mine = [m for m in self.kept() if m["stream"] in self.selection(h)]
            told = [m for m in mine if not m["end"] and not self.left_out(h, m)]
            if value == "end":
                h["pos"] = self.next
            elif value == "first":
                h["pos"] = mine[0]["seq"] if mine else self.next
            elif value == "last":
                h["pos"] = told[-1]["seq"] if told else self.next
            elif value < 0:
                h["pos"] = told[value]["seq"] if len(told) >= -value else (told[0]["seq"] if told else self.next)
            else:
                h["pos"] = value
            h["until"], h["rest"], h["due"] = None, b"", False
            h["told"] = {m["seq"] for m in self.log if m["why"] == "cut"}
        self.unblock()
        return None
