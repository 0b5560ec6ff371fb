"""Processes that share a ring. A forked child attaches again; its exit status reports what failed in it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mqfs.ring import Ring, attach
from tests.support.eventually import eventually


def fork(ring: Ring, act: Callable[[Ring], None]) -> int:
    """Fork a child that attaches to the ring and calls `act`. Return its process number."""
    fd = os.dup(ring.fileno())
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        act(attach(fd))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def ended(pid: int) -> int:
    """Wait for the child. Return its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def child(ring: Ring, act: Callable[[Ring], None]) -> Iterator[int]:
    """Fork a child, and yield its process number. It is killed at the end of the block if it still runs."""
    pid = fork(ring, act)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def state_of(pid: int) -> str:
    """Return the state of a process: T stopped, S asleep, R running, Z dead."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def stopped(pid: int) -> None:
    eventually(lambda: state_of(pid) == "T")
