"""The door of a real server, spoken to by hand: what it gives, whom it refuses, and nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import mqfs
from mqfs import errors, limits, ring
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.model import User
from mqfs.net.sockets import UnixAddress
from mqfs.ring import protocol
from mqfs.ring.server import attach_socket
from mqfs.ring.server.registry import RingRegistry
from mqfs.store.memory import MemoryStore
from tests.ring.server.rig import ME, Rig
from tests.support.anyone import NOBODY
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually
from tests.support.mount_space import own_mounts
from tests.support.server import SERVE, Server, environment, short_folder

pytestmark = pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)


@pytest.fixture(scope="module")
def away() -> Iterator[Server]:
    with short_folder() as folder:
        server = Server.at(folder)
        try:
            with server.connect() as client:
                group = client.group("g", create=True, ctl=["replay all", "ttl 1h"])
                group.create("s", "tëxt")
                group.bind("view", "*")
                client.group("lines", create=True, ctl=["data line"])
            yield server
        finally:
            server.close()


class Caller:
    """A connection to a door."""

    def __init__(self, away: Server) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(HANG_S)
        self.socket.connect(str(away.folder / "socket.ring"))
        self.fds: list[int] = []

    def send(self, data: bytes) -> dict[str, Any] | None:
        """The answer; None: the connection was ended."""
        try:
            self.socket.send(data)
            answer, fds, _, _ = socket.recv_fds(self.socket, 10_000, 10)
        except ConnectionError:
            return None
        self.fds += fds
        return json.loads(answer) if answer else None

    def ask(self, **said: Any) -> Any:
        return self.send(json.dumps(said).encode())

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


@pytest.mark.process
def test_what_it_gives(away: Server) -> None:
    with Caller(away) as caller, away.connect() as client:
        said = caller.ask(attach="g", version=protocol.VERSION)
        assert said.keys() == {"generation", "group", "sync", "keep", "deliver", "ttl_ns", "words", "ephemeral"}
        assert (said["sync"], said["keep"], said["deliver"]) == ("always", "disk", "all")
        assert said["ttl_ns"] == 3_600 * 10**9
        assert said["group"] == client.group("g").stats().group
        handle = ring.attach(caller.fds[0], said["generation"])
        number = caller.ask(stream="tëxt")["number"]
        assert caller.ask(number=number) == {"number": number, "stream": "tëxt"}
        assert caller.ask(stream="view") == {"stream": "view", "view": True}
        for question in ({"stream": "none"}, {"number": 4_000}):
            assert caller.ask(**question)["error"] == "NotFound"
        assert handle.wait_committed(handle.publish(number, b"by hand"), 20)
        [message] = client.group("g").history()
        assert (message.stream, message.body) == ("tëxt", b"by hand")
        handle.close()


@pytest.mark.process
def test_a_connection_is_one_attachment_and_all_get_the_same(away: Server) -> None:
    with Caller(away) as one, Caller(away) as two:
        assert one.ask(stream="s") == {"error": "BadRequest", "text": "not attached (expected attach first)"}
        first = one.ask(attach="g", version=protocol.VERSION)
        assert one.ask(attach="g", version=protocol.VERSION)["error"] == "BadRequest"
        assert two.ask(attach="/g/", version=protocol.VERSION)["generation"] == first["generation"]
        assert one.ask(stream="s")["number"] == two.ask(stream="s")["number"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"attach": "none"}, "NotFound"),
        ({"attach": "g/s"}, "NotDirectory"),
        ({"attach": "g/.stats"}, "NotDirectory"),
        ({"attach": "lines"}, "Unsupported"),
        ({"attach": 7}, "BadRequest"),
        ({"attach": "g", "version": 99}, "BadRequest"),
        ({"attach": "g", "version": None}, "BadRequest"),
        ({"attach": "g", "stream": "s"}, "BadRequest"),
        ({}, "BadRequest"),
        ({"open": "sesame"}, "BadRequest"),
        ({"number": 1}, "BadRequest"),
    ],
)
def test_refusals_are_answered_and_it_stays_usable(away: Server, said: dict[str, Any], error: str) -> None:
    with Caller(away) as caller:
        assert caller.ask(**{"version": protocol.VERSION, **said})["error"] == error
        assert caller.ask(attach="g", version=protocol.VERSION)["group"]
        for question in ({"stream": 1}, {"stream": None}, {"number": "1"}, {"number": True}, {"number": -1}):
            assert caller.ask(**question)["error"] == "BadRequest"
        for question in ({"number": 1 << 40}, {"stream": ""}, {"stream": "a/b"}, {"stream": "\0"}):
            assert caller.ask(**question)["error"] in ("BadRequest", "NotFound", "BadName")
        assert caller.ask(stream="s")["number"]


@pytest.mark.process
@pytest.mark.parametrize("noise", [b"{", b"[]", b"7", b"\xff\xfe", b"null", b"{" * 8_000, b" " * 8_193, b"x" * 60_000])
def test_what_is_no_object_ends_the_connection(away: Server, noise: bytes) -> None:
    with Caller(away) as caller:
        answer = caller.send(noise)
        assert answer is not None
        assert answer["error"] == "BadRequest"
        assert caller.ask(attach="g", version=protocol.VERSION) is None


@pytest.mark.process
def test_noise(away: Server) -> None:
    """Whatever comes, the server answers the next one; and says no bug of its own."""
    rng = random.Random(7)
    words = [
        "attach",
        "version",
        "stream",
        "number",
        "g",
        "s",
        "view",
        "lines",
        "",
        "\0",
        1,
        0,
        -1,
        None,
        True,
        1e300,
        [],
        {},
    ]
    for _ in range(size(2_000)):
        with Caller(away) as caller:
            for _ in range(rng.randrange(1, 6)):
                said = {str(rng.choice(words)): rng.choice(words) for _ in range(rng.randrange(1, 4))}
                data = json.dumps(said).encode()
                if rng.random() < 0.3:
                    data = bytes(b ^ (1 << rng.randrange(8)) if rng.random() < 0.05 else b for b in data)
                if rng.random() < 0.1:
                    caller.socket.close()
                    break
                if caller.send(data) is None:
                    break
    with Caller(away) as caller:
        assert caller.ask(attach="g", version=protocol.VERSION)["group"]
    assert "Traceback" not in away.text()


@pytest.mark.process
def test_descriptors_that_are_sent_to_it_are_dropped(away: Server) -> None:
    def open_files() -> int:
        return len(os.listdir(f"/proc/{away.pid}/fd"))

    with Caller(away) as caller:
        assert caller.ask(attach="g", version=protocol.VERSION)
        before = open_files()
        for _ in range(50):
            socket.send_fds(caller.socket, [b'{"stream":"s"}'], [0, 1, 2])
            assert caller.socket.recv(1_000)
        assert open_files() == before


# ---------------------------------------------------------------- whom it lets in

OTHER = """
import json, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(json.dumps({"attach": sys.argv[2], "version": 1}).encode())
data, fds, _, _ = socket.recv_fds(sock, 9000, 2)
print(json.dumps([json.loads(data), len(fds)]))
"""


def by_nobody(away: Server, group: str) -> list[Any]:
    os.chmod(away.folder, 0o755)
    python = os.path.realpath(sys.executable)
    command = [*NOBODY, python, "-c", OTHER, str(away.folder / "socket.ring"), group]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.fuse
@pytest.mark.process
@pytest.mark.root
def test_it_needs_r_and_w_on_every_stream() -> None:
    """Modes are set through a mount: 9P's own clients can as well, but this is what people do."""
    with short_folder() as folder:
        away = Server.at(folder, "--allow-other", mount=True)
        try:
            with away.connect() as client:
                client.group("g", create=True, ctl=["ring all"]).create("open", "closed")
            (folder / "mq" / "g" / "open").chmod(0o666)
            for mode, wanted in ((0o666, 1), (0o644, 0), (0o622, 0), (0o606, 1), (0o600, 0)):
                (folder / "mq" / "g" / "closed").chmod(mode)
                said, fds = by_nobody(away, "g")
                assert fds == wanted, (oct(mode), said)
                assert wanted or said["error"] == "Denied"
            (folder / "mq" / "g" / "closed").chmod(0o666)
            (folder / "mq" / "g").chmod(0o700)
            assert by_nobody(away, "g")[0]["error"] == "Denied"
        finally:
            away.close()


