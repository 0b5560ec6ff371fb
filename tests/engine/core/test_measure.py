"""`measure`: where the log would be cut, found by indexes alone, adds up to what a reader is given."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.model import User
from mqfs.store.api import Store
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.support.hand import finished

ROOT, BERT = User(0, 0), User(1_002, 1_002)


class Scene:
    def __init__(self, store: Store) -> None:
        self.tree = Tree(store, SystemClock(), owner=ROOT)
        self.group: Any = self.tree.mkdir(ROOT, self.tree.root, "g", 0o777)
        self.write("ctl", b"replay all\nsync off\n")
        for name in ("a", "b", "rare"):
            self.tree.create(ROOT, self.group, name, 0o666)

    def open(self, name: str, flags: int, user: User = ROOT) -> Any:
        return self.tree.open(user, self.tree.find(user, f"g/{name}"), flags)

    def write(self, name: str, body: bytes) -> None:
        handle = self.open(name, os.O_WRONLY)
        handle.write(body)
        handle.close()

    def measure(self, *lines: str, user: User = ROOT) -> list[list[int]]:
        cursor = self.open(".cursor", os.O_RDWR, user)
        cursor.write("".join(f"{line}\n" for line in lines).encode())
        told = finished(self.tree, cursor.read(1 << 20))
        cursor.close()
        assert told.endswith(b"\n")
        return [[int(word) for word in line.split()] for line in told.decode().splitlines() if line]


@pytest.fixture(params=["disk", "memory"])
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 20_000)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 4_096)
    made = Scene(DiskStore(str(tmp_path / "store")) if request.param == "disk" else MemoryStore())
    rng = random.Random(5)
    for number in range(900):
        name = "rare" if number % 90 == 7 else rng.choice("ab")
        made.write(name, b"%d " % number + bytes(rng.choice((0, 10, 200))))
    return made


@pytest.mark.parametrize(
    ("names", "count"), [("", 900), ("rare", 10), ("a b", 890)], ids=["everything", "a rare one", "two of three"]
)
def test_adds_up(scene: Scene, names: str, count: int) -> None:
    select = [f"select {names}"] if names else []
    for most in (1, 7, 100, 10_000):
        found = scene.measure(*select, "seek first", f"measure {most}")
        while (
            found and found[-1][0] < 901 and (more := scene.measure(*select, f"seek {found[-1][0]}", f"measure {most}"))
        ):
            found += more  # it tells the first few only
        assert sum(row[1] for row in found) == count
        assert max(row[1] for row in found) <= most
        assert [row[0] for row in found] == sorted({row[0] for row in found})


def test_bytes(scene: Scene) -> None:
    found = scene.measure("seek first", "measure 5K")
    assert 900 * 100 / 5_120 / 2 < len(found) < 900 * 200 / 5_120 * 2
    assert sum(row[1] for row in found) == 900
    assert all(row[2] <= 5_120 for row in found)


def test_between(scene: Scene) -> None:
    found = scene.measure("seek 101", "until 350", "measure 100")
    assert [row[:2] for row in found] == [[201, 100], [301, 100], [351, 50]]
    assert scene.measure("seek end", "measure 100") == []


def test_only_what_its_reader_may_read(scene: Scene) -> None:
    scene.tree.setattr(ROOT, scene.tree.find(ROOT, "g/a"), mode=0o600)
    everything = sum(row[1] for row in scene.measure("seek first", "measure 10000"))
    assert 0 < sum(row[1] for row in scene.measure("seek first", "measure 10000", user=BERT)) < everything


def test_streams(scene: Scene) -> None:
    cursor = scene.open(".cursor", os.O_RDWR)
    cursor.write(b"streams\n")
    told = json.loads(finished(scene.tree, cursor.read(1 << 20)))
    assert (told["next"], told["group"], told["groups"], told["plain"]) == (901, 2, [], True)
    assert told["store"] == scene.tree.store.uuid
    assert sorted(told["streams"]) == ["a", "b", "rare"]
    assert told["streams"]["rare"] == {"number": 18, "floor": 0, "cut": 0, "first": 8, "newest": 818}
    scene.write("ctl", b"clear rare\n")
    cursor.write(b"streams\n")
    told = json.loads(finished(scene.tree, cursor.read(1 << 20)))
    assert told["streams"]["rare"] == {"number": 18, "floor": 819, "cut": 819, "first": None, "newest": None}
    scene.write("ctl", f"drop a {told['streams']['a']['first']}\n".encode())
    cursor.write(b"streams\n")
    assert json.loads(finished(scene.tree, cursor.read(1 << 20)))["plain"] is False
    cursor.close()


def test_nonsense(scene: Scene) -> None:
    with pytest.raises(errors.BadCommand, match=r"measure: invalid bound .many. \(expected a number"):
        scene.measure("measure many")
