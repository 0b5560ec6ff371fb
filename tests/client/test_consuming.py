"""Consumers: the same over both transports."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest

import mqfs
from mqfs import Claim, Client, errors
from mqfs.client import Group
from tests.support.eventually import HANG_S
from tests.support.server import Server


def work(tree: Client, name: str, *ctl: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all", "sync off", "backoff 1ms 1ms", *ctl])


def waiting(group: Group, consumer: str) -> int:
    return int(group.stats().consumers[consumer].waiting)


def test_a_clean_exit_acknowledges(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.publish_many([("s", b"1"), ("t", b"2")])
    group.publish("s", "ünï", priority=9, headers={"a": "b"})
    got = []
    with group.consume("mailer") as claims:
        for claim in claims:
            with claim:
                got.append((claim.stream, claim.body, claim.headers.get("a"), claim.deliveries))
            if len(got) == 3:
                break
    assert got == [("s", "ünï".encode(), "b", 1), ("s", b"1", None, 1), ("t", b"2", None, 1)]
    assert [m.time_ns for m in group.history()] == sorted(m.time_ns for m in group.history())
    assert waiting(group, "mailer") == 0


def test_what_a_claim_tells_is_what_history_tells(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.publish("s", bytes(range(256)) * 3_000, headers={"k": 'quoted " \n\\ line'}, ttl="1h")
    with group.consume("c") as claims:
        assert claims.get(HANG_S).message == next(group.history())


def test_an_exception_is_a_nack(tree: Client, name: str) -> None:
    group = work(tree, name, "retries 3")
    group.publish("s", b"poison")
    seen = []
    with group.consume("c") as claims:
        for _ in range(3):
            claim = claims.get(HANG_S)
            seen.append(claim.deliveries)
            with pytest.raises(ZeroDivisionError), claim:
                1 / 0  # noqa: B018
    assert seen == [1, 2, 3]
    (dead,) = group.history(pattern="dead")
    assert (dead.body, dead.headers["deliveries"], dead.headers["consumer"]) == (b"poison", "3", "c")
    group.redrive("s")
    with group.consume("c") as claims, claims.get(HANG_S) as claim:
        assert (claim.body, claim.deliveries) == (b"poison", 1)


def test_every_word_about_a_claim(tree: Client, name: str) -> None:
    group = work(tree, name, "lease 1h")
    group.publish_many(("s", str(number)) for number in range(5))
    with group.consume("c") as claims:
        first = claims.get(HANG_S)
        first.touch()
        first.release()
        assert (claims.get(HANG_S).body, first.settled) == (b"0", True)
        second = claims.get(HANG_S)
        second.nack(delay=3_600)
        third = claims.get(HANG_S)
        third.dead("it's no good\nat all")
        claims.get(HANG_S).ack()
        with claims.get(HANG_S) as last:
            last.release()  # what was said inside stands
        for settled in (first, second, third):
            with pytest.raises(errors.Stale):
                settled.ack()
        assert [claims.get(HANG_S).body] == [b"4"]
    (dead,) = group.history(pattern="dead")
    assert dead.headers["reason"] == "it's no good at all"
    row = group.stats().consumers["c"]
    assert (row.waiting, row.delayed) == (3, 1)  # 0 and 4 were released at the end, 1 waits for its time


def test_the_end_of_the_block(tree: Client, name: str) -> None:
    """A clean one releases what was neither acked nor nacked, an exception leaves it to be counted."""
    group = work(tree, name)
    group.publish("s", b"x")
    with group.consume("c") as claims:
        assert claims.get(HANG_S).deliveries == 1
    claims = group.consume("c")
    assert claims.get(HANG_S).deliveries == 1
    with pytest.raises(ZeroDivisionError), claims:
        1 / 0  # noqa: B018
    with group.consume("c") as claims:
        assert claims.get(HANG_S).deliveries == 2


def test_a_lease_that_ran_out(tree: Client, name: str) -> None:
    group = work(tree, name, "lease 30ms")
    group.publish("s", b"x")
    with group.consume("c") as claims, group.consume("c") as others:
        claim, again = claims.get(HANG_S), others.get(HANG_S)
        assert (again.sequence, again.deliveries) == (claim.sequence, 2)
        with claim:
            pass
        with pytest.raises(errors.Stale, match="ack of 1 claims failed: lost"):
            claims.get(HANG_S)
        group.publish("s", b"y")
        while (got := claims.get(HANG_S)).sequence == claim.sequence:
            pass  # the other's lease may run out, too, where the machine is busy
        assert got.body == b"y"  # the refusal's text is no message


def test_a_lease_that_is_renewed(tree: Client, name: str) -> None:
    group = work(tree, name, "lease 500ms")  # short and yet long enough for a machine that is busy
    group.publish("s", b"x")
    with group.consume("c", renew=True) as claims, group.consume("c") as others, claims.get(HANG_S) as claim:
        with pytest.raises(TimeoutError):
            others.get(1.2)
        assert claim.deliveries == 1
    assert waiting(group, "c") == 0


@pytest.mark.parametrize("before", ["0", "60s"])
def test_a_lease_that_is_changed_later_is_renewed(tree: Client, name: str, before: str) -> None:
    """The handle was opened before."""
    group = work(tree, name, f"lease {before}")
    with group.consume("c", renew=True) as claims, group.consume("c") as others:
        group.ctl("lease 2s")
        group.publish("s", b"x")
        with claims.get(HANG_S) as claim:
            with pytest.raises(TimeoutError):
                others.get(4.0)
            assert claim.deliveries == 1
    assert waiting(group, "c") == 0


def test_a_lease_that_is_shortened_ends_no_claim_ahead(tree: Client, name: str) -> None:
    """It is released before, and counts as no failed delivery."""
    group = work(tree, name, "lease 60s")
    with group.consume("c", prefetch=2) as claims, group.consume("c") as others:
        group.ctl("lease 4s")
        group.publish_many([("s", b"x"), ("s", b"y")])
        claims.get(HANG_S)
        assert others.get(HANG_S).deliveries == 1


def test_over_private_and_transient(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.bind("view it", "a.*")
    group.publish_many([("a.b", b"1"), ("c", b"2"), ("a.c", b"3")])
    with group.consume("over view", over="view it") as claims, claims.get(HANG_S) as one, claims.get(HANG_S) as two:
        assert one.body + two.body == b"13"
    with pytest.raises(errors.Exists):
        group.consume("over view", over="c")
    with group.consume("c", over="c", private=True) as claims, claims.get(HANG_S) as claim:
        assert claim.body == b"2"
        with pytest.raises(errors.Busy, match="private"):
            group.consume("c", over="c", private=True)
    with group.consume("passing", transient=True, pattern="a.c") as claims:
        assert claims.get(HANG_S).body == b"3"
        assert "passing" in group.consumers()
    assert group.consumers() == ["c", "over view"]
    group.remove_consumer("c")
    with pytest.raises(errors.NotFound):
        group.consume("c", create=False)


@pytest.mark.parametrize(
    "line",
    [
        "consumer c s private backlog 1000 full drop-old",
        "consumer c s transient backlog 2",
        "consumer c s memory",
        "consumer c s order key",
        "consumer c 'the whole' backlog 1",
    ],
)
def test_a_consumer_that_exists_keeps_its_options(tree: Client, name: str, line: str) -> None:
    group = work(tree, name)
    group.create("s", "the whole")
    group.ctl(line)
    lines = [row for row in group._ctl_lines() if "consumer" in row]
    with group.consume("c", over="the whole" if "whole" in line else "s"):
        assert [row for row in group._ctl_lines() if "consumer" in row] == lines
    if "transient" not in line:
        with group.consume("c", private=True):
            kept = lines[0].replace("private ", "").split()
            assert {*kept, "private"} == {*next(row for row in group._ctl_lines() if "consumer" in row).split()}
        with pytest.raises(errors.Exists, match="exists, over"):
            group.consume("c", over="t")


def test_a_consumer_that_is_removed_ends_it(tree: Client, name: str) -> None:
    group = work(tree, name)
    group.publish("s", b"1")
    with group.consume("c") as claims:
        claims.get(HANG_S).ack()
        with pytest.raises(TimeoutError):
            claims.get(0.01)
        group.remove_consumer("c")
        assert list(claims) == []


def test_each_message_is_for_one_of_many_threads(tree: Client, name: str) -> None:
    group = work(tree, name)
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def run(share: Group) -> None:
        with share.consume("c") as claims:
            for claim in claims:
                with claim:
                    if claim.body == b"end":
                        return
                    got.put(claim.body)

    threads = [threading.Thread(target=run, args=(group,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    group.publish_many(("s", str(number)) for number in range(300))
    group.publish_many(("s", b"end") for _ in threads)
    for thread in threads:
        thread.join()
    assert sorted(int(got.get(timeout=1)) for _ in range(300)) == list(range(300))
    assert got.empty()


def test_workers(tree: Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
    group = work(tree, name, "retries 2")
    both, done = threading.Barrier(2), queue.SimpleQueue[bytes]()

    def handler(claim: Claim) -> None:
        if claim.body == b"bad":
            raise ValueError("no good")
        both.wait(HANG_S)
        done.put(claim.body)

    with group.work("c", handler, concurrency=2):
        group.publish("s", b"bad", priority=9)
        group.publish_many(("s", str(number)) for number in range(10))
        assert sorted(int(done.get(timeout=HANG_S)) for _ in range(10)) == list(range(10))
        while not list(group.history(pattern="dead")):
            pass
    assert "no good" in caplog.text
    row = group.stats().consumers["c"]
    assert (row.handles, row.claimed, row.waiting) == (0, 0, 0)


def test_a_message_for_one_only(tree: Client, name: str) -> None:
    group = work(tree, name)
    with group.consume("a") as a, group.consume("b") as b:
        group.publish("s", b"for one", single=True)
        group.publish("s", b"for both")
        got = [a.get(HANG_S).body, b.get(HANG_S).body]
        for claims in (a, b):
            with suppress(TimeoutError):
                got.append(claims.get(0.05).body)
    assert sorted(got) == [b"for both", b"for both", b"for one"]


@pytest.mark.slow
def test_a_worker_stopped_by_its_handler_ends(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["replay all"])
    group.publish("s", b"1")
    started, stopped = threading.Event(), threading.Event()

    def handler(claim: Claim) -> None:
        started.wait(HANG_S)
        worker.stop()
        stopped.set()

    worker = group.work("w", handler)
    started.set()
    assert stopped.wait(HANG_S)
    worker.join(HANG_S)
    assert group.stats().consumers["w"].waiting == 0


@pytest.mark.parametrize("prefetch", [1, 8])
@pytest.mark.parametrize("verb", ["ack", "nack", "release", "dead", "touch"])
def test_a_claim_is_void_once_its_handle_is_closed(tree: Client, name: str, verb: str, prefetch: int) -> None:
    """Its number at the server may be another file's: there the command acknowledged another's message, or was one."""
    group = tree.group(name, create=True, ctl=["replay all", "consumer w"])
    group.publish_many([("s", b"1"), ("s", b"2")])
    claims = group.consume("w", prefetch=prefetch)
    claim = claims.get(HANG_S)
    claims.close()
    with group.consume("w", prefetch=prefetch) as others:
        other = others.get(HANG_S)
        group.publish_many([("t", b"x")])
        with pytest.raises(errors.Stale):
            getattr(claim, verb)()
        with other:
            pass
    assert [message.body for message in group.history(pattern="t")] == [b"x"]
    assert group.consumer("w").info().waiting == 2


# ---------------------------------------------------------------- claims that are lost


def is_stale(claim: Claim, verb: str) -> bool:
    """What settling it raises. No traceback of that is kept, which would hold the claim."""
    try:
        if verb == "fail":
            with claim:
                raise ZeroDivisionError
        getattr(claim, verb)()
    except errors.Stale:
        return True
    except ZeroDivisionError as error:
        return "nack of message" in error.__notes__[0]
    return False


@pytest.mark.parametrize("prefetch", [1, 8])
@pytest.mark.parametrize("verb", ["ack", "nack", "release", "dead", "touch", "fail"])
def test_a_lost_claim_is_not_held(tree: Client, name: str, verb: str, prefetch: int) -> None:
    """A worker whose leases end would hold the bodies of all that it ever lost."""
    group = work(tree, name)
    group.publish("s", b"x")
    with group.consume("c", prefetch=prefetch) as claims:
        claim = claims.get(HANG_S)
        lost = weakref.ref(claim)
        group.consumer("c").seek(1)  # all claims are void
        assert is_stale(claim, verb)
        del claim
        gc.collect()
        assert lost() is None


def test_a_claim_of_a_lost_connection_is_not_held(server: Server, name: str) -> None:
    with server.connect(reconnect=HANG_S) as client:
        group = client.group(name, create=True, ctl=["replay all", "retries 9"])
        group.publish("s", b"x")
        with group.consume("c") as claims:
            lost = weakref.ref(claims.get(HANG_S))
            gc.collect()
            assert lost() is not None, "it is open"
            server.kill()
            server.start()
            assert claims.get(HANG_S).deliveries == 2
            gc.collect()
            assert lost() is None


def test_a_claim_whose_body_cannot_be_read_has_failed(tmp_path: Path) -> None:
    """It is not in flight to a program that never got it."""
    with mqfs.open(tmp_path / "store") as tree:
        group = work(tree, "g", "retries 3")
        group.publish("s", bytes(range(251)) * 12_000)
        group.publish("s", b"next")
        log = max((tmp_path / "store" / "buckets").glob("*/*/*.log"), key=lambda path: path.stat().st_size)
        with log.open("r+b") as file:
            file.seek(500_000)
            file.write(b"damage")
        held, failures = list[Claim](), 0
        with group.consume("c") as claims:
            while not held or held[-1].body != b"next":
                try:
                    held.append(claims.get(HANG_S))
                except errors.DiskFailed:
                    failures += 1
                assert group.stats().consumers["c"].claimed == len(held)
            assert 1 <= group.stats().consumers["c"].failed <= failures