@pytest.mark.fuse
@pytest.mark.process
@pytest.mark.root
def test_ring_says_who_attaches() -> None:
    """`ring owner` is the default: the group's owner, root and the server's user. Others' calls go by the files."""
    with short_folder() as folder:
        away = Server.at(folder, "--allow-other", mount=True)
        try:
            with away.connect() as client:
                group = client.group("g", create=True)
                group.create("s")
                (folder / "mq" / "g" / "s").chmod(0o666)
                assert group.settings().ring == "owner"
                said, fds = by_nobody(away, "g")
                assert (said["error"], fds) == ("Denied", 0)
                assert "ring owner" in said["text"]
                group.ctl("ring all")
                assert by_nobody(away, "g")[1] == 1
                group.ctl("ring off")
                assert by_nobody(away, "g")[0]["error"] == "Unsupported"
                with Caller(away) as caller:
                    assert caller.ask(attach="g", version=protocol.VERSION)["error"] == "Unsupported"
                group.ctl("ring owner")
                with Caller(away) as caller:
                    assert "generation" in caller.ask(attach="g", version=protocol.VERSION)
                os.chown(folder / "mq" / "g", 65_534, -1)
                assert by_nobody(away, "g")[1] == 1
        finally:
            away.close()


BY_LIBRARY = """
import sys, mqfs
from mqfs.errors import Unsupported
with mqfs.connect(sys.argv[1]) as client:
    client.group("g", create=True, ctl=["replay all"]).publish("s", b"by the files", wait="committed")
    print(client.group("g")._publisher._direct._attachment.now is not None)
try:
    with mqfs.connect(sys.argv[1], transport="ring") as client:
        client.group("g").publish("s", b"by the ring")
        print("by the ring")
except Unsupported as error:
    print(error)
"""


