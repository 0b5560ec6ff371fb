"""An open that the disk refuses has taken nothing, and a close that it refuses has given back everything."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs import errors
from tests.engine.nine import NineSubject
from tests.engine.publishing.test_crash import Lying
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import SMALL, lowered

R, W, RW = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
OPENS = {
    "s": (R, W, RW), "v": (R,), "order": (R,), ".cursor": (RW,), ".put": (RW,), ".batch": (RW,), "ctl": (R, RW),
    ".stats": (R,), ".who": (R,), ".errors": (R,), ".kept/s": (R,), ".consumers/w": (R, W, RW),
    ".consumers/.s": (R, W, RW), ".txn/ctl": (RW,), ".txn/p/s": (W,), ".txn/p/.batch": (RW,), ".txn/p/.put": (RW,),
}  # fmt: skip
SETTINGS = {
    "all": ("replay all",),
    "last": ("replay last",),
    "off": ("replay off",),
    "one": ("deliver one",),
    "bounded": ("deliver one", "depth 3", "full drop-old"),
}
FAULTS = [(errno.EIO, True), (errno.EMFILE, True), (errno.ENOSPC, False), (errno.EIO, False)]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs").setLevel(logging.NOTSET)


def written(settings: str) -> LyingDisk:
    """Some segments, of which what `depth` cut is still in the log after a kill."""
    disk = LyingDisk()
    u = Lying(disk)
    u.stream("s")
    u.ctl("sync off", *SETTINGS[settings], "consumer w private", "bind v s")
    u.write("s", *(b"%100d" % number for number in range(40)))
    u.put(b"only", single=True)
    u.group.log.upkeep.sync()
    return disk.after_kill()


def started(disk: LyingDisk) -> Lying:
    u = Lying(disk)
    u.part("p")
    return u


def taken(u: Lying) -> dict[str, Any]:
    """What open files have taken."""
    group, tree = u.group, u.tree
    return {
        "files": tree.open_files.count,
        "share": dict(tree.open_files.quota_use(None)) or tree.open_files._shares.of(ROOT.uid),
        "memory": tree.memory.used,
        "streams": {s.name: (s.opens, len(s.readers)) for s in group.numbers.values()},
        "views": {view.name: len(view.readers) for view in group.views.values()},
        "log readers": (len(group.fanout.log_readers), len(group.fanout.cursors)),
        "consumers": {c.name: (c.opens, len(c.receivers)) for c in group.consumers.every() if c.opens or c.receivers},
    }


class Engine:
    """Opens files of the tree itself."""

    def __init__(self, u: Lying) -> None:
        self.u = u

    def open(self, path: str, flags: int) -> Any:
        return self.u.at(path, flags)

    def close(self, file: Any) -> None:
        file.close()


class Nine(NineSubject):
    """Opens them through a 9P connection."""

    def __init__(self, u: Lying) -> None:
        self.connect(u.tree)

    def open(self, path: str, flags: int) -> Any:  # type: ignore[override]
        return self.do(self.caller.open(f"g/{path}", flags))

    def close(self, file: Any) -> None:  # type: ignore[override]
        self.do(self.caller.clunk(file.fid))


def attempt(face: type, found: LyingDisk, path: str, flags: int, number: int, looks: bool, call: int) -> bool:
    """Open while that call fails, and again without a fault. False: it makes fewer calls."""
    disk = found.copy()
    u = started(disk)
    at = face(u)
    before = taken(u)
    disk.fail_with = number
    if looks:
        disk.fail_look_at = disk.looks + call
    else:
        disk.fail_at = disk.calls + call
    try:
        at.close(at.open(path, flags))
    except errors.MqfsError:
        assert disk.failed, f"{path} refused without a fault"
    disk.fail_at = disk.fail_look_at = 0
    assert taken(u) == before, f"{path}: call {call} failed: {disk.failed}"
    if u.group.log.end.failed is None:
        at.close(at.open(path, flags))
        assert taken(u) == before
    return bool(disk.failed)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("face", [Engine, Nine])
def test_an_open_that_fails_has_taken_nothing(face: type, settings: str) -> None:
    found, failed = written(settings), 0
    for path, modes in OPENS.items():
        for flags in modes:
            for number, looks in FAULTS:
                call = 1
                while attempt(face, found, path, flags, number, looks, call):
                    failed, call = failed + 1, call + 1
    assert failed > 20


def close(path: str, settings: str, lines: tuple[str, ...], call: int) -> bool:
    """Read from a file and close it while that call fails. False: it makes fewer calls."""
    disk = written(settings)
    u = started(disk)
    u.ctl(*lines)
    before = taken(u)
    handle = u.at(path, RW)
    data = handle.read(1_000)
    handle.push_back(data)  # it did not reach the program
    disk.fail_at, disk.fail_with = disk.calls + call, errno.ENOSPC
    with contextlib.suppress(errors.MqfsError):
        handle.close()
    disk.fail_at = 0
    assert taken(u) == before, f"{path}: call {call} failed: {disk.failed}"
    u.clock.forward(2.0)
    u.tree.run_timers()
    assert "t" not in u.group.consumers, "a transient consumer outlives its last reader"
    again = u.at(path.replace("/t", "/w"), RW)
    if lines != ("ack read",):  # with it a message that is lost after its read is lost
        assert again.read(1_000) == data, f"{path}: call {call} failed: {disk.failed}"
    again.close()
    return bool(disk.failed)


@pytest.mark.parametrize(
    ("path", "settings", "lines"),
    [
        ("s", "one", ("ack next",)),
        ("s", "one", ("ack read",)),
        (".consumers/w", "all", ()),
        (".consumers/t", "all", ("consumer t transient",)),
    ],
)
def test_a_close_that_fails_leaves_nothing_open(path: str, settings: str, lines: tuple[str, ...]) -> None:
    call = 1
    while close(path, settings, lines, call):
        call += 1
    assert call > 1
