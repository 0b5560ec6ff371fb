"""9P over TLS: the server on real sockets, our client, and Python's own TLS as one not written here."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadConfig, Denied, Disconnected
from mqfs.net import tls
from mqfs.net.tls import ServerTls, TlsCalls, TlsMachine, client_context
from mqfs.net.tokens import Tokens
from mqfs.ninep.client import connection as blocking
from mqfs.ninep.codec.messages import Tversion
from mqfs.ninep.codec.wire import encode
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually
from tests.support.ninep import ME, Raw, Running, SlowStore, make_tree, open_handles, running
from tests.support.tokens import SECRET, line_of

VERSION = encode(Tversion(0xFFFF, 8192, "9P2000"), False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQFS_CA", str(authority.path))


@pytest.fixture
def server(tree: Tree, tmp_path: Path, authority: Authority) -> Iterator[Running]:
    with running(tree, tmp_path, tls=ServerTls(str(authority.of_server())), tcp_user=str(os.geteuid())) as started:
        yield started
        assert tree.memory.used == 0 or server_is_empty(started)


def server_is_empty(server: Running) -> bool:
    """No connection has left anything that is counted."""
    return eventually(lambda: (len(server.server.connections), server.tree.memory.used) == (0, 0))


def plain(server: Running) -> socket.socket:
    """A connection to the TLS port, without TLS."""
    port = int(server.encrypted.rpartition("!")[2])
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(HANG_S)
    return sock


def foreign(server: Running, authority: Authority) -> ssl.SSLSocket:
    """A connection by Python's own TLS."""
    return authority.trusting().wrap_socket(plain(server), server_hostname="127.0.0.1")


def connect(server: Running, **options: object) -> blocking.Client:
    return blocking.connect(server.encrypted, timeout=HANG_S, **options)  # type: ignore[arg-type]


def replayed(client: blocking.Client, *more: bytes) -> None:
    with client.open("ctl", "w") as ctl:
        ctl.write(b"\n".join((b"replay all", *more, b"")))


# ---------------------------------------------------------------- messages


def test_messages_of_many_records_both_ways(server: Running) -> None:
    bodies = [os.urandom(size) for size in (1, 16_384, 16_385, 100_000, limits.MESSAGE_BYTES, limits.MESSAGE_BYTES)]
    with connect(server, msize=limits.MSIZE_MOST) as client:
        replayed(client)
        with client.create("s", "r+") as stream:
            for body in bodies:
                assert stream.write(body) == len(body)
            assert [stream.receive() for _ in bodies] == bodies


def test_a_parked_read_is_answered(server: Running, tree: Tree) -> None:
    with connect(server) as reader, connect(server) as writer:
        writer.create("s").close()
        stream = reader.open("s")
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(stream.receive()))
        thread.start()
        eventually(lambda: tree.waits.used == 1)
        with writer.open("s", "w") as to:
            to.write(b"x" * 50_000)
        thread.join(HANG_S)
        assert got == [b"x" * 50_000]
        with pytest.raises(TimeoutError):
            stream.receive(timeout=0.01)


def test_many_connections(server: Running) -> None:
    clients = [connect(server) for _ in range(40)]
    for number, client in enumerate(clients):
        client.create(f"s{number}").close()
    assert len([name for name in clients[0].list() if name.startswith("s")]) == 40
    for client in clients:
        client.close()


def test_the_protocol_and_version_are_agreed_on(server: Running, authority: Authority) -> None:
    context = authority.trusting()
    context.set_alpn_protocols(["9p"])
    with context.wrap_socket(plain(server), server_hostname="127.0.0.1") as sock:
        assert (sock.selected_alpn_protocol(), sock.version()) == ("9p", "TLSv1.3")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    sessions = []
    for _ in range(2):
        with context.wrap_socket(
            plain(server), server_hostname="127.0.0.1", session=sessions[0] if sessions else None
        ) as sock:
            sock.sendall(VERSION)
            assert sock.recv(100) == VERSION[:4] + b"\x65" + VERSION[5:]
            assert sock.version() == "TLSv1.2"
            assert sock.session_reused == bool(sessions)
            sessions.append(sock.session)


def test_a_token_over_tls(tmp_path: Path, authority: Authority) -> None:
    tokens = one_token(tmp_path)
    with running(make_tree(), tmp_path, tls=ServerTls(str(authority.of_server())), tokens=tokens) as server:
        with connect(server) as client, pytest.raises(Denied):
            client.mkdir("g")  # as user nobody
        with connect(server, token=SECRET) as client:
            client.mkdir("g")


