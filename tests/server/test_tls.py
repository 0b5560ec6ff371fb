"""`mqfs serve` with TLS as a process: its certificate renewed under load, its death, other people's clients."""

from __future__ import annotations

import array
import fcntl
import itertools
import os
import re
import signal
import socket
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

import mqfs
from mqfs import limits
from mqfs.client import aio
from mqfs.errors import Disconnected
from mqfs.net import identity
from mqfs.ninep.client.connection import Client, connect
from mqfs.ninep.codec.messages import Tread, Tversion
from mqfs.ninep.codec.wire import encode
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server
from tests.support.server import mqfs as run

pytestmark = pytest.mark.process
ME = str(os.geteuid())
TCP, TLS = "tcp!127.0.0.1!0", "tls!127.0.0.1!0"


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    authority = Authority(tmp_path)
    monkeypatch.setenv("MQFS_CA", str(authority.path))
    return authority


@contextmanager
def serving(folder: Path, authority: Authority, *options: str, listen: str = TLS) -> Iterator[tuple[Server, str]]:
    """A server with TLS, and its address there."""
    cert = authority.of_server(file="server")
    with Server("--listen", listen, "--tls-cert", str(cert), "--tcp-user", ME, *options, cwd=folder) as server:
        yield server, address(server, "tls").replace("0.0.0.0", "127.0.0.1")


def address(server: Server, network: str) -> str:
    found = re.search(rf"9P at ({network}!\S+)", server.text())
    assert found is not None
    return found[1]


def port(address: str) -> int:
    return int(address.rpartition("!")[2])


# ---------------------------------------------------------------- options


def test_tls_without_a_certificate_is_refused(tmp_path: Path) -> None:
    for option in ("--listen", "-s"):
        done = run("serve", option, TLS, cwd=tmp_path)
        why = f"mqfs: {TLS}: no certificate (expected --tls-cert FILE)\n"
        assert (done.returncode, done.stderr) == (2, why)


def test_the_library_and_its_tasks(tmp_path: Path, authority: Authority) -> None:
    async def main() -> None:
        async with aio.connect(at) as tree, await (await tree.group("g")).history() as history:
            assert [message.body async for message in history] == [b"1", b"2"]

    with serving(tmp_path, authority) as (_, at), mqfs.connect(at) as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish_many([("s", b"1"), ("s", b"2")])
        for backend in ("trio", "asyncio"):
            anyio.run(main, backend=backend)
        sparks = pytest.importorskip("pyspark_mqfs.connection", reason="pyspark is not installed")
        with sparks.Server(at).link() as link:
            assert "g" in link.with_retry(lambda spark: spark.list())


# ---------------------------------------------------------------- SIGHUP


def serial(at: str, authority: Authority) -> str:
    """The serial number of the certificate that a new connection is shown."""
    with (
        socket.create_connection(("127.0.0.1", port(at))) as sock,
        authority.trusting().wrap_socket(sock, server_hostname="127.0.0.1") as encrypted,
    ):
        certificate = encrypted.getpeercert()
        assert certificate
        return str(certificate["serialNumber"])


def test_a_renewed_certificate_loses_no_request(tmp_path: Path, authority: Authority) -> None:
    (secrets := tmp_path / "tokens").touch(0o600)
    off_loopback = serving(tmp_path, authority, "--token-file", str(secrets), listen="tls!0.0.0.0!0")
    with off_loopback as (server, at), mqfs.connect(at) as client:
        group = client.group("g", create=True, ctl=["replay all", "sync off"])
        stop, sent = threading.Event(), [0, 0]

        def publish(who: int) -> None:
            with mqfs.connect(at, reconnect=False) as own:
                mine = own.group("g")
                for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                    mine.publish(f"s{who}", str(number))
                    sent[who] += 1

        threads = [threading.Thread(target=publish, args=(who,)) for who in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            seen = {serial(at, authority)}
            for turn in range(1, 4):
                new = authority.of_server(file="new")
                os.replace(new, tmp_path / "server.pem")
                server.process.send_signal(signal.SIGHUP)
                eventually(lambda turn=turn: server.text().count("certificate read again") == turn)  # type: ignore[misc]
                seen.add(serial(at, authority))
            assert len(seen) == 4
            (tmp_path / "server.pem").write_text("no certificate")
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: "certificate not replaced: --tls-cert" in server.text())
            assert serial(at, authority) in seen
            before = sent[:]
            eventually(lambda: all(now > was for now, was in zip(sent, before, strict=True)))
        finally:
            stop.set()
            for thread in threads:
                thread.join(HANG_S)
        for who, count in enumerate(sent):
            assert [int(message.body) for message in group.history(pattern=f"s{who}")] == list(range(count))


