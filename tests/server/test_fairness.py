"""The turns of one user's connections: an end of one of them, at any moment, leaves the turn to the next."""

from __future__ import annotations

import itertools
import socket
from contextlib import suppress

import pytest
import trio
import trio.testing

from mqfs import limits
from mqfs.serving.fairness import _WATCHED_S, Fairness, FairQueue


@pytest.mark.parametrize("waits", [False, True])
def test_a_connection_that_is_cancelled_while_it_ends_passes_the_turn(waits: bool) -> None:
    async def main() -> None:
        fairness = Fairness()
        other, queue = fairness.of("other"), fairness.of("user")
        fairness.shared(other)  # from here on turns are shared
        async with trio.open_nursery() as nursery:
            cancelled = trio.CancelScope()
            nursery.start_soon(end, queue, cancelled)
            if waits:
                nursery.start_soon(end, queue, trio.CancelScope())
            cancelled.cancel()
        with trio.fail_after(5):
            await queue.end()

    async def end(queue: FairQueue, scope: trio.CancelScope) -> None:
        with scope:
            await queue.end()

    trio.run(main)


def test_a_connection_that_has_the_turn_ends_in_it() -> None:
    """It was given the turn while it was already over: it must not wait for itself."""

    async def main() -> None:
        fairness = Fairness()
        queue = fairness.of("user")
        fairness.shared(fairness.of("other"))
        queue.owner = trio.lowlevel.current_task()
        with trio.fail_after(5):
            await queue.acquire()
            await queue.end()
        assert queue.owner is None

    trio.run(main)


def test_connections_are_accepted_slowly_while_others_ask_whoever_asked_last() -> None:
    async def main() -> None:
        fairness = Fairness()
        fairness.shared(fairness.of("polite"))
        fairness.shared(queue := fairness.of("greedy"))
        began = trio.current_time()
        await fairness.accepted("greedy")
        assert trio.current_time() - began >= limits.ACCEPTED_S
        assert fairness.last is queue

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_long_work_is_done_in_short_pieces_after_another_user_asked_during_it() -> None:
    """Also where no request came between two pieces: the other one asks again."""
    fairness = Fairness()
    fairness.shared(fairness.of("other"))
    fairness.changed_at = 0.0  # it is long since a second user asked
    assert fairness.piece_s(False) == limits.LOOKING_S
    assert fairness.piece_s(True) == limits.LOOKING_S
    fairness.shared(fairness.of("other"))
    assert fairness.piece_s(True) == limits.PIECE_S
    assert fairness.piece_s(True) == limits.PIECE_S


def test_a_connection_waits_again_in_the_moment_in_which_the_watch_of_a_crowd_ends() -> None:
    """The watch ends where none has waited for some time; two of them at once would end the server."""

    async def main() -> None:
        clock = trio.lowlevel.current_clock()
        queue = Fairness().of("user")
        for _ in range(limits.IDLE_AT_ONCE):
            queue.join()
        readable = queue.join()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for ticks in range(12):  # after the moment: in one of them the watch has decided, and has not ended
                theirs.send(b"x")
                await readable(ours.fileno())
                ours.recv(1)
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(_WATCHED_S)  # type: ignore[attr-defined]
                for _ in range(ticks):
                    await trio.lowlevel.checkpoint()
                with trio.move_on_after(1):
                    await readable(ours.fileno())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))


def test_any_number_of_connections_wait_for_input() -> None:
    """Each is woken by its own input, at the end of its client, and where its server ends it; in any order."""

    async def main() -> None:
        queue, woken = Fairness().of("user"), list[int]()
        pairs = [socket.socketpair() for _ in range(3 * limits.IDLE_AT_ONCE)]

        async def read(number: int) -> None:
            with suppress(trio.ClosedResourceError):
                await queue.join()(pairs[number][0].fileno())
            woken.append(number)

        async def come(count: int) -> None:
            with trio.fail_after(30):
                while len(woken) < count:
                    await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            for number in range(len(pairs)):
                nursery.start_soon(read, number)
            last = len(pairs) - 1
            for count, number in enumerate((last, 0, last - 1), 1):
                pairs[number][1].send(b"x")
                await come(count)
            assert woken == [last, 0, last - 1]
            pairs[last - 2][1].close()
            pairs[1][1].close()
            await come(5)
            for number in (2, last - 3):
                queue.closing(pairs[number][0].fileno())
            await come(7)
            assert sorted(woken) == [0, 1, 2, last - 3, last - 2, last - 1, last]
            for number in set(range(len(pairs))) - {*woken}:
                pairs[number][1].send(b"x")
        assert sorted(woken) == [*range(len(pairs))]
        for sock in itertools.chain(*pairs):
            sock.close()

    trio.run(main)
