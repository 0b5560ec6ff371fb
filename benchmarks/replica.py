"""Costs of a replica, beside the engine alone: three machines, each with a nats-server, and an object store. Costs of
`mqfs mount`, beside the server's own mount.

    .venv/bin/python benchmarks/replica.py [--rounds 3] [--seconds 3] [--only NAME]...        needs root

The machines are network namespaces, so three nats-servers, a primary and two standbys share the processors of this
machine. Each figure is beside that of its peer in the same run; below are the processor times of a write in all of
them. `nats-py` publishes one by one to a stream of the cluster, whose records are synced before they count, as those of
the log are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from processes import cpu_s  # noqa: E402

from mqfs.ninep.client.connection import Client, connect  # noqa: E402
from tests.replica.faulty_proxy import FaultyProxy  # noqa: E402
from tests.replica.nodes import Nodes, nodes  # noqa: E402
from tests.support.batches import frame  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.server import COMMAND, Server, mqfs, unmount  # noqa: E402

KIB = b"x" * 1_024
WRITERS = 16
SETTINGS = {"replica": "sync replica", "always": "sync always", "off": "sync off"}


class Rate:
    """Calls of `count` threads for some seconds: calls per second, and the median time of a call."""

    def __init__(self, count: int, call_of: Callable[[int], Callable[[], object]], seconds: float) -> None:
        self.times: list[float] = []
        self._end = threading.Event()
        threads = [threading.Thread(target=self._run, args=(call_of(number),)) for number in range(count)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        self._end.wait(seconds)
        self._end.set()
        for thread in threads:
            thread.join()
        self.seconds = time.perf_counter() - began
        self.rate = len(self.times) / self.seconds
        self.median_ms = statistics.median(self.times) * 1e3
        self.cost = ""

    def _run(self, call: Callable[[], object]) -> None:
        while not self._end.is_set():
            began = time.perf_counter()
            call()
            self.times.append(time.perf_counter() - began)


class Bench:
    """The machines, with a group for each setting in the primary's store; and a server without a replica."""

    def __init__(self, made: Nodes, alone: Server, rounds: int, seconds: float) -> None:
        self.nodes, self.alone, self.rounds, self.seconds = made, alone, rounds, seconds
        self.primary = made.all[0]
        assert made.promote(self.primary), self.primary.text()
        eventually(self._is_served, "a primary")
        for address in (self.primary.address, alone.address):
            make_groups(address, replica=address != alone.address)

    def used(self) -> dict[str, float]:
        """Return the processor time in seconds of all processes, by kind."""
        pids: dict[str, list[subprocess.Popen[bytes] | None]] = {
            "primary": [self.primary.process],
            "standbys": [node.process for node in self.nodes.all[1:]],
            "nats-servers": [node.nats.process for node in self.nodes.all],
            "the other": [self.alone.process],
        }
        found = {name: sum(cpu_s(one.pid) for one in some if one is not None) for name, some in pids.items()}
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return {**found, "client": sum(one.ru_utime + one.ru_stime for one in own)}

    def cost(self, before: dict[str, float], seconds: float, count: float) -> str:
        """Return a line with the processor time per write since `before`, by kind of process."""
        spent = {name: used - before[name] for name, used in self.used().items()}
        parts = ", ".join(f"{name} {used / count * 1e6:,.0f}" for name, used in spent.items() if used > 0)
        return f"us a write: {parts}; {sum(spent.values()) / seconds / len(os.sched_getaffinity(0)):.0%} busy"

    def _is_served(self) -> bool:
        with contextlib.suppress(Exception), connect(self.primary.address, timeout=2):
            return True
        return False

    def ours(self, address: str, group: str, writers: int) -> Rate:
        trees = [connect(address) for _ in range(writers)]
        files = [tree.open(f"{group}/s", "w") for tree in trees]
        before = self.used()
        found = Rate(writers, lambda number: lambda: files[number].write(KIB), self.seconds)
        found.cost = self.cost(before, found.seconds, len(found.times))
        for tree in trees:
            tree.close()
        return found

    def theirs(self, connections: int) -> tuple[float, float, str]:
        """Return rate, median in ms, and costs of nats-py."""
        node, before, began = self.primary, self.used(), time.perf_counter()
        hosts = node.url.partition("://")[2].partition("/")[0]
        peer = node.machine.inside(sys.executable, __file__, "--peer", hosts, "--seconds", str(self.seconds))
        done = subprocess.run([*peer, "--connections", str(connections)], capture_output=True, text=True, check=True)
        rate, median_ms = json.loads(done.stdout)
        return rate, median_ms, self.cost(before, time.perf_counter() - began, rate * self.seconds)

    # ------------------------------------------------------------ aims

    def latency(self) -> None:
        """Measure `sync replica` beside a publish of the engine alone, one at a time."""
        ours, theirs = list[float](), list[float]()
        for _ in range(self.rounds):
            ours.append((own := self.ours(self.primary.address, "replica", 1)).median_ms)
            theirs.append((peer := self.theirs(1))[1])
        mine, other = statistics.median(ours), statistics.median(theirs)
        show(
            "sync replica, p50 over the engine's own",
            f"{mine:.2f} ms, {other:.2f} ms",
            mine - other,
            "<= 1 ms",
            mine - other <= 1,
        )
        show_costs(own.cost, peer[2])

    def writers(self) -> None:
        """Measure 16 writers of 1 KiB, beside nats-py one by one on 16 connections."""
        ours, theirs = list[float](), list[float]()
        for _ in range(self.rounds):
            ours.append((own := self.ours(self.primary.address, "replica", WRITERS)).rate)
            theirs.append((peer := self.theirs(WRITERS))[0])
        mine, other = statistics.median(ours), statistics.median(theirs)
        show("16 writers of 1 KiB", f"{mine:,.0f}/s, {other:,.0f}/s", mine / other, ">= 3", mine >= 3 * other)
        show_costs(own.cost, peer[2])

    def others(self) -> None:
        """Measure groups without `sync replica`, beside a server without a replica."""
        for group in ("always", "off"):
            ours, theirs = list[float](), list[float]()
            for _ in range(self.rounds):
                ours.append((own := self.ours(self.primary.address, group, 4)).rate)
                self.wait_until_copied()
                theirs.append((peer := self.ours(self.alone.address, group, 4)).rate)
            mine, other = statistics.median(ours), statistics.median(theirs)
            show(
                f"sync {group}, with and without",
                f"{mine:,.0f}/s, {other:,.0f}/s",
                mine / other,
                ">= 0.95",
                mine >= 0.95 * other,
            )
            show_costs(own.cost, peer.cost)

    def wait_until_copied(self) -> None:
        with connect(self.primary.address) as tree:
            for group in SETTINGS:
                eventually(lambda group=group: stats(tree, group)["replica_lag_bytes"] == 0, "all copied")  # type: ignore[misc]

    def lag(self) -> None:
        """Measure the lag of a standby at 20 MB/s."""
        with connect(self.primary.address) as tree:
            tree.mkdir("lag")  # nothing is trimmed: the size of its files is that of all writes
            tree.open("lag/ctl", "w").write(b"replay all\nsync off\n")
            tree.create("lag/s").close()
            batch, body = tree.open("lag/.batch", "w"), b"y" * 15_000
            data = b"".join(frame("s", body) for _ in range(8))
            standby = self.nodes.all[1].store
            sent, copied, began = [(0.0, size_of(standby))], list[tuple[float, int]](), time.perf_counter()
            base = sent[0][1]
            while (now := time.perf_counter() - began) < 4 * self.seconds:
                if base + now * 20e6 > sent[-1][1]:
                    batch.write(data)
                    sent.append((now, sent[-1][1] + len(data)))
                else:
                    time.sleep(0.002)
                if not copied or now - copied[-1][0] > 0.02:
                    copied.append((now, size_of(standby)))
        lags = sorted(now - max((at for at, size in sent if size <= had), default=0.0) for now, had in copied)
        rate = (sent[-1][1] - base) / sent[-1][0] / 1e6
        p99 = lags[int(0.99 * (len(lags) - 1))]
        show(f"standby's lag at {rate:.1f} MB/s, p99", f"median {statistics.median(lags):.2f} s", p99, "< 1 s", p99 < 1)


