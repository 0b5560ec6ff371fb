"""kill -9 of the server at random moments, while writers with `sync always` write through the mount and over 9P.

After every kill: it starts; what was acknowledged is there, once; nothing is there that no one wrote; each writer's
order is kept; a sequence that was once seen belongs to the same message for ever; `mqfs check` finds the store sound.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mqfs.errors import MqfsError
from mqfs.ninep.client.connection import connect
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Server, environment, mqfs, unmount

WRITERS = 4  # half of them through the mount
ROUNDS_A_STORE = 10  # then a new one, so that a round stays short and the first seconds of a store are met often
GONE = (OSError, EOFError, MqfsError)

Way = AbstractContextManager[Callable[[bytes], int]]
Seen = dict[int, tuple[str, str]]  # sequence: stream, message


class Writer(threading.Thread):
    """Writes numbered messages until the server is gone; knows what it began and what was acknowledged."""

    def __init__(self, name: str, first: int, opened: Way) -> None:
        super().__init__(daemon=True)
        self.label, self.number, self.opened = name, first, opened
        self.acknowledged: list[str] = []
        self.begun: list[str] = []

    def run(self) -> None:
        with contextlib.suppress(*GONE), self.opened as write:
            while True:
                text = f"{self.label} {self.number}"
                self.begun.append(text)
                assert write(text.encode()) == len(text)
                self.acknowledged.append(text)
                self.number += 1


class Watcher(threading.Thread):
    """Reads what comes, with its sequences, until the server is gone."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.seen: Seen = {}

    def run(self) -> None:
        with contextlib.suppress(*GONE), connect(self.address) as client, client.open("a/.cursor", "r+") as cursor:
            cursor.write(b"seek end\nformat json\n")
            while line := cursor.receive():
                take(self.seen, line)


def take(seen: Seen, line: bytes) -> None:
    row = json.loads(line)
    what = (row["stream"], row["body"])
    assert seen.setdefault(row["sequence"], what) == what


class Campaign:
    """One store, killed again and again."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice
        self.mount = folder / "mq"
        self.address = f"unix!{folder / 's'}"
        self.options = ["--store", "store", "--listen", "unix!s", "--mount", "mq"]
        self.kept: Seen = {}  # what was there at the last look
        self.ever: Seen = {}  # and all that was ever seen: before its commit a message may be seen and then be lost
        self.acknowledged: dict[str, list[str]] = {}
        self.begun: set[str] = set()
        self.mount.mkdir()

    def prepare(self) -> None:
        server = Server(*self.options, cwd=self.folder)
        with connect(self.address) as client:
            client.mkdir("a")
            with client.open("a/ctl", "w") as ctl:
                ctl.write(b"replay all\n")
            for name in ("own-0", "own-1", "own-2", "own-3", "shared"):
                client.create(f"a/{name}").close()
        server.kill()

    def round(self) -> None:
        """Start, write, kill, start, look."""
        if self.dice.random() < 0.2:
            self.kill_while_it_starts()
        server = Server(*self.options, cwd=self.folder)
        watcher = Watcher(self.address)
        writers = [self.writer(number) for number in range(WRITERS)]
        for thread in (watcher, *writers):
            thread.start()
        eventually(lambda: any(writer.acknowledged for writer in writers), "a write")
        pause(self.dice.uniform(0.0, 0.1))
        server.kill()
        for thread in (watcher, *writers):
            thread.join(HANG_S)
            assert not thread.is_alive(), "a client waits for a server that is gone"
        for writer in writers:
            self.begun.update(writer.begun)
            self.acknowledged.setdefault(writer.label, []).extend(writer.acknowledged)
        self.look(watcher.seen)

    def writer(self, number: int) -> Writer:
        stream = self.dice.choice([f"own-{number}", "shared"])
        label = f"{number}:{stream}"
        first = sum(text.startswith(label + " ") for text in self.begun)
        through = self.through_mount if number % 2 else self.over_9p
        return Writer(label, first, through(f"a/{stream}"))

    @contextlib.contextmanager
    def through_mount(self, path: str) -> Iterator[Callable[[bytes], int]]:
        with open(self.mount / path, "ab", buffering=0) as file:
            yield file.write

    @contextlib.contextmanager
    def over_9p(self, path: str) -> Iterator[Callable[[bytes], int]]:
        with connect(self.address) as client, client.open(path, "w") as stream:
            yield stream.write

    def kill_while_it_starts(self) -> None:
        process = subprocess.Popen(
            [*COMMAND, "serve", *self.options], cwd=self.folder, env=environment(), stderr=subprocess.DEVNULL
        )
        pause(self.dice.uniform(0.0, 0.8))
        process.kill()
        process.wait()

    def look(self, watched: Seen) -> None:
        """Compare what is there now with what must be."""
        server = Server(*self.options, cwd=self.folder)
        now = self.everything()
        server.kill()
        for sequence, what in {**self.ever, **watched}.items():
            assert now.get(sequence, what) == what, f"sequence {sequence} was given twice"
        assert self.kept.items() <= now.items(), "a message that was there is gone"
        texts = [text for _, text in now.values()]
        assert len(set(texts)) == len(texts), "a message is there twice"
        assert set(texts) <= self.begun, "a message is there that no one wrote"
        for label, acknowledged in self.acknowledged.items():
            there = [text for text in texts if text.startswith(label + " ")]
            assert set(acknowledged) <= set(there), "an acknowledged message is lost"
            assert there == sorted(there, key=lambda text: int(text.split()[1])), "a writer's order is not kept"
        self.kept = now
        self.ever.update({**watched, **now})

    def everything(self) -> Seen:
        seen: Seen = {}
        with connect(self.address) as client, client.open("a/.cursor", "r+") as cursor:
            cursor.write(b"seek first\nuntil end\nformat json\n")
            last = 0
            while line := cursor.receive():
                take(seen, line)
                assert json.loads(line)["sequence"] > last
                last = json.loads(line)["sequence"]
        return seen


def pause(seconds: float) -> None:
    """Let a random time go by: the moment of the kill is what is random, nothing is waited for."""
    threading.Event().wait(seconds)


@pytest.mark.timeout(1800)
def test_kill(tmp_path: Path) -> None:
    dice = random.Random(seed())
    rounds, done, began = size(200, least=4), 0, time.monotonic()
    acknowledged = 0
    while done < rounds:
        folder = tmp_path / str(done)
        folder.mkdir()
        campaign = Campaign(folder, dice)
        try:
            campaign.prepare()
            for _ in range(min(ROUNDS_A_STORE, rounds - done)):
                campaign.round()
                done += 1
        finally:
            unmount(campaign.mount)
        check = mqfs("check", "store", cwd=folder)
        assert check.returncode == 0, check.stdout + check.stderr
        acknowledged += sum(map(len, campaign.acknowledged.values()))
    assert acknowledged >= rounds, "the writers did not write"
    print(f"{done} kills, {acknowledged} messages acknowledged, none lost, {time.monotonic() - began:.0f} s")