def by_library(away: Server, *before: str) -> list[str]:
    command = [*before, sys.executable, "-c", BY_LIBRARY, away.address]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.process
@pytest.mark.root
@pytest.mark.parametrize("inner", ["client", "server"])
def test_no_ring_for_processes_of_two_pid_namespaces(inner: str) -> None:
    """Threads of both may have one number, by which the lock of the ring knows them. The files are used."""
    inside = own_mounts("--pid", "--fork", "--kill-child", "--mount-proc")  # as in another container
    with short_folder() as folder:
        away = Server.at(folder, program=[*inside, *SERVE] if inner == "server" else SERVE)
        try:
            used, why = by_library(away, *(inside if inner == "client" else ()))
            assert used == "False"
            assert "another PID namespace" in why
            with Caller(away) as caller:  # that does not tell: where the server sees its process, it is attached
                said = caller.ask(attach="g", version=protocol.VERSION)
                assert said.get("error") == ("Unsupported" if inner == "server" else None)
                answers = [caller.ask(attach="g", version=protocol.VERSION, pid_namespace=n) for n in (0, "x", [], 1.5)]
                assert {answer["error"] for answer in answers} == {"Unsupported"}
            if inner == "client":
                assert by_library(away) == ["True", "by the ring"]
        finally:
            away.kill()


SOMEBODY = User(70_000, 70_000, frozenset(), 1, "test")


