"""Queues and exchanges over real connections: who shares them, who may have them, what they keep and drop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqfs.fq import codec
from mqfs.ninep.client.connection import Client as Files
from mqfs.ninep.client.connection import connect
from tests.fq.client import Client, Refused, port, serve, stats
from tests.support.batches import frame
from tests.support.eventually import eventually
from tests.support.server import Server, short_folder

END = b"end"


def bodies(client: Client, count: int) -> list[bytes]:
    return [message.payload for message in client.receive(count)]


@contextlib.contextmanager
def publisher(address: str) -> Iterator[Client]:
    with Client(address, kind="mem") as client:
        yield client


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def test_a_queue_gets_a_message_once_however_many_programs_select_it(address: str) -> None:
    with Client(address, "twice") as client, publisher(address) as other:
        routes = {client.bind("twice", program) for program in ("prefix:a", "exact:a.b", 'prefix: route_contains("b")')}
        assert len(routes) == 3
        other.publish("twice", "a.b", b"1")
        other.publish("twice", "c", b"unwanted")
        other.publish("twice", "a.c", b"2")
        assert bodies(client, 2) == [b"1", b"2"]
        assert other.counts()["no_route"] == 1


def test_what_was_claimed_is_sent_before_a_long_look_for_the_next_one(server: Server, address: str) -> None:
    name, kind = "looks", "mem:public,permanent"
    with Client(address, name, kind, with_data=False) as asks:
        asks.bind(name, 'prefix: payload_contains("yes")', codec.FLAG_PERMANENT)
    with publisher(address) as other, server.connect() as tree, connect(server.address) as files:
        other.publish(name, "r", b"yes 1")
        eventually(lambda: other.counts()["routed"] == 1, "the message")
        with files.open(f"fq/{name}/.batch", "w") as batch:
            for _ in range(10):
                batch.write(frame("r", b"no") * 10_000)
        other.publish(name, "r", b"yes 2")
        eventually(lambda: other.counts()["routed"] == 2, "the message")
        with Client(address, name, kind) as reads:
            assert bodies(reads, 1) == [b"yes 1"]
            assert tree.group(f"fq/{name}").stats().consumers[name].claimed == 1
            assert bodies(reads, 1) == [b"yes 2"]


def test_two_clients_share_a_public_queue(address: str) -> None:
    with Client(address, "shared") as one, Client(address, "shared") as two, publisher(address) as other:
        one.bind("shared")
        for client in (one, two):  # each takes what the other has no place for
            other.publish("shared", "r", b"x" * 1_000_000, b"x" * 1_000_000, b"x" * 1_000_000, b"x" * 1_000_000)
            assert len(client.receive(1)) == 1
        seen = eventually(lambda: [one.counts()["msgs_out"], two.counts()["msgs_out"]])
        assert min(seen) > 0


def test_a_queue_of_several_exchanges(address: str) -> None:
    with Client(address, "several") as client, publisher(address) as other:
        for exchange in ("one", "two"):
            client.bind(exchange)
            other.publish(exchange, "r", exchange.encode())
        assert {message.payload for message in client.receive(2)} == {b"one", b"two"}


def test_a_binding_is_for_messages_from_then_on(address: str) -> None:
    with Client(address, "others") as keeps, Client(address, "later") as later, publisher(address) as other:
        keeps.bind("from", "prefix:")  # what it does not read is kept
        later.bind("from", "prefix:a")
        other.publish("from", "b", b"before")
        other.publish("from", "a", b"1")
        assert bodies(later, 1) == [b"1"]
        other.publish("from", "b", b"before")
        assert bodies(keeps, 3) == [b"before", b"1", b"before"]
        later.bind("from", "prefix:b")
        other.publish("from", "b", b"2")
        assert bodies(later, 1) == [b"2"]


def test_a_second_binding_keeps_what_came_behind_the_first(address: str) -> None:
    with Client(address, "both", with_data=False) as asks, publisher(address) as other:
        asks.bind("both", "prefix:a")
        other.publish("both", "a", b"1")
        eventually(lambda: other.counts()["routed"] == 1, "the message")
        asks.bind("both", "prefix:b")
        with Client(address, "both") as reads:
            other.publish("both", "b", b"2")
            assert bodies(reads, 2) == [b"1", b"2"]


def test_a_peer_confirms_all_that_it_says(server: Server, address: str) -> None:
    with Client(address, "peer", node=bytes([192, 0, 2, 1])) as peer, server.connect() as tree:
        peer.bind("confirmed")
        group = tree.group("fq/confirmed")
        group.publish_many([("r", body) for body in numbered(3)])
        assert bodies(peer, 3) == numbered(3)
        said = codec.Message(codec.CONFIRM, b"", bytes(codec.ID_BYTES), (3).to_bytes(8))
        peer.data.sendall(codec.relayed(said))
        eventually(lambda: group.stats().consumers["peer"].claimed == 0, "the last to be acked, too")


def test_a_peers_message_of_a_client_on_this_host_was_not_here_before(address: str) -> None:
    """Hops are brokers, the newest first, and last the client. A single one is a broker."""
    other = bytes([192, 0, 2, 1])
    with Client(address, "hops") as client, Client(address, node=other) as peer, publisher(address) as local:
        client.bind("hops")
        local.publish("hops", "r", b"local")
        (message,) = client.receive()
        here = message.hops[:4]
        taken = [b"", other, other + here, other + other + here]
        not_taken = [here, here + other, here + here, other + here + other, here + other + here]
        for hops in (*not_taken, *taken):
            peer.data.sendall(codec.relayed(codec.Message(b"hops", b"r", bytes(16), b"", b"s", hops)))
        assert [message.hops for message in client.receive(len(taken))] == [here + hops for hops in taken]
        assert peer.counts()["dropped_in"] == len(not_taken)


def test_an_exchange_that_others_make_at_once_is_bound(server: Server, address: str) -> None:
    with ThreadPoolExecutor(1) as threads, server.connect() as tree, Client(address) as client:
        for n in range(50):
            made = threads.submit(tree.group, f"fq/at-once-{n}", create=True)
            assert client.bind(f"at-once-{n}") != codec.ILLEGAL
            made.result()


def test_a_group_with_another_name_is_another_exchange(server: Server, address: str) -> None:
    with Client(address, "before") as before, Client(address, "after") as after, connect(server.address) as files:
        before.bind("moved")
        files.rename("fq/moved", "moved-away")
        files.mkdir("fq/moved")
        with server.connect() as tree:
            assert after.bind("moved") != codec.ILLEGAL
            before.publish("moved", "r", b"1")
            assert bodies(after, 1) == [b"1"]
            assert [message.body for message in tree.group("fq/moved-away").history()] == []
            tree.group("fq/moved-away").publish("r", b"2")
            assert bodies(before, 1) == [b"2"]


def look(other: Client, exchange: str) -> None:
    """Have the server look an exchange up that is not there."""
    before = other.counts()["no_exchange"]
    other.publish(exchange, "r", b"lost")
    eventually(lambda: other.counts()["no_exchange"] == before + 1, "the look")


def rename_once(files: Files, other: Client, name: str) -> str:
    files.rename(f"fq/{name}", f"{name}-new")
    look(other, name)
    return f"{name}-new"


def rename_and_back(files: Files, other: Client, name: str) -> str:
    files.rename(f"fq/{rename_once(files, other, name)}", name)
    return name


def replace(files: Files, other: Client, name: str) -> str:
    files.rename(f"fq/{name}", f"{name}-new")
    files.mkdir(f"fq/{name}")
    other.bind(name, "prefix:none")
    return f"{name}-new"


def swap(files: Files, other: Client, name: str) -> str:
    other.bind(f"{name}-other", "prefix:none")
    for old, new in ((f"{name}-other", "between"), (name, f"{name}-other"), ("between", name)):
        files.rename(f"fq/{old}", new)
    other.bind(name, "prefix:none")
    return f"{name}-other"


def rename_all_and_back(files: Files, other: Client, name: str) -> str:
    files.rename("fq", "away")
    look(other, name)
    files.rename("away", "fq")
    return name


RENAMES = [rename_once, rename_and_back, replace, swap, rename_all_and_back]


@pytest.mark.parametrize("binds", [False, True], ids=["reads", "binds"])
@pytest.mark.parametrize("rename", RENAMES)
def test_a_queue_stays_bound_to_an_exchange_that_gets_another_name(
    server: Server, address: str, rename: Callable[[Files, Client, str], str], binds: bool
) -> None:
    name, kind = f"{rename.__name__}-{binds}", "mem:public,permanent"
    with publisher(address) as other, connect(server.address) as files:
        with Client(address, name, kind, with_data=False) as asks:
            route = asks.bind(name, "prefix:", codec.FLAG_PERMANENT)
        other.publish(name, "r", *numbered(3))
        eventually(lambda: other.counts()["routed"] == 3, "the messages")
        new = rename(files, other, name)
        other.publish(new, "r", b"3")
        eventually(lambda: other.counts()["routed"] == 4, "the message")
        if binds:
            with Client(address, name, kind, with_data=False) as asks:
                assert asks.bind(new, "prefix:", codec.FLAG_PERMANENT) == route
        with Client(address, name, kind) as reads:
            assert [(message.exchange.decode(), message.payload) for message in reads.receive(4)] == [
                (new, body) for body in numbered(4)
            ]
            assert stats(port(server))["queues"][name]["clients"]
            assert reads.unbind(new, route) == route


def test_a_queue_whose_exchange_gets_another_name_goes_with_its_last_client(server: Server, address: str) -> None:
    with connect(server.address) as files, server.connect() as tree:
        with Client(address, "goes") as client, publisher(address) as other:
            client.bind("goes")
            rename_once(files, other, "goes")
            other.publish("goes-new", "r", b"1")
            assert [(message.exchange, message.payload) for message in client.receive(1)] == [(b"goes-new", b"1")]
        group = tree.group("fq/goes-new")
        eventually(lambda: not [line for line in group._ctl_lines() if "goes" in line], "the queue to go")


@pytest.mark.parametrize("binds", [False, True], ids=["reads", "binds"])
def test_a_queue_is_bound_to_an_exchange_that_comes_after_the_start(binds: bool) -> None:
    kind = "mem:public,permanent"
    with short_folder() as folder, serve(folder) as server:
        address = f"{folder}/fq"
        with publisher(address) as other:
            with Client(address, "late", kind, with_data=False) as asks:
                asks.bind("late", "prefix:", codec.FLAG_PERMANENT)
            other.publish("late", "r", *numbered(3))
            eventually(lambda: other.counts()["routed"] == 3, "the messages")
        with connect(server.address) as files:
            files.rename("fq", "old")
        server.restart()
        with connect(server.address) as files, Client(address, "late", kind) as reads, publisher(address) as other:
            files.remove("fq")
            files.rename("old", "fq")
            if binds:
                assert reads.bind("late", "prefix:", codec.FLAG_PERMANENT) != codec.ILLEGAL
            other.publish("late", "r", b"3")
            assert bodies(reads, 4) == numbered(4)


def test_patterns_that_others_bind_to_the_view_of_a_queue_are_no_bindings() -> None:
    with short_folder() as folder, serve(folder) as server:
        with server.connect() as tree:
            group = tree.group("fq/by-hand", create=True)
            group.ctl("bind %q.alone 'a.*'", "consumer alone %q.alone")
            group.ctl("bind %q.both 'a.*'", "bind %q.both prefix:b", "consumer both %q.both")
        server.restart()
        routes = stats(port(server))["exchanges"]["by-hand"]["routes"]
        assert [(route["queue"], route["program"]) for route in routes.values()] == [("both", "prefix:b")]


def test_an_exchange_that_is_made_again_has_no_bindings(server: Server, address: str) -> None:
    with Client(address, "remade", "mem:public,permanent", with_data=False) as client, connect(server.address) as files:
        for number in range(3):
            client.bind(f"remade{number}", "prefix:", codec.FLAG_PERMANENT)
        for number in range(3):
            files.remove(f"fq/remade{number}")
            files.mkdir(f"fq/remade{number}")
        assert client.bind("remade0", "prefix:", codec.FLAG_PERMANENT) != codec.ILLEGAL
        with publisher(address) as other, Client(address, "remade", "mem:public,permanent") as reads:
            other.publish("remade0", "r", b"1")
            assert bodies(reads, 1) == [b"1"]
        shown = stats(port(server))["exchanges"]
        assert [name for name, row in shown.items() if name.startswith("remade") and row["routes"]] == ["remade0"]


@pytest.mark.parametrize("kind", ["mem:public", "disk:public,permanent"])
def test_a_queue_whose_last_exchange_is_removed_ends_its_clients(server: Server, address: str, kind: str) -> None:
    name = f"last-{kind}"
    with contextlib.ExitStack() as stack, connect(server.address) as files:
        clients = [stack.enter_context(Client(address, name, kind)) for _ in range(2)]
        other = stack.enter_context(Client(address, name + "2"))
        for exchange in ("last-1", "last-2"):
            clients[0].bind(exchange)
            other.bind(exchange)
        other.bind("last-3")
        files.remove("fq/last-1")
        files.mkdir("fq/last-1")
        other.publish("last-2", "r", b"1")
        other.receive(1)
        assert eventually(lambda: sum(client.counts()["msgs_out"] for client in clients) == 1)  # they stay
        clients[0].publish("last-3", "r", *numbered(100))
        files.remove("fq/last-2/r")
        files.remove("fq/last-2")
        files.mkdir("fq/last-2")
        for client in clients:
            client.wait_for_end()
        assert bodies(other, 100) == numbered(100)  # what was sent before is taken
        with Client(address, name, kind) as again:
            assert again.bind("last-2") != codec.ILLEGAL
            other.publish("last-2", "r", b"2")
            assert bodies(again, 1) == [b"2"]


@pytest.mark.parametrize("kind", ["mem:public", "disk:public,permanent"])
def test_a_client_that_unbound_its_queue_stays_where_the_exchange_is_removed(
    server: Server, address: str, kind: str
) -> None:
    """The client of another queue, which was bound, is ended."""
    name = f"left-{kind[:3]}"
    with Client(address, name, kind) as client, Client(address, name + "2") as other, connect(server.address) as files:
        client.unbind(name, client.bind(name))
        other.bind(name)
        files.remove(f"fq/{name}")
        other.wait_for_end()
        assert client.bind(name) != codec.ILLEGAL
        client.publish(name, "r", b"1")
        assert bodies(client, 1) == [b"1"]


def test_the_group_of_all_exchanges_is_made_again() -> None:
    with short_folder() as folder, serve(folder) as it, connect(it.address) as files, Client(f"{folder}/fq") as client:
        files.remove("fq")
        assert client.bind("e") == codec.ILLEGAL
        client.publish("e", "r", b"0")
        assert eventually(lambda: client.counts()["no_exchange"] == 1, "the message")
        files.mkdir("fq")
        assert client.bind("e") != codec.ILLEGAL
        client.publish("e", "r", b"1")
        assert bodies(client, 1) == [b"1"]


def test_unbind(address: str) -> None:
    with Client(address, "un") as client, publisher(address) as other:
        first, second = client.bind("un", "prefix:a"), client.bind("un", "prefix:b")
        assert client.unbind("un", first) == first
        other.publish("un", "a", b"1")
        other.publish("un", "b", b"2")
        assert bodies(client, 1) == [b"2"]
        assert client.unbind("un", second) == second
        assert client.unbind("un", second) == codec.ILLEGAL
        assert client.bind("un", "prefix:a") != codec.ILLEGAL
        other.publish("un", "a", b"3")
        assert bodies(client, 1) == [b"3"]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("mem:private", "mem:private", "requested queue is private and in use"),
        ("mem", "mem", "requested queue is private and in use"),
        ("mem:public", "disk:public", "requested type disk, queue is mem"),
        ("mem:public", "mem", "requested private, queue is public"),
        ("mem:public", "mem:public,block", "request block, queue is drop"),
        ("mem:public", "mem:public,fast", "invalid queue param: fast"),
        ("mem:public", "tape", "invalid queue type: tape"),
    ],
)
def test_refusals_in_fqs_own_words(address: str, first: str, second: str, text: str) -> None:
    name = f"{first} and {second}"  # the last client of a queue may be going still when the next test begins
    with Client(address, name, first), pytest.raises(Refused, match=f"^{text}$"):
        Client(address, name, second)
    with contextlib.suppress(Refused), contextlib.closing(Client(address, name, second)):
        pass  # it is free, once the first has gone


def test_sixteen_clients_of_a_queue(address: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(contextlib.closing(Client(address, "many")))
        with pytest.raises(Refused):
            Client(address, "many")


def test_another_backlog_is_ignored(address: str) -> None:
    with Client(address, "backlog", "mem:public,backlog=5"), Client(address, "backlog", "mem:public,backlog=9"):
        pass


def test_a_queue_is_bound_for_as_long_as_it_has_a_client(server: Server, address: str) -> None:
    """The last one that reads has gone, another is there still: the queue keeps what comes for the next reader."""
    with Client(address, "shared", with_data=False) as asks, publisher(address) as other, server.connect() as tree:
        asks.bind("shared")
        with Client(address, "shared") as reads:
            other.publish("shared", "r", b"1")
            assert bodies(reads, 1) == [b"1"]
        eventually(lambda: len(stats(port(server))["queues"]["shared"]["clients"]) == 1, "the reader to go")
        assert tree.group("fq/shared").consumers() == ["shared"]
        other.publish("shared", "r", b"2")
        with Client(address, "shared") as reads:
            assert bodies(reads, 1) == [b"2"]


def test_a_queue_that_is_bound_no_more_goes_with_its_last_client(server: Server, address: str) -> None:
    with Client(address, "unbound") as client, server.connect() as tree:
        client.unbind("unbound", client.bind("unbound"))
        assert client.bind("elsewhere")
        assert tree.group("fq/unbound").consumers() == ["unbound"]
    with server.connect() as tree:
        eventually(lambda: not tree.group("fq/unbound").consumers(), "the consumer to go")


def test_a_queue_whose_consumer_was_removed_is_bound_again(server: Server, address: str) -> None:
    with Client(address, "again", with_data=False) as asks, publisher(address) as other, server.connect() as tree:
        for _ in range(2):
            route = asks.bind("again")
            with Client(address, "again") as reads:
                other.publish("again", "r", b"1")
                assert bodies(reads, 1) == [b"1"]
            eventually(lambda: len(stats(port(server))["queues"]["again"]["clients"]) == 1, "the reader to go")
            assert tree.group("fq/again").consumers() == ["again"]
            asks.unbind("again", route)
            tree.group("fq/again").ctl("remove again")


def test_a_queue_that_is_made_permanent_is_not_held_open(server: Server, address: str) -> None:
    with Client(address, "stays", with_data=False) as asks, server.connect() as tree:
        asks.bind("stays")
        group = tree.group("fq/stays")
        assert group.stats().consumers["stays"].handles == 1
        with Client(address, "stays", "mem:public,permanent", with_data=False):
            assert group.stats().consumers["stays"].handles == 0


def test_backlogs(server: Server, address: str) -> None:
    limits = {
        "": 16_384,
        "backlog=7": 7,
        "backlog=100abc": 100,
        "backlog=00000000000000005": 5,
        "backlog=+6.5": 6,
        "backlog=1_0": 1,
        "backlog=2147483647": 2_147_483_647,
        "backlog=2147483648": 0,
        "backlog=9" + 40 * "9": 0,
        "backlog=0": 0,
        "backlog=-1": 0,
        "backlog=x": 0,
        "backlog=": 0,
        "backlog=\u0664": 0,
    }
    for number, (kind, limit) in enumerate(limits.items()):
        with Client(address, f"backlog-{number}", f"mem:{kind}", with_data=False):
            assert stats(port(server))["queues"][f"backlog-{number}"]["backlog_limit"] == limit


def test_a_queue_without_a_name_is_private_and_goes(server: Server, address: str) -> None:
    with Client(address, "", "mem:permanent") as client:
        client.bind("unnamed")
        bound = stats(port(server))["exchanges"]["unnamed"]["routes"]
        assert len(bound) == 1
        queue = next(iter(bound.values()))["queue"]
        assert stats(port(server))["queues"][queue]["private"]
    eventually(lambda: queue not in stats(port(server))["queues"], "the queue to go")
    assert stats(port(server))["exchanges"]["unnamed"]["routes"] == {}
    with server.connect() as tree:
        assert tree.group("fq/unnamed").consumers() == []
        assert not [line for line in tree.group("fq/unnamed")._ctl_lines() if line.startswith("bind")]


def test_drop_loses_the_newest_and_counts(server: Server, address: str) -> None:
    with Client(address, "small", "mem:public,backlog=10", with_data=False) as asks, publisher(address) as other:
        asks.bind("drops")
        other.publish("drops", "r", *numbered(25))
        eventually(lambda: other.counts()["routed"] == 25, "25 messages")
        assert other.counts()["dropped"] == 15
        assert stats(port(server))["queues"]["small"]["dropped_to"] == 15
        with Client(address, "small", "mem:public,backlog=10") as reads:
            assert bodies(reads, 10) == numbered(10)
            eventually(lambda: stats(port(server))["queues"]["small"]["backlog"] == 0, "room")
            other.publish("drops", "r", END)
            assert bodies(reads, 1) == [END]


def test_block_stops_its_publisher_alone(address: str) -> None:
    kind = "mem:public,block,backlog=10"
    with Client(address, "slow", kind, with_data=False) as asks, Client(address, "fast") as fast:
        asks.bind("blocks", "prefix:slow")
        fast.bind("blocks", "prefix:fast")
        with publisher(address) as stopped, publisher(address) as other:
            stopped.publish("blocks", "slow", *numbered(1_000))
            eventually(lambda: stopped.counts()["routed"] == 10, "the queue to be full")
            for turn in numbered(100):
                other.publish("blocks", "fast", turn)
                assert bodies(fast, 1) == [turn]
            assert stopped.counts()["routed"] == 10
            with Client(address, "slow", kind) as reads:
                assert bodies(reads, 1_000) == numbered(1_000)
            eventually(lambda: stopped.counts()["routed"] == 1_000, "the rest")


@pytest.mark.parametrize(
    ("full", "first", "lost"),
    [("block", 50, {}), ("drop-new", 20, {"dropped": 30}), ("reject", 20, {"no_route": 30})],
    ids=["block", "drop-new", "reject"],
)
def test_messages_beyond_the_depth_of_their_stream_take_no_others_with_them(
    server: Server, address: str, full: str, first: int, lost: dict[str, int]
) -> None:
    """50 of one route and 20 of another, received together; a stream has room for 20, as nothing reads yet."""
    name = f"deep-{full}"
    with server.connect() as tree, Client(address, name, "mem:public", with_data=False) as asks:
        tree.group(f"fq/{name}", create=True).ctl("depth 20", f"full {full}")
        asks.bind(name)
        with publisher(address) as other:
            sent = [codec.Message(name.encode(), b"a" if n < 50 else b"b", bytes(16), b"%d" % n) for n in range(70)]
            other.data.sendall(b"".join(map(codec.published, sent)))
            if full != "block":
                eventually(lambda: counted(other) == {"routed": 40, **lost}, "the counts")
            with Client(address, name) as reads:
                assert bodies(reads, first + 20) == [*numbered(first), *numbered(20, 50)]
            eventually(lambda: counted(other) == {"routed": first + 20, **lost}, "the counts")


def counted(client: Client) -> dict[str, int]:
    """What became of the messages that it published."""
    counts = client.counts()
    return {name: counts[name] for name in ("routed", "dropped", "no_route") if counts[name]}


def test_what_a_publisher_sent_before_it_left_comes(address: str) -> None:
    kind = "mem:public,block,backlog=10"
    with Client(address, "left", kind, with_data=False) as asks:
        asks.bind("left")
        with publisher(address) as other:
            other.publish("left", "r", *numbered(500))
        with Client(address, "left", kind) as reads:
            assert bodies(reads, 500) == numbered(500)


def test_a_permanent_queue_outlives_kill_9() -> None:
    with short_folder() as folder, serve(folder) as server:
        address = f"{folder}/fq"
        with Client(address, "kept", "disk:public,permanent", with_data=False) as asks:
            asks.bind("kept", "prefix:a/", codec.FLAG_PERMANENT)
            with publisher(address) as other, Client(address, "gone") as gone:
                gone.bind("kept")
                other.publish("kept", "a/b", *numbered(100))
                eventually(lambda: other.counts()["routed"] == 100, "100 messages")
                server.restart()
        queues = stats(port(server))["queues"]
        assert queues.keys() == {"kept"}
        assert queues["kept"]["backlog"] == 100
        routes = stats(port(server))["exchanges"]["kept"]["routes"]
        assert [route["queue"] for route in routes.values()] == ["kept"]
        with publisher(address) as other, Client(address, "kept", "disk:public,permanent") as reads:
            other.publish("kept", "a/c", END)
            other.publish("kept", "b", b"unwanted")
            assert bodies(reads, 101) == [*numbered(100), END]
            with pytest.raises(Refused, match=r"^requested type mem, queue is disk$"):
                Client(address, "kept", "mem:public")


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("type", ["mem", "disk"])
def test_a_transient_queue_that_is_made_permanent_keeps_what_waits(type: str, clean: bool) -> None:
    with short_folder() as folder, serve(folder) as server:
        address = f"{folder}/fq"
        with Client(address, "made", f"{type}:public", with_data=False) as client, publisher(address) as other:
            client.bind("made")
            with Client(address, "made", f"{type}:public") as reads:
                other.publish("made", "r", b"read before")
                assert bodies(reads, 1) == [b"read before"]
            eventually(lambda: stats(port(server))["queues"]["made"]["backlog"] == 0, "the ack")
            other.publish("made", "r", *numbered(2))
            eventually(lambda: other.counts()["routed"] == 3, "the messages")
            Client(address, "made", f"{type}:public,permanent", with_data=False).close()
            other.publish("made", "r", *numbered(2, 2))
            eventually(lambda: other.counts()["routed"] == 5, "the messages")
        for _ in range(2):
            server.restart(signal.SIGTERM if clean else signal.SIGKILL)
            with publisher(address) as other:
                other.publish("made", "r", END)
                eventually(lambda: other.counts()["routed"] == 1, "the message")
        assert stats(port(server))["queues"]["made"]["backlog"] == 6
        with Client(address, "made", f"{type}:public") as reads:
            assert bodies(reads, 6) == [*numbered(4), END, END]


def test_a_permanent_queue_can_be_made_transient(server: Server, address: str) -> None:
    with Client(address, "was", "mem:public,permanent") as client:
        client.bind("was")
    assert "was" in eventually(lambda: stats(port(server))["queues"])
    with Client(address, "was", "mem:public,transient"):
        pass
    eventually(lambda: "was" not in stats(port(server))["queues"], "the queue to go")


def test_heartbeats_and_their_absence(address: str) -> None:
    with Client(address, "beats") as client:
        client.commands.sendall(codec.beat_request(1_000))  # patient: this process may have to wait for a CPU
        for _ in range(4):
            client.answer("beat")
            client.commands.sendall(codec.BEAT)
        client.wait_for_end()  # three periods without a sign of this client


def test_headers_that_anyone_may_write(server: Server, address: str) -> None:
    odd = [
        {"fq-id": "none"},
        {"fq-id": "é"},
        {"fq-id": "00" * 16},
        {"fq-id": "00" * 17, "fq-sender": "x", "fq-hops": "a,b"},
    ]
    with Client(address, "odd") as client, server.connect() as tree:
        client.bind("odd")
        group = tree.group("fq/odd")
        for number, headers in enumerate(odd):
            group.publish("r", f"{number}", headers=headers)
        found = client.receive(len(odd))
        assert [message.payload for message in found] == [b"0", b"1", b"2", b"3"]
        assert all(len(message.id) == 16 and message.sender and len(message.hops) >= 8 for message in found)


@pytest.mark.parametrize("user", ["tester", ""])
def test_a_message_keeps_its_id_and_hops_whatever_its_user_is_called(address: str, user: str) -> None:
    sent = [codec.Message(b"called", b"r", bytes([n]) * 16, b"%d" % n, b"", bytes([10, 0, 0, n])) for n in range(3)]
    with Client(address, "called") as client, Client(address, user=user) as other:
        client.bind("called")
        other.data.sendall(b"".join(map(codec.published, sent)))
        for message, found in zip(sent, client.receive(3), strict=True):
            assert (found.id, found.payload, found.sender) == (message.id, message.payload, (user or "mqfs").encode())
            assert found.hops[4:] == bytes(4)  # of a unix socket
        with Client(address, user=user, node=bytes([10, 0, 0, 9])) as peer:
            peer.data.sendall(b"".join(map(codec.relayed, sent)))
            for message, found in zip(sent, client.receive(3), strict=True):
                assert (found.id, found.hops[4:]) == (message.id, message.hops)


def test_through_the_tree(server: Server, address: str) -> None:
    with Client(address, "from-tree") as client, publisher(address) as other, server.connect() as tree:
        client.bind("tree", "prefix:")
        group = tree.group("fq/tree")
        group.publish("a%2Fb", b"1")
        (message,) = client.receive()
        assert (message.route, message.payload, len(message.id)) == (b"a/b", b"1", 16)
        assert message.hops[:4] == message.hops[4:]
        with group.subscribe("c") as reader:
            other.publish("tree", "c", b"2")
            found = next(iter(reader))
            assert (found.body, found.headers["fq-sender"]) == (b"2", "tester")
