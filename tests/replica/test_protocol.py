"""The protocol under every order of outcomes: nothing acknowledged is lost. The mutants are found."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mqfs import limits
from mqfs.replica.log import Append, LogRecord, Look, Position, Reader, Writer
from mqfs.store.replication import LogBytes
from tests.replica.model import STORE, Engine, Pipelining, Renumbering, Server, Unlooking, payloads
from tests.support.campaign import size

NAMES = st.sampled_from([0, 0, 1, 1, 2])
PICK = st.integers(0, 1 << 16)


class Protocol(RuleBasedStateMachine):
    """Three servers, one engine, and a network that has every request as long as it wants."""

    kinds: ClassVar[tuple[str, ...]] = ("stream", "objects")
    engine_options: ClassVar[dict[str, Any]] = {}
    server_options: ClassVar[dict[str, Any]] = {}
    pipelined: ClassVar[bool] = False

    @initialize(kind=PICK)
    def begin(self, kind: int) -> None:
        self.engine = Engine(self.kinds[kind % len(self.kinds)], **self.engine_options)
        self.servers = [Server(self.engine, name, **self.server_options) for name in range(3)]
        self.network: dict[int, tuple[Server, Writer, Append]] = {}
        self.assumed: dict[int, tuple[int, bytes]] = {}  # what a pipelining server acknowledges with the answer
        self.sent = self.published = 0
        self.checked = (0, 0)

    @rule(name=NAMES, lag=st.sampled_from([0, 0, 0, 1, 3]))
    def read(self, name: int, lag: int) -> None:
        server = self.servers[name]
        if server.writer is None:
            server.catch_up(max(0, len(self.engine.history) - lag))

    @rule(name=NAMES)
    def take_over(self, name: int) -> None:
        server = self.servers[name]
        if server.writer is None:
            server.take_over()
            if isinstance(server.writer, Renumbering):
                server.writer.engine = self.engine

    @rule(name=NAMES)
    def become_primary(self, name: int) -> None:
        """Without a fault of the network."""
        self.read(name, 0)
        self.take_over(name)
        self.finish(name)

    @rule(name=NAMES)
    def finish(self, name: int) -> None:
        """What it has under way, without a fault of the network."""
        for _ in range(4):
            self.send(name)
            if (number := self.servers[name].waits) in self.network:
                self.deliver(number, "answer")
            self.look(name, 0)

    @rule(name=NAMES, more=st.sampled_from([False, False, True]))
    def publish(self, name: int, more: bool) -> None:
        server = self.servers[name]
        if server.writer is not None and server.writer.is_owner and server.writer.is_idle and server.waits is None:
            self.published += 1
            more = more and not self.pipelined and not server.acknowledges_early
            server.publish(b"%d" % self.published, more=more)
            if more:
                server.payload = None  # it is acknowledged with the end of its batch, which may never come

    @rule(name=NAMES)
    def send(self, name: int) -> None:
        server = self.servers[name]
        writer = server.writer
        if writer is None or server.waits is not None or not isinstance(writer.request, Append):
            return
        self.sent += 1
        self.network[self.sent] = (server, writer, writer.request)
        if self.pipelined and writer.is_owner and server.payload is not None:
            assert isinstance(writer, Pipelining)
            self.assumed[self.sent] = (writer.position.epoch, server.payload)
            writer.assume_appended()
            server.payload = None
        else:
            server.waits = self.sent

    @precondition(lambda self: self.network)
    @rule(pick=PICK, outcome=st.sampled_from(["answer", "answer", "answer", "lose the answer", "twice"]))
    def arrive(self, pick: int, outcome: str) -> None:
        """A request arrives at the engine, perhaps long after its sender gave up."""
        self.deliver(sorted(self.network)[pick % len(self.network)], outcome)

    def deliver(self, number: int, outcome: str) -> None:
        server, writer, request = self.network[number]
        if outcome != "twice":
            del self.network[number]
        appended = self.engine.execute(request)
        if outcome == "answer" and number in self.assumed:
            if appended:
                server.acknowledged.append(self.assumed.pop(number))
        elif outcome == "answer" and server.waits == number and server.writer is writer:
            server.waits = None
            if appended:
                writer.on_appended()
            else:
                writer.on_unclear()
            server.acknowledge()

    @precondition(lambda self: self.network)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        del self.network[sorted(self.network)[pick % len(self.network)]]

    @rule(name=NAMES)
    def time_out(self, name: int) -> None:
        server = self.servers[name]
        if server.writer is not None and server.waits is not None:
            server.waits = None
            server.writer.on_unclear()

    @rule(name=NAMES, lag=st.sampled_from([0, 0, 0, 1, 3]))
    def look(self, name: int, lag: int) -> None:
        """Perhaps at the engine as it was before."""
        server = self.servers[name]
        if server.writer is not None and isinstance(server.writer.request, Look):
            data, later = self.engine.look(server.writer.request, max(0, len(self.engine.history) - lag))
            server.writer.on_found(data, later=later)
            server.acknowledge()

    @rule(name=NAMES)
    def crash(self, name: int) -> None:
        server = self.servers[name]
        server.writer = server.waits = server.payload = None

    @rule(name=NAMES)
    def trim(self, name: int) -> None:
        """The primary made a checkpoint of all that is confirmed to it, if no batch is open there."""
        server = self.servers[name]
        if server.writer is not None and server.writer.is_owner:
            base, applied = self.whole(server.writer.position.number)
            if base.position == base.complete:
                self.engine.base, self.engine.trimmed = (base.complete, applied), base.complete.number  # which stays

    @rule(name=NAMES)
    def go_on(self, name: int) -> None:
        """For longer than frames are kept."""
        for _ in range(3):
            self.publish(name, more=False)
            self.finish(name)
        self.trim(name)

    def whole(self, until: int = 1 << 62) -> tuple[Reader, list[bytes]]:
        """All of the log, as a reader that begins has it."""
        server = Server(self.engine, 9)
        server.reader, server.applied = Reader(Position(**vars_of(self.engine.base[0]))), list(self.engine.base[1])
        for record in self.engine.records():
            if server.reader.position.number < record.number <= until:
                server.applied += payloads(server.reader.feed(record))
        return server.reader, server.applied

    @invariant()
    def everything_acknowledged_is_there_once(self) -> None:
        state = len(self.engine.history), sum(len(server.acknowledged) for server in self.servers)
        if state == self.checked:
            return
        self.checked = state
        _, applied = self.whole()
        for server in self.servers:
            for _, payload in server.acknowledged:
                assert applied.count(payload) == 1, f"{payload!r} of {applied}"

    @invariant()
    def a_new_primary_has_what_the_one_before_acknowledged(self) -> None:
        for primary in self.servers:
            if primary.writer is not None and primary.writer.is_owner:
                for server in self.servers:
                    for epoch, payload in server.acknowledged:
                        assert epoch >= primary.writer.position.epoch or payload in primary.applied


def vars_of(position: Position) -> dict[str, Any]:
    return {name: getattr(position, name) for name in Position.__slots__ if name != "__weakref__"}


def run(machine: type[Protocol], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        ),
    )  # fmt: skip


def mutant(**changes: Any) -> type[Protocol]:
    return type("Mutant", (Protocol,), changes)


def test_nothing_acknowledged_is_lost_whatever_the_order_of_outcomes() -> None:
    run(Protocol, size(10_000))


def test_a_batch_that_is_too_large_for_memory_lies_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writer = Writer(Position(), STORE, uuid.uuid4())
    writer.take_over("", 0)
    records = []
    for number, more in enumerate([False, True, True, False, False]):
        if number:
            writer.append([LogBytes(1, 1, 0, b"x" * 100)], 0, more=more)
        request = writer.request
        assert isinstance(request, Append)
        records.append(LogRecord(number + 1, request.data))
        writer.on_unclear()
        writer.on_found(request.data, later=False)
    monkeypatch.setattr(limits, "REPLICA_BATCH_BYTES", 3 * 200 - 1)
    reader = Reader(Position(), str(tmp_path))
    batches = [[frame.number for frame in reader.feed(record) or ()] for record in records]
    assert batches == [[1], [], [], [2, 3, 4], [5]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(
            mutant(
                kinds=("stream",), engine_options={"sees_owner": False},
                server_options={"writer_class": Pipelining}, pipelined=True,
            ),
            id="several in flight, by the number alone",
        ),
        pytest.param(
            mutant(
                kinds=("stream",), engine_options={"sees_owner": False}, server_options={"writer_class": Renumbering}
            ),
            id="no condition of the owner",
        ),
        pytest.param(
            mutant(kinds=("objects",), engine_options={"names_have_check_sum": True}), id="a check sum in the name"
        ),
        pytest.param(
            mutant(kinds=("objects",), server_options={"writer_class": Unlooking}), id="no look after a takeover"
        ),
        pytest.param(mutant(server_options={"acknowledges_early": True}), id="acknowledged before the append"),
    ],
)  # fmt: skip
def test_a_protocol_without_one_of_its_rules_is_found_out(machine: type[Protocol]) -> None:
    with pytest.raises(Exception, match=r"appended after a takeover|frames are missing|of \[|assert"):
        run(machine, 2_000)
