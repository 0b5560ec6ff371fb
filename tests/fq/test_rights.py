"""Whose rights bind a client of fq: those of its user, for all that it does. Here root's queues, and a client of
the user nobody."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from mqfs.fq import codec
from mqfs.ninep.client.connection import Client as NinepClient
from mqfs.ninep.client.connection import connect
from tests.fq.client import Client, Refused, port, stats
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, mqfs, short_folder

NOBODY = 65534
PERMANENT = "disk:public,permanent"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Over the unix socket a client is who this process is, over TCP it is user nobody."""
    with short_folder() as folder, Server.at(folder, "--fq", f"unix!{folder}/fq", "--fq", "tcp!127.0.0.1!0") as it:
        yield it


@pytest.fixture
def nobody(server: Server) -> tuple[str, int]:
    return "127.0.0.1", port(server)


@pytest.fixture
def files(server: Server) -> Iterator[NinepClient]:
    with connect(server.address) as it:
        yield it


def fill(address: str, exchange: str, queue: str, kind: str) -> None:
    """A permanent queue of root's, with ten messages."""
    with Client(address, queue, kind) as client, Client(address) as other:
        client.bind(exchange)
        client.data.close()
        other.publish(exchange, "r", *[b"%d" % n for n in range(10)])
        eventually(lambda: other.counts()["routed"] == 10, "10 messages")


def state(server: Server, exchange: str) -> tuple[list[str], str]:
    """The streams of an exchange, and its `ctl`: settings, views, consumers with their options."""
    with connect(server.address) as files, files.open(f"fq/{exchange}/ctl") as ctl:
        return files.list(f"fq/{exchange}"), ctl.receive().decode()


def submit(port: int, sender: str, password: str) -> dict[str, object]:
    """The answer to a message from that sender, by HTTP."""
    headers = {"X-Fq-Exchange": "x", "X-Fq-Route": "r", "X-Fq-Sender": sender, "Content-Type": "text/plain"}
    given = {"Authorization": f"Bearer {password}"} if password else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/submit", b"1", {**headers, **given})
    try:
        answer = urllib.request.urlopen(request, timeout=HANG_S)
    except urllib.error.HTTPError as error:
        return dict(json.load(error))
    with answer:
        return dict(json.load(answer))


@pytest.mark.parametrize("kind", ["mem:private,transient", "mem:private,permanent", "mem:private"])
def test_another_may_not_join_a_queue_of_a_closed_exchange(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient, kind: str
) -> None:
    name = f"closed-{kind}"
    fill(address, name, name, "mem:private,permanent")
    files.chmod(f"fq/{name}", 0o700)
    before = state(server, name)
    with pytest.raises(Refused, match=f"cannot read and write and enter .* excludes uid {NOBODY}"):
        Client(nobody, name, kind)
    assert state(server, name) == before
    with Client(address, name, "mem:private") as client:
        assert len(client.receive(10)) == 10


@pytest.mark.parametrize("owner", ["permanent", "transient"])
def test_another_may_share_a_queue_but_not_say_how_long_it_lasts(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient, owner: str
) -> None:
    name, wanted = f"shared-{owner}", {"permanent": "transient", "transient": "permanent"}[owner]
    files.chmod("fq", 0o777)
    with Client(address, name, f"mem:public,{owner}", with_data=False) as mine:
        mine.bind(name)
        before = state(server, name)
        with Client(nobody, name) as client:
            assert client.bind(name, "prefix:x") != codec.ILLEGAL
            with pytest.raises(Refused, match=f"^requested {wanted}, queue is {owner}$"):
                Client(nobody, name, f"mem:public,{wanted}")
            mine.unbind(name, mine.bind(name, "prefix:x"))
        assert state(server, name) == before


def test_another_changes_nothing_in_a_closed_exchange(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient
) -> None:
    fill(address, "mine", "mine", PERMANENT)
    files.chmod("fq/mine", 0o700)
    before = state(server, "mine")
    with Client(nobody, "other") as client:
        assert client.bind("mine") == codec.ILLEGAL
        client.publish("mine", "r", b"1")
        client.publish("mine", "new", b"2")
        assert eventually(lambda: client.counts()["no_route"] == 2, "both to be refused")
    assert state(server, "mine") == before


def test_another_does_not_read_an_exchange_that_its_queue_is_bound_to(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient
) -> None:
    """A queue that both of them share is bound to an exchange that only one of them may read."""
    with Client(address, "both") as mine, Client(nobody, "both") as theirs:
        mine.unbind("later", mine.bind("later"))
        files.chmod("fq/later", 0o700)
        route = mine.bind("later")
        mine.publish("later", "r", *[b"%d" % n for n in range(100)])
        assert len(mine.receive(100)) == 100
        assert theirs.unbind("later", route) == codec.ILLEGAL
        assert theirs.counts()["msgs_out"] == 0


