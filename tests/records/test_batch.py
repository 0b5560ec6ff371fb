"""Bulk work in C does the same as Python does message by message: the same bytes, and the same refusals."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqfs import errors, limits
from mqfs.engine.language import batch_frames
from mqfs.model import MORE, NEVER, Kind, RecordColumns
from mqfs.records import batch, headers
from mqfs.records.record import encode
from mqfs.ring import scan
from mqfs.store.segment.index import NonMessageRecords, OpenIndex
from mqfs.store.segment.recovery import scan_segment
from tests.support.batches import Units, frame
from tests.support.campaign import size
from tests.support.chosen_numbers import crowded_numbers
from tests.support.temp_store import lowered

INNER, SETTLED = 2, 4
SENDER = headers.encode({"sender": "7"})
pytestmark = pytest.mark.skipif(bool(batch.MISSING), reason=f"mqfs/records was not built: {batch.MISSING}")


@contextmanager
def in_python() -> Iterator[None]:
    batch.MISSING = "asked for"
    try:
        yield
    finally:
        batch.MISSING = ""


names = st.one_of(
    st.sampled_from(["s", "t", "s0001", "s0002", "a.stream.with.a.long.name"]),
    st.text(max_size=20),
)
keys = st.one_of(st.sampled_from(["a", "b", "key", "sender", "priority", ""]), st.text(max_size=12))
heads = st.lists(st.tuples(keys, st.text(max_size=20)), max_size=3)
bodies = st.binary(max_size=40)


def encoded(name: str, head: list[tuple[str, str]], body: bytes) -> bytes:
    """As `frame`, where a header may come twice."""
    text, some = name.encode(), b"".join(headers.encode({key: value}) for key, value in head)
    sizes = (8 + len(text) + len(some) + len(body)).to_bytes(4, "little"), len(text), len(some)
    return b"".join([sizes[0], *(n.to_bytes(2, "little") for n in sizes[1:]), text, some, body])


@st.composite
def written(draw: Any) -> bytes:
    """What a client may write, or nearly."""
    plain = draw(st.booleans())
    rows = draw(st.lists(st.tuples(names, st.just([]) if plain else heads, bodies), max_size=12))
    data = bytearray(b"".join(encoded(*row) for row in rows))
    for _ in range(draw(st.integers(0, 2)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def outcome(data: bytes, known: dict[bytes, int]) -> object:
    try:
        return batch_frames.Packing(data, known, SENDER).whole()
    except errors.MqfsError as error:
        return type(error), str(error)


@pytest.mark.slow
@settings(max_examples=size(3_000))
@given(written(), st.sampled_from([{}, {b"s": 0}, {b"t": 0, b"s0002": 1, b"s": 2}]))
def test_frames(data: bytes, known: dict[bytes, int]) -> None:
    done = outcome(data, dict(known))
    with in_python():
        assert outcome(data, dict(known)) == done


@pytest.mark.parametrize("name", ["", "s"])
@pytest.mark.parametrize("frames", [1, 1_000, 100_000])
def test_frames_as_small_as_they_can_be(name: str, frames: int) -> None:
    """No body, and no name either: as many frames as a write of that size can hold."""
    done = outcome(encoded(name, [], b"") * frames, {})
    with in_python():
        assert outcome(encoded(name, [], b"") * frames, {}) == done
    assert (done.messages == frames) if isinstance(done, batch.EncodedBatch) else not name


@pytest.mark.slow
@settings(max_examples=size(1_000))
@given(st.lists(st.tuples(names, st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=9)), bodies)))
def test_what_is_right_is_done_in_c(rows: list[tuple[str, dict[str, str], bytes]]) -> None:
    looked_at = headers.RESERVED | {headers.PART}  # in Python
    allowed = [row for row in rows if row[0] and not looked_at & row[1].keys()]
    done = batch.encode_batch(
        b"".join(encoded(name, list(head.items()), body) for name, head, body in allowed), {}, SENDER
    )
    messages = [(name, SENDER + headers.encode(head) if head else b"", body) for name, head, body in allowed]
    assert done is not None
    assert done[0] == batch.concatenate(messages, {})


@pytest.mark.slow
@settings(max_examples=size(1_000))
@given(written(), st.sampled_from([{}, {b"s": 0}]), st.integers(1, 60), st.booleans())
def test_frames_some_at_a_time(data: bytes, known: dict[bytes, int], piece: int, always: bool) -> None:
    """As in one piece, whatever their size; `sender on` too."""

    def whole() -> object:
        try:
            return batch_frames.Packing(data, known, SENDER, always).whole()
        except errors.MqfsError as error:
            return type(error), str(error)

    with in_python():
        expected = whole()
    with lowered(BATCH_PIECE_BYTES=piece):
        assert whole() == expected


@given(written(), st.binary(max_size=20))
def test_frames_are_counted(data: bytes, noise: bytes) -> None:
    done = batch.count_frames(data + noise)
    with in_python():
        assert batch.count_frames(data + noise) == done


@settings(max_examples=size(1_000))
@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    done = outcome(data, {})
    with in_python():
        assert outcome(data, {}) == done
    refused = []
    for _ in range(2):
        try:
            batch.finalize(data, array("I", [5, 6]), 1, 2, 0, 0, 0, 0)
            refused.append(False)
        except ValueError:
            refused.append(True)
        batch.MISSING = "" if batch.MISSING else "asked for"
    assert refused in ([True, True], [False, False])


BAD = {
    "frame 2: size 11 exceeds the 10 bytes of the write": frame("s", b"x") + frame("s", b"xy")[:-1],
    "frame 2: size 8 is less than its name and headers": frame("s", b"x") + b"\x08\0\0\0\x01\0\0\0",
    "frame 1: no name": bytes([8, 0, 0, 0, 0, 0, 0, 0]) * 1_000,
    "frame 3: invalid bytes in name or header": frame("s", b"x") * 2 + frame("u", b"x").replace(b"u", b"\xff"),
    "frame 1: invalid bytes in name or header": encoded("s", [("k", "abc")], b"x").replace(b"abc", b"a\xed\xa0"),
    "frame 1: header 'k': given twice": encoded("s", [("k", "1"), ("k", "2")], b"x"),
    "frame 1: header 'sender': set by the server": frame("s", b"x", sender="0"),
    "frame 1: header without a name": frame("s", b"x", **{"": "y"}),
    "frame 1: incomplete header": b"\x0c\0\0\0\x01\0\x02\0s\x09ax",
    "frame 1: headers of 16388 bytes": frame("s", b"x", a="b" * 16_384),
    "frame 1: message of 1044481 bytes": frame("s", b"x" * (limits.MESSAGE_BYTES + 1)),
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_left_to_python_which_says_so(text: str) -> None:
    before = int(text[6]) - 1
    found = batch.encode_batch(BAD[text], {}, SENDER)
    assert (found[0].messages if found is not None else 0) == before
    with pytest.raises(errors.MqfsError, match=text):
        batch_frames.Packing(BAD[text], {}, SENDER).whole()


@pytest.mark.slow
def test_more_headers_and_streams_than_it_looks_at_here() -> None:
    """Many streams: found again beyond what is remembered of the last ones. Many headers: done one by one."""
    data = b"".join(frame(f"s{n % 3_000}", b"%d" % n) for n in range(9_000))
    done = outcome(data, {b"s7": 0})
    assert isinstance(done, batch.EncodedBatch)
    assert [len(done.fresh), len(done.rows), done.rows[7].place, done.rows[7].messages] == [2_999, 3_000, 0, 3]
    many = frame("s", b"x", **{f"k{n}": "v" for n in range(200)})
    assert batch.encode_batch(many, {}, SENDER) is None
    for write in (data, many):
        done = outcome(write, {b"s7": 0})
        with in_python():
            assert outcome(write, {b"s7": 0}) == done


@settings(max_examples=size(1_000))
@given(
    st.lists(st.tuples(names, st.sampled_from([b"", SENDER]), bodies), max_size=12),
    st.integers(0, 14),
    st.booleans(),
)
def test_stamped(rows: list[tuple[str, bytes, bytes]], left: int, settled: bool) -> None:
    blanks = batch.concatenate(rows, {})
    numbers = array("I", range(100, 100 + len(blanks.fresh)))
    first = MORE | SETTLED if settled else MORE | INNER
    given = (blanks.data, numbers, (1 << 40) + 5, 1_700_000_000_000_000_000, first, MORE | INNER, left, 4_000_000)
    data, columns = batch.finalize(*given)
    with in_python():
        assert batch.finalize(*given) == (data, columns)
    assert scan(data, 4_000_000) == columns, "records of a log"
    assert columns.end == len(data) == len(blanks.data)
    wanted = [first, *[MORE | INNER] * len(rows)][: len(rows)]
    if 0 < left <= len(rows):
        wanted[left - 1] &= ~MORE
    assert list(columns.flags) == wanted


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)), max_size=300), st.integers(0, 10**6))
def test_postings(streams: list[int], begin: int) -> None:
    done = list(batch.postings(array("I", streams), begin))
    with in_python():
        assert list(batch.postings(array("I", streams), begin)) == done
    assert [stream for stream, _ in done] == list(dict.fromkeys(streams))
    for stream, rows in done:
        assert list(array("I", rows)) == [n for n, other in enumerate(streams, begin) if other == stream]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**32 - 1)), max_size=300))
def test_tally(rows: list[tuple[int, int]]) -> None:
    streams, bodies = (array("I", column) for column in zip(*rows, strict=True)) if rows else (array("I"), array("I"))
    columns = RecordColumns(0, *(memoryview(column) for column in (b"", b"", b"", bodies, streams, b"", b"", b"")))
    done = batch.tally(columns)
    with in_python():
        assert batch.tally(columns) == done
    for stream, *counted in done:
        mine = [number for number, other in enumerate(streams) if other == stream]
        assert counted == [len(mine), sum(bodies[number] for number in mine), mine[-1]]
    assert [row.place for row in done] == list(dict.fromkeys(streams))


def test_tally_of_columns_that_do_not_fit() -> None:
    two, three = (memoryview(array("I", [1] * count)) for count in (2, 3))
    rows = RecordColumns(0, three, three, three, three, two, three, three, three)
    with pytest.raises(ValueError, match="columns of different lengths"):
        batch.tally(rows)


HEADS = st.dictionaries(
    st.sampled_from(["k", "ttl", "kind", "x" * 200]), st.sampled_from(["", "v", "\3ttl", "y" * 300])
)


@given(st.lists(st.tuples(HEADS, st.binary(max_size=9)), max_size=20), st.integers(0, 1_000), st.integers(0, 60))
def test_search(records: list[tuple[dict[str, str], bytes]], begin: int, lacking: int) -> None:
    data, positions, sizes = b"", array("I"), array("H")
    for texts, body in records:
        head = headers.encode(texts)
        positions.append(begin + len(data))
        sizes.append(len(head))
        data += encode(1, 2, 3, 1, 0, head, body)
    keys = [headers.key("k"), headers.key("ttl")]
    wanted = [row for row, (texts, _) in enumerate(records) if not {"k", "ttl"}.isdisjoint(texts)]
    assert batch.search(data, begin, positions, sizes, keys) == wanted
    done = batch.search(data[:-lacking], begin, memoryview(positions), memoryview(sizes), keys)
    assert set(done) <= set(wanted), "where the log ends early"
    with in_python():
        assert batch.search(data, begin, positions, sizes, keys) == wanted
        assert batch.search(data[:-lacking], begin, positions, sizes, keys) == done


@pytest.mark.parametrize("code", "BHI")
@given(data=st.data())
def test_total(code: str, data: st.DataObject) -> None:
    column = array(code, data.draw(st.lists(st.integers(0, 256 ** array(code).itemsize - 1), min_size=1, max_size=300)))
    some = array("I", data.draw(st.lists(st.integers(0, len(column) - 1), max_size=300)))
    assert batch.total(column, some) == sum(column[ordinal] for ordinal in some)
    assert batch.total(memoryview(column), memoryview(some)) == batch.total(column, some)
    with in_python():
        assert batch.total(column, some) == sum(column[ordinal] for ordinal in some)


def test_total_of_what_is_not_there() -> None:
    for ordinal in (1, 2**32 - 1):
        with pytest.raises(IndexError):
            batch.total(array("I", [7]), array("I", [0, ordinal]))


def test_postings_of_many_streams() -> None:
    streams = array("I", [n * 7 for n in range(10_000)] * 2)
    assert all(list(array("I", rows)) == [s // 7, s // 7 + 10_000] for s, rows in batch.postings(streams, 0))


@pytest.mark.parametrize("numbers", ["crowded", "pairs of powers of two", "multiples"])
def test_no_numbers_of_streams_are_searched_for_long(numbers: str) -> None:
    """Whoever writes into a ring chooses them: they take about as long as numbers that follow one another."""
    count = 50_000
    powers = sorted({(1 << a) + (1 << b) + c for a in range(31) for b in range(31) for c in range(110)})
    chosen = {
        "crowded": crowded_numbers(count),
        "pairs of powers of two": array("I", powers[:count]),
        "multiples": array("I", range(0, count << 16, 1 << 16)),
    }[numbers]

    def measured(streams: array[int]) -> float:
        rows = RecordColumns(0, *(memoryview(streams) for _ in range(8)))
        began = time.process_time()
        assert len(batch.tally(rows)) == len(list(batch.postings(streams, 0))) == len(streams)
        return time.process_time() - began

    plain = min(measured(array("I", range(len(chosen)))) for _ in range(3))
    assert min(measured(chosen) for _ in range(3)) < 10 * plain + 0.1


KINDS = st.sampled_from([Kind.MESSAGE, Kind.MESSAGE, Kind.END, Kind.CHANGE, Kind.ACK])
UNITS = st.lists(st.lists(st.tuples(KINDS, st.integers(0, 40), st.binary(max_size=20), bodies), min_size=1, max_size=5))


def looked_through(log: bytes, tail: bool) -> tuple[object, ...]:
    index, others = OpenIndex(), NonMessageRecords()
    found = scan_segment(log, 4_096, index, others, covered=4_096 if tail else NEVER, tail=tail)
    columns = (index.sequences, index.times, index.positions, index.bodies, index.streams, index.headers, index.kinds)
    return found, [list(column) for column in columns], others.packed, others.last_ns


@pytest.mark.slow
@settings(max_examples=size(2_000))
@given(UNITS, st.data())
def test_units_of_a_log_that_is_looked_through(
    units: list[list[tuple[int, int, bytes, bytes]]], data: st.DataObject
) -> None:
    log, sequence = bytearray(), 10
    for unit in units:
        for n, (kind, stream, head, body) in enumerate(unit):
            sequence += kind <= Kind.END
            flags = (MORE if n < len(unit) - 1 else 0) | (INNER if n else data.draw(st.sampled_from([0, 0, SETTLED])))
            log += encode(sequence, sequence * 3, stream, kind, flags, head, body)
    for _ in range(data.draw(st.integers(0, 2)) if log else 0):
        log[data.draw(st.integers(0, len(log) - 1))] = data.draw(st.integers(0, 255))
    log = log[: data.draw(st.integers(0, len(log)))] if data.draw(st.booleans()) else log
    tail = data.draw(st.booleans())
    done = looked_through(bytes(log), tail)
    with in_python():
        assert looked_through(bytes(log), tail) == done


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from("st"), st.sampled_from([b"x", b"longer", b"y" * 200]), st.sampled_from([{}, {}, {"a": "b"}])
    ),
    min_size=1,
    max_size=9,
)
STEPS = st.lists(st.tuples(st.sampled_from(["batch", "part", "commit"]), MESSAGES), min_size=1, max_size=8)


def log_of(path: Path, steps: list[tuple[str, list[tuple[str, bytes, dict[str, str]]]]]) -> bytes:
    """The bytes of a group's log after those writes."""
    u = Units(path=path)
    for number, (what, messages) in enumerate(steps):
        rows = [frame(stream, body, **texts) for stream, body, texts in messages]
        if what == "batch":
            u.batch(*rows)
            continue
        if "p" not in u.parts():
            u.part("p")
        handle = u.at(".txn/p/.batch", os.O_WRONLY)
        handle.write(b"".join(rows))
        handle.close()
        if what == "commit":
            u.say(f"commit x.{number} p")
    read = u.log()
    u.restart(clean=False)
    assert u.log() == read
    u.tree.close()
    u.store.close()
    return b"".join(log.read_bytes() for log in sorted(path.rglob("*.log")))


