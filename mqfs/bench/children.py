"""The child processes of the bench.

The parent's side is `Crew`: no child outlives its `with` block. The child's side is `python -m mqfs.bench.children
SPEC`.

The child writes lines of JSON: one when all is open, one with its counts several times a second, and one with its
reports, or its error. The parent writes `go`, `stop` (publish no more) and `cut` (report now). The child exits when the
parent has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from mqfs import errors, limits
from mqfs.bench.actors import ROLES, Actor, Load, Place, Producer, Worker, open_driver
from mqfs.errors import Disconnected, MqfsError

COUNTS_EVERY_S = 0.2


class Child:
    """The actors of this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        load = Load(**spec["load"])
        self.folder, self._group = spec["folder"], load.group
        self.actors: list[tuple[str, Actor]] = [(role, ROLES[role](load, number)) for role, number in spec["actors"]]
        self.driver = open_driver(Place(**spec["place"]))
        self._inside = spec["place"]["transport"] == "embedded"
        self._marks = spec["marks"]  # end marks to publish once the producers of this process ended, one per worker
        self._producing = sum(role == "producer" for role, _ in self.actors)
        self.failed: list[Exception] = []
        self._running = len(self.actors)
        self._lock = threading.Lock()
        self._over_reads, self._over_writes = os.pipe()

    def run(self) -> None:
        for _, actor in self.actors:
            actor.prepare(self.driver)
        say(ready=True)
        if self.hear() != "go":
            return
        began_s = time.process_time()
        for _, actor in self.actors:
            threading.Thread(target=self._act, args=(actor,), daemon=True).start()
        self._watch()
        if self.failed:
            raise self.failed[0]
        reports = [self._report(role, actor) for role, actor in self.actors]
        if self._marks:
            acknowledged = self.driver.count_acknowledged(self._group)  # the count is lost with the engine
            reports[0]["acknowledged"] = acknowledged
        self.close()
        reports[0]["cpu_s"] = time.process_time() - began_s
        say(done=reports)

    def close(self) -> None:
        """Close an embedded engine, so that its store can be opened again."""
        if self._inside:
            self.driver.close()

    def _act(self, actor: Actor) -> None:
        try:
            actor.run()
            if isinstance(actor, Producer):
                self._on_produced(actor)
        except Exception as error:
            self.failed.append(error)
        with self._lock:
            self._running -= 1
            if not self._running or self.failed:
                os.write(self._over_writes, b".")

    def _on_produced(self, producer: Producer) -> None:
        with self._lock:
            self._producing -= 1
            if not self._producing:
                for _ in range(self._marks):
                    producer.mark()

    def _watch(self) -> None:
        """Report counts until all actors are done, or the parent sends `cut`."""
        while True:
            ready, _, _ = select.select([0, self._over_reads], [], [], COUNTS_EVERY_S)
            if self._over_reads in ready:
                return
            if 0 in ready:
                word = self.hear()
                for _, actor in self.actors:
                    actor.stop.set()
                if word == "cut":
                    return
            say(counts=[[role, actor.number, actor.count] for role, actor in self.actors])

    def hear(self) -> str:
        """Return a line from the parent. End the process if the parent has ended."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                os._exit(1)
            line += byte
        return line.decode().strip()

    def _report(self, role: str, actor: Actor) -> dict[str, Any]:
        report = {"role": role, "number": actor.number, **actor.report()}
        if isinstance(actor, Worker):
            report["receipts"] = [self._save(actor.number, i, counts) for i, counts in enumerate(actor.check.receipts)]
        return report

    def _save(self, number: int, producer: int, receipts: bytearray) -> str:
        """Write a worker's counts of a producer's messages to a file, as they may be long. Return its path."""
        path = os.path.join(self.folder, f"{number}.{producer}.receipts")
        with open(path, "wb") as file:
            file.write(bytes(receipts))
        return path


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    spec, child = json.loads(sys.argv[1]), None
    try:
        child = Child(spec)
        child.run()
    except MqfsError as error:
        say(error=[type(error).__name__, error.detail])
    except Exception as error:
        say(error=["", f"{type(error).__name__}: {error}"])
    if child is not None:
        child.close()
    sys.stdout.flush()
    os._exit(0)  # threads may still wait for a message


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
        # An embedded engine locks its store: then all actors are threads of one process.
        parts = [list(roles)] if place.transport == "embedded" else [[role] for role in roles]
        self._running: dict[int, list[tuple[str, int]]] = {}
        for part in parts:
            workers = sum(role == "worker" for role, _ in part) if len(part) > 1 else 0
            spec = {"place": attrs.asdict(place), "load": attrs.asdict(load), "folder": folder}
            self._start({**spec, "actors": part, "marks": workers})
            self._running[len(self._processes) - 1] = part

    def _start(self, spec: dict[str, Any]) -> None:
        # -P: nothing is imported from the current folder.
        command = [sys.executable, "-P", "-m", "mqfs.bench.children", json.dumps(spec)]
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
        """Handle the children's messages. Wait at most `seconds` for the first. Raises the error of a child."""
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
        """Whether any actor of that role is still running."""
        return any(role == name for part in self._running.values() for name, _ in part)

    def count(self, role: str) -> int:
        return sum(count for (name, _), count in self.counts.items() if name == role)

    def reports(self, role: str) -> list[dict[str, Any]]:
        """Return the reports of a role's actors, by number."""
        return sorted((done for done in self.done if done["role"] == role), key=lambda done: int(done["number"]))

    def _until(self, condition: Callable[[], bool], seconds: float, failure: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Disconnected(failure)
            self.poll()

    # ------------------------------------------------------------ the end

    def collect(self) -> None:
        """Have all running actors report now."""
        self.send("cut")
        self._until(lambda: not self._running, limits.BENCH_DRAIN_S, "bench failed: a child process does not answer")

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


def error_of(name: str, detail: str) -> MqfsError:
    """Return an error of another process, in its own class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MqfsError):
        return kind(detail)
    return MqfsError(detail)


if __name__ == "__main__":
    main()
