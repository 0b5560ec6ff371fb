"""Clients with the addresses of both servers continue after a takeover, as after a restart."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import attrs
import pytest
from kombu import Connection

import mqfs as library
import mqfs.kombu as transport
from mqfs import errors
from mqfs.client import Client, aio
from mqfs.ninep.client import connection, dial
from pyspark_mqfs.connection import Server as SparkServer
from tests.replica.test_servers import Node
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.ports import free_port
from tests.support.server import COMMAND, Server, mqfs, short_folder, unmount
from tests.support.tokens import SECRET, line_of

pytestmark = [pytest.mark.process, pytest.mark.slow]
ME = pwd.getpwuid(os.geteuid()).pw_name
CTL = ["replay all", "sync replica"]


@attrs.define
class Pair:
    """A primary and its standby, over TCP and TLS, with a token."""

    folder: Path
    authority: Authority
    nodes: list[Node]
    tls: str

    @property
    def tcp(self) -> str:
        return ",".join(node.arguments[node.arguments.index("--listen", 3) + 1] for node in self.nodes)

    @property
    def unix(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def take_over(self, end: int = signal.SIGKILL) -> None:
        """The primary is killed, or stands still; its standby serves."""
        if end == signal.SIGSTOP:
            self.nodes[0].process.send_signal(end)
        else:
            self.nodes[0].kill()
        eventually(self.nodes[1].is_primary)

    def connect(self, address: str = "", **options: object) -> Client:
        return library.connect(address or self.tcp, transport="9p", timeout=HANG_S, **options)  # type: ignore[arg-type]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    authority = Authority(tmp_path)
    monkeypatch.setenv("MQFS_CA", str(authority.path))
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(line_of(ME, SECRET))
    with ExitStack() as stack:
        folders = [stack.enter_context(short_folder()) for _ in range(3)]
        url, tls = f"file://{folders[2]}/log", [f"tls!127.0.0.1!{free_port()}" for _ in range(2)]
        nodes = [
            stack.enter_context(
                Node.of(
                    folder, url, "--listen", address, "--tls-cert", str(authority.of_server()), "--token-file",
                    str(tokens), "--tcp-user", ME, "--failover", "2s", *more,
                )
            )
            for folder, address, more in zip(folders, tls, ([], ["--standby"]), strict=False)
        ]  # fmt: skip
        yield Pair(folders[2], authority, nodes, ",".join(tls))
        nodes[0].process.send_signal(signal.SIGCONT)


@pytest.fixture(params=[signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stands still"])
def end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How the primary ends."""
    monkeypatch.setattr(dial, "SILENT_S", patient(3.0))
    monkeypatch.setattr(dial, "LOOK_S", patient(1.0))
    return int(request.param)


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_the_library_goes_on(pair: Pair, end: int, way: str) -> None:
    """Publishers, workers, followers and handlers; a claim of the dead server is stale, and its message comes again."""
    handled, followed = list[bytes](), list[bytes]()
    with ThreadPoolExecutor(2) as threads, pair.connect(getattr(pair, way)) as client:
        group = client.group("g", create=True, ctl=CTL)
        group.publish("s", b"1")
        group.on("s", lambda message: handled.append(message.body), existing=True)
        messages = group.subscribe("s", existing=True)
        threads.submit(lambda: followed.extend(message.body for message in messages))
        claims = group.consume("work", over="s")
        claim = claims.get(HANG_S)
        eventually(lambda: handled == followed == [b"1"])
        pair.take_over(end)
        with pytest.raises((errors.Stale, errors.Disconnected)):
            claim.ack()
        again = claims.get(HANG_S)
        assert (again.body, again.sequence) == (b"1", claim.sequence)
        again.ack()
        try:
            group.publish("s", b"2", id="two")
        except errors.Disconnected:  # the outcome is unknown
            group.publish("s", b"2", id="two")
        eventually(lambda: handled == followed == [b"1", b"2"])
        assert claims.get(HANG_S).body == b"2"
        messages.close()


