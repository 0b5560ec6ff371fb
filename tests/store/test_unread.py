"""A group that the disk does not give at a start is there all the same: nothing takes its name."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadStore, DiskFailed, Exists
from mqfs.model import Kind, Wait
from mqfs.store.disk import remove_tree
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import lowered

PATH = "/s/store"
BODIES = [b"message %d" % number for number in range(20)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    for name in ("mqfs.store", "mqfs.engine"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    yield
    for name in ("mqfs.store", "mqfs.engine"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def write(tree: Tree, path: str, *bodies: bytes) -> None:
    handle = tree.open(ROOT, tree.find(ROOT, path), os.O_WRONLY)
    for body in bodies:
        assert not isinstance(handle.write(body), Wait)
    handle.close()


def shows(tree: Tree, path: str) -> list[bytes]:
    handle = tree.open(ROOT, tree.find(ROOT, path), os.O_RDONLY)
    bodies: list[bytes] = []
    while len(bodies) < len(BODIES):
        data = handle.read(1 << 16, sum(map(len, bodies)))
        if isinstance(data, Wait) or not data:
            break
        bodies.append(data)
    handle.close()
    return bodies


def filled(inner: int = len(BODIES)) -> LyingDisk:
    """`orders` with messages, and `orders/eu` with `inner` of them in it."""
    disk = LyingDisk()
    store = DiskStore(PATH, disk=disk)
    tree = Tree(store, ManualClock(), owner=ROOT, defaults=["replay all"])
    for path, name in (("/", "orders"), ("orders", "eu")):
        group = tree.mkdir(ROOT, tree.find(ROOT, path), name, 0o755)  # type: ignore[arg-type]
        tree.create(ROOT, group, "s", 0o644)  # type: ignore[arg-type]
    write(tree, "orders/s", *BODIES)
    for number in range(inner):
        write(tree, "orders/eu/s", BODIES[number % len(BODIES)])
    tree.close()
    store.close()
    return disk


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_group_that_failed_to_open_once(number: int) -> None:
    """Whatever look at the disk fails at a start: its name stays its own, and it is served when the disk gives it."""
    made = filled()
    disk = made.copy()
    _start(disk, 0)
    unserved = 0
    for index in range(1, disk.looks + 1):
        disk = made.copy()
        disk.fail_with = number
        try:
            store, tree = _start(disk, index)
        except (BadStore, DiskFailed):
            continue  # it did not start: the root is read like the others
        unserved += len(tree.unserved)
        for path, name in (("/", "orders"), ("orders", "eu")):
            with pytest.raises((DiskFailed, Exists)):
                tree.mkdir(ROOT, tree.find(ROOT, path), name, 0o755)  # type: ignore[arg-type]
        for path in ("orders/s", "orders/eu/s"):
            assert shows(tree, path) == BODIES
        assert [group.name for group in tree.root.groups.values()] == ["orders"]
        tree.close()
        store.close()
        assert not [name for name in _names(disk) if "lost" in name]
    assert unserved


def _start(disk: LyingDisk, index: int) -> tuple[DiskStore, Tree]:
    disk.looks, disk.fail_look_at = 0, index
    store = DiskStore(PATH, disk=disk)
    try:
        return store, Tree(store, ManualClock(), owner=ROOT)
    except BaseException:
        store.close()
        raise


def _names(disk: LyingDisk) -> list[str]:
    store, tree = _start(disk, 0)
    names = [group.name for group in tree.groups.values()]
    tree.close()
    store.close()
    return names


class Refusing(LyingDisk):
    """Opens no file of that group; or no `newest` segment."""

    refuses, number, newest = False, 2, False

    def open(self, path: str, flags: int) -> int:
        folder, _, name = path.rpartition("/")
        if self.refuses and folder.endswith(f"/{self.number:02x}/{self.number}") and self._hides(folder, name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, flags)

    def _hides(self, folder: str, name: str) -> bool:
        return not self.newest or name >= max(one for one in self.listdir(folder) if one.endswith(".log"))


def test_a_group_that_cannot_be_opened() -> None:
    """For as long as that lasts no new group may have its name: it is not known. Then it is served."""
    disk = Refusing(with_others().root)
    disk.refuses = True
    store, tree = _start(disk, 0)
    for name in ("orders", "other"):
        with pytest.raises(DiskFailed, match="group 2 cannot be read"):
            tree.mkdir(ROOT, tree.root, name, 0o755)
    with pytest.raises(DiskFailed, match="group 2 cannot be read"):
        tree.rename(ROOT, tree.root, "shop", tree.root, "orders")
    tree.create(ROOT, tree.root, "a stream", 0o644)
    _change_groups(tree, "shop")  # it is younger
    disk.refuses = False
    assert isinstance(tree.clock, ManualClock)
    tree.clock.forward(60)
    tree.tick()
    assert shows(tree, "orders/s") == shows(tree, "orders/eu/s") == BODIES
    with pytest.raises(Exists):
        tree.mkdir(ROOT, tree.root, "orders", 0o755)
    tree.mkdir(ROOT, tree.root, "other", 0o755)
    tree.close()
    store.close()


def with_others() -> LyingDisk:
    """As `filled`; `shop`, which is younger, with `shop/eu` in it."""
    disk = filled()
    store, tree = _start(disk, 0)
    for path, name in (("/", "shop"), ("shop", "eu")):
        tree.mkdir(ROOT, tree.find(ROOT, path), name, 0o755)  # type: ignore[arg-type]
    tree.close()
    store.close()
    return disk


def _change_groups(tree: Tree, path: str) -> None:
    """Make, rename and remove groups there."""
    group: Any = tree.find(ROOT, path)
    tree.mkdir(ROOT, group, "made", 0o755)
    tree.rename(ROOT, group, "made", group, "orders")
    tree.rmdir(ROOT, group, "orders")
    tree.rmdir(ROOT, group, "eu")


def test_a_group_that_can_be_read_in_part() -> None:
    """Its older segment tells where it is: nothing is refused elsewhere, and nothing has the name that it had."""
    with lowered(SEGMENT_BYTES=1_024, SEGMENT_FIRST_BYTES=1_024):
        disk = Refusing(filled(inner=60).root)
        disk.number, disk.newest = 3, True
        store, tree = _start(disk, 0)
        tree.mkdir(ROOT, tree.root, "shop", 0o755)
        tree.close()
        store.close()
        disk.refuses = True
        store, tree = _start(disk, 0)
        orders: Any = tree.find(ROOT, "orders")
        tree.rename(ROOT, tree.root, "shop", tree.root, "mall")
        tree.rmdir(ROOT, tree.root, "mall")
        for name in ("eu", "other"):
            with pytest.raises(DiskFailed, match="group 3"):
                tree.mkdir(ROOT, orders, name, 0o755)
        with pytest.raises(DiskFailed, match="group 3 is not served"):
            tree.create(ROOT, orders, "eu", 0o644)
        tree.create(ROOT, orders, "other", 0o644)
        tree.unlink(ROOT, orders, "other")
        tree.unlink(ROOT, orders, "s")
        with pytest.raises(DiskFailed, match="group 3 cannot be read"):
            tree.rmdir(ROOT, tree.root, "orders")
        tree.close()
        store.close()


def test_a_group_that_cannot_be_opened_and_is_removed_by_hand() -> None:
    """What it kept from being made is made without a restart; the group in it is seen beside it, as after one."""
    disk = Refusing(filled().root)
    disk.refuses = True
    store, tree = _start(disk, 0)
    remove_tree(disk, f"{PATH}/buckets/02/2")
    assert isinstance(tree.clock, ManualClock)
    tree.clock.forward(60)
    tree.tick()
    tree.mkdir(ROOT, tree.root, "orders", 0o755)
    assert not tree.unserved
    assert shows(tree, "eu.lost-3/s") == BODIES
    tree.close()
    store.close()


def test_the_name_of_a_group_that_makes_no_sense() -> None:
    """Its settings are of a later version: its name is known, and taken."""
    disk = filled()
    store = DiskStore(PATH, disk=disk)
    bucket = store.open(2)
    change = b'{"do":"ctl","lines":["replay all","later 5"]}'
    bucket.writer.append(Kind.CHANGE, 0, 0, change)
    store.close()
    for _ in range(2):
        store, tree = _start(disk, 0)
        with pytest.raises(DiskFailed, match="group 2 is not served"):
            tree.mkdir(ROOT, tree.root, "orders", 0o755)
        with pytest.raises(DiskFailed, match="group 2 is not served"):
            tree.create(ROOT, tree.root, "orders", 0o644)
        with pytest.raises(DiskFailed, match="group 2 is not served"):
            tree.find(ROOT, "orders/s")
        tree.close()
        store.close()
    remove_tree(disk, f"{PATH}/buckets/02/2")
    remove_tree(disk, f"{PATH}/buckets/03/3")
    store, tree = _start(disk, 0)
    tree.mkdir(ROOT, tree.root, "orders", 0o755)
    tree.close()
    store.close()
