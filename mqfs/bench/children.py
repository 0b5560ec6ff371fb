"""The child processes of the bench, seen by the parent: none outlives a `with` block."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from mqfs import errors, limits
from mqfs.bench.actors import Load
from mqfs.bench.drivers import Place
from mqfs.errors import Disconnected, MqfsError

START_S = 60.0
POLL_S = 0.1
Counts = dict[tuple[str, int], int]


class Crew:
    """Processes that begin together. `done` holds the reports of those that have ended."""

    def __init__(self, place: Place, load: Load, folder: str, roles: Sequence[tuple[str, int]]) -> None:
        self.counts: Counts = {}
        self.done: list[dict[str, Any]] = []
        self._ready = 0
        self._messages: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        # An embedded engine has the store alone: then all actors are threads of one process.
        parts = [list(roles)] if place.transport == "embedded" else [[role] for role in roles]
        self._running: dict[int, list[tuple[str, int]]] = {}
        for part in parts:
            workers = sum(role == "worker" for role, _ in part) if len(part) > 1 else 0
            spec = {"place": attrs.asdict(place), "load": attrs.asdict(load), "folder": folder}
            self._start({**spec, "actors": part, "marks": workers})
            self._running[len(self._processes) - 1] = part

    def _start(self, spec: dict[str, Any]) -> None:
        # -P: nothing is imported from the current folder.
        command = [sys.executable, "-P", "-m", "mqfs.bench.child", json.dumps(spec)]
        # In a session of its own: only the parent handles Ctrl-C.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        number = len(self._processes)
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(number, process), daemon=True).start()

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._messages.put((number, json.loads(line)))
        self._messages.put((number, None))

    # ------------------------------------------------------------ messages

    def begin(self) -> None:
        """Start all actors, once all processes are ready."""
        self._until(lambda: self._ready == len(self._processes), START_S, "bench failed: a child process is not ready")
        self.send("go")

    def send(self, word: str) -> None:
        for number, process in enumerate(self._processes):
            if number in self._running:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f"{word}\n".encode())
                    process.stdin.flush()

    def poll(self, seconds: float = POLL_S) -> None:
        """Handle the children's messages; waits at most that long for the first. Raises the error of a child."""
        with contextlib.suppress(queue.Empty):
            number, message = self._messages.get(timeout=seconds)
            self._handle(number, message)
            while True:
                self._handle(*self._messages.get_nowait())

    def _handle(self, number: int, message: dict[str, Any] | None) -> None:
        if message is None:
            if number in self._running:
                raise Disconnected("bench failed: a child process ended early")
        elif "ready" in message:
            self._ready += 1
        elif "counts" in message:
            self.counts.update({(role, actor): count for role, actor, count in message["counts"]})
        elif "error" in message:
            raise error_of(*message["error"])
        else:
            del self._running[number]
            self.done += message["done"]
            self.counts.update({(done["role"], done["number"]): done["count"] for done in message["done"]})

    def is_running(self, role: str) -> bool:
        """Whether an actor of that role has not ended."""
        return any(role == name for part in self._running.values() for name, _ in part)

    def count(self, role: str) -> int:
        return sum(count for (name, _), count in self.counts.items() if name == role)

    def reports(self, role: str) -> list[dict[str, Any]]:
        """The reports of a role's actors, by number."""
        return sorted((done for done in self.done if done["role"] == role), key=lambda done: int(done["number"]))

    def _until(self, condition: Callable[[], bool], seconds: float, failure: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Disconnected(failure)
            self.poll()

    # ------------------------------------------------------------ the end

    def collect(self) -> None:
        """Have all that have not ended report now."""
        self.send("cut")
        self._until(lambda: not self._running, limits.BENCH_DRAIN_S, "bench failed: a child process does not answer")

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                if pipe is process.stdin:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()


def error_of(name: str, detail: str) -> MqfsError:
    """An error of another process, in its own class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MqfsError):
        return kind(detail)
    return MqfsError(detail)
