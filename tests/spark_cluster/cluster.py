"""Three machines on one: network namespaces for a driver and two workers of a standalone Spark.

Starts and ends the namespaces and the processes in them. The workers do not see the folder `driver_only`: the store,
and the socket of the server, which they reach over TCP, as a user who shows a token.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

from mqfs.ninep.client import connection
from mqfs.ninep.client.connection import Client
from tests.spark.kills import kill, session
from tests.support import ROOT, spark_pythons
from tests.support.eventually import HANG_S
from tests.support.java import SHORT_LIVED, java
from tests.support.machines import Machine, Network, command
from tests.support.server import COMMAND, Server
from tests.support.tokens import SECRET, line_of

TOKEN = SECRET
PORT, MASTER_PORT = 5640, 7077
CORES = 2  # of each worker, for each application
# A worker has room for one executor of the session that lasts, so that both workers have one, and for one of a program.
ROOM, LASTING, PASSING = "1100m", "600m", "480m"


def missing() -> str:
    """The reason why this cannot run here, or ""."""
    if why := java():
        return why
    if os.geteuid():
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"no {program}: apt install {package}"
    try:
        command("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
        Network(3).close()
    except AssertionError as error:
        return f"no namespaces here: {error}"
    return ""


class Cluster:
    """A server, a master and two workers; and programs that are run on them."""

    def __init__(self, folder: Path) -> None:
        import pyspark

        self.folder, self.hidden = folder, folder / "driver_only"
        self.home = Path(cast(str, pyspark.__file__)).parent
        self.hidden.mkdir()
        self.store = self.hidden / "store"
        self.python = spark_pythons.write(folder / "pythons")
        self.token_file = self.hidden / "tokens"
        self.token_file.touch(0o600)
        self.token_file.write_text(line_of("root", TOKEN))
        self._stack = ExitStack()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        network = Network(3)
        self._stack.callback(network.close)
        self.driver, *self.machines = network.machines
        self.address = f"tcp!{self.driver.address}!{PORT}"
        self.local = f"unix!{self.hidden}/9p"
        self.master = f"spark://{self.driver.address}:{MASTER_PORT}"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._spark(self.driver, "master.Master", "--port", str(MASTER_PORT))
        for machine in self.machines:
            self.start_worker(machine)
        self.server = Server(
            "--store", str(self.store), "--listen", self.local, "--listen", self.address, "--insecure",
            "--token-file", str(self.token_file),
            cwd=self.folder, program=self.driver.inside(*COMMAND, "serve"),
        )  # fmt: skip
        self._stack.callback(self.server.stop)
        self.client: Client = self._stack.enter_context(connection.connect(self.local, msize=1 << 20))

    def close(self) -> None:
        self._stack.close()

    # ------------------------------------------------------------ processes

    def environment(self, machine: Machine, **more: str) -> dict[str, str]:
        """The environment of a machine where Spark is installed: nothing of ours but `more`."""
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "JAVA_HOME", "HOME", "LANG")}
        return {
            **kept,
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": machine.address,
            "SPARK_LOCAL_HOSTNAME": machine.address,
            "SPARK_LOCAL_DIRS": str(self.folder / f"local-{machine.name}"),
            "SPARK_DAEMON_MEMORY": "256m",
            "JAVA_TOOL_OPTIONS": SHORT_LIVED,
            **more,
        }

    def start(self, machine: Machine, name: str, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        """A process there, leader of a session that ends with the cluster. Its words are in NAME.log."""
        environment = self.environment(machine, **more.pop("env", {}))
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                machine.inside(*words), cwd=self.folder, env=environment, start_new_session=True, stderr=log,
                **{"stdin": subprocess.DEVNULL, "stdout": log, **more},
            )  # fmt: skip
        self._stack.callback(end, process)
        return process

    def _spark(self, machine: Machine, kind: str, *words: str, wrap: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        program = str(self.home / "bin" / "spark-class")
        words = (program, f"org.apache.spark.deploy.{kind}", "--host", machine.address, "--webui-port", "0", *words)
        return self.start(machine, f"{kind}-{machine.address}", *wrap, *words)

    def start_worker(self, machine: Machine) -> None:
        """It sees an empty folder where the driver's store is."""
        hide = 'mount -t tmpfs none "$0" && exec "$@"'
        self.workers[machine.address] = self._spark(
            machine, "worker.Worker", "--cores", str(2 * CORES), "--memory", ROOM,
            "--work-dir", str(self.folder / f"work-{machine.name}"), self.master,
            wrap=(
                "unshare", "--mount", "--propagation", "slave", "sh", "-c", hide, str(self.hidden),
                *spark_pythons.beside(self.python),
            ),
        )  # fmt: skip

    def kill_worker(self, address: str) -> None:
        """As if the machine had gone: worker, executors and their Pythons."""
        end(self.workers[address])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4_000:]

    # ------------------------------------------------------------ what is in the store

    def group(self, path: str, *lines: str) -> None:
        self.client.mkdir(path)
        with self.client.open(f"{path}/ctl", "w") as file:
            file.write("".join(f"{line}\n" for line in lines or ("replay all", "sync off")).encode())

    def fill(self, path: str, bodies: Sequence[bytes]) -> None:
        self.client.create(path).close()
        with self.client.open(f"{path.rpartition('/')[0]}/.batch", "w") as file:
            name = path.rpartition("/")[2].encode()
            for at in range(0, len(bodies), 1_000):
                file.write(b"".join(frame(name, body) for body in bodies[at : at + 1_000]))

    def bodies(self, path: str) -> list[bytes]:
        """All that a stream keeps, in order."""
        with self.client.open(f"{path.rpartition('/')[0]}/.cursor", "r+") as file:
            file.write(f"select '{path.rpartition('/')[2]}'\nseek first\nuntil end\n".encode())
            return list(iter(lambda: file.receive(1 << 20), b""))

    def parts(self, group: str) -> list[str]:
        """The parts that are staged there."""
        return [name for name in self.client.list(f"{group}/.txn") if name != "ctl"]


