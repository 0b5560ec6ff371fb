"""Clients of several servers of which one is the primary, and what each of them heard.

Each client is a thread with a connection of its own. One whose call takes longer than PATIENCE_S is replaced, and its
answer still counts: an old primary may say `done` long after another took over.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mqfs.errors import Disconnected, DiskFull, FellBehind, MqfsError, ReadOnly, StreamFull
from mqfs.ninep.client.connection import Client, File, connect
from tests.replica.nodes import ClusterNode
from tests.support.batches import frame

PATIENCE_S = 4.0
REFUSALS = (DiskFull, StreamFull, ReadOnly)  # nothing was written
GONE = (MqfsError, OSError, EOFError)
SETTINGS = b"replay all\nsync replica\n"
STREAMS = ("s0", "s1", "batches", "units")


class Call(NamedTuple):
    """One call: `body` of a message or a job, when it began and ended, and which run of which server was asked."""

    body: bytes
    began: float
    ended: float
    outcome: str  # ok, failed, unknown
    run: str


class Delivery(NamedTuple):
    body: bytes
    asked: float  # when its read began
    came: float
    count: int  # of its deliveries, as the server says
    run: str


class Order(NamedTuple):
    """How a job was put."""

    priority: int
    delay_s: float


class Return(NamedTuple):
    """A job that its receiver gave back: `delay_s` for a failed one, none for one that was released."""

    call: Call
    count: int  # of the delivery that it ends
    delay_s: float | None


class Load:
    """All clients, and what they know."""

    def __init__(self, nodes: Sequence[ClusterNode], seed: int, *, unit: int = 20) -> None:
        self.nodes, self.unit, self.pick = nodes, unit, random.Random(seed)
        self.ending, self.draining = threading.Event(), threading.Event()
        self.calls: list[Call] = []  # list.append is atomic
        self.runs: dict[str, float] = {}  # when each run answered first
        self.run = ""  # that answered last
        self.units: dict[bytes, tuple[str, list[bytes]]] = {}  # id of a transaction: outcome, bodies
        self.seen: dict[int, bytes] = {}
        self.faults: list[str] = []
        self.puts: list[Call] = []
        self.orders: dict[bytes, Order] = {}
        self.returns: list[Return] = []
        self.deliveries: list[Delivery] = []
        self.acks: list[Call] = []
        self.clients: list[LoadClient] = []
        self._number = 0

    def start(self, *kinds: type[LoadClient]) -> None:
        for kind in kinds:
            self._start(kind)

    def _start(self, kind: type[LoadClient]) -> None:
        self._number += 1
        client = kind(self, self._number)
        self.clients.append(client)
        client.start()

    @contextlib.contextmanager
    def connect(self, first: int) -> Iterator[tuple[Client, str]]:
        """A connection to the primary, or to a server that believes it is. Raises Disconnected where none does."""
        for number in range(len(self.nodes)):
            node = self.nodes[(first + number) % len(self.nodes)]
            runs = node.runs
            try:
                tree = connect(node.address, timeout=2.0)
            except (*GONE, TimeoutError):
                continue
            with tree:
                if node.runs != runs:
                    continue  # which of the two it is, is not known
                yield tree, f"{node.folder.name}{runs}"
            return
        raise Disconnected("no server is the primary")

    def prepare(self) -> None:
        """Make the groups; the first primary serves."""
        with self.connect(0) as (tree, _):
            for group, streams in (("log", STREAMS), ("work", ("q",))):
                tree.mkdir(group)
                tree.open(f"{group}/ctl", "w").write(SETTINGS)
                for stream in streams:
                    tree.create(f"{group}/{stream}").close()
            tree.open("work/ctl", "w").write(b"consumer w\nbackoff 100ms 1s\nretries 1000\n")

    def watch(self) -> None:
        """Replace clients that wait too long."""
        for client in list(self.clients):
            since = client.busy_since
            if since is not None and time.monotonic() - since > PATIENCE_S and not client.replaced:
                client.replaced = True
                self._start(type(client))

    @property
    def acknowledged(self) -> int:
        return sum(client.acknowledged for client in list(self.clients))

    def is_drained(self) -> bool:
        """Whether each job is acknowledged that was put, or that anybody was given."""
        acked = {call.body for call in list(self.acks) if call.outcome != "failed"}
        there = {call.body for call in list(self.puts) if call.outcome == "ok"}
        return there.union(one.body for one in list(self.deliveries)) <= acked

    def end(self, kinds: tuple[type[LoadClient], ...]) -> None:
        for client in list(self.clients):
            if isinstance(client, kinds):
                client.replaced = True
        for client in list(self.clients):
            if isinstance(client, kinds):
                client.join(60)
                if client.is_alive():
                    self.faults.append(f"{client.name}: its call is never answered")


class LoadClient(threading.Thread):
    """One client. `serve` runs with a connection until an error or the end."""

    def __init__(self, load: Load, number: int) -> None:
        super().__init__(name=f"{type(self).__name__} {number}", daemon=True)
        self.load, self.number, self.pick = load, number, random.Random(load.pick.random())
        self.busy_since: float | None = None
        self.replaced = False
        self.sent = self.acknowledged = 0

    @property
    def continues(self) -> bool:
        return not self.replaced

    def run(self) -> None:
        while self.continues:
            try:
                with self.load.connect(self.pick.randrange(3)) as (tree, run):
                    self.serve(tree, run)
            except (*GONE, TimeoutError):
                time.sleep(0.05)
            except Exception as error:
                self.load.faults.append(f"{self.name}: {error!r}")
                raise
            finally:
                self.busy_since = None

    def serve(self, tree: Client, run: str) -> None:
        raise NotImplementedError

    def attempt(self, calls: list[Call], bodies: Sequence[bytes], do: Callable[[], object], run: str) -> bool:
        """Whether it was done; raises where that is not known."""
        self.busy_since = began = time.monotonic()
        outcome = "unknown"
        try:
            do()
            outcome = "ok"
            self.acknowledged += len(bodies)
            self.load.runs.setdefault(run, time.monotonic())
            self.load.run = run
        except REFUSALS:
            outcome = "failed"
            time.sleep(0.05)
        finally:
            ended, self.busy_since = time.monotonic(), None
            calls.extend([Call(body, began, ended, outcome, run) for body in bodies])
        return outcome == "ok"

    def body(self) -> bytes:
        self.sent += 1
        return b"%s.%d.%d" % (type(self).__name__.lower().encode(), self.number, self.sent)


class Single(LoadClient):
    """One message a write."""

    def serve(self, tree: Client, run: str) -> None:
        stream = tree.open(f"log/s{self.number % 2}", "w")
        while self.continues:
            body = self.body()
            self.attempt(self.load.calls, [body], lambda body=body: stream.write(body), run)  # type: ignore[misc]


class Batch(LoadClient):
    """Many messages a write."""

    def serve(self, tree: Client, run: str) -> None:
        batch = tree.open("log/.batch", "w")
        while self.continues:
            bodies = [self.body() for _ in range(self.load.unit)]
            data = b"".join(frame("batches", body) for body in bodies)
            self.attempt(self.load.calls, bodies, lambda data=data: batch.write(data), run)  # type: ignore[misc]
            time.sleep(0.05)  # the disks of a long campaign hold what all write


class Unit(LoadClient):
    """Transactions, each repeated under its number until it is committed."""

    def __init__(self, load: Load, number: int) -> None:
        super().__init__(load, number)
        self.name_ = b"p%d.%d" % (number, 0)
        self.count = 0
        self.bodies: list[bytes] = []

    def serve(self, tree: Client, run: str) -> None:
        while self.continues or self.bodies:
            if not self.bodies:
                self.count += 1
                self.name_ = b"p%d.%d" % (self.number, self.count)
                self.bodies = [self.body() for _ in range(5)]
                self.load.units[self.name_] = "unknown", self.bodies
            self.busy_since = time.monotonic()
            part = f"{self.name_.decode()}-{self.pick.randrange(1 << 30)}"
            tree.mkdir(f"log/.txn/{part}")
            stream = tree.open(f"log/.txn/{part}/units", "w")
            for body in self.bodies:
                stream.write(body)
            tree.open("log/.txn/ctl", "w").write(b"commit %s %s\n" % (self.name_, part.encode()))
            self.load.units[self.name_] = "ok", self.bodies
            self.acknowledged += len(self.bodies)
            self.bodies, self.busy_since = [], None


class Follower(LoadClient):
    """Sees single messages, behind the last that it saw."""

    def serve(self, tree: Client, run: str) -> None:
        cursor = tree.open("log/.cursor", "r+")
        last = max(self.load.seen, default=-1)
        cursor.write(b"format json\nselect s0 s1\nseek %d\n" % (last + 1))
        while self.continues:
            try:
                line = cursor.receive(timeout=1.0)
            except TimeoutError:
                continue
            except FellBehind as error:
                self.load.faults.append(f"{self.name}: {error}")
                return
            row = parse(line)
            body = row["body"].encode()
            if self.load.seen.setdefault(row["sequence"], body) != body:
                self.load.faults.append(f"sequence {row['sequence']}: seen as two messages")


class Job(LoadClient):
    """Puts jobs, some of them for later, with priorities."""

    def serve(self, tree: Client, run: str) -> None:
        while self.continues:
            body = self.body()
            delay_ms = self.pick.choice([10, 300, 2_000]) if self.pick.random() < 0.3 else 0
            options: dict[str, Any] = {"stream": "q", "priority": self.pick.randrange(10)}
            if delay_ms:
                options["delay"] = f"{delay_ms}ms"
            self.load.orders[body] = Order(options["priority"], delay_ms / 1e3)
            data = json.dumps(options).encode() + b" " + body
            put = tree.open("work/.put", "w")
            self.attempt(self.load.puts, [body], lambda put=put, data=data: put.write(data), run)  # type: ignore[misc]
            put.close()
            time.sleep(0.01)


class Laborer(LoadClient):
    """Takes jobs: most are acknowledged, some fail, are released, or left when it goes."""

    def serve(self, tree: Client, run: str) -> None:
        worker = tree.open("work/.consumers/w", "r+")
        worker.write(b"format json\n")
        while self.continues:
            asked = time.monotonic()
            try:
                row = parse(worker.receive(timeout=1.0))
            except TimeoutError:
                continue
            body, count = row["body"].encode(), row.get("deliveries", 1)
            self.load.deliveries.append(Delivery(body, asked, time.monotonic(), count, run))
            what = self.pick.random() if not self.load.draining.is_set() else 1.0
            if what < 0.05:
                return
            if what < 0.2:
                if not self.give_back(worker, body, count, 0.1 if what < 0.15 else None, run):
                    return
                continue
            if not self.attempt(self.load.acks, [body], lambda: worker.write(b"ack\n"), run):
                return  # the next read would be the text of the refusal
            if self.pick.random() < 0.02:
                self.load.draining.wait(0.3)  # jobs wait for it, and the priorities count

    def give_back(self, worker: File, body: bytes, count: int, delay_s: float | None, run: str) -> bool:
        """As failed, to wait that long; or released. Whether it was taken back."""
        command, calls = b"release\n" if delay_s is None else b"nack %dms\n" % (delay_s * 1e3), list[Call]()
        try:
            return self.attempt(calls, [body], lambda: worker.write(command), run)
        finally:
            self.load.returns += [Return(call, count, delay_s) for call in calls]


def parse(line: bytes) -> Any:
    """A line of `format json`. Raises EOFError: the server stops."""
    if not line:
        raise EOFError
    return json.loads(line)


ALL = (Single, Single, Single, Batch, Batch, Unit, Unit, Follower, Job, Laborer, Laborer, Laborer)
PRODUCERS = (Single, Batch, Unit, Job)