def test_async_programs_go_on(pair: Pair, end: int) -> None:
    async def run() -> list[bytes]:
        async with aio.connect(pair.tcp, timeout=HANG_S) as client:
            group = await client.group("g", create=True, ctl=CTL)
            await group.publish("s", b"1")
            claims = await group.consume("work", over="s")
            first = await claims.get(HANG_S)
            await first.ack()
            waiting = asyncio.ensure_future(claims.get(HANG_S))
            await asyncio.to_thread(pair.take_over, end)
            try:
                await group.publish("s", b"2", id="two")
            except errors.Disconnected:
                await group.publish("s", b"2", id="two")
            return [first.body, (await waiting).body]

    assert asyncio.run(run()) == [b"1", b"2"]


def test_kombu_goes_on_with_the_other_url(pair: Pair) -> None:
    ports = [address.rpartition("!")[2] for address in pair.tcp.split(",")]
    with Connection(";".join(f"mqfs://127.0.0.1:{port}/jobs" for port in ports)) as broker:
        queue = broker.SimpleQueue("q")
        with pair.connect() as client:  # else what is new may be lost with the primary
            client.group("jobs/queues").ctl("sync replica")
        queue.put("1")
        message = queue.get(timeout=HANG_S)
        assert message.payload == "1"
        message.ack()
        pair.take_over()
        broker.Producer().publish("2", routing_key="q", retry=True)
        again, got = broker.SimpleQueue("q"), ""
        while got != "2":  # the ack of the first one may not have been in the log
            message = again.get(timeout=HANG_S)
            got = message.payload
            message.ack()
    assert transport.__name__ in str(type(broker.transport))


def test_a_spark_link_goes_on(pair: Pair) -> None:
    """Readers and writers of Spark do all by such links; `path` is for one server only."""
    with SparkServer(pair.tcp).link() as link:
        before = link.with_retry(lambda client: client.where)
        pair.take_over()
        assert link.with_retry(lambda client: (client.list(""), client.where)[1]) != before


def test_a_mount_over_tls_with_a_token_goes_on(pair: Pair) -> None:
    path, token = pair.folder / "mount", pair.folder / "token"
    path.mkdir()
    token.touch(0o600)
    token.write_text(SECRET)
    words = [*COMMAND, "mount", pair.tls, str(path), "--token-file", str(token)]
    guard = threading.Timer(HANG_S, unmount, [path])
    guard.start()
    try:
        with Server(cwd=pair.folder, program=words), ThreadPoolExecutor(2) as threads:
            group = path / "g"
            group.mkdir()
            (group / "ctl").write_text("".join(f"{line}\n" for line in CTL))
            (group / "s").write_bytes(b"1")
            (group / ".consumers" / "work").touch()
            with (
                open(group / "s", "rb", buffering=0) as reader,
                open(group / ".consumers" / "work", "r+b", buffering=0) as worker,
            ):
                assert reader.read(64) == worker.read(64) == b"1"
                answer = threads.submit(reader.read, 64)
                pair.nodes[0].kill()
                written = threads.submit((group / "s").write_bytes, b"2")
                assert (answer.result(HANG_S), written.result(HANG_S)) == (b"2", 1)
                with pytest.raises(OSError, match="Stale"):
                    worker.write(b"ack\n")
                assert b"claim of a server that ended" in worker.read(4096)
                assert worker.read(64) == b"1", "delivered again"
                worker.write(b"ack\n")
            assert (group / ".kept" / "s").read_bytes() == b"12"
            listed = subprocess.run(["ls", "-alR", str(path)], capture_output=True, check=True, timeout=HANG_S)
            assert b"work" in listed.stdout
    finally:
        guard.cancel()
        unmount(path)


def test_a_standby_alone_says_who_serves(pair: Pair) -> None:
    standby = pair.nodes[1]
    address = standby.arguments[standby.arguments.index("--listen", 3) + 1]
    eventually(lambda: "the primary is tcp!" in standby.get("/.ready")[1])
    with pytest.raises(errors.Standby, match="the primary is tcp!"):
        connection.connect(address, timeout=HANG_S)
    done = mqfs("mount", address, "nowhere", cwd=pair.folder)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