def show(what: str, figures: str, value: float, aim: str, met: bool) -> None:
    print(f"{what:44} {figures:28} {value:8.2f}  {aim:8} {'met' if met else 'MISSED'}", flush=True)


def show_costs(*costs: str) -> None:
    """Print the costs of the last round, of mqfs and of the peer."""
    for cost in costs:
        print(f"    {cost}", flush=True)


def stats(tree: Client, group: str) -> dict[str, float]:
    with tree.open(f"{group}/.stats") as file:
        found: dict[str, float] = json.loads(file.read())
    return found


def size_of(store: Path) -> int:
    return sum(file.stat().st_size for file in store.glob("buckets/*/*/*.log"))


def make_groups(address: str, *, replica: bool) -> None:
    with connect(address) as tree:
        for group, line in SETTINGS.items():
            if replica or group != "replica":
                tree.mkdir(group)
                tree.open(f"{group}/ctl", "w").write(f"replay all\ndepth 64M\n{line}\n".encode())
                tree.create(f"{group}/s").close()


# ------------------------------------------------------------ objects


@contextlib.contextmanager
def bucket() -> Iterator[FaultyProxy]:
    """Run moto's S3 behind a proxy, and yield the proxy, which only counts requests."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="bucket")
    proxy = FaultyProxy(f"{host}:{port}", 1, rate=0.0, slow_s=0.0)
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop()


def objects(folder: Path, seconds: float) -> None:
    """Measure an object store: the lag of its copy, its requests per second, and the speed of a restore."""
    replica = ["--replica", "s3://bucket/shop", "--replica-keep", "1h"]
    with bucket() as proxy, Server.at(folder, *replica, AWS_ENDPOINT=f"http://127.0.0.1:{proxy.port}") as server:
        make_groups(server.address, replica=True)
        with connect(server.address) as tree:
            stream, lags = tree.open("always/s", "w"), list[float]()
            began, before, end = time.monotonic(), proxy.count.total(), time.monotonic() + 3 * seconds
            while time.monotonic() < end:
                stream.write(KIB)
                lags.append(stats(tree, "always")["replica_lag_seconds"])
                time.sleep(0.01)
            requests = (proxy.count.total() - before) / (time.monotonic() - began)
            median, most = f"median {statistics.median(lags):.2f} s", max(lags)
            show("objects: what would be lost, most", median, most, "<= 1 s", most <= 1)
            show("objects: requests a second", "", requests, "<= 2", requests <= 2)
            batch = tree.open("off/.batch", "w")
            tree.open("off/ctl", "w").write(b"depth 0\n")
            for _ in range(2_000):
                batch.write(frame("s", b"z" * 100_000))
            eventually(lambda: stats(tree, "off")["replica_lag_bytes"] == 0, "all copied")
        size, began = size_of(server.store), time.monotonic()
        done = mqfs("restore", "s3://bucket/shop", str(folder / "restored"), cwd=folder)
        assert done.returncode == 0, done.stderr
        rate = size / (time.monotonic() - began) / 1e6
        show("objects: restore, MB/s", f"{size / 1e6:.0f} MB", rate, ">= 100", rate >= 100)
        shutil.rmtree(folder / "restored")


# ------------------------------------------------------------ mounts


def mounts(folder: Path, rounds: int, seconds: float) -> None:
    """Measure `mqfs mount` beside `serve --mount` of the same server: writes of 1 KiB, and reads of retained
    messages."""
    elsewhere, place = folder / "elsewhere", folder / "mount"
    elsewhere.mkdir()
    place.mkdir()
    with Server.at(folder, mount=True) as server:
        try:
            with Server(cwd=place, program=[*COMMAND, "mount", server.address, str(elsewhere)]):
                make_groups(server.address, replica=False)
                paths = elsewhere, server.path
                always, off = ([path / sync / "s" for path in paths] for sync in ("always", "off"))
                compare_mounts("written, sync always", always, os.O_WRONLY, rounds, seconds)
                compare_mounts("written, sync off", off, os.O_WRONLY, rounds, seconds)
                compare_mounts("read", off, os.O_RDONLY, rounds, seconds / 10)
        finally:
            unmount(elsewhere)


def compare_mounts(what: str, paths: Sequence[Path], mode: int, rounds: int, seconds: float) -> None:
    rates: list[list[float]] = [[] for _ in paths]
    for _ in range(rounds):
        for path, found in zip(paths, rates, strict=True):
            file = os.open(path, mode)
            call = partial(os.write, file, KIB) if mode == os.O_WRONLY else partial(os.read, file, 4_096)
            found.append(Rate(1, lambda number, call=call: call, seconds).rate)  # type: ignore[misc]
            os.close(file)
    mine, other = map(statistics.median, rates)
    show(f"a mount elsewhere, {what}", f"{mine:,.0f}/s, {other:,.0f}/s", mine / other, ">= 0.5", mine >= other / 2)


# ------------------------------------------------------------ nats-py


async def publish(hosts: str, connections: int, seconds: float) -> tuple[float, float]:
    import nats
    from nats.js.api import StorageType, StreamConfig

    clients = [await nats.connect([f"nats://{host}" for host in hosts.split(",")]) for _ in range(connections)]
    config = StreamConfig(
        name="bench", subjects=["bench"], storage=StorageType.FILE, num_replicas=3, max_bytes=64 << 20
    )
    await clients[0].jetstream().add_stream(config)
    times: list[float] = []
    began = time.perf_counter()

    async def run(client: nats.NATS) -> None:
        stream = client.jetstream()
        while time.perf_counter() - began < seconds:
            at = time.perf_counter()
            await stream.publish("bench", KIB)
            times.append(time.perf_counter() - at)

    await asyncio.gather(*map(run, clients))
    rate = len(times) / (time.perf_counter() - began)
    for client in clients:
        await client.close()
    return rate, statistics.median(times) * 1e3


@click.command(help=__doc__)
@click.option("--rounds", default=3)
@click.option("--seconds", default=3.0, help="Length of one measurement.")
@click.option("--only", multiple=True, help="latency, writers, others, lag, objects, mounts")
@click.option("--peer", hidden=True)
@click.option("--connections", default=1, hidden=True)
def main(rounds: int, seconds: float, only: tuple[str, ...], peer: str | None, connections: int) -> None:
    if peer is not None:
        print(json.dumps(asyncio.run(publish(peer, connections, seconds))))
        return
    names = only or ("latency", "writers", "others", "lag", "objects", "mounts")
    with tempfile.TemporaryDirectory(prefix="mqfs-") as name:
        folder = Path(name)
        if set(names) - {"objects", "mounts"}:
            (folder / "alone").mkdir()
            (folder / "three").mkdir()
            with nodes(folder / "three", disk="", clocks=False) as made, Server.at(folder / "alone") as alone:
                bench = Bench(made, alone, rounds, seconds)
                for one in names:
                    if one not in ("objects", "mounts"):
                        getattr(bench, one)()
        if "objects" in names:
            (folder / "objects").mkdir()
            objects(folder / "objects", seconds)
        if "mounts" in names:
            (folder / "mounts").mkdir()
            mounts(folder / "mounts", rounds, seconds)


if __name__ == "__main__":
    main()
