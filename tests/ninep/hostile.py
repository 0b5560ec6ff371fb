"""Names, bodies, headers and frames that no one sends by accident; most may be refused, and some are valid."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from mqfs import limits
from mqfs.records import headers, record

NAMES = [
    "s", "t", "s", "t", "g", "none", "", ".", "..", "ctl", "order", ".put", ".batch", ".cursor", ".txn", "s/", "a/b",
    "../h/s", "/s", "a\0b", "a\nb", "\x1b[2J", "\x7f", "\u202e", "\ufeff", "\udcff", "\u00fc", "\U0001f512", "#", "*",
    "a.#", "'", '"', "null", "n" * 255, "n" * 256, "\u00fc" * 127, "\u00fc" * 128, "x" * 70_000, " ", "-", "%s%n",
]  # fmt: skip
KEYS = [
    *sorted(headers.RESERVED), "part", "", "k", "K" * 255, "K" * 256, "\u00fc" * 128, "a\0", "\n", "\udcff", "\u202e",
]  # fmt: skip
TEXTS = [
    "", "v", "0", "0/0", "1/0", "3/2", "1/1", "999999999/999999999", "9" * 400, "v" * 16_300, "v" * 16_400, "\udcff",
    "\0", "\n", "x" * 70_000,
]  # fmt: skip
VALUES = [
    None, True, False, 0, -1, 7, 1 << 70, 1.5, -0.0, float("inf"), float("nan"), "", "30s", "9" * 5_000, "-1s", "1e9s",
    [], [[]], {}, {"a": 1},
]  # fmt: skip
SIZES = [0, 1, 2, 31, 32, 33, 900, 4_095, 4_096, 4_097]
BIG = [65_535, 65_536, limits.MESSAGE_BYTES - 1, limits.MESSAGE_BYTES, limits.MESSAGE_BYTES + 1]


class Hostile:
    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def name(self) -> str:
        return self.dice.choice(NAMES)

    def body(self, most: int = limits.MESSAGE_BYTES + 1) -> bytes:
        dice = self.dice
        count = min(dice.choice(SIZES if dice.random() < 0.97 else BIG), most)
        kind = dice.randrange(7)
        if kind == 0:
            return dice.randbytes(count)
        if kind == 1:
            return b"\n" * count
        if kind == 2:
            return bytes(count)
        if kind == 3:  # what a log, a ring or `format record` would take for records
            rows = record.encode(
                dice.getrandbits(40), dice.getrandbits(60), 16, dice.randrange(1, 8), 0, b"", b"forged"
            )
            return (rows * (count // len(rows) + 1))[:most]
        if kind == 4:
            return b"\xff\xfe\xed\x80" * (count // 4)
        if kind == 5:
            return json.dumps({"stream": "s", "body": "x", "sequence": 1}).encode()[:most]
        return b"x" * count

    def texts(self) -> dict[str, str]:
        """Headers."""
        return {self.dice.choice(KEYS): self.dice.choice(TEXTS) for _ in range(self.dice.choice([0, 1, 1, 2, 9]))}

    def raw_headers(self) -> bytes:
        """Encoded, or nearly so."""
        dice = self.dice
        if dice.random() < 0.5:
            plain = {
                k: v for k, v in self.texts().items() if len(k.encode("utf-8", "replace")) < 256 and len(v) < 65_536
            }
            try:
                data = headers.encode(plain)
            except UnicodeEncodeError:
                data = b"\x01\xff\x01\x00\xff"
        else:
            data = dice.choice(
                [b"\x00", b"\xff", b"\x01a", b"\x01a\xff\xff", b"\x00\x00\x00", dice.randbytes(9), bytes(40)]
            )
        return data[: dice.choice([0, 1, len(data), len(data), len(data)])]

    def put(self) -> bytes:
        """One write to `.put`."""
        dice = self.dice
        said: dict[str, Any] = {"stream": self.name() if dice.random() < 0.5 else "s"}
        for key in dice.sample(
            ["delay", "at", "ttl", "priority", "id", "single", "headers", "stream", "no"], dice.choice([0, 1, 1, 2])
        ):
            said[key] = (
                dice.choice([*VALUES, self.texts()]) if key != "headers" or dice.random() < 0.3 else self.texts()
            )
        head = json.dumps(said, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogateescape")
        edit = dice.random()
        if edit < 0.1:
            head = head[: dice.randrange(len(head) + 1)]
        elif edit < 0.2:
            head = dice.choice(
                [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b"\xff", b'{"stream":"s","stream":"t"}', b"null"]
            )
        return head + dice.choice([b" ", b"\n", b"\t", b"", b"\0"]) + self.body(900)

    def frame(self) -> bytes:
        """One of `.batch`, its numbers right or not."""
        dice = self.dice
        name = (self.name() if dice.random() < 0.4 else "s").encode("utf-8", "surrogateescape")[:65_535]
        head, body = self.raw_headers()[:65_535] if dice.random() < 0.5 else b"", self.body(900)
        sizes = [8 + len(name) + len(head) + len(body), len(name), len(head)]
        if dice.random() < 0.2:
            at = dice.randrange(3)
            most = (1 << 32) - 1 if at == 0 else 65_535
            sizes[at] = dice.choice([0, 1, 7, 8, sizes[at] + 1, max(sizes[at] - 1, 0), most]) & most
        return struct.pack("<IHH", *sizes) + name + head + body

    def batch(self) -> bytes:
        data = b"".join(self.frame() for _ in range(self.dice.choice([0, 1, 1, 2, 5])))
        return data if self.dice.random() < 0.8 else data[: self.dice.randrange(len(data) + 1)]

    def command(self, parts: list[str]) -> bytes:
        """One of `.txn/ctl`."""
        dice = self.dice
        name = dice.choice(["job", "", ".", "a.b", "\u00fc" * 200, "x" * 300, "\0", "'", "\x1b[2J"])
        number = dice.choice(["0", "1", str(dice.getrandbits(40)), "-1", "9" * 400, "x", "", str((1 << 64) - 1)])
        some = [dice.choice([*parts, *parts, self.name()]) for _ in range(dice.choice([0, 1, 1, 2, 30]))]
        line = dice.choice(
            [f"commit {name}.{number} {' '.join(some)}", f"abort {' '.join(some)}", f"forget {name}", "commit", "x"]
        )
        return line.encode("utf-8", "surrogateescape") + dice.choice([b"\n", b"", b"\n\n", b"\ncommit a.1"])
