"""Streams: every message once, in its order, by every trigger; across restarts of the query and of the server."""

from __future__ import annotations

import getpass
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pyspark_mqfs import schema
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.stream_reader import StreamReader
from pyspark_mqfs.task import DataLoss
from tests.spark.scene import Scene
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.tokens import OTHER, SECRET, line_of


class Query:
    """A streaming query whose batches are kept here."""

    def __init__(self, spark: Any, scene: Scene, checkpoint: Path, **options: Any) -> None:
        self.spark, self.scene, self.checkpoint = spark, scene, checkpoint
        self.options = {"address": scene.address, "startingOffsets": "earliest", **options}
        self.batches: list[list[tuple[str, int, bytes]]] = []
        self.query: Any = None

    def _take(self, frame: Any, number: int) -> None:
        rows = frame.select("topic", "offset", "value").collect()
        self.batches.append([(row[0], row[1], bytes(row[2])) for row in rows])

    def start(self, **trigger: Any) -> Any:
        writer = (
            self.spark.readStream.format("mqfs").options(**self.options).load()
            .writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.checkpoint))
        )  # fmt: skip
        self.query = (writer.trigger(**trigger) if trigger else writer).start()
        return self.query

    def now(self) -> list[bytes]:
        """All there is, then the end; the bodies, in the order they came."""
        before = len(self.batches)
        query = self.start(availableNow=True)
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()
        return [value for batch in self.batches[before:] for _, _, value in sorted(batch, key=lambda row: row[1])]

    def position(self) -> Any:
        """The position of the newest batch that was begun."""
        newest = max(int(file.name) for file in (self.checkpoint / "offsets").iterdir() if file.name.isdigit())
        return json.loads((self.checkpoint / "offsets" / str(newest)).read_text().splitlines()[-1])


@pytest.fixture
def query(spark: Any, scene: Scene, tmp_path: Path) -> Callable[..., Query]:
    return lambda **options: Query(spark, scene, tmp_path / "checkpoint", **options)


Readers = Callable[..., StreamReader]


