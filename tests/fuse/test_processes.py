"""The end of processes is reported once, to all who still want to know, and no descriptor is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import trio

from mqfs.fuse.mount import Watcher
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually_async

TestBody = Callable[[Watcher], Awaitable[None]]


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[Watcher]:
    watcher = Watcher()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        with trio.fail_after(HANG_S):
            yield watcher
        nursery.cancel_scope.cancel()
    watcher.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(body: TestBody) -> None:
    async def main() -> None:
        async with watching() as watcher:
            await body(watcher)

    before = descriptors()
    trio.run(main)
    assert descriptors() == before


def test_all_who_watch_are_told_once() -> None:
    async def body(watcher: Watcher) -> None:
        told: list[int] = []
        with sleeper() as one, sleeper() as two:
            for number in (1, 2):
                assert watcher.watch(one.pid, lambda number=number: told.append(number)) is not None  # type: ignore[misc]
            assert watcher.watch(two.pid, lambda: told.append(9)) is not None
            assert len(watcher) == 2, "one descriptor a process"
            one.kill()
            await eventually_async(lambda: len(told) == 2)
            assert told == [1, 2]
            assert len(watcher) == 1
            two.kill()
            await eventually_async(lambda: told == [1, 2, 9])

    run(body)


def test_who_stopped_watching_is_not_told() -> None:
    async def body(watcher: Watcher) -> None:
        told: list[int] = []
        with sleeper() as process:
            before = descriptors()
            stop = watcher.watch(process.pid, lambda: told.append(1))
            assert stop is not None
            stop()
            stop()
            assert descriptors() == before
            stops: list[Callable[[], None]] = []

            def tell_and_stop() -> None:
                told.append(2)
                for stop in stops:
                    stop()

            watcher.watch(process.pid, tell_and_stop)
            again = watcher.watch(process.pid, lambda: told.append(3))
            assert again is not None
            stops.append(again)
            watcher.watch(process.pid, lambda: told.append(4))
            process.kill()
            await eventually_async(lambda: 4 in told)
        assert told == [2, 4], "the first to get the report stopped the second"

    run(body)


def test_a_process_that_has_ended_is_not_watched() -> None:
    async def body(watcher: Watcher) -> None:
        with sleeper() as process:
            pass
        assert watcher.watch(process.pid, lambda: None) is None
        assert watcher.watch(0, lambda: None) is None
        assert len(watcher) == 0

    run(body)


def test_a_number_that_was_given_again_is_another_process() -> None:
    """The end of the first was not heard yet when the second is watched."""

    async def body(watcher: Watcher) -> None:
        told: list[str] = []
        with sleeper() as old, sleeper() as new:
            watcher.watch(old.pid, lambda: told.append("old"))
            watched = watcher._by_pid[old.pid]
            old.kill()
            old.wait()
            # The system gives numbers again only after thousands: pretend that it did.
            watcher._by_pid[new.pid], watched.pid = watched, new.pid
            assert watcher.watch(new.pid, lambda: told.append("new")) is not None
            await eventually_async(lambda: told == ["old"])
            new.kill()
            await eventually_async(lambda: told == ["old", "new"])

    run(body)


def test_one_that_fails_does_not_keep_it_from_others(caplog: pytest.LogCaptureFixture) -> None:
    async def body(watcher: Watcher) -> None:
        told: list[int] = []
        with sleeper() as process:

            def fail() -> None:
                raise ZeroDivisionError

            watcher.watch(process.pid, fail)
            watcher.watch(process.pid, lambda: told.append(1))
            process.kill()
            await eventually_async(lambda: told == [1])

    run(body)
    assert "ZeroDivisionError" in caplog.text


def test_many() -> None:
    count = size(1000)

    async def body(watcher: Watcher) -> None:
        told: set[int] = set()
        processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(count)]
        try:
            for number, process in enumerate(processes):
                assert watcher.watch(process.pid, lambda number=number: told.add(number)) is not None  # type: ignore[misc]
            for process in processes:
                process.kill()
            await eventually_async(lambda: len(told) == count)
            assert len(watcher) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait()

    run(body)


def test_without_a_descriptor_it_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(pid: int) -> int:
        raise OSError(24, "Too many open files")

    async def body(watcher: Watcher) -> None:
        monkeypatch.setattr(os, "pidfd_open", none_left)
        stop = watcher.watch(os.getpid(), lambda: None)
        assert stop is not None
        stop()

    run(body)
    assert "not watched" in caplog.text
