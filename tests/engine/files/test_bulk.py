"""`format record` in bulk: the same messages as one by one, whatever the log has been through."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.client.message import RecordDecoder
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.model import Kind, User, Wait
from mqfs.records.record import padded
from mqfs.store.store import DiskStore
from tests.engine.publishing.test_crash import Lying
from tests.support.calls import calls_once
from tests.support.campaign import seed, size
from tests.support.lying_disk import LyingDisk
from tests.support.queues import Queues

ROOT, SOMEBODY = User(0, 0), User(1_000, 1_000)


class Scene:
    def __init__(self, path: Path, rng: random.Random) -> None:
        self.rng = rng
        self.store = DiskStore(str(path))
        self.tree = Tree(self.store, SystemClock(), owner=ROOT)
        self.group: Any = self.tree.mkdir(ROOT, self.tree.root, "g", 0o777)
        self.ctl("replay all", "sync off")
        for name in ("a", "b", "c.d", "c.e"):
            self.tree.create(ROOT, self.group, name, 0o666)
        self.number = 0

    def open(self, name: str, flags: int, user: User = ROOT) -> Any:
        return self.tree.open(user, self.tree.find(user, f"g/{name}"), flags)

    def ctl(self, *lines: str) -> None:
        handle = self.open("ctl", os.O_WRONLY)
        try:
            handle.write("".join(f"{line}\n" for line in lines).encode())
        finally:
            handle.close()

    def write(self, count: int) -> None:
        for _ in range(count):
            name = self.rng.choice(list(self.group.streams))
            self.number += 1
            body = b"%d " % self.number + bytes(self.rng.choice((0, 1, 7, 100)))
            if self.rng.random() < 0.02:
                self.put(name, body)
                continue
            handle = self.open(name, os.O_WRONLY)
            handle.write(body)
            handle.close()

    def put(self, name: str, body: bytes) -> None:
        keys: dict[str, Any] = {"stream": name}
        keys |= self.rng.choice(({"headers": {"k": "v"}}, {"priority": 9}, {"ttl": "1ms"}, {"single": True}, {}))
        handle = self.open(".put", os.O_WRONLY)
        handle.write(json.dumps(keys).encode() + b" " + body)
        handle.close()

    def change(self) -> None:
        rng, streams = self.rng, list(self.group.streams)
        sequence = rng.randrange(1, self.group.log.end.next + 1)
        what = rng.choice(("clear", "drop", "eof", "depth", "rename", "remove", "chmod", "ack", "sync", "restart"))
        name = rng.choice(streams)
        if what == "clear" and rng.random() < 0.3:
            self.ctl(f"clear {name}")
        elif what == "drop" and rng.random() < 0.3:
            with_it = self.group.log.reader.scan(sequence)
            if with_it is not None and with_it.stream in self.group.numbers:
                self.drop(self.group.numbers[with_it.stream].name, with_it.sequence)
        elif what == "eof":
            self.ctl(f"eof {name}")
        elif what == "depth":
            self.ctl(f"depth {rng.choice((0, 0, 50, 300))}")
        elif what == "rename":
            self.tree.rename(ROOT, self.group, name, self.group, f"{name}.{rng.randrange(9)}x")
        elif what == "remove" and len(streams) > 2 and rng.random() < 0.3:
            self.tree.unlink(ROOT, self.group, name)
        elif what == "chmod":
            self.tree.setattr(ROOT, self.group.streams[name], mode=rng.choice((0o666, 0o600)))

    def drop(self, name: str, sequence: int) -> None:
        try:
            self.ctl(f"drop {name} {sequence}")
        except errors.NotFound:
            pass  # it was gone already

    def records(self, commands: str, user: User, count: int) -> list[tuple[int, str, str]]:
        handle, parser, found = self.open(".cursor", os.O_RDWR, user), RecordDecoder(), []
        handle.write(f"{commands}format record\n".encode())
        while data := _told(handle, count):
            found += [(message.sequence, message.stream, message.body.decode()) for message in parser.feed(data)]
        handle.close()
        return found

    def lines(self, commands: str, user: User) -> list[tuple[int, str, str]]:
        handle, text = self.open(".cursor", os.O_RDWR, user), b""
        handle.write(f"{commands}format json\n".encode())
        while data := _told(handle, 1 << 16):
            text += data
        handle.close()
        return [(row["sequence"], row["stream"], row["body"]) for row in map(json.loads, text.splitlines())]


def _told(handle: Any, count: int) -> bytes:
    """A read; that messages were lost is no matter here."""
    while True:
        try:
            data = handle.read(count)
        except errors.FellBehind:
            continue
        assert not isinstance(data, Wait)
        return bytes(data)


@pytest.mark.parametrize("number", range(size(60)))
def test_as_one_by_one(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_RECORDS", 150)
    rng = random.Random(seed() + number)
    monkeypatch.setattr(limits, "NAMES_SENT", rng.choice((1, 3, 16_384)))
    scene = Scene(tmp_path / "store", rng)
    for _ in range(25):
        scene.write(rng.randrange(60))
        scene.change()
        scene.tree.tick()
    ripe = scene.tree.clock.engine_ns() + 2_000_000
    while scene.tree.clock.engine_ns() < ripe:
        pass  # what lives a millisecond is over, for both
    for _ in range(12):
        select = rng.choice(("", "select a\n" * ("a" in scene.group.streams), "select c.*\n", "select #\n"))
        begin = rng.choice(("first", "last", "-40", str(rng.randrange(1, scene.group.log.end.next + 1))))
        until = rng.choice(("end", str(rng.randrange(scene.group.log.end.next))))
        commands = f"{select}seek {begin}\nuntil {until}\n"
        user = ROOT if select == "select a\n" else rng.choice((ROOT, SOMEBODY))
        count = rng.choice((40, 300, 5_000, 1 << 20))
        assert scene.records(commands, user, count) == scene.lines(commands, user), (commands, count)
    scene.tree.close()
    scene.store.close()


def test_other_streams_cost_a_read_nothing(tmp_path: Path) -> None:
    """It has the names of what it shows, not of all that it may show."""
    costs, sizes = [], []
    for count in (10, 1_000):
        scene = Scene(tmp_path / str(count), random.Random(seed()))
        for number in range(count):
            scene.tree.create(ROOT, scene.group, f"t{number}", 0o666)
        scene.write(20)

        def act(scene: Scene = scene) -> None:
            handle = scene.open(".cursor", os.O_RDWR)
            handle.write(b"seek first\nformat record\n")
            sizes.append(len(handle.read(1 << 20)))
            handle.close()

        costs.append(calls_once(act))
        scene.tree.close()
        scene.store.close()
    assert costs[1] < costs[0] + 100
    assert sizes[1] < 2 * sizes[0]


@pytest.mark.parametrize("file", [".cursor", ".consumers/c"])
def test_a_reader_remembers_no_more_names_than_its_bound(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams come and go for as long as it reads."""
    monkeypatch.setattr(limits, "NAMES_SENT", 5)
    scene, parser, found = Scene(tmp_path / "store", random.Random(seed())), RecordDecoder(), list[str]()
    scene.ctl("consumer c\nreplay all")
    handle = scene.open(file, os.O_RDWR)
    handle.write(b"format record\n")
    names = [f"t{number}" for number in range(40)]
    for name in names:
        scene.tree.create(ROOT, scene.group, name, 0o666)
        stream = scene.open(name, os.O_WRONLY)
        stream.write(b"x")
        stream.close()
        found += [message.stream for message in parser.feed(_told(handle, 200))]
    assert found == names
    assert len(handle.names._sent) <= 5
    handle.close()
    scene.tree.close()
    scene.store.close()


