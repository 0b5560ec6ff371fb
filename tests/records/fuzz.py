"""Each function in C on generated input, beside the same in Python. With sanitizers, a byte out of bounds ends it.

    python -m tests.records.fuzz SECONDS SEED [NAME...]

Each NAME has that many seconds, and a line that says how many rounds these were. The seed of a failing round is
printed: it repeats that round. Inputs are valid ones with a few bytes changed, cut or repeated: noise is refused at the
first look.
"""

from __future__ import annotations

import mmap
import sys
import time
from argparse import Namespace
from array import array
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import google_crc32c
import pytest

from mqfs import errors, limits, ring
from mqfs.client import message
from mqfs.client.transport import ring_subscription
from mqfs.engine.language import batch_frames
from mqfs.model import MORE, RecordColumns
from mqfs.records import batch, columns, headers, record
from mqfs.records.record import HEAD_BYTES, INNER, padded, row_at
from mqfs.ring import _native as native_ring
from mqfs.syntax.patterns import DOTTED

EDGES = [
    0,
    1,
    7,
    8,
    31,
    32,
    33,
    255,
    256,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 8,
    2**32 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
]
SENDER = headers.encode({"sender": "7"})
NAMES = ["", "s", "t", "s0001", "a.stream.with.a.long.name", "\u00e9", "x" * 255]
RING_BYTES = 1 << 16
REFUSED = (errors.MqfsError, ValueError, OverflowError, KeyError)


def sized(dice: Random) -> bytes:
    """Bytes of a length near one that matters."""
    return dice.randbytes(max(0, dice.choice([0, 0, 1, 7, 8, 9, 40, 300]) + dice.randint(-1, 1)))


