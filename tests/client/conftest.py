"""The ways to a tree: what takes `tree` runs over 9P and over rings against a server, and with the engine inside."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mqfs
from mqfs import ring
from mqfs.client import Client
from tests.server.process import Running


@contextmanager
def short_folder() -> Iterator[Path]:
    """Its name fits into the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="mqfs-") as name:
        yield Path(name)


class Away:
    """A server on a unix socket, that can be killed and started again."""

    program: tuple[str, ...] = ()  # instead of `mqfs serve`

    def __init__(self, folder: Path, *options: str, transport: str = "9p") -> None:
        self.folder, self.options, self.transport = folder, options, transport
        self.address = f"unix!{folder / 'socket'}"
        self.start()

    def start(self) -> None:
        store = str(self.folder / "store")
        arguments = ["--store", store, "--listen", self.address, *self.options]
        self.process = Running(*arguments, cwd=self.folder, program=list(self.program) or None)

    def again(self, number: int = signal.SIGKILL) -> None:
        """End it by that signal, and start it again."""
        self.process.stop(number)
        self.start()

    def connect(self, **options: object) -> Client:
        return mqfs.connect(self.address, **{"transport": self.transport, **options})  # type: ignore[arg-type]

    def close(self) -> None:
        if self.process.process.poll() is None:
            self.process.stop()
        assert "Traceback" not in self.process.text(), self.process.text()


@pytest.fixture(params=["9p", "auto"])
def server(request: pytest.FixtureRequest) -> Iterator[Away]:
    """One that clients reach by 9P alone, or by rings too."""
    if request.param == "auto" and ring.MISSING:
        pytest.skip(ring.MISSING)
    with short_folder() as folder:
        away = Away(folder, transport=request.param)
        try:
            yield away
        finally:
            away.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Away]:
    with short_folder() as folder:
        away = Away(folder)
        try:
            yield away
        finally:
            away.close()


@pytest.fixture(params=["9p", "auto", "inside"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A client of a tree; with a server the tests of a module share a server, so each takes a group of its own name."""
    if request.param != "inside":
        if request.param == "auto" and ring.MISSING:
            pytest.skip(ring.MISSING)
        with request.getfixturevalue("shared").connect(transport=request.param) as client:
            yield client
    else:
        with mqfs.open(tmp_path / "store") as client:
            yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of a group for this test alone."""
    return str(request.node.name).replace("/", "_")
