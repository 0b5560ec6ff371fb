"""A user database that is slow, or away: real look-ups of libc, by a server that serves others; see slow_names.c."""

from __future__ import annotations

import http.client
import pwd
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import Denied, MqfsError
from mqfs.ninep.client import connection
from tests.fq.client import Client
from tests.ring.memory.build import compiler
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.ninep import Raw
from tests.support.server import Server, short_folder
from tests.support.tokens import OTHER, SECRET, line_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif("daemon" not in (row.pw_name for row in pwd.getpwall()), reason="no user daemon"),
]
LOWERED = [sys.executable, "-m", "tests.server.lowered_server"]
ROUND_TRIPS, BOUND_S = 20, patient(20)  # of others, while a look-up takes for ever


class Names:
    """The user database of a server. `daemon` is the user it is slow with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "names"
        self.folder.mkdir()
        self.library = self.folder / "slow.so"
        source = ROOT / "tests/server/slow_names.c"
        strict = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        compiler(*strict, source, "-o", self.library, "-ldl")

    @property
    def asked(self) -> bool:
        return (self.folder / "asked").exists()

    @contextmanager
    def being(self, what: str) -> Iterator[None]:
        (self.folder / what).touch()
        try:
            yield
        finally:
            (self.folder / what).unlink()
            (self.folder / "asked").unlink(missing_ok=True)


class Served(Server):
    """A server with two tokens, root's SECRET and daemon's OTHER, whose answers are cached for a second only."""

    def __init__(self, folder: Path, names: Names, limits: str, *more: str) -> None:
        (folder / "tokens").touch(0o600)
        (folder / "tokens").write_text(line_of("root", SECRET) + line_of("daemon", OTHER))
        super().__init__(
            "--listen", f"unix!{folder}/s", "--listen", "tcp!127.0.0.1!0", "--http", "tcp!127.0.0.1!0",
            "--token-file", "tokens", "--default", "replay all", *more,
            cwd=folder, program=LOWERED, LD_PRELOAD=str(names.library), MQFS_NAMES=str(names.folder),
            MQFS_NAMED="daemon", MQFS_LIMITS=limits,
        )  # fmt: skip
        self.tcp = re.findall(r"9P at (tcp!\S+)", self.text())[0]
        self.port = int(re.findall(r"HTTP at .*127\.0\.0\.1[!:](\d+)", self.text())[0])

    def attach(self) -> None:
        """As daemon, by its token."""
        with connection.connect(self.tcp, token=OTHER, timeout=HANG_S) as client:
            client.list("")

    def get(self) -> None:
        """The same over HTTP."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        client.request("GET", "/", headers={"Authorization": f"Bearer {OTHER}"})
        assert client.getresponse().status == 200
        client.close()


@pytest.fixture
def names(tmp_path: Path) -> Names:
    return Names(tmp_path)


@pytest.fixture
def server(tmp_path: Path, names: Names) -> Iterator[Served]:
    with Served(tmp_path, names, "NAMES_S=1 NAMES_WAIT_S=0.2 NAMES_KEPT_S=3") as made:
        yield made


def others_are_served(server: Served) -> None:
    """By new connections too, by 9P and HTTP."""
    for _ in range(ROUND_TRIPS):
        with connection.connect(f"unix!{server.folder}/s", timeout=BOUND_S) as client:
            client.list("")
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND_S)  # type: ignore[assignment]
        client.request("GET", "/", headers={"Authorization": f"Bearer {SECRET}"})  # type: ignore[attr-defined]
        assert client.getresponse().status == 200  # type: ignore[attr-defined]
        client.close()


def in_thread(act: Callable[[], object]) -> Callable[[], Any]:
    done: list[object] = []

    def run() -> None:
        try:
            act()
            done.append(None)
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> Any:
        thread.join(HANG_S)
        return done[0]

    end.done = done  # type: ignore[attr-defined]
    return end


def test_a_slow_answer_delays_nobody_but_its_user(server: Served, names: Names) -> None:
    with names.being("slow"):
        waiting = [in_thread(server.attach), in_thread(server.get), in_thread(server.attach)]
        eventually(lambda: names.asked, "the look-up")
        others_are_served(server)
        assert [end.done for end in waiting] == [[], [], []]  # type: ignore[attr-defined]
    assert [end() for end in waiting] == [None, None, None]


