"""`mqfs serve` that records how its thread works: a trio instrument, and nothing else.

    python -m tests.server.measured UID OPTIONS OF SERVE

SIGUSR1 writes the file `work` and starts a new record. In it are numbers, as `array("d")` writes them: the longest
piece of work without a switch to another task, in seconds of the thread; then for each moment recorded the monotonic
clock, how long the thread had worked, when it had last sent replies to that user, infinite while it does, and where a
request of that user was noticed the last time that there was none yet, else 0. A moment is recorded before and
after each wait for input and each piece of work for that user. Seconds of the thread are of the processor: what else
the machine does is not in them.
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
from mqfs.ninep.server.connection import Connection

flush = Connection.flush


class Work(trio.abc.Instrument):
    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.tasks: set[trio.lowlevel.Task] = set()
        self.moments = array("d")
        self.served = self.step = self.longest = 0.0
        self.looked = self.looked_before = 0.0  # for input

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        peer = task.coro.cr_frame.f_locals.get("peer")
        if peer is not None and peer.uid == self.uid:
            self.tasks.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.tasks.discard(task)

    def note(self, asked: float = 0.0) -> None:
        self.moments.extend((monotonic(), thread_time(), self.served, asked))

    def before_io_wait(self, timeout: float) -> None:
        self.note()

    def after_io_wait(self, timeout: float) -> None:
        self.looked_before, self.looked = self.looked, monotonic()
        self.note()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if task in self.tasks:
            self.note(self.looked_before)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task in self.tasks:
            self.note()
        self.step = thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, thread_time() - self.step)
        if task in self.tasks:
            self.note()

    def flush(self, connection: Connection) -> None:
        """Send replies, and record when those of the user were sent."""
        before, sent = self.served, connection.sent
        if of_user := connection.session.peer.uid == self.uid:
            self.served = inf
            self.note()
        flush(connection)
        if of_user:
            self.served = monotonic() if connection.sent > sent else before
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
    Connection.flush = lambda connection: work.flush(connection)  # type: ignore[method-assign]
    trio.run = lambda work_, *arguments: run(work_, *arguments, instruments=[work])  # type: ignore[assignment]
    command(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    main()
