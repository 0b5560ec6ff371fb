"""Hostile names, bodies, headers and frames through every way in: a refusal is a clear one, and others lose nothing.

A witness writes numbered messages all the while, into the same group and into another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import ring
from mqfs.errors import MqfsError, RemoteError
from mqfs.model import Draft
from mqfs.ninep.client.connection import Client, connect
from tests.ninep.hostile import Hostile
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S
from tests.support.server import Server, unmount
from tests.support.server import mqfs as command

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Rings are given again and again to who spoils them: else there would be three tries a minute.
SERVER = (
    "from mqfs import limits; from mqfs.cli.main import main; import sys; "
    "limits.RING_CORRUPT = 1 << 30; sys.argv[0] = 'mqfs'; main()"
)
WITNESSED = ("g/t", "h/s")


class Ways:
    """Each is one attempt, by its name; it raises what it is refused with."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.mount, self.address = folder / "mq", f"unix!{folder}/s"
        self.dice, self.hostile = dice, Hostile(dice)
        self.tree = connect(self.address)
        self.tree.socket.settimeout(HANG_S)
        self.parts = 0
        self.attached: Any = None  # to the ring of `g`
        self.all: dict[str, Callable[[], None]] = {
            "mount": self.by_mount, "9P": self.by_9p, ".put": self.put, ".batch": self.batch, ".txn": self.transaction,
        }  # fmt: skip
        if not ring.MISSING:
            self.all["ring"] = self.by_ring

    def close(self) -> None:
        self.tree.close()
        if self.attached is not None:
            self.attached.close()

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[Callable[[bytes], object]]:
        """Through the mount or over 9P."""
        if self.dice.random() < 0.5:
            fd = os.open(os.fsencode(self.mount / path), os.O_WRONLY)
            try:
                yield lambda data: os.write(fd, data)
            finally:
                os.close(fd)
        else:
            with self.tree.open(path, "w") as file:
                yield file.write

    def by_mount(self) -> None:
        path = os.fsencode(f"{self.mount}/g/{self.hostile.name()}")
        fd = os.open(path, self.dice.choice([os.O_WRONLY, os.O_WRONLY | os.O_CREAT]), 0o666)
        try:
            os.write(fd, self.hostile.body())
        finally:
            os.close(fd)

    def by_9p(self) -> None:
        path = f"g/{self.hostile.name()}"
        make = self.dice.random() < 0.3
        with self.tree.create(path, "w") if make else self.tree.open(path, "w") as file:
            file.write(self.hostile.body())

    def put(self) -> None:
        with self.opened("g/.put") as write:
            write(self.hostile.put())

    def batch(self) -> None:
        with self.opened("g/.batch") as write:
            write(self.hostile.batch())

    def transaction(self) -> None:
        """A part that is filled somehow, and a command that names it or not."""
        part = f"p{self.parts}" if self.dice.random() < 0.9 else self.hostile.name()
        self.parts += 1
        self.tree.mkdir(f"g/.txn/{part}")
        try:
            with self.opened(f"g/.txn/{part}/{self.dice.choice(['.batch', 's', 't', self.hostile.name()])}") as write:
                write(self.hostile.batch() if self.dice.random() < 0.5 else self.hostile.body(4_097))
            with self.opened("g/.txn/ctl") as write:
                write(self.hostile.command([part]))
        finally:
            with contextlib.suppress(MqfsError):
                self.tree.remove(f"g/.txn/{part}")

    def by_ring(self) -> None:
        """A record that no client may publish, past what the library looks at."""
        dice, hostile = self.dice, self.hostile
        if self.attached is None:
            self.attached = mqfs.connect(self.address, transport="ring", reconnect=False)
            self.attached.group("g").publish("s", b"by ring")
        try:
            ours = self.attached.group("g")._publisher._direct._attachment.now.ring
            if dice.random() < 0.3:
                ours.publish_unit([Draft(1, 16, hostile.body(4_097)), Draft(dice.choice([1, 2, 4]), 16, b"")], 0, 8)
            else:
                stream = dice.choice([16, 16, 0, 15, 999, 2**32 - 1])
                ours.publish(stream, hostile.body(4_097), hostile.raw_headers(), dice.choice([1, 1, 2, 6]),
                             dice.choice([0, 0, 1, 4, 8, 255]), 1.0)  # fmt: skip
        except (MqfsError, AttributeError):  # the ring is over
            self.attached.close()
            self.attached = None
            raise

    def attempt(self, way: str) -> Exception | None:
        """The error that refused it, from the server or from our own side, which never sends some requests."""
        try:
            self.all[way]()
        except (MqfsError, OSError, AttributeError, ValueError, TypeError) as error:
            return error
        return None


