"""Commands that take long say on a terminal how far they are, and what was done where Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.model import User
from mqfs.store.store import DiskStore
from tests.support.eventually import HANG_S
from tests.support.server import environment, mqfs

GROUPS = 20
# A disk on which an open takes its time, once a folder of groups is looked at.
SLOW_DISK = """
import os, sys, time
real = os.open
def slow(path, *more, **named):
    if ".log" in str(path):
        time.sleep(0.06)
    return real(path, *more, **named)
os.open = slow
from mqfs.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of some groups, closed."""
    path = tmp_path_factory.mktemp("progress") / "store"
    user = User(os.geteuid(), os.getegid())
    disk = DiskStore(str(path))
    tree = Tree(disk, SystemClock(), owner=user)
    for number in range(GROUPS):
        tree.mkdir(user, tree.root, f"g{number}", 0o755)
    tree.close()
    disk.close()
    return path


@contextmanager
def on_a_terminal(store: Path, *arguments: str) -> Iterator[pexpect.spawn]:
    process = pexpect.spawn(
        sys.executable,
        ["-c", SLOW_DISK, *arguments],
        cwd=str(store.parent),
        env=environment(TERM="xterm"),
        encoding="utf-8",
        timeout=HANG_S,
        dimensions=(24, 120),
    )
    try:
        yield process
    finally:
        process.close(force=True)


def ended(process: pexpect.spawn) -> int | None:
    process.expect(pexpect.EOF)
    process.wait()
    return process.exitstatus


def test_a_check(store: Path) -> None:
    with on_a_terminal(store, "check", "store") as process:
        process.expect(rf" s   \d+ of {GROUPS + 1} groups checked   Ctrl-C ends it")
        process.expect("store: sound\r\n")
        assert ended(process) == 0


@pytest.mark.parametrize("fix", [(), ("--fix",)])
def test_a_check_that_is_interrupted(store: Path, fix: tuple[str, ...]) -> None:
    with on_a_terminal(store, "check", *fix, "store") as process:
        process.expect(rf" [1-9]\d* of {GROUPS + 1} groups checked")
        process.sendintr()
        process.expect(rf"mqfs: interrupted: [1-9]\d* of {GROUPS + 1} groups checked")
        assert ended(process) == 130
    assert mqfs("check", "store", cwd=store.parent).stdout == "store: sound\n"


def test_problems_stand_above_the_line(store: Path) -> None:
    """And are on standard output alone."""
    wrong = store / "buckets" / "ff" / "255"
    wrong.mkdir(parents=True)
    (wrong / f"{1:020d}.log").write_bytes(b"nothing")
    try:
        with on_a_terminal(store, "check", "store") as process:
            process.expect(rf" of {GROUPS + 2} groups checked")
            process.expect(r"group 255: [^\n]*\r\n")
            assert ended(process) == 1
    finally:
        (wrong / f"{1:020d}.log").unlink()
        wrong.rmdir()


def test_a_start(store: Path) -> None:
    with on_a_terminal(store, "serve", "--store", "store", "--listen", "unix!sock") as process:
        process.expect(rf" s   [1-9]\d* of {GROUPS + 1} groups recovered   Ctrl-C ends it")
        process.expect("mqfs: ready\r\n")
        process.sendintr()
        process.expect("mqfs: SIGINT: stopping\r\n")
        assert ended(process) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted(store: Path, number: signal.Signals) -> None:
    """It ends at the next group, and the store is as sound as before."""
    with on_a_terminal(store, "serve", "--store", "store", "--listen", "unix!sock") as process:
        process.expect(rf" [1-9]\d* of {GROUPS + 1} groups recovered")
        process.kill(number)
        process.expect(rf"mqfs: {number.name}: start ended: [1-9]\d* of {GROUPS + 1} groups recovered\r\n")
        assert ended(process) == 0
    assert mqfs("check", "store", cwd=store.parent).stdout == "store: sound\n"


def test_nothing_where_nobody_looks(store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW_DISK, "check", "store"],
        cwd=store.parent,
        env=environment(TERM="xterm"),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "store: sound\n", "")
