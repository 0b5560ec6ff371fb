"""Real engines as processes: one nats-server or a cluster of three, and moto's S3."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tests.support.eventually import eventually
from tests.support.ports import free_port

NATS_SERVER = str(Path(sys.executable).with_name("nats-server"))


@attrs.define
class NatsServer:
    """One nats-server with JetStream. `peers`: the cluster addresses of all, where it is in a cluster. `inside`: the
    words before its command, on a machine of its own."""

    folder: Path
    name: str = "n1"
    port: int = attrs.field(factory=free_port)
    monitor: int = attrs.field(factory=free_port)
    cluster: int = 0
    peers: Sequence[str] = ()
    more: str = ""
    host: str = "127.0.0.1"
    interval: str = "always"  # between two syncs of its disk
    inside: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"server_name: {self.name}", f"listen: {self.host}:{self.port}", f"http: {self.host}:{self.monitor}",
            f'jetstream {{ store_dir: "{self.folder}", sync_interval: "{self.interval}" }}',
        ]  # fmt: skip
        lines.append(self.more)
        if self.peers:
            routes = ", ".join(f"nats://{peer}" for peer in self.peers)
            lines.append(f"cluster {{ name: c, listen: {self.host}:{self.cluster}, routes: [{routes}] }}")
        config = self.folder / "server.conf"
        config.write_text("\n".join(lines))
        with open(self.folder / "log", "ab") as log:
            command = [*self.inside, NATS_SERVER, "-c", str(config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait(self) -> None:
        assert eventually(self.is_healthy), (self.folder / "log").read_text()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def nats_servers(folder: Path, count: int) -> Iterator[list[NatsServer]]:
    ports = [free_port() for _ in range(count)]
    peers = [f"127.0.0.1:{port}" for port in ports] if count > 1 else []
    servers = [NatsServer(folder / f"n{n}", f"n{n}", cluster=port, peers=peers) for n, port in enumerate(ports)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


def url_of(servers: Sequence[NatsServer], name: str) -> str:
    return f"nats://{','.join(f'127.0.0.1:{server.port}' for server in servers)}/{name}"