def is_clear(error: Exception) -> bool:
    """It says what was wrong, and is no failure of the disk or a bug."""
    if isinstance(error, MqfsError):
        return error.errno != errno.EIO and not isinstance(error, RemoteError) and "\n" not in str(error) != ""
    return not isinstance(error, OSError) or error.errno not in (errno.EIO, None)


def read(tree: Client, group: str, form: str) -> list[bytes]:
    with tree.open(f"{group}/.cursor", "r+") as cursor:
        cursor.write(b"seek first\nuntil end\nformat %s\n" % form.encode())
        rows = []
        while row := cursor.receive(timeout=HANG_S):
            rows.append(row)
        return rows


def bodies(tree: Client, group: str, messages: int) -> list[bytes]:
    """As `raw`, in which an empty message reads as the end does."""
    with tree.open(f"{group}/.cursor", "r+") as cursor:
        cursor.write(b"seek first\nuntil end\nformat raw\n")
        rows = [cursor.receive(timeout=HANG_S) for _ in range(messages)]
        assert cursor.receive(timeout=HANG_S) == b""
        return rows


@pytest.mark.fuse
@pytest.mark.timeout(3_600)
def test_every_way(tmp_path: Path) -> None:
    dice, began = random.Random(seed()), time.monotonic()
    (tmp_path / "mq").mkdir()
    arguments = ["--store", "store", "--listen", "unix!s", "--mount", "mq", "--default", "replay all"]
    program = [sys.executable, "-c", SERVER, "serve"]
    server = Server(*arguments, cwd=tmp_path, program=program)
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    witnessed = []
    try:
        with connect(f"unix!{tmp_path}/s") as witness:
            witness.socket.settimeout(HANG_S)
            for path in ("g/s", "g/t", "h/s"):
                group = path.partition("/")[0]
                if group not in witness.list(""):
                    witness.mkdir(group)
                    witness.open(f"{group}/ctl", "w").write(b"sync off\n")
                witness.create(path).close()
            files = [witness.open(path, "w") for path in WITNESSED]
            ways = Ways(tmp_path, dice)
            for number in range(size(20_000)):
                way = dice.choice(list(ways.all))
                refusal = ways.attempt(way)
                clear = refusal is None or is_clear(refusal)
                assert clear, f"attempt {number}, {way}: {refusal!r} {server.text()}"
                (refused if refusal else taken)[way] += 1
                if number % 20 == 0:
                    body = b"witness %d" % number
                    for file in files:
                        file.write(body)
                    witnessed.append(body)
                assert server.process.poll() is None, f"attempt {number}, {way}: {server.text()}"
            ways.close()
            counts = [look(witness, witnessed)]
        for _ in range(2):
            assert server.stop() == 0, server.text()
            server = Server(*arguments, cwd=tmp_path, program=program)
            with connect(f"unix!{tmp_path}/s") as witness:
                counts.append(look(witness, witnessed))
        assert counts[0] <= counts[1], "a restart loses messages"  # the last ones from a ring may be taken at the stop
        assert counts[1] == counts[2], "a restart shows other messages"
        assert server.stop() == 0, server.text()
    finally:
        if server.process.poll() is None:
            server.kill()
        unmount(tmp_path / "mq")
    assert "Traceback" not in server.text(), server.text()
    check = command("check", "store", cwd=tmp_path)
    assert check.returncode == 0, check.stdout + check.stderr
    print(f"taken {dict(taken)}, refused {dict(refused)}, {len(witnessed)} of others, {time.monotonic() - began:.0f} s")
    assert all(taken[way] and refused[way] for way in ways.all if way != "ring")


def look(tree: Client, witnessed: list[bytes]) -> int:
    """The messages of others are there, in order; and all can be read in every format. How many messages there are."""
    for group in ("g", "h"):
        rows = read(tree, group, "json")
        assert sum(b'"witness ' in row for row in rows) == len(witnessed)
        assert [body for body in bodies(tree, group, len(rows)) if body.startswith(b"witness ")] == witnessed
        assert read(tree, group, "record")
    return len(read(tree, "g", "json"))
