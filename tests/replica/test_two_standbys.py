"""One primary, two standbys, and more groups than a standby has open files: all of them have the same in the end."""

from __future__ import annotations

import random
from glob import glob
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.store.check import check
from mqfs.store.standby import _OPEN_FILES
from mqfs.store.store import DiskStore
from tests.replica.primary import LocalPrimary, LocalStandby
from tests.replica.test_copies import are_equal, messages_of
from tests.support.campaign import seed
from tests.support.server import Server, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
GROUPS = 3 * _OPEN_FILES + 8


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPLICA_BEAT_S", 0.2), ("REPLICA_STATE_S", 0.1), ("SEGMENT_BYTES", 20_000)):
        monkeypatch.setattr(limits, name, value)


class Writer:
    """Writes to all groups of whoever is the primary, trims and removes; and knows what they have to have."""

    def __init__(self) -> None:
        self.pick = random.Random(seed())
        self.groups, self.last = list(range(1, GROUPS + 1)), dict[int, bytes]()
        self._made = GROUPS

    def write(self, primary: LocalPrimary, what: bytes) -> None:
        """To each group in some order, some of it in several segments."""
        for group in self.pick.sample(self.groups, len(self.groups)):
            self.last[group] = b"%s to %d" % (what, group)
            primary.append(group, b"x" * self.pick.choice([10, 10, 10, 12_000]), self.last[group])

    def wait(self, primary: LocalPrimary) -> None:
        """Until what was written last is acknowledged."""
        primary.run(lambda: all(self.last[one] in primary.acknowledged.get(one, ()) for one in self.groups))

    def change(self, primary: LocalPrimary) -> set[int]:
        """Trim a third of the groups to their last batch, and put others in the place of a tenth, which it returns."""
        for group in self.pick.sample(self.groups, GROUPS // 3):
            bucket = primary.bucket(group)
            bucket.upkeep.trim({16: bucket.end.next - 2}, set())
        removed = self.pick.sample(self.groups[1:], GROUPS // 10)  # not the root
        for group in removed:
            primary.store.remove(group)
            self._made += 1
            self.groups[self.groups.index(group)] = self._made
            del self.last[group]
        return set(removed)


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_two_standbys_of_many_groups_and_a_takeover_by_one(
    tmp_path: Path, url: str, standbys: list[LocalStandby]
) -> None:
    writer, first = Writer(), LocalPrimary(tmp_path / "a", url)
    one = LocalStandby(tmp_path / "b", url)
    standbys.append(one)
    with short_folder() as folder, Server.at(folder, "--replica", url, "--standby", "--failover", "1h") as other:
        stores = tmp_path / "a", tmp_path / "b", other.store
        writer.write(first, b"first")
        first.run(lambda: len(names(other.store)) > GROUPS // 2)
        other.kill()
        writer.wait(first)
        segments = names(first.path)
        writer.write(first, b"second")
        writer.wait(first)
        writer.change(first)
        writer.write(first, b"third")
        writer.wait(first)
        assert segments - names(first.path), "segments were trimmed, and groups removed"
        other.start()
        first.run(lambda: have_the_same(*stores))
        unsure = writer.change(first)
        writer.write(first, b"fourth")
        first.wait(writer.groups[0], 1)
        first.kill()
        second = one.promote(url)
        writer.write(second, b"fifth")  # and makes again what was in no frame
        writer.wait(second)
        writer.change(second)
        again = LocalStandby(first.path, url)
        standbys.append(again)
        second.run(lambda: have_the_same(*stores))  # a folder that waits for its removal stays at a stop
        writer.write(second, b"sixth")
        second.stop()
        second.run(lambda: have_the_same(*stores))
        again.stop()
        assert other.stop() == 0
        for path in stores:
            found = {int(folder.name) for folder in path.glob("buckets/*/*")}
            assert found >= set(writer.groups) >= found - unsure  # whose removal may not be in the log
        assert check(str(other.store), report=print) == 0
        assert newest_in(other.store).items() >= writer.last.items()


def have_the_same(*stores: Path) -> bool:
    """Names first: bytes are much to read while others write them."""
    return all(names(one) == names(stores[0]) for one in stores) and are_equal(*stores[:2]) and are_equal(*stores[1:])


def names(path: Path) -> set[str]:
    """The segments there are now: they come and go."""
    return set(glob("buckets/*/*/*.log", root_dir=path))


def newest_in(path: Path) -> dict[int, bytes]:
    """The last message of each group."""
    store = DiskStore(str(path))
    try:
        return {number: messages[-1][1] for number, messages in messages_of(store).items()}
    finally:
        store.close()