def mutated(dice: Random, data: bytes) -> bytes:
    """A few bytes changed, or a word set to a boundary, or cut, or a piece repeated; or as it was."""
    made = bytearray(data)
    for _ in range(dice.choice([0, 0, 1, 1, 2, 5]) if made else 0):
        at = dice.randrange(len(made))
        how = dice.randrange(5)
        if how == 0:
            made[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            width = dice.choice([1, 2, 4, 8])
            word = at // width * width
            made[word : word + width] = (dice.choice(EDGES) % (1 << 8 * width)).to_bytes(width, "little")
        elif how == 2:
            del made[at:]
        elif how == 3:
            made[at:at] = made[at : at + dice.randrange(64)]
        else:
            made[at] = dice.randrange(256)
        if not made:
            break
    return bytes(made)


def head(dice: Random) -> bytes:
    texts = {
        dice.choice(["a", "b", "part", "sender", "é", "k" * 255]): dice.choice(["", "1", "3/17", "v" * 30])
        for _ in range(dice.choice([0, 0, 0, 1, 3, 70]))
    }
    return headers.encode(texts)


def log(dice: Random) -> bytes:
    """A run of records, some in batches."""
    made, sequence, inner = [], dice.choice([1, 40, 2**40]), 0
    for _ in range(dice.choice([0, 1, 2, 5, 20, 100])):
        kind, more = dice.choice([1, 1, 1, 1, 2, 3, 4, 6]), dice.choice([0, MORE])
        sequence += kind <= 2
        stamp = dice.choice([0, -1, 999, 2**62, -(2**63)])
        made.append(
            record.encode(
                sequence,
                stamp,
                dice.choice([3, 4, 5, 7, 70_000, 2**32 - 1]),
                kind,
                more | inner,
                head(dice),
                sized(dice),
            )
        )
        inner = INNER if more else 0
    return mutated(dice, b"".join(made))


def outcome(step: Callable[[], Any]) -> Any:
    """What a call returns, or what it refuses with."""
    try:
        return step()
    except REFUSED as error:
        return type(error), str(error)


def both(step: Callable[[], Any]) -> None:
    """Run a step in C and in Python. Raises AssertionError where the outcomes differ."""
    done = outcome(step)
    batch.MISSING = columns.MISSING = "asked for"
    try:
        expected = outcome(step)
    finally:
        batch.MISSING = columns.MISSING = ""
    assert done == expected, (done, expected)


# ---------------------------------------------------------------- log/


def pack(dice: Random) -> None:
    frames = []
    for _ in range(dice.choice([0, 1, 3, 20, 1_000])):
        name, texts, body = dice.choice(NAMES).encode(), head(dice) if dice.random() < 0.2 else b"", sized(dice)
        size = 8 + len(name) + len(texts) + len(body)
        frames.append(
            size.to_bytes(4, "little")
            + len(name).to_bytes(2, "little")
            + len(texts).to_bytes(2, "little")
            + name
            + texts
            + body
        )
    data = mutated(dice, b"".join(frames))
    known = {name.encode(): place for place, name in enumerate(dice.sample(NAMES, dice.randrange(4)))}
    always, limits.BATCH_PIECE_BYTES = dice.random() < 0.1, dice.choice([1, 8, 100, 64 << 10])
    both(lambda: batch_frames.Packing(data, known, SENDER, always).whole())
    both(lambda: batch.count_frames(data))


def stamp(dice: Random) -> None:
    rows = [(dice.choice(NAMES), dice.choice([b"", SENDER]), sized(dice)) for _ in range(dice.choice([0, 1, 3, 50]))]
    made = batch.concatenate(rows, {})
    numbers = array(
        "I", [dice.choice(EDGES) % 2**32 for _ in range(max(0, len(made.fresh) + dice.choice([0, 0, 0, -1, 1])))]
    )
    data, sequence, time_ns = mutated(dice, made.data), dice.choice([1, 2**40]), dice.choice([0, -1, 2**62])
    flags, left, base = dice.sample([0, 1, 2, 3, 4, 255], 2), dice.choice([0, 1, 2, 9]), dice.choice([0, 8, 2**31])
    both(lambda: batch.finalize(data, numbers, sequence, time_ns, *flags, left, base))


def unit(dice: Random) -> None:
    data, at, base = log(dice), dice.choice([0, 0, 0, 8, 40, *EDGES]), dice.choice([0, 4_096])
    found = batch.scan_batch(data, at, base)
    rows, others, end = [], 0, at
    while at < 2**62 and (row := row_at(data, end, base)):
        if (row.flags & INNER) != (INNER if rows or others else 0) or (
            not rows and not others and not row.flags & MORE
        ):
            break
        end += padded(row.size)
        rows += [row] if row.kind <= 2 else []
        others += row.kind > 2
        if not row.flags & MORE:
            assert found is not None
            assert (found.end, len(found.others)) == (end, 24 * others)
            assert found.columns[0] == array("Q", [row.sequence for row in rows]).tobytes()
            assert found.columns[2] == array("I", [row.position for row in rows]).tobytes()
            assert found.columns[3] == array("I", [row.body for row in rows]).tobytes()
            return
    assert found is None


def postings(dice: Random) -> None:
    few = dice.choice([1, 3, 40, 200, 2**32])
    streams = array(
        "I", [dice.randrange(few) * dice.choice([1, 1, 7]) % 2**32 for _ in range(dice.choice([0, 1, 30, 31, 33, 500]))]
    )
    begin = dice.choice([0, 5, 2**31])
    both(lambda: [(stream, bytes(rows)) for stream, rows in batch.postings(streams, begin)])
    bodies = array("I", [dice.choice([0, 1, 2**32 - 1]) for _ in streams])
    rows = RecordColumns(0, *(memoryview(column) for column in (b"", b"", b"", bodies, streams, b"", b"", b"")))
    both(lambda: batch.tally(rows))
    column = array(dice.choice("BHI"), [dice.randrange(256) for _ in streams])
    ordinals = array("I", [dice.randrange(len(streams)) for _ in streams])
    both(lambda: batch.total(column, ordinals))


def search(dice: Random) -> None:
    """In any bytes, of which some are headers."""
    data = b"".join(dice.choice([b"\1k\0\0", b"\1k\2\0vv", b"\3ttl\1\0", dice.randbytes(9)]) for _ in range(99))
    positions = array("I", sorted(7 + dice.randrange(len(data) + 50) for _ in range(dice.randrange(30))))
    sizes = array("H", [dice.choice([0, 1, 9, 60, 2**16 - 1]) for _ in positions])
    keys = dice.sample([b"\1k", b"\3ttl", b"\4none"], dice.randrange(4))
    both(lambda: batch.search(data, 7, positions, sizes, keys))


def gather(dice: Random) -> None:
    streams = {
        number: (dice.choice(NAMES), *(dice.choice([0, 1, 41, 2**40, 2**64 - 1]) for _ in "ab"))
        for number in dice.sample([3, 4, 5, 7, 70_000, 2**32 - 1], dice.randrange(6))
    }
    data, table = log(dice), columns.NameTable.of(streams)
    begin, asked = dice.choice([0, 0, 0, 8, len(data), len(data) + 1]), dice.randrange(256) & 0b10101011
    strangers, torn = dice.random() < 0.8, dice.random() < 0.2

    def step() -> Any:
        found = columns.columns(data, begin, table, asked, strangers=strangers)
        widths = (8, 8, None, None, None, None, 4, 2)
        plain = [
            None if part is None else bytes(part if width is None else part[: width * found.rows])
            for part, width in zip(found[3:], widths, strict=True)
        ]
        ends = [plain[at] and plain[at][: 4 * (found.rows + 1)] for at in (2, 4)]
        sizes = [int.from_bytes(end[-4:], "little") if end else 0 for end in ends]
        return (
            found[:3],
            plain[:2],
            ends,
            [plain[at] and plain[at][:size] for at, size in zip((3, 5), sizes, strict=True)],
            plain[6:],
        )

    if begin <= len(data) and not torn:
        both(step)
    else:  # other bytes are there at the second look: anything but a write out of bounds
        changed = bytearray(data)

        def allocate(size: int) -> bytearray:
            changed[:] = log(dice)[: len(changed)].ljust(len(changed), b"\0")
            return bytearray(size)

        outcome(lambda: columns.columns(changed, begin, table, asked, strangers=True, allocate=allocate))


def pick(dice: Random) -> None:
    data, wanted = log(dice), sorted(dice.sample([3, 4, 5, 7, 70_000, 2**32 - 1], dice.randrange(6)))
    found = columns.filter_run(data, array("I", wanted))
    at, last, kept, newest, headed, seen = 0, 0, [], -1, False, set()
    while (row := row_at(data, at)) is not None and at + padded(row.size) <= len(data):
        last, headed = row.sequence, headed or bool(row.headers)
        if row.kind <= 2 and row.stream in wanted:
            kept.append(data[at : at + padded(row.size)])
            newest = at
            seen.add(row.stream)
        at += padded(row.size)
    assert found[:4] == (at, last, len(kept), newest)
    assert bool(found.headed) == headed
    assert {number for number, some in zip(wanted, found.seen, strict=True) if some} == seen
    assert (data[:at] if found.kept is None else found.kept) == b"".join(kept)


def messages(dice: Random) -> None:
    """Records with names, in pieces, as a subscription receives them."""
    names = {3: "s", 4: "é", 5: "t" * 255, 7: "s0001"}
    data = record.encode_names(1, 0, dict(dice.sample([*names.items()], dice.randrange(5)))) + log(dice)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randrange(4)))
    pieces = [data[begin:end] for begin, end in pairwise([0, *cuts, len(data)])]

    def step() -> Any:
        decoder = message.RecordDecoder()
        return [outcome(lambda: decoder.feed(piece)) for piece in pieces]  # noqa: B023

    in_python(step)


