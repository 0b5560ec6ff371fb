"""Both faces of one real server, all dialects of 9P among them, against the same checks."""

from __future__ import annotations

import fcntl
import itertools
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.ninep.client import connection
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import Dialect
from tests.conformance.face import MESSAGE_BYTES, check_face
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, NO_FUSE, Server, can_mount, short_folder, unmount

pytestmark = pytest.mark.process

MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY, "r+": os.O_RDWR}
numbers = itertools.count()


class MountedFile:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def receive(self, count: int, timeout: float) -> bytes:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise TimeoutError
        return os.read(self.fd, count)

    def write(self, data: bytes) -> int:
        return os.write(self.fd, data)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Mounted:
    """The mount, by system calls."""

    largest = MESSAGE_BYTES

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, list[MountedFile]()
        path.mkdir()

    def mkdir(self, path: str) -> None:
        (self.path / path).mkdir()

    def create(self, path: str) -> None:
        os.close(os.open(self.path / path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))

    def remove(self, path: str) -> None:
        os.unlink(self.path / path)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.path / path)

    def rename(self, path: str, name: str) -> None:
        os.rename(self.path / path, (self.path / path).with_name(name))

    def names(self, path: str) -> list[str]:
        return os.listdir(self.path / path)

    def open(self, path: str, mode: str) -> MountedFile:
        self.files.append(MountedFile(os.open(self.path / path, MODES[mode])))
        return self.files[-1]

    def close(self) -> None:
        for file in self.files:
            file.close()


class Spoken:
    """A 9P connection."""

    def __init__(self, address: str, dialect: Dialect, group: str) -> None:
        self.client, self.group = connection.connect(address, dialect=dialect, timeout=HANG_S), group
        self.client.mkdir(group)
        self.largest = self.client.caller.msize - 24

    def mkdir(self, path: str) -> None:
        self.client.mkdir(f"{self.group}/{path}")

    def create(self, path: str) -> None:
        self.client.create(f"{self.group}/{path}").close()

    def remove(self, path: str) -> None:
        self.client.remove(f"{self.group}/{path}")

    rmdir = remove

    def rename(self, path: str, name: str) -> None:
        self.client.rename(f"{self.group}/{path}", name)

    def names(self, path: str) -> list[str]:
        return self.client.list(f"{self.group}/{path}")

    def open(self, path: str, mode: str) -> Any:
        return self.client.open(f"{self.group}/{path}", mode)

    def close(self) -> None:
        self.client.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """With a mount where there is /dev/fuse."""
    with short_folder() as folder, Server.at(folder, mount=can_mount()) as server:
        yield server
        assert server.stop() == 0


def test_the_mount(server: Server) -> None:
    if server.mount is None:
        pytest.skip(NO_FUSE)
    check_face(lambda: Mounted(server.path / f"m{next(numbers)}"))


def test_a_mount_of_a_server_elsewhere(server: Server) -> None:
    if server.mount is None:
        pytest.skip(NO_FUSE)
    (path := server.folder / "elsewhere").mkdir()
    (log := server.folder / "log").mkdir()
    with Server(cwd=log, program=[*COMMAND, "mount", server.address, str(path)]) as mount:
        try:
            check_face(lambda: Mounted(path / f"r{next(numbers)}"))
            assert mount.stop() == 0
        finally:
            unmount(path)


@pytest.mark.parametrize("dialect", list(Dialect))
def test_9p(server: Server, dialect: Dialect) -> None:
    check_face(lambda: Spoken(server.address, dialect, f"n{next(numbers)}"))


def test_a_lock_is_seen_over_both_faces(server: Server) -> None:
    if server.mount is None:
        pytest.skip(NO_FUSE)
    group = Mounted(server.path / "locked")
    group.create("s")
    with (server.path / "locked" / "s").open("wb", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with connection.connect(server.address, dialect=Dialect.LINUX, timeout=HANG_S) as client:
            channel = client.do(client.caller.open("locked/s", os.O_RDWR))

            def status() -> Any:
                return (yield m.Tlock(0, channel.fid, 1, 0, 0, 0, 1, "test"))

            assert client.do(status()).status == 1, "blocked: the mount holds it"
            fcntl.lockf(file, fcntl.LOCK_UN)
            assert client.do(status()).status == 0
            with pytest.raises(BlockingIOError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        eventually(lambda: not_held(file), "the release with the connection")


def not_held(file: Any) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
