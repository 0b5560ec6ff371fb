"""Kill -9 of the driver, the JVM, a worker or the server at random moments of a stream that copies messages.

    python -m tests.spark.kills [--moments 30] [--messages 1000000] [--seed N]

It kills and counts: each message is in the copy once, in its order. The victim is known by the session
that the driver leads.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mqfs.client import Client
from tests.support import ROOT, spark_pythons
from tests.support.eventually import eventually
from tests.support.server import Server

VICTIMS = ("all", "jvm", "worker", "server")
BATCHES_A_MOMENT = 10  # of all messages: it is not to be done before the last moment


def session(leader: int) -> dict[int, str]:
    """The processes of a session, and how each was started."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat, line = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[3]) == leader:
            found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Campaign:
    """One copy, and what is done to it."""

    def __init__(self, folder: Path, messages: int, seed: int, moments: int) -> None:
        self.folder, self.messages = folder, messages
        self.python = spark_pythons.write(folder / "pythons")
        self.batch = max(messages // (BATCHES_A_MOMENT * moments), 1)  # messages
        self.random = random.Random(seed)
        self.away = Server.at(folder)
        self.killed: Counter[str] = Counter()
        self.driver: subprocess.Popen[bytes] | None = None
        with self.connected() as client:
            group = client.group("g", create=True, ctl=["replay all"])
            for at in range(0, messages, 10_000):
                group.publish_many(("in", b"%d" % n) for n in range(at, min(at + 10_000, messages)))

    def connected(self) -> Client:
        return self.away.connect()

    def copied(self) -> int:
        """Messages in the copy; -1 while no server answers."""
        try:
            with self.connected() as client:
                streams = client.group("g").stats().streams
                return streams["out"].messages if "out" in streams else 0
        except Exception:
            return -1

    def start(self) -> None:
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": str(self.python),
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        copier = [sys.executable, "-m", "tests.spark.copier", self.away.address, str(self.folder), str(self.batch)]
        with open(self.folder / "driver.log", "ab") as log:
            self.driver = subprocess.Popen(
                spark_pythons.beside(self.python, *copier),
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def moment(self, victim: str) -> bool:
        """Start it, kill the victim somewhere in the middle; False where the copy was done before."""
        self.end()
        self.start()
        assert self.driver is not None
        before = max(self.copied(), 0)
        enough = before + self.random.randint(0, 3 * self.batch)
        eventually(lambda: self._ended() or self.copied() > enough, "some batches")
        time.sleep(self.random.random() * 0.3)  # anywhere in a batch; nothing is waited for
        if self.driver.poll() is not None:
            return False
        self.strike(victim)
        self.killed[victim] += 1
        return True

    def _ended(self) -> bool:
        return self.driver is not None and self.driver.poll() is not None

    def strike(self, victim: str) -> None:
        assert self.driver is not None
        if victim == "server":
            self.away.restart()
            return
        found = session(self.driver.pid)
        words = {"jvm": "java", "worker": "tests.support.forked"}
        chosen = [pid for pid, line in found.items() if victim == "all" or words[victim] in line]
        kill(chosen if victim == "all" else chosen[-1:])

    def end(self) -> None:
        """Let the rest run for a moment, or to its end; then kill what remains of it."""
        if self.driver is None:
            return
        try:
            self.driver.wait(self.random.random() * 5)
        except subprocess.TimeoutExpired:
            pass
        kill(list(session(self.driver.pid)))
        self.driver.wait()

    def finish(self) -> None:
        """Let it come to its end, started again where the last victim took it along; and look at all of it."""
        assert self.driver is not None
        eventually(self._ended, "the end of the rest of the copy")
        if self.driver.returncode:
            self.end()
            self.start()
            eventually(self._ended, "the end of the copy")
        assert self.driver.returncode == 0, (self.folder / "driver.log").read_text()[-3_000:]
        self.end()
        with self.connected() as client:
            found = [int(message.body) for message in client.group("g").history(pattern="out")]
        lost, doubled = self.messages - len(set(found)), len(found) - len(set(found))
        assert (lost, doubled) == (0, 0), f"{lost} lost, {doubled} doubled after {dict(self.killed)}"
        assert found == list(range(self.messages)), "out of order"

    def close(self) -> None:
        if self.driver is not None:  # it may have ended by itself, unlike what its Pythons are forked from
            kill(list(session(self.driver.pid)))
            self.driver.wait()
        self.away.close()


def run(folder: Path, messages: int, victims: list[str], seed: int) -> Counter[str]:
    """The whole of it; who was killed how often."""
    campaign = Campaign(folder, messages, seed, len(victims))
    try:
        for number, victim in enumerate(victims, 1):
            if not campaign.moment(victim):
                print("done before its time", flush=True)
                break
            print(f"{number}: {victim}, {campaign.copied():,} of {messages:,} copied", flush=True)
        campaign.finish()
        return campaign.killed
    finally:
        campaign.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args()
    victims = [VICTIMS[n % len(VICTIMS)] for n in range(said.moments)]
    with tempfile.TemporaryDirectory(prefix="mqfs-kills-", dir="/var/tmp") as folder:
        killed = run(Path(folder), said.messages, victims, said.seed)
    print(f"{said.messages:,} messages, {sum(killed.values())} kills {dict(killed)}: 0 lost, 0 doubled, in order")


if __name__ == "__main__":
    main()
