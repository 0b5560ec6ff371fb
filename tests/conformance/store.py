"""What every store must do, whatever it keeps its logs on: a new one proves itself with one line.

`check_store(maker)` calls `maker` for a fresh store again and again, and checks the seam `Store` and `Bucket` of
mqfs/store/api.py. Nothing here knows a store by name.
"""

from __future__ import annotations

from collections.abc import Callable

from mqfs.engine.core.portions import exhaust
from mqfs.errors import NotFound
from mqfs.model import Draft, Kind, Record
from mqfs.records.record import encode
from mqfs.store.api import Bucket, Store

STATE = b'{"state":1}'
A, B, C = 16, 17, 18


def check_store(maker: Callable[[], Store]) -> None:
    """Raises AssertionError where the store does not do what the seam says."""
    for check in CHECKS:
        store = maker()
        try:
            check(store)
        finally:
            store.close()


def make(store: Store) -> Bucket:
    bucket = store.make(store.number(), STATE)
    bucket.writer.state = lambda: STATE
    return bucket


def say(bucket: Bucket, stream: int, body: bytes, time_ns: int = 0) -> int:
    return bucket.writer.append(Kind.MESSAGE, stream, time_ns, body)


def check_numbers(store: Store) -> None:
    numbers = [store.number() for _ in range(600)]
    assert numbers[0] == 1
    assert len(set(numbers)) == 600
    assert list(store.groups()) == []
    for number in (numbers[5], numbers[0]):
        store.make(number, STATE)
    assert list(store.groups()) == [1, 6]
    store.remove(6)
    assert list(store.groups()) == [1]
    assert store.number() not in numbers
    for missing in (6, 7):
        try:
            store.open(missing)
        except NotFound:
            continue
        raise AssertionError("a group that is not there was opened")


def check_empty(store: Store) -> None:
    bucket = make(store)
    assert (bucket.id, bucket.reader.first, bucket.end.next, bucket.end.last_ns) == (1, 1, 1, 0)
    assert bucket.end.failed is None
    assert bucket.upkeep.damaged == 0
    state, behind = bucket.upkeep.history()
    assert (state, list(behind)) == (STATE, [])
    assert bucket.reader.find(A, 0) is None
    assert bucket.reader.scan(0) is None
    assert bucket.reader.locate(A, 0) is None
    assert bucket.reader.before(99) is None
    assert bucket.reader.first_at_time(0) == 1
    assert bucket.metrics.count(A, 0) == (0, 0)
    bucket.upkeep.trim({}, frozenset())
    assert store.open(1) is bucket


def check_append(store: Store) -> None:
    bucket = make(store)
    assert say(bucket, A, b"one", 10) == 1
    assert bucket.writer.append(Kind.CHANGE, 0, 11, b'{"do":"x"}') == 1
    assert bucket.writer.append(Kind.MESSAGE, B, 12, b"two", b"\x01k\x01\x00v") == 2
    assert bucket.writer.append(Kind.END, A, 13, b"") == 3
    assert (bucket.end.next, bucket.end.last_ns, bucket.reader.first) == (4, 13, 1)
    two = bucket.reader.scan(2)
    assert two is not None
    assert (two.sequence, two.time_ns, two.stream, two.kind, two.body) == (2, 12, B, Kind.MESSAGE, b"two")
    assert two.headers == b"\x01k\x01\x00v"
    mark = bucket.reader.find(A, 2)
    assert mark is not None
    assert (mark.sequence, mark.kind, mark.body) == (3, Kind.END, b"")
    state, behind = bucket.upkeep.history()
    assert state == STATE
    assert [(r.kind, r.sequence, r.time_ns, r.body) for r in behind] == [(Kind.CHANGE, 1, 11, b'{"do":"x"}')]


