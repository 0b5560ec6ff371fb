"""The processes of the bench, as seen by the one that starts them.

Owns their start, what they say, and their end: none outlives a `with`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import attrs

from mqfs import errors, limits
from mqfs.bench.actors import Load
from mqfs.bench.drivers import Place
from mqfs.errors import Disconnected, MqfsError

START_S = 60.0
LOOK_S = 0.1
Counts = dict[tuple[str, int], int]


class Crew:
    """Some processes that begin together. `done` holds what those that ended have told."""

    def __init__(self, place: Place, load: Load, folder: str, roles: Sequence[tuple[str, int]]) -> None:
        self.counts: Counts = {}
        self.done: list[dict[str, Any]] = []
        self._ready = 0
        self._said: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        # The engine inside a process has the store alone: there all are threads of one.
        parts = [list(roles)] if place.transport == "embedded" else [[role] for role in roles]
        self._left: dict[int, list[tuple[str, int]]] = {}
        for part in parts:
            workers = sum(role == "worker" for role, _ in part) if len(part) > 1 else 0
            told = {"place": attrs.asdict(place), "load": attrs.asdict(load), "folder": folder}
            self._start({**told, "actors": part, "marks": workers})
            self._left[len(self._processes) - 1] = part

    def _start(self, spec: dict[str, Any]) -> None:
        command = [sys.executable, "-P", "-m", "mqfs.bench.child", json.dumps(spec)]  # nothing of the current folder
        # In a session of its own: Ctrl-C is for the one process that knows what to do then.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        number = len(self._processes)
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(number, process), daemon=True).start()

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said.put((number, json.loads(line)))
        self._said.put((number, None))

    # ------------------------------------------------------------ what they say

    def begin(self) -> None:
        """When all are ready, all begin."""
        self._until(lambda: self._ready == len(self._processes), START_S, "a process of the bench did not get ready")
        self.tell("go")

    def tell(self, word: str) -> None:
        for number, process in enumerate(self._processes):
            if number in self._left:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f"{word}\n".encode())
                    process.stdin.flush()

    def look(self, seconds: float = LOOK_S) -> None:
        """Take in what they say, for so long or until one has said something. Raises what one of them failed with."""
        with contextlib.suppress(queue.Empty):
            number, said = self._said.get(timeout=seconds)
            self._hear(number, said)
            while True:
                self._hear(*self._said.get_nowait())

    def _hear(self, number: int, said: dict[str, Any] | None) -> None:
        if said is None:
            if number in self._left:
                raise Disconnected("a process of the bench ended before its time")
        elif "ready" in said:
            self._ready += 1
        elif "counts" in said:
            self.counts.update({(role, actor): count for role, actor, count in said["counts"]})
        elif "error" in said:
            raise failure(*said["error"])
        else:
            del self._left[number]
            self.done += said["done"]
            self.counts.update({(told["role"], told["number"]): told["count"] for told in said["done"]})

    def left(self, role: str) -> bool:
        """Whether one of that role has not ended."""
        return any(role == name for part in self._left.values() for name, _ in part)

    def count(self, role: str) -> int:
        return sum(count for (name, _), count in self.counts.items() if name == role)

    def told(self, role: str) -> list[dict[str, Any]]:
        """What those of a role have told, in the order of their numbers."""
        return sorted((told for told in self.done if told["role"] == role), key=lambda told: int(told["number"]))

    def _until(self, true: Callable[[], bool], seconds: float, else_: str) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise Disconnected(else_)
            self.look()

    # ------------------------------------------------------------ the end

    def cut(self) -> None:
        """What there is by now, of all that have not ended."""
        self.tell("cut")
        self._until(lambda: not self._left, limits.BENCH_DRAIN_S, "a process of the bench does not answer")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                if pipe is process.stdin:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()


def failure(name: str, detail: str) -> MqfsError:
    """An error of another process, as it was there."""
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, MqfsError):
        return found(detail)
    return MqfsError(detail)
