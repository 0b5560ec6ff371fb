"""Three machines, each with a nats-server and a mqfs server that are started again whenever they end, as systemd does.

root     clients, by the unix sockets of the servers: a cut between machines is none between client and server
a b c    10.77.0.1 to .3: nats-server at 4222, routes at 6222; mqfs serve --standby, at 5640
disk     of each machine a tmpfs of its own, which can be full
clock    of each mqfs server the machine's and an error, which can change while it runs
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.replica.servers import NatsServer
from tests.ring.memory.build import compiler
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.machines import Machine, Network, command, network
from tests.support.server import COMMAND, environment

NATS, ROUTES, NINEP = 4222, 6222, 5640
EXPECTED_ENDS = {0, 75, -signal.SIGKILL}  # stopped, fenced, killed
SAYS_WHY = ("not reachable", "not usable", "no answer", "no room on the disk", "Input/output error")  # an end with 1


class ClusterNode:
    """One machine and its two servers."""

    def __init__(
        self, folder: Path, engine: Path, machine: Machine, url: str, options: Sequence[str], machines: int
    ) -> None:
        """`engine`: where its nats-server has its data."""
        self.folder, self.machine, self.options = folder, machine, options
        self.address = f"unix!{folder}/socket"
        self.log = folder.with_suffix(".log")
        self.url = url
        peers = [f"10.77.0.{number + 1}:{ROUTES}" for number in range(machines)]
        self.nats = NatsServer(
            engine / "nats", machine.name, NATS, 8222, ROUTES, peers, host=machine.address, inside=machine.inside()
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.runs = 0  # of its mqfs
        self.faults: list[str] = []  # ends that no one expects
        self._held = {"mqfs": False, "nats": False}
        self._lock = threading.RLock()
        clock = folder.with_suffix(".clock")
        clock.write_bytes(bytes(8))
        with open(clock, "r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 8)
        preload = folder.parent / "wrong_clock.so"
        self._more = {"MQFS_WRONG_CLOCK": str(clock), "LD_PRELOAD": str(preload)} if preload.exists() else {}

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # ------------------------------------------------------------ processes

    def look(self) -> None:
        """Start what has ended."""
        with self._lock:
            if self.nats.process is not None and self.nats.process.poll() is not None:
                self.nats.process = None
            if self.nats.process is None and not self._held["nats"]:
                self.nats.start()
            if self.process is not None and (code := self.process.poll()) is not None:
                self._note_end(code)
                self.process = None
            if self.process is None and not self._held["mqfs"]:
                try:
                    self._start()
                except OSError as error:
                    if error.errno != errno.EIO:  # its disk has no power now
                        raise

    def _start(self) -> None:
        where = ["--listen", self.address, "--listen", f"tcp!{self.machine.address}!{NINEP}", "--insecure"]
        replica = ["--replica", self.url, "--standby", *self.options]
        serve = [*COMMAND, "serve", "--store", str(self.store), *where, *replica]
        self.runs += 1
        (self.store / "promote").unlink(missing_ok=True)  # of a run that was killed
        for aside in self.store.glob("quarantine/fenced-*"):  # as a person does, whose disk it fills
            shutil.rmtree(aside)
        with open(self.log, "ab") as log:
            log.write(f"--- run {self.runs}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self.machine.inside(*serve), env=environment(**self._more), cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    def _note_end(self, code: int) -> None:
        last = self.text().rpartition("--- run ")[2].strip().splitlines()[-3:]
        if code in EXPECTED_ENDS or (code == 1 and any(why in last[-1] for why in SAYS_WHY)):
            return
        self.faults.append(f"{self.folder.name}: ended with {code}: {' / '.join(last)}")

    def signal(self, which: str, number: int) -> None:
        """To its `mqfs` or `nats`."""
        with self._lock:
            process = self.process if which == "mqfs" else self.nats.process
            if process is not None:
                process.send_signal(number)
                if number == signal.SIGKILL:
                    process.wait()

    def hold(self, which: str) -> None:
        """It is killed, and not started again."""
        with self._lock:
            self._held[which] = True
            self.signal(which, signal.SIGKILL)

    @contextlib.contextmanager
    def without(self, *which: str) -> Iterator[None]:
        """They are killed, and not started again before the end."""
        for one in which:
            self.hold(one)
        yield
        for one in which:
            self._held[one] = False

    def is_healthy(self) -> bool:
        """Whether its nats-server has all that the others have."""
        ask = ["curl", "-sf", "-m", "2", f"http://{self.machine.address}:{self.nats.monitor}/healthz"]
        return subprocess.run(self.machine.inside(*ask), capture_output=True, check=False).returncode == 0

    def engine_leader(self) -> str:
        """The name of the machine whose nats-server leads the stream of the log, as this one has heard; "": none."""
        ask = ["curl", "-sf", "-m", "2", f"http://{self.machine.address}:{self.nats.monitor}/jsz?streams=1&accounts=1"]
        done = subprocess.run(self.machine.inside(*ask), capture_output=True, check=False)
        accounts = json.loads(done.stdout).get("account_details", []) if done.returncode == 0 else []
        streams = [stream for account in accounts for stream in account.get("stream_detail", [])]
        found = (one["cluster"].get("leader", "") for one in streams if one["name"] == "mqfs-shop")
        return next(found, "")

    def engine_state(self) -> str:
        """Health, streams and last lines of its nats-server."""
        found = list[str]()
        for path in ("healthz", "jsz?streams=1&raft=1&accounts=1"):
            ask = ["curl", "-s", "-m", "2", f"http://{self.machine.address}:{self.nats.monitor}/{path}"]
            done = subprocess.run(self.machine.inside(*ask), capture_output=True, check=False)
            found.append(f"{path}: {done.stdout.decode(errors='replace')}")
        log = self.nats.folder / "log"
        return "\n".join([*found, log.read_text(errors="replace")[-6_000:] if log.exists() else "no log"])

    def wipe_nats(self) -> None:
        """Its nats-server comes back with an empty disk."""
        with self.without("nats"):
            shutil.rmtree(self.nats.folder)

    def end(self) -> int:
        """Stop the mqfs server in order; its exit code."""
        with self._lock:
            self._held["mqfs"] = True
            process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(signal.SIGTERM)
        return process.wait(HANG_S)

    def kill(self) -> None:
        with self._lock:
            self._held = {"mqfs": True, "nats": True}
            for process in (self.process, self.nats.process):
                if process is not None:
                    process.kill()
                    process.wait()

    # ------------------------------------------------------------ faults of the machine

    def set_clock(self, wrong_s: float) -> None:
        """Its wall clock is wrong by that from now on."""
        self._clock[:] = struct.pack("<q", int(wrong_s * 1e9))

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        room = os.statvfs(self.folder)
        eventually(lambda: self._resize(used(self.folder)), "a full disk")  # it is written to meanwhile
        try:
            yield
        finally:
            self._resize(room.f_blocks * room.f_frsize)

    def _resize(self, size: int) -> bool:
        done = subprocess.run(["mount", "-o", f"remount,size={size}", self.folder], capture_output=True, check=False)
        return done.returncode == 0


def used(at: Path) -> int:
    """Bytes of its file system that are not free."""
    room = os.statvfs(at)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


class Nodes:
    """All of them, and the thread that starts again what has ended."""

    def __init__(self, wires: Network, made: Sequence[ClusterNode], servers: int) -> None:
        """`servers`: how many of them have a mqfs, the first ones."""
        self.network, self.all, self.servers = wires, made, made[:servers]
        for node in made[servers:]:
            node.hold("mqfs")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(0.1):
            for node in self.all:
                node.look()

    def promote(self, node: ClusterNode) -> bool:
        """Have it take over once it follows; whether it did."""
        eventually((node.store / "promote").exists, f"a standby: {node.text()}")
        run = [*COMMAND, "promote", str(node.store)]
        return subprocess.run(run, env=environment(), capture_output=True, check=False).returncode == 0

    def engine_leader(self) -> ClusterNode | None:
        """The one whose nats-server leads the log."""
        name = next(filter(None, (node.engine_leader() for node in self.all)), "")
        return next((node for node in self.all if node.machine.name == name), None)

    def faults(self) -> list[str]:
        return [fault for node in self.all for fault in node.faults]

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for node in self.all:
            node.kill()


def make_disk(at: Path, size: str) -> Path:
    at.mkdir(exist_ok=True)
    if size:
        command("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at))
    return at


@contextlib.contextmanager
def nodes(
    folder: Path,
    *options: str,
    disk: str = "256m",
    clocks: bool = True,
    engines: Path | None = None,
    interval: str = "always",
    servers: int = 3,
) -> Iterator[Nodes]:
    """Three machines below that folder. `disk`: how large that of each is; "": the folder's own. `clocks`: whether they
    can be wrong, which costs a call of the system each. `engines`: where the data of the nats-servers is, if elsewhere,
    and `interval` that between two syncs of it. `servers`: how many have a mqfs."""
    if clocks:
        compiler("-O2", "-shared", "-fPIC", ROOT / "tests/replica/wrong_clock.c", "-o", folder / "wrong_clock.so")
    with contextlib.ExitStack() as stack:
        if disk:
            stack.callback(remove_disks, folder)
        wires = stack.enter_context(network(3))
        hosts, found = ",".join(f"{machine.address}:{NATS}" for machine in wires.machines), list[ClusterNode]()
        for letter, machine in zip("abc", wires.machines, strict=True):
            at, engine = make_disk(folder / letter, disk), (engines or folder) / letter
            node = ClusterNode(at, engine, machine, f"nats://{hosts}/shop", options, len(wires.machines))
            node.nats.interval = interval
            found.append(node)
        made = Nodes(wires, found, servers)
        stack.callback(made.close)
        yield made


def remove_disks(folder: Path) -> None:
    for at in folder.iterdir():
        if at.is_dir() and os.path.ismount(at):
            command("umount", "-l", str(at))