def frame(name: bytes, body: bytes) -> bytes:
    size = 8 + len(name) + len(body)
    return size.to_bytes(4, "little") + len(name).to_bytes(2, "little") + bytes(2) + name + body


def end(process: subprocess.Popen[bytes]) -> None:
    """It and all of its session, at once."""
    kill(list(session(process.pid)))
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


class Driver:
    """A program with a Spark session, in the driver's namespace, that does what it is asked: steps.py."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.process = cluster.start(
            cluster.driver, "driver",
            *spark_pythons.beside(cluster.python, sys.executable, str(Path(__file__).with_name("steps.py"))),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={
                "MASTER": cluster.master, "ADDRESS": cluster.driver.address, "MEMORY": LASTING,
                "CORES": str(2 * CORES), "EACH": str(CORES), "FOLDER": str(cluster.folder),
                "PYSPARK_PYTHON": str(cluster.python), "PYTHONPATH": str(ROOT),
            },
        )  # fmt: skip
        self.options = {"address": cluster.address, "token": TOKEN}

    def ask(self, step: str, **said: Any) -> None:
        """Begin a step; `answer` waits for its end."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"step": step, **said}).encode() + b"\n")
        stdin.flush()

    def answer(self) -> Any:
        """What the step found. RuntimeError with what it failed of."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], HANG_S)[0]:
            end(self.process)  # else the next step would wait as well
        line = stdout.readline() if not stdout.closed else b""
        assert line, self.cluster.log("driver")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["found"]

    def do(self, step: str, **said: Any) -> Any:
        self.ask(step, **said)
        return self.answer()


__all__ = ["PASSING", "PORT", "TOKEN", "Cluster", "Driver", "Machine", "end", "missing"]
