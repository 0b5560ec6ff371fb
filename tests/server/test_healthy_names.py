"""Names of users and groups with a user database that answers at once: no door may tell whether the server knew them.

Every door that decides by a name, shows one or keeps one is tried at the first request after a start, when what it
needs was asked for long ago, and when that is forgotten. A real server, and the system's own user database.
"""

from __future__ import annotations

import http.client
import os
import pwd
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mqfs.ninep.client import connection
from mqfs.ninep.codec.messages import Rread, Rstat, Twstat
from mqfs.ninep.codec.notation import parse, show
from tests.fq.client import Client, port
from tests.support.eventually import HANG_S, eventually
from tests.support.ninep import Raw
from tests.support.server import Server, short_folder
from tests.support.tokens import OTHER, SECRET, line_of

USERS = {"daemon": 1, "bin": 2}
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif("os.geteuid() != 0", reason="needs root, to connect as other users"),
    pytest.mark.skipif(
        not USERS.items() <= {row.pw_name: row.pw_uid for row in pwd.getpwall()}.items(), reason="other users"
    ),
]
OLD_S = 0.5
AGES = {
    "start": "NAMES_S=60",
    "old": f"NAMES_S={OLD_S}",
    "forgotten": f"NAMES_S={OLD_S} NAMES_KEPT_S={OLD_S}",
}
KEEP = 'type ~ dev ~ qid 0.0.f mode ~ atime ~ mtime ~ length ~ name "" uid ""'
CHGRP = f'Twstat tag 1 fid 1 stat {{{KEEP} gid bin muid ""}}'
QUEUE = "q", "disk:public,permanent"


@contextmanager
def being(uid: int, groups: Sequence[int]) -> Iterator[None]:
    """The effective user of this process: whose the sockets are that it connects."""
    before, gid = os.getgroups(), os.getegid()
    os.setgroups([*groups])
    os.setegid(groups[0])
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(before)


class Doors:
    """A server, what it holds, and ways to it. `kept` is daemon's, open until a restart."""

    def __init__(self, server: Server, age: str) -> None:
        self.server, self.folder, self.age = server, server.folder, age
        with Client(f"{self.folder}/fq", *QUEUE) as client:
            client.bind("x")
        with connection.connect(self.server.address, timeout=HANG_S) as root:
            root.mkdir("g")
            root.mkdir("closed", 0o700)
            root.create("fq/x/r").close()
            for path in ("g", "fq", "fq/x", "fq/x/r"):
                root.chmod(path, 0o777)
        for uid, name in ((1, "mine"), (2, "other")):
            with closing(self.unix(uid, uid)) as raw:
                assert "Rwalk" in raw.ask("Twalk tag 1 fid 0 newfid 1 names [g]")
                assert "Rcreate" in raw.ask(f"Tcreate tag 1 fid 1 name {name} perm 0666 mode 1")
        self.kept = self.unix(1, 1)

    def unix(self, uid: int, *groups: int) -> Raw:
        """A session of that user by the unix socket, attached by no name."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(HANG_S)
        os.chmod(self.folder / "socket", 0o777)
        with being(uid, groups):
            sock.connect(f"{self.folder}/socket")
        return Raw(sock, "9P2000")

    def tcp(self) -> Raw:
        number = re.findall(r"9P at tcp!127\.0\.0\.1!(\d+)", self.server.text())[-1]
        raw = Raw(socket.create_connection(("127.0.0.1", int(number)), HANG_S))
        assert "Rversion" in raw.ask("Tversion tag NOTAG msize 8192 version 9P2000")
        return raw

    def prepare(self) -> None:
        """Have names asked for as long ago as this age says, and a message of daemon's to deliver."""
        with being(1, [1]):
            client = self.server.connect()
        with client:
            client.group("fq/x").publish("r", b"1", headers={"a": "b"})
        if self.age == "start":
            self.server.restart()
        else:
            since = time.monotonic()
            eventually(lambda: time.monotonic() > since + OLD_S, "what was asked for is old")

    def close(self) -> None:
        self.kept.close()


def token_of_a_named_user(doors: Doors) -> str:
    with closing(doors.tcp()) as raw:
        return " ".join(
            raw.ask(line).partition(" ")[0]
            for line in (
                'Tauth tag 1 afid 9 uname daemon aname ""',
                f'Twrite tag 1 fid 9 offset 0 data "{OTHER}"',
                'Tattach tag 1 fid 0 afid 9 uname daemon aname ""',
            )
        )


def challenge_of_a_named_user(doors: Doors) -> str:
    number = re.findall(r"9P at (tcp!\S+)", doors.server.text())[-1]
    with connection.connect(number, user="daemon", token=OTHER, timeout=HANG_S) as client:
        return " ".join(name for name in client.list("g") if name in ("mine", "other"))


def attach(doors: Doors, name: str) -> str:
    """By a connection that is as old as the age says."""
    if doors.age == "start":
        doors.kept.close()
        doors.kept = doors.unix(1, 1)
    reply = doors.kept.ask(f'Tattach tag 1 fid 7 afid NOFID uname {name} aname ""')
    if "Rattach" in reply:
        doors.kept.ask("Tclunk tag 1 fid 7")
    return reply


