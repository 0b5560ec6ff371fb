"""`mqfs restore --until` at frames of a real server's log: record by record what the primary's log had there."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mqfs.model import Kind
from mqfs.ninep.client import connection
from mqfs.records.record import HEAD, HEAD_BYTES, padded
from mqfs.replica import state
from mqfs.replica.checkpoint import Checkpointer
from mqfs.replica.frame import Frame, decode
from mqfs.replica.log import ReplicatedLog, open_log
from mqfs.replica.restore import Point, restore
from mqfs.store.check import check
from mqfs.store.replication import LogBytes, Removed
from mqfs.store.sequences import REMOVED
from mqfs.store.store import folder_of
from tests.replica.test_servers import Node
from tests.support.batches import frame
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S
from tests.support.server import short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
PARTS = 3  # of the load: between them the server ends, and a checkpoint is made
SETTINGS = b"replay all\nsync replica\ndedup 1h\n"
HERE = [sys.executable, "-m", "tests.server.small_server"]  # segments of 16 KiB
Ends = dict[int, dict[int, int]]  # of each group, the bytes of each segment


class Load:
    """One client that does everything a group knows."""

    def __init__(self, pick: random.Random) -> None:
        self.pick, self.number = pick, 0
        self.extra: list[str] = []  # groups that come and go

    def begin(self, tree: connection.Client) -> None:
        for group in ("a", "b"):
            tree.mkdir(group)
            tree.open(f"{group}/ctl", "w").write(SETTINGS)
            for stream in ("s", "t"):
                tree.create(f"{group}/{stream}").close()
        tree.open("a/ctl", "w").write(b"consumer w\nretries 0\nbackoff 1ms 5ms\n")

    def run(self, tree: connection.Client, count: int) -> None:
        with tree.open("a/.consumers/w", "r+") as worker:
            worker.write(b"format json\n")
            for _ in range(count):
                self.number += 1
                what = self.pick.choice([self.write, self.put, self.batch, self.commit, self.configure, self.regroup])
                if self.pick.random() < 0.3:
                    self.work(worker)
                else:
                    what(tree)

    def body(self) -> bytes:
        most = 400_000 if self.number % 97 == 0 else 900  # of a batch of three such ones no frame has all
        return b"%d " % self.number + self.pick.randbytes(self.pick.randrange(most))

    def write(self, tree: connection.Client) -> None:
        with tree.open(self.pick.choice(["a/s", "a/t", "b/s"]), "w") as stream:
            stream.write(self.body())

    def put(self, tree: connection.Client) -> None:
        options = {"stream": "s", "priority": self.pick.randrange(10), "id": str(self.number), "headers": {"k": "v"}}
        if self.pick.random() < 0.4:
            options["delay"] = self.pick.choice(["1ms", "100ms", "1h"])
        with tree.open("a/.put", "w") as put:
            put.write(json.dumps(options).encode() + b" " + self.body())

    def batch(self, tree: connection.Client) -> None:
        with tree.open("b/.batch", "w") as batch:
            batch.write(b"".join(frame(self.pick.choice("st"), self.body()) for _ in range(3)))

    def commit(self, tree: connection.Client) -> None:
        tree.mkdir(f"a/.txn/p{self.number}")
        with tree.open(f"a/.txn/p{self.number}/s", "w") as stream:
            stream.write(self.body())
            stream.write(self.body())
        with tree.open("a/.txn/ctl", "w") as ctl:
            ctl.write(b"commit u.%d p%d\n" % (self.number, self.number))

    def configure(self, tree: connection.Client) -> None:
        with tree.open("b/ctl", "w") as ctl:
            ctl.write(self.pick.choice([b"eof s\n", b"retries 3\n", b"dedup 2h\n", b"consumer x%d\n" % self.number]))

    def regroup(self, tree: connection.Client) -> None:
        if self.extra and self.pick.random() < 0.5:
            tree.remove(self.extra.pop())
        elif self.extra and self.pick.random() < 0.5:
            old, new = self.extra.pop(), f"renamed{self.number}"
            tree.rename(old, new)
            self.extra.append(new)
        else:
            self.extra.append(f"extra{self.number}")
            tree.mkdir(self.extra[-1])

    def work(self, worker: connection.File) -> None:
        try:
            worker.receive(timeout=0.2)
        except TimeoutError:
            return
        worker.write(self.pick.choice([b"ack\n", b"ack\n", b"nack 1ms\n", b"release\n"]))


def served(folder: Path, url: str, count: int) -> Path:
    """The store of a primary that did all that, and has ended."""
    load = Load(random.Random(seed()))
    with Node.at(folder, "--replica", url, program=HERE) as node:
        for part in range(PARTS):
            with connection.connect(node.address, timeout=HANG_S, msize=1 << 20) as tree:
                if not part:
                    load.begin(tree)
                load.run(tree, count // PARTS)
            assert node.stop() == 0, node.text()
            if part < PARTS - 1:
                found = state.read(str(node.store))
                assert found is not None
                log = open_log(url)
                Checkpointer(log, str(node.store)).make(found.position, found.have)
                log.close()
                node.start()
        return node.store


class At(NamedTuple):
    """A frame, and how far the log of each group was there."""

    number: int
    time_ns: int
    ends: Ends


def frames(log: ReplicatedLog) -> Iterator[Frame]:
    at = 0
    while records := log.read(at, 1.0):
        at = records[-1].number
        yield from (decode(record.data) for record in records)


def sampled(log: ReplicatedLog, pick: random.Random, count: int) -> list[At]:
    """Some frames; of a batch of several counts the last one alone."""
    found = list(frames(log))
    wanted = {one.number for one in pick.sample(found, min(count, len(found)))}
    assert len(wanted) == count, f"{len(found)} frames"
    ends: Ends = {}
    complete: Ends = {}
    samples: list[At] = []
    for one in found:
        for entry in one.entries:
            if isinstance(entry, LogBytes):
                segments = ends.setdefault(entry.group, {})
                segments[entry.first] = max(segments.get(entry.first, 0), entry.position + len(entry.data))
                if REMOVED in entry.data:  # the log of a group says it first
                    del ends[entry.group]
            elif isinstance(entry, Removed):
                ends.pop(entry.group, None)
        if not one.more:
            complete = {group: dict(segments) for group, segments in ends.items()}
        if one.number in wanted:
            samples.append(At(one.number, one.time_ns, complete))
    return samples


def records(data: bytes) -> list[tuple[int, bytes]]:
    """Kind and all bytes of each record."""
    found, at = list[tuple[int, bytes]](), 0
    while at + HEAD_BYTES <= len(data) and (length := HEAD.unpack_from(data, at)[0]) >= HEAD_BYTES:
        found.append((HEAD.unpack_from(data, at)[5], data[at : at + length]))
        at += padded(length)
    return found


def groups(store: Path) -> set[int]:
    return {int(path.name) for path in store.glob("buckets/*/*")}


def segments(store: Path, group: int) -> dict[int, bytes]:
    return {int(file.stem): file.read_bytes() for file in Path(folder_of(str(store), group)).glob("*.log")}


def differences(at: At, primary: dict[int, dict[int, bytes]], restored: Path) -> list[str]:
    """Where the restored store has not what the primary's log had at that frame, or more."""
    lines, there = [], groups(restored)
    if there != at.ends.keys():
        lines.append(f"groups {sorted(there)} (expected {sorted(at.ends)})")
    for group in there & at.ends.keys() & primary.keys():  # others were removed later
        ends, theirs, ours = at.ends[group], segments(restored, group), primary[group]
        if theirs.keys() != ends.keys():
            lines.append(f"group {group}: segments {sorted(theirs)} (expected {sorted(ends)})")
            continue
        for first, end in ends.items():
            expected, found = records(ours[first][:end]), records(theirs[first])
            if found[: len(expected)] != expected:
                lines.append(f"group {group}, segment {first}: other records than the primary has before {end}")
            if any(kind <= Kind.END for kind, _ in found[len(expected) :]):
                lines.append(f"group {group}, segment {first}: messages after {end}")
    return lines


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_a_restore_at_a_frame_has_the_records_of_the_primary(url: str, tmp_path: Path) -> None:
    count = size(500, 50)
    with short_folder() as folder:
        store = served(folder, url, max(120, count * 2))
        primary = {group: segments(store, group) for group in groups(store)}
        log = open_log(url)
        samples = sampled(log, random.Random(seed()), count)
        for at in samples:
            path = tmp_path / f"r{at.number}"
            restore(log, str(path), Point(at.time_ns))
            assert differences(at, primary, path) == [], f"frame {at.number}, seed {seed()}"
            assert check(str(path), report=print) == 0
            shutil.rmtree(path)
        log.close()
    print(f"{url}: {len(samples)} frames of {samples[-1].number}, seed {seed()}")
