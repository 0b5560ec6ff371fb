"""Millions of frames to a real server, many in flight: some make sense, some are broken; it serves all others on."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from pathlib import Path

import pytest

from mqfs.ninep.client.connection import connect
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import encode
from tests.ninep.test_fuzz import VERSIONS, Fuzzer
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S
from tests.support.server import Server

pytestmark = [pytest.mark.process, pytest.mark.slow]

MARK = encode(m.Tflush(65_000, 65_001), False)
MARKED = encode(m.Rflush(65_000), False)
POOL = 3_000  # different frames of each dialect
BURST = 150  # in flight: the replies fit a socket's buffers
CONNECTIONS = 3


class Line:
    """A connection that sends without waiting for each answer."""

    def __init__(self, path: str, version: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_S)
        self.socket.connect(path)
        self.pending = 0
        unix = version != "9P2000"
        self.send([encode(m.Tversion(0xFFFF, 8_192, version), False), encode(m.Tattach(0, 0, m.NOFID, "", ""), unix)])
        assert self.settle()

    def send(self, frames: list[bytes]) -> None:
        """They and a mark, whose reply says that all were looked at."""
        self.pending = len(frames)
        self.socket.sendall(b"".join(frames) + MARK)

    def settle(self) -> int:
        """How many frames the server has had; 0: it ended the connection."""
        rest = b""
        while True:
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                data = b""
            if not data:
                return 0
            rest = rest[-len(MARKED) + 1 :] + data  # the mark is its own last reply
            if MARKED in rest:
                return self.pending

    def close(self) -> None:
        self.socket.close()


class Pool:
    """Frames of a dialect, made once: to make one takes longer than to serve it."""

    def __init__(self, dice: random.Random, version: str) -> None:
        self.dice, self.fuzzer = dice, Fuzzer(dice)
        self.fuzzer.unix = version != "9P2000"
        made = (self.fuzzer.request() for _ in range(2 * POOL))
        self.frames = [frame for frame in made if frame[4] != 100][:POOL]  # a Tversion forgets what was begun

    def burst(self) -> list[bytes]:
        """Each with a tag of its own."""
        frames = self.dice.choices(self.frames, k=BURST)
        return [frame[:5] + struct.pack("<H", tag) + frame[7:] for tag, frame in enumerate(frames)]

    def broken(self) -> bytes:
        return self.fuzzer.mutated(self.dice.choice(self.frames))


@pytest.mark.timeout(3_600)
def test_frames(tmp_path: Path) -> None:
    dice, wanted = random.Random(seed()), size(2_000_000)
    pools = {version: Pool(dice, version) for version in VERSIONS}
    path, began = f"{tmp_path}/s", time.monotonic()
    sent = broken = ended = rounds = 0
    with (
        Server("--store", "store", "--listen", "unix!s", "--default", "sync off", cwd=tmp_path) as server,
        connect(f"unix!{path}") as good,
    ):
        good.socket.settimeout(HANG_S)
        good.mkdir("quiet")  # of a name that the noise does not know
        good.open("quiet/ctl", "w").write(b"replay all\n")
        watched, written = good.create("quiet/watched", "w"), 0
        while sent + broken < wanted:
            version = dice.choice(VERSIONS)
            lines = [Line(path, version) for _ in range(CONNECTIONS)]
            for _ in range(dice.choice([1, 5, 20])):
                for line in lines:
                    line.send(pools[version].burst())
                for line in lines:
                    had = line.settle()
                    assert had, f"round {rounds}: a connection ended that had sent nothing broken: {server.text()}"
                    sent += had
            for line in lines:
                line.send([pools[version].broken() for _ in range(dice.choice([1, 2, 5]))])
                line.socket.shutdown(socket.SHUT_WR)  # one may say that it is longer
            for line in lines:
                had = line.settle()
                ended += not had
                broken += had or 1
                line.close()
            rounds += 1
            watched.write(b"%d" % written)
            written += 1
            assert server.process.poll() is None, server.text()
        cursor = good.open("quiet/.cursor", "r+")
        cursor.write(b"seek first\nuntil end\nformat each\n")
        assert [cursor.receive() for _ in range(2 * written)] == [
            body for n in range(written) for body in (b"%d" % n, b"")
        ]
        descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
        print(
            f"{sent} frames and {broken} broken ones, {ended} connections ended by them, {written} messages of another,"
            f" {descriptors} descriptors left, {time.monotonic() - began:.0f} s"
        )
        assert descriptors < 100, "something leaked"
    assert "Traceback" not in server.text(), server.text()
