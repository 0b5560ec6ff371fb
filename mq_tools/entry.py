"""The entry points of the commands.

Importing a command takes a third of a second. During the import Ctrl-C ends the process at once: there is nothing to
lose yet, and Python's own handler would print a traceback of the import.
"""

from __future__ import annotations

import signal
from importlib import import_module


def mqfs() -> int:
    return _run("mqfs.cli.main")


def mount() -> int:
    """mount.mqfs(8)."""
    return _run("mqfs.cli.mount_helper")


def mq() -> int:
    return _run("mq_tools.mq.cli")


def mq_cat() -> int:
    return _run("mq_cat.cli")


def mq_work() -> int:
    return _run("mq_tools.work.cli")


def pin() -> int:
    return _run("mq_tools.pin.cli")


def _run(module: str) -> int:
    is_caught = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, and stays so
    if is_caught:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(module).main
    if is_caught:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(main() or 0)