@pytest.mark.slow
@settings(max_examples=size(150))
@given(STEPS)
def test_both_ways_make_the_same_log(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[tuple[str, bytes, dict[str, str]]]]]
) -> None:
    done = log_of(tmp_path_factory.mktemp("c") / "store", steps)
    with in_python():
        assert log_of(tmp_path_factory.mktemp("python") / "store", steps) == done
    assert len(done) > 100


def test_what_was_put_aside_and_is_not_as_it_was(tmp_path: Path) -> None:
    """The disk gave something else back: nothing of the unit is in the log, and the part is still there."""
    u = Units(path=tmp_path / "store")
    u.part("p")
    handle = u.at(".txn/p/.batch", os.O_WRONLY)
    for _ in range(3):
        handle.write(b"".join(frame("s", b"x" * 100) for _ in range(5_000)))
    handle.close()
    (staged,) = [path for path in (tmp_path / "store" / "staging").iterdir() if path.is_file()]
    there = staged.read_bytes()
    staged.write_bytes(there[:2_000_000] + bytes(136) + there[2_000_136:])
    with pytest.raises(errors.DiskFailed, match="cannot be read back"):
        u.say("commit x.1 p")
    staged.write_bytes(there[:-8])
    with pytest.raises(errors.DiskFailed, match="cut short on disk"):
        u.say("commit x.1 p")
    assert u.log() == []
    u.write("s", b"behind")
    staged.write_bytes(there)
    u.say("commit x.1 p")
    assert len(u.log()) == 15_001
