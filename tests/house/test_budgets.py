"""Costs of common operations, in calls of Python functions: they may only fall. `trace.py` lists the calls."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

from mqfs.model import Qid, Wait
from mqfs.ninep.client.connection import Client, File
from mqfs.ninep.client.machine import Channel, ClientMachine
from mqfs.ninep.codec.messages import Rread, Rwrite
from mqfs.ninep.codec.wire import encode
from tests.house.today import check
from tests.house.trace import operations
from tests.support.calls import calls, calls_once
from tests.support.queues import Queues


def written(queues: Queues) -> int:
    writer = queues.at("s", os.O_WRONLY)
    return calls(lambda: writer.write(b"x"))


def written_to_a_reader(queues: Queues) -> int:
    reader, writer = queues.at("s"), queues.at("s", os.O_WRONLY)
    waits: list[Wait[bytes]] = []

    def once() -> None:
        wait = reader.read(100)
        assert isinstance(wait, Wait)
        waits.append(wait)
        writer.write(b"x")

    cost = calls(once)
    assert all(wait.settled for wait in waits)
    return cost


def worked(queues: Queues) -> tuple[int, int]:
    """Count the calls of a claim, and of its acknowledgement."""
    queues.consumer()
    writer, worker = queues.at("s", os.O_WRONLY), queues.worker()
    for _ in range(20):
        writer.write(b"x")
    costs = [(calls_once(lambda: worker.read(100)), calls_once(lambda: worker.write(b"ack\n"))) for _ in range(10)]
    claims, acknowledged = zip(*costs, strict=True)
    return min(claims), min(acknowledged)


def beside_a_consumer(queues: Queues) -> int:
    queues.consumer("idle")
    return written(queues)


def requested() -> tuple[int, int]:
    """Count the calls of a write and of a read of the client, whose replies are ready at once."""
    ours, theirs = socket.socketpair()
    with theirs, Client(ours, ClientMachine()) as client:
        file = File(client, Channel(1, Qid(0, 0, 1), 8_192, unix=False), "r+")
        written, found = encode(Rwrite(0, 1), False), encode(Rread(0, b"x"), False)

        def write() -> None:
            theirs.send(written)
            assert file.write(b"x") == 1

        def read() -> None:
            theirs.send(found)
            assert file.receive(100) == b"x"

        return calls(write), calls(read)


def breaches() -> dict[str, int]:
    with TemporaryDirectory() as folder:
        disk = Path(folder)
        claim, acknowledged = worked(Queues("replay all"))
        traces = dict(operations(disk))
        client_write, client_read = requested()
        return {
            "write": written(Queues("replay all")),
            "write, on disk": written(Queues("replay all", path=disk / "write")),
            "write to a parked reader, and its read": written_to_a_reader(Queues()),
            "write beside an idle consumer": beside_a_consumer(Queues("replay all")),
            "claim": claim,
            "ack": acknowledged,
            "9P client, write": client_write,
            "9P client, read": client_read,
            "claim, files": traces["claim"].files,
            "worker gone": len(traces["worker gone"].calls),
            "ctl line": len(traces["ctl line"].calls),
            "redelivery": len(traces["redelivery"].calls),
            "redelivery, files": traces["redelivery"].files,
            "redelivery, moves between files": traces["redelivery"].moves,
        }


def test_calls() -> None:
    check("budgets", breaches())
