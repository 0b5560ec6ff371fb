"""`mqfs serve` that measures how long requests wait for others: a trio instrument, and nothing else.

    python -m tests.server.measured UID OPTIONS OF SERVE

SIGUSR1 appends to the file `waits` a line of JSON: of each time that a connection of that user was served since the
last one, how long the thread had worked in that round of the event loop and in the one before, in seconds; and, as the
last number, the longest piece of work in which nobody else was served. They are seconds of the processor: what else the
machine does is not in them.
"""

from __future__ import annotations

import json
import signal
import sys
from time import thread_time

import trio

from mqfs.cli.main import command


class Waits(trio.abc.Instrument):
    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.tasks: set[trio.lowlevel.Task] = set()
        self.began = thread_time()
        self.before = 0.0  # the work of the last round
        self.waits: list[float] = []
        self.step = self.longest = 0.0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        peer = task.coro.cr_frame.f_locals.get("peer")
        if peer is not None and peer.uid == self.uid:
            self.tasks.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.tasks.discard(task)

    def before_io_wait(self, timeout: float) -> None:
        self.before = thread_time() - self.began

    def after_io_wait(self, timeout: float) -> None:
        self.began = thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task in self.tasks:
            self.waits.append(self.before + thread_time() - self.began)
        self.step = thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, thread_time() - self.step)

    def tell(self, *_: object) -> None:
        with open("waits", "a", encoding="utf-8") as file:
            print(json.dumps([*self.waits, self.longest]), file=file)
        self.waits.clear()
        self.longest = 0.0


def main() -> None:
    waits, run = Waits(int(sys.argv[1])), trio.run
    signal.signal(signal.SIGUSR1, waits.tell)
    trio.run = lambda work, *arguments: run(work, *arguments, instruments=[waits])  # type: ignore[assignment]
    command(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    main()