def in_python(step: Callable[[], Any]) -> None:
    """Run a step with messages made in C and in Python. Raises AssertionError where the outcomes differ."""
    done = outcome(step)
    with pytest.MonkeyPatch.context() as patch:
        for module in (message, ring_subscription):
            patch.setattr(module, "native_messages", lambda data, at, *_: (at, 0, 0, 0))
        expected = outcome(step)
    assert done == expected, (done, expected)


def ranges(dice: Random) -> None:
    """Records of a ring, of which a subscription selects some streams and those that have not expired."""
    data, known = log(dice), {3: "s", 4: "é", 5: "t" * 255, 7: "s0001"}
    selected = dice.sample([*known.values()], dice.randrange(5))
    ttl_ns = dice.choice([0, 0, 1, 2**62])

    def step() -> Any:
        chosen = ring_subscription.RingFilter(selected)
        chosen.attach(Namespace(name=known.get, words=DOTTED, ttl_ns=ttl_ns))  # type: ignore[arg-type]
        return chosen.messages(data)

    in_python(step)


# ---------------------------------------------------------------- ring/


def scan(dice: Random) -> None:
    data, base = log(dice), dice.choice([0, 4_096, 2**31])
    found, at, rows = ring.scan(data, base), 0, []
    while (row := row_at(data, at, base)) and at + padded(row.size) <= len(data):
        rows.append((row.sequence, row.time_ns, row.position, row.body, row.stream, row.headers, row.kind, row.flags))
        at += padded(row.size)
    assert (found.end, [*zip(*found[1:], strict=True)]) == (at, rows)


