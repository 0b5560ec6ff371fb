"""One process of the bench: `python -m mqfs.bench.child SPEC`.

Owns the talk with the process that started it. That one is told, a line of JSON each: that all is open; some times a
second how far it is; what came of it, or what went wrong. It says `go`, `stop` (publish no more) and `cut` (tell what
there is by now); when it is gone, so is this.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from typing import Any

from mqfs.bench.actors import ROLES, Actor, Load, Producer, Worker
from mqfs.bench.drivers import Place, open_driver
from mqfs.errors import MqfsError

TOLD_EVERY_S = 0.2


class Part:
    """The actors of this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        load = Load(**spec["load"])
        self.folder, self._group = spec["folder"], load.group
        self.actors: list[tuple[str, Actor]] = [(role, ROLES[role](load, number)) for role, number in spec["actors"]]
        self.way = open_driver(Place(**spec["place"]))
        self._inside = spec["place"]["transport"] == "embedded"
        self._marks = spec["marks"]  # so many end marks when its producers have ended: for workers in this process
        self._producing = sum(role == "producer" for role, _ in self.actors)
        self.failed: list[Exception] = []
        self._left = len(self.actors)
        self._lock = threading.Lock()
        self._over_reads, self._over_writes = os.pipe()

    def run(self) -> None:
        for _, actor in self.actors:
            actor.prepare(self.way)
        say(ready=True)
        if self.hear() != "go":
            return
        for _, actor in self.actors:
            threading.Thread(target=self._act, args=(actor,), daemon=True).start()
        self._watch()
        if self.failed:
            raise self.failed[0]
        told = [self._told(role, actor) for role, actor in self.actors]
        if self._marks:
            told[0]["acknowledged"] = self.way.acknowledged(self._group)  # a count that ends with the engine
        self.let_go()
        say(done=told)

    def let_go(self) -> None:
        """The engine inside leaves its store in order, for who has it next."""
        if self._inside:
            self.way.close()

    def _act(self, actor: Actor) -> None:
        try:
            actor.run()
            if isinstance(actor, Producer):
                self._produced(actor)
        except Exception as error:
            self.failed.append(error)
        with self._lock:
            self._left -= 1
            if not self._left or self.failed:
                os.write(self._over_writes, b".")

    def _produced(self, producer: Producer) -> None:
        with self._lock:
            self._producing -= 1
            if not self._producing:
                for _ in range(self._marks):
                    producer.mark()

    def _watch(self) -> None:
        """Until all are done, or it is told to be."""
        while True:
            said, _, _ = select.select([0, self._over_reads], [], [], TOLD_EVERY_S)
            if self._over_reads in said:
                return
            if 0 in said:
                word = self.hear()
                for _, actor in self.actors:
                    actor.stop.set()
                if word == "cut":
                    return
            say(counts=[[role, actor.number, actor.count] for role, actor in self.actors])

    def hear(self) -> str:
        """A line; the process ends where nobody is left to say one."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                os._exit(1)
            line += byte
        return line.decode().strip()

    def _told(self, role: str, actor: Actor) -> dict[str, Any]:
        told = {"role": role, "number": actor.number, **actor.told()}
        if isinstance(actor, Worker):
            told["seen"] = [self._kept(actor.number, i, seen) for i, seen in enumerate(actor.look.seen)]
        return told

    def _kept(self, number: int, producer: int, seen: bytearray) -> str:
        """What a worker saw of a producer, in a file: it may be long."""
        path = os.path.join(self.folder, f"{number}.{producer}.seen")
        with open(path, "wb") as file:
            file.write(bytes(seen))
        return path


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it says when to stop
    spec, part = json.loads(sys.argv[1]), None
    try:
        part = Part(spec)
        part.run()
    except MqfsError as error:
        say(error=[type(error).__name__, error.detail])
    except Exception as error:
        say(error=["", f"{type(error).__name__}: {error}"])
    if part is not None:
        part.let_go()
    sys.stdout.flush()
    os._exit(0)  # threads may still wait for a message


if __name__ == "__main__":
    main()
