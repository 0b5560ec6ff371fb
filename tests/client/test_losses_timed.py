"""For half an hour, random bodies at random speeds over mixed transports: each subscriber gets each message, or the
count of those it lost. Never neither."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import mqfs
from mqfs import ring
from mqfs.client import Client
from tests.client.rush import WHOLE_BYTES, Actor
from tests.support.campaign import seed, whole
from tests.support.server import Server, can_mount, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]

SECONDS = 1_800 if whole() else 20
ROUND_S = 4.0
SETTINGS = [
    [], ["replay last"], ["replay all"], ["replay all", "ttl 1h"], ["depth 40"], ["replay all", "depth 40"],
    ["replay last", "depth 3"], ["replay all", "depth 4M"], ["keep ring"], ["keep ring", "replay all", "depth 100"],
    ["sync always", "replay all"], ["sync off"],
]  # fmt: skip


class Place:
    """A server, with a mount where there may be one; or none, and the engine inside."""

    def __init__(self, folder: Path, stack: ExitStack, *, inside: bool) -> None:
        self.mount: Path | None = None
        self.away: Server | None = None
        self.transports = ["9p"]
        if inside:
            self.store = stack.enter_context(mqfs.open(folder / "store"))
            return
        self.away = stack.enter_context(Server.at(folder, mount=can_mount()))
        self.mount = self.away.mount
        if not ring.MISSING:
            self.transports = ["auto", "auto", "9p"]

    def client(self, stack: ExitStack, transport: str) -> Client:
        if self.away is None:
            return self.store
        return stack.enter_context(self.away.connect(transport=transport))


@contextmanager
def place(inside: bool) -> Iterator[Place]:
    with short_folder() as folder, ExitStack() as stack:
        yield Place(folder, stack, inside=inside)


def run(where: Place, number: int) -> dict[str, int]:
    """A group, some who publish and some who follow; and what must hold of it."""
    dice, name = random.Random(number), f"g{number}"
    lines = dice.choice(SETTINGS)
    most = dice.choice([200, 4_000, 60_000, 900_000, 18_000_000])
    if any("depth" in line or "keep" in line for line in lines):
        most = min(most, WHOLE_BYTES - 100)  # a body in parts that `depth` cuts comes as parts
    with ExitStack() as stack:
        group = where.client(stack, "9p").group(name, create=True, ctl=lines)
        streams = ["s", "a.x", "a.y"]
        group.create(*streams, "end")
        actors: list[Actor] = []

        def add(does: str, transport: str, **more: object) -> None:
            own = where.away is None or more.get("file") or dice.random() < 0.7
            spec = {
                "does": does, "transport": transport, "group": name, "seed": dice.random(), "seconds": ROUND_S,
                "address": where.away.address if where.away is not None else "", **more,
            }  # fmt: skip
            actors.append(Actor(spec, where.client(stack, transport) if own else None))
            stack.callback(actors[-1].close)

        for follower in range(dice.randint(2, 4)):
            patterns = dice.choice([["#"], ["*", "a.*"], ["s"], ["a.*"], ["a.x", "s"]])
            speed = dice.choice([(0.0, 0.0), (0.02, 1.6), (0.5, 0.01), (0.005, 3.0)])
            add(
                "follow", dice.choice(where.transports), name=f"f{follower}",
                patterns=[*patterns, "end"], often=speed[0], pause=speed[1],
            )  # fmt: skip
        for publisher in range(dice.randint(1, 4)):
            stream, transport, file, its_most = dice.choice(streams), dice.choice(where.transports), "", most
            if where.mount is not None and dice.random() < 0.3:
                transport, file, its_most = "9p", str(where.mount / name / stream), min(most, WHOLE_BYTES - 100)
            add(
                "publish", transport, name=f"p{publisher}", stream=stream, most=its_most, file=file,
                pause=dice.choice([0.0, 0.002, 0.05, 0.5]), wait=dice.choice(["committed", "published"]),
            )  # fmt: skip
        for actor in actors:
            actor.ready()
        for actor in actors:
            actor.go()
        if dice.random() < 0.3:
            group.ctl(f"ttl {dice.randint(1, 9)}h")  # ends a ring
        publishers = [actor for actor in actors if actor.spec["does"] == "publish"]
        sent = {actor.spec["name"]: (actor.spec["stream"], actor.result()) for actor in publishers}
        group.publish("end", b"end")
        total = {
            "messages": sum(r["sent"] for _, r in sent.values()),
            "bytes": sum(r["bytes"] for _, r in sent.values()),
        }
        total |= {"given": 0, "lost": 0, "told": 0}
        for actor in actors:
            if actor.spec["does"] == "follow":
                result = actor.result()
                wants = [n for n, (stream, _) in sent.items() if is_wanted(actor.spec["patterns"], stream)]
                assert set(result["got"]) <= set(wants)
                lost = sum(sent[n][1]["sent"] - result["got"].get(n, 0) for n in wants)
                what = f"{lines} {actor.spec}: {result}, sent {sent}"
                assert lost <= result["told"], f"lost {lost}, {result['told']} reported: {what}"
                assert lost or not result["told"], f"nothing was lost: {what}"
                if "replay all" in lines and not any("depth" in line or "keep" in line for line in lines):
                    assert not lost, what
                total["given"] += sum(result["got"].values())
                total["lost"] += lost
                total["told"] += result["told"]
        for stream in group.streams():
            group.remove(stream)
    return total


def is_wanted(patterns: list[str], stream: str) -> bool:
    return (
        stream in patterns
        or "#" in patterns
        or ("a.*" in patterns and stream != "s")
        or ("*" in patterns and stream == "s")
    )


@pytest.mark.timeout(SECONDS * 3 + 600)
@pytest.mark.parametrize("inside", [False, True], ids=["server", "inside"])
def test_each_message_is_given_or_told_to_be_lost(inside: bool) -> None:
    total: dict[str, int] = {}
    seconds = SECONDS * (0.2 if inside else 0.8)
    with place(inside) as where:
        number, until = seed() * 100_000, time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                counts = run(where, number)
            except Exception as error:
                raise AssertionError(f"round {number}: {type(error).__name__}: {error}") from error
            total = {key: total.get(key, 0) + value for key, value in counts.items()}
            number += 1
    print(f"{number - seed() * 100_000} rounds in {seconds:.0f} s: {total}")
