"""The publishers and followers of a campaign of losses, each a thread or a process, at its own speed.

python -m tests.client.rush SPEC     (JSON; says `ready`, begins at a line of standard input, ends with its result)
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import mqfs
from mqfs.client import Client
from mqfs.errors import FellBehind
from tests.support import ROOT
from tests.support.eventually import HANG_S, patient
from tests.support.server import environment, start

Spec = dict[str, Any]
Result = dict[str, Any]
MOST_BYTES = 48 << 20  # of one publisher: the disk is everybody's
WHOLE_BYTES = 1_044_480  # more are several messages in the log


def body_size(dice: random.Random, most: int) -> int:
    return min(
        most, dice.choice([0, 0, 1, 100, 100, 1_000, 4_000, 60_000, 60_000, 900_000, dice.randrange(18_000_000)])
    )


def publish(spec: Spec, client: Client, begin: Callable[[], object]) -> Result:
    """Numbered messages until the time is over; how many there are."""
    dice, group, sent, size = random.Random(spec["seed"]), client.group(spec["group"]), 0, 0
    begin()
    file = os.open(spec["file"], os.O_WRONLY) if spec["file"] else -1
    until = time.monotonic() + spec["seconds"]
    while time.monotonic() < until and size < MOST_BYTES:
        bodies: list[bytes] = []
        for _ in range(dice.choice([1, 1, 1, 2, 30])):
            body = b"%s %d %s" % (spec["name"].encode(), sent + len(bodies), bytes(body_size(dice, spec["most"])))
            bodies.append(body)
            size += len(body)
        if file >= 0:
            for body in bodies:
                os.write(file, body)
        elif dice.random() < 0.5 and all(len(body) < WHOLE_BYTES for body in bodies):
            group.publish_many([(spec["stream"], body) for body in bodies], wait=spec["wait"])
        else:
            for body in bodies:
                group.publish(spec["stream"], body, wait=spec["wait"])
        sent += len(bodies)
        time.sleep(dice.random() * spec["pause"])
    if file >= 0:
        os.close(file)
    return {"sent": sent, "bytes": size}


def follow(spec: Spec, client: Client, begin: Callable[[], object]) -> Result:
    """All up to the message `end`; how many of each publisher, and how many losses were reported."""
    dice, got, told, parts = random.Random(spec["seed"]), dict[str, int](), 0, 0
    with client.group(spec["group"]).subscribe(spec["patterns"]) as reading:
        begin()
        until = time.monotonic() + spec["seconds"]
        last: dict[str, int] = {}
        sequence, over = 0, False
        while True:
            try:
                message = reading.get(timeout=2.0 if over else patient(60))  # a loss is reported within a second
            except FellBehind as error:
                told += error.lost
                continue
            except TimeoutError:
                assert over, f"nothing comes any more; had {got}"
                break
            assert message.sequence > sequence, "out of order"
            sequence = message.sequence
            if message.stream == "end":
                over = True
                continue
            if "part" in message.headers:
                parts += 1  # of a body that was cut in its middle
                continue
            name, number, _ = message.body[:40].split(b" ", 2)
            assert int(number) > last.get(name.decode(), -1), f"{name!r} {number!r} came again, or out of order"
            last[name.decode()] = int(number)
            got[name.decode()] = got.get(name.decode(), 0) + 1
            if time.monotonic() < until and dice.random() < spec["often"]:
                time.sleep(dice.random() * spec["pause"])
    return {"got": got, "told": told, "parts": parts}


def act(spec: Spec, client: Client, begin: Callable[[], object]) -> Result:
    return (publish if spec["does"] == "publish" else follow)(spec, client, begin)


# ---------------------------------------------------------------- as a process


def main() -> None:
    spec = json.loads(sys.argv[1])

    def begin() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    with mqfs.connect(spec["address"], transport=spec["transport"]) as client:
        print(json.dumps(act(spec, client, begin)), flush=True)


# ---------------------------------------------------------------- who starts them


class Actor:
    """`client`: it is a thread, and with that client; None: a process."""

    def __init__(self, spec: Spec, client: Client | None) -> None:
        self.spec, self._client = spec, client
        self._go = threading.Event()
        self._ready = threading.Event()
        self._result: Result | BaseException | None = None
        if client is None:
            command = [sys.executable, "-m", "tests.client.rush", json.dumps(spec)]
            pipe = subprocess.PIPE
            self._process = start(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        else:
            self._thread = threading.Thread(target=self._run, args=(client,), daemon=True)
            self._thread.start()

    def _run(self, client: Client) -> None:
        def begin() -> None:
            self._ready.set()
            self._go.wait()

        try:
            self._result = act(self.spec, client, begin)
        except BaseException as error:
            self._result = error
        self._ready.set()

    def ready(self) -> None:
        if self._client is not None:
            assert self._ready.wait(HANG_S), self.spec
        else:
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n", (self.spec, self._process.communicate())

    def go(self) -> None:
        self._go.set()
        if self._client is None:
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self) -> Result:
        if self._client is not None:
            self._thread.join(HANG_S)
            if not isinstance(self._result, dict):
                raise AssertionError(f"{self.spec}: {self._result!r}") from (
                    self._result if isinstance(self._result, BaseException) else None
                )
            return self._result
        out, errors = self._process.communicate(timeout=HANG_S)
        assert self._process.returncode == 0, f"{self.spec}: {errors}"
        found: Result = json.loads(out)
        return found

    def close(self) -> None:
        self._go.set()
        if self._client is None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    main()
