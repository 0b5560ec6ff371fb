"""kill -9 of a server whose group has `replay key`, at random moments and on a disk that is full at times.

After every kill a reader that comes gets of each key what was written last: what was acknowledged, or what was under
way then. A key that was removed does not come back, whatever segments were given back, rewritten, or refused.
"""

from __future__ import annotations

import errno
import json
import mmap
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mqfs.errors import Disconnected, MqfsError
from mqfs.ninep.client.connection import connect
from tests.ring.memory.build import compiler
from tests.server.test_failing_calls import CHANGE, FOR_GOOD, Control
from tests.server.test_kill import GONE, pause
from tests.support import ROOT
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S
from tests.support.server import Server, mqfs
from tests.support.temp_store import SMALL

KEYS = [f"k{number}" for number in range(12)]
ROUNDS_A_STORE = 10
HASTY = {**SMALL, "SEGMENT_BYTES": 8_192, "TRIM_BYTES": 0, "SEQUENCE_BLOCK": 256, "LOOKING_S": 0, "PIECE_S": 0}
Value = bytes | None  # None: there is none


class Writer(threading.Thread):
    """Writes values and removals of keys until the server is gone, and knows what each key may have now."""

    def __init__(self, address: str, possible: dict[str, set[Value]], dice: random.Random) -> None:
        super().__init__(daemon=True)
        self.address, self.possible, self.dice = address, possible, dice
        self.acknowledged = self.refused = 0

    def run(self) -> None:
        with suppress(*GONE), connect(self.address) as client, client.open("g/.put", "r+") as put:
            client.socket.settimeout(HANG_S)
            while True:
                self.write(put)

    def write(self, put: object) -> None:
        key = self.dice.choice(KEYS)
        value = None if self.dice.random() < 0.4 else self.dice.randbytes(20).hex().encode() * self.dice.randint(1, 30)
        self.possible[key].add(value)
        request = json.dumps({"stream": "s", "key": key}).encode()
        try:
            put.write(request + b" " + (value or b""))  # type: ignore[attr-defined]
        except Disconnected:
            raise
        except MqfsError:
            self.refused += 1  # it is not there, or is: a failed sync is an answer, too
        else:
            self.possible[key] = {value}
            self.acknowledged += 1


class Reader(threading.Thread):
    """Comes again and again, until the server is gone: what it asks for is looked up."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address = address

    def run(self) -> None:
        with suppress(*GONE), connect(self.address) as client:
            while True:
                with client.open("g/.kept/s") as kept:
                    while kept.receive():
                        pass
                pause(0.02)


class Campaign:
    """One store, killed again and again."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice
        self.possible: dict[str, set[Value]] = {key: {None} for key in KEYS}
        self.control = self._control()
        self.acknowledged = self.refused = 0
        with self.server().process as process, connect(self.address) as client:
            client.mkdir("g")
            with client.open("g/ctl", "w") as ctl:
                ctl.write(b"replay key\n")
            client.create("g/s").close()
            process.kill()

    @property
    def address(self) -> str:
        return f"unix!{self.folder}/s"

    def _control(self) -> Control:
        path = self.folder / "control"
        path.write_bytes(bytes(64))
        with open(path, "r+b") as file:
            return Control.from_buffer(mmap.mmap(file.fileno(), 0))

    def server(self) -> Server:
        return Server(
            "--store", f"{self.folder}/store", "--listen", "unix!s", cwd=self.folder,
            program=[sys.executable, "-m", "tests.http.hasty_server"], HASTE=json.dumps(HASTY),
            LD_PRELOAD=str(self.folder.parent / "failing.so"), MQFS_FAIL_BELOW=f"{self.folder}/store",
            MQFS_FAIL_CONTROL=f"{self.folder}/control",
        )  # fmt: skip

    def round(self) -> None:
        """Start, look, write, kill."""
        server = self.server()
        try:
            self.look()
            threads = [Writer(self.address, self.possible, self.dice), Reader(self.address)]
            for thread in threads:
                thread.start()
            pause(self.dice.uniform(0.0, 0.6))
            if self.dice.random() < 0.5:
                self.fill_disk()
        finally:
            server.kill()
            self.control.kinds = 0
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a client waits for a server that is gone"
        writer = threads[0]
        assert isinstance(writer, Writer)
        self.acknowledged += writer.acknowledged
        self.refused += writer.refused

    def end(self) -> None:
        """A last start, without a fault, and a look at all that is stored."""
        server = self.server()
        self.look()
        assert server.stop() == 0, server.text()
        check = mqfs("check", "store", cwd=self.folder)
        assert check.returncode == 0, check.stdout + check.stderr

    def fill_disk(self) -> None:
        """Some call finds no room, and for a while all that follow: what is removed meanwhile gives none."""
        self.control.calls, self.control.number = 0, errno.ENOSPC
        self.control.first, self.control.last = self.dice.randint(1, 40), self.dice.choice([FOR_GOOD, 60, 45])
        self.control.kinds = CHANGE
        pause(self.dice.uniform(0.0, 1.2))
        self.control.kinds = 0
        pause(self.dice.uniform(0.0, 0.3))

    def look(self) -> None:
        """A reader that comes gets one message of each key."""
        found: dict[str, Value] = dict.fromkeys(KEYS)
        with connect(self.address) as client, client.open("g/.cursor", "r+") as cursor:
            cursor.write(b"seek first\nuntil end\nformat json\n")
            while line := cursor.receive(timeout=HANG_S):
                row = json.loads(line)
                key = row["headers"]["key"]
                assert found[key] is None, f"two messages of {key}"
                found[key] = row["body"].encode()
        for key, value in found.items():
            assert value in self.possible[key], f"{key}: {value!r:.30}, not one of {self.possible[key]!r:.200}"
            self.possible[key] = {value}


@pytest.fixture
def failing(tmp_path: Path) -> None:
    compiler("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
             ROOT / "tests/server/failing_calls.c", "-o", tmp_path / "failing.so", "-ldl")  # fmt: skip


@pytest.mark.process
@pytest.mark.timeout(3_600)
@pytest.mark.usefixtures("failing")
def test_kill(tmp_path: Path) -> None:
    dice, rounds, done, began = random.Random(seed()), size(200, least=4), 0, time.monotonic()
    acknowledged = refused = 0
    while done < rounds:
        folder = tmp_path / str(done)
        folder.mkdir()
        campaign = Campaign(folder, dice)
        for _ in range(min(ROUNDS_A_STORE, rounds - done)):
            campaign.round()
            done += 1
        campaign.end()
        acknowledged, refused = acknowledged + campaign.acknowledged, refused + campaign.refused
    assert acknowledged > rounds, "the writer did not write"
    print(f"{done} kills, {acknowledged} acknowledged, {refused} refused, {time.monotonic() - began:.0f} s")