def check_search(store: Store) -> None:
    bucket = make(store)
    for number in range(1, 301):
        assert say(bucket, (A, B, C)[number % 3], b"x" * number, number * 10) == number
    for number in (1, 2, 150, 299, 300):
        assert bucket.reader.scan(number) == bucket.reader.find((A, B, C)[number % 3], number)
        assert bucket.reader.first_at_time(number * 10) == bucket.reader.first_at_time(number * 10 - 9) == number
        assert bucket.reader.before(number + 1) == number
    assert bucket.reader.locate(A, 1) == (3, 3)
    assert bucket.reader.locate(A, 298) == (300, 300)
    assert bucket.reader.locate(B, 299) is None
    assert bucket.reader.before(3, A) is None
    assert bucket.reader.before(300, A) == 297
    assert bucket.reader.before(10**12, B) == 298
    assert bucket.reader.first_at_time(3001) == 301
    assert bucket.metrics.count(A, 4) == (99, sum(range(6, 301, 3)))
    assert bucket.metrics.count(A, 0) == (100, sum(range(3, 301, 3)))
    assert bucket.metrics.count(99, 0) == (0, 0)


def check_listing(store: Store) -> None:
    """A listing of some streams, each from its log start: their messages without end marks, newest first."""
    bucket = make(store)
    rows = []
    for number in range(1, 301):
        kind = Kind.END if number % 11 == 0 else Kind.MESSAGE
        stream, body = (A, A, B, C)[number % 4], b"x" * (number % 60) if kind == Kind.MESSAGE else b""
        rows.append((bucket.writer.append(kind, stream, number, body), stream, len(body), kind))
    for floors in ({A: 0}, {A: 40, B: 200}, {A: 0, B: 0, C: 0, 99: 0}, {C: 9_999}, {}):
        for end in (1, 60, 299, bucket.end.next):
            wanted = [
                (sequence, size) for sequence, stream, size, kind in rows
                if stream in floors and floors[stream] <= sequence < end and kind == Kind.MESSAGE
            ]  # fmt: skip
            portions = list(bucket.metrics.listing(floors, end))[::-1]
            columns = [portion.columns(portion.messages) for portion in portions]
            assert [row for some in columns for row in zip(*some, strict=True)] == wanted
            assert sum(portion.messages for portion in portions) == len(wanted)
            for portion in portions:
                if portion.messages > 3:
                    newest = [list(column) for column in portion.columns(3)]
                    assert newest == [list(column)[-3:] for column in portion.columns(portion.messages)]


def check_tally(store: Store) -> None:
    """The tally of any range is the sum over its messages."""
    bucket = make(store)
    sizes = {}
    for number in range(1, 301):
        if number % 7 == 0:
            bucket.writer.skip()
        elif number % 3 == 0:
            bucket.writer.append(Kind.ACK, 1, 0, bytes(24))
        sizes[say(bucket, (A, B)[number % 2], b"x" * (number % 60))] = (A, B)[number % 2], number % 60
    last = bucket.end.next
    for begin in (0, 1, 2, 40, 150, last - 1, last, last + 9):
        for end in (0, 1, 2, 41, 151, 220, last - 1, last, last + 9):
            for stream in (A, B, C):
                within = [s for n, (where, s) in sizes.items() if begin <= n < end and where == stream]
                assert bucket.metrics.count(stream, begin, end) == (len(within), sum(within)), (stream, begin, end)
        assert (
            bucket.metrics.count(A, begin)
            == bucket.metrics.count(A, begin, None)
            == bucket.metrics.count(A, begin, last)
        )
    assert bucket.metrics.count_eof_markers(A, 0) == 0
    marked = bucket.writer.append(Kind.END, A, bucket.end.last_ns, b"")
    assert (
        bucket.metrics.count_eof_markers(A, 0),
        bucket.metrics.count_eof_markers(A, 0, marked),
        bucket.metrics.count_eof_markers(B, 0),
    ) == (
        1,
        0,
        0,
    )