def crc(dice: Random) -> None:
    data, cut = dice.randbytes(dice.choice([0, 1, 7, 8, 100, 5_000]) + dice.randrange(9)), dice.randrange(9)
    view = memoryview(data)[cut:]
    assert ring.crc32c(view) == native_ring.crc32c(view, 0, True) == google_crc32c.value(bytes(view))
    assert ring.crc32c(view[7:], ring.crc32c(view[:7])) == google_crc32c.value(bytes(view))


def drafts(dice: Random) -> list[tuple[int, int, bytes, bytes]]:
    large = [RING_BYTES // 2 - HEAD_BYTES, RING_BYTES // 2 - HEAD_BYTES + 1, 65_535, 65_536]
    some = [
        (dice.choice([1, 1, 1, 2, 3, 6]), dice.choice(EDGES) % 2**32, sized(dice), head(dice))
        for _ in range(dice.choice([1, 3, 65, 300]))
    ]
    if dice.random() < 0.2:
        some.append((1, 1, bytes(dice.choice(large)), bytes(dice.choice([0, *large]))))
    return some


def published_by(of: ring.Ring, how: str, each: list[tuple[int, int, bytes, bytes]]) -> int:
    if how == "publish":
        kind, stream, body, texts = each[0]
        return of.publish(stream, body, texts, kind, 0, 0)
    if how == "publish_many":
        return of.publish_many(9, [body for _, _, body, _ in each], 0)
    if how == "publish_pairs":
        return of.publish_pairs({"é": 9}, [("é", body) for _, _, body, _ in each], 2**32 - 1, 0) or 0
    if how == "publish_now":
        return of.publish_now({"é": 9}, "é", each[0][2]) or 0
    publisher: Callable[..., int] = getattr(of, how)
    return publisher(each, 0)


def publish(dice: Random) -> None:
    """A record published in each way is read in each way, as Python would encode it."""
    of = ring.create(RING_BYTES, sequence=7)
    reader, bytewise = of.consumer(gates=True), of.consumer(gates=True)
    position, sequence = 0, 6
    for _ in range(dice.randrange(1, 9)):
        each = drafts(dice)[: dice.choice([1, 1, 400])]
        how = dice.choice(["publish", "publish_now", "publish_many", "publish_pairs", "publish_unit"])
        if how in ("publish", "publish_now"):
            del each[1:]
        if how in ("publish_now", "publish_many", "publish_pairs"):
            each = [(1, 9, body, b"") for _, _, body, _ in each]
        before = of.tail
        try:
            if not published_by(of, how, each):
                assert how.startswith("publish_now") or not all(body for _, _, body, _ in each)
                each = []
        except REFUSED as error:
            del each[getattr(error, "published", 0) :]
            assert each or of.tail == before
        data = bytewise.range(1 << 20, 0) or b""
        at = 0
        for number, (kind, stream, body, texts) in enumerate(each):
            sequence += kind <= 2
            flags = (MORE if number + 1 < len(each) else 0) | (INNER if number else 0) if how == "publish_unit" else 0
            row = row_at(data, at)
            assert row is not None
            assert data[at : at + padded(row.size)] == record.encode(
                sequence, row.time_ns, stream, kind, flags, texts, body
            )
            at += padded(row.size)
        assert at == len(data)
        taken = reader.records(1_000, 0)
        assert [(r[2], r[3], r[5], r[6]) for r in taken] == [
            (stream, kind, texts, body) for kind, stream, body, texts in each
        ]
        position += at
        assert of.tail == position
    of.consumer().close()


def hostile(dice: Random) -> None:
    """A client writes anything anywhere into a ring: each call returns, with records that are whole, or refuses."""
    of = ring.create(RING_BYTES)
    memory = mmap.mmap(of.fileno(), ring.HEAD_BYTES + RING_BYTES)
    readers = [of.consumer(gates=dice.random() < 0.5, hold=dice.random() < 0.3) for _ in range(2)]
    if dice.random() < 0.5:
        readers.append(of.consumer(kept=True))
    calls: list[Callable[[], Any]] = [
        lambda: of.publish(3, sized(dice), head(dice), 1, 0, 0),
        lambda: of.publish_unit(drafts(dice)[:40], 0),
        lambda: of.publish_now({"s": 3}, "s", sized(dice)),
        lambda: of.publish_pairs({"s": 3}, [("s", sized(dice) or b"x")] * dice.choice([1, 65, 300]), 2**32 - 1, 0),
        lambda: dice.choice(readers).records(dice.choice([1, 50]), 0),
        lambda: dice.choice(readers).record(0),
        lambda: dice.choice(readers).body(0),
        lambda: dice.choice(readers).bodies(50, 0),
        lambda: dice.choice(readers).range(dice.choice([1, 4_096, 1 << 20, 2**64 - 1]), 0),
        lambda: dice.choice(readers).release(),
        lambda: dice.choice(readers).skip(),
        lambda: of.slots(),
        lambda: (of.tail, of.committed, of.recovered, of.retired, of.final, of.next, of.holder),
        lambda: of.wait_committed(dice.choice(EDGES), 0),
        lambda: of.wait(dice.choice(EDGES), 0),
        lambda: of.grant(dice.choice(EDGES)),
        lambda: of.commit(dice.choice(EDGES)),
        lambda: ring.attach(of.fileno()).close(),
    ]  # fmt: skip
    for _ in range(dice.randrange(1, 60)):
        if dice.random() < 0.5:
            at = dice.choice(
                [
                    56,
                    64,
                    144,
                    152,
                    160,
                    176,
                    256,
                    264,
                    640,
                    768 + 128 * dice.randrange(4) + 8,
                    ring.HEAD_BYTES + 8 * dice.randrange(60),
                    8 * dice.randrange(200),
                ]
            )
            tail = int.from_bytes(memory[256:264], "little")
            value = dice.choice(
                [*EDGES, tail + 8 * dice.randint(-9, 9), tail + dice.choice([-1, 1]) * RING_BYTES, dice.getrandbits(64)]
            )
            memory[at : at + 8] = (value % 2**64).to_bytes(8, "little")
            memory[128:132] = bytes(4)  # the lock: a call that waits for it says so after a while
        found = outcome(dice.choice(calls))
        if isinstance(found, bytes):
            assert len(found) <= RING_BYTES


FUZZED: dict[str, Callable[[Random], None]] = {
    "pack": pack, "stamp": stamp, "unit": unit, "postings": postings, "search": search, "columns": gather, "pick": pick,
    "messages": messages, "ranges": ranges, "scan": scan, "crc32c": crc, "publish": publish, "hostile": hostile,
}  # fmt: skip


def run(name: str, seconds: float, seed: int) -> int:
    """Rounds of one function for that long. A failure tells its seed."""
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end or not rounds:
        try:
            FUZZED[name](Random(seed))
        except BaseException:
            print(f"fuzz: {name} failed at seed {seed}", file=sys.stderr)
            raise
        seed, rounds = seed + 1, rounds + 1
    return rounds


def main(seconds: str, seed: str, *names: str) -> None:
    limits.MESSAGE_BYTES = 1_000  # so that a body can be too large here
    for name in names or FUZZED:
        print(f"{name}: {run(name, float(seconds), int(seed))} rounds", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
