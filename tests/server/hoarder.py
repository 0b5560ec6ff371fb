"""A program that, as a user, takes of everything that users share until it is refused, and keeps it.

    python -m tests.server.hoarder ADDRESS UID PART

PART: what part of its share it wants, between 0 and 1. It prints how much of each it has, as JSON, and then waits for
the end of its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

from mqfs import limits
from mqfs.client.transport.ring_attachment import AttachClient
from mqfs.errors import Disconnected, MqfsError
from mqfs.ninep.client.connection import connect
from mqfs.ninep.codec.messages import (  # fmt: skip
    NOFID,
    NONUNAME,
    Fcall,
    Rlerror,
    Tattach,
    Tflush,
    Tlock,
    Tlopen,
    Tmkdir,
    Tread,
    Tversion,
    Twalk,
    Twrite,
)
from mqfs.ninep.codec.wire import Framer, decode, encode
from tests.support.eventually import HANG_S

AT_ONCE = 500  # requests before their answers are read
FIDS = 1_000  # of one connection
LAST = 60_000  # the tag of a request that is answered when all before it were looked at
FREE = 0xF000
PART, HOME = 0.0, ""  # set by `main`


def wanted(limit: int) -> int:
    """How many of what is bounded by that it tries to have: one too many, if it wants its whole share."""
    return int(limit // 2 * PART) + (PART == 1)


class Connection:
    """A connection of 9P2000.L; its root is the group that it has to itself. Raises OSError where it is refused."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_S)
        self.socket.connect(address)
        self._framer = Framer(limits.MSIZE_MOST)
        self._send([Tversion(0xFFFF, limits.MSIZE_MOST, "9P2000.L"), Tattach(1, FREE, NOFID, "", "", NONUNAME)])
        if len(list(self._replies(2))) < 2:
            raise ConnectionError("it was refused")
        self.ask([Twalk(1, FREE, 0, tuple(HOME.split("/")))])

    def _send(self, requests: Iterable[Fcall]) -> None:
        self.socket.sendall(b"".join(encode(request, True) for request in requests))

    def _replies(self, count: int) -> Iterator[Fcall]:
        while count > 0 and (data := self.socket.recv(1 << 20)):
            for frame in self._framer.frames(data):
                yield decode(*frame, True)
                count -= 1

    def ask(self, requests: list[Fcall]) -> int:
        """How many of them were not refused."""
        done = 0
        for at in range(0, len(requests), AT_ONCE):
            some = [request._replace(tag=tag) for tag, request in enumerate(requests[at : at + AT_ONCE])]  # type: ignore[call-arg]
            self._send(some)
            done += sum(not isinstance(reply, Rlerror) for reply in self._replies(len(some)))
        return done

    def leave(self, requests: list[Fcall]) -> int:
        """How many of them wait now."""
        refused = 0
        for at in range(0, len(requests), AT_ONCE):
            some = requests[at : at + AT_ONCE]
            self._send([*some, Tflush(LAST, LAST + 1)])
            for reply in self._replies(len(some) + 1):
                if not isinstance(reply, Rlerror):
                    break
                refused += 1
        return len(requests) - refused

    def half(self) -> int:
        """Send most of a frame. How many bytes of it were taken."""
        data = encode(Twrite(9, 1, 0, bytes(limits.MSIZE_MOST - 64)), True)[:-1]
        sent = 0
        self.socket.settimeout(1)
        with suppress(OSError):
            while sent < len(data):
                sent += self.socket.send(data[sent:])
        return sent


def connections(address: str) -> list[Connection]:
    made: list[Connection] = []
    with suppress(OSError):
        while len(made) < wanted(limits.CONNECTIONS):
            made.append(Connection(address))
    return made


def open_files(connection: Connection, count: int) -> int:
    walks: list[Fcall] = [Twalk(fid % FREE, 0, fid, ("empty",)) for fid in range(1, count + 1)]
    walked = connection.ask(walks)
    return connection.ask([Tlopen(fid % FREE, fid, os.O_RDWR) for fid in range(1, walked + 1)])


