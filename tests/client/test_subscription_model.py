"""The model of a subscription against the library: seeded stories over rings, 9P and with the engine inside."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqfs
from mqfs import errors, ring
from mqfs.client import Group, Subscription, subscription
from mqfs.syntax.patterns import compile_pattern
from tests.client.model import Log, Owed
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, patient
from tests.support.server import Server, short_folder
from tests.support.temp_store import lowered

pytestmark = pytest.mark.slow

STORIES, STEPS = 1_700, 30
SLACK = 64
SMALL = {
    "CURSOR_SLACK_MESSAGES": SLACK + 24,  # other records of the log have sequences, too
    "RING_BYTES": 2 << 20,
    "TRIM_BYTES": 4 << 10,
}
SMALL_SERVER = (
    f"import mqfs.limits as limits; limits.__dict__.update({SMALL!r}); import mqfs.cli.main; mqfs.cli.main.main()"
)
STREAMS = ("s", "a.x", "a.y")
PATTERNS: list[list[str]] = [
    ["s"],
    ["#"],
    ["*"],
    ["a.*"],
    ["a.x", "a.y"],
    ["s", "a.x"],
    ["later"],
    ["#.x"],
    ["s", "later"],
]
KINDS: list[list[str]] = [
    [], ["replay last"], ["replay all"],
    ["replay off", "depth 5"], ["replay last", "depth 5"], ["replay all", "depth 5"],
    ["keep ring"], ["keep ring", "replay all"], ["keep ring", "replay all", "depth 5"], ["replay all", "ttl 1h"],
    ["replay off", "ttl 1h", "depth 20"], ["replay all", "data line"], ["replay off", "data line", "depth 5"],
    ["replay all", "data coalesce"], ["data coalesce", "replay last"],
]  # fmt: skip


class World:
    """Where stories take place: a server that can be restarted, or none."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport = transport
        self.away: Server | None = None
        if transport == "inside":
            self.client = self.writer = self.files = mqfs.open(folder / "store")
        else:
            self.away = Server.at(folder, transport=transport, program=(sys.executable, "-c", SMALL_SERVER, "serve"))
            self.client = self.away.connect()
            self.connect()

    def connect(self) -> None:
        """Give the writer new connections; the followers keep theirs."""
        assert self.away is not None
        self.writer, self.files = self.away.connect(), self.away.connect(transport="9p")

    def restart(self, number: int) -> None:
        assert self.away is not None
        self.away.restart(number)
        self.writer.close()
        self.files.close()
        self.connect()

    def close(self) -> None:
        for client in (self.client, self.writer, self.files):
            client.close()
        if self.away is not None:
            self.away.close()