# ---------------------------------------------------------------- certificates of servers


@pytest.mark.parametrize(
    ("host", "days", "why"),
    [
        ("mq.example.org", 1, "certificate refused: IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ("127.0.0.1", -1, "certificate refused: certificate has expired"),
    ],
)
def test_a_certificate_that_a_client_refuses(
    tmp_path: Path, authority: Authority, host: str, days: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(make_tree(), tmp_path, tls=ServerTls(str(authority.of_server(host, days=days)))) as server:
        with pytest.raises(Disconnected, match=f"{re.escape(server.encrypted)}: {why}"):
            connect(server)
        eventually(lambda: "alert" in caplog.text)


def test_an_authority_that_is_not_trusted(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (str(Authority(tmp_path, "other").path), ""):  # "": those of the system
        monkeypatch.setenv("MQFS_CA", path)
        with pytest.raises(Disconnected, match="certificate refused: unable to get local issuer certificate"):
            connect(server)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1:DeprecationWarning")
def test_old_versions_are_refused(server: Running, authority: Authority) -> None:
    context = authority.trusting()
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with plain(server) as sock, pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_a_server_without_tls(tmp_path: Path) -> None:
    with (
        running(make_tree(), tmp_path, tcp=True) as server,
        pytest.raises(Disconnected, match=r"closed by the server in the TLS handshake \(expected a TLS server\)"),
    ):
        blocking.connect(f"tls!127.0.0.1!{server.port}", timeout=HANG_S)


def test_a_client_without_tls(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Disconnected):
        blocking.connect(server.encrypted.replace("tls", "tcp"), timeout=HANG_S)
    assert "9p tls 1: connection ended: the peer does not speak TLS" in caplog.text


# ---------------------------------------------------------------- certificates of clients


@pytest.fixture
def mutual(tree: Tree, tmp_path: Path, authority: Authority) -> Iterator[Running]:
    tls = ServerTls(str(authority.of_server()), client_ca=str(authority.path))
    with running(tree, tmp_path, tls=tls, tokens=one_token(tmp_path)) as started:
        yield started


@pytest.mark.parametrize(("name", "uris"), [("daemon", ()), ("a person", ("mqfs:daemon", "https://example.org"))])
def test_a_client_is_the_user_of_its_certificate(
    mutual: Running, authority: Authority, monkeypatch: pytest.MonkeyPatch, name: str, uris: tuple[str, ...]
) -> None:
    with mutual.connect() as client:
        client.mkdir("g")
        client.chmod("g", 0o777)
    monkeypatch.setenv("MQFS_CERT", str(authority.of_user(name, *uris)))
    with connect(mutual, user="root") as client:  # whatever it claims
        client.create("g/s").close()
        assert client.stat("g/s").uid == 1
    with connect(mutual, token=SECRET) as client:
        client.create("g/t").close()
        assert client.stat("g/t").uid == ME.uid


def test_a_resumed_session_is_of_the_same_user(mutual: Running, authority: Authority) -> None:
    with mutual.connect() as client:
        client.chmod("", 0o777)
    context, session = authority.trusting(), None
    context.load_cert_chain(authority.of_user("daemon"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # for ssl.SSLSocket.session
    for name in ("full", "resumed"):
        sock = context.wrap_socket(plain(mutual), server_hostname="127.0.0.1", session=session)
        raw = Raw(sock, "9P2000")
        raw.ask(f"Tcreate tag 1 fid 0 name {name} perm 0666 mode 1")
        with mutual.connect() as client:
            assert (sock.session_reused, client.stat(name).uid) == (name == "resumed", 1)
        session = sock.session
        sock.close()


@pytest.mark.parametrize(
    ("name", "uris", "why"),
    [
        ("no such user", (), "unknown user 'no such user' in the client's certificate"),
        ("daemon", ("mqfs:no-such-user",), "unknown user 'no-such-user' in the client's certificate"),
        ("daemon", ("mqfs:daemon", "mqfs:root"), "2 users in the client's certificate"),
    ],
)
def test_a_certificate_without_a_user(
    mutual: Running,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    uris: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.setenv("MQFS_CERT", str(authority.of_user(name, *uris)))
    with pytest.raises(Denied, match=why):
        connect(mutual)
    with pytest.raises(Denied):
        connect(mutual, token=SECRET)
    assert f"client refused: {why}" in caplog.text


def test_a_client_without_a_certificate(
    mutual: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Disconnected, match="TLS failed: tlsv13 alert certificate required"):
        connect(mutual)
    monkeypatch.setenv("MQFS_CERT", str(Authority(tmp_path, "other").of_user("root")))
    with pytest.raises(Disconnected, match="TLS failed: tlsv1 alert unknown ca"):
        connect(mutual)
    eventually(lambda: "certificate refused: unable to get local issuer certificate" in caplog.text)
    assert "peer did not return a certificate" in caplog.text


# ---------------------------------------------------------------- files


def encrypted_key(file: Path) -> str:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(file.read_bytes(), None)
    locked = s.BestAvailableEncryption(b"password")
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, locked).decode()


BAD_FILES: list[tuple[str, Callable[[Path, Path], object], str]] = [
    ("missing", lambda cert, key: cert.unlink(), r"--tls-cert .*: No such file or directory \(expected a readable PEM"),
    ("no key", lambda cert, key: key.unlink(), r"--tls-key .*: No such file or directory \(expected a readable PEM"),
    ("open", lambda cert, key: key.chmod(0o644), r"--tls-key .*: key open to others \(expected mode 600"),
    ("text", lambda cert, key: cert.write_text("text"), r"--tls-cert .*: no certificate in it \(expected a PEM"),
    ("twice", lambda cert, key: key.write_bytes(b""), r"--tls-key .*: no private key in it \(expected a PEM"),
    (
        "encrypted",
        lambda cert, key: key.write_text(encrypted_key(key)),
        r"--tls-key .*: key is encrypted \(expected one without",
    ),
    (
        "broken",
        lambda cert, key: cert.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"),
        r"--tls-cert .* \(expected a certificate and its key in PEM\)",
    ),
]


@pytest.mark.parametrize(("spoil", "why"), [row[1:] for row in BAD_FILES], ids=[row[0] for row in BAD_FILES])
def test_files_that_are_refused(
    tmp_path: Path, authority: Authority, spoil: Callable[[Path, Path], object], why: str
) -> None:
    cert, key, pem = tmp_path / "cert.pem", tmp_path / "key.pem", authority.of_server().read_bytes()
    for path in (cert, key):
        path.touch(0o600)
        path.write_bytes(pem)
    tls = ServerTls(str(cert), str(key))
    spoil(cert, key)
    with pytest.raises(BadConfig, match=why):
        ServerTls(str(cert), str(key))
    with pytest.raises(BadConfig, match=why):
        tls.reload()
    assert not tls.machine("9p").ready  # it still has what it read


def test_a_key_of_another_certificate(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = authority.of_server(file="one"), authority.of_server(file="other")
    with pytest.raises(BadConfig, match=r"--tls-key .*other.pem: not the key of .* \(expected that of .*one.pem\)"):
        ServerTls(str(one), str(other))
    with pytest.raises(BadConfig, match="--tls-client-ca nowhere: No such file"):
        ServerTls(str(one), client_ca="nowhere")
    monkeypatch.setenv("MQFS_CA", "nowhere")
    with pytest.raises(BadConfig, match="MQFS_CA nowhere: No such file"):
        client_context("9p")


# ---------------------------------------------------------------- connections that go wrong


def test_garbage_ends_one_connection_only(
    server: Running, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    good = foreign(server, authority)
    for garbage in (
        b"\x00" * 50,
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(70_000),
        b"\x16\x03\x01\xff\xff" + b"x" * 70_000,
    ):
        with plain(server) as bad:
            bad.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert not bad.recv(100)[7:]  # an alert at most, and the end
    begun = foreign(server, authority)
    begun.sendall(VERSION)
    assert begun.recv(100)
    os.write(begun.fileno(), b"no record of TLS" * 10)
    with pytest.raises(ssl.SSLError, match="alert"):
        begun.recv(100)
    good.sendall(VERSION)
    assert good.recv(100)
    good.close()
    begun.close()
    assert server_is_empty(server)
    assert caplog.text.count("connection ended: ") == 5


def test_a_handshake_in_single_bytes_holds_up_nobody(server: Running, authority: Authority) -> None:
    client = TlsMachine(client_context("9p"), "127.0.0.1")
    client.shake_hands()
    with plain(server) as sock, connect(server) as other:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at, byte in enumerate(client.take()):
            if at % 16 == 0:  # all in less than the seconds that a handshake has
                assert "ctl" in other.list()
            sock.send(bytes([byte]))
        while not client.ready:
            for byte in sock.recv(65_536):
                assert client.receive(bytes([byte])) == b""
        client.send(VERSION)
        for byte in client.take():
            sock.send(bytes([byte]))
        answer = b""
        while not answer:
            answer = client.receive(sock.recv(65_536))
        assert answer == VERSION[:4] + b"\x65" + VERSION[5:]


def test_a_handshake_that_does_not_end(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(limits, "CONNECTIONS", 4)  # two of one host
    client = TlsMachine(client_context("9p"), "127.0.0.1")
    client.shake_hands()
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.1)
    with plain(server) as silent, plain(server) as half:
        half.sendall(client.take()[:100])
        assert (silent.recv(100), half.recv(100)) == (b"", b"")
    assert caplog.text.count("no TLS handshake in 0.1 s") == 2
    monkeypatch.setattr(limits, "HANDSHAKE_S", HANG_S)
    eventually(lambda: server.tree.memory.used == 0)
    with plain(server), plain(server), plain(server) as third:
        assert third.recv(100) == b""  # those that have no handshake yet are counted, too


def test_ends_of_the_connection(tree: Tree, tmp_path: Path, authority: Authority) -> None:
    """Announced or not, of one direction or both: what was asked is answered as without TLS."""
    store = SlowStore()
    tree = Tree(store, SystemClock(), owner=ME)
    tls = ServerTls(str(authority.of_server()))
    with running(tree, tmp_path, tls=tls, tcp_user=str(os.geteuid())) as server:
        with connect(server) as client:
            replayed(client)
        for number, announced in enumerate((True, False)):
            client_side = TlsMachine(client_context("9p"), "127.0.0.1")
            with plain(server) as sock:
                raw = Raw(Through(client_side, sock), "9P2000")  # type: ignore[arg-type]
                raw.ask("Twalk tag 1 fid 0 newfid 1 names []")
                raw.ask(f"Tcreate tag 1 fid 1 name s{number} perm 0666 mode 1")
                store.slow = True
                raw.send('Twrite tag 5 fid 1 offset 0 data "x"')
                if announced:
                    client_side.close()
                    sock.sendall(client_side.take())
                else:
                    sock.shutdown(socket.SHUT_WR)
                eventually(lambda: store.owed)
                server.call(store.release)
                store.slow = False
                assert raw.reply() == "Rwrite tag 5 count 1"
                assert raw.reply() == "EOF"
                assert client_side.ended  # the server announces its end
        assert server_is_empty(server)


class Through:
    """What Raw uses of a socket, over a machine."""

    def __init__(self, machine: TlsMachine, sock: socket.socket) -> None:
        self._machine, self._socket = machine, sock
        machine.shake_hands()
        while not machine.ready:
            sock.sendall(machine.take())
            machine.receive(sock.recv(65_536))

    def sendall(self, data: bytes) -> None:
        self._machine.send(data)
        self._socket.sendall(self._machine.take())

    def recv(self, size: int) -> bytes:
        while not self._machine.ended and (data := self._socket.recv(size)):
            if plain := self._machine.receive(data):
                return plain
        return b""


def test_a_client_that_does_not_read_is_held_up_and_nobody_else(
    server: Running, tree: Tree, authority: Authority
) -> None:
    body, asked = os.urandom(50_000), 200
    with connect(server) as client:
        replayed(client, b"sync off")
        with client.create("s", "r+") as stream:
            for _ in range(asked):
                stream.write(body)
        sock = foreign(server, authority)
        raw = Raw(sock)
        raw.ask(f"Tversion tag NOTAG msize {limits.MSIZE_DEFAULT} version 9P2000")
        raw.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
        raw.ask("Topen tag 1 fid 1 mode 0")
        raw.send(*(f"Tread tag {tag} fid 1 offset 0 count {len(body)}" for tag in range(asked)))
        (held,) = (c for c in server.server.connections if c.session.fids.by_number.get(1) is not None)
        eventually(lambda: held.session.congested)
        assert "s" in client.list()
        assert server.call(lambda: held.session.held) < limits.REPLY_BYTES + limits.MSIZE_DEFAULT
        expected = b"".join(
            (len(body) + 11).to_bytes(4, "little")
            + b"\x75"
            + tag.to_bytes(2, "little")
            + len(body).to_bytes(4, "little")
            + body
            for tag in range(asked)
        )
        got = bytearray()
        while len(got) < len(expected):
            got += sock.recv(1 << 20)
        assert got == expected
        sock.close()


def test_what_was_not_sent_is_given_back(tree: Tree, tmp_path: Path, server: Running, authority: Authority) -> None:
    count, size = 12, 1_000_000  # the system takes some
    with connect(server, msize=1 << 20) as client:
        with client.open("ctl", "w") as ctl:
            ctl.write(b"deliver one\n")
        with client.create("s") as stream:
            for _ in range(count):
                stream.write(bytes(size))
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        narrow.settimeout(HANG_S)
        narrow.connect(("127.0.0.1", int(server.encrypted.rpartition("!")[2])))
        gone = Raw(authority.trusting().wrap_socket(narrow, server_hostname="127.0.0.1"))
        gone.ask(f"Tversion tag NOTAG msize {1 << 20} version 9P2000")
        gone.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')
        for fid in range(1, count + 1):
            gone.ask(f"Twalk tag 1 fid 0 newfid {fid} names [s]")
            gone.ask(f"Topen tag 1 fid {fid} mode 2")
        for fid in range(1, count + 1):
            gone.send(f"Tread tag {fid} fid {fid} offset 0 count {size}")
        (taker,) = (c for c in server.server.connections if len(c.session.fids.by_number) > count)
        eventually(lambda: taker.session.congested)
        delivered = server.call(lambda: tree.root.streams["s"].own_consumer().counts.delivered)
        gone.close()
        eventually(lambda: server.call(open_handles, tree) == 0)
        with client.open("s") as shown:
            back = len(list(iter(lambda: shown.receive(size), b"")))
        assert count - delivered < back <= count
        assert delivered


def test_answers_of_tls_are_bounded(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = handshaken(authority)
    server.send(bytes(1_000_000))  # what is sent on purpose does not count
    client.send(b"x")
    assert server.receive(client.take()) == b"x"
    assert client.receive(server.take()) == bytes(1_000_000)
    monkeypatch.setattr(tls, "UNASKED_BYTES", 100)
    with pytest.raises(ssl.SSLError, match="more than 100 bytes of answers not taken"):
        handshaken(authority)


def one_token(folder: Path) -> Tokens:
    file = folder / "tokens"
    file.touch(0o600)
    file.write_text(line_of(ME.uid, SECRET))
    return Tokens(str(file))


def handshaken(authority: Authority) -> tuple[TlsMachine, TlsMachine]:
    """A client's end and a server's, after the handshake."""
    server = ServerTls(str(authority.of_server())).machine("9p")
    client = TlsMachine(client_context("9p"), "127.0.0.1")
    client.shake_hands()
    while not client.ready:
        assert server.receive(client.take()) == b""
        client.receive(server.take())
    server.receive(client.take())
    return client, server


def test_bytes_count_as_written_when_they_have_left(authority: Authority) -> None:
    theirs, ours = socket.socketpair()
    client, server = handshaken(authority)
    calls = TlsCalls(server, pytest.fail)
    body, got, sent = os.urandom(700_001), b"", 0
    with theirs, ours:
        ours.setblocking(False)
        theirs.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        for parts in (1, 3):
            size = len(body) // parts
            rest = [memoryview(body)[at : at + size] for at in range(0, size * parts, size)]
            while rest:
                with contextlib.suppress(BlockingIOError):
                    sent += (count := calls.writev(ours.fileno(), rest))
                    while rest and count >= len(rest[0]):
                        count -= len(rest.pop(0))
                    if count:
                        rest[0] = rest[0][count:]
                with contextlib.suppress(BlockingIOError):
                    while data := theirs.recv(5_000):
                        got += client.receive(data)
                assert len(got) >= sent
        assert got == body + body[: len(body) // 3 * 3]


def test_a_connection_that_ended_leaves_nothing_for_the_garbage_collector(server: Running) -> None:
    gc.disable()
    try:
        with connect(server) as client:
            client.create("s").close()
            (connection,) = server.call(lambda: [weakref.ref(one) for one in server.server.connections])
        eventually(lambda: connection() is None)
    finally:
        gc.enable()
