"""Engines, started once a module."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs import limits
from tests.replica.faulty_proxy import FaultyProxy
from tests.replica.primary import LocalStandby
from tests.replica.servers import NatsServer, nats_servers
from tests.support import ROOT
from tests.support.campaign import seed


@pytest.fixture(autouse=True)
def _closed_logs() -> Iterator[None]:
    """The connection of a log that stays open is made again and again, into the tests that follow."""
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "jetstream"]


@pytest.fixture(autouse=True)
def _environment_kept() -> Iterator[None]:
    """A program that the next test starts may do something else where it finds the key of a bucket."""
    before = environment()
    yield
    assert environment() == before


def environment() -> dict[str, str]:
    """Without what pytest changes in it."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_servers(tmp_path_factory.mktemp("nats"), 1) as servers:
        yield servers[0]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[NatsServer]:
    """One for a test that stops or breaks it."""
    with nats_servers(tmp_path / "nats", 1) as servers:
        yield servers[0]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    with nats_servers(tmp_path_factory.mktemp("cluster"), 3) as servers:
        yield servers


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of moto's S3, which has a bucket."""
    words = [sys.executable, "-m", "tests.replica.moto_s3"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, which the environment points to."""
    known = {"AWS_ENDPOINT": moto, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    for name, value in {**known, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    return moto


@pytest.fixture
def faulty_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The same through a proxy that refuses, delays and loses; tests wait for no pauses between requests."""
    for name, value in (("REPLICA_OBJECT_S", 0.02), ("REPLICA_CALL_S", 1.0), ("REPLICA_RETRY_S", 0.2)):
        monkeypatch.setattr(limits, name, value)
    proxy = FaultyProxy(s3.removeprefix("http://"), seed(), rate=0.1, slow_s=1.5)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()
    print(dict(proxy.count))


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new log on each engine: parametrized with its name."""
    name = f"{tmp_path.parent.name}-{tmp_path.name}".replace("_", "-")[-60:]
    if request.param == "file":
        return f"file://{tmp_path}/replica"
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{name}"
    if request.param == "faulty s3":
        request.getfixturevalue("faulty_s3")
        return f"s3://bucket/{name}"
    if request.param == "nats":
        server: NatsServer = request.getfixturevalue("nats_server")
        return f"nats://127.0.0.1:{server.port}/{name}"
    servers: list[NatsServer] = request.getfixturevalue("cluster")
    return f"nats://{','.join(f'127.0.0.1:{server.port}' for server in servers)}/{name}"


@pytest.fixture
def standbys() -> Iterator[list[LocalStandby]]:
    found: list[LocalStandby] = []
    yield found
    for standby in found:
        standby.stop()
