"""Claims ahead, and acknowledgements without a wait: the same as claims and `ack` one by one."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import pytest

import mqfs
from mqfs import Claim, Client
from mqfs.client import Group, prefetch
from mqfs.client.prefetch import ranges
from mqfs.client.types import File
from mqfs.errors import BadRequest, DiskFull, MqfsError, NotFound, Stale
from tests.client.opening import Opening
from tests.support import ROOT
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server, environment, short_folder


def filled(tree: Client, name: str, count: int, *ctl: str) -> Group:
    group = tree.group(name, create=True, ctl=["replay all", "sync off", "backoff 1ms 1ms", *ctl])
    group.publish_many([("st"[n % 2], b"%d" % n) for n in range(count)])
    return group


def acknowledged(group: Group, consumer: str = "w") -> int:
    return int(group.stats().consumers[consumer].acknowledged)


@pytest.mark.parametrize("prefetch", [1, 2, 64, 16_384])
def test_each_message_is_given_once_in_order_and_acknowledged(tree: Client, name: str, prefetch: int) -> None:
    group, seen = filled(tree, name, 300), []
    with group.consume("w", prefetch=prefetch) as claims:
        for claim in claims:
            with claim:
                assert group.stats().consumers["w"].claimed <= prefetch
                seen.append((claim.body, claim.deliveries))
            if len(seen) == 300:
                break
    assert seen == [(b"%d" % n, 1) for n in range(300)]
    assert acknowledged(group) == 300
    assert group.stats().consumers["w"].waiting == 0


def test_an_acknowledgement_is_written_also_where_no_more_is_claimed(tree: Client, name: str) -> None:
    group = filled(tree, name, 3)
    with group.consume("w", prefetch=3) as claims:
        with claims.get(HANG_S):
            pass
        eventually(lambda: acknowledged(group) == 1)
        assert [claims.get(HANG_S).body for _ in range(2)] == [b"1", b"2"]


def test_a_connection_closes_after_a_handle_that_was_refused(tmp_path: Path) -> None:
    with mqfs.open(tmp_path / "store") as tree:
        group = filled(tree, "g", 1)
        with pytest.raises(NotFound) as refused:
            group.consume("w", create=False, prefetch=2)
    assert refused.traceback, "which keeps the handle"


def test_every_way_to_settle(tree: Client, name: str) -> None:
    group, seen = filled(tree, name, 5, "retries 9"), []
    with group.consume("w", prefetch=5) as claims:
        acked, nacked, released, dead, last = (claims.get(HANG_S) for _ in range(5))
        acked.ack()
        nacked.nack()
        released.release()
        dead.dead("no use")
        with last:
            pass
        for _ in range(2):
            with claims.get(HANG_S) as claim:
                seen.append((claim.body, claim.deliveries))
    assert sorted(seen) == [(b"1", 2), (b"2", 1)]
    assert [(letter.body, letter.headers["reason"]) for letter in group.history(pattern="dead")] == [(b"3", "no use")]
    assert acknowledged(group) == 4


def test_what_lies_ahead_of_a_slow_handler_goes_to_others(tree: Client, name: str) -> None:
    group = filled(tree, name, 4, "lease 1s")
    with group.consume("w", prefetch=4, renew=True) as slow, group.consume("w") as quick:
        with slow.get(HANG_S) as first:
            others = [quick.get(HANG_S) for _ in range(3)]
        assert [(claim.body, claim.deliveries) for claim in others] == [(b"1", 1), (b"2", 1), (b"3", 1)]
        for claim in others:
            claim.ack()
        with pytest.raises(TimeoutError):
            slow.get(0.0)
    assert first.settled
    assert acknowledged(group) == 4


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_claim_that_was_lost_is_said_once(tree: Client, name: str, prefetch: int) -> None:
    group = filled(tree, name, 1, "lease 20ms", "retries 9")
    with group.consume("w", prefetch=prefetch) as claims:
        with claims.get(HANG_S):
            eventually(lambda: group.stats().consumers["w"].failed == 1)
        with pytest.raises(Stale, match=r"ack of 1 claims failed: lost .*: 1\)"):
            claims.get(HANG_S)
        group.ctl("lease 0")
        while True:  # it may have been claimed, and lost, once more meanwhile
            try:
                with claims.get(HANG_S) as claim:
                    assert claim.deliveries > 1
                claims.close()
                break
            except Stale:
                continue
    assert acknowledged(group) == 1


def test_one_lost_claim_of_many_holds_no_other_back(tree: Client, name: str) -> None:
    group = filled(tree, name, 6)
    with group.consume("w", prefetch=6) as claims:
        six = [claims.get(HANG_S) for _ in range(6)]
        group.ctl("drop s 1")
        group.consumer("w").seek(1)  # all claims are void
        for claim in six:
            claims._ack_soon(claim)
        with pytest.raises(Stale, match=r"ack of 6 claims failed: lost .*: 1-6\)"):
            claims.get(HANG_S)
        assert claims.get(HANG_S).body == b"1"


def test_an_exception_counts_what_was_begun_and_nothing_ahead(tree: Client, name: str) -> None:
    group = filled(tree, name, 4, "retries 9")
    with suppress(ZeroDivisionError), group.consume("w", prefetch=4) as claims:
        claims.get(HANG_S)
        raise ZeroDivisionError
    with group.consume("w") as claims:
        assert [(claim.body, claim.deliveries) for claim in (claims.get(HANG_S) for _ in range(4))] == [
            (b"0", 2),
            (b"1", 1),
            (b"2", 1),
            (b"3", 1),
        ]


def test_more_than_one_command_has_room_for(tree: Client, name: str) -> None:
    group, count = filled(tree, name, 6_000), 0
    with group.consume("w", prefetch=16_384) as claims:
        for claim in claims:
            if claim.sequence % 2:
                claims._ack_soon(claim)
            count += 1
            if count == 6_000:
                break
    assert acknowledged(group) == 3_000
    assert group.stats().consumers["w"].failed == 0


def test_workers(tree: Client, name: str) -> None:
    group, seen = filled(tree, name, 300), list[bytes]()
    with group.work("w", lambda claim: seen.append(claim.body), concurrency=3, prefetch=16):
        eventually(lambda: acknowledged(group) == 300)
    assert sorted(map(int, seen)) == [*range(300)]


def test_a_worker_continues_after_a_late_acknowledgement(tree: Client, name: str) -> None:
    group, errors, turns = filled(tree, name, 1, "lease 20ms", "retries 99"), list[Exception](), list[int]()

    def handle(claim: Claim) -> None:
        turns.append(claim.deliveries)
        if claim.deliveries < 3:
            eventually(lambda: group.stats().consumers["w"].failed >= claim.deliveries)

    with group.work("w", handle, prefetch=2, on_error=lambda error, message: errors.append(error)):
        eventually(lambda: acknowledged(group) == 1)
    assert len(turns) >= 3
    assert errors
    assert {type(error) for error in errors} == {Stale}


def test_an_async_program(opening: Opening, name: str, backend: str) -> None:
    seen = []

    async def main() -> None:
        async with opening() as client:
            group = await client.group(name, create=True, ctl=["replay all", "retries 9"])
            await group.publish_many([("s", b"%d" % n) for n in range(300)])
            with suppress(ZeroDivisionError):
                async with group.consume("w", prefetch=64) as claims:
                    async for claim in claims:
                        async with claim:
                            seen.append((claim.body, claim.deliveries))
                        if len(seen) == 100:
                            await claims.get(HANG_S)  # counts as failed, and nothing ahead
                            raise ZeroDivisionError
            async with group.consume("w", prefetch=64) as claims:
                while len(seen) < 300:
                    async with await claims.get(HANG_S) as claim:
                        seen.append((claim.body, claim.deliveries))
            stats = (await group.stats()).consumers["w"]
            assert (stats.acknowledged, stats.failed, stats.waiting) == (300, 1, 0)

    anyio.run(main, backend=backend)
    assert sorted(int(body) for body, _ in seen) == [*range(300)]
    assert [body for body, deliveries in seen if deliveries > 1] == [b"100"]


def test_a_client_that_closes_writes_what_was_noted(opening: Opening, server: Server) -> None:
    for end in ("client.close()", ""):
        program = f"""