@pytest.mark.parametrize("count", [200, 300, 1_000])
def test_the_names_are_within_the_count(tmp_path: Path, count: int) -> None:
    """Whole records and their names, as many as fit."""
    scene = Scene(tmp_path / "store", random.Random(seed()))
    scene.write(300)
    handle = scene.open(".cursor", os.O_RDWR)
    handle.write(b"seek first\nuntil end\nformat record\n")
    while data := _told(handle, count):
        assert len(data) <= count
        at = 0
        while at < len(data):
            at += padded(int.from_bytes(data[at : at + 4], "little"))
        assert at == len(data), "whole records"
    scene.tree.close()
    scene.store.close()


def sequences(parser: RecordDecoder, data: bytes) -> list[int]:
    """The sequences of the messages in it, whose streams' names the parser has."""
    messages = parser.feed(data)
    assert {message.stream for message in messages} <= {"s", "t"}
    return [message.sequence for message in messages]


def test_the_names_come_behind_a_look_that_failed() -> None:
    disk = LyingDisk()
    queues = Lying(disk)
    queues.ctl("replay all", "sync off")
    for name in "st":
        queues.stream(name)
        queues.write(name, *(b"%100d" % number for number in range(20)))
    disk.fail_with, failures = errno.EIO, 0
    for look in range(1, 9):
        cursor, parser = queues.at(".cursor", os.O_RDWR), RecordDecoder()
        cursor.write(b"seek first\nuntil end\nformat record\n")
        disk.fail_look_at, found = disk.looks + look, list[int]()
        while True:
            try:
                data = cursor.read(1_000)
            except errors.DiskFailed:
                failures += 1
                continue
            if not data:
                break
            found += sequences(parser, data)
        assert len(found) == 40
        cursor.close()
    assert failures > 4


@pytest.mark.parametrize("given", [1, 60, 170, 4_096])
@pytest.mark.parametrize(
    ("path", "commands"),
    [
        (".cursor", "seek first"),
        (".cursor", "format raw\nseek first\nformat record"),
        (".consumers/w", "release"),
        (".consumers/w", "ack"),
        (".consumers/w", "format raw\nrelease\nformat record"),
        (".consumers/w", "seek first"),
    ],
)
def test_names_of_which_a_part_was_not_read_come_again(path: str, commands: str, given: int) -> None:
    """A consumer gets them only then. A cursor gets them always: a mount may discard what it has read of it."""
    queues = Queues("replay all", "consumer w")
    queues.write("s", *[b"x" * 100] * 3)
    queues.consumer()
    handle, parser = queues.at(path, os.O_RDWR), RecordDecoder()
    handle.write(b"format record\n")
    if path == ".cursor":
        handle.write(b"seek first\n")
    data = handle.read(given)
    known = given >= 4_096
    if known:
        assert len(sequences(parser, data)) == 3
    handle.write(f"{commands}\n".encode())
    if known and commands == "ack":
        queues.write("s", b"more")
    data = handle.read(4_096)
    assert (data[28] == Kind.NAMES) is (path == ".cursor" or not known)
    assert sequences(parser, data)
