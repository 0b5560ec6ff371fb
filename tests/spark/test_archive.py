"""archive → replay → verify: the same messages, with their headers and times, however often each is repeated."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import pyspark_mqfs
from pyspark_mqfs.commands import archive, replay, verify
from pyspark_mqfs.commands.archive import Archive
from pyspark_mqfs.commands.folder import Folder
from pyspark_mqfs.commands.replay import Replay
from pyspark_mqfs.commands.session import CommandError, explain
from pyspark_mqfs.commands.sources import Source
from pyspark_mqfs.commands.verify import Verify
from tests.spark.scene import Scene


def rows(frame: Any) -> list[Any]:
    return sorted(
        (
            row["topic"], row["offset"], row["timestamp"], bytes(row["value"]),
            sorted((h["key"], bytes(h["value"])) for h in row["headers"] or []),
        )
        for row in frame.collect()
    )  # fmt: skip


def fill(scene: Scene) -> None:
    scene.group("g")
    scene.group("g/deep")
    scene.stream("g/a", *(b"a%d" % n for n in range(200)))
    scene.stream("g/007", b"\xff\0bytes")
    scene.stream("g/deep/a%b=c", b"odd name")
    scene.put("g", '{"stream":"a","priority":7,"headers":{"k":"v","ü":""}}', b"with headers")
    scene.write("g/a", b"last")


def everything(scene: Scene) -> Source:
    return Source(scene.address, pattern="g/.*")


def kept(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.parquet")}


def test_there_and_back(spark: Any, scene: Scene, tmp_path: Path) -> None:
    fill(scene)
    source, path = everything(scene), str(tmp_path / "archive")
    assert archive.run(spark, Archive(source, path))["messages"] == 204
    before = rows(spark.read.format("mqfs").options(**source.options()).load())
    assert rows(archive.open_archive(spark, path)) == before
    names = kept(tmp_path / "archive" / "messages")
    assert {name.rsplit("/date=", 1)[0] for name in names} == {
        "group=g/stream=a", "group=g/stream=007", "group=g%2Fdeep/stream=a%25b%3Dc"
    }  # fmt: skip
    # nothing new: nothing changes; something new: that alone
    assert archive.run(spark, Archive(source, path))["messages"] == 0
    assert kept(tmp_path / "archive" / "messages") == names
    scene.write("g/a", b"more")
    assert archive.run(spark, Archive(source, path))["messages"] == 1
    # the last batch repeated, as after a kill before its end was noted
    for file in (tmp_path / "archive/_mqfs/checkpoint/commits").glob("*1*"):
        file.unlink()
    archive.run(spark, Archive(source, path))
    found = verify.run(spark, Verify(path, source))
    assert found["sound"], found
    assert (found["messages"], found["same"], found["not_archived_yet"]) == (205, 205, 0)
    # it may be moved
    moved = str(shutil.move(path, tmp_path / "moved"))
    again = Replay(moved, Source(scene.address), into="back", rate=150)
    assert replay.run(spark, again)["messages"] == 205
    replay.run(spark, again)  # published once
    scene.put("back/g", '{"stream":"a","headers":{"replay.sequence":"x","replay.time":"y"}}', b"of someone else")
    back = Source(scene.address, pattern="back/.*")
    found = verify.run(spark, Verify(moved, back, replayed=True, into="back"))
    assert found["sound"], found
    assert found["same"] == 205
    there = replay.restore_originals(spark.read.format("mqfs").options(**back.options()).load())
    assert [(topic.removeprefix("back/"), *rest) for topic, *rest in rows(there)] == rows(
        archive.open_archive(spark, moved)
    )


def test_an_archive_at_a_path_that_looks_like_a_pattern(spark: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    scene.stream("g/a", b"one", b"two")
    path = str(tmp_path / "a[b]{c,d}*?")
    assert archive.run(spark, Archive(everything(scene), path))["messages"] == 2
    assert len(kept(Path(path) / "messages")) == 1


def test_names_that_a_list_would_take_for_others(spark: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    names = ("g/a,b", "g/t ", " u")
    for path in (*names, "g/a", "b", "g/t", "u"):
        scene.stream(path, path.encode())
    scene.ctl("", "replay all")
    scene.write(" u", b" u")
    source, path = Source(scene.address, names), str(tmp_path / "archive")
    archive.run(spark, Archive(source, path))
    assert {row[0] for row in rows(archive.open_archive(spark, path))} == {*names}
    scene.write("g/a,b", b"since")
    assert {row[3] for row in rows(pyspark_mqfs.history(spark, path, scene.address))} >= {b"since", b"g/t ", b" u"}
    assert verify.run(spark, Verify(path, source))["not_archived_yet"] == 1
    with pytest.raises(CommandError, match="archive of streams"):
        archive.run(spark, Archive(Source(scene.address, ("g/a", "b")), path))


@pytest.mark.parametrize("line", ["remove group", "remove stream"])
def test_history_does_not_mix_in_a_stream_of_the_same_name(spark: Any, scene: Scene, tmp_path: Path, line: str) -> None:
    """Its sequences may be those of messages in the archive."""
    scene.group("g")
    scene.stream("g/a", b"old 1", b"old 2", b"old 3")
    source, path = Source(scene.address, ("g/a",)), str(tmp_path / "archive")
    archive.run(spark, Archive(source, path))
    scene.client.remove("g/a")
    if line == "remove group":
        for name in scene.client.list("g/.consumers"):
            scene.client.remove(f"g/.consumers/{name}")
        scene.client.remove("g")
        scene.group("g")
    scene.stream("g/a", *(b"new %d" % number for number in range(5)))
    with pytest.raises(CommandError, match="g/a was removed and created again"):
        pyspark_mqfs.history(spark, path, scene.address)


@pytest.mark.parametrize(
    ("path", "what"), [(f"g/{'n' * 249}", "stream"), (f"g/{'#' * 90}", "stream"), (f"g/{'d' * 249}/s", "group 'g/")]
)
def test_a_name_that_is_too_long_for_a_folder_is_told(
    spark: Any, scene: Scene, tmp_path: Path, path: str, what: str
) -> None:
    scene.group("g")
    scene.stream("g/a", b"1")
    if path.count("/") > 1:
        scene.group(path.rpartition("/")[0])
    scene.stream(path)
    source, folder = Source(scene.address, pattern="g/.*"), str(tmp_path / "archive")
    assert archive.run(spark, Archive(source, folder))["messages"] == 1  # it has no folder yet
    scene.write(path, b"2")
    with pytest.raises(CommandError, match=f"{what}.* makes a folder name of 2[5-9][0-9] bytes"):
        archive.run(spark, Archive(source, folder))


def test_a_replay_goes_on_with_what_the_archive_got_since(spark: Any, scene: Scene, tmp_path: Path) -> None:
    for group in ("g", "h"):
        scene.group(group)
    scene.stream("g/a", b"1", b"2", b"3")
    source, path = Source(scene.address, pattern="[gh]/.*"), str(tmp_path / "archive")
    again, found = Replay(path, Source(scene.address), into="back", rate=1_000), []
    for more in ([], [("g/a", b"4"), ("g/b", b"5"), ("h/c", b"6"), ("g/a", b"7")]):
        for name, body in more:
            if name.rpartition("/")[2] not in scene.client.list(name[0]):
                scene.stream(name)
            scene.write(name, body)
        archive.run(spark, Archive(source, path))
        found += [replay.run(spark, again)["messages"] for _ in range(2)]
    assert found == [3, 0, 4, 0]
    back = Source(scene.address, pattern="back/.*")
    assert {(row[0], row[3]) for row in rows(spark.read.format("mqfs").options(**back.options()).load())} == {
        ("back/g/a", b"1"), ("back/g/a", b"2"), ("back/g/a", b"3"), ("back/g/a", b"4"), ("back/g/b", b"5"),
        ("back/h/c", b"6"), ("back/g/a", b"7"),
    }  # fmt: skip
    assert verify.run(spark, Verify(path, back, replayed=True, into="back"))["same"] == 7


def test_a_replay_of_a_replay_is_verified(spark: Any, scene: Scene, tmp_path: Path) -> None:
    """Beside a message that was written to the replayed stream."""
    scene.group("g")
    scene.stream("g/a", b"1", b"2")
    scene.put("g", '{"stream":"a","headers":{"x":"y"}}', b"3")
    paths = "g/a", "one/g/a", "two/one/g/a"
    for at, into in enumerate(("one", "two")):
        folder = str(tmp_path / into)
        archive.run(spark, Archive(Source(scene.address, (paths[at],)), folder))
        replay.run(spark, Replay(folder, Source(scene.address), into=into))
        there = Source(scene.address, (paths[at + 1],))
        found = verify.run(spark, Verify(folder, there, replayed=True, into=into))
        assert (found["sound"], found["same"]) == (True, 3 + at), into
        scene.write(paths[at + 1], b"new")


def test_of_two_that_create_a_file_one_does(spark: Any, tmp_path: Path) -> None:
    """That is how the first plan of a replay is made."""
    one, two = (Folder(spark, str(tmp_path)) for _ in range(2))
    assert [one.create_json("plans/a.json", 1), two.create_json("plans/a.json", 2)] == [True, False]
    assert two.read_json("plans/a.json") == 1
    assert {path.name for path in (tmp_path / "plans").iterdir()} == {"a.json"}


def test_two_replays_at_once_publish_each_message_once(
    spark: Any, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive grows while one of them plans, and the other publishes what it has then."""
    scene.group("g")
    scene.stream("g/a")
    source, path = Source(scene.address, ("g/a",)), str(tmp_path / "archive")
    request = Replay(path, Source(scene.address), into="back", name="one")
    splits = replay._splits

    def grow(body: bytes) -> None:
        scene.write("g/a", body)
        archive.run(spark, Archive(source, path))

    def overtaken(*arguments: Any) -> Any:
        found = list(splits(*arguments))
        monkeypatch.setattr(replay, "_splits", splits)
        grow(b"3")
        replay.run(spark, request)
        return iter(found)

    grow(b"1")
    replay.run(spark, request)
    grow(b"2")
    monkeypatch.setattr(replay, "_splits", overtaken)
    replay.run(spark, request)
    grow(b"4")
    replay.run(spark, request)
    back = Source(scene.address, pattern="back/.*")
    found = [row[3] for row in rows(spark.read.format("mqfs").options(**back.options()).load())]
    assert found == [b"1", b"2", b"3", b"4"]