@pytest.mark.parametrize("version", ["9P2000", "9P2000.L"])
@pytest.mark.parametrize("user", ["by a token", "by the socket"])
def test_requests_that_are_sent_before_the_answers_are_performed_in_order(
    server: Served, names: Names, user: str, version: str
) -> None:
    """The client's user is looked up, by its token, or because root attaches as daemon."""
    n_uname = " n_uname 4294967295" if version == "9P2000.L" else ""
    attach = [f'Tattach tag 3 fid 0 afid NOFID uname "daemon" aname ""{n_uname}']
    host, port = server.tcp.split("!")[1:]
    if user == "by a token":
        sock = socket.create_connection((host, int(port)), HANG_S)
        who = f'uname "daemon" aname ""{n_uname}'
        attach = [f"Tauth tag 1 afid 9 {who}", f'Twrite tag 2 fid 9 offset 0 data "{OTHER}"']
        attach += [f"Tattach tag 3 fid 0 afid 9 {who}"]
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(HANG_S)
        sock.connect(f"{server.folder}/s")
    requests = [*attach, "Twalk tag 4 fid 0 newfid 1 names []", "Tclunk tag 5 fid 1", "Tclunk tag 6 fid 0"]
    with closing(Raw(sock)) as raw:
        raw.ask(f"Tversion tag NOTAG msize 8192 version {version}")
        raw.unix = version != "9P2000"
        with names.being("slow"):
            raw.send(*requests)
            eventually(lambda: names.asked, "the look-up")
            others_are_served(server)
        kinds = [f"R{line[1:].split(' fid')[0].split(' afid')[0]}" for line in requests]
        assert [" ".join(raw.reply().split(" ")[:3]) for _ in requests] == kinds


@pytest.fixture
def patient_server(tmp_path: Path, names: Names) -> Iterator[Served]:
    """One that ends no look-up, and keeps few requests that wait for one."""
    with Served(
        tmp_path, names, f"NAMES_S=1 NAMES_WAIT_S=0.2 NAMES_KEPT_S=3 HANDSHAKE_S={patient(3600)} TAGS=8"
    ) as made:
        yield made


