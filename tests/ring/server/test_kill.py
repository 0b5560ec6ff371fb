"""kill -9 of the server again and again, while processes publish through a group's ring, and others write files.

The producers never stop: to them the server was away for a moment. At the end: each confirmed publish is there, once,
in its producer's order and with the sequence that it got; each follower of the ring saw what the log has.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from mqfs import ring
from mqfs.ninep.client.connection import connect
from mqfs.ring.server.keeper_link import KeeperLink
from tests.ring.server import crowd
from tests.server.test_kill import Campaign, Writer
from tests.support.campaign import seed, size, whole
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, mqfs, unmount

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.process, pytest.mark.slow]

ROUNDS_A_STORE = size(10, least=2)
MODES = {
    "p1": ("own-1", "published"),
    "p2": ("shared", "published"),
    "c1": ("shared", "committed"),
    "m1": ("own-2", "many"),
    "d1": ("own-3", "drafts"),
    "u1": ("shared", "put"),
    "f1": ("", "follow"),
}


class Rings(Campaign):
    """A store whose server is killed under load."""

    def __init__(self, folder: Path, dice: random.Random, sync: str) -> None:
        super().__init__(folder, dice)
        self.sync = sync
        self.server: Server | None = None
        self.acked: dict[str, int] = {}  # writers of files: the highest number that was acknowledged
        self.file_begun: dict[str, int] = {}

    def prepare(self) -> None:
        server = Server(*self.options, cwd=self.folder)
        with connect(self.address) as client:
            client.mkdir("a")
            with client.open("a/ctl", "w") as ctl:
                ctl.write(b"replay all\nsync %s\n" % self.sync.encode())
            for name in ("own-1", "own-2", "own-3", "shared"):
                client.create(f"a/{name}").close()
        server.kill()

    def go(self, rounds: int) -> tuple[int, int]:
        """(messages confirmed, messages seen by the follower)"""
        server = self.server = Server(*self.options, cwd=self.folder)
        with crowd.crowd(self.folder, self.address, "a", MODES) as members:
            for _ in range(rounds):
                writers = [self.file_writer(number) for number in range(2)]
                for writer in writers:
                    writer.start()
                threading.Event().wait(self.dice.uniform(0.0, 0.5))
                server.kill()
                if self.dice.random() < 0.3:
                    self.kill_while_it_starts()
                server = self.server = Server(*self.options, cwd=self.folder)
                for writer in writers:
                    writer.join(HANG_S)
                    assert not writer.is_alive(), "a writer waits for a server that is gone"
                    self.file_begun[writer.label] = writer.number + 1
                    self.acked[writer.label] = self.acked.get(writer.label, 0) + len(writer.acknowledged)
            for member in members:
                if member.mode != "follow":
                    member.end()
            log = crowd.log_of(self.address, "a")
            follower = next(member for member in members if member.mode == "follow")
            last = max(log)
            eventually(lambda: follower.newest() >= last, "the follower")
            follower.end()
        code = server.stop()
        assert code == 0, server.text()
        assert "Traceback" not in server.text(), server.text()
        told = crowd.check(log, members)
        seen = crowd.check_followers(log, members)
        self.check_files(log)
        return told, seen

    def file_writer(self, number: int) -> Writer:
        label = f"file{number}"
        through = self.through_mount if number % 2 else self.over_9p
        return Writer(label, self.file_begun.get(label, 0), through("a/shared"))

    def check_files(self, log: crowd.Log) -> None:
        for label, count in self.acked.items():
            numbers = [int(body.split()[1]) for _, body in log.values() if body.startswith(label + " ")]
            assert numbers == sorted(set(numbers))
            assert len(numbers) >= count, f"{label}: {count} were acknowledged, {len(numbers)} are there"


@pytest.mark.timeout(3600)
def test_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = not whole()
    if quick:
        monkeypatch.setenv("CROWD_PAUSE", "0.003")
    dice = random.Random(seed())
    rounds, done, told, seen, began = size(200, least=6), 0, 0, 0, time.monotonic()
    while done < rounds:
        folder = tmp_path / str(done)
        folder.mkdir()
        campaign = Rings(folder, dice, ("always", "10ms", "off")[done // ROUNDS_A_STORE % 3])
        count = min(ROUNDS_A_STORE, rounds - done)
        try:
            campaign.prepare()
            found = campaign.go(count)
        finally:
            if campaign.server is not None and campaign.server.process.poll() is None:
                campaign.server.kill()
            unmount(campaign.mount)
            KeeperLink(str(folder / "store")).quit()
        told, seen, done = told + found[0], seen + found[1], done + count
        check = mqfs("check", "store", cwd=folder)
        assert check.returncode == 0, check.stdout + check.stderr
    assert told > 50 * rounds, "the producers did not publish"
    print(f"{done} kills, {told} messages confirmed, {seen} seen, none lost, {time.monotonic() - began:.0f} s")