def test_a_consumer_that_another_made_to_stay_is_not_made_to_go(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient
) -> None:
    files.chmod("fq", 0o777)
    with Client(address, "x", PERMANENT, with_data=False) as mine, server.connect() as tree:
        mine.bind("stays")
        tree.group("fq/stays").ctl("bind %q.y 'prefix:'", "consumer y %q.y")
        before = state(server, "stays")
        with Client(nobody, "y", "mem:private") as client:
            assert client.bind("stays") == codec.ILLEGAL
        assert state(server, "stays") == before


def test_what_a_client_makes_is_its_own(nobody: tuple[str, int], files: NinepClient) -> None:
    files.chmod("fq", 0o777)
    with Client(nobody, "made") as client:
        client.bind("theirs")
        client.publish("theirs", "r", b"1")
        client.receive()
        for path in ("fq/theirs", "fq/theirs/r", "fq/theirs/.consumers/made"):
            assert files.stat(path).uid == NOBODY, path


@pytest.mark.parametrize("verb", ["add", "remove", "reset_to"])
def test_checkpoints_of_a_closed_exchange(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient, verb: str
) -> None:
    name = f"points-{verb}"
    fill(address, name, name, PERMANENT)
    files.chmod(f"fq/{name}", 0o700)
    before = state(server, name)
    path = f"/{verb}_checkpoint?qname={name}&cpname=p" + "&chkptid=1:1" * (verb == "add")
    with urllib.request.urlopen(f"http://127.0.0.1:{nobody[1]}{path}", timeout=HANG_S) as answer:
        found = json.load(answer)
    assert found["status"] == "error"
    assert f"excludes uid {NOBODY}" in found["message"]
    assert state(server, name) == before


def test_the_counters_of_a_closed_exchange_are_not_shown(
    address: str, nobody: tuple[str, int], files: NinepClient
) -> None:
    fill(address, "hidden", "hidden", PERMANENT)
    with Client(address, "seen", PERMANENT, with_data=False) as client:
        client.bind("seen")
        client.bind("hidden")
        files.chmod("fq/hidden", 0o700)
        found = stats(nobody[1])
        assert "hidden" not in str(found)
        assert "seen" in found["exchanges"]
        assert "seen" in found["queues"]


def test_queues_without_a_binding_are_shown_to_their_owners(address: str, nobody: tuple[str, int]) -> None:
    with Client(address, "of-root"), Client(nobody, "of-nobody"):
        found = stats(nobody[1])
        assert "of-root" not in str(found)
        assert "of-nobody" in found["queues"]


@pytest.mark.parametrize("bound", [False, True])
def test_a_permanent_queue_without_client_and_binding_is_forgotten(address: str, bound: bool) -> None:
    name = f"unused-{bound}"
    with Client(address, name, PERMANENT, with_data=False) as client:
        if bound:
            client.unbind("unused", client.bind("unused"))
        assert name in stats(address)["queues"]
    eventually(lambda: name not in stats(address)["queues"], "it to be forgotten")
    with Client(address, name, "mem:private"):
        pass  # of another type now


def test_a_name_of_the_file_of_users_needs_its_password() -> None:
    with short_folder() as folder:
        tokens, users = folder / "tokens", folder / "users"
        secret = mqfs("token", "new", "root", "--token-file", str(tokens), cwd=folder).stdout.strip().split()[-1]
        users.write_text("worker root\nguest nobody\n")
        options = ("--token-file", str(tokens), "--fq-users", str(users), "--fq", "tcp!127.0.0.1!0")
        with Server.at(folder, *options) as server:
            where = "127.0.0.1", port(server)
            with pytest.raises(Refused, match="user 'worker': no password"):
                Client(where, "q", user="worker")
            for user, password in (("worker", secret), ("guest", "")):
                Client(where, f"q-{user}", user=user, password=password).close()
                assert "routed" in submit(where[1], user, password)
            assert "user 'worker': no password" in str(submit(where[1], "worker", "")["error"])


def test_a_message_to_a_closed_stream_takes_no_other_with_it(
    server: Server, address: str, nobody: tuple[str, int], files: NinepClient
) -> None:
    files.chmod("fq", 0o777)
    with Client(address, "together") as client, Client(nobody) as other:
        client.bind("together")
        for name in ("open", "closed"):
            files.create(f"fq/together/{name}")
        files.chmod("fq/together", 0o777)
        for name, mode in (("open", 0o666), ("closed", 0o600)):
            files.chmod(f"fq/together/{name}", mode)
        routes = ["open", "open", "closed", "open", "closed", "closed", "open"]
        other.data.sendall(
            b"".join(
                codec.published(codec.Message(b"together", route.encode(), bytes(16), b"%d" % n))
                for n, route in enumerate(routes)
            )
        )
        assert eventually(lambda: sum(other.counts()[name] for name in ("routed", "no_route")) == len(routes))
        assert (other.counts()["routed"], other.counts()["no_route"]) == (4, 3)
        assert [message.payload for message in client.receive(4)] == [b"0", b"1", b"3", b"6"]
