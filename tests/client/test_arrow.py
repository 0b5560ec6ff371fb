"""The retained messages as columns: the same that `history` gives, through every transport."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from mqfs import Client, Group, errors
from mqfs.client.arrow import SCHEMA, ColumnSubscription
from mqfs.records import record
from tests.support.eventually import HANG_S


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    columns = [table.column(name).to_pylist() for name in ("sequence", "stream", "body", "headers")]
    times = table.column("time").cast(pa.int64()).to_pylist()
    return [(n, stream, us, body, dict(texts)) for n, stream, body, texts, us in zip(*columns, times, strict=True)]


def expected(group: Group, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
    messages = list(group.history(*args, **options))
    return [(m.sequence, m.stream, m.time_ns // 1000, m.body, dict(m.headers)) for m in messages]


def retaining(tree: Client, name: str) -> Group:
    return tree.group(name, create=True, ctl=["replay all"])


def test_the_same_messages_as_history(tree: Client, name: str) -> None:
    group = retaining(tree, name)
    assert rows(group.to_arrow().read_all()) == []
    group.publish_many([(f"s{n % 3}", b"x" * (n % 50)) for n in range(5_000)])
    group.publish("s1", b"with", headers={"a": "1", "é": "ü" * 200})
    group.publish("late", b"")
    group.publish_many([("s0", b"y")] * 10)
    got = rows(group.to_arrow().read_all())
    assert got == expected(group)
    assert len(got) == 5_012
    middle = got[2_000][0]
    for args, options in [
        ((middle,), {}),
        ((middle, middle + 10), {}),
        ((-5,), {}),
        ((), {"since": "1h"}),
        ((), {"pattern": "s1"}),
        ((), {"pattern": ["late", "s0"], "last": middle}),
        ((), {"program": "exact:late"}),
    ]:
        found = rows(group.to_arrow(*args, **options).read_all())
        assert found == expected(group, *args, **options), (args, options)
        assert found


def test_batches_come_before_all_is_read(tree: Client, name: str) -> None:
    group = retaining(tree, name)
    group.publish_many([("s", b"x" * 1_000)] * 2_000)
    with group.to_arrow() as reader:
        assert 0 < reader.read_next_batch().num_rows < 2_000
    assert reader.schema.equals(SCHEMA)


def test_bodies_in_parts_are_put_together(tree: Client, name: str) -> None:
    group = retaining(tree, name)
    body = bytes(range(256)) * 12_000
    group.publish("s", b"before")
    group.publish("s", body, headers={"kind": "large"})
    group.publish("t", b"after")
    got = rows(group.to_arrow().read_all())
    assert [row[3] for row in got] == [b"before", body, b"after"]
    assert got == expected(group)


def test_a_stream_that_is_not_there(tree: Client, name: str) -> None:
    group = retaining(tree, name)
    group.publish("s", b"x")
    assert rows(group.to_arrow(pattern="other").read_all()) == []
    with pytest.raises(errors.BadRequest, match="first and since"):
        group.to_arrow(1, since="1h")
    with pytest.raises(TypeError):
        group.to_arrow("nope")  # type: ignore[arg-type]


def test_what_was_trimmed_meanwhile_is_an_error(tree: Client, name: str) -> None:
    group = retaining(tree, name)
    group.publish_many([("s", b"x" * 1_000)] * 2_000)
    reader = group.to_arrow()
    reader.read_next_batch()
    group.purge("s")
    with pytest.raises(errors.FellBehind):
        reader.read_all()


def test_headers_that_are_no_utf_8_are_shown_as_in_a_message(tree: Client, name: str) -> None:
    group = retaining(tree, name)
    group.publish("s", b"")
    columns = ColumnSubscription(group._link, group.path, ("s",), start="first", until="end", is_past=True)
    texts = b"\x01k\x02\x00\xff!"
    data = record.encode_names(1, 0, {1: "s"}) + record.encode(1, 2_000, 1, 1, 0, texts, b"body")
    columns._receive(columns.feed(data), columns.has_headers)
    assert rows(pa.Table.from_batches([columns.get(HANG_S)])) == [(1, "s", 2, b"body", {"k": "\ufffd!"})]
    columns.close()
