"""The length of common operations: calls of Python functions, their files, and moves between files.

    python -m tests.house.trace [OPERATION]

A move is a call from one file into another. With the name of an operation each call of it is listed, indented by depth.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.support import ROOT
from tests.support.queues import Queues

SOURCES = f"{ROOT}/mqfs/"


class Call(NamedTuple):
    depth: int
    caller: str  # file
    file: str
    name: str


class Trace(NamedTuple):
    """The calls of functions of `mqfs`."""

    calls: list[Call]

    @property
    def files(self) -> int:
        return len({call.file for call in self.calls})

    @property
    def moves(self) -> int:
        return sum(call.caller != call.file for call in self.calls)


def trace(do: Callable[[], Any]) -> Trace:
    calls: list[Call] = []
    depth = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(SOURCES):
            return
        if event == "return":
            depth -= 1
            return
        code, caller = frame.f_code, frame.f_back.f_code.co_filename
        calls.append(Call(depth, caller, code.co_filename, code.co_qualname))
        depth += 1

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return Trace(calls)


def _least(runs: Iterator[Trace]) -> Trace:
    return min(runs, key=lambda found: len(found.calls))


def operations(disk: Path) -> Iterator[tuple[str, Trace]]:
    """Yield each operation with its trace, the shortest of several runs."""
    queues = Queues("replay all")
    writer = queues.at("s", os.O_WRONLY)
    yield "write", _least(trace(lambda: writer.write(b"x")) for _ in range(5))
    queues.consumer()
    worker = queues.worker()
    for _ in range(20):
        writer.write(b"x")
    pairs = [(trace(lambda: worker.read(100)), trace(lambda: worker.write(b"ack\n"))) for _ in range(5)]
    claims, acks = zip(*pairs, strict=True)
    yield "claim", _least(iter(claims))
    yield "ack", _least(iter(acks))
    worker.close()
    yield "worker gone", _least(trace(gone) for gone in _workers_that_go(queues, writer))
    yield "redelivery", _least(_redeliveries(queues, writer))
    yield "ctl line", _least(trace(lambda: queues.ctl("retries 3")) for _ in range(5))
    stored = Queues("replay all", path=disk / "store")
    stored.consumer()
    stored.at("s", os.O_WRONLY).write(b"x")
    stored.worker().read(100)
    yield "restart", trace(stored.restart)
    stored.close()


def _workers_that_go(queues: Queues, writer: Any) -> Iterator[Callable[[], Any]]:
    for _ in range(5):
        worker = queues.worker()
        writer.write(b"x")
        assert worker.read(100)
        yield worker.close


def _redeliveries(queues: Queues, writer: Any) -> Iterator[Trace]:
    """Yield traces of a claim of a message that another worker released, without other messages."""
    for _ in range(5):
        first, second = queues.worker(), queues.worker()
        assert first.read(100)
        first.close()
        yield trace(lambda second=second: second.read(100))  # type: ignore[misc]
        second.write(b"ack\n")
        second.close()


def main(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        found = dict(operations(Path(folder)))
    for name in names:
        for call in found[name].calls:
            print(f"{'  ' * call.depth}{call.file.removeprefix(SOURCES)}: {call.name}")
    print(f"{'':<12} calls  files  moves")
    for name, way in found.items():
        print(f"{name:<12} {len(way.calls):5}  {way.files:5}  {way.moves:5}")


if __name__ == "__main__":
    main(sys.argv[1:])