def test_no_user_has_all_seats_of_a_ring_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ATTACHMENTS", 4)
    rig = Rig("ring all")
    rig.tree.setattr(ME, rig.group, mode=0o777)
    theirs = [rig.rings.attach(SOMEBODY, "g") for _ in range(2)]
    with pytest.raises(errors.OverLimit, match=r"attachments to the ring \(expected at most 2 a user, 4 in all"):
        rig.rings.attach(SOMEBODY, "g")
    mine = [rig.attach(), rig.attach()]
    with pytest.raises(errors.OverLimit):
        rig.attach()
    for one in theirs:
        one.close()
    rig.ctl("ring owner")
    mine += [rig.attach(), rig.attach()]  # no other user may
    assert len(mine) == 4
    rig.stop()


def test_no_owner_has_all_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose share is full gets a ring only in place of one of its own that is left."""
    monkeypatch.setattr(limits, "RINGS", 4)
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.tree.mkdir(ME, rig.tree.root, name, 0o777)
        rig.tree.setattr(ME, rig.tree.root.groups[name], uid=SOMEBODY.uid)
    a, b = (rig.rings.attach(SOMEBODY, name) for name in ("a", "b"))
    with pytest.raises(errors.OverLimit, match=r"too many rings \(expected at most 2 a user, 4 in all"):
        rig.rings.attach(SOMEBODY, "c")
    rig.attach()
    a.close()
    c = rig.rings.attach(SOMEBODY, "c")
    rig.until(lambda: rig.tree.root.groups["a"].ring is None)
    assert rig.own.attached
    assert not rig.own.ring_log.why
    b.close()
    c.close()
    rig.stop()


def test_a_ring_ends_whose_clients_a_setting_excludes() -> None:
    rig = Rig("ring all")
    rig.tree.setattr(ME, rig.group, mode=0o777)
    mine = rig.attach()
    rig.ctl("ring owner")
    assert not mine.ring.retired  # no other user is attached
    with pytest.raises(errors.Denied, match="ring owner"):
        rig.rings.attach(SOMEBODY, "g")
    rig.ctl("ring all")
    mine, other = rig.attach(), rig.rings.attach(SOMEBODY, "g")
    rig.ctl("ring all", "ttl 0")
    assert not mine.ring.retired
    rig.ctl("ring owner")
    assert mine.ring.retired
    with pytest.raises(errors.Stale):
        other.number("s")
    mine = rig.attach()
    rig.ctl("ring off")
    assert mine.ring.retired
    with pytest.raises(errors.Unsupported, match="ring off"):
        rig.attach()
    rig.stop()


# ---------------------------------------------------------------- the socket


@pytest.mark.process
@pytest.mark.slow
def test_its_file_comes_and_goes_with_the_server() -> None:
    with short_folder() as folder:
        away = Server.at(folder)
        file = folder / "socket.ring"
        assert stat.S_ISSOCK(file.stat().st_mode)
        assert file.stat().st_mode & 0o777 == 0o666
        away.kill()
        assert file.exists()
        away.start()  # over what the killed one left
        with Caller(away) as caller:
            assert caller.ask(attach="", version=protocol.VERSION)["generation"]
        away.close()
        assert not file.exists()
        assert not (folder / "store" / "keeper").exists()
        file.write_text("mine")
        away.start()
        assert "unavailable" in away.text()
        with away.connect(transport="auto") as client:
            client.group("g", create=True).publish("s", b"by 9P")
        with away.connect(transport="ring") as client, pytest.raises(errors.Unsupported, match="no server with rings"):
            client.group("g").publish("s", b"x")
        away.close()
        assert file.read_text() == "mine"


@pytest.mark.process
@pytest.mark.slow
def test_the_end_of_the_server_is_the_end_of_the_connection() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with short_folder() as folder:
            away = Server.at(folder)
            with Caller(away) as caller, Caller(away) as silent:
                assert caller.ask(attach="", version=protocol.VERSION)
                away.stop(number)
                assert caller.socket.recv(100) == b""
                with contextlib.suppress(ConnectionResetError):  # it was not even accepted yet
                    assert silent.socket.recv(100) == b""
            keeper = folder / "store" / "keeper"
            assert keeper.exists() == (number == signal.SIGKILL)
            if keeper.exists():
                away.start()
                away.close()


# ---------------------------------------------------------------- its bounds, in this process


class Inside:
    """A door over a tree in memory, in a trio program."""

    def __init__(self, folder: Path) -> None:
        user = User(os.geteuid(), os.getegid())
        store = MemoryStore()
        self.rings = RingRegistry(store, trio.lowlevel.current_trio_token().run_sync_soon)
        self.tree = Tree(store, SystemClock(), owner=user, prepare=self.rings.resume, defaults=["ring all"])
        self.path = str(folder / "s.ring")
        self.calls: list[trio.socket.SocketType] = []
        self.door = attach_socket.AttachSocket(self.rings, [attach_socket.listen(UnixAddress(str(folder / "s")))])

    async def call(self) -> trio.socket.SocketType:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.calls.append(sock)
        await sock.connect(self.path)
        return sock

    async def attach(self) -> dict[str, Any]:
        sock = await self.call()
        with contextlib.suppress(ConnectionError):
            await sock.send(protocol.encode({"attach": "", "version": protocol.VERSION}))
        said: dict[str, Any] = json.loads(await sock.recv(9_000))
        return said

    async def stop(self) -> None:
        for sock in self.calls:
            sock.close()
        await self.door.stop()
        self.rings.close()


def test_who_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_socket, "ATTACH_S", 0.05)

    async def main() -> None:
        with short_folder() as folder:
            inside = Inside(folder)
            async with trio.open_nursery() as nursery:
                await nursery.start(inside.door.run)
                silent, busy = await inside.call(), await inside.call()
                await busy.send(b'{"open":"sesame"}')
                assert b"BadRequest" in await busy.recv(1_000)
                with trio.fail_after(HANG_S):
                    assert await silent.recv(100) == b""
                    assert await busy.recv(100) == b""
                assert "generation" in await inside.attach()
                await trio.sleep(0.2)  # four times what a silent one has
                await inside.calls[-1].send(b'{"stream":"none"}')
                assert b"NotFound" in await inside.calls[-1].recv(1_000)
                await inside.stop()

    trio.run(main)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many may come at once; who goes makes room."""
    monkeypatch.setattr(limits, "RING_DOORS", 6)

    async def main() -> None:
        with short_folder() as folder:
            inside = Inside(folder)
            async with trio.open_nursery() as nursery:
                await nursery.start(inside.door.run)
                for _ in range(3):
                    assert "generation" in await inside.attach()
                said = await inside.attach()
                assert said["error"] == "OverLimit"
                assert "too many attachments to rings (expected at most 3 a user, 6 in all)" in said["text"]
                inside.calls[0].close()
                with trio.fail_after(HANG_S):
                    while (await inside.attach()).get("error") == "OverLimit":
                        await trio.sleep(0.01)
                await inside.stop()

    trio.run(main)


@pytest.mark.process
def test_a_client_that_goes_lets_go_of_its_ring(away: Server) -> None:
    """limits.ATTACHMENTS is of those that are there."""
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(Caller(away)) for _ in range(limits.ATTACHMENTS)]
            first = callers[0]
            eventually(
                partial(lambda caller: "group" in caller.ask(attach="g", version=protocol.VERSION), first),
                "others gone",
            )
            for caller in callers[1:]:
                assert caller.ask(attach="g", version=protocol.VERSION)["group"]
            with Caller(away) as more:
                assert more.ask(attach="g", version=protocol.VERSION)["error"] == "OverLimit"


@pytest.mark.process
def test_a_path_longer_than_an_address() -> None:
    with short_folder() as folder:
        deep = folder / ("d" * (103 - len(str(folder)) - 1))
        deep.mkdir()
        address = f"unix!{deep}/s"
        assert len(f"{deep}/s") <= 107 < len(f"{deep}/s.ring")
        with Server("--listen", address, cwd=folder), mqfs.connect(address, transport="ring") as client:
            assert client.group("g", create=True).publish("s", b"x").sequence == 1
