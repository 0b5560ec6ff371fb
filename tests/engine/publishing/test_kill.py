"""kill -9 of the server while producers commit: each repeats what was not answered, and every unit is there once."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path

import pytest

from mqfs.errors import MqfsError
from mqfs.ninep.client.connection import Client, connect
from tests.support.batches import frame
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]

PRODUCERS = 3
GONE = (OSError, EOFError, MqfsError)


class Producer(threading.Thread):
    """Stages and commits unit after unit, until the server is gone."""

    def __init__(self, label: str, number: int, address: str) -> None:
        super().__init__(daemon=True)
        self.label, self.first, self.number, self.address = label, number, number, address
        self.acknowledged = number - 1

    def run(self) -> None:
        with contextlib.suppress(*GONE), connect(self.address) as client:
            while True:
                self.commit(client)
                self.acknowledged = self.number
                self.number += 1

    def commit(self, client: Client) -> None:
        parts = [f"{self.label}-a", f"{self.label}-b"]
        luck = random.Random(f"{self.label} {self.number}")
        count = luck.randint(2, 40)
        for half, part in enumerate(parts):
            client.mkdir(f"g/.txn/{part}")
            with client.open(f"g/.txn/{part}/.batch", "w") as file:
                for n in range(half, count, 2):
                    body = f"{self.label} {self.number} {n} {count} {'x' * luck.randint(0, 5_000)}"
                    file.write(frame(luck.choice("st"), body.encode()))
        with client.open("g/.txn/ctl", "w") as file:
            file.write(f"commit {self.label}.{self.number} {' '.join(parts)}".encode())


def look(address: str) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """The units of each producer, in order, each with the numbers of its messages; and what was committed."""
    units: dict[str, list[list[int]]] = {}
    counts: dict[str, int] = {}
    with connect(address) as client, client.open("g/.cursor", "r+") as cursor:
        cursor.write(b"seek first\nuntil end\nformat json\n")
        last = ""
        while line := cursor.receive():
            label, number, n, count, _ = json.loads(line)["body"].split(" ", 4)
            mine = units.setdefault(label, [])
            if f"{label} {number}" != last:
                assert int(number) == len(mine), "each once, in order"
                mine.append([])
                last = f"{label} {number}"
            mine[-1].append(int(n))
            counts[last] = int(count)
        with client.open("g/.txn/ctl", "r") as file:
            rows = (row.split()[1].rpartition(".") for row in file.receive().decode().splitlines())
            committed = {label: int(number) for label, _, number in rows}
    for label, mine in units.items():
        for number, numbers in enumerate(mine):
            count = counts[f"{label} {number}"]
            assert numbers == [*range(0, count, 2), *range(1, count, 2)], "whole, in the order of the parts"
    return units, committed


def test_killed_while_units_are_committed() -> None:
    luck = random.Random(seed())
    with short_folder() as folder:
        server = Server.at(Path(folder))
        try:
            with connect(server.address) as client:
                client.mkdir("g")
                with client.open("g/ctl", "w") as file:
                    file.write(b"replay all\n")
                for name in "st":
                    client.create(f"g/{name}").close()
            nexts = dict.fromkeys((f"p{n}" for n in range(PRODUCERS)), 0)
            rounds = size(60, least=3)
            for _ in range(rounds):
                producers = [Producer(label, number, server.address) for label, number in nexts.items()]
                for producer in producers:
                    producer.start()
                eventually(lambda begun=producers: any(one.acknowledged >= one.first for one in begun), "a commit")
                time.sleep(luck.uniform(0.0, 0.3))
                server.restart()
                for producer in producers:
                    producer.join(HANG_S)
                units, committed = look(server.address)
                for producer in producers:
                    there = len(units.get(producer.label, []))
                    assert committed.get(producer.label, -1) == there - 1
                    assert there > producer.acknowledged, "an acknowledged commit is lost"
                    nexts[producer.label] = producer.number  # perhaps committed already: then it is a repeat
            assert sum(nexts.values()) >= rounds
        finally:
            server.close()
