"""Memory that clients made the server hold is the system's again when they are gone."""

from __future__ import annotations

import socket
from pathlib import Path

from mqfs import limits
from mqfs.ninep.client.connection import connect
from mqfs.ninep.codec.messages import NOFID, NONUNAME, Fcall, Tattach, Topen, Tread, Tversion, Twalk, Twrite
from mqfs.ninep.codec.wire import encode
from tests.support.eventually import eventually
from tests.support.server import Server

CLIENTS = 60
MIB = 1 << 20


def resident(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


def speak(folder: Path, *requests: Fcall) -> socket.socket:
    """A connection that sends and never reads."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(folder / "s"))
    sock.sendall(b"".join(encode(request, False) for request in requests))
    return sock


def test_clients_that_do_not_read_and_half_requests(tmp_path: Path) -> None:
    with Server("--listen", f"unix!{tmp_path}/s", cwd=tmp_path) as server:
        with connect(f"unix!{tmp_path}/s", msize=limits.MSIZE_MOST) as client:
            with client.open("ctl", "w") as ctl:
                ctl.write(b"replay all\nsync off\n")
            with client.create("m") as stream:
                for number in range(64):
                    stream.write(b"%064d" % number + b"x" * (MIB // 16))
        before = resident(server)
        begin = (
            Tversion(0xFFFF, limits.MSIZE_MOST, "9P2000"), Tattach(1, 0, NOFID, "", "", NONUNAME),
            Twalk(2, 0, 1, ("m",)), Topen(3, 1, 0),
        )  # fmt: skip
        asked = [Tread(tag, 1, tag << 32, MIB) for tag in range(10, 74)]
        half = encode(Twrite(9, 1, 0, b"x" * (MIB - 64)), False)[:-1]
        clients = [speak(tmp_path, *begin, *asked) for _ in range(CLIENTS)]
        for _ in range(CLIENTS):
            clients.append(speak(tmp_path, *begin))
            clients[-1].sendall(half)
        eventually(lambda: resident(server) > before + CLIENTS * MIB, "they hold memory")
        assert resident(server) < before + 3 * CLIENTS * MIB
        for sock in clients:
            sock.close()
        eventually(lambda: resident(server) < before + limits.KEPT_BYTES + 8 * MIB, "it is given back")
