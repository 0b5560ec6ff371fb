"""Messages that one read claims together: the same, in the same order, as when each is claimed by a read of its own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mqfs.client.message import RecordDecoder
from mqfs.errors import BadCommand, DiskFull, MqfsError, OverLimit, ReadOnly, Stale
from mqfs.model import Wait
from tests.support.campaign import size
from tests.support.queues import BIG, Queues, read, say

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(0, 9),
        "ttl": st.sampled_from(["1s", "3s"]),
        "delay": st.just("2s"),
        "single": st.just(True),
        "headers": st.sampled_from([{"k": "v"}, {"part": "1/2"}, {"part": "2/2"}, {"part": "1/1"}]),
    },
).filter(lambda keys: not ("single" in keys and "part" in keys.get("headers", {})))  # which is refused
ACTS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from("st"), st.integers(1, 6)),
    st.tuples(st.just("put"), st.sampled_from("st"), OPTIONS),
    st.tuples(st.just("parts"), st.sampled_from("st"), st.integers(2, 3)),
    st.tuples(st.just("read"), st.sampled_from([1, 700, 1_500, BIG])),
    st.tuples(st.just("behind"), st.integers(1, 9), st.sampled_from([0, 20, BIG])),
    st.tuples(st.sampled_from(["ack", "nack", "release", "nack 2s"]), st.integers(0, 20)),
    st.tuples(st.just("drop"), st.sampled_from("st"), st.integers(1, 20)),
    st.tuples(st.just("time"), st.integers(1, 3)),
    st.tuples(st.just("ctl"), st.sampled_from(["clear s", "lease 2s", "ttl 5s", "order expiry", "depth 4"])),
)
CONSUMERS = ["", "s", "all", "some"]


@pytest.mark.parametrize("most", [1, 2, 5, 16_384])
def test_prefetch_bounds_what_a_read_claims(most: int) -> None:
    queues = Queues("replay all")
    queues.stream("t")
    queues.consumer("w")
    queues.write("s", *[b"1"] * 4)
    queues.write("t", *[b"2"] * 4)
    worker = queues.worker("w", "format record", f"prefetch {most}")
    sizes = []
    while not isinstance(worker.read(BIG), Wait):
        sizes.append(len(worker.current))
    assert sizes == [most] * (8 // most) + [8 % most] * (8 % most > 0)


@pytest.mark.parametrize(
    "line", ["prefetch 0", "prefetch 16385", "prefetch -1", "prefetch", "prefetch 1 2", "prefetch x"]
)
def test_no_such_prefetch(line: str) -> None:
    queues = Queues()
    queues.consumer("w")
    with pytest.raises(BadCommand, match=r"^(line \d: )?prefetch"):
        queues.worker("w", "format record", line)


@pytest.mark.parametrize("verb", ["ack", "release", "touch"])
def test_a_write_names_so_many_messages(verb: str) -> None:
    """However often it names them."""
    queues = Queues("replay all")
    queues.consumer("w")
    for _ in range(2):
        queues.write("s", *[b"x"] * 10_000)
    worker = queues.worker("w", "format record")
    for count in (16_384, 3_616):
        worker.read(1 << 20)
        assert len(worker.current) == count
    for words in ("1-16385", "1-9000 9001-20000"):
        with pytest.raises(OverLimit, match="more than 16384 messages"):
            say(worker, f"{verb} {words}")
        worker.read(BIG)
    with pytest.raises((OverLimit, Stale)):
        worker.write(f"{verb} 1-10000\n".encode() * 2)
    worker.read(BIG)
    assert len(worker.claims) == 20_000
    say(worker, f"{verb} 1-16384")
    assert len(worker.claims) == (20_000 if verb == "touch" else 3_616)


@pytest.mark.parametrize("verb", ["ack", "release", "touch"])
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("1-4", Stale), ("0-3", Stale), ("1-2 2-3", Stale), ("1 1-1", Stale), (f"1-{1 << 62}", Stale),
        ("3-1", BadCommand), ("1-", BadCommand), ("-3", BadCommand), ("1-2-3", BadCommand), ("1--2", BadCommand),
        (f"1-{1 << 70}", BadCommand),
    ],
)  # fmt: skip
def test_a_range_means_each_claim_in_it_or_nothing(verb: str, words: str, error: type[MqfsError]) -> None:
    queues = Queues("replay all")
    queues.consumer("w")
    queues.write("s", *[b"x"] * 4)
    worker = queues.worker("w", "format record", "prefetch 3")
    worker.read(BIG)
    with pytest.raises(error):
        say(worker, f"{verb} {words}")
    assert sorted(worker.claims) == [1, 2, 3]
    worker.read(BIG)  # the reason
    say(worker, f"{verb} 1 2-3")
    assert bool(worker.claims) == (verb == "touch")


class Side:
    """A group and its worker, who claims messages together or one by one. `looks`: behind each read another worker
    looks for a message."""

    def __init__(self, consumer: str, *, together: bool, looks: bool = False, path: Path | None = None) -> None:
        self.together, self.looks = together, looks
        self.queues = Queues("bind all #", 'bind some prefix:"" payload_contains("1")', path=path)
        self.queues.stream("t")
        self.queues.consumer("w", *[consumer] * bool(consumer))
        self.worker, self.other = self.queues.worker("w", "format record"), self.queues.worker("w")
        self.written = 0

    def read(self, count: int = 1) -> list[int]:
        """The sequences that a read claims, whose data is then read to the end."""
        step = self.worker.read(count)
        if isinstance(step, Wait):
            assert step.cancel()
            return []
        while self.worker.last.given < len(self.worker.last.body):
            self.worker.read(BIG)
        assert not self.looks or self.other.readable in (True, False)
        return list(self.worker.current)

    def do(self, act: tuple[Any, ...], like: list[int]) -> list[int]:
        """Carry out what changes the group, or read as many messages as the other side did."""
        queues = self.queues
        match act:
            case "write", stream, count:
                self.written += 1
                queues.write(stream, *(b"%d-%d" % (self.written, n) for n in range(count)))
            case "put", stream, keys:
                if keys.get("headers", {}).get("part", "1/1") != "1/1":  # a part alone has its priority once it is met
                    keys = {key: value for key, value in keys.items() if key != "priority"}
                queues.put(b"a 1", stream, **keys)
            case "parts", stream, count:
                for number in range(1, count + 1):
                    queues.put(b"part 1", stream, headers={"part": f"{number}/{count}"})
            case "read" | "behind", *_ if not self.together:
                return [sequence for _ in like or [None] for sequence in self.read()]
            case "read", count:
                return self.read(count)
            case "behind", count, most:
                first = self.read()
                return first + [record.sequence for record in self.worker.claim_behind(count, most)]
            case "drop", stream, sequence:
                with suppress(MqfsError):  # it is no message of that stream
                    queues.ctl(f"drop {stream} {sequence}")
            case "time", seconds:
                queues.pass_time(seconds)
            case "ctl", line:
                queues.ctl(line)
            case verb, which:
                held = sorted(self.worker.claims)
                if held:
                    word, *delay = verb.split()
                    say(self.worker, " ".join([word, str(held[which % len(held)]), *delay]))
        return []

    def state(self) -> tuple[Any, ...]:
        progress, stats = self.worker.consumer.state.progress, self.queues.stats()
        kept = {row["sequence"] for stream in "st" for row in self.queues.kept(stream)}
        unacked = {s: (entry.failed, entry.claimed) for s, entry in progress.unacked.items() if s in kept}
        return unacked, sorted(self.worker.claims), stats["waiting"], stats["delivered"]

    def finish(self) -> int:
        """Have all delays over, read and ack all there is, and one more. Returns the sequence below which everything
        is acked."""
        self.queues.pass_time(10)
        self._read_and_ack()
        self.queues.write("s", b"1")
        self._read_and_ack()
        return int(self.queues.stats()["low"])

    def _read_and_ack(self) -> None:
        while self.read(BIG if self.together else 1):
            say(self.worker, "ack")
        for sequence in sorted(self.worker.claims):
            say(self.worker, f"ack {sequence}")


@pytest.mark.slow
@settings(max_examples=size(5_000), deadline=None)
@given(st.sampled_from(CONSUMERS), st.booleans(), st.lists(ACTS, min_size=4, max_size=30))
@example("", False, [("put", "s", {"priority": 6}), ("write", "s", 2), ("put", "s", {"priority": 6})])
@example(
    "",
    False,
    [
        ("ctl", "order expiry"),
        ("put", "s", {"single": True, "delay": "2s"}),
        ("write", "s", 1),
        ("put", "s", {"ttl": "1s"}),
    ],
)
def test_as_one_by_one(consumer: str, looks: bool, acts: list[tuple[Any, ...]]) -> None:
    together, single = (Side(consumer, together=together, looks=looks) for together in (True, False))
    for act in [*acts, ("read", BIG)]:
        claimed = together.do(act, [])
        assert single.do(act, claimed) == claimed, act
        assert together.state() == single.state(), act
    assert together.finish() == single.finish()


def test_by_one_record_of_the_log(tmp_path: Path) -> None:
    side = Side("", together=True, path=tmp_path / "store")
    side.queues.write("s", *[b"x"] * 50)
    before = side.queues.group.log.end.next
    assert side.do(("read", BIG), []) == list(range(1, 51))
    claimed = sorted(side.worker.claims)
    assert side.queues.group.log.end.next == before
    side.queues.restart(clean=False)
    again = side.queues.worker("w", "format record")
    assert [entry.failed for entry in again.consumer.state.progress.unacked.values()] == [1] * 50
    assert list(again.consumer.state.progress.unacked) == claimed


def test_nothing_is_claimed_where_the_disk_failed(tmp_path: Path) -> None:
    side = Side("", together=True, path=tmp_path / "store")
    side.queues.write("s", *[b"x"] * 5)
    assert side.read() == [1]
    side.queues.group.log.end.failed = OSError("gone")
    with pytest.raises(ReadOnly):
        side.worker.claim_behind(9, BIG)
    assert sorted(side.worker.claims) == [1]
    side.queues.group.log.end.failed = None
    assert [record.sequence for record in side.worker.claim_behind(9, BIG)] == [2, 3, 4, 5]


def test_what_another_worker_found_gone_is_recorded_with_them() -> None:
    q = Queues("ttl 5s", "replay all")
    q.consumer("w")
    worker, other, leaves = (q.worker("w") for _ in range(3))
    q.write("s", b"1")
    assert read(leaves) == b"1"
    q.pass_time(8)
    q.write("s", b"2", b"3", b"4")
    assert read(worker) == b"2"
    leaves.close()
    assert other.readable
    assert [record.sequence for record in worker.claim_behind(9, BIG)] == [3, 4]
    say(worker, "ack 2 3 4")
    assert q.stats()["low"] == q.group.log.end.next


def test_a_failure_behind_messages_that_were_claimed_is_the_next_reads(tmp_path: Path) -> None:
    side = Side("", together=True, path=tmp_path / "store")
    side.queues.put(b"1", priority=9)
    side.queues.write("s", b"2")
    log = side.queues.group.log
    claims = log.acknowledge

    def once(*given: Any) -> None:
        log.acknowledge = refuse
        claims(*given)

    def refuse(*given: Any) -> None:
        log.acknowledge = claims
        raise DiskFull("test")

    log.acknowledge = once
    assert side.read(BIG) == [1]
    assert side.worker.readable
    with pytest.raises(DiskFull):
        side.worker.read(BIG)
    say(side.worker, "ack")
    assert side.read(BIG) == [2]


def test_a_message_that_is_gone_at_the_beginning_of_a_gap_does_not_shorten_it() -> None:
    q = Queues()
    q.consumer("w")
    worker, other = q.worker("w"), q.worker("w")
    q.write("s", b"1")
    assert read(worker) == b"1"
    q.put(b"2", priority=1, ttl="1s")
    q.write("s", b"3", b"4", b"5")
    q.put(b"6", priority=1)
    say(worker, "release")
    for sequence in (3, 4, 5):
        q.ctl(f"drop s {sequence}")
    q.pass_time(5)
    assert other.readable
    q.ctl("drop s 1")
    assert read(worker) == b"6"
    say(worker, "ack")
    q.write("s", b"7")
    assert read(worker) == b"7"
    say(worker, "ack")
    assert q.stats()["low"] == q.group.log.end.next


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_bytes_of_the_log(on_disk: bool, tmp_path: Path) -> None:
    """Each stream's name comes before its first message; of a stream that the consumer is not over there is none."""
    q = Queues("replay all", "bind v s", "bind v t", path=tmp_path / "store" if on_disk else None)
    q.stream("t")
    q.stream("u")
    q.consumer("w", "v")
    for number in range(12):
        q.write("stu"[number % 3], b"%d" % number)
    worker = q.worker("w", "format record", "prefetch 6")
    decoder, seen = RecordDecoder(), []
    for _ in range(2):
        seen += [(m.sequence, m.stream, m.body) for m in decoder.feed(worker.read(BIG))]
        say(worker, "ack")
    assert seen == [(n + 1, "stu"[n % 3], b"%d" % n) for n in range(12) if n % 3 < 2]
    assert q.stats()["low"] == 12


def test_what_another_worker_claimed_ahead_is_left_out() -> None:
    q = Queues("replay all")
    q.stream("t")
    q.consumer("w")
    q.write("s", *[b"x"] * 3)
    q.write("t", *[b"x"] * 3)
    q.write("s", *[b"x"] * 9)
    ahead, worker = q.worker("w", "format record", "select t", "prefetch 2"), q.worker("w", "format record")
    ahead.read(BIG)
    worker.read(BIG)
    assert (ahead.current, worker.current) == ([4, 5], [1, 2, 3, *range(6, 16)])


@pytest.mark.parametrize("gone", ["drop s 4", "clear s", "ttl 1s"])
def test_what_is_gone_is_left_out(gone: str) -> None:
    q = Queues("replay all")
    q.consumer("w")
    q.write("s", *[b"x"] * 8)
    q.ctl(gone)
    q.pass_time(2)
    q.write("s", *[b"y"] * 8)
    worker = q.worker("w", "format record")
    worker.read(BIG)
    kept = [1, 2, 3, 5, 6, 7, 8] if gone == "drop s 4" else []
    assert worker.current == [*kept, *range(9, 17)]
