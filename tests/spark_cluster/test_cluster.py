"""Spark on three machines: both workers read and write over TCP, and see nothing of the store's disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqfs import limits
from tests.spark_cluster.cluster import PORT, TOKEN, Cluster, Driver, end
from tests.support.eventually import eventually

ROWS = [b"%06d %s" % (n, b"x" * 100) for n in range(20_000)]  # a task has more than is buffered on its way


@pytest.fixture(scope="module")
def numbers(cluster: Cluster) -> str:
    """A stream with numbers in it."""
    cluster.group("in")
    cluster.fill("in/numbers", ROWS)
    return "in/numbers"


@pytest.fixture
def out(cluster: Cluster, tmp_path: Path) -> str:
    """A group of the test's own, to be written to; another one when it is run again."""
    cluster.group(tmp_path.name)
    return tmp_path.name


def test_both_workers_read_what_only_the_driver_has(cluster: Cluster, driver: Driver, numbers: str) -> None:
    assert driver.do("both") == 2
    found = driver.do("read", options={**driver.options, "subscribe": numbers, "minPartitions": "8"},
                      hidden=str(cluster.hidden))  # fmt: skip
    assert sum(task["rows"] for task in found["tasks"]) == len(ROWS)
    assert {task["host"] for task in found["tasks"]} == {machine.address for machine in cluster.machines}, found
    assert {task["seen"] for task in found["tasks"]} == {""}
    assert found["driver"] == cluster.driver.address
    assert "store" in found["sees"]


def test_a_stream_is_copied_exactly_once(cluster: Cluster, driver: Driver, numbers: str, out: str) -> None:
    options = {**driver.options, "subscribe": numbers, "minPartitions": "4", "maxOffsetsPerTrigger": "8000"}
    to, checkpoint = {**driver.options, "topic": f"{out}/copy"}, str(cluster.folder / out)
    assert driver.do("copy", options=options, to=to, checkpoint=checkpoint) == 3
    assert driver.do("copy", options=options, to=to, checkpoint=checkpoint) == 0
    assert cluster.bodies(f"{out}/copy") == ROWS
    assert cluster.parts(out) == []


class Slow:
    """A copy whose tasks tell of themselves and wait."""

    def __init__(self, cluster: Cluster, driver: Driver, numbers: str, out: str, how: str) -> None:
        self.cluster, self.driver, self.out = cluster, driver, out
        self.folder = cluster.folder / f"{out}-attempts"
        self.folder.mkdir()
        driver.ask(
            "copy", options={**driver.options, "subscribe": numbers, "minPartitions": "4"},
            to={**driver.options, "topic": f"{out}/copy"}, checkpoint=str(cluster.folder / out),
            slow={"how": how, "folder": str(self.folder)},
        )  # fmt: skip

    def attempts(self) -> set[tuple[int, int, str]]:
        """(partition, attempt, host)"""
        found = (file.name.split("-") for file in self.folder.glob("*-*-*"))
        return {(int(partition), int(attempt), host) for partition, attempt, host in found}

    def go(self) -> None:
        (self.folder / "go").touch()

    def copied_once(self) -> None:
        assert self.driver.answer() == 1
        assert self.cluster.bodies(f"{self.out}/copy") == ROWS
        assert self.cluster.parts(self.out) == []


def staged(cluster: Cluster, out: str, partition: int) -> set[str]:
    """The attempts that have parts of that partition."""
    names = (name.split("-") for name in cluster.parts(out))
    return {attempt for *_, number, attempt, _, _ in names if number == str(partition)}


def test_a_task_that_is_tried_again(cluster: Cluster, driver: Driver, numbers: str, out: str) -> None:
    """It had staged all of its rows when it failed."""
    slow = Slow(cluster, driver, numbers, out, "fail")
    slow.copied_once()
    assert {words[:2] for words in slow.attempts()} == {(n, attempt) for n in range(4) for attempt in (0, 1)}


