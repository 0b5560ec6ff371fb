"""A bug in what another thread has the engine's thread call: a real server continues, or ends in one clear line."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mqfs
from mqfs import ring
from mqfs.client import Client
from mqfs.errors import MqfsError
from mqfs.store.group_commit import GroupCommit
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server

pytestmark = pytest.mark.process
FAULTY = [sys.executable, "-m", "tests.server.faulty_server"]

ANSWER = "mqfs.ninep.server.pending:PendingRequests._settled"  # of one request, by a front end
SYNCED = "mqfs.store.group_commit:GroupCommit._settle"  # the log's own part
MADE = "mqfs.store.store:DiskStore.open_new"  # a group that was asked for
PUBLISHED = "mqfs.ring.server.ring_log:RingLog.pump"  # in shared memory
COPIED = "mqfs.store.replication:Replication.confirm"


@contextlib.contextmanager
def faulty(folder: Path, bug: str, *options: str) -> Iterator[Server]:
    server = Server.at(folder, "--default", "replay all", *options, program=FAULTY, MQFS_BUG=bug)
    try:
        with server.connect() as client:
            for name in ("whole", "faulty"):
                client.group(name, create=True).publish("s", b"before")
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def meet(server: Server, act: Callable[[Client], object], transport: str = "9p") -> None:
    """The bug, in what `act` asks for: it may never be answered."""

    def run() -> None:
        with contextlib.suppress(MqfsError), server.connect(transport=transport) as client:
            act(client)

    (server.folder / "bug").touch()
    threading.Thread(target=run, daemon=True).start()
    eventually(lambda: not (server.folder / "bug").exists(), "the bug")
    eventually(lambda: "the bug in" in server.text(), "its traceback")
    assert server.text().count("Traceback") == 1, server.text()


def read(client: Client, group: str) -> list[bytes]:
    return [message.body for message in client.group(group).history(pattern="s")]


def publish(client: Client) -> object:
    return client.group("faulty").publish("s", b"during")


@pytest.mark.parametrize(
    ("bug", "act", "is_writable"),
    [
        (ANSWER, publish, True),
        (SYNCED, publish, False),
        (MADE, lambda client: client.group("made", create=True), True),
        pytest.param(PUBLISHED, publish, False, marks=pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)),
    ],
    ids=["answer", "synced", "made", "published"],
)
def test_it_ends_a_request_or_a_group_at_most(
    tmp_path: Path, bug: str, act: Callable[[Client], object], is_writable: bool
) -> None:
    with faulty(tmp_path, bug) as server:
        meet(server, act, "ring" if bug == PUBLISHED else "9p")
        with server.connect() as client:
            client.group("whole").publish("s", b"after")
            client.group("new", create=True).publish("s", b"after")
            assert read(client, "whole") == [b"before", b"after"]
            with contextlib.nullcontext() if is_writable else pytest.raises(MqfsError, match=r"internal error|failed"):
                client.group("faulty").publish("s", b"after")
            assert read(client, "faulty")[0] == b"before"
        assert server.stop() == 0, server.text()
        server.start()
        with server.connect() as client:
            client.group("faulty").publish("s", b"at last")
            bodies = read(client, "faulty")
            assert bodies[0] == b"before"
            assert bodies[-1] == b"at last"


def test_a_copy_that_is_half_noted_ends_the_server_in_one_line(tmp_path: Path) -> None:
    """What it would acknowledge after that might be nowhere else."""
    with faulty(tmp_path, COPIED, "--replica", f"file://{tmp_path}/copy", "--default", "sync replica") as server:
        meet(server, publish)
        assert server.process.wait(HANG_S) == 1
        assert "mqfs: not replicated: the replicator failed (see the log)" in server.text().splitlines()[-1]
        server.start()
        with server.connect() as client:
            assert read(client, "faulty")[0] == b"before"
            client.group("faulty").publish("s", b"at last")


def test_an_embedded_store_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, bugs = GroupCommit._settle, [ZeroDivisionError("the bug")]

    def faulty_settle(self: GroupCommit, mark: int) -> None:
        if bugs:
            raise bugs.pop()
        settle(self, mark)

    with mqfs.open(tmp_path / "store", defaults=["replay all"]) as client:
        whole = client.group("whole", create=True)
        broken = client.group("faulty", create=True)
        monkeypatch.setattr(GroupCommit, "_settle", faulty_settle)
        with pytest.raises(MqfsError, match="internal error"):
            broken.publish("s", b"during")
        whole.publish("s", b"after")
        client.group("new", create=True).publish("s", b"after")
        assert read(client, "whole") == [b"after"]