def attach_by_ones_own_name(doors: Doors) -> str:
    return attach(doors, "daemon")


def attach_by_anothers_name(doors: Doors) -> str:
    return attach(doors, "root")


def chgrp_by_name(doors: Doors) -> str:
    with closing(doors.unix(1, 1, 2)) as raw:
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g mine]")
        return raw.ask(CHGRP)


def chgrp_by_name_by_root(doors: Doors) -> str:
    with closing(doors.unix(0, 0)) as raw:
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g mine]")
        return raw.ask(CHGRP)


def stat(doors: Doors) -> str:
    """As root: who connects as another has its names looked up."""
    with closing(doors.unix(0, 0)) as raw:
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g other]")
        return raw.ask("Tstat tag 1 fid 1").partition(" name ")[2]


def stat_and_clunk_at_once(doors: Doors) -> str:
    with closing(doors.unix(0, 0)) as raw:
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g other]")
        raw.send("Tstat tag 1 fid 1", "Tclunk tag 2 fid 1")
        return " ".join(sorted(raw.reply().partition(" ")[0] for _ in range(2)))


def listing(doors: Doors) -> str:
    with closing(doors.unix(0, 0)) as raw:
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g]")
        raw.ask("Topen tag 1 fid 1 mode 0")
        found = parse(raw.ask("Tread tag 1 fid 1 offset 0 count 4096"))
        assert isinstance(found, Rread)
        return " ".join(name for name in ("daemon", "bin") if name.encode() in found.data)


def wstat_of_what_stat_said(doors: Doors) -> str:
    with closing(doors.unix(0, 0)) as raw:
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g other]")
        found = parse(raw.ask("Tstat tag 1 fid 1"))
        assert isinstance(found, Rstat)
        raw.ask("Tclunk tag 1 fid 1")
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [g other]")
        return raw.ask(show(Twstat(1, 1, found.stat)))


def refusal_by_http(doors: Doors) -> str:
    """It says whose rights a client without a token has."""
    number = int(re.findall(r"HTTP at tcp!127\.0\.0\.1!(\d+)", doors.server.text())[-1])
    with closing(http.client.HTTPConnection("127.0.0.1", number, timeout=HANG_S)) as client:
        client.request("GET", "/closed/")
        return client.getresponse().read().decode().partition("(a client")[2].partition(":")[0]


def publish_to_fq_by_http(doors: Doors) -> str:
    headers = {"X-Fq-Exchange": "x", "X-Fq-Route": "r", "X-Fq-Sender": "worker", "Authorization": f"Bearer {OTHER}"}
    with closing(http.client.HTTPConnection("127.0.0.1", port(doors.server), timeout=HANG_S)) as client:
        client.request("POST", "/submit", b"2", headers)
        return str(client.getresponse().status)


def join_fq(doors: Doors) -> str:
    where = "127.0.0.1", port(doors.server)
    with Client(where, "other", user="worker", password=OTHER):
        return "joined"


def delivery_by_fq(doors: Doors) -> str:
    """A user published the message through the tree, and clients of fq keep its name."""
    with Client(f"{doors.folder}/fq", *QUEUE) as client:
        while (message := client.receive()[0]).payload != b"1":
            pass
        return message.sender.decode()


DOORS: dict[Callable[[Doors], str], str] = {
    token_of_a_named_user: "Rauth Rwrite Rattach",
    challenge_of_a_named_user: "mine other",
    attach_by_ones_own_name: "Rattach",
    attach_by_anothers_name: "the connection is user 'daemon'",
    chgrp_by_name: "Rwstat tag 1",
    chgrp_by_name_by_root: "Rwstat tag 1",
    stat: "uid bin gid bin muid bin",
    stat_and_clunk_at_once: "Rclunk Rstat",
    listing: "daemon bin",
    wstat_of_what_stat_said: "Rwstat tag 1",
    refusal_by_http: "is 'nobody'",
    publish_to_fq_by_http: "200",
    join_fq: "joined",
    delivery_by_fq: "daemon",
}


def serve(folder: Path, age: str) -> Server:
    (folder / "tokens").touch(0o600)
    (folder / "tokens").write_text(line_of("root", SECRET) + line_of("daemon", OTHER))
    (folder / "users").write_text("worker daemon\ntester root\n")
    return Server.at(
        folder, "--listen", "tcp!127.0.0.1!0", "--http", "tcp!127.0.0.1!0", "--token-file", "tokens",
        "--fq", f"unix!{folder}/fq", "--fq", "tcp!127.0.0.1!0", "--fq-users", "users",
        program=[sys.executable, "-m", "tests.server.lowered_server"], MQFS_LIMITS=AGES[age],
    )  # fmt: skip


@pytest.fixture(scope="module", params=AGES)
def doors(request: pytest.FixtureRequest) -> Iterator[Doors]:
    with short_folder() as folder, serve(folder, request.param) as server, closing(Doors(server, request.param)) as it:
        yield it


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_door_tells_whether_a_name_was_known(doors: Doors, door: Callable[[Doors], str]) -> None:
    doors.prepare()
    assert DOORS[door] in door(doors)