@pytest.fixture
def reader() -> Iterator[Readers]:
    """As another driver would have it, which gives up soon."""
    made: list[StreamReader] = []

    def make(scene: Scene, **options: str) -> StreamReader:
        said = {"address": scene.address, "retrySeconds": "0.2", **options}
        if not any(name.startswith("starting") for name in options):
            said["startingOffsets"] = "earliest"
        made.append(StreamReader(said, schema.all_columns(headers=False)))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_available_now_goes_on_where_it_was(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/s", b"1", b"2", b"3")
    mine = query(subscribe="g/s")
    assert mine.now() == [b"1", b"2", b"3"]
    assert mine.now() == []
    scene.write("g/s", b"4")
    assert mine.now() == [b"4"]
    position = mine.position()
    assert position["streams"] == {"g/s": 5}
    assert position["store"] == scene.stats("g")["store"]


def test_available_now_ends_at_what_was_there_when_it_began(reader: Readers, scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/s", b"1", b"2")
    mine = reader(scene, subscribePattern="g/.*")
    start = mine.initialOffset()
    mine.prepareForTriggerAvailableNow()
    there = mine.latestOffset(start, ReadAllAvailable())
    scene.write("g/s", b"3")
    scene.stream("g/new", b"4")
    assert mine.latestOffset(start, ReadAllAvailable()) == there
    assert mine.latestOffset(there, ReadAllAvailable()) == there


def test_bounded_batches(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.group("h")
    for name in ("g/a", "g/b", "h/c"):
        scene.stream(name, *(b"%d" % n for n in range(40)))
    mine = query(subscribe="g/a,g/b,h/c", maxOffsetsPerTrigger=25)
    mine.now()
    assert sum(len(batch) for batch in mine.batches) == 120
    assert max(len(batch) for batch in mine.batches) <= 25
    assert len(mine.batches) <= 7
    rows = [row for batch in mine.batches for row in sorted(batch, key=lambda row: row[1])]
    for name in ("g/a", "g/b", "h/c"):
        assert [value for path, _, value in rows if path == name] == [b"%d" % n for n in range(40)]


def test_bounded_in_bytes(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/a", *(bytes(1_000) for _ in range(60)))
    mine = query(subscribe="g/a", maxBytesPerTrigger="20k")
    mine.now()
    assert sum(len(batch) for batch in mine.batches) == 60
    assert 3 <= len(mine.batches) <= 5


def test_no_batch_before_there_is_enough(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/a", b"0")
    mine = query(subscribe="g/a", minOffsetsPerTrigger=10, maxOffsetsPerTrigger=15, maxTriggerDelay="1h")
    mine.start()
    try:
        eventually(lambda: sizes(mine) == [1], "the first batch, at once")
        scene.write("g/a", *(b"%d" % n for n in range(1, 30)))
        eventually(lambda: sizes(mine) == [1, 15, 14], "the batches")
        scene.write("g/a", b"30")
    finally:
        mine.query.stop()
    assert mine.now()[-1:] == [b"30"]  # however few there are


def test_what_is_not_enough(scene: Scene, reader: Readers) -> None:
    scene.group("g")
    scene.stream("g/a", b"0")
    mine = reader(scene, subscribe="g/a", minOffsetsPerTrigger="10")
    least = mine.getDefaultReadLimit()
    start = mine.latestOffset(mine.initialOffset(), least)
    assert start["streams"] == {"g/a": 2}
    scene.write("g/a", *(b"%d" % n for n in range(1, 10)))
    assert mine.latestOffset(start, least) == start
    assert mine.reportLatestOffset() == start | {"streams": {"g/a": 11}}
    assert mine.latestOffset(start, ReadAllAvailable())["streams"] == {"g/a": 11}
    scene.write("g/a", b"10")
    assert mine.latestOffset(start, least)["streams"] == {"g/a": 12}


def test_a_batch_after_some_time(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/a", b"0")
    mine = query(subscribe="g/a", minOffsetsPerTrigger=10, maxTriggerDelay="1s")
    mine.start()
    try:
        eventually(lambda: sizes(mine) == [1], "the first batch, at once")
        scene.write("g/a", b"1")
        eventually(lambda: sizes(mine) == [1, 1], "the second, which is long enough after it")
    finally:
        mine.query.stop()


def sizes(query: Query) -> list[int]:
    return [len(batch) for batch in query.batches]


def test_live_and_a_stream_that_appears(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/a", b"old")
    mine = query(subscribePattern="g/[ab]", startingOffsets="latest")
    mine.start()
    try:
        eventually(
            lambda: (mine.checkpoint / "offsets" / "0").exists() or mine.query.lastProgress is not None, "it began"
        )
        scene.write("g/a", b"new")
        eventually(lambda: [v for batch in mine.batches for _, _, v in batch] == [b"new"], "the new one")
        scene.stream("g/b", b"first of b")
        scene.stream("g/c", b"nobody asked for")
        eventually(lambda: len([row for batch in mine.batches for row in batch]) == 2, "that of the new stream")
        assert [row[0] for batch in mine.batches for row in batch] == ["g/a", "g/b"]
        eventually(
            lambda: bool(mine.query.lastProgress and mine.query.lastProgress["sources"][0]["latestOffset"]), "told"
        )
    finally:
        mine.query.stop()


def test_the_query_is_a_consumer(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g", "replay off", "sync off")
    scene.stream("g/s")
    scene.stream("g/t")
    mine = query(subscribe="g/s", consumer="report")
    assert mine.now() == []
    scene.write("g/t", b"not for it")
    scene.write("g/s", b"1", b"2", b"3")  # kept for the query alone
    row = scene.stats("g")["consumers"]["report"]
    assert (row["over"], row["waiting"]) == ("s", 3)
    assert mine.now() == [b"1", b"2", b"3"]
    assert mine.now() == []
    assert scene.stats("g")["consumers"]["report"]["waiting"] == 0
    assert scene.stats("g")["streams"]["s"]["messages"] == 0


def test_a_consumer_of_some_streams(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    for name in ("a", "b", "c"):
        scene.stream(f"g/{name}", name.encode())
    mine = query(subscribe="g/a,g/b", groupIdPrefix="mine")
    mine.now()
    scene.write("g/c", b"not waiting")
    scene.write("g/b", b"waiting")
    (name,) = scene.stats("g")["consumers"]
    assert name.startswith("mine-")
    mine.now()
    assert scene.stats("g")["consumers"][name]["waiting"] == 0


def test_a_consumer_of_one_stream_of_which_there_are_two(reader: Readers, scene: Scene) -> None:
    """The group keeps only what consumers have not had: of both streams, all the time."""
    scene.group("g", "replay off")
    for name in ("a", "b", "c"):
        scene.stream(f"g/{name}")
    one = reader(scene, subscribe="g/a")
    start = one.initialOffset()
    scene.write("g/a", b"1")
    one.stop()
    both = reader(scene, subscribe="g/a,g/b")
    assert both.latestOffset(start, ReadAllAvailable())["streams"]["g/a"] == 2
    scene.write("g/b", b"2")
    scene.write("g/c", b"3")
    [(name, consumer)] = scene.stats("g")["consumers"].items()
    assert consumer["waiting"] == 2
    assert taken(both, start) == [b"1", b"2"]
    both.stop()
    scene.ctl("g", f"consumer {name}-meanwhile")  # as a driver leaves it that is killed while it makes the other again
    again = reader(scene, subscribe="g/a,g/b")
    assert taken(again, start) == [b"1", b"2"]
    assert list(scene.stats("g")["consumers"]) == [name]


def test_a_consumer_of_a_group_that_grows(query: Callable[..., Query], scene: Scene) -> None:
    """It was of the whole group, and then of one of two streams, and of a view that gets another."""
    scene.group("g")
    scene.stream("g/a", b"1")
    mine = query(subscribePattern="g/[abc]", consumer="mine")
    mine.now()
    scene.stream("g/x", b"unasked")
    scene.write("g/a", b"2")
    assert mine.now() == [b"2"]
    assert scene.stats("g")["consumers"]["mine"]["waiting"] == 0
    scene.group("h")
    for name in "abx":
        scene.stream(f"h/{name}", b"1")
    other = query(subscribePattern="h/[abc]", consumer="other")
    other.checkpoint = mine.checkpoint.with_name("checkpoint2")
    other.now()
    scene.stream("h/c", b"2")
    assert other.now() == [b"2"]
    scene.write("h/c", b"3", b"4")
    row = scene.stats("h")["consumers"]["other"]
    assert (row["over"], row["waiting"]) == ("other", 2)


def test_two_queries_with_one_checkpoint(query: Callable[..., Query], scene: Scene, reader: Readers) -> None:
    """The second does nothing; and it may begin when the first is gone, however that came to its end."""
    scene.group("g")
    scene.group("h")
    scene.stream("g/a", b"1")
    scene.stream("h/b", b"1")
    mine = query(subscribe="g/a,h/b")
    mine.start()
    try:
        eventually(lambda: len(mine.batches) == 1, "the first batch")
        start = mine.position()
        second = reader(scene, subscribe="g/a,h/b")
        text = r"consumer spark-.* of group g: open by another query \(expected another checkpointLocation\)"
        with pytest.raises(OptionError, match=text):
            second.latestOffset(start, ReadAllAvailable())
        scene.write("g/a", b"2")
        eventually(lambda: len(mine.batches) == 2, "the first continues")
    finally:
        mine.query.stop()
    eventually(lambda: free(second, mine.position()), "the second may")
    again = reader(scene, subscribe="g/a,h/b", retrySeconds="20")
    second.stop()  # as when its process is killed
    again.latestOffset(mine.position(), ReadAllAvailable())
    again.stop()


def free(reader: StreamReader, start: Any) -> bool:
    try:
        reader.latestOffset(start, ReadAllAvailable())
    except OptionError:
        return False
    return True


def test_two_queries_with_one_consumer(scene: Scene, reader: Readers) -> None:
    scene.group("g")
    scene.stream("g/a", b"1")
    first, second = (reader(scene, subscribe="g/a", consumer="report") for _ in range(2))
    first.initialOffset()
    with pytest.raises(OptionError, match=r"consumer report of group g: open by another query .*another consumer or"):
        second.initialOffset()
    second.stop()


def test_a_token_that_is_wrong(tmp_path: Path, reader: Readers) -> None:
    """Over TCP; with none it is user nobody, who may not have a consumer there."""
    address = f"tcp!127.0.0.1!{free_port()}"
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(line_of(getpass.getuser(), SECRET))
    scene = Scene(tmp_path, "--listen", address, "--token-file", str(tokens))
    try:
        scene.group("g")
        scene.stream("g/a", b"1")
        right = {"subscribe": "g/a", "address": address}
        with pytest.raises(OptionError, match=f"option token: refused by the server at '{address}'"):
            reader(scene, **right, token=OTHER).initialOffset()
        nobody = reader(scene, **right, consumer="mine")
        with pytest.raises(OptionError, match=r"consumer mine of group g: cannot write .* excludes uid"):
            nobody.initialOffset()
        mine = reader(scene, **right, consumer="mine", token=SECRET)
        assert mine.initialOffset()["streams"] == {"g/a": 1}
    finally:
        scene.stop()


def test_the_server_restarts_in_the_middle(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g", "replay all")
    scene.stream("g/s", *(b"%d" % n for n in range(100)))
    mine = query(subscribe="g/s", maxOffsetsPerTrigger=10)
    took = threading.Event()
    take = mine._take

    def slowly(frame: Any, number: int) -> None:
        take(frame, number)
        if number == 2:
            took.set()
            assert again.wait(HANG_S)

    again = threading.Event()
    mine._take = slowly  # type: ignore[method-assign]
    mine.start(availableNow=True)
    try:
        assert took.wait(HANG_S)
        scene.server.kill()
        again.set()
        scene.start()
        assert mine.query.awaitTermination(120)
        assert [v for batch in mine.batches for _, _, v in batch] == [b"%d" % n for n in range(100)]
    finally:
        again.set()
        mine.query.stop()


def test_a_server_that_stays_away(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/s", b"1")
    mine = query(subscribe="g/s", retrySeconds="0.3")
    assert mine.now() == [b"1"]
    scene.server.stop()
    with pytest.raises(Exception, match=r"option address: no answer from 'unix!.*' for 0.3 s"):
        mine.now()
    scene.start()
    assert mine.now() == []


def test_a_batch_is_repeated_as_it_was(query: Callable[..., Query], scene: Scene) -> None:
    """The last commit file is gone, as after a kill: the same messages come again, whatever was written meanwhile."""
    scene.group("g")
    scene.stream("g/s", b"1", b"2")
    mine = query(subscribe="g/s")
    mine.now()
    newest = max((mine.checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.unlink()
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    scene.write("g/s", b"3")
    mine.now()
    assert [[v for _, _, v in batch] for batch in mine.batches] == [[b"1", b"2"], [b"1", b"2"], [b"3"]]


def test_what_was_cut_meanwhile(query: Callable[..., Query], scene: Scene, tmp_path: Path) -> None:
    scene.group("g", "replay all", "depth 5", "sync off")
    scene.stream("g/s", b"0")
    strict, lenient = query(subscribe="g/s"), query(subscribe="g/s", failOnDataLoss="false")
    assert strict.now() == [b"0"]
    scene.write("g/s", *(b"%d" % n for n in range(1, 20)))
    with pytest.raises(Exception, match=r"g/s: sequences 2 to 15 are no longer retained .*option failOnData"):
        strict.now()
    assert lenient.now() == [b"%d" % n for n in range(15, 20)]
    assert lenient.now() == []


def taken(reader: StreamReader, start: Any) -> list[bytes]:
    """What a batch from there to the end has."""
    return repeated(reader, start, reader.latestOffset(start, ReadAllAvailable()))


def repeated(reader: StreamReader, start: Any, end: Any) -> list[bytes]:
    """What a recorded batch has."""
    return [body for piece in reader.partitions(start, end) for rows in reader.read(piece) for body in bodies(rows)]


def bodies(rows: Any) -> list[bytes]:
    found: list[bytes] = rows.column(rows.schema.get_field_index("value")).to_pylist()
    return found


@pytest.mark.parametrize("why", ["depth 3", "ttl 1s"])
def test_a_start_that_is_not_kept_any_more(scene: Scene, why: str, reader: Readers) -> None:
    """Named by who begins the query: an error that tells what is gone, or what is left is read, and nothing twice."""
    scene.group("g", "replay all", "sync off", *([why] if why.startswith("depth") else []))
    scene.stream("g/s", *(b"%d" % n for n in range(10)))
    said = {"subscribe": "g/s", "startingOffsets": '{"g/s": 4}'}
    strict, lenient = reader(scene, **said), reader(scene, failOnDataLoss="false", **said)
    start, left = strict.initialOffset(), [b"7", b"8", b"9"]
    if why.startswith("ttl"):
        scene.ctl("g", why)
        eventually(lambda: scene.stats("g")["streams"]["s"]["messages"] == 0, "they have gone")
        scene.ctl("g", "ttl 0")
        scene.write("g/s", b"new")
        left = [b"new"]
    with pytest.raises(DataLoss, match=r"g/s: sequences 4 to \d+ are no longer retained .*option failOnD"):
        taken(strict, start)
    strict.stop()
    assert taken(lenient, start) == left


def test_a_stream_that_is_named_before_it_is_there(
    scene: Scene, caplog: pytest.LogCaptureFixture, reader: Readers
) -> None:
    scene.group("g")
    scene.stream("g/a", b"a")
    mine = reader(scene, subscribe="g/a,g/later,none/b")
    start = mine.initialOffset()
    assert start["streams"] == {"g/a": 1}
    assert "option subscribe: no stream 'g/later' yet; waiting for it" in caplog.text
    scene.stream("g/later", b"1", b"2")
    scene.group("none")
    scene.stream("none/b", b"3")
    assert sorted(taken(mine, start)) == [b"1", b"2", b"3", b"a"]
    scene.client.remove("none/b")
    scene.client.remove("none")
    end = mine.latestOffset(start, ReadAllAvailable())
    assert end["streams"] == {"g/a": 4, "g/later": 4}


def test_a_group_that_goes(scene: Scene, reader: Readers) -> None:
    """With it goes what the checkpoint has of it: an error, or the rest is read."""
    for name in "gh":
        scene.group(name)
        scene.stream(f"{name}/s", b"1")
    said = {"subscribePattern": "./s"}
    mine, lenient = reader(scene, **said), reader(scene, failOnDataLoss="false", **said)
    start = mine.initialOffset()
    mine.stop()
    scene.client.remove("h/s")
    scene.client.remove("h")
    with pytest.raises(
        DataLoss,
        match=r"h/s, read up to sequence 1, was removed or is not selected .*option failOn",
    ):
        taken(mine, start)
    mine.stop()
    assert taken(lenient, start) == [b"1"]


def test_a_stream_vanishes(query: Callable[..., Query], scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/a", b"a")
    scene.stream("g/b", b"b")
    strict, lenient = query(subscribePattern="g/.*"), query(subscribePattern="g/.*", failOnDataLoss="false")
    assert strict.now() == [b"a", b"b"]
    scene.client.remove("g/b")
    scene.write("g/a", b"a2")
    with pytest.raises(
        Exception,
        match=r"g/b, read up to sequence 3, was removed or is not selected .*option failOn",
    ):
        strict.now()
    assert lenient.now() == [b"a2"]
    assert lenient.position()["streams"] == {"g/a": 4, "g/b": 3}


def test_another_store(query: Callable[..., Query], scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    scene.stream("g/s", b"1")
    mine = query(subscribe="g/s")
    mine.now()
    (tmp_path / "second").mkdir()
    second = Scene(tmp_path / "second")
    try:
        second.group("g")
        second.stream("g/s", b"1", b"2")
        mine.options["address"] = second.address
        with pytest.raises(Exception, match=r"option address .*: store .* \(expected store .*, of the checkpoint"):
            mine.now()
    finally:
        second.stop()


def test_nonsense(query: Callable[..., Query], scene: Scene, reader: Readers) -> None:
    """A query fails with what its reader raises."""
    scene.group("g")
    scene.stream("g/s", b"1")
    for options, text in (
        ({"endingOffsets": "latest"}, "option endingOffsets: only for batch reads"),
        (
            {"maxOffsetsPerTrigger": "0"},
            "option maxOffsetsPerTrigger: invalid value '0' (expected a whole number, at least 1)",
        ),
        ({"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "10"}, "(expected at most maxOffsetsPerTrigger, 10)"),
        ({"maxTriggerDelay": "5m"}, "option maxTriggerDelay: not without minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "2", "maxTriggerDelay": "soon"}, "option maxTriggerDelay: bad duration 'soon'"),
        ({"maxBytesPerTrigger": "much"}, "option maxBytesPerTrigger: invalid value 'much' (expected bytes"),
        ({"consumer": "a/b"}, "option consumer"),
    ):
        with pytest.raises(OptionError, match=re.escape(text)):
            reader(scene, subscribe="g/s", **options).initialOffset()
    with pytest.raises(Exception, match=re.escape(text)):
        query(subscribe="g/s", **options).now()


def test_a_stream_that_is_asked_for_later(scene: Scene, reader: Readers) -> None:
    """By a query that is started again with more: all that is kept of it is read."""
    scene.group("g")
    scene.stream("g/b", b"b1")
    scene.stream("g/a", b"a2")
    scene.write("g/b", b"b3")
    scene.write("g/a", b"a4")
    first = reader(scene, subscribe="g/a")
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    first.commit(end)
    first.stop()
    more = reader(scene, subscribe="g/a,g/b")
    scene.write("g/a", b"a5")
    assert sorted(taken(more, end)) == [b"a5", b"b1", b"b3"]


@pytest.mark.parametrize("what", ["g/s", "g"])
def test_one_that_was_made_anew(scene: Scene, reader: Readers, what: str) -> None:
    """A stream, or its group, of the same name: what was not read of the first is gone, and nothing of the second was
    read."""
    scene.group("g")
    scene.stream("g/s", b"1", b"2")
    mine, lenient = reader(scene, subscribe="g/s"), reader(scene, subscribe="g/s", failOnDataLoss="false")
    start = mine.initialOffset()
    end = mine.latestOffset(start, ReadAllAvailable())
    mine.commit(end)
    mine.stop()
    scene.write("g/s", b"3")
    scene.client.remove("g/s")
    if what == "g":
        scene.client.remove("g")
        scene.group("g")
    scene.stream("g/s", b"new 1", b"new 2")
    for again in (lambda: taken(mine, end), lambda: taken(mine, start)):
        with pytest.raises(
            DataLoss, match=r"g/s, read up to sequence \d, was removed and created again .*option failOnData"
        ):
            again()
    mine.stop()
    assert taken(lenient, end) == [b"new 1", b"new 2"]
    after = lenient.latestOffset(end, ReadAllAvailable())
    lenient.commit(after)
    assert scene.stats("g")["consumers"][after["consumer"]]["waiting"] == 0
    assert taken(lenient, after) == []
    scene.write("g/s", b"new 3")
    assert taken(lenient, after) == [b"new 3"]


def test_the_first_batch_is_repeated(query: Callable[..., Query], scene: Scene) -> None:
    """Spark asks again where the query begins. What came after it began is read, and it has one consumer."""
    scene.group("g")
    scene.stream("g/s", b"before")
    mine = query(subscribe="g/s", startingOffsets="latest")
    mine.now()
    scene.write("g/s", b"1")
    assert mine.now() == [b"1"]
    for kind in ("commits", "offsets"):
        for file in (mine.checkpoint / kind).iterdir():
            if kind == "commits" or file.name.strip(".")[0] != "0":
                file.unlink()
    scene.write("g/s", b"2")
    assert mine.now() == [b"1", b"2"]
    assert [one["waiting"] for one in scene.stats("g")["consumers"].values()] == [0]


def test_what_comes_while_a_query_begins(scene: Scene, reader: Readers) -> None:
    """At the newest: if the first batch is repeated, it is still in one."""
    scene.group("g")
    scene.stream("g/s", b"before")
    said = {"subscribe": "g/s", "startingOffsets": "latest"}
    first = reader(scene, **said)
    start = first.initialOffset()
    scene.write("g/s", b"1")
    end = first.latestOffset(start, ReadAllAvailable())
    first.stop()
    second = reader(scene, **said)
    again = second.initialOffset()
    assert repeated(second, again, end) + taken(second, end) == [b"1"]


@pytest.mark.parametrize("why", ["depth 3", "removed"])
def test_messages_of_a_new_stream_that_go_before_their_batch_is_repeated(
    scene: Scene, reader: Readers, why: str
) -> None:
    """Planned and recorded by a driver that was killed then: the next one misses them, in a stream or group that no
    batch had before."""
    scene.group("g")
    scene.stream("g/a", b"1")
    first, strict = reader(scene, subscribePattern="[gh]/.*"), reader(scene, subscribePattern="[gh]/.*")
    lenient = reader(scene, subscribePattern="[gh]/.*", failOnDataLoss="false")
    start = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    scene.group("h")
    scene.stream("g/new", b"n1", b"n2")
    scene.stream("h/new", b"n1", b"n2")
    end = first.latestOffset(start, ReadAllAvailable())
    assert first.latestOffset(end, ReadAllAvailable()) == end
    first.stop()
    if why == "removed":
        scene.client.remove("h/new")
        left = [b"n1", b"n2"]
    else:
        for group in "gh":
            scene.ctl(group, why)
            scene.write(f"{group}/new", b"m1", b"m2")
        left = [b"n2", b"n2"]
    with pytest.raises(DataLoss, match=r"[gh]/new.* (was removed|are no longer retained) .*option failOnDataLoss"):
        strict.partitions(start, end)
    strict.stop()
    assert repeated(lenient, start, end) == left


def test_a_new_stream_that_is_removed_before_it_has_a_message(scene: Scene, reader: Readers) -> None:
    """No message of it is lost; of one with a message the error says from where it was to be read."""
    scene.group("g")
    scene.stream("g/a", b"1")
    mine = reader(scene, subscribePattern="g/.*")
    start = mine.latestOffset(mine.initialOffset(), ReadAllAvailable())
    scene.stream("g/empty")
    scene.write("g/a", b"2")
    end = mine.latestOffset(start, ReadAllAvailable())
    scene.client.remove("g/empty")
    assert repeated(mine, start, end) == [b"2"]
    scene.stream("g/new", b"3")
    after = mine.latestOffset(start, ReadAllAvailable())
    scene.client.remove("g/new")
    with pytest.raises(DataLoss, match="g/new, to be read from sequence 3, was removed"):
        mine.partitions(start, after)