# ---------------------------------------------------------------- death


def test_a_server_killed_during_a_reply_is_the_same_error(tmp_path: Path, authority: Authority) -> None:
    with serving(tmp_path, authority, "--listen", TCP) as (server, at):
        with mqfs.connect(at) as client:
            group = client.group("g", create=True, ctl=["replay all", "sync off"])
            for _ in range(12):  # more than the system takes
                group.publish("s", bytes(1_000_000))
        connections = [connect(one, msize=limits.MSIZE_MOST, timeout=HANG_S) for one in (at, address(server, "tcp"))]
        asked = []
        for connection in connections:
            caller = connection.caller
            channel = connection.do(caller.open("g/s", os.O_RDONLY))
            asked.append(connection.send([Tread(0, channel.fid, 0, 1_000_000) for _ in range(12)]))
            eventually(lambda connection=connection: unread(connection) > 65_536)  # type: ignore[misc]
        server.process.kill()
        server.process.wait()
        errors = set()
        for connection, slots in zip(connections, asked, strict=True):
            with pytest.raises(Disconnected) as caught:
                [connection.wait(slot) for slot in slots]
            errors.add(str(caught.value).replace(connection.where, "ADDRESS"))
            connection.close()
        assert errors == {"ADDRESS: the server closed the connection"}


def unread(connection: Client) -> int:
    """Bytes that the system has for a connection."""
    count = array.array("i", [0])
    fcntl.ioctl(connection.socket.fileno(), termios.FIONREAD, count)
    return count[0]


# ---------------------------------------------------------------- openssl


@contextmanager
def openssl(
    at: str, authority: Authority, *options: str, errors: int = subprocess.STDOUT
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """`openssl s_client`, and the socket that is its standard input and output."""
    ours, its = socket.socketpair()
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port(at)}", "-CAfile", str(authority.path)]
    with ours, its:
        process = subprocess.Popen([*command, "-verify_return_error", *options], stdin=its, stdout=its, stderr=errors)
        its.close()
        ours.settimeout(HANG_S)
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data and (more := sock.recv(65_536)):
        data += more
    return data


def test_py9p_through_openssl(tmp_path: Path, authority: Authority) -> None:
    py9p = pytest.importorskip("py9p.py9p", reason="py9p (of p9fs) is not installed")
    with (
        serving(tmp_path, authority) as (_, at),
        openssl(at, authority, "-quiet", "-alpn", "9p", errors=subprocess.DEVNULL) as (sock, _process),
    ):
        client = py9p.Client(sock, py9p.Credentials(user=identity.user_name(os.getuid())), ver=py9p.Version.v9P2000)
        client.create("g", perm=0x8000_0000 | 0o755, mode=0)
        client.close()
        client.create("g/s", perm=0o666, mode=1)
        assert client.write(b"from a stranger") == 15
        client.close()
        with mqfs.connect(at) as library:
            assert library.group("g").streams() == ["s"]


VERSION = encode(Tversion(0xFFFF, 8192, "9P2000"), False)
ANSWER = VERSION[:4] + b"\x65" + VERSION[5:]


def test_new_keys_and_renegotiation(tmp_path: Path, authority: Authority) -> None:
    with serving(tmp_path, authority) as (server, at):
        with openssl(at, authority, "-tls1_3") as (sock, _):
            read_until(sock, b"Verify return code: 0 (ok)")
            for _ in range(3):
                sock.sendall(b"K\n")  # new keys, from both
                read_until(sock, b"KEYUPDATE")
                sock.sendall(VERSION)
                assert ANSWER in read_until(sock, ANSWER)
        with openssl(at, authority, "-tls1_2") as (sock, process):
            read_until(sock, b"Extended master secret")
            sock.sendall(b"R\n")
            assert b"no renegotiation" in read_until(sock, b"no renegotiation")
            assert process.wait(HANG_S) != 0
        eventually(lambda: "TLS failed" in server.text())
        with mqfs.connect(at) as client:
            client.group("g", create=True)
