"""The primary's disk rots or fails: the replica keeps what it has, and says which checkpoint was not made."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.store.check import check
from tests.replica.test_servers import Node
from tests.support.eventually import eventually
from tests.support.server import mqfs, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
LOWERED = (sys.executable, "-m", "tests.server.lowered_server")
LIMITS = "REPLICA_CHECKPOINT_FRAMES=2 REPLICA_STATE_S=0.2 REPLICA_BEAT_S=0.2 SEGMENT_BYTES=100000"
BODIES = [b"%d " % number + os.urandom(20_000) for number in range(8)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


def checkpoints(url: str) -> set[str]:
    return {path.name for path in Path(url.removeprefix("file://")).glob("checkpoint/*")}


def flip(store: Path, body: bytes) -> Path:
    """One bit of a message of that body; the segment that has it."""
    for path in store.glob("buckets/*/*/*.log"):
        data = path.read_bytes()
        if (at := data.find(body)) >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 100)
                file.write(bytes([data[at + 100] ^ 1]))
            return path
    raise AssertionError("not there")


def restored(url: str, to: Path) -> Path:
    done = mqfs("restore", url, str(to), cwd=to.parent)
    assert done.returncode == 0, done.stderr
    return to


def whole(store: Path) -> bytes:
    return b"".join(path.read_bytes() for path in store.glob("buckets/*/*/*.log"))


@pytest.mark.parametrize("number", [1, 7], ids=["in a sealed segment", "in the newest"])
def test_a_damaged_message_stays_whole_in_the_replica(folder: Path, tmp_path: Path, number: int) -> None:
    url = f"file://{tmp_path}/replica"
    with Node.of(folder, url, "--replica-keep", "1s", program=LOWERED, MQFS_LIMITS=LIMITS) as primary:
        with primary.connect() as client:
            group = client.group("g", create=True, ctl=["replay all", "sync replica"])
            for body in BODIES:
                group.publish("q", body)
        before = checkpoints(url)
        eventually(lambda: len(checkpoints(url) - before) > 1)  # the second one has all
        primary.stop()
        path = flip(primary.store, BODIES[number])
        primary.start()
        assert "mqfs_replica_checkpoint_failed 0" in primary.get("/.metrics")[1]
        with primary.connect() as client:
            client.group("g").publish("q", b"later")
        eventually(lambda: "mqfs_replica_checkpoint_failed 1" in primary.get("/.metrics")[1])
        assert "no checkpoint of the replica was made" in primary.get("/.ready")[1]
        had = checkpoints(url)
        store = restored(url, tmp_path / "r")
        assert check(str(store), report=print) == 0
        assert BODIES[number] in whole(store)
        assert checkpoints(url) == had
        assert primary.text().count("no checkpoint: ") == 1
        primary.stop()
        primary.store.rename(folder / "damaged")
        primary.start()  # a new copy of what the replica has
        with primary.connect() as client:
            assert [message.body for message in client.group("g").history()] == [*BODIES, b"later"]
        eventually(lambda: checkpoints(url) - had)
        assert "mqfs_replica_checkpoint_failed 0" in primary.get("/.metrics")[1]
        assert f"{path}: bytes " in primary.text()
        assert "do not pass their check (run mqfs check" in primary.text()


def is_blocked(path: Path) -> bool:
    """Put a folder in place of a file that is written again and again: it cannot be from now on."""
    path.unlink(missing_ok=True)
    try:
        path.mkdir()
    except FileExistsError:  # it was just written
        return False
    return True


@pytest.mark.parametrize("frames", [2, 100_000], ids=["due", "not due"])
def test_only_a_checkpoint_that_was_due_is_shown_as_failed(folder: Path, tmp_path: Path, frames: int) -> None:
    limits = LIMITS.replace("FRAMES=2", f"FRAMES={frames}")
    with Node.of(folder, f"file://{tmp_path}/replica", program=LOWERED, MQFS_LIMITS=limits) as primary:
        state = primary.store / "replica"
        eventually(state.exists)
        eventually(lambda: is_blocked(state))
        eventually(lambda: "Is a directory" in primary.text())
        if frames == 2:
            eventually(lambda: "mqfs_replica_checkpoint_failed 1" in primary.get("/.metrics")[1])
            assert "no checkpoint of the replica was made" in primary.get("/.ready")[1]
        state.rmdir()
        eventually(state.exists)
        if frames == 2:
            eventually(lambda: "mqfs_replica_checkpoint_failed 0" in primary.get("/.metrics")[1])
        assert "mqfs_replica_checkpoint_failed 0" in primary.get("/.metrics")[1]
        assert "no checkpoint" not in primary.get("/.ready")[1]
        assert ("no checkpoint: " in primary.text()) == (frames == 2)