def check_headed(store: Store) -> None:
    """Which messages have certain headers, a number of messages at a time; in bodies they count not."""
    bucket = make(store)
    keys = b"\x01k", b"\x03ttl"
    assert bucket.reader.search_headers(0, 10, keys) == ([], bucket.end.next)
    texts = {
        3: b"\x01k\x01\x00v",
        40: b"\x01k\xfc\x00" + b"v" * 252,
        41: b"\x02\x03ttl",
        150: bytes(257),
        298: b"\x03ttl",
    }
    for number in range(1, 301):
        body = b"\x01k" if number % 7 == 0 else b"x" * (number * 37 % 5_000)
        bucket.writer.append(Kind.MESSAGE, (A, B)[number % 2], 0, body, texts.get(number, b""))
        bucket.writer.append(Kind.ACK, 1, 0, bytes(24), b"\x01k\x00" if number % 5 == 0 else b"")
    for begin in (0, 3, 4, 41, 298, 299, 301, 400):
        for most in (1, 7, 1_000):
            found, position = list[int](), begin
            while position < bucket.end.next:
                some, after = bucket.reader.search_headers(position, most, keys)
                assert after > position
                found, position = [*found, *some], after
            there = [number for number in (3, 40) if number >= begin]
            assert there == [number for number in found if number not in (41, 298)]  # malformed


def check_heads(store: Store) -> None:
    """Messages without their bodies, some at a time, over all segments."""
    bucket = make(store)
    assert bucket.reader.heads(0, 10) == []
    head = b"\x01k\x01\x00v"
    for number in range(1, 301):
        kind = Kind.END if number % 50 == 0 else Kind.MESSAGE
        body = b"" if number % 50 == 0 else b"x" * (number * 37 % 2_000)
        bucket.writer.append(kind, (A, B)[number % 2], 0, body, head if number % 3 == 0 else b"")
    found, position = [], 0
    while some := bucket.reader.heads(position, 7):
        assert len(some) <= 7
        found += some
        position = some[-1].sequence + 1
    records = [bucket.reader.scan(number) for number in range(1, 301)]
    assert found == [(r.sequence, r.stream, r.kind, len(r.body), r.headers) for r in records if r is not None]


def check_run(store: Store) -> None:
    """Many messages at once are the same as one by one; None says that they are to be read so."""
    bucket = make(store)
    for number in range(60):
        kind = Kind.END if number % 20 == 7 else Kind.MESSAGE
        bucket.writer.append(kind, A + number % 3, number, b"x" * (number % 5))
        if number % 10 == 0:
            bucket.writer.append(Kind.CHANGE, 0, number, b'{"do":"nothing"}')
    read = bucket.reader.read_run
    for streams in ({A}, {A, C}, {A, B, C, C + 1}):
        for first, end, most in ((1, 61, 1 << 20), (5, 40, 1 << 20), (3, 61, 400)):
            got: list[Record] = []
            while first < end:
                found = read(first, end, most, streams, True)
                if found is None:
                    record = bucket.reader.scan(first)
                    assert record is not None
                    got += [record] * (record.stream in streams and record.sequence < end)
                    first = record.sequence + 1
                    continue
                data = b"".join(found.pieces)
                assert len(data) <= most
                some = [record for n in range(first, found.last + 1) if (record := bucket.reader.scan(n)) is not None]
                some = [record for record in some if record.stream in streams]
                assert data == b"".join(encode(*record) for record in some)
                assert (found.messages, found.newest, found.streams) == (len(some), some[-1], {r.stream for r in some})
                got += some
                first = found.last + 1
            expected = (bucket.reader.scan(n) for n in range(got[0].sequence, end))
            assert got == [record for record in expected if record is not None and record.stream in streams]
    assert read(58, 61, 1 << 20, {A, B, C}, True) is None, "too few"
    bucket.writer.append(Kind.MESSAGE, A, 60, b"x", b"\1\0k\1\0\0\0v")
    assert read(1, 62, 1 << 20, {A}, False) is None, "headers where none may be"


def check_time(store: Store) -> None:
    """Record times never go back."""
    bucket = make(store)
    for time_ns in (100, 50, 200, 150):
        say(bucket, A, b"", time_ns)
    records = [bucket.reader.scan(n) for n in range(1, 5)]
    assert [r and r.time_ns for r in records] == [100, 100, 200, 200]
    assert bucket.end.last_ns == 200


