"""One Spark for all tests here, on two threads of this machine; and a server for each test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.ninep import blocking
from mqfs.ninep.blocking import Client
from tests.patience import HANG_S, patient
from tests.server.process import ROOT, Running, serving


def java() -> str:
    """Why there is no Java, or ""."""
    program = shutil.which("java", path=f"{os.environ.get('JAVA_HOME', '')}/bin:{os.environ.get('PATH', '')}")
    if program is None:
        return "no java: apt install default-jre-headless"
    done = subprocess.run([program, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else f"{program} does not run: {done.stderr}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/spark/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))  # Spark's own
            item.add_marker(pytest.mark.timeout(patient(4 * HANG_S)))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Found as an installed package would be: by its name, among the modules of the workers' Python."""
    if why := java():
        pytest.skip(why)
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session = (
        SparkSession.builder.master("local[2,2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.sql.streaming.metricsEnabled", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()
        gateway = session.sparkContext._gateway
        if gateway is not None and hasattr(gateway, "proc"):
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(patient(HANG_S))


class Scene:
    """A server that keeps a store, and a client of it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.store = folder / "store"
        self.address = f"unix!{folder}/9p"
        self._serving: Any = None
        self._client: Client | None = None
        self.start()

    def start(self) -> Running:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._serving = serving("--store", str(self.store), "--listen", self.address, *self.options, cwd=self.folder)
        self.server: Running = self._serving.__enter__()
        return self.server

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._serving.__exit__(None, None, None)

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = blocking.connect(self.address, msize=1 << 20)
        return self._client

    def group(self, path: str, *lines: str) -> None:
        self.client.mkdir(path)
        self.ctl(path, *(lines or ("replay all", "sync off")))

    def ctl(self, path: str, *lines: str) -> None:
        with self.client.open(f"{path}/ctl", "w") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    def write(self, path: str, *bodies: bytes) -> None:
        with self.client.open(path, "w") as file:
            for body in bodies:
                file.write(body)

    def stream(self, path: str, *bodies: bytes) -> None:
        """Make one, and write to it."""
        self.client.create(path).close()
        self.write(path, *bodies)

    def put(self, group: str, head: str, body: bytes) -> None:
        with self.client.open(f"{group}/.put", "w") as file:
            file.write(head.encode() + b" " + body)

    def stats(self, group: str) -> Any:
        with self.client.open(f"{group}/.stats") as file:
            return json.loads(b"".join(iter(lambda: file.receive(1 << 20), b"")))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.stop()
