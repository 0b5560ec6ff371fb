"""The folder of qlobber-fsq: what is on disk when, and whose a single is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs.bridge.folder import MULTI, SINGLE, Folder, Name, NotPlain

BODY = b"\0body"
JOB = str(Name("jobs", False, 1 << 41, SINGLE, "0" * 32))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "messages" / "0").mkdir(parents=True)
    (tmp_path / "messages" / "0" / JOB).write_bytes(BODY)
    return Folder(str(tmp_path))


@pytest.mark.parametrize("rest", ["", "the rest of a long topic"])
def test_a_file_is_on_disk_before_it_has_its_name(folder: Folder, monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    """And its name before the exporter continues."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(file: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), folder.path)
        calls.append("sync " + (path if path.startswith(("messages", "topics")) else os.path.dirname(path)))
        fsync(file)

    def note_rename(old: str, new: str, **more: int) -> None:
        calls.append("rename")
        rename(old, new, **more)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    name = Name("s", bool(rest), 1 << 41, MULTI, "1" * 32)
    assert folder.publish(name, rest, [BODY[1:]], threading.Event()) == "0"
    folder.settle(["0"])
    assert Path(f"{folder.path}/messages/0/{name}").read_bytes() == BODY
    topic = ["sync staging", "rename", "sync topics/0"] if rest else []
    assert calls == [*topic, "sync staging", "rename", "sync messages/0"]
    assert folder.staged() == []


def test_two_bridges_that_write_the_same_message(folder: Folder) -> None:
    name = Name("s", True, 1 << 41, MULTI, "1" * 32)

    def body(*, other: bool) -> Iterator[bytes]:
        yield b"one "
        if other:
            assert folder.publish(name, "rest", body(other=False), threading.Event()) == "0"
        yield b"two"

    folder.publish(name, "rest", body(other=True), threading.Event())
    assert Path(f"{folder.path}/messages/0/{name}").read_bytes() == b"\0one two"
    assert folder.read_rest("0", name) == "rest"
    assert folder.staged() == []


def test_nothing_stays_of_a_body_that_failed(folder: Folder) -> None:
    def body() -> Iterator[bytes]:
        yield b"one"
        raise OSError("the source is away")

    name = Name("s", False, 1 << 41, MULTI, "1" * 32)
    with pytest.raises(OSError, match="away"):
        folder.publish(name, "", body(), threading.Event())
    assert (folder.staged(), folder.files("0")) == ([], [JOB])


def test_a_single_is_of_who_has_its_lock(folder: Folder) -> None:
    with folder.lock("0", JOB) as file:
        assert file is not None
        assert file.read() == BODY
        with folder.lock("0", JOB) as other:
            assert other is None
    assert folder.files("0") == [JOB]


def test_a_single_that_was_handled_by_a_worker_that_was_killed_then(folder: Folder) -> None:
    """It is empty, and still there."""
    os.truncate(f"{folder.path}/messages/0/{JOB}", 0)
    with folder.lock("0", JOB) as file:
        assert file is None
    assert folder.files("0") == []


def test_a_single_that_goes_while_its_lock_is_waited_for(folder: Folder) -> None:
    with open(f"{folder.path}/messages/0/{JOB}", "r+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        folder.finish("0", JOB, opened)
        with folder.lock("0", JOB) as file:
            assert file is None


# ---------------------------------------------------------------- what is no plain file

LONG = Name("s", True, 1 << 41, MULTI, "2" * 32)
SECRET = b"\0of another"


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def unix(path: Path, secret: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name[:100])
        os.rename(path.name[:100], path.name)


def directory(path: Path, secret: Path) -> None:
    path.mkdir()


def lock(folder: Folder) -> None:
    with folder.lock("0", str(LONG)) as file:
        assert file is None


CALLS: dict[str, tuple[str, Callable[[Folder], object]]] = {
    "message": ("messages/0", lambda folder: folder.open("0", str(LONG)).close()),
    "single": ("messages/0", lock),
    "topic": ("topics/0", lambda folder: folder.read_rest("0", LONG)),
    "stamps": ("update", lambda folder: folder.read_stamps()),
    "stamp": ("update", lambda folder: folder.stamp(["0"])),
}


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of another, that has no part of the folder. It stays as it is."""
    path = tmp_path_factory.mktemp("other") / "secret"
    path.write_bytes(SECRET)
    yield path
    assert path.read_bytes() == SECRET
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("make", [link, fifo, unix, directory])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(
    folder: Folder, secret: Path, call: str, make: Callable[[Path, Path], None]
) -> None:
    place, do = CALLS[call]
    (Path(folder.path) / "update" / "UPDATE").write_bytes(bytes(32))
    folder = Folder(folder.path)
    path = Path(folder.path) / place / ("UPDATE" if place == "update" else str(LONG))
    path.unlink(missing_ok=True)
    make(path, secret)
    with pytest.raises(NotPlain):
        do(folder)


@pytest.mark.parametrize("place", ["staging", "topics/0", "messages/0"])
def test_a_link_in_the_way_of_a_message_is_not_written_through(folder: Folder, secret: Path, place: str) -> None:
    (Path(folder.path) / place / str(LONG)).symlink_to(secret)
    published = folder.publish(LONG, "rest", [b"body"], threading.Event())
    assert published == (None if place == "messages/0" else "0")


def test_a_large_update_takes_no_memory(folder: Folder) -> None:
    """Its size says how large stamps are; who writes the folder may have it say any."""
    with (Path(folder.path) / "update" / "UPDATE").open("wb") as file:
        file.truncate(1 << 40)
    folder = Folder(folder.path)
    stamps = folder.read_stamps()
    folder.stamp(["0"])
    assert [len(stamp) for stamp in stamps or ()] == [32]
    assert folder.read_stamps() != stamps


DIRECTORIES = ["messages", "messages/0", "topics", "topics/0", "staging", "update"]


def everything(folder: Folder) -> None:
    folder.files("0")
    folder.changed_ns("0")
    folder.staged()
    folder.read_stamps()
    folder.publish(LONG, "rest", [b"body"], threading.Event())
    folder.settle(["0"])
    folder.remove("0", str(LONG))


@pytest.mark.parametrize("place", DIRECTORIES)
def test_a_directory_that_is_a_link_is_not_entered(folder: Folder, secret: Path, place: str) -> None:
    (Path(folder.path) / "update" / "UPDATE").write_bytes(bytes(32))
    folder = Folder(folder.path)
    everything(folder)
    path = Path(folder.path) / place
    path.rename(f"{folder.path}/away")
    path.symlink_to(secret.parent)
    with pytest.raises(NotADirectoryError):
        everything(folder)


@pytest.mark.parametrize("place", DIRECTORIES)
def test_a_folder_with_a_link_is_not_begun_with(folder: Folder, secret: Path, place: str) -> None:
    path = Path(folder.path) / place
    path.rename(f"{folder.path}/away")
    path.symlink_to(secret.parent)
    with contextlib.suppress(OSError):
        everything(Folder(folder.path))