def check_units(store: Store) -> None:
    bucket = make(store)
    say(bucket, A, b"before")
    drafts = [
        Draft(Kind.MESSAGE, A, b"a"),
        Draft(Kind.CHANGE, 0, b'{"do":"y"}'),
        Draft(Kind.MESSAGE, B, b"b", b"\x00\x00\x00"),
    ]
    assert bucket.writer.append_batch(drafts, 5) == 2
    assert say(bucket, A, b"after") == 4
    a, b, after = bucket.reader.scan(2), bucket.reader.scan(3), bucket.reader.scan(4)
    assert isinstance(a, Record)
    assert isinstance(b, Record)
    assert isinstance(after, Record)
    assert (a.body, a.flags & 1) == (b"a", 1)
    assert (b.body, b.headers, b.flags & 1) == (b"b", b"\x00\x00\x00", 0)
    assert (after.body, after.flags & 1) == (b"after", 0)
    assert [r.body for r in bucket.upkeep.history()[1]] == [b'{"do":"y"}']


def check_skip(store: Store) -> None:
    bucket = make(store)
    assert [say(bucket, A, b"x"), bucket.writer.skip(), bucket.writer.skip(), say(bucket, A, b"y")] == [1, 2, 3, 4]
    found = bucket.reader.scan(2)
    assert found is not None
    assert found.sequence == 4
    assert bucket.reader.before(4) == 1
    assert bucket.metrics.count(A, 1) == (2, 2)


def check_sync(store: Store) -> None:
    """Without a loop to post to, `then` comes before the call returns."""
    bucket = make(store)
    told: list[OSError | None] = []
    bucket.upkeep.sync(told.append)
    say(bucket, A, b"x")
    bucket.upkeep.sync(told.append, 0.5)
    bucket.upkeep.sync()
    assert told == [None, None]


def check_trim(store: Store) -> None:
    """Wanted messages stay; others may be removed, and their room is freed in the end."""
    bucket = make(store)
    for number in range(1, 2001):
        say(bucket, (A, B)[number % 2], b"x" * 2_000, number)
    full = bucket.upkeep.size
    exhaust(bucket.upkeep.trim({A: 1900, B: 1951}, {1960}))
    for number in [*range(1900, 2001, 2), *range(1951, 2001, 2)]:
        if number != 1960:
            found = bucket.reader.scan(number)
            assert found is not None
            assert found.sequence == number
    assert bucket.reader.first <= 1900
    exhaust(bucket.upkeep.trim({}, frozenset()))
    store.tick()
    assert bucket.upkeep.size < full / 10
    assert bucket.end.next == 2001
    held = bucket.reader.scan(0)
    assert bucket.reader.first == (bucket.end.next if held is None else held.sequence)
    assert say(bucket, A, b"again") == 2001
    assert bucket.reader.find(A, 2001) == bucket.reader.scan(2001)


def check_wanted(store: Store) -> None:
    """The wanted messages of a stream stay, whatever becomes of the others."""
    bucket = make(store)
    for number in range(1, 2001):
        say(bucket, (A, B)[number % 2], b"x" * 500, number)
    left = [100, 1_000, 2_000]
    for number in range(2001, 2201):
        say(bucket, A, b"x" * 500, number)

    def wanted(stream: int, sequence: int) -> int:
        return sequence if stream != A or sequence > 2_000 else max((s for s in left if s <= sequence), default=0)

    bucket.upkeep.trim({A: 0, B: 1900}, frozenset(), wanted)
    for _ in range(20):
        store.tick()
    for number in (*left, *range(1901, 2001, 2), *range(2001, 2201)):
        found = bucket.reader.scan(number)
        assert found is not None
        assert found.sequence == number
    assert bucket.reader.first <= 100


def check_many_changes(store: Store) -> None:
    """State and what is behind it always make the whole."""
    bucket = make(store)
    done: list[int] = []
    bucket.writer.state = lambda: b"%d" % len(done)
    for number in range(5_000):
        bucket.writer.append(Kind.CHANGE, 0, 0, b"%d" % number)
        done.append(number)
    state, behind = bucket.upkeep.history()
    covered = 0 if state == STATE else int(state)
    assert [int(r.body) for r in behind] == done[covered:]


CHECKS: list[Callable[[Store], None]] = [
    check_numbers,
    check_empty,
    check_append,
    check_search,
    check_tally,
    check_listing,
    check_headed,
    check_heads,
    check_run,
    check_time,
    check_units,
    check_skip,
    check_sync,
    check_trim,
    check_wanted,
    check_many_changes,
]
