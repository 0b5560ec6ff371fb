"""Handlers on a disk that is full for a moment: they are called again once there is room, and no message is lost."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest

import mqfs
from mqfs import Claim, Message
from mqfs.client import Group
from mqfs.client.waiting import FIRST_PAUSE_S
from mqfs.errors import DiskFull
from tests.support.eventually import HANG_S, eventually
from tests.support.power import mount_point, run, unmount
from tests.support.server import Server

pytestmark = [pytest.mark.root, pytest.mark.process]

DISK_BYTES = 24 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "at"
    at.mkdir()
    with mount_point(at):
        run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", at)
        try:
            yield at
        finally:
            unmount(at)


def fill(ballast: Path, group: Group) -> None:
    """Fill the disk, and the rest of what the store has of it."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    for size in 100_000, 1_000, 10:
        with suppress(DiskFull):
            while True:
                group.publish("other", bytes(size))


def open_messages(group: Group, how: str) -> int:
    stats = group.stats()
    row = stats.streams["s"].consumer if how == "single" else stats.consumers["w"]
    assert row is not None
    return row.waiting + row.claimed


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("how", ["prefetch 1", "prefetch 8", "single"])
def test_handlers_continue_once_there_is_room(small_disk: Path, tmp_path: Path, how: str, fails: bool) -> None:
    begun, gate = Event(), Event()
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    refused: list[float] = []  # when

    def handle(item: Claim | Message) -> None:
        if item.body == b"first" and not gate.is_set():
            begun.set()
            assert gate.wait(HANG_S)
            if fails:
                raise ValueError
        calls.put(item.body)

    def on_error(error: Exception, message: Message | None) -> None:
        if isinstance(error, DiskFull):
            refused.append(time.monotonic())

    server = Server("--store", str(small_disk / "store"), "--listen", "unix!s", cwd=tmp_path)
    with server, mqfs.connect(f"unix!{tmp_path}/s") as client:
        group = client.group("g", create=True, ctl=["replay all", "retries 100", "deliver one", "sync off"])
        group.create("s")
        if how == "single":
            group.on("s", handle, single=True, on_error=on_error)
        else:
            group.work("w", handle, over="s", prefetch=int(how[-1]), on_error=on_error)
        group.publish("s", "first")
        assert begun.wait(HANG_S)
        for number in range(5):
            group.publish("s", str(number))
        fill(small_disk / "ballast", group)
        gate.set()
        eventually(lambda: len(refused) >= 5)
        assert refused[4] - refused[0] > 7 * FIRST_PAUSE_S, "the pauses grow"
        os.unlink(small_disk / "ballast")
        got = [calls.get(timeout=HANG_S) for _ in range(6)]
        assert sorted(got) == [b"0", b"1", b"2", b"3", b"4", b"first"]
        group.publish("s", "later")
        assert calls.get(timeout=HANG_S) == b"later"
        eventually(lambda: open_messages(group, how) == 0)
