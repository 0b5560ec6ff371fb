"""Rules for every test: its marks, where it runs beside others, and what it may not leave behind."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from mqfs import limits
from tests.support.campaign import size, tree_seed
from tests.support.durations import DURATIONS, group_of
from tests.support.eventually import HANG_S
from tests.support.java import SHORT_LIVED
from tests.support.queues import Queues
from tests.support.server import NO_FUSE, can_mount, end_keepers

HERE = Path(__file__).parent
# What every test of a folder needs. Elsewhere the tests are marked one by one; none that is not may start a process.
MARKS = {
    "bench": "process slow",
    "docs": "process slow",
    "examples": "process slow",
    "fuse": "fuse process slow",
    "fq": "process slow",
    "house": "house",
    "http": "process slow",
    "interop": "process slow",
    "server": "process slow",
    "spark": "spark process slow",
    "spark_cluster": "spark process root slow",
    "tools": "process slow",
}
# Folders whose tests are about what a disk keeps, or about what happens while it is slow, or have few stores. The files
# of the others are in memory, where there is room for them and programs may be run: a sync takes no time there.
ON_DISK = {"bench", "docs", "fuse", "house", "interop", "replica", "ring", "server", "spark", "spark_cluster", "store"}
MEMORY, MEMORY_BYTES = "/dev/shm", 1 << 30
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

os.environ.setdefault("PYTEST_TIMEOUT", str(2 * HANG_S))
gc.set_threshold(*limits.GARBAGE)  # as the server's
tree_seed()  # asks git, which a test may not start
# Tests start hundreds of servers and a few dozen JVMs, each for seconds. Without byte code every server compiles all
# modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("SPARK_SUBMIT_OPTS", SHORT_LIVED)
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # wherever the first test has its files

# A machine that does other things meets no deadline.
settings.register_profile("mqfs", max_examples=size(1_000), deadline=None)
settings.load_profile("mqfs")

# Nothing imports it where libfuse is missing, and pip could not build it.
collect_ignore = [] if importlib.util.find_spec("pyfuse3") else ["fuse"]

# `nohup script/test &` starts us with these ignored, and a child would go on ignoring them; but tests interrupt their
# children. A signal with a handler has its default again in a child.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two a processor: half of what tests take is waiting."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Rewrite the asserts of new tests once: all workers import all tests at the same time, and each would do it."""
    new = [path for path in HERE.rglob("test_*.py") if is_new(path)]
    count = len(os.sched_getaffinity(0))
    for child in [os.fork() or import_all(new[first::count]) for first in range(count if new else 0)]:
        os.waitpid(child, 0)


def is_new(path: Path) -> bool:
    code = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
    return not code.exists() or code.stat().st_mtime < path.stat().st_mtime


def import_all(paths: list[Path]) -> NoReturn:
    for path in paths:
        with suppress(BaseException):  # a worker will say so
            importlib.import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))
    os._exit(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Not by `--dist loadgroup`: since pytest 9.2 that is no group at all, as xdist cannot rename a test any more."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of  # type: ignore[method-assign]
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        for mark in MARKS.get(folder, "").split():
            item.add_marker(mark)
    # The longest group comes first, so that no worker is left with it at the end.
    taken = json.loads(DURATIONS.read_text())["groups"]
    items.sort(key=lambda item: -taken.get(group_of(item.nodeid), 0))


def pytest_collection_finish() -> None:
    """Thousands of tests are hundreds of thousands of objects, which stay: no collection of garbage looks at them."""
    gc.freeze()


class Guard:
    """An audit hook: a test without the mark `process` may start none. `make check` runs those without."""

    watched: str | None = None

    def __call__(self, event: str, _: object) -> None:
        if self.watched is not None and event in STARTS:
            raise AssertionError(f"{self.watched} starts a process: mark it `process`")


guard = Guard()
sys.addaudithook(guard)


@cache
def has_memory() -> bool:
    """In a container it may be small, or missing, or run no programs."""
    with suppress(OSError):
        found = os.statvfs(MEMORY)
        return found.f_bavail * found.f_frsize >= MEMORY_BYTES and not found.f_flag & os.ST_NOEXEC
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    in_memory = item.path.relative_to(HERE).parts[0] not in ON_DISK and has_memory()
    tempfile.tempdir = MEMORY if in_memory else None  # None: TMPDIR
    marks = {mark.name for mark in item.iter_markers()}
    guard.watched = None if marks & {"process", "house"} else item.nodeid
    bound = item.get_closest_marker("timeout")
    bound_s = bound.args[0] if bound else float(os.environ["PYTEST_TIMEOUT"])
    # pytest-timeout interrupts a test once. One that still continues, or whose end hangs, takes its worker along.
    faulthandler.dump_traceback_later(bound_s + HANG_S, exit=True, file=errors_of(item.config))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        guard.watched = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None:  # what other tests of this worker shared ends, too
        guard.watched = None


@cache
def errors_of(config: pytest.Config) -> int:
    """A descriptor of standard error as it is without pytest's capture."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return os.dup(2)


def pytest_report_header() -> str:
    return f"campaigns of the store: MQFS_SEED={tree_seed()}"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Where the header has scrolled away."""
    if exitstatus:
        terminalreporter.write_line(f"campaigns of the store: MQFS_SEED={tree_seed()} repeats them")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.geteuid() != 0 and item.get_closest_marker("root"):
        pytest.skip("needs root")
    if item.get_closest_marker("fuse") and not can_mount():
        pytest.skip(NO_FUSE)


@pytest.fixture(autouse=True, scope="session")
def no_keeper_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The keepers of rings of servers that were killed, and never started again, end with the tests."""
    yield
    end_keepers(tmp_path_factory.getbasetemp())


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """pytest's own, or in memory: see ON_DISK. There it is removed with the test."""
    if tempfile.tempdir is None:
        yield request.getfixturevalue("tmp_path")
        return
    name = re.sub(r"\W", "_", request.node.name)[:30]
    with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
        close_queues()


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """select(2), which Spark uses, knows 1,024."""
    yield
    close_queues()


def close_queues() -> None:
    while Queues.on_disk:
        with suppress(Exception):  # it may have been left in the middle, or have no disk any more
            Queues.on_disk.pop().close()
