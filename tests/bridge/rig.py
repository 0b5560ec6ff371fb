"""A server, a folder of qlobber-fsq, processes of Node over it, and bridges between the two."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mqfs.bridge.folder import Folder
from mqfs.client import Client, Group
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Server, environment, short_folder, start

PACKAGES = ROOT / ".cache" / "bridge-tests" / "node_modules"
PROGRAM = Path(__file__).parent / "node" / "fsq.js"
Event = dict[str, Any]


class Node:
    """A process of qlobber-fsq. `events`: all that it said."""

    def __init__(self, folder: Path, *, before: Sequence[str] = (), **options: Any) -> None:
        """`before`: words of a command that runs it."""
        self._before = before
        self.options = {"fsq_dir": str(folder), "poll_interval": 200, **options}
        self.events: list[Event] = []
        self._by_type: defaultdict[str, list[Event]] = defaultdict(list)
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [*self._before, "node", str(PROGRAM), json.dumps(self.options)],
            env=environment(PACKAGES=str(PACKAGES)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._thread.start()
        before = len(self.of("start"))
        eventually(lambda: len(self.of("start")) > before or self.process.poll() is not None, "node")
        assert self.process.poll() is None, "node ended"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):  # the last one of a process that was killed may be cut
                with contextlib.suppress(json.JSONDecodeError):
                    event = {**json.loads(line), "life": process.pid}
                    self.events.append(event)
                    self._by_type[event["type"]].append(event)

    def tell(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def of(self, type: str, first: int = 0) -> list[Event]:
        """The events of that type, from number `first` on."""
        return self._by_type[type][first:]

    def publish(self, topic: str, body: str | None = None, **more: Any) -> str:
        """The name of the file."""
        before = len(self.of("published"))
        self.tell("publish", topic=topic, **({} if body is None else {"body": body}), **more)
        event = eventually(lambda: self.of("published")[before:], "the publish")[0]
        assert not event["error"], event
        return str(event["fname"])

    def subscribe(self, **more: Any) -> None:
        before = len(self.of("subscribed"))
        self.tell("subscribe", **more)
        eventually(lambda: len(self.of("subscribed")) > before, "the subscription")

    def messages(self, **like: Any) -> list[Event]:
        return [event for event in self.of("message") if like.items() <= event.items()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        self._thread.join(HANG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def restart(self) -> None:
        self.kill()
        self._start()


class Bridge:
    """`mqfs bridge fsq`, running. What it prints is in `log`."""

    def __init__(self, rig: Rig, *options: str, before: Sequence[str] = (), stop_s: float = 0.0) -> None:
        """`before`: words of a command that runs it. `stop_s`: it has no longer to end."""
        self.log = rig.home / f"bridge-{rig.name}-{len(rig.bridges)}.log"
        hasty = f"from mqfs import limits; limits.BRIDGE_STOP_S = {stop_s}; from mqfs.cli.main import main; main()"
        program = [sys.executable, "-c", hasty] if stop_s else COMMAND
        command = [*before, *program, "bridge", "fsq", *options]
        self._words = [*command, str(rig.folder), rig.server.address, rig.name]
        self._environment = environment(XDG_STATE_HOME=str(rig.home / "state"))
        self.start()
        rig.bridges.append(self)

    def start(self) -> None:
        with open(self.log, "ab") as log:
            settings: Any = {"env": self._environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            kind = start if self._words[: len(COMMAND)] == COMMAND else subprocess.Popen
            self.process = kind(self._words, cwd=ROOT, **settings)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(HANG_S)

    def restart(self) -> None:
        self.stop(signal.SIGKILL)
        self.start()


class Rig:
    """`folder`: of qlobber-fsq; `group`: of that name. Their server may serve others beside."""

    def __init__(self, server: Server, name: str, *ctl: str) -> None:
        self.server, self.name = server, name
        self.home, self.folder = server.folder, server.folder / f"fsq-{name}"
        self.nodes: list[Node] = []
        self.bridges: list[Bridge] = []
        self.client: Client = server.connect()
        self.group: Group = self.client.group(name, create=True, ctl=("dedup 10m", "replay all", *ctl))

    def node(self, **options: Any) -> Node:
        self.nodes.append(Node(self.folder, **options))
        return self.nodes[-1]

    def bridge(self, *options: str, **more: Any) -> Bridge:
        return Bridge(self, "--poll", "200ms", *options, **more)

    def put(self, name: str, data: bytes, *, late_s: float = 0.0) -> Path:
        """A file in the bucket of its name, as if it was written so much later."""
        folder = Folder(str(self.folder))
        staged, path = self.folder / "staging" / name, Path(f"{folder.path}/messages/{folder.bucket_of(name)}/{name}")
        staged.write_bytes(data)
        os.utime(staged, (time.time() + late_s,) * 2)
        staged.rename(path)
        return path

    def kept(self, group: Group | None = None) -> list[tuple[str, bytes]]:
        """(stream, body) of all messages that are kept."""
        with (group or self.group).history() as messages:
            return [(message.stream, message.body) for message in messages]

    def files(self) -> list[str]:
        """The paths of all files: of messages, of topics, and of those being written."""
        folders = ("messages", "topics", "staging")
        return [str(p.relative_to(self.folder)) for f in folders for p in (self.folder / f).rglob("*") if p.is_file()]

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        try:
            for bridge in self.bridges:
                if bridge.process.poll() is None:
                    bridge.stop()
                assert "Traceback" not in bridge.text(), bridge.text()
        finally:
            for bridge in self.bridges:
                bridge.process.kill()
                bridge.process.wait()
            self.client.close()


Make = Callable[..., Rig]  # of the fixture `make`
numbers = itertools.count()  # so that names are used once


@contextlib.contextmanager
def rig(*ctl: str) -> Iterator[Rig]:
    """One with a server of its own."""
    with short_folder() as home, Server.at(home) as server, contextlib.closing(Rig(server, "g", *ctl)) as made:
        yield made


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