def test_a_task_that_is_run_twice(cluster: Cluster, driver: Driver, numbers: str, out: str) -> None:
    """Speculation: both attempts have staged the same rows when the second is at its end."""
    slow = Slow(cluster, driver, numbers, out, "first")
    eventually(lambda: {a for p, a, _ in slow.attempts() if p == 0} == {0, 1}, "both attempts")
    eventually(lambda: len(staged(cluster, out, 0)) == 2, "both have staged rows")
    slow.go()
    slow.copied_once()
    assert len({host for partition, _, host in slow.attempts() if partition == 0}) == 2


def test_a_machine_that_dies(cluster: Cluster, driver: Driver, numbers: str, out: str) -> None:
    """kill -9 of a worker and its executor in the middle of a batch: their tasks are done again elsewhere."""
    assert driver.do("both") == 2
    slow = Slow(cluster, driver, numbers, out, "all")
    eventually(lambda: len(slow.attempts()) == 4, "all tasks")
    dead = cluster.machines[1]
    died = {partition for partition, _, host in slow.attempts() if host == dead.address}
    assert died
    cluster.kill_worker(dead.address)
    slow.go()
    cluster.start_worker(dead)
    slow.copied_once()
    assert {partition for partition, attempt, _ in slow.attempts() if attempt} == died
    assert driver.do("both") == 2


def test_a_host_that_is_gone_is_soon_known(cluster: Cluster) -> None:
    """The kernel asks a silent one after half a minute, not two hours: what it held is free then."""
    machine = cluster.machines[0]
    program = (
        f"import socket, sys; s = socket.create_connection(('{cluster.driver.address}', {PORT})); sys.stdin.read()"
    )
    holder = cluster.start(machine, "holder", sys.executable, "-c", program, stdin=subprocess.PIPE)
    command = cluster.driver.inside("ss", "-tnoH", "state", "established", "sport", f"= :{PORT}")

    def asked() -> list[int]:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line for line in said.splitlines() if machine.address in line]
        return [int(found[1]) for line in lines if (found := re.search(r"keepalive,(\d+)(?:\.\d+)?sec", line))]

    eventually(lambda: bool(asked()), "the connection and its timer")
    assert max(asked()) <= limits.SILENT_S
    end(holder)


def test_a_token_that_is_wrong(cluster: Cluster, driver: Driver, numbers: str, out: str) -> None:
    options = {**driver.options, "subscribe": numbers, "token": "a-secret-that-nobody-has"}
    with pytest.raises(RuntimeError, match=r"option token: refused by the server at 'tcp!10\.77\.0\.1!5640'"):
        driver.do("read", options=options, hidden="/")
    del options["token"]  # then it is user nobody, who may read and not write
    assert sum(task["rows"] for task in driver.do("read", options=options, hidden="/")["tasks"]) == len(ROWS)
    to = {"address": cluster.address, "topic": f"{out}/copy"}
    with pytest.raises(RuntimeError, match="excludes uid"):
        driver.do("copy", options={**driver.options, "subscribe": numbers}, to=to, checkpoint=str(cluster.folder / out))


def test_the_token_is_in_no_log(cluster: Cluster, driver: Driver, numbers: str) -> None:
    assert driver.do("read", options={**driver.options, "subscribe": numbers}, hidden="/")["tasks"]
    logs = [*cluster.folder.glob("*.log"), *cluster.folder.glob("work-*/*/*/std*")]
    assert any("executor" in log.read_text() for log in logs)
    assert [log for log in logs if TOKEN in log.read_text()] == []


def test_an_address_that_executors_cannot_reach(cluster: Cluster, driver: Driver, numbers: str) -> None:
    options = {"address": cluster.local, "subscribe": numbers, "retrySeconds": "0.2"}
    with pytest.raises(
        RuntimeError,
        match=r"option address: no answer from 'unix!.*tcp!HOST!PORT or tls!HOST!PORT, for workers on other machines",
    ):
        driver.do("read", options=options, hidden="/")
