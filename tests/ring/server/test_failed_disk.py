"""A disk that fails under a real server: committed waits end with an error, and nothing that was published is lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import ring
from mqfs.errors import Disconnected, DiskFailed, MqfsError, ReadOnly
from mqfs.ring.server.keeper_link import KeeperLink
from tests.ring.server.crowd import log_of
from tests.support.eventually import HANG_S
from tests.support.server import Server

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.process]

SERVER = """
import errno, os, sys
from mqfs.store.disk import Disk
def failing(name):
    real = getattr(Disk, name)
    def call(*arguments):
        if os.path.exists("fails-" + name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)
    setattr(Disk, name, staticmethod(call))
for name in sys.argv.pop(1).split():
    failing(name)
sys.argv[0] = "mqfs"
from mqfs.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_failing_disk(tmp_path: Path, call: str) -> None:
    address, options = f"unix!{tmp_path / 's'}", ["--store", "store", "--listen", "unix!s"]
    program = [sys.executable, "-c", SERVER, call, "serve"]
    server = Server(*options, cwd=tmp_path, program=program)
    try:
        with mqfs.connect(address, transport="ring") as client:
            group = client.group("a", create=True, ctl=["replay all", "sync always"])
            told = [group.publish("s", b"before").sequence]
            told += [group.publish("s", b"published", wait="published").sequence]
            failures: list[BaseException] = []

            def commit(turn: int) -> None:
                try:
                    group.publish("s", b"committed %d" % turn)
                except MqfsError as error:
                    failures.append(error)

            (tmp_path / f"fails-{call}").touch()
            threads = [threading.Thread(target=commit, args=(turn,), daemon=True) for turn in range(4)]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + HANG_S
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))
                assert not thread.is_alive(), "a committed wait hangs"
            assert len(failures) == 4
            # Disconnected: published as the ring was retired, and whether it is taken only the next start knows.
            assert all(isinstance(error, DiskFailed | ReadOnly | Disconnected) for error in failures), failures
            with pytest.raises((DiskFailed, ReadOnly)):
                group.publish("s", b"later", headers={"a": "b"})
            assert group.stats().read_only
        (tmp_path / f"fails-{call}").unlink()
        assert "Traceback" not in server.text(), server.text()
    finally:
        server.kill()
    server = Server(*options, cwd=tmp_path)
    try:
        log: dict[int, Any] = log_of(address, "a")
        assert log[told[0] or 0] == ("s", "before")
        assert log[told[1] or 0] == ("s", "published")
        bodies = [body for _, body in log.values()]
        assert len(set(bodies)) == len(bodies)
    finally:
        assert server.stop() == 0
        KeeperLink(os.fspath(tmp_path / "store")).quit()