import mqfs
client = mqfs.connect({server.address!r})
group = client.group("g", create=True, ctl=["replay all"])
group.publish_many([("s", b"x")] * 4)
claims = group.consume("w", prefetch=4)
with claims.get():
    pass
{end}
"""
        subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=environment())
        with server.connect() as client:
            stats = client.group("g").stats().consumers["w"]
            assert (stats.acknowledged, stats.failed, stats.claimed) == (1, 0, 0)
            client.group("g").purge()
            server.restart()


@pytest.mark.process
def test_a_stopped_server_keeps_no_program_from_its_end() -> None:
    program = """
import os, signal, sys, mqfs
group = mqfs.connect(sys.argv[1]).group("g", create=True, ctl=["replay all"])
group.publish_many([("s", b"x")] * 4)
claims = group.consume("w", prefetch=4)
with claims.get():
    pass
os.kill(int(sys.argv[2]), signal.SIGSTOP)
"""
    with short_folder() as folder, Server.at(folder) as server:
        command = [sys.executable, "-c", program, server.address, str(server.pid)]
        try:
            subprocess.run(command, check=True, cwd=ROOT, env=environment(), timeout=HANG_S)
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_handle_that_is_dropped_is_collected(tree: Client, name: str) -> None:
    group = filled(tree, name, 2)
    claims = group.consume("w", prefetch=2)
    for _ in range(2):
        with claims.get(HANG_S):
            pass
    there = weakref.ref(claims)
    del claims
    eventually(lambda: gc.collect() is not None and there() is None)
    assert acknowledged(group) == 2


def test_without_prefetch_an_acknowledgement_leaves_with_its_block(tree: Client, name: str) -> None:
    group = filled(tree, name, 3)
    with group.consume("w") as claims:
        with claims.get(HANG_S):
            pass
        assert acknowledged(group) == 1
        with claims.get(HANG_S) as claim:
            claim.release()
        with claims.get(HANG_S) as claim:
            assert (claim.sequence, claim.deliveries) == (2, 1)
    assert acknowledged(group) == 2


@pytest.mark.parametrize("prefetch", [1, 2])
def test_an_acknowledgement_after_the_close_is_refused(tree: Client, name: str, prefetch: int) -> None:
    group = filled(tree, name, 1)
    claims = group.consume("w", prefetch=prefetch)
    with pytest.raises(MqfsError), claims.get(HANG_S):
        claims.close()
    assert acknowledged(group) == 0
    with group.consume("w") as again:
        assert again.get(HANG_S).deliveries == 1


def test_what_a_full_disk_refuses_comes_later(tree: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = filled(tree, name, 2)
    with group.consume("w", prefetch=2) as claims:
        command, refusals = claims._command, [DiskFull("no room"), DiskFull("no room")]

        def refused(file: File, line: str) -> None:
            if line.startswith("ack") and refusals:
                raise refusals.pop()
            command(file, line)

        monkeypatch.setattr(claims, "_command", refused)
        for _ in range(2):
            with claims.get(HANG_S):
                pass
        with pytest.raises(DiskFull, match=r"ack of . claims failed: no room \(messages .*\)"):
            claims.get(HANG_S)
        eventually(lambda: acknowledged(group) == 2)


def test_what_lies_ahead_on_a_full_disk_goes_to_others_once_there_is_room(
    tree: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = filled(tree, name, 4)
    with group.consume("w", prefetch=4) as slow, group.consume("w") as quick:
        command, refused, has_room = slow._command, list[str](), threading.Event()

        def full(file: File, line: str) -> None:
            if line.startswith("release") and not has_room.is_set():
                refused.append(line)
                raise DiskFull("no room")
            command(file, line)

        monkeypatch.setattr(slow, "_command", full)
        monkeypatch.setattr(prefetch, "HOLD_S", 0.05)
        with slow.get(HANG_S):
            eventually(lambda: {"release 2", "release 3", "release 4"} <= {*refused})
            has_room.set()
            others = [quick.get(patient(60)) for _ in range(3)]
        assert [(claim.body, claim.deliveries) for claim in others] == [(b"1", 1), (b"2", 1), (b"3", 1)]


def test_without_prefetch_a_claim_whose_acknowledgement_fails_stays_open(
    tree: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = filled(tree, name, 1)

    def refused(_: float | None) -> None:
        raise DiskFull("no room")

    with group.consume("w") as claims:
        with monkeypatch.context() as full, claims.get(HANG_S) as claim:
            full.setattr(claims._file, "send", lambda data: refused)
            claims._ack_soon(claim)
        with pytest.raises(DiskFull, match=r"ack of 1 claims failed: no room \(messages 1\)"):
            claims.get(HANG_S)
        assert not claim.settled
        claim.ack()
    assert acknowledged(group) == 1


def test_an_acknowledgement_that_is_not_answered_holds_up_no_get_longer_than_its_limit(
    tree: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, answered = filled(tree, name, 2), threading.Event()
    with group.consume("w") as claims:
        send = claims._file.send

        def late(data: bytes) -> Callable[..., object]:
            answer = send(data)

            def wait(deadline: float | None = None) -> object:
                if not answered.wait(None if deadline is None else max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                return answer(deadline)

            return wait

        with monkeypatch.context() as slow:
            slow.setattr(claims._file, "send", late)
            with claims.get(HANG_S):
                pass
            assert claims.get(patient(1)).body == b"1"
            with pytest.raises(TimeoutError, match="no message in"):
                claims.get(0.05)
            answered.set()
        with pytest.raises(TimeoutError):
            claims.get(0.05)
        assert acknowledged(group) == 1


def test_a_close_says_that_the_last_claim_was_lost(tree: Client, name: str) -> None:
    group = filled(tree, name, 1)
    claims = group.consume("w")
    with claims.get(HANG_S):
        group.consumer("w").seek(1)
    with pytest.raises(Stale, match="ack of 1 claims failed: lost"):
        claims.close()
    assert acknowledged(group) == 0


@pytest.mark.parametrize("prefetch", [1, 16])
def test_threads_share_a_handle(tree: Client, name: str, prefetch: int) -> None:
    group, seen = filled(tree, name, 400), []
    with group.consume("w", prefetch=prefetch) as claims:

        def work() -> None:
            for claim in claims:
                with claim:
                    seen.append(claim.body)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: acknowledged(group) == 400)
        claims.finish()
        for thread in threads:
            thread.join(HANG_S)
    assert sorted(map(int, seen)) == [*range(400)]


def test_large_bodies_and_bodies_in_parts(tree: Client, name: str) -> None:
    group = filled(tree, name, 0)
    bodies = [b"a" * 900_000, b"", b"b" * 3_000_000, b"c" * 1_044_480]
    for body in bodies:
        group.publish("s", body)
    with group.consume("w", prefetch=8) as claims:
        for body in bodies:
            with claims.get(HANG_S) as claim:
                assert claim.body == body
    assert acknowledged(group) == len(bodies)


@pytest.mark.parametrize("prefetch", [0, -1, 16_385])
def test_a_prefetch_out_of_range(tree: Client, name: str, prefetch: int) -> None:
    group = filled(tree, name, 0)
    for opening in (group.consume, group.take):
        with pytest.raises(BadRequest, match=f"prefetch {prefetch}: out of range"):
            opening("w", prefetch=prefetch)


def test_what_was_not_acknowledged_before_a_restart_comes_again(server: Server) -> None:
    with server.connect() as client, ExitStack() as opened:
        group, seen = filled(client, "g", 20, "sync always", "retries 9"), set[bytes]()
        with group.consume("w", prefetch=10, reconnect=True) as claims:
            for _ in range(5):
                with claims.get(HANG_S) as claim:
                    seen.add(claim.body)
            eventually(lambda: acknowledged(group) == 5)
            server.restart()
            again, other = set[bytes](), opened.enter_context(server.connect()).group("g")
            while other.stats().consumers["w"].low <= 20:
                try:
                    with claims.get(0.2) as claim:
                        again.add(claim.body)
                except (TimeoutError, Stale):
                    continue  # of what lay ahead and was given before the loss was seen
        assert again == {b"%d" % n for n in range(5, 20)}
        assert acknowledged(other) == 15  # since the start


WORKER = """
import sys, mqfs
with mqfs.connect(sys.argv[1]) as client, client.group("g").consume("w", prefetch=32) as claims:
    for claim in claims:
        with claim:
            print(claim.sequence, flush=True)
