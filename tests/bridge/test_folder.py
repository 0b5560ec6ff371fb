"""The folder of qlobber-fsq: what is on disk when, and whose a single is."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from mqfs.bridge.folder import Folder
from mqfs.bridge.names import MULTI, SINGLE, Name

BODY = b"\0body"
JOB = str(Name("jobs", False, 1 << 41, SINGLE, "0" * 32))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "messages" / "0").mkdir(parents=True)
    (tmp_path / "messages" / "0" / JOB).write_bytes(BODY)
    return Folder(str(tmp_path))


@pytest.mark.parametrize("rest", ["", "the rest of a long topic"])
def test_a_file_is_on_disk_before_it_has_its_name(folder: Folder, monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    """And its name before the exporter goes on."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(file: int) -> None:
        calls.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), folder.path))
        fsync(file)

    def note_rename(old: str, new: str) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    name = Name("s", bool(rest), 1 << 41, MULTI, "1" * 32)
    assert folder.publish(name, rest, [BODY[1:]], threading.Event()) == "0"
    folder.settle(["0"])
    assert Path(folder.message_path("0", str(name))).read_bytes() == BODY
    topic = [f"sync topics/0/{name}", "sync topics/0"] if rest else []
    assert calls == [f"sync staging/{name}", *topic, "rename", "sync messages/0"]


def test_a_single_is_of_who_has_its_lock(folder: Folder) -> None:
    with folder.lock("0", JOB) as file:
        assert file is not None
        assert file.read() == BODY
        with folder.lock("0", JOB) as other:
            assert other is None
    assert folder.files("0") == [JOB]


def test_a_single_that_was_handled_by_a_worker_that_was_killed_then(folder: Folder) -> None:
    """It is empty, and still there."""
    os.truncate(folder.message_path("0", JOB), 0)
    with folder.lock("0", JOB) as file:
        assert file is None
    assert folder.files("0") == []


def test_a_single_that_goes_while_its_lock_is_waited_for(folder: Folder) -> None:
    with open(folder.message_path("0", JOB), "r+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        folder.finish("0", JOB, opened)
        with folder.lock("0", JOB) as file:
            assert file is None
