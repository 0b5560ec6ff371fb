"""A program that runs bridges which kill or stop themselves at a call to the disk or to the tree.

An order a line on standard input: `words` of `mqfs bridge fsq`; `stop`, the number of the call before which it is
killed (0: none); `calls`, a file with a byte for each call; `pauses`: it is stopped instead, before a request to the
tree or before an answer. It answers with the pid, and at its end with `ended`.
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

from mqfs.bridge import (
    folder,
    importer,  # loaded once, for all of them
    run,
)
from mqfs.cli.main import command
from mqfs.ninep.client import connection
from mqfs.ninep.client.connection import Client

DISK = ("open", "rename", "replace", "unlink", "fsync", "ftruncate", "pwrite", "stat", "fstat", "listdir")


def count_calls(stop: int, path: str, number: int) -> Callable[[], None]:
    """A function that is called before each call. Where the file is removed, no signal comes any more."""
    calls = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    numbers, write, kill, access, pid = itertools.count(1), os.write, os.kill, os.access, os.getpid()

    def before() -> None:
        if next(numbers) == stop and access(path, os.F_OK):
            kill(pid, number)
        write(calls, b".")

    return before


def watch(place: Any, name: str, before: Callable[[], None]) -> None:
    """Have `before` called before a function or a method."""
    plain = getattr(place, name)

    def call(*arguments: Any, **more: Any) -> Any:
        before()
        return plain(*arguments, **more)

    setattr(place, name, call)


def watch_disk(before: Callable[[], None]) -> None:
    for name in DISK:
        watch(os, name, before)
    watch(fcntl, "flock", before)
    for module in (folder, importer):
        module.open = io.open  # type: ignore[attr-defined]
        watch(module, "open", before)


def bridge(order: dict[str, Any]) -> int:
    before = count_calls(order["stop"], order["calls"], signal.SIGSTOP if order["pauses"] else signal.SIGKILL)
    if not order["pauses"]:
        watch_disk(before)
    connect = connection.connect

    def first(*arguments: Any, **options: Any) -> Client:
        """The first connection, which is not stopped: a bridge that never reached a server ends."""
        setattr(connection, "connect", connect)  # noqa: B010
        client = connect(*arguments, **options)
        watch(Client, "_send", before)
        if order["pauses"]:
            watch(Client, "wait", before)
        return client

    setattr(connection, "connect", first)  # noqa: B010
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