def test_history_has_the_archive_and_what_came_after(spark: Any, scene: Scene, tmp_path: Path) -> None:
    """Each message once: those in both, those that the log has no more, those that came since, of streams that are
    gone and of new ones. What neither has is a loss."""
    fill(scene)
    scene.stream("g/gone", b"only in the archive")
    source, path = everything(scene), str(tmp_path / "archive")
    archive.run(spark, Archive(source, path))
    wanted = rows(archive.open_archive(spark, path))
    scene.ctl("g", "clear a")
    scene.client.remove("g/gone")
    scene.write("g/a", b"since")
    scene.stream("g/new", b"new")
    found = pyspark_mqfs.history(spark, path, scene.address)
    log = spark.read.format("mqfs").options(**source.options()).load()
    assert found.columns == log.columns
    live = [row for row in rows(log) if row[3] in (b"since", b"new")]
    assert len(live) == 2
    assert rows(found) == sorted([*wanted, *live])
    assert {row["partition"] for row in found.select("partition").distinct().collect()} == {0}
    scene.ctl("g", "clear a")
    with pytest.raises(Exception, match="data loss: g/a") as failed:  # `since` is in neither now
        pyspark_mqfs.history(spark, path, scene.address).collect()
    assert explain(failed.value).startswith("data loss: g/a")


