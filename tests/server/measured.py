"""`mqfs serve` that records how its thread works: a trio instrument, and nothing else.

    python -m tests.server.measured UID OPTIONS OF SERVE

SIGUSR1 writes the file `work` and starts a new record. In it are numbers, as `array("d")` writes them: the longest
piece of work without a switch to another task, in seconds of the thread; then for each moment recorded the monotonic
clock, how long the thread had worked, and when it had last served a connection of that user, infinite while it does.
A moment is recorded before and after each wait for input and each piece of work for that user. Seconds of the thread
are of the processor: what else the machine does is not in them.
"""

from __future__ import annotations

import os
import signal
import sys
from array import array
from math import inf
from time import monotonic, thread_time

import trio

from mqfs.cli.main import command


class Work(trio.abc.Instrument):
    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.tasks: set[trio.lowlevel.Task] = set()
        self.moments = array("d")
        self.served = self.step = self.longest = 0.0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        peer = task.coro.cr_frame.f_locals.get("peer")
        if peer is not None and peer.uid == self.uid:
            self.tasks.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.tasks.discard(task)

    def note(self) -> None:
        self.moments.extend((monotonic(), thread_time(), self.served))

    def before_io_wait(self, timeout: float) -> None:
        self.note()

    def after_io_wait(self, timeout: float) -> None:
        self.note()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task in self.tasks:
            self.served = inf
            self.note()
        self.step = thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, thread_time() - self.step)
        if task in self.tasks:
            self.served = monotonic()
            self.note()

    def tell(self, *_: object) -> None:
        with open("work.new", "wb") as file:
            array("d", [self.longest]).tofile(file)
            self.moments.tofile(file)
        os.rename("work.new", "work")
        self.moments, self.longest = array("d"), 0.0


def main() -> None:
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # another's process would take the caches along with the processor
    work, run = Work(int(sys.argv[1])), trio.run
    signal.signal(signal.SIGUSR1, work.tell)
    trio.run = lambda work_, *arguments: run(work_, *arguments, instruments=[work])  # type: ignore[assignment]
    command(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    main()
