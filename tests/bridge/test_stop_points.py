"""A bridge is killed at each call to the disk and to the tree in turn. Another takes over, as if it had not been."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.bridge.exporter import FileWriter, Lifetimes, MultiExporter
from mqfs.bridge.folder import Folder, Origin, Topics
from mqfs.bridge.link import GroupLink
from tests.bridge.rig import Make, Node, Rig
from tests.support.campaign import size, whole
from tests.support.eventually import HANG_S, eventually
from tests.support.server import environment

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(7_200 if whole() else 600)]


class Bridges:
    """Bridges that are killed at a call, one after the other."""

    def __init__(self, r: Rig, *options: str) -> None:
        self.words = ["--poll", "100ms", *options, str(r.folder), r.server.address, r.name]
        self.calls = r.home / f"{r.name}.calls"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bridge.stopping"],
            env=environment(XDG_STATE_HOME=str(r.home / "state")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    @contextlib.contextmanager
    def bridge(self, stop: int, *, pauses: bool = False) -> Iterator[int]:
        """One, by its pid; ended by SIGTERM, unless it was killed."""
        assert self.process.stdin is not None
        order = {"words": self.words, "stop": stop, "calls": str(self.calls), "pauses": pauses}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = self._answer()["pid"]
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            self.status = self._answer()["ended"]

    def count(self) -> int:
        return self.calls.stat().st_size

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(HANG_S) == 0
        self.process.stdout.close()


def state(pid: int) -> str:
    """As in proc(5); Z also for a process that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def is_dead(pid: int) -> bool:
    """Whether it was killed: its parent may not have waited for it yet."""
    return state(pid) == "Z"


def at_each_call(r: Rig, options: str, begin: Callable[[str], Any], is_done: Callable[[str], Any]) -> int:
    """Begin something before each call at which a bridge is killed, and have another finish it; how many calls."""
    bridges = Bridges(r, *options.split())
    with contextlib.closing(bridges):
        begin("0")
        with bridges.bridge(0):
            eventually(lambda: is_done("0"), f"{options} without a kill")
            calls = bridges.count()
        step = 1 if whole() else max(1, calls // size(120))
        for stop in range(1, calls + 1, step):
            begin(str(stop))
            with bridges.bridge(stop) as pid:
                eventually(lambda: is_dead(pid), f"call {stop} of {calls}")
            assert bridges.status == signal.SIGKILL
            with bridges.bridge(0):
                begin(f"{stop}, behind it")
                for body in (f"{stop}, behind it", str(stop)):
                    eventually(lambda: is_done(body), f"{options} after call {stop} of {calls}")  # noqa: B023
            assert bridges.status == 0
    return calls


def times(r: Rig, stream: str, body: str) -> int:
    return r.kept().count((stream, body.encode()))


def heard(node: Node, body: str) -> int:
    return len(node.messages(body=body))


def test_multis_into_the_group(make: Make) -> None:
    r = make()
    node = r.node()
    calls = at_each_call(
        r,
        "--in --no-singles",
        lambda body: node.publish("s", body, ttl=3_600_000),
        lambda body: times(r, "s", body),
    )
    assert calls > 20
    assert all(times(r, "s", body.decode()) == 1 for _, body in r.kept())


def test_multis_out_of_the_group(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    at_each_call(
        r,
        "--out --no-singles",
        lambda body: r.group.publish("s", body, ttl="1h"),
        lambda body: heard(node, body),
    )
    assert all(heard(node, event["body"]) == 1 for event in node.messages())
    assert not [file for file in r.files() if file.startswith("staging")]


def test_singles_into_the_group(make: Make) -> None:
    r = make()
    node = r.node()
    handled: list[str] = []
    with r.group.work("workers", lambda claim: handled.append(claim.body.decode())):
        at_each_call(
            r,
            "--in",
            lambda body: node.publish("s", body, ttl=3_600_000, single=True),
            lambda body: body in handled and not [file for file in r.files() if "+s+" in file],
        )
    assert len(handled) == len(set(handled))


def test_singles_out_of_the_group(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    at_each_call(
        r,
        "--out",
        lambda body: r.group.publish("s", body, ttl="1h", single=True),
        lambda body: heard(node, body) and not [file for file in r.files() if "+s+" in file],
    )
    again = {body for body in (event["body"] for event in node.messages()) if heard(node, body) > 1}
    assert len(again) <= 3  # calls between a job and its acknowledgement, and a worker of the folder was faster


def test_the_position_moves_when_the_files_are_on_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    r = make()
    (r.folder / "messages" / "0").mkdir(parents=True)
    for number in range(3):
        r.group.publish("s", str(number), ttl="1h")
    link = GroupLink(r.server.address, r.name, user="", token="", stopping=threading.Event())
    lifetimes = Lifetimes(multi_ms=1_000, single_ms=1_000)
    writer = FileWriter(Folder(str(r.folder)), link, Topics(), Origin("a store", 1), lifetimes)
    exporter = MultiExporter(link, writer, "fsq", lambda stream: True, 0.1)
    lows: list[int] = []
    fsync = os.fsync

    def low() -> int:
        return int(r.group.stats().consumers["fsq"].low)

    def note(file: int) -> None:
        fsync(file)
        lows.append(low())

    with contextlib.closing(link), contextlib.closing(exporter._open()) as position:
        before = low()
        monkeypatch.setattr(os, "fsync", note)
        with contextlib.closing(exporter._follow()) as messages:
            exporter._export(messages, position)
        monkeypatch.undo()
        assert lows == 4 * [before], "of three files and their directory"
        assert low() == before + 3
