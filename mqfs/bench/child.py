"""A child process of the bench: `python -m mqfs.bench.child SPEC`.

The child writes a line of JSON each: when all is open; its counts, several times a
second; its reports, or its error. The parent writes `go`, `stop` (publish no more) and `cut` (report now). The child
exits when the parent is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

from mqfs.bench.actors import ROLES, Actor, Load, Producer, Worker
from mqfs.bench.drivers import Place, open_driver
from mqfs.errors import MqfsError

COUNTS_EVERY_S = 0.2


class Child:
    """The actors of this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        load = Load(**spec["load"])
        self.folder, self._group = spec["folder"], load.group
        self.actors: list[tuple[str, Actor]] = [(role, ROLES[role](load, number)) for role, number in spec["actors"]]
        self.driver = open_driver(Place(**spec["place"]))
        self._inside = spec["place"]["transport"] == "embedded"
        self._marks = spec["marks"]  # to publish after the producers of this process have ended: one a worker
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
        """Until all are done, or the parent sends `cut`."""
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
        """A line from the parent. Ends the process where the parent is gone."""
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
        """Write a worker's counts of a producer's messages to a file, as they may be long; its path."""
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


if __name__ == "__main__":
    main()
