"""Quotas of users: the language of `--limit`, rates that make writers wait, and bounds that refuse."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs.engine.files.metering import SECOND_NS, Pace
from mqfs.engine.publishing.kept_quotas import HeaderBytes
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadConfig, Interrupted, OverQuota, Unsupported
from mqfs.limits import HEADER_BYTES
from mqfs.model import Wait
from mqfs.net.audit import Audit
from mqfs.quotas import KEYS, Quota, parse_quotas
from mqfs.ring.server.registry import RingRegistry
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.support.batches import Units
from tests.support.calls import calls
from tests.support.clock import HastyClock
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import Queues, read, say, waits
from tests.support.temp_store import lowered

WO, RW = os.O_WRONLY, os.O_RDWR


class Limited(Units):
    """Queues of a server with those `--limit`s."""

    def __init__(self, *limits: str, ctl: tuple[str, ...] = (), path: Path | None = None) -> None:
        self.clock: Any = HastyClock()
        self.path = path
        self.store: Any = DiskStore(str(path)) if path else MemoryStore()
        self.limits = limits
        self.tree = Tree(self.store, self.clock, owner=ROOT, quotas=parse_quotas(limits))
        if path:
            self.on_disk.append(self)
        self.group = self.mkdir("g")
        self.ctl("sync off", *ctl)
        self.stream("s", ANNA)

    def again(self) -> None:
        self.close()
        self.store = DiskStore(str(self.path))
        self.tree = Tree(self.store, self.clock, owner=ROOT, quotas=parse_quotas(self.limits))
        self.group = self.tree.root.groups["g"]

    def kept_by(self, owner: Any) -> int:
        """About the bytes that its streams keep."""
        assert self.tree.kept_quotas is not None
        return self.tree.kept_quotas.total_of(owner.uid)

    def use(self, user: Any = ANNA) -> dict[str, Any]:
        return dict(json.loads(self.text(".stats", user))["quotas"][str(ANNA.uid)])


def done(step: object) -> bool:
    return not isinstance(step, Wait) or step.settled


# ------------------------------------------------------------ the language


def test_a_line_is_a_user_and_its_bounds() -> None:
    quotas = parse_quotas(["1001 messages=10 bytes=1M kept=2G", "* handles=5 parked=6 claims=7", "1002 kept=0"])
    assert quotas is not None
    assert quotas.of(1001) == Quota(messages=10, bytes=1 << 20, kept=2 << 30)
    assert quotas.of(1002) == Quota()
    assert quotas.of(1003) == Quota(handles=5, parked=6, claims=7)
    assert quotas.of(0) is None
    assert quotas.of(os.geteuid()) is None
    assert parse_quotas(()) is None


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["1001"], "malformed (expected USER KEY=NUMBER..., keys messages, bytes, kept, parked, handles, claims,"),
        ([""], "malformed"),
        (["1001 size=3"], "malformed"),
        (["1001 messages"], "malformed"),
        (["1001 messages=-1"], "malformed"),
        (["1001 messages=1 messages=2"], "malformed"),
        ([f"1001 kept={'9' * 5000}"], "malformed"),
        (["1001 kept=9999999999999999999G"], "malformed"),
        (["1001 kept='1"], "malformed"),
        (["no-such-user kept=1"], "unknown user 'no-such-user' (expected one of getent passwd, or *)"),
        (["* kept=1", "no-such-user kept=1"], "unknown user 'no-such-user' (expected one of getent passwd, or *)"),
        (["1001 kept=1", "1001 kept=2"], "a second line of '1001'"),
        (["* kept=1", "* kept=2"], "a second line of '*'"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong(lines: list[str], why: str) -> None:
    with pytest.raises(BadConfig) as caught:
        parse_quotas(lines)
    assert str(caught.value).startswith("--limit ")
    assert why in str(caught.value)


@given(st.dictionaries(st.sampled_from(KEYS), st.integers(0, 1 << 62), min_size=1))
def test_any_bounds_are_read_back(bounds: dict[str, int]) -> None:
    quotas = parse_quotas(["7 " + " ".join(f"{key}={value}" for key, value in bounds.items())])
    assert quotas is not None
    assert quotas.of(7) == Quota(**bounds)


# ------------------------------------------------------------ rates


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 2 * SECOND_NS)), max_size=60))
def test_a_pace_gives_no_more_than_its_rate_after_a_seconds_worth(rate: int, steps: list[tuple[int, int]]) -> None:
    pace, now, given, most = Pace(rate), 0, 0, 0
    for amount, pause in steps:
        now += pause
        if not pace.delay_ns(amount, now):
            pace.take(amount, now)
            given += amount
            most = max(most, amount)
        assert given <= rate + rate * now / SECOND_NS + most + 1
        assert pace.delay_ns(amount, now + pace.delay_ns(amount, now)) == 0


def test_a_second_s_worth_passes_and_then_a_writer_waits_for_its_turn() -> None:
    q = Limited("1001 messages=10", ctl=("replay all",))
    writer = q.at("s", WO, ANNA)
    assert [done(writer.write(b"x")) for _ in range(10)] == [True] * 10
    waits = [writer.write(f"{number}".encode()) for number in range(3)]
    assert not any(map(done, waits))
    assert q.use() == {
        "bounds": {"messages": 10}, "used": {}, "queued": 3, "delayed": 3, "refused": 0,
    }  # fmt: skip
    for number in range(3):
        q.clock.forward(0.1)
        q.tree.run_timers()
        assert [done(wait) for wait in waits] == [at <= number for at in range(3)]
        assert waits[number].result() == 1
    assert [row["body"] for row in q.kept()][-3:] == ["0", "1", "2"]


def test_the_rate_is_the_user_s_over_all_files_and_nobody_else_s() -> None:
    q = Limited("1001 messages=2")
    q.tree.create(ROOT, q.group, "t", 0o666)
    one, other, put = q.at("s", WO, ANNA), q.at("t", WO, ANNA), q.at(".put", WO, ANNA)
    assert done(one.write(b"x"))
    assert done(other.write(b"x"))
    wait = put.write(b'{"stream":"s"} x')
    assert not done(wait)
    for user in (ROOT, BERT):
        assert all(done(q.at("s", WO, user).write(b"x")) for _ in range(10))


def test_bytes_count_and_a_write_beyond_a_second_s_worth_passes_when_none_is_owed() -> None:
    q = Limited("1001 bytes=1K")
    writer = q.at("s", WO, ANNA)
    assert done(writer.write(b"x" * 4096))
    wait = writer.write(b"y")
    q.clock.forward(2.9)
    q.tree.run_timers()
    assert not done(wait)
    q.clock.forward(0.2)
    q.tree.run_timers()
    assert done(wait)


def test_a_batch_and_lines_count_their_messages() -> None:
    def frame(body: bytes) -> bytes:
        return struct.pack("<IHH", 8 + 1 + len(body), 1, 0) + b"s" + body

    lines = b"a\nb\nc\n"
    for name, data, ctl in (
        (".batch", frame(b"a") * 3, ()),
        ("s", lines, ("data line",)),
        (".put", b'{"stream":"s","lines":true} ' + lines, ()),
    ):
        q = Limited("1001 messages=4", ctl=ctl)
        writer = q.at(name, WO, ANNA)
        assert done(writer.write(data))
        assert not done(writer.write(data))


def test_a_refused_write_costs_nothing() -> None:
    q = Limited("1001 messages=1")
    put = q.at(".put", WO, ANNA)
    for _ in range(3):
        with pytest.raises(Exception, match="no stream 'nowhere'"):
            put.write(b'{"stream":"nowhere"} x')
    assert done(put.write(b'{"stream":"s"} x'))


def test_a_write_that_waits_can_be_cancelled_and_was_never_made() -> None:
    q = Limited("1001 messages=1", ctl=("replay all",))
    writer = q.at("s", WO, ANNA)
    writer.write(b"1")
    first, second = writer.write(b"2"), writer.write(b"3")
    assert first.cancel()
    q.clock.forward(1)
    q.tree.run_timers()
    assert second.settled
    assert [row["body"] for row in q.kept()] == ["1", "3"]
    assert not second.cancel()


def test_a_write_that_then_waits_for_room_can_be_cancelled_too() -> None:
    q = Limited("1001 messages=1", ctl=("replay all", "depth 1", "full block"))
    writer = q.at("s", WO, ANNA)
    writer.write(b"1")
    wait = writer.write(b"2")
    q.clock.forward(5)
    q.tree.run_timers()
    assert not wait.settled
    assert q.tree.find(ROOT, "g/s").blocked
    assert wait.cancel()
    assert not q.tree.find(ROOT, "g/s").blocked


def test_a_program_that_polls_is_woken_when_a_write_would_not_wait() -> None:
    q = Limited("1001 messages=2")
    writer, woken = q.at("s", WO, ANNA), [0]
    assert writer.writable
    for _ in range(2):
        writer.write(b"x")
    assert not writer.writable
    writer.watch(lambda: woken.append(1))
    q.clock.forward(0.4)
    q.tree.run_timers()
    assert woken == [0]
    q.clock.forward(0.2)
    q.tree.run_timers()
    assert woken == [0, 1]
    assert writer.writable
    assert done(writer.write(b"x"))


def test_what_a_waiting_write_comes_to_is_its_writer_s() -> None:
    q = Limited("1001 messages=1", ctl=("depth 1", "full reject", "replay all"))
    writer = q.at("s", WO, ANNA)
    writer.write(b"1")
    wait = writer.write(b"2")
    q.clock.forward(1)
    q.tree.run_timers()
    with pytest.raises(Exception, match="depth reached with"):
        wait.result()


def test_closing_a_file_ends_its_waiting_writes_and_so_does_the_stop() -> None:
    q = Limited("1001 messages=1")
    closed, open_ = q.at("s", WO, ANNA), q.at("s", WO, ANNA)
    closed.write(b"1")
    first, second = closed.write(b"2"), open_.write(b"3")
    closed.close()
    with pytest.raises(Interrupted):
        first.result()
    assert not second.settled
    q.tree.close()
    with pytest.raises(Interrupted):
        second.result()


# ------------------------------------------------------------ bounds that refuse


def test_kept_bytes_are_of_the_stream_s_owner_whoever_writes_and_however() -> None:
    q = Limited("1001 kept=1000", ctl=("replay all",))
    q.stream("other", BERT)
    q.write("s", b"x" * 600, user=BERT)
    head = struct.pack("<IHH", 8 + 1 + 600, 1, 0)
    q.tree.mkdir(ROOT, q.tree.find(ROOT, "g/.txn"), "p", 0o777)
    q.at(".txn/p/s", WO).write(b"x" * 600)
    writes = [
        lambda: q.write("s", b"x" * 600),
        lambda: q.at(".put", WO).write(b'{"stream":"s"} ' + b"x" * 600),
        lambda: q.at(".put", WO).write(b'{"stream":"s","delay":"1h"} ' + b"x" * 600),
        lambda: q.at(".batch", WO).write(head + b"s" + b"x" * 600),
        lambda: q.at(".txn/ctl", WO).write(b"commit a.1 p"),
    ]
    for write in writes:
        with pytest.raises(OverQuota) as caught:
            write()
        assert re.fullmatch(
            r"uid 1001 keeps 672 bytes in its streams and parts, and would keep (\d+) more"
            r" \(expected at most 1000\)",
            str(caught.value),
        )
        assert (caught.value.errno, caught.value.http) == (errno.EDQUOT, 429)
    q.write("other", b"x" * 5000, user=ANNA)
    assert q.use(ROOT)["used"] == {"kept": 672}


def test_room_comes_back_when_messages_go() -> None:
    q = Limited("1001 kept=1000", ctl=("replay all",))
    q.write("s", b"x" * 900)
    with pytest.raises(OverQuota):
        q.write("s", b"x" * 900)
    q.ctl("clear s")
    q.write("s", b"x" * 900)
    q.tree.unlink(ROOT, q.group, "s")
    q.stream("t", ANNA)
    q.write("t", b"x" * 900)


def test_what_is_not_kept_any_more_is_not_charged() -> None:
    """Headers, delayed messages and parts, too."""
    q = Limited("1001 kept=2000", ctl=("replay all",))
    q.part("p", ANNA)
    for _ in range(20):
        q.put(b"x" * 100, headers={"h": "y" * 1_000})
        with pytest.raises(OverQuota):
            q.put(b"x" * 100, headers={"h": "y" * 1_000})
        q.ctl("clear s")
        q.put(b"x" * 1_000, delay="1h")
        with pytest.raises(OverQuota):
            q.write("s", b"x" * 1_000)
        q.clock.forward(3_601)
        q.tree.run_timers()
        q.tree.tick()
        with pytest.raises(OverQuota):  # it is in its stream now
            q.write("s", b"x" * 1_000)
        q.ctl("clear s")
        q.put(b"x" * 1_000, delay="1h")
        q.ctl(f"drop s {q.group.log.end.next - 1}")
        q.stage("p", "s", b"x" * 1_200, user=ANNA)
        with pytest.raises(OverQuota):
            q.write("s", b"x" * 1_000)
        q.say("commit job.1 p", ANNA)  # it does not count twice
        q.ctl("clear s")
        q.part("p", ANNA)
        q.stage("p", "s", b"x" * 1_200, user=ANNA)
        q.say("abort p", ANNA)
        q.part("p", ANNA)
        q.group.state.producers.clear()
    q.tree.tick()
    assert q.use()["used"] == {"kept": 0}


def test_what_live_readers_take_is_not_kept() -> None:
    q = Limited("1001 kept=1000")
    reader = q.at("s", os.O_RDONLY)
    for _ in range(50):
        wait = reader.read(1000)
        q.write("s", b"x" * 500)
        assert wait.result() == b"x" * 500


def test_what_was_kept_before_a_restart_counts(tmp_path: Path) -> None:
    q = Limited("1001 kept=1000", ctl=("replay all",), path=tmp_path / "store")
    q.write("s", b"x" * 900)
    q.again()
    with pytest.raises(OverQuota, match="keeps 972 bytes"):
        q.write("s", b"x" * 900)


def test_headers_and_delayed_messages_of_before_a_restart_count(tmp_path: Path) -> None:
    q = Limited("1001 kept=100000", ctl=("replay all",), path=tmp_path / "store")
    for _ in range(10):
        q.put(b"x", headers={"h": "y" * 4_000})
        q.put(b"x", delay="1h", headers={"h": "y" * 4_000})
    kept = q.use()["used"]["kept"]
    assert 80_000 < kept < 90_000
    q.again()
    q.put(b"x", headers={"h": "y"})
    assert kept < q.use()["used"]["kept"] < kept + 200
    q.ctl("clear s")
    q.tree.tick()
    assert 40_000 < q.use()["used"]["kept"] < 45_000  # the delayed ones


def test_acked_messages_behind_a_claimed_one_charge_no_headers_without_end() -> None:
    q = Limited("1001 kept=1000000", ctl=("deliver one", "ack next", "replay off"))
    holder, other = q.taker(), q.taker()
    for number in range(50):
        q.put(b"%d" % number, headers={"h": "y" * 4_000})
    assert read(holder) == b"0"
    q.tree.tick()
    assert q.use()["used"]["kept"] > 200_000
    for number in range(1, 50):
        assert read(other) == b"%d" % number
    assert waits(other)
    q.tree.tick()
    assert q.group.streams["s"].kept.count == 1
    assert 4_000 < q.use()["used"]["kept"] < HEADER_BYTES + 100


def test_a_start_looks_for_headers_only_where_some_are(tmp_path: Path) -> None:
    q = Limited("1001 kept=100000", ctl=("replay all",), path=tmp_path / "store")
    for _ in range(300):
        q.write("s", b"x")
    q.stream("t", ANNA)
    q.put(b"x", "t", headers={"h": "y" * 100})
    found = []
    costs = [
        calls(lambda stream=q.group.streams[name]: found.append(HeaderBytes().look(stream)))  # type: ignore[misc]
        for name in ("s", "t")
    ]
    assert set(found) == {0, 114}
    assert costs[0] <= 20
    assert costs[1] <= 50


def test_the_delayed_messages_of_a_removed_stream_count_as_long_as_they_are_kept() -> None:
    q = Limited("1001 kept=2000", ctl=("replay all",))
    q.put(b"x" * 1_500, delay="1h")
    q.tree.unlink(ROOT, q.group, "s")
    q.stream("t", ANNA)
    q.tree.tick()
    assert q.use()["used"]["kept"] > 1_500
    q.clock.forward(3_601)
    q.tree.run_timers()
    q.tree.tick()
    assert q.use()["used"]["kept"] == 0


def test_eof_markers_wait_for_their_turn_and_other_lines_do_not() -> None:
    q = Limited("1001 messages=10", ctl=("replay all",))
    q.tree.setattr(ROOT, q.group, uid=ANNA.uid)
    writer, ctl = q.at("s", WO, ANNA), q.at("ctl", WO, ANNA)
    assert [done(writer.write(b"x")) for _ in range(9)] == [True] * 9
    assert done(ctl.write(b"eof s\n"))
    waits = [ctl.write(b"eof s\n" * 2), writer.write(b"x"), ctl.write(b"eof s\n")]
    assert not any(map(done, waits))
    assert done(q.at("ctl", WO, ANNA).write(b"ttl 1h\ndepth 90\n"))
    for seconds, number in ((0.2, 1), (0.1, 2), (0.1, 3)):
        q.clock.forward(seconds)
        q.tree.run_timers()
        assert sum(map(done, waits)) == number
    assert q.use()["delayed"] == 3


@pytest.mark.parametrize("line", [b"clear s\n", b"ttl 1h\n", b"depth 9\n"], ids=["an action", "a setting", "a bound"])
def test_no_line_overtakes_an_earlier_one_of_its_file(line: bytes) -> None:
    q = Limited("1001 messages=1", ctl=("replay all",))
    q.tree.setattr(ROOT, q.group, uid=ANNA.uid)
    ctl, order = q.at("ctl", WO, ANNA), list[int]()
    assert done(ctl.write(b"eof s\n" * 3))
    lines = [b"eof s\n", line, b"eof s\n" * 2, line, line]
    for number, wait in enumerate(map(ctl.write, lines)):
        assert isinstance(wait, Wait)
        wait.subscribe(lambda _, number=number: order.append(number))  # type: ignore[misc]
    other = q.at("ctl", WO, ANNA)
    assert done(other.write(line))
    for seconds, came in ((1.9, 0), (0.2, 0), (1.0, 2), (0.8, 2), (0.2, 5)):
        q.clock.forward(seconds)
        q.tree.run_timers()
        assert order == list(range(came))
    assert done(ctl.write(line))
    assert not done(ctl.write(b"eof s\n"))
    assert not done(step := ctl.write(line))
    assert isinstance(step, Wait)
    assert step.cancel()


@pytest.mark.parametrize("sender", [ANNA, BERT, ROOT], ids=["its owner", "another", "root"])
@pytest.mark.parametrize("wait", [{"delay": "1h"}, {"every": "1h", "id": "n"}], ids=["delayed", "a schedule"])
def test_they_count_after_a_restart_too(tmp_path: Path, sender: Any, wait: dict[str, str]) -> None:
    q = Limited("1001 kept=20000", "1002 kept=20000", ctl=("replay all",), path=tmp_path / "store")
    q.stream("t", ANNA)
    q.put(b"x" * 1_500, user=sender, **wait)
    q.put(b"x" * 1_500, delay="2h")
    q.write("t", b"kept")
    if "every" in wait:
        q.clock.forward(3_601)
        q.tree.run_timers()
        q.ctl("clear s")
    q.tree.unlink(ROOT, q.group, "s")
    q.tree.tick()
    before = q.use()["used"]["kept"]
    assert before > 3_000
    for _ in range(2):
        q.again()
        assert q.use()["used"]["kept"] == before
        assert not q.kept_by(BERT)
        q.tree.tick()
        assert q.use()["used"]["kept"] == before
    q.clock.forward(7_201)
    q.tree.run_timers()
    q.tree.tick()
    q.again()
    assert 0 < q.use()["used"]["kept"] < 200
    assert not q.group.state.removed


@pytest.mark.parametrize("sender", [ANNA, BERT, ROOT], ids=["its first owner", "its last", "root"])
@pytest.mark.parametrize("wait", [{"delay": "3h"}, {"every": "1h", "id": "n"}], ids=["delayed", "a schedule"])
def test_they_count_for_the_last_owner_of_the_stream(tmp_path: Path, sender: Any, wait: dict[str, str]) -> None:
    q = Limited("1001 kept=2000000", "1002 kept=2000000", ctl=("replay all",), path=tmp_path / "store")
    q.put(b"x" * 1_500, user=sender, **wait)
    q.tree.setattr(ROOT, q.group.streams["s"], uid=BERT.uid)
    q.write("s", b"x")
    q.tree.tick()
    q.tree.unlink(ROOT, q.group, "s")
    q.stream("t", ROOT)
    with lowered(SEGMENT_BYTES=100_000):
        for _ in range(3):
            q.tree.tick()
            assert not q.kept_by(ANNA)
            assert 1_500 < q.kept_by(BERT) < 1_800
            for _ in range(3):  # another segment begins: at its head is a state
                q.write("t", b"x" * 50_000)
            q.again()
    q.clock.forward(10_801)
    q.tree.run_timers()
    q.tree.tick()
    assert not q.kept_by(BERT)
    assert not q.group.state.removed


def test_open_files() -> None:
    q = Limited("1001 handles=3")
    held = [q.at("s", user=ANNA) for _ in range(3)]
    with pytest.raises(OverQuota, match=r"uid 1001 has 3 open files \(expected at most 3\)"):
        q.at("s", user=ANNA)
    assert "uid 1001 has 3 open files" in q.errors(ROOT)[-1]
    held[0].close()
    assert q.use(ROOT)["used"] == {"handles": 2}
    q.at("s", user=ANNA)
    for _ in range(10):
        q.at("s", user=BERT)


def test_reads_that_wait() -> None:
    q = Limited("1001 parked=2")
    readers = [q.at("s", user=ANNA) for _ in range(3)]
    first, second = (reader.read(10) for reader in readers[:2])
    with pytest.raises(OverQuota, match=r"uid 1001 has 2 reads that wait \(expected at most 2\)"):
        readers[2].read(10)
    assert first.cancel()
    third = readers[2].read(10)
    with pytest.raises(OverQuota):
        readers[0].read(10)
    q.write("s", b"x")
    assert (second.result(), third.result()) == (b"x", b"x")
    assert q.use(ROOT)["used"] == {"parked": 0}
    fourth = readers[1].read(10)
    readers[1].close()
    assert fourth.result() == b""
    assert q.use(ROOT)["used"] == {"parked": 0}


def test_a_read_that_looks_through_many_messages_is_one_that_waits() -> None:
    """It is refused at once, as any other beyond the bound, and has claimed nothing."""
    q = Limited("1001 parked=1", ctl=("replay all", 'bind v prefix:"" payload_contains("yes")', "consumer w v"))
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o666)
    q.write("s", *[b"no"] * 12_000, b"yes")
    q.stream("t", ANNA)
    waiting = q.at("t", user=ANNA).read(10)
    worker = q.worker(user=ANNA)
    for count in range(1, 4):
        q.clock.hasty = True
        with pytest.raises(OverQuota, match=r"uid 1001 has 1 reads that wait \(expected at most 1\)"):
            worker.read(10)
        q.clock.hasty = False
        assert "uid 1001 has 1 reads that wait" in q.errors(ROOT)[-1]
        assert (q.use(ROOT)["used"], q.use(ROOT)["refused"]) == ({"parked": 1}, count)
    assert waiting.cancel()
    q.clock.hasty = True
    step = worker.read(10)
    assert isinstance(step, Wait)
    while not step.settled:
        q.tree.run_timers()
    q.clock.hasty = False
    assert step.result() == b"yes"
    assert q.use(ROOT)["used"] == {"parked": 0}


def test_claims() -> None:
    q = Limited("1001 claims=2", ctl=("consumer w",))
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o666)
    workers = [q.worker(user=ANNA) for _ in range(4)]
    q.write("s", b"1", b"2", b"3")
    assert [read(worker) for worker in workers[:2]] == [b"1", b"2"]
    with pytest.raises(OverQuota, match=r"uid 1001 has 2 claims \(expected at most 2\)"):
        workers[2].read(10)
    say(workers[0], "ack")
    assert read(workers[2]) == b"3"
    say(workers[1], "ack")
    wait = workers[1].read(10)
    with pytest.raises(OverQuota, match="2 claims"):
        workers[3].read(10)
    workers[2].close()
    assert wait.settled or q.use(ROOT)["used"] == {"claims": 1}


def test_claims_are_not_taken_together_where_they_are_counted() -> None:
    q = Limited("1001 claims=2", ctl=("consumer w",))
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o666)
    workers = [q.worker(user=user) for user in (ANNA, ROOT)]
    q.write("s", *[b"x"] * 5)
    assert [read(worker) for worker in workers] == [b"x", b"x"]
    assert [len(worker.claim_behind(2, 100)) for worker in workers] == [0, 2]


def test_a_queue_with_ack_read_holds_no_claims() -> None:
    q = Limited("1001 claims=1", ctl=("deliver one",))
    takers = [q.taker(user=ANNA) for _ in range(3)]
    q.write("s", b"1", b"2", b"3", user=ROOT)
    assert [taker.read(10) for taker in takers] == [b"1", b"2", b"3"]


def test_a_read_that_acks_or_ends_a_message_is_no_claim() -> None:
    q = Limited("1001 claims=1", ctl=("deliver one", "ack next"))
    taker = q.taker(user=ANNA)
    q.write("s", b"1", b"22", b"3", user=ROOT)
    assert [taker.read(10), taker.read(1), taker.read(1), taker.read(10)] == [b"1", b"2", b"2", b"3"]
    with pytest.raises(OverQuota):
        q.taker(user=ANNA).read(10)


# ------------------------------------------------------------ around


def test_stats_show_a_user_its_own_and_root_all() -> None:
    q = Limited("1001 handles=9", "1002 handles=9")
    q.at("s", user=ANNA)
    q.at("s", user=BERT)
    q.tree.setattr(ROOT, q.group, uid=ANNA.uid)
    assert set(json.loads(q.text(".stats", ANNA))["quotas"]) == {"1001"}
    assert set(json.loads(q.text(".stats", ROOT))["quotas"]) == {"1001", "1002"}
    assert "quotas" not in json.loads(Queues().text(".stats"))


def test_a_metered_and_audited_file_is_freed_with_its_close() -> None:
    q = Limited("1001 messages=5 parked=5")
    q.tree.audit = Audit("all")
    gc.disable()
    try:
        handle = q.at("s", RW, ANNA)
        freed = weakref.ref(handle)
        handle.close()
        del handle
        assert freed() is None
    finally:
        gc.enable()


def test_a_ring_is_for_those_without_a_rate() -> None:
    for limits, user in ((("1001 messages=5",), ANNA), (("1001 bytes=5",), ANNA), (("1001 kept=5",), BERT)):
        q = Limited(*limits)
        rings = RingRegistry(q.store, lambda then: then())
        rings.resume(q.group)
        q.ctl("ring all")
        with pytest.raises(Unsupported, match=r"rings: the (user|owner of a stream) has a quota"):
            rings.attach(user, "g")


def test_a_ring_is_for_servers_that_audit_no_publishes() -> None:
    q = Queues()
    q.tree.audit = Audit("all")
    rings = RingRegistry(q.store, lambda then: then())
    rings.resume(q.group)
    with pytest.raises(Unsupported, match=r"rings: not with '--audit all'"):
        rings.attach(ROOT, "g")


def test_without_a_quota_of_its_own_a_user_pays_no_call() -> None:
    plain, limited = Queues("replay all"), Limited("1001 messages=5 handles=100", ctl=("replay all",))
    costs = []
    for queues in (plain, limited):
        writer = queues.at("s", WO)
        costs.append(calls(lambda writer=writer: writer.write(b"x")))
    assert costs[0] == costs[1]
