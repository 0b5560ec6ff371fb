"""A program that runs bridges which kill themselves at a call to the disk or to the tree.

An order a line on standard input: `words` of `mqfs bridge fsq`; `stop`, the number of the call before which it is
killed (0: none); `calls`, a file with a byte for each call. It answers with the pid, and at its end with `ended`.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from mqfs.bridge import folder, run, seen  # loaded once, for all of them
from mqfs.cli.main import command
from mqfs.ninep.client.shared_connection import SharedConnection

DISK = ("open", "rename", "replace", "unlink", "fsync", "ftruncate", "pwrite", "stat", "fstat", "listdir")


def count_calls(stop: int, calls: int) -> Callable[[], None]:
    """A function that is called before each call."""
    numbers, write, kill, pid = itertools.count(1), os.write, os.kill, os.getpid()

    def before() -> None:
        if next(numbers) == stop:
            kill(pid, signal.SIGKILL)
        write(calls, b".")

    return before


def watch(place: Any, name: str, before: Callable[[], None]) -> None:
    """Have `before` called before a function or a method."""
    plain = getattr(place, name)

    def call(*arguments: Any, **more: Any) -> Any:
        before()
        return plain(*arguments, **more)

    setattr(place, name, call)


def bridge(order: dict[str, Any]) -> int:
    before = count_calls(order["stop"], os.open(order["calls"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    for name in DISK:
        watch(os, name, before)
    watch(fcntl, "flock", before)
    for module in (folder, seen):
        module.open = io.open  # type: ignore[attr-defined]
        watch(module, "open", before)
    watch(SharedConnection, "send", before)
    return int(command.main(["bridge", "fsq", *order["words"]], "mqfs", standalone_mode=False))


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(bridge(json.loads(line)))
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"ended": os.waitpid(pid, 0)[1]}), flush=True)


if __name__ == "__main__":
    assert run
    main()
