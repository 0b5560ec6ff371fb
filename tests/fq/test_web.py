"""HTTP on the port of fq, by curl: publishing, counters, checkpoints, and what is not there."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mqfs.fq.codec import ILLEGAL
from mqfs.ninep.client.connection import connect
from tests.fq.client import Client, port, serve, stats
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, short_folder


def curl(server: Server, path: str, *options: str | bytes, data: bytes = b"") -> tuple[int, Any]:
    """Status, and the JSON of the answer."""
    done = subprocess.run(
        ["curl", "-s", "-w", "\n%{http_code}", *options, f"http://127.0.0.1:{port(server)}{path}"],
        input=data,
        capture_output=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), json.loads(body)


def submit(server: Server, data: bytes, *options: str, exchange: str = "web", route: str = "a") -> tuple[int, Any]:
    given = ["-H", f"X-Fq-Exchange: {exchange}", "-H", f"X-Fq-Route: {route}"]
    return curl(server, "/submit", "--data-binary", "@-", *given, *options, data=data)


def counted(**counts: int) -> dict[str, int]:
    return {"routed": 0, "dropped": 0, "no_route": 0, "no_exchange": 0, **counts}


@pytest.mark.parametrize(
    ("options", "sender"),
    [
        ([], b"_web"),
        (["-H", "X-Fq-Sender: me"], b"me"),
        (["-H", "X-Fq-User: me"], b"me"),
        (["-H", "Expect: 100-continue"], b"_web"),
        (["--http1.0"], b"_web"),
    ],
)
def test_submit(server: Server, address: str, options: list[str], sender: bytes) -> None:
    with Client(address, "web") as client:
        client.bind("web", "prefix:a")
        body = b"x" * 100_000
        assert submit(server, body, *options) == (200, counted(routed=1))
        (message,) = client.receive()
        assert (message.route, message.sender, message.payload) == (b"a", sender, body)
        assert message.hops[4:] == b"\x7f\0\0\x01"


def test_submit_waits_for_room_without_the_turn_of_its_user(server: Server, address: str) -> None:
    """The reader is of the same address as those that wait, and another user is busy meanwhile."""
    threads, each = 8, 40
    where, ended = ("127.0.0.1", port(server)), threading.Event()
    with Client(where, "narrow", "mem:public,block,backlog=4") as reader, Client(address, "busy") as busy:
        reader.bind("narrow", "prefix:")

        def publish() -> None:
            connection = http.client.HTTPConnection(*where, timeout=HANG_S)
            with contextlib.closing(connection):
                for _ in range(each):
                    connection.request("POST", "/submit", b"x" * 1_000, {"X-Fq-Exchange": "narrow", "X-Fq-Route": "a"})
                    assert json.load(connection.getresponse()) == counted(routed=1)

        def hurry() -> None:
            while not ended.is_set():
                busy.publish("none", "a", *[b"y"] * 200)
                busy.counts()

        with ThreadPoolExecutor(threads + 1) as pool:
            other, done = pool.submit(hurry), [pool.submit(publish) for _ in range(threads)]
            try:
                assert len(reader.receive(threads * each)) == threads * each
                for one in done:
                    one.result(HANG_S)
            finally:
                ended.set()
            other.result(HANG_S)


@pytest.mark.parametrize("route", ["aé", "a\\x41", "a\\xff", "a\\x80\\xe9", "a日"])
def test_submit_to_a_route_in_utf8(server: Server, address: str, route: str) -> None:
    with Client(address, "web") as client:
        client.bind("web", "prefix:a")
        assert submit(server, b"x", route=route) == (200, counted(routed=1))
        assert client.receive()[0].route == route.encode()


def test_submit_to_a_route_that_is_not_utf8(server: Server, address: str) -> None:
    with Client(address, "web") as client:
        client.bind("web", "prefix:a")
        given = ("-H", "X-Fq-Exchange: web", "-H", b"X-Fq-Route: a\xff")
        assert curl(server, "/submit", "--data-binary", "x", *given) == (200, counted(routed=1))
        assert client.receive()[0].route == b"a\\xff"


def test_submit_to_nobody(server: Server, address: str) -> None:
    with Client(address, "web") as client:
        client.bind("web", "prefix:a")
        assert submit(server, b"x", route="b") == (200, counted(no_route=1))
        assert submit(server, b"x", exchange="nowhere") == (200, counted(no_exchange=1))


def test_submit_to_a_stream_that_discards(server: Server, address: str) -> None:
    with Client(address, "web", with_data=False) as client, server.connect() as tree:
        tree.group("fq/tight", create=True).ctl("depth 1", "full drop-new")
        client.bind("tight", "prefix:a")
        assert submit(server, b"x", exchange="tight") == (200, counted(routed=1))
        assert submit(server, b"x", exchange="tight") == (200, counted(dropped=1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["-H", "X-Fq-Route: a"], "missing exchange"),
        (["-H", "X-Fq-Exchange: e"], "missing route"),
        (["-H", "X-Fq-Exchange: e", "-H", f"X-Fq-Route: {'r' * 128}"], "route too long"),
        (["-H", "X-Fq-Exchange: e", "-H", "X-Fq-Route: r", "-H", f"X-Fq-Sender: {'s' * 128}"], "sender too long"),
        (["-H", "X-Fq-Exchange: e", "-H", "X-Fq-Route: r", "-H", "Transfer-Encoding: chunked"], "no message"),
    ],
)
def test_submit_refused(server: Server, options: list[str], error: str) -> None:
    assert curl(server, "/submit", "--data-binary", "x", *options) == (500, {"error": error})


def test_another_sites_page_may_not_submit(server: Server) -> None:
    assert submit(server, b"x", "-H", "Origin: https://example.org")[0] == 403
    assert curl(server, "/stats.json", "-H", "Host: example.org")[0] == 403


def test_submit_by_put(server: Server, address: str) -> None:
    with Client(address, "put") as client:
        client.bind("put", "prefix:a")
        assert submit(server, b"x", "-X", "PUT", exchange="put") == (200, counted(routed=1))
        assert [message.payload for message in client.receive()] == [b"x"]
        refused = submit(server, b"x", "-X", "PUT", "-H", "Origin: https://example.org", exchange="put")
        assert refused[0] == 403


def test_the_root_leads_to_the_page() -> None:
    """Which is that of HTTP; where there is none it says so."""
    with short_folder() as folder:
        with serve(folder) as server:
            status, body = curl(server, "/")
            assert (status, "--http" in body["error"]) == (404, True)
        with serve(folder, "--http", "tcp!127.0.0.1!0") as server:
            url = f"http://localhost:{port(server)}/"
            done = subprocess.run(["curl", "-sL", "-w", "\n%{url_effective}", url], capture_output=True, timeout=HANG_S)
            page, _, found = done.stdout.decode().rpartition("\n")
            http = re.findall(r"HTTP at tcp!127\.0\.0\.1!(\d+)", server.text())[-1]
            assert found == f"http://localhost:{http}/.web/"
            assert "<!doctype html>" in page.lower()


@pytest.mark.parametrize("path", ["/shutdown", "/index.html", "/web/", "/stats.json/"])
def test_nothing_else_is_there(server: Server, path: str) -> None:
    assert curl(server, path)[0] == 404


def test_stats(server: Server, address: str) -> None:
    with Client(address, "shown", "disk:public,block,backlog=77") as client:
        route = client.bind("shown", 'prefix:"a." sample(1)', 0x0110)
        client.publish("shown", "a.b", b"12345")
        client.publish("shown", "b", b"6")
        client.receive()
        found = eventually(lambda: stats(port(server)))
        shown = found["exchanges"]["shown"]
        assert {key: shown[key] for key in ("messages", "octets", "no_route", "routed", "dropped")} == {
            "messages": 2,
            "octets": 6,
            "no_route": 1,
            "routed": 1,
            "dropped": 0,
        }
        assert shown["routes"][str(route)] == {
            "route_id": route,
            "prefix": "a.",
            "queue": "shown",
            "permanent": True,
            "invocations": 2,
            "avg_ns": 0,
            "program": 'prefix:"a." sample(1)',
        }
        assert found["exchanges"]["_aggregate"].keys() >= {"messages", "no_exchange", "size_dropped"}
        queue = found["queues"]["shown"]
        (one,) = queue.pop("clients")
        del queue["backlog"]  # it may be acked by now
        assert queue == {
            "private": False,
            "type": "disk",
            "policy": "block",
            "backlog_limit": 77,
            "dropped_to": 0,
            "refcnt": 2,
        }
        del one["remote_port"]
        assert one == {
            "user": "tester",
            "remote_addr": "0.0.0.0",
            "mode": "client",
            "no_exchange": "0",
            "no_route": "1",
            "routed": "1",
            "dropped": "0",
            "size_dropped": "0",
            "msgs_in": "2",
            "msgs_out": "1",
            "octets_in": "6",
            "octets_out": "5",
        }


def checkpoint(server: Server, verb: str, *options: str) -> tuple[str, str]:
    status, found = curl(server, f"/{verb}_checkpoint?" + "&".join(options))
    assert status == 200
    return found["status"], found["message"]


@pytest.mark.parametrize("bound", [0, 100])
def test_stats_of_what_waits(server: Server, address: str, bound: int) -> None:
    name = f"waits{bound}"
    with Client(address, name, f"disk:public,permanent,backlog={bound}") as client:
        client.bind(name)
        client.publish(name, "r", b"0")
        client.receive()
        eventually(lambda: stats(port(server))["queues"][name]["backlog"] == 0, "it to be acked")
        client.data.close()
        with Client(address) as other:
            other.publish(name, "r", b"1", b"2")
            eventually(lambda: stats(port(server))["queues"][name]["backlog"] == 2, "two to wait")


def test_checkpoints(server: Server, address: str) -> None:
    with Client(address, "points", "disk:public,permanent") as client:
        client.bind("points")
        number = stats(port(server))["exchanges"]["points"]["group"]
        client.publish("points", "r", *[b"%d" % n for n in range(10)])
        assert len(client.receive(10)) == 10
        eventually(lambda: stats(port(server))["queues"]["points"]["backlog"] == 0, "all to be acked")
        client.publish("points", "r", b"10", b"11")
        assert len(client.receive(2)) == 2
        names = ("qname=points", "cpname=here")
        last = stats(port(server))["exchanges"]["points"]["next"] - 3
        assert checkpoint(server, "add", *names, f"chkptid={number}:{last}") == ("success", "Checkpoint added")
        eventually(lambda: stats(port(server))["queues"]["points"]["backlog"] == 0, "all to be acked")
        back = checkpoint(server, "reset_to", *["qname=points", "cpname=here"])
        assert back == ("success", "'points' reset to checkpoint 'here'")
        assert [message.payload for message in client.receive(2)] == [b"10", b"11"]
        assert checkpoint(server, "remove", *names) == ("success", "Checkpoint removed")
        assert checkpoint(server, "remove", *names) == ("error", "Checkpoint does not exist")


def test_checkpoints_beside_an_exchange_that_was_removed(server: Server, address: str) -> None:
    names = ("qname=remains", "cpname=here")
    with Client(address, "remains", "disk:public,permanent") as client, connect(server.address) as files:
        for exchange in ("removed", "remaining"):
            client.bind(exchange)
        found = stats(port(server))["exchanges"]["remaining"]
        files.remove("fq/removed")
        place = f"chkptid={found['group']}:{found['next'] - 1}"
        assert checkpoint(server, "add", *names, place) == ("success", "Checkpoint added")
        assert checkpoint(server, "reset_to", *names)[0] == "success"
        assert checkpoint(server, "remove", *names) == ("success", "Checkpoint removed")


@pytest.mark.parametrize(
    ("verb", "options", "error"),
    [
        ("add", ["qname=cp-disk", "cpname=fq"], "'fq' is a reserved name, cannot be used for a checkpoint name"),
        ("add", ["qname=no", "cpname=a"], "Cannot find registered queue 'no'"),
        ("add", ["qname=cp-transient", "cpname=a"], "Checkpoints on ephemeral queues not supported"),
        ("add", ["qname=cp-mem", "cpname=a"], "Checkpoints on memory queues not supported"),
        ("add", ["qname=cp-disk", "cpname=a", "chkptid=7"], "'chkptid' must be of format: [0-9]*:[0-9]*"),
        ("add", ["qname=cp-disk", "cpname=a", "chkptid=9:9"], "'chkptid' is out of range of the queue"),
        ("reset_to", ["qname=cp-disk", "cpname=a"], "Checkpoint does not exist"),
        ("remove", ["cpname=a"], "missing qname"),
    ],
)
def test_checkpoints_refused(server: Server, address: str, verb: str, options: list[str], error: str) -> None:
    kinds = {"cp-disk": "disk:public,permanent", "cp-transient": "disk:public", "cp-mem": "mem:public,permanent"}
    clients = [Client(address, name, kind, with_data=False) for name, kind in kinds.items()]
    try:
        for client in clients:
            client.bind("cp")
        assert checkpoint(server, verb, *options) == ("error", error)
    finally:
        for client in clients:
            client.close()


@contextlib.contextmanager
def with_checkpoint(server: Server, address: str, name: str) -> Iterator[tuple[Client, int]]:
    """A client of a permanent queue that has a checkpoint, and the route by which it is bound."""
    with Client(address, name, "disk:public,permanent") as client:
        route = client.bind(name)
        found = stats(port(server))["exchanges"][name]
        place = f"chkptid={found['group']}:{found['next'] - 1}"
        assert checkpoint(server, "add", f"qname={name}", "cpname=here", place) == ("success", "Checkpoint added")
        yield client, route


def test_a_checkpoint_of_a_queue_that_is_made_transient_can_be_removed(server: Server, address: str) -> None:
    names = ("qname=changed", "cpname=here")
    with with_checkpoint(server, address, "changed"), Client(address, "changed", "disk:public,transient"):
        refused = ("error", "Checkpoints on ephemeral queues not supported")
        assert checkpoint(server, "reset_to", *names) == refused
        assert checkpoint(server, "remove", *names) == ("success", "Checkpoint removed")


@pytest.mark.parametrize("how", ["made transient", "unbound", "unbound, made transient", "unbound, after a kill"])
def test_a_queue_that_goes_leaves_nothing(how: str) -> None:
    with short_folder() as folder, serve(folder) as server:
        address = f"{folder}/fq"
        with with_checkpoint(server, address, "goes") as (client, route):
            if "unbound" in how:
                assert client.unbind("goes", route) == route
            if "transient" in how:
                Client(address, "goes", "disk:public,transient").close()
            if "kill" in how:
                server.restart()
        with server.connect() as tree:
            eventually(lambda: not tree.group("fq/goes").consumers(), "consumer and checkpoint to go")
            assert "goes" not in stats(port(server))["queues"]


def test_what_others_made_by_the_name_of_a_queue_stays(server: Server, address: str) -> None:
    with server.connect() as tree:
        group = tree.group("fq/by-name", create=True)
        group.ctl("consumer audit")
        with Client(address, "audit", "mem:public,permanent") as client, Client(address, "next") as other:
            assert client.bind("by-name") == ILLEGAL
            assert other.bind("by-name") != ILLEGAL
        eventually(lambda: stats(port(server))["queues"].keys().isdisjoint(("audit", "next")), "the queues to go")
        assert group.consumers() == ["audit"]