def take(address: str) -> dict[str, int]:
    """How much it has of each."""
    has: dict[str, int] = {}
    with connect(address) as client:
        client.mkdir(HOME)
        with client.open(f"{HOME}/ctl", "w") as ctl:
            ctl.write(b"replay all\nsync off\ndedup 1d\n")
        client.create(f"{HOME}/empty").close()
    held = connections(f"{address.removeprefix('unix!')}")
    has["connections"] = len(held)
    spare = iter(held)
    first = next(spare)
    has["groups"] = first.ask([Tmkdir(1, 0, f"g{n}", 0o700, 0) for n in range(wanted(limits.GROUPS))])
    has["parts"] = parts(next(spare), wanted(limits.PARTS))
    has["ids"] = ids(next(spare), wanted(limits.DEDUP_IDS))
    locker = next(spare)
    open_files(locker, 1)
    has["locks"] = locker.ask([Tlock(1, 1, 1, 0, 2 * n, 1, 1, "x") for n in range(wanted(limits.LOCKS))])
    has["waits"] = 0
    while has["waits"] < wanted(limits.PARKED):
        reader = next(spare)
        open_files(reader, 1)
        reads: list[Fcall] = [Tread(tag, 1, 0, 10) for tag in range(1, limits.TAGS - AT_ONCE)]
        waiting = reader.leave(reads[: wanted(limits.PARKED) - has["waits"]])
        has["waits"] += waiting
        if waiting < len(reads):
            break
    has["files"] = has["parts"]
    while left := wanted(limits.HANDLES) - has["files"]:
        opened = open_files(next(spare), min(left, FIDS))
        has["files"] += opened
        if opened < min(left, FIDS):
            break
    has["rings"] = rings(address)
    has["bytes"] = 0
    for connection in spare:
        if has["bytes"] >= wanted(limits.HELD_BYTES):
            break
        has["bytes"] += (sent := connection.half())
        if sent < limits.MSIZE_MOST // 2:
            break
    KEPT.extend(held)
    return has


KEPT: list[object] = []


def parts(connection: Connection, count: int) -> int:
    """Each with as much as is kept of it in memory."""
    connection.ask([Twalk(1, 0, 1, (".txn",))])
    made = connection.ask([Tmkdir(1, 1, f"p{n}", 0o700, 0) for n in range(count)])
    body = bytes(limits.PART_BUFFER_BYTES - 4_096)
    for n in range(made):
        walk = Twalk(1, 0, 2 + n, (".txn", f"p{n}", "empty"))
        connection.ask([walk, Tlopen(1, 2 + n, os.O_WRONLY), Twrite(1, 2 + n, 0, body)])
    return made


def ids(connection: Connection, count: int) -> int:
    connection.ask([Twalk(1, 0, 1, (".put",)), Tlopen(1, 1, os.O_WRONLY)])
    texts = (f'{{"stream":"empty","id":"{n}"}}' for n in range(count))
    puts: list[Fcall] = [Twrite(1, 1, 0, b"%s x" % text.encode()) for text in texts]
    done = connection.ask(puts)
    connection.ask([Twalk(1, 0, 2, ("ctl",)), Tlopen(1, 2, os.O_WRONLY), Twrite(1, 2, 0, b"clear\n")])
    return done


def rings(address: str) -> int:
    made = 0
    with suppress(MqfsError, Disconnected):
        while made < wanted(limits.RINGS):
            door = AttachClient(address.removeprefix("unix!") + ".ring", 60)
            KEPT.append(door)
            KEPT.append(door.attach(f"{HOME}/g{made}"))
            made += 1
    return made


def main() -> None:
    global PART, HOME
    address, uid, part = sys.argv[1:]
    PART, HOME = float(part), f"theirs/{uid}"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    print(json.dumps(take(address)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
