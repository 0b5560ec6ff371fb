"""The examples of the Python library, against a real server on a unix socket; the last one against none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqfs
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import Server, environment, short_folder


@pytest.fixture(scope="module")
def away() -> Iterator[Server]:
    with short_folder() as folder:
        server = Server.at(folder)
        try:
            yield server
        finally:
            server.close()


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=True)


def test_pubsub(away: Server) -> None:
    said = run("pubsub.py", away.address, "house").stdout.splitlines()
    assert said == [
        "everything: kitchen.temperature 21.5",
        "everything: attic.temperature 31",
        "everything: kitchen.oven.alarm smoke",
        "everything: kitchen.oven.alarm fire",
        "alarm: kitchen.oven.alarm smoke",
        "kitchen: kitchen.oven.alarm fire",
        "kitchen: kitchen.oven.alarm smoke",
        "kitchen: kitchen.temperature 21.5",
        "too high: attic.temperature 31",
        "2 listeners were left",
    ]


def test_worker(away: Server) -> None:
    with away.connect() as client:
        group = client.group("sums", create=True, ctl=["replay all"])
        group.publish_many([("sums", "1+1"), ("sums", "two+two"), *(("sums", f"{n}+{n}") for n in range(2, 20))])
        done = run("worker.py", away.address, "sums", 3)
        assert sorted(m.body.decode() for m in group.history(pattern="answers")) == sorted(
            f"{n}+{n}={n + n}" for n in range(1, 20)
        )
        assert [m.body for m in group.history(pattern="dead")] == [b"two+two"]
        assert sorted(line.split(":")[0] for line in done.stderr.splitlines()) == [
            f"two+two, attempt {n}" for n in (1, 2, 3)
        ]


def test_history(away: Server) -> None:
    with away.connect() as client:
        group = client.group("log", create=True, ctl=["replay all"])
        group.publish_many((f"{where}.{what}", f"{where} {what}\n") for where in "ab" for what in ("info", "error"))
        first = next(group.history()).sequence
        assert run("history.py", away.address, "log").stdout.splitlines() == [
            "a.error: 1", "a.info: 1", "b.error: 1", "b.info: 1",
            f"{first + 1} a.error a error", f"{first + 2} b.info b info", f"{first + 3} b.error b error",
        ]  # fmt: skip
        assert run("history.py", away.address, "log", "*.error").stdout.startswith("a.error: 1\nb.error: 1\n")
        command = [sys.executable, str(ROOT / "examples/history.py"), away.address, "log", "b.*", "--follow"]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            seen = [process.stdout.readline() for _ in range(6)]
            group.publish("b.new", "new\n")
            assert (seen[-1], process.stdout.readline()) == ("b error\n", "new\n")
            process.kill()


def test_embedded(tmp_path: Path) -> None:
    store = tmp_path / "notes"
    assert run("embedded.py", store, "one", "two").stdout == "now: one\nleft: 1\n"
    assert run("embedded.py", store).stdout == "now: two\nleft: 0\n"
    assert run("embedded.py", store).stdout == "nothing to do\nleft: 0\n"
    with mqfs.open(store) as client:
        assert client.group("notes").streams() == ["todo"]
