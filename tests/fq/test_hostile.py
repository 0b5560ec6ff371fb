"""Clients that break the protocol, guess keys, or ask for too much: they lose their connection, and no other does."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import sys
import time
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.fq import codec
from mqfs.fq.codec import Message
from tests.fq.client import Client, Refused, connect, port, serve, stats
from tests.support import campaign
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, mqfs, short_folder

RECEIVE_BYTES = 1 << 16


def ended(sock: socket.socket) -> bool:
    """It ends, whatever comes before."""
    sock.settimeout(HANG_S)
    try:
        while sock.recv(RECEIVE_BYTES):
            pass
    except ConnectionError:
        pass
    sock.close()
    return True


def works(address: str) -> None:
    with Client(address, "works") as client:
        client.bind("works")
        client.publish("works", "r", b"1")
        assert client.receive()[0].payload == b"1"


def test_a_key_pairs_once(address: str) -> None:
    with Client(address, "pair") as client:
        second = connect(address)
        second.sendall(codec.data(client.key))
        assert ended(second)
        client.bind("pair")
        client.publish("pair", "r", b"1")
        assert client.receive()[0].payload == b"1"


@pytest.mark.parametrize("key", [b"", b"k" * 127, b"k" * 128, b"\0" * 16])
def test_wrong_keys(address: str, key: bytes) -> None:
    sock = connect(address)
    sock.sendall(codec.data(key))
    assert ended(sock)


def test_a_length_bomb_is_read_past(server: Server, address: str) -> None:
    size = (1 << 28) + 7
    with Client(address, "bomb") as client:
        client.bind("bomb")
        head = codec.name(b"bomb") + codec.name(b"r") + bytes(16)
        client.data.sendall(head + size.to_bytes(4))
        before = resident(server)
        part = bytes(1 << 20)
        for _ in range(size // len(part)):
            client.data.sendall(part)
        client.data.sendall(part[: size % len(part)])
        client.publish("bomb", "r", b"after")
        assert client.receive()[0].payload == b"after"
        assert client.counts()["size_dropped"] == 1
        assert resident(server) - before < 32 << 20


def test_messages_before_a_malformed_one_are_delivered(address: str) -> None:
    with Client(address, "reads") as reads, Client(address) as other:
        reads.bind("malformed")
        sent = [Message(b"malformed", b"r", bytes(16), b"%d" % n) for n in range(50)]
        other.data.sendall(b"".join(map(codec.published, sent)) + b"\xff" * 20)
        assert ended(other.data)  # though it sends no more
        reads.publish("malformed", "r", b"after")
        assert [message.payload for message in reads.receive(51)] == [*(one.payload for one in sent), b"after"]


def test_binding_while_the_data_connection_ends() -> None:
    with short_folder() as folder, serve(folder) as server:
        for number in range(campaign.size(10_000)):
            with Client(f"{folder}/fq", f"ends-{number}") as client:
                ended_at = number % 20
                for exchange in range(20):
                    if exchange == ended_at:
                        client.data.sendall(b"\xff" * 20)
                    with contextlib.suppress(ConnectionError):
                        client.commands.sendall(codec.bind(0, f"e{exchange}".encode(), b"prefix:"))
        works(f"{folder}/fq")
        assert "Traceback" not in server.text()


def resident(server: Server) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_asking_for_heartbeats_again_and_again(address: str) -> None:
    with Client(address, "beats", with_data=False) as client:
        client.answer("beat")  # of the authentication
        client.commands.sendall(b"".join(codec.beat_request(period) for period in [500, 0] * 200 + [500]))
        client.answer("beat")
        began = time.monotonic()
        for _ in range(3):
            client.commands.sendall(codec.BEAT)
            client.answer("beat")
        assert time.monotonic() - began > 1


def test_asking_for_heartbeats_more_often_than_they_are_due(address: str) -> None:
    with Client(address, "often", with_data=False) as client:
        client.answer("beat")  # of the authentication
        client.commands.settimeout(0.05)
        beats = 0
        for _ in range(400):
            client.commands.sendall(codec.beat_request(500))
            with contextlib.suppress(TimeoutError):
                client.answer("beat")
                beats += 1
            if beats == 3:
                break
        assert beats == 3


def test_a_client_that_takes_no_beats_does_not_hold_up_the_end() -> None:
    with short_folder() as folder, serve(folder) as server, Client(f"{folder}/fq", "s", with_data=False) as client:
        client.commands.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.commands.sendall(codec.beat_request(10) + (codec.BEAT + codec.status()) * 100_000)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < limits.HTTP_SEND_S / 2


def test_random_bytes(address: str) -> None:
    choose = random.Random(campaign.seed())
    magics = [codec.COMMANDS, codec.DATA, codec.PEER, codec.OLD_PEER, b"GET ", b"POST", b""]
    for _ in range(campaign.size(2_000)):
        sock = connect(address)
        try:
            sock.sendall(choose.choice(magics) + choose.randbytes(choose.randrange(200)))
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        assert ended(sock)
    works(address)


def test_damaged_messages_and_commands(address: str) -> None:
    choose = random.Random(campaign.seed())
    for number in range(campaign.size(1_000)):
        client = Client(address, f"damaged-{number}")
        commands = bytearray(codec.bind(0, b"damaged", b"prefix:a") + codec.beat_request(0) + codec.status())
        messages = bytearray(
            b"".join(codec.published(Message(b"damaged", b"a", bytes(16), b"x" * 20)) for _ in range(5))
        )
        for data in (commands, messages):
            data[choose.randrange(len(data))] = choose.randrange(256)
        try:
            client.commands.sendall(commands)
            client.data.sendall(messages[: choose.randrange(len(messages))])
            client.commands.shutdown(socket.SHUT_WR)
            client.data.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        assert ended(client.data)
        assert ended(client.commands)
    works(address)


def test_silent_connections_end_and_keys_die() -> None:
    program = (sys.executable, "-m", "tests.fq.hasty_server")
    with short_folder() as folder, serve(folder, program=program) as server:
        address = f"{folder}/fq"
        half = connect(address)
        half.sendall(codec.auth(b"u", b"q", b"mem", b"")[:-1])
        with Client(address, "unpaired", with_data=False) as client:
            assert ended(connect(address))  # which took longer than the key lives
            assert ended(half)
            late = connect(address)
            late.sendall(codec.data(client.key))
            assert ended(late)
            assert client.bind("ex") != codec.ILLEGAL  # it continues without
        assert server.process.poll() is None


def test_names_too_long_for_the_tree_have_no_route(address: str) -> None:
    with Client(address, "long") as client:
        client.bind("long")
        client.publish("long", b"/" * 127, b"lost")
        client.publish("long", b"/" * 80, b"kept")
        client.publish("long", b"/" * 60, b"end")
        found = [message.payload for message in client.receive(2)]
        assert found == [b"kept", b"end"]
        assert client.counts()["no_route"] == 1


def test_who_may() -> None:
    """Without a token file the rights of --tcp-user bind; the group's mode decides."""
    with short_folder() as folder:
        listen = ("--fq", "tcp!127.0.0.1!0")
        with Server.at(folder, *listen) as server, Client(("127.0.0.1", port(server)), "q") as client:
            assert client.bind("ex") == codec.ILLEGAL  # user nobody
            client.publish("ex", "r", b"1")
            assert eventually(lambda: client.counts()["no_exchange"]) == 1
            assert stats(port(server))["exchanges"].keys() == {"_aggregate"}


def test_a_token_is_the_password() -> None:
    with short_folder() as folder:
        tokens = folder / "tokens"
        secret = mqfs("token", "new", "root", "--token-file", str(tokens), cwd=folder).stdout.strip().split()[-1]
        users = folder / "users"
        users.write_text("# clients of fq\nworker root\nother nobody\n")
        options = ("--token-file", str(tokens), "--fq-users", str(users), "--fq", "tcp!127.0.0.1!0")
        with Server.at(folder, *options) as server:
            where = ("127.0.0.1", port(server))
            with Client(where, "q", user="worker", password=secret) as client:
                assert client.bind("ex") != codec.ILLEGAL
            for user, password in (("worker", secret[:-1] + "x"), ("other", secret), ("unknown", secret)):
                with pytest.raises(Refused):
                    Client(where, "q", user=user, password=password)
            with Client(where, "q", user="worker", password=secret) as client:
                assert (
                    mqfs("token", "revoke", secret.split("_")[1], "--token-file", str(tokens), cwd=folder).returncode
                    == 0
                )
                client.wait_for_end()