def test_what_verify_finds(spark: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    scene.stream("g/a", *(b"a%d" % n for n in range(20)))
    source, path = everything(scene), str(tmp_path / "archive")
    archive.run(spark, Archive(source, path))
    scene.write("g/a", b"not archived")
    frame = archive.open_archive(spark, path).drop("topic").orderBy("offset").cache()
    bad = frame.where("offset not in (3, 4)").selectExpr(
        "offset", "if(offset = 7, timestamp - interval 1 day, timestamp) timestamp",
        "if(offset = 9, cast('x' as binary), value) value", "headers", "crc", "group", "stream", "date",
    )  # fmt: skip
    worse = bad.union(bad.where("offset = 12")).localCheckpoint()
    frame.unpersist()
    worse.write.mode("overwrite").partitionBy("group", "stream", "date").parquet(f"{path}/messages")
    found = verify.run(spark, Verify(path, source))
    assert not found["sound"]
    assert {name: found[name] for name in ("holes", "missing", "doubled", "clock", "checksum")} == {
        "holes": 1, "missing": 2, "doubled": 1, "clock": 1, "checksum": 1
    }  # fmt: skip
    assert {name: found[name] for name in ("lost", "differs", "not_archived_yet")} == {
        "lost": 2, "differs": 2, "not_archived_yet": 1
    }  # fmt: skip
    assert found["examples"]["checksum"] == ["g/a 9"]
    assert sorted(found["examples"]["lost"]) == ["g/a 3", "g/a 4"]
    alone = verify.run(spark, Verify(source=source))
    assert (alone["sound"], alone["messages"], alone["holes"]) == (True, 21, 0)


def test_what_is_refused(spark: Any, scene: Scene, tmp_path: Path) -> None:
    fill(scene)
    source, path = everything(scene), str(tmp_path / "archive")
    archive.run(spark, Archive(source, path))
    with pytest.raises(CommandError, match=r"archive of streams g/\.\* \(expected g/a, or a new directory\)"):
        archive.run(spark, Archive(Source(scene.address, ("g/a",)), path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(CommandError, match="not empty and not an archive"):
        archive.run(spark, Archive(source, str(tmp_path / "other")))
    with pytest.raises(CommandError, match="not an archive"):
        replay.run(spark, Replay(str(tmp_path / "other"), Source(scene.address)))
    replay.run(spark, Replay(path, Source(scene.address), into="x", streams=("g/007",), name="mine"))
    with pytest.raises(CommandError, match="expected another --id"):
        replay.run(spark, Replay(path, Source(scene.address), into="y", streams=("g/007",), name="mine"))
    scene.stop()
    shutil.rmtree(scene.store)
    scene.start()
    scene.group("g")
    with pytest.raises(CommandError, match="archive of store"):
        archive.run(spark, Archive(source, path))
    with pytest.raises(CommandError, match="archive of store"):
        pyspark_mqfs.history(spark, path, scene.address)
