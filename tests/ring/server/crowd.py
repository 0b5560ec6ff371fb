"""A process that publishes numbered messages through a group's ring, and records the result of each, until its
standard input ends; and what must be true of a log that such wrote into.

python -m tests.ring.server.crowd ADDRESS GROUP STREAM NAME MODE FILE (MODE: published, committed, many, put; or follow)
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mqfs
from mqfs.errors import Disconnected
from mqfs.ninep.client.connection import connect
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import environment, start

Log = dict[int, tuple[str, str]]  # sequence: stream, body
PAUSE_S = float(os.environ.get("CROWD_PAUSE", "0.0005"))  # between two messages: kills are not to fill a disk
MODES = ("published", "committed", "many", "drafts", "put")


# ---------------------------------------------------------------- the process


def over() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def produce(group: Any, stream: str, name: str, mode: str, tell: Callable[[str], object]) -> None:
    """Lines: `begun NUMBER` before, and after it `told NUMBER SEQUENCE` (0: not known which), `unknown NUMBER`."""
    number = 0
    while not over():
        count = 7 if mode in ("many", "drafts") else 1
        tell(f"begun {number + count - 1}")
        bodies = [f"{name} {n} " + "." * (n % 90) for n in range(number, number + count)]
        try:
            if count > 1:
                streams = [stream, "shared"] if mode == "drafts" else [stream]
                pairs = [(streams[n % len(streams)], body) for n, body in enumerate(bodies)]
                done = group.publish_many(pairs, wait=("published", "committed")[number % 2])
                assert done == count
                tell("\n".join(f"told {number + n} 0" for n in range(done)))
            else:
                more = {"headers": {"of": name}} if mode == "put" else {"wait": mode}
                sequence = group.publish(stream, bodies[0], **more).sequence
                tell(f"told {number} {sequence}")
        except Disconnected as error:
            known = getattr(error, "published", 0)
            tell("\n".join(f"{'told' if n < known else 'unknown'} {number + n} 0" for n in range(count)))
        number += count
        if PAUSE_S:
            time.sleep(PAUSE_S)


def follow(group: Any, tell: Callable[[str], object]) -> None:
    with group.subscribe("#", existing=True) as reading:
        print("ready", flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), reading.close()), daemon=True).start()
        for message in reading:
            tell(f"{message.sequence} {json.dumps([message.stream, message.body.decode()])}")


def main() -> None:
    address, path, stream, name, mode, file = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(text: str) -> None:
        os.write(fd, text.encode() + b"\n")

    with mqfs.connect(address, transport="9p" if mode == "put" else "ring") as client:
        group = client.group(path)
        if mode == "follow":
            follow(group, tell)
        else:
            print("ready", flush=True)
            produce(group, stream, name, mode, tell)


# ---------------------------------------------------------------- who starts it


class Member:
    """One such process, and what it wrote down."""

    def __init__(self, folder: Path, address: str, path: str, stream: str, name: str, mode: str) -> None:
        self.name, self.mode, self.file = name, mode, folder / f"told-{name}"
        self.file.touch()
        self.errors = folder / f"errors-{name}"
        with open(self.errors, "wb") as errors:
            self.process = start(
                [sys.executable, "-m", "tests.ring.server.crowd", address, path, stream, name, mode, str(self.file)],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.errors.read_text()

    def end(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            assert self.process.wait(HANG_S) == 0, f"{self.name}: {self.errors.read_text()}"
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            raise AssertionError(f"{self.name} hangs: {self.errors.read_text()}") from None
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def told(self) -> tuple[int, dict[int, int], set[int]]:
        """(how many it began, the sequences of confirmed ones, those of which it is not known)."""
        begun, told, unknown = 0, dict[int, int](), set[int]()
        for line in self.file.read_text().splitlines():
            what, number, *rest = line.split()
            if what == "begun":
                begun = int(number) + 1
            elif what == "told":
                told[int(number)] = int(rest[0])
            else:
                unknown.add(int(number))
        return begun, told, unknown

    def seen(self) -> list[tuple[int, str, str]]:
        rows = [line.split(" ", 1) for line in self.file.read_text().splitlines()]
        return [(int(sequence), *json.loads(rest)) for sequence, rest in rows]

    def newest(self) -> int:
        return max((sequence for sequence, _, _ in self.seen()), default=0)


@contextlib.contextmanager
def crowd(folder: Path, address: str, path: str, modes: Mapping[str, tuple[str, str]]) -> Iterator[list[Member]]:
    """Members by name: (stream, mode). They are ready; at the end of the `with` none is left."""
    members = [Member(folder, address, path, stream, name, mode) for name, (stream, mode) in modes.items()]
    try:
        for member in members:
            member.ready()
        yield members
    finally:
        for member in members:
            member.close()


# ---------------------------------------------------------------- what must be true


def log_of(address: str, path: str) -> Log:
    """All that is kept."""
    found: Log = {}
    last = 0
    with connect(address) as client, client.open(f"{path}/.cursor", "r+") as cursor:
        cursor.write(b"seek first\nuntil end\nformat json\n")
        while line := cursor.receive():
            row = json.loads(line)
            assert row["sequence"] > last
            last = row["sequence"]
            found[last] = row["stream"], row["body"]
    return found


def check(log: Log, members: list[Member]) -> int:
    """Nothing confirmed is lost, nothing twice, orders kept, sequences as confirmed. How many were confirmed."""
    all_told = 0
    by_member: dict[str, list[tuple[int, int]]] = {}
    for sequence, (_, body) in log.items():
        name, number, *_ = body.split()
        by_member.setdefault(name, []).append((int(number), sequence))
    for member in members:
        if member.mode == "follow":
            continue
        rows = by_member.get(member.name, [])
        numbers = [number for number, _ in rows]
        begun, told, unknown = member.told()
        all_told += len(told)
        assert len(set(numbers)) == len(numbers), f"{member.name}: twice in the log: {_twice(numbers)}"
        assert numbers == sorted(numbers), f"{member.name}: its order is not kept"
        there = dict(rows)
        lost = [number for number in told if number not in there]
        assert not lost, f"{member.name} ({member.mode}): lost {lost[:20]} of {len(told)}, {len(lost)} in all"
        wrong = [number for number, sequence in told.items() if sequence and there[number] != sequence]
        assert not wrong, f"{member.name}: confirmed another sequence than the log has: {wrong[:20]}"
        strange = [number for number in numbers if number not in told and number not in unknown and number < begun - 7]
        assert not strange, f"{member.name}: it got an error, yet there they are: {strange[:20]}"
        assert not numbers or max(numbers) < begun
    return all_told


def check_followers(log: Log, members: list[Member], *, missed: bool = False) -> int:
    """The messages seen in the ring are those of the log, without gaps and once. How many messages were seen.

    What a server was writing when it was killed, with headers, may have been seen; no client got its confirmation.
    """
    count = 0
    unanswered = {
        f"{member.name} {number}" for member in members if member.mode == "put" for number in member.told()[2]
    }
    for member in members:
        if member.mode != "follow":
            continue
        seen = member.seen()
        count += len(seen)
        sequences = [sequence for sequence, _, _ in seen]
        assert sequences == sorted(set(sequences)), f"{member.name}: out of order, or twice"
        for sequence, stream, body in seen:
            if sequence not in log and " ".join(body.split()[:2]) in unanswered:
                sequences.remove(sequence)
            else:
                assert log.get(sequence) == (stream, body), f"{member.name} saw {sequence} {stream} {body[:30]!r}"
        if sequences and not missed:
            wanted = [sequence for sequence in log if sequence <= sequences[-1]]
            assert sequences == wanted, f"{member.name} missed {sorted(set(wanted) - set(sequences))[:20]}"
    return count


def _twice(numbers: list[int]) -> list[int]:
    return sorted(number for number in set(numbers) if numbers.count(number) > 1)[:20]


if __name__ == "__main__":
    main()