class Story:
    """One group, its writers and its subscriptions."""

    def __init__(self, world: World, number: int) -> None:
        self.dice, self.world, self.name = random.Random(number), world, f"g{number}"
        self.lines = KINDS[number % len(KINDS)]
        world.files.group(self.name, create=True, ctl=self.lines)
        self.meet()
        self.files.create(*STREAMS)
        words = dict(line.split() for line in self.lines)
        room = SMALL["RING_BYTES"] // 4 if "keep ring" in self.lines else 0
        self.log = Log(words.get("replay", "off"), int(words.get("depth", 0)), room, SLACK)
        self.is_line = words.get("data") == "line"
        self.keeps_all = words.get("replay") == "all" and not self.log.depth
        self.followers: list[tuple[Subscription, Owed]] = []
        self.number = 0

    def meet(self) -> None:
        """Those who write are there."""
        self.writer: Group = self.world.writer.group(self.name)
        self.files: Group = self.world.files.group(self.name)

    # ------------------------------------------------------------ writing

    def body(self, most: int = 60) -> bytes:
        self.number += 1
        body = b"%d " % self.number + b"." * self.dice.randint(0, most)
        return body + b"\n" if self.is_line else body

    def publish(self, stream: str, bodies: list[bytes]) -> None:
        """By one of the ways there are."""
        way = self.dice.choice(["one", "many", "many", "files", "put", "plain"])
        if way == "many":
            self.writer.publish_many([(stream, body) for body in bodies])
        elif way == "files":
            self.files.create(stream)
            file = self.files._link.open(f"{self.name}/{stream}", "w")
            for body in bodies:
                file.write(body)
            file.close()
        else:
            for body in bodies:
                if way == "one":
                    self.writer.publish(stream, body, wait=self.dice.choice(["published", "committed"]))
                elif way == "put":
                    self.writer.publish(stream, body, headers={"a": "b"})
                else:
                    self.files.publish(stream, body)
        for body in bodies:
            self.log.append(stream, body)

    def stream(self) -> str:
        return self.dice.choice([*STREAMS, *STREAMS, "later"])

    def write(self) -> None:
        self.publish(self.stream(), [self.body() for _ in range(self.dice.choice([1, 1, 1, 2, 3, 8]))])

    def much(self) -> None:
        """More than the slack."""
        stream = self.stream()
        for _ in range(3):
            self.publish(self.dice.choice([stream, self.stream()]), [self.body() for _ in range(40)])

    def big(self) -> None:
        """More than the ring holds; or one body that is too much for it."""
        if self.keeps_all and not self.is_line and self.dice.random() < 0.5:
            self.number += 1
            body = b"%d " % self.number + bytes(1_200_000)
            stream = self.stream()
            self.writer.publish(stream, body)
            self.log.append(stream, body)
        else:
            self.publish(self.stream(), [self.body() + b"." * 50_000 * (not self.is_line) for _ in range(45)])

    # ------------------------------------------------------------ what the group does

    def clear(self) -> None:
        stream = self.dice.choice(["", *STREAMS])
        self.files.purge(stream)
        self.log.clear(stream)

    def retire(self) -> None:
        """End the ring, if there is one."""
        self.files.ctl(f"ttl {self.dice.randint(1, 9)}h")

    def restart(self) -> None:
        if self.world.away is not None and self.dice.random() < 0.15 and "keep ring" not in self.lines:
            self.world.restart(self.dice.choice([9, 15]))
            self.log.restarts += 1
            self.meet()

    # ------------------------------------------------------------ following

    def follow(self) -> None:
        if len(self.followers) >= 4:
            self.leave()
        patterns = self.dice.choice(PATTERNS)
        existing = self.dice.random() < 0.3
        try:
            following = self.world.client.group(self.name).subscribe(patterns, existing=existing, reconnect=True)
        except errors.Disconnected:  # of a restart; it connects again
            following = self.world.client.group(self.name).subscribe(patterns, existing=existing, reconnect=True)
        matches = [compile_pattern(pattern) for pattern in patterns]
        owed = Owed(
            self.log,
            lambda stream: any(match(stream) for match in matches),
            existing=existing,
            next_sequence=self.files.stats().next,
            sifts="later" in patterns and not self.log.written.get("later"),
        )
        self.followers.append((following, owed))

    def leave(self) -> None:
        if self.followers:
            self.followers.pop(self.dice.randrange(len(self.followers)))[0].close()

    def read(self) -> None:
        if self.followers:
            follower = self.dice.choice(self.followers)
            for _ in range(self.dice.choice([1, 2, 10, 100])):
                if not follower[1].due():
                    return
                self.get(*follower)

    def get(self, following: Subscription, owed: Owed, timeout: float = HANG_S) -> None:
        owed.reads()
        try:
            message = following.get(timeout)
        except errors.FellBehind as error:
            owed.fell_behind(error.lost)
        except TimeoutError:
            assert not timeout, f"due {owed.due()[:9]}, {owed.lost} lost, {owed.told} reported: nothing comes"
            raise
        else:
            owed.message(message.stream, message.body, message.sequence, is_rest="part" in message.headers)

    # ------------------------------------------------------------ all of it

    def run(self) -> None:
        self.follow()
        acts = [
            (self.write, 30), (self.much, 1), (self.big, 1), (self.clear, 2), (self.retire, 2), (self.restart, 1),
            (self.follow, 4), (self.leave, 1), (self.read, 20),
        ]  # fmt: skip
        for _ in range(STEPS):
            self.dice.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()
        self.end()

    def end(self) -> None:
        for stream in (*STREAMS, "later"):
            self.publish(stream, [self.body()])
        for following, owed in self.followers:
            with contextlib.suppress(TimeoutError):
                while True:
                    self.get(following, owed, patient(20) if owed.due() or owed.told < owed.lost else 0)
            owed.settled(self.files.stats().next)

    def close(self) -> None:
        for following, _ in self.followers:
            following.close()
        for stream in self.files.streams():
            self.files.remove(stream)
        self.world.files.remove_group(self.name)


SERVED = [pytest.param(way, marks=pytest.mark.process) for way in ("auto", "9p")]


@pytest.fixture(params=[*SERVED, "inside"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "auto" and ring.MISSING:
        pytest.skip(ring.MISSING)
    monkeypatch.setattr(subscription, "LOSS_REPORT_S", 0.01)
    with short_folder() as folder, lowered(**SMALL):
        made = World(request.param, folder)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.timeout(1800)
def test_every_message_is_given_or_told_to_be_lost(world: World) -> None:
    first = seed() * 100_000
    for number in range(first, first + size(STORIES, 60)):
        try:
            story = Story(world, number)
            story.run()
            story.close()
        except Exception as error:
            raise AssertionError(f"story {number} {story.lines}: {type(error).__name__}: {error}") from error
