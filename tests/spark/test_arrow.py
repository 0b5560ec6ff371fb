"""Bytes of the log to Arrow: every message as the records have it, however the bytes are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from mqfs.errors import DiskFailed
from mqfs.records import columns, headers, record
from pyspark_mqfs import schema
from pyspark_mqfs.task import decoder

WHOLE = schema.all_columns(headers=True)
NAMES = {16: "a", 17: "b b", 99: "ä", 1 << 20: "far"}
HEADERS = st.dictionaries(st.text(max_size=5), st.text(max_size=300), max_size=4)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(list(NAMES)), st.sampled_from([1, 1, 1, 2]), HEADERS, st.binary(max_size=50))
)


def encoded(messages: list[tuple[int, int, dict[str, str], bytes]]) -> bytes:
    table = record.encode_names(0, 5, NAMES)
    return table + b"".join(
        record.encode(n, n * 1_234_567, stream, kind, 0, headers.encode(head), body)
        for n, (stream, kind, head, body) in enumerate(messages, 1)
    )


def expected(messages: list[tuple[int, int, dict[str, str], bytes]]) -> list[tuple[Any, ...]]:
    return [
        (f"g/{NAMES[stream]}", n, n * 1_234_567 // 1_000, [(k, v.encode()) for k, v in head.items()] or None, body)
        for n, (stream, kind, head, body) in enumerate(messages, 1)
        if kind == 1
    ]


def rows(batches: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (
            row["topic"], row["offset"], round(row["timestamp"].timestamp() * 1e6),
            None if row["headers"] is None else [(h["key"], h["value"]) for h in row["headers"]], row["value"],
        )
        for batch in batches
        for row in batch.to_pylist()
    ]  # fmt: skip


@settings(max_examples=200)
@given(MESSAGES, st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_every_message_however_the_bytes_come(messages: Any, cuts: list[int]) -> None:
    data, gathering, batches, at = encoded(messages), decoder(WHOLE, "g"), [], 0
    while at < len(data):
        size = cuts[len(batches) % len(cuts)]
        batches.append(gathering.feed(data[at : at + size]))
        at += size
    gathering.finish()
    assert rows(batches) == expected(messages)
    assert all(batch.schema.equals(gathering.schema) for batch in batches)


def test_without_the_part_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MISSING", "no compiler")
    messages: Any = [(16, 1, {"k": "v"}, b"x"), (17, 2, {}, b""), (17, 1, {}, b"y")]
    assert rows([decoder(WHOLE, "g").feed(encoded(messages))]) == expected(messages)


def test_narrow() -> None:
    narrow = StructType([WHOLE["offset"], WHOLE["value"]])
    batch = decoder(narrow, "").feed(encoded([(16, 1, {}, b"x"), (17, 1, {"a": "b"}, b"y")]))
    assert batch.to_pylist() == [{"offset": 1, "value": b"x"}, {"offset": 2, "value": b"y"}]


def test_the_root_group_has_no_prefix() -> None:
    narrow = StructType([WHOLE["topic"]])
    assert decoder(narrow, "").feed(encoded([(16, 1, {}, b"x")])).to_pylist() == [{"topic": "a"}]


def test_what_is_not_whole_is_not_passed_over() -> None:
    gathering = decoder(WHOLE, "g")
    data = bytearray(encoded([(16, 1, {}, b"x"), (16, 1, {}, b"y")]))
    data[-9] ^= 1
    assert gathering.feed(bytes(data)).num_rows == 1
    with pytest.raises(DiskFailed, match=r"incomplete record: .* after sequence 1"):
        gathering.finish()