@contextmanager
def sent_early(server: Served, names: Names, *requests: str) -> Iterator[Raw]:
    """Requests behind a Tattach, tag 3, of which the user is looked up: fid 0."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_S)
    sock.connect(f"{server.folder}/s")
    with closing(Raw(sock)) as raw:
        raw.ask("Tversion tag NOTAG msize 8192 version 9P2000")
        raw.unix = False
        raw.send('Tattach tag 3 fid 0 afid NOFID uname "daemon" aname ""', *requests)
        eventually(lambda: names.asked, "the look-up")
        yield raw


EARLY = "Twalk tag 4 fid 0 newfid 1 names []"


def test_a_flush_and_a_version_wait_for_no_look_up(patient_server: Served, names: Names) -> None:
    """Not behind a request that does, either."""
    with names.being("slow"):
        with sent_early(patient_server, names, EARLY) as raw:
            raw.send("Tflush tag 6 oldtag 3")
            assert raw.reply() == "Rflush tag 6"
            assert raw.reply().startswith("Rerror tag 4 ")  # without its fid
        with sent_early(patient_server, names, EARLY) as raw:
            raw.send("Tversion tag NOTAG msize 8192 version 9P2000")
            assert raw.reply().startswith("Rversion ")
            assert raw.ask('Tattach tag 7 fid 0 afid NOFID uname "" aname ""').startswith("Rattach tag 7 ")
            assert raw.ask(EARLY).startswith("Rwalk tag 4 ")


def test_an_early_request_that_is_flushed_is_not_performed(patient_server: Served, names: Names) -> None:
    with names.being("slow"), sent_early(patient_server, names, EARLY, "Tflush tag 6 oldtag 4") as raw:
        assert raw.reply() == "Rflush tag 6"
        (names.folder / "slow").unlink()
        assert raw.reply().startswith("Rattach tag 3 ")
        assert raw.ask("Tclunk tag 5 fid 1").startswith("Rerror tag 5 ")
        (names.folder / "slow").touch()


def test_the_end_of_a_client_waits_for_no_look_up(patient_server: Served, names: Names) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{patient_server.process.pid}/fd").iterdir()))

    with names.being("slow"):
        with sent_early(patient_server, names, EARLY):
            before = descriptors()
        eventually(lambda: descriptors() < before, "the server's end is closed")


def test_more_early_requests_than_are_kept_are_performed_in_order(patient_server: Served, names: Names) -> None:
    walks = [f"Twalk tag {tag} fid {tag - 4} newfid {tag - 3} names []" for tag in range(4, 104)]
    with names.being("slow"), sent_early(patient_server, names, *walks) as raw:
        (names.folder / "slow").unlink()
        tags = [int(raw.reply().split(" ")[2]) for _ in range(1 + len(walks))]
        (names.folder / "slow").touch()
    assert tags == list(range(3, 104))


def test_who_was_known_keeps_the_last_answer_for_a_while(server: Served, names: Names) -> None:
    with connection.connect(f"unix!{server.folder}/s", timeout=HANG_S) as client:
        client.create("s").close()
        client.chmod("s", 0o660)

    def read() -> None:
        """By the group 0, in which daemon is by the database only."""
        with connection.connect(server.tcp, token=OTHER, timeout=BOUND_S) as client:
            client.open("s").close()

    read()
    with names.being("slow"):
        eventually(lambda: read() or names.asked, "the answer is old")
        read()
        others_are_served(server)
    read()
    with names.being("away"):
        read()
        others_are_served(server)
        with pytest.raises(Denied):
            eventually(read, "the last answer is too old")


def test_a_name_that_is_only_shown_is_a_number_where_the_answer_is_slow(server: Served, names: Names) -> None:
    with connection.connect(f"unix!{server.folder}/s", timeout=HANG_S) as client:
        client.mkdir("g")
        client.chmod("g", 0o777)
    with connection.connect(server.tcp, token=OTHER, timeout=HANG_S) as client:
        client.create("g/s").close()
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_S)
    sock.connect(f"{server.folder}/s")
    with names.being("slow"), closing(Raw(sock, "9P2000")) as raw:
        assert "Rwalk" in raw.ask("Twalk tag 1 fid 0 newfid 1 names [g s]")
        raw.send("Tstat tag 1 fid 1")
        eventually(lambda: names.asked, "the look-up")
        others_are_served(server)
        assert " uid 1 " in raw.reply()
        with connection.connect(f"unix!{server.folder}/s", timeout=BOUND_S) as client:
            assert "s" in client.list("g")


def test_a_changed_file_of_tokens_is_read_while_others_are_served(server: Served, names: Names) -> None:
    file = server.folder / "tokens"
    before = server.text().count("tokens read")
    file.write_text(file.read_text() + "\n")
    with names.being("slow"):
        eventually(lambda: server.process.send_signal(signal.SIGHUP) or names.asked, "its users are looked up")
        others_are_served(server)
    eventually(lambda: server.text().count("tokens read") > before, "it is read")
    with pytest.raises(MqfsError):
        connection.connect(server.tcp, token="wrong", timeout=HANG_S)


@pytest.mark.parametrize("told", [True, False])
def test_a_stop_does_not_wait_for_files_that_are_read_again(server: Served, names: Names, told: bool) -> None:
    """At SIGHUP, and when a file of tokens is found changed."""
    file = server.folder / "tokens"

    def cause() -> None:
        if told:
            server.process.send_signal(signal.SIGHUP)
        else:
            file.write_text(file.read_text() + "\n")

    with names.being("slow"):
        eventually(lambda: cause() or names.asked, "its users are looked up")
        assert server.stop() == 0


# ---------------------------------------------------------------- senders, whose names clients of fq keep

LATE = 300  # more than are set aside


@pytest.mark.parametrize("count", [2, LATE])
def test_a_message_whose_sender_is_not_known_holds_up_no_others(tmp_path: Path, names: Names, count: int) -> None:
    """And of a sender all are delivered in their order. No more are claimed than a bound, so that others may wait."""
    with short_folder() as folder, ExitStack() as stack:
        limits = "NAMES_S=0.01 NAMES_WAIT_S=0.2 NAMES_KEPT_S=0 HANDSHAKE_S=0.5"
        server = stack.enter_context(Served(tmp_path, names, limits, "--fq", f"unix!{folder}/fq"))
        client = stack.enter_context(closing(Client(f"{folder}/fq", "q", "disk:public,permanent")))
        client.bind("x")
        root = stack.enter_context(connection.connect(f"unix!{tmp_path}/s", timeout=HANG_S))
        root.create("fq/x/r").close()
        for path in ("fq", "fq/x", "fq/x/r"):
            root.chmod(path, 0o777)
        daemon = stack.enter_context(connection.connect(server.tcp, token=OTHER, timeout=HANG_S))

        def publish(user: Any, *bodies: str) -> None:
            with user.open("fq/x/.put", "w") as file:
                for body in bodies:
                    file.write(b'{"stream":"r","headers":{"a":"b"}} ' + body.encode())

        def received(most: int) -> list[tuple[str, str]]:
            return [(one.sender.decode(), one.payload.decode()) for one in client.receive(most)]

        def expected(sender: str, letter: str, count: int) -> list[tuple[str, str]]:
            return [(sender, f"{letter}{number}") for number in range(count)]

        since = time.monotonic()
        eventually(lambda: time.monotonic() > since + 0.01, "what was asked for the connection is old")
        with names.being("slow"):
            publish(daemon, "d0")
            eventually(lambda: names.asked, "the look-up")
            publish(root, "r0")
            publish(daemon, *(text for _, text in expected("", "d", count)[1:]))
            publish(root, "r1")
            found = received(2 if count < LATE else 1)
            assert found == expected("root", "r", 2)[: len(found)]
        found += received(2 + count - len(found))
        assert [one for one in found if one[0] == "root"] == expected("root", "r", 2)
        assert [one for one in found if one[0] == "daemon"] == expected("daemon", "d", count)
