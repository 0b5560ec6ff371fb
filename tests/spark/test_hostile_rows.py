"""Rows that no one writes by accident: a batch is refused in one line or is there whole, and the server serves on."""

from __future__ import annotations

import random
import re
from typing import Any

from mqfs import limits
from tests.ninep.hostile import KEYS, NAMES, TEXTS, Hostile
from tests.spark.scene import Scene
from tests.spark.test_sink import parts, write
from tests.support.campaign import seed, size

SCHEMA = "value binary, key string, topic string, headers array<struct<key:string,value:binary>>"
CLEAR = re.compile(r"(?:SinkError|OptionError): [^\n]+")
Row = tuple[bytes | None, str | None, str | None, list[Any] | None]


def sendable(texts: list[str]) -> list[str | None]:
    """What Spark takes for a string."""
    return [None, *(text for text in texts if text.isascii() or text.encode("utf-8", "replace").decode() == text)]


TOPICS = sendable([f"{group}/{name}" for group in ("g", "h", "none", "", "g/deep", ".txn") for name in NAMES])


def hostile_row(hostile: Hostile, tag: bytes) -> Row:
    dice = hostile.dice
    value = None if dice.random() < 0.05 else dice.choice([b"", tag, tag]) + hostile.body(limits.MESSAGE_BYTES)
    heads = [dice.choice([None, (dice.choice(sendable(KEYS)), dice.choice([None, b"\xff", *map(_bytes, TEXTS)]))])
             for _ in range(dice.choice([0, 1, 1, 3]))]  # fmt: skip
    return value, dice.choice(sendable(TEXTS)), dice.choice(TOPICS), dice.choice([None, heads])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def test_hostile_rows(spark: Any, scene: Scene) -> None:
    dice = random.Random(seed())
    hostile = Hostile(dice)
    for group in ("g", "h"):
        scene.group(group)
    scene.stream("g/witness")
    sent: dict[tuple[int, str], set[bytes]] = {}  # by batch and group
    written, refused = set[int](), set[int]()
    for number in range(size(80, least=6)):
        rows: list[Row] = []
        for turn in range(dice.choice([1, 2, 20])):
            tag, group = b"<%d.%d>" % (number, turn), dice.choice("gh")
            if dice.random() < 0.15:
                row = hostile_row(hostile, tag)
            else:
                row = (
                    tag + hostile.body(4_097),
                    dice.choice([None, "k"]),
                    f"{group}/s",
                    dice.choice([None, [("x", b"1")]]),
                )
            rows.append(row)
            if row[0] is not None and row[0].startswith(tag) and row[2] is not None:
                sent.setdefault((number, row[2].partition("/")[0]), set()).add(tag)
        frame = spark.createDataFrame(rows, SCHEMA).coalesce(dice.choice([1, 2]))
        refusal = attempt(frame, scene, dice.choice(["drop", "keep", "refuse"]))
        assert refusal is None or CLEAR.search(refusal), f"batch {number}: {refusal}"
        (refused if refusal else written).add(number)
        scene.write("g/witness", b"witness %d" % number)
    found = {group: kept(scene, group) for group in ("g", "h")}
    for (number, group), tags in sent.items():
        there = tags & found.get(group, set())
        assert there in (set(), tags), f"batch {number}: {len(there)} of {len(tags)} rows in {group}"
        assert number not in written or there == tags or group not in found, f"batch {number} is missing"
    assert {b"witness %d" % number for number in written | refused} <= found["g"]
    assert parts(scene, "g") == parts(scene, "h") == []
    assert written
    assert refused


def attempt(frame: Any, scene: Scene, reserved: str) -> str | None:
    try:
        write(frame, scene, reservedHeaders=reserved)
    except Exception as error:
        return str(error)
    return None


def kept(scene: Scene, group: str) -> set[bytes]:
    """What each message begins with."""
    with scene.client.open(f"{group}/.cursor", "r+") as cursor:
        cursor.write(b"seek first\nuntil end\nformat each\n")
        found = set()
        while True:
            body = cursor.receive()
            if not body:  # the end of a message; two: of all
                break
            found.add(body.partition(b">")[0] + b">" if body.startswith(b"<") else body)
            cursor.receive()
        return found
