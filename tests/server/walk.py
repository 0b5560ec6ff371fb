"""Every kind of request, of every face: what the walk of test_walk.py asks, and of what there is much.

The kinds come from the program's own tables. One that has no sample here fails, so that a new one is not forgotten.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mqfs import limits
from mqfs.engine.core.portions import exhaust
from mqfs.engine.language import settings
from mqfs.engine.nodes import FOLDERS, META_FILES
from mqfs.engine.tree.tree import Tree
from mqfs.http.dialects import ntfy, qpubs
from mqfs.http.routes import TREE
from mqfs.model import User
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import NOFID, NONUNAME, Fcall
from mqfs.ninep.codec.wire import Framer, decode, encode
from mqfs.ninep.server import linux_operations, operations
from mqfs.store.store import DiskStore
from tests.support.batches import frame
from tests.support.clock import ManualClock
from tests.support.eventually import HANG_S

ROOT = User(0, 0, frozenset(), 1, "")
ANSWER_S = 0.02  # without an answer by then a request waits for something that does not come

# ---------------------------------------------------------------- of what there is much


def put(tree: Tree, group: Any, **keys: object) -> None:
    handle = tree.open(ROOT, tree.walk(ROOT, group, ".put"), os.O_RDWR)
    handle.write(json.dumps({"stream": "s", **keys}).encode() + b" x")
    handle.close()


def streams(tree: Tree, group: Any, count: int) -> None:
    batch = tree.open(ROOT, tree.walk(ROOT, group, ".batch"), os.O_RDWR)
    for begin in range(0, count, 1_000):
        names = [f"t{number * 7_919 % count}" for number in range(begin, min(begin + 1_000, count))]
        for name in dict.fromkeys(names):
            if name not in group.streams:
                group.make_stream(name, 0o600, ROOT)
        batch.write(b"".join(frame(name, b"x") for name in names))
    batch.close()


def consumers(tree: Tree, group: Any, count: int) -> None:
    for number in range(min(count, limits.CONSUMERS - 10)):
        exhaust(group.consumers.make(f"c{number}", ROOT, 0o600))


def views(tree: Tree, group: Any, count: int) -> None:
    count = min(count, limits.PATTERNS - 10)
    for begin in range(0, count, 500):
        lines(tree, group, *(f"bind v{number} a.{number}.*" for number in range(begin, min(begin + 500, count))))


def ids(tree: Tree, group: Any, count: int) -> None:
    for number in range(count):
        put(tree, group, id=f"id{number}")


def delayed(tree: Tree, group: Any, count: int) -> None:
    for _ in range(count):
        put(tree, group, delay="7d")


def messages(tree: Tree, group: Any, count: int) -> None:
    """Ten times as many."""
    batch = tree.open(ROOT, tree.walk(ROOT, group, ".batch"), os.O_RDWR)
    for _ in range(0, count, 1_000):
        batch.write(frame("s", b"x" * 10) * 10_000)
    batch.close()


def groups(tree: Tree, group: Any, count: int) -> None:
    for number in range(min(count // 10, limits.GROUPS // 2 - 20)):
        tree.mkdir(ROOT, group, f"g{number}", 0o700)


MUCH: dict[str, Callable[[Tree, Any, int], None]] = {
    made.__name__: made for made in (streams, consumers, views, ids, delayed, messages, groups)
}


def lines(tree: Tree, group: Any, *some: str) -> None:
    handle = tree.open(ROOT, tree.walk(ROOT, group, "ctl"), os.O_WRONLY)
    handle.write("".join(f"{line}\n" for line in some).encode())
    handle.close()


def build(folder: Path, count: int) -> None:
    """A store with a group for each; none but root may do anything there. Of now: nothing is due, and no id too old."""
    store = DiskStore(str(folder))
    tree = Tree(store, ManualClock(time.time_ns()), owner=ROOT, defaults=RESTORED)
    for name, make in MUCH.items():
        tree.mkdir(ROOT, tree.root, name, 0o700)
        group: Any = tree.root.groups[name]
        group.make_stream("s", 0o600, ROOT)
        for other in ("other", "spare", "gone"):
            group.make_stream(other, 0o600, ROOT)
        lines(tree, group, "bind view s", "consumer mail s")
        make(tree, group, count)
    tree.close()
    store.close()


# ---------------------------------------------------------------- what is asked

RESTORED = ["data message", "replay all", "depth 0", "ttl 0", "deliver all", "sync off", "keep disk", "dedup 7d",
            "idle 0", "protect off", "sender off", "words . * #", "full drop-old", "order sequence"]  # fmt: skip

VALUES = {
    "depth": ["5", "0"], "ttl": ["6d", "0"], "sync": ["1s", "off"], "lease": ["1m", "0"], "retries": ["3", "5"],
    "dead": ["dead2", "dead"], "dedup": ["6d", "7d"], "idle": ["6d", "0"], "backoff": ["1s 2m"],
    "words": [": + #", ". * #"],
}  # fmt: skip
ACTIONS = {
    "eof": ["eof s"], "drop": ["drop s 1"], "redrive": ["redrive"], "consumer": ["consumer new", "consumer new2 s"],
    "remove": ["remove new"], "bind": ["bind new t1", 'bind new2 prefix:"t" payload_contains("y")', "bind new a.#"],
    "unbind": ["unbind new"], "clear": ["clear s", "clear"], "limit": ["limit mail 5 key", "limit mail 0"],
    "rate": ["rate mail 9/s", "rate mail 0"], "pause": ["pause mail 1h"], "resume": ["resume mail"],
    "breaker": ["breaker mail 9/1h", "breaker mail 0"], "unschedule": ["unschedule none"],
}  # fmt: skip
CURSOR = {
    "seek": ["seek first", "seek last", "seek end", "seek 5", "seek -10", "seek @1", "seek -1h"],
    "select": ["select s other", 'select program prefix:"" payload_contains("y")'], "cover": ["cover #"],
    "until": ["until end"], "format": ["format json", "format record", "format each"], "info": ["info"],
    "measure": ["measure 1000"], "streams": ["streams"], "selected": ["selected"],
}  # fmt: skip
CONSUMER = ["info", "seek first", "seek end", "until end", "format json", "ack", "nack", "release", "touch", "select #"]
TXN = ["commit a.1 p", "abort p", "forget p", "commit a.2 " + "p " * 400_000, "forget " + "p " * 400_000]
OPTIONS = {
    "after": "s", "type": "stream", "detail": "yes", "select": "s", "since": "first", "count": "5", "bytes": "100",
    "until": "end", "wait": "10ms", "follow": "yes", "strict": "yes", "format": "json", "data": "raw",
    "last_event_id": "1", "seq": "1", "create": "yes", "delay": "1d", "at": "4000000000", "ttl": "1d", "priority": "3",
    "single": "yes", "id": "x", "h-": "y", "streams": "*", "over": "s", "transient": "yes", "private": "yes",
    "memory": "yes", "backlog": "5", "full": "reject", "max": "5", "lease": "10s", "reason": "x", "name": "#",
    "value": "x", "*": "", "key": "k", "every": "1d&id=y", "cron": "0 5 1 1 *&id=z", "expect": "0", "reply": "10ms",
    "order": "key",
}  # fmt: skip


class Ask(NamedTuple):
    """A request: `perform` sends it as a user, and takes its answer."""

    kind: str
    perform: Callable[[Path, int], None]


@contextmanager
def acting(uid: int) -> Iterator[None]:
    """Sockets that are connected now are that user's."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def answered(sock: socket.socket, seconds: float) -> bytes:
    """The bytes that come within `seconds`; empty where none do."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return sock.recv(1 << 20) if poll.poll(seconds * 1_000) else b""


def connected(address: Path, uid: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_S)
    with acting(uid):
        sock.connect(str(address))
    return sock


def http(kind: str, method: str, path: str, body: bytes = b"", *more: str, at: str = "web") -> Ask:
    def perform(folder: Path, uid: int) -> None:
        head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: localhost", *more))
        with connected(folder / at, uid) as sock, suppress(OSError):
            sock.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            while answered(sock, ANSWER_S):
                pass

    return Ask(f"HTTP {kind}", perform)


def http_requests(group: str) -> Iterator[Ask]:
    for table, at, home in ((qpubs.beside(TREE), "web", f"/{group}/"), (ntfy.table("x"), f"ntfy-{group}", "/")):
        for route in table.routes:
            path = route.path.replace("/shop/", home).replace("/shop", home[:-1]).replace("orders", "s")
            path = path.replace("TOPIC", "s" if route.kind != "topics" else "s,other")
            for old, new in (("new stream", "/fresh"), ("new group", "fresh/"), ("new consumer", "/fresh")):
                if route.kind == old:
                    path = path.rpartition("/")[0] + new if old != "new group" else home + new
            lines_of = "Content-Type: application/x-ndjson"
            body = route.example.replace("orders", "s").encode() if route.body else b""
            if route.method == "DELETE" and route.kind == "stream":
                path = f"{home}gone"
            kind = f"{route.method} {route.kind} {route.verb}".strip()
            yield http(kind, route.method, path, body, lines_of, at=at)
            for option in route.options:
                query = f"{option.replace('h-', 'h-a')}={OPTIONS[option]}" if option != "*" else "poll=1&since=all"
                yield http(f"{kind} ?{option}", route.method, f"{path}?{query}", body, lines_of, at=at)


class Nine:
    """A connection of 9P on which fids stand for what messages are about."""

    def __init__(self, folder: Path, uid: int, group: str, *, linux: bool) -> None:
        self.socket, self.linux = connected(folder / "s", uid), linux
        self._framer = Framer(limits.MSIZE_MOST)
        self.ask(m.Tversion(0xFFFF, limits.MSIZE_MOST, "9P2000.L" if linux else "9P2000"))
        self.ask(m.Tattach(1, 0, NOFID, "", "", NONUNAME))
        for fid, names in (
            (1, ()),
            (2, ("s",)),
            (3, ()),
            (4, ("s",)),
            (5, ("other",)),
            (6, (".consumers",)),
            (7, ("spare",)),
        ):
            self.ask(m.Twalk(1, 0, fid, (group, *names)))
        for fid, flags in ((3, 0), (4, 0), (5, 1)):
            self.ask(self.opened(fid, flags))

    def opened(self, fid: int, flags: int) -> Fcall:
        return m.Tlopen(1, fid, flags) if self.linux else m.Topen(1, fid, flags)

    def ask(self, *requests: Fcall) -> Any:
        """The last answer, or None."""
        answer = None
        for request in requests:
            self.socket.sendall(encode(request, self.linux))
            answer = None
            while answer is None and (data := answered(self.socket, ANSWER_S)):
                for one in self._framer.frames(data):
                    answer = decode(*one, self.linux)
        return answer


_32, _64 = 2**32 - 1, 2**64 - 1
RENAMED = m.Dir(0xFFFF, _32, m.Qid(0xFF, _32, _64), _32, _32, _32, _64, "other", "", "", "")  # all else as it is
CLASSIC: dict[type[Any], Sequence[Fcall]] = {
    m.Tauth: [m.Tauth(1, 9, "x", "", NONUNAME)],
    m.Tattach: [m.Tattach(1, 9, NOFID, "", "", NONUNAME)],
    m.Twalk: [m.Twalk(1, 1, 9, ("s",)), m.Twalk(1, 1, 8, ("none",))],
    m.Topen: [m.Topen(1, 1, 0), m.Topen(1, 2, 2)],
    m.Tcreate: [m.Tcreate(1, 1, "made", 0o600, 0)],
    m.Tclunk: [m.Tclunk(1, 4)],
    m.Tremove: [m.Tremove(1, 7)],
    m.Tstat: [m.Tstat(1, 1), m.Tstat(1, 2)],
    m.Twstat: [m.Twstat(1, 5, RENAMED), m.Twstat(1, 2, RENAMED)],
    m.Tread: [m.Tread(1, 3, 0, limits.MSIZE_MOST), m.Tread(1, 4, 0, limits.MSIZE_MOST)],
    m.Twrite: [m.Twrite(1, 5, 0, b"x")],
    m.Tflush: [m.Tflush(2, 1)],
    m.Tversion: [m.Tversion(0xFFFF, 8_192, "9P2000")],
}
LINUX: dict[type[Any], Sequence[Fcall]] = {
    m.Tstatfs: [m.Tstatfs(1, 1)],
    m.Tlopen: [m.Tlopen(1, 1, 0), m.Tlopen(1, 2, 0)],
    m.Tlcreate: [m.Tlcreate(1, 1, "made2", 1, 0o600, 0)],
    m.Tsymlink: [m.Tsymlink(1, 1, "a", "b", 0)],
    m.Tmknod: [m.Tmknod(1, 1, "made3", 0o100600, 0, 0, 0)],
    m.Trename: [m.Trename(1, 2, 1, "s2"), m.Trename(1, 2, 1, "s")],
    m.Treadlink: [m.Treadlink(1, 2)],
    m.Tgetattr: [m.Tgetattr(1, 1, 0x7FF), m.Tgetattr(1, 2, 0x7FF)],
    m.Tsetattr: [m.Tsetattr(1, 2, 1, 0o600, 0, 0, 0, 0, 0, 0, 0), m.Tsetattr(1, 1, 1, 0o700, 0, 0, 0, 0, 0, 0, 0)],
    m.Txattrwalk: [m.Txattrwalk(1, 2, 9, "user.x")],
    m.Txattrcreate: [m.Txattrcreate(1, 2, "user.x", 1, 0)],
    m.Treaddir: [m.Treaddir(1, 3, 0, limits.MSIZE_MOST)],
    m.Tfsync: [m.Tfsync(1, 5)],
    m.Tlock: [m.Tlock(1, 5, 1, 0, 0, 1, 1, "x")],
    m.Tgetlock: [m.Tgetlock(1, 5, 1, 0, 1, 1, "x")],
    m.Tlink: [m.Tlink(1, 1, 2, "l")],
    m.Tmkdir: [m.Tmkdir(1, 1, "dir", 0o700, 0)],
    m.Trenameat: [m.Trenameat(1, 1, "dir", 1, "dir2")],
    m.Tunlinkat: [m.Tunlinkat(1, 1, "dir2", 0x200), m.Tunlinkat(1, 1, "other", 0)],
}


def ninep_requests(group: str) -> Iterator[Ask]:
    inline: dict[type[Any], object] = dict.fromkeys((m.Tread, m.Twrite, m.Tflush, m.Tversion))
    for linux, samples, handled in (
        (False, CLASSIC, {**operations.OPERATIONS, **inline}),
        (True, LINUX, linux_operations.OPERATIONS),
    ):
        missing = handled.keys() - samples.keys()
        assert not missing, f"requests of 9P without a sample in tests/server/walk.py: {missing}"
        for kind, requests in samples.items():
            for number, request in enumerate(requests):
                yield ninep(f"{kind.__name__} {number}", group, request, linux=linux)


def ninep(kind: str, group: str, request: Fcall, *, linux: bool) -> Ask:
    def perform(folder: Path, uid: int) -> None:
        nine = Nine(folder, uid, group, linux=linux)
        with nine.socket:
            nine.ask(request)

    return Ask(f"9P {kind}", perform)


def file(kind: str, group: str, path: str, *data: str | bytes, flags: int = 2, read: bool = True) -> Ask:
    """Open a file of the group's own, write to it, read from it."""

    def perform(folder: Path, uid: int) -> None:
        nine = Nine(folder, uid, group, linux=False)
        with nine.socket:
            nine.ask(m.Twalk(1, 1, 9, tuple(path.split("/"))))
            nine.ask(m.Topen(1, 9, flags))
            for one in data:
                nine.ask(m.Twrite(1, 9, 0, one.encode() if isinstance(one, str) else one))
            if read:
                nine.ask(m.Tread(1, 9, 0, limits.MSIZE_MOST - 100))

    return Ask(f"file {path} {kind}".strip(), perform)