"""


@pytest.mark.process
def test_a_killed_worker_loses_nothing() -> None:
    """Workers with claims ahead, killed at any moment: every message is given, none is acknowledged twice."""
    dice, kills = random.Random(seed()), size(200)
    total = 1_500 * kills  # more than they take before they are killed
    with short_folder() as folder, Server.at(folder) as server, server.connect() as client:
        group = filled(client, "g", total, "retries 1000")
        done: set[int] = set()
        for _ in range(kills):
            command = [sys.executable, "-c", WORKER, server.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment()) as worker:
                assert worker.stdout is not None
                for _ in range(dice.randrange(1, 60)):
                    if line := worker.stdout.readline():
                        done.add(int(line))
                time.sleep(dice.random() * 0.02)
                worker.send_signal(signal.SIGKILL)
                done |= {int(line) for line in worker.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")}
        with group.consume("w", prefetch=64) as claims:
            while group.stats().consumers["w"].low <= total:
                with suppress(TimeoutError):
                    while True:
                        with claims.get(0.1) as claim:
                            done.add(claim.sequence)
        assert done == {*range(1, total + 1)}
        stats = group.stats().consumers["w"]
        assert (stats.acknowledged, stats.waiting, stats.dead) == (total, 0, 0)


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([7, 5, 6, 9, 1, 11, 10]) == ["1", "5-7", "9-11"]