def file_requests(group: str) -> Iterator[Ask]:
    samples: dict[str, Sequence[str | bytes]] = {
        "ctl": [], "order": [], ".cursor": [], ".put": ['{"stream":"s"} x', '{"stream":"none"} x', "{" * 60_000],
        ".batch": [frame("s", b"x"), frame("s", b"") * 100_000 + b"\0", frame("none", b"") * 80_000],
        ".stats": [], ".who": [], ".errors": [],
    }  # fmt: skip
    assert META_FILES.keys() <= samples.keys(), f"without a sample: {META_FILES.keys() - samples.keys()}"
    for path, some in samples.items():
        yield file("read", group, path, flags=0)
        for number, one in enumerate(some):
            yield file(f"write {number}", group, path, one)
    for path in FOLDERS:
        yield file("list", group, path, flags=0)
    yield file("read", group, ".kept/s", flags=0)
    for flags in (0, 2):
        yield file(f"open {flags}", group, ".consumers/mail", flags=flags)
    for line in CONSUMER:
        yield file(line, group, ".consumers/mail", f"{line}\n")
    for line in TXN:
        yield file(line[:12], group, ".txn/ctl", line)
    for some in CURSOR.values():
        for line in some:
            yield file(line, group, ".cursor", f"{line}\n")
            yield file(f"seek first, {line}, until end", group, ".cursor", f"seek first\n{line}\nuntil end\n")
    yield file("read", group, "view", flags=0)
    for key, row in settings.SETTINGS.items():
        yield from (ctl(group, f"{key} {value}") for value in row.choices or VALUES[key])
        yield from (ctl(group, line) for line in RESTORED if line.startswith(f"{key} "))
    assert settings.USAGE.keys() == ACTIONS.keys(), "actions of ctl without a sample"
    for some in ACTIONS.values():
        yield from (ctl(group, line) for line in some)
    yield file("many lines", group, "ctl", "clear s\n" * 8_000)


def ctl(group: str, line: str) -> Ask:
    return file(line, group, "ctl", f"{line}\n", read=False)


LATE = ("HTTP DELETE", "file ctl replay", "file ctl clear", "file ctl many", "file ctl depth", "9P Tversion")


def requests_of(group: str, *, with_options: bool) -> list[Ask]:
    """All requests, those that remove things last. Each option of HTTP by itself, too, or none."""
    found = [*ninep_requests(group), *file_requests(group), *http_requests(group)]
    asked = [ask for ask in found if with_options or "?" not in ask.kind]
    return sorted(asked, key=lambda ask: ask.kind.startswith(LATE))
