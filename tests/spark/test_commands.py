"""The other commands, on the session of all tests. One is started as a user would, by the examples of the manual."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pexpect
import pytest

from pyspark_mqfs.commands import archive, copy, dead_letters, replay, report, stats, verify
from pyspark_mqfs.commands.archive import Archive
from pyspark_mqfs.commands.copy import Copy
from pyspark_mqfs.commands.dead_letters import Divert, Redrive
from pyspark_mqfs.commands.replay import Replay
from pyspark_mqfs.commands.session import CommandError, explain
from pyspark_mqfs.commands.sources import Source, follow
from pyspark_mqfs.commands.stats import Stats
from pyspark_mqfs.commands.verify import Verify
from tests.spark.scene import Scene
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, environment, mqfs


def test_spark_finds_the_format_by_its_name(tmp_path: Path) -> None:
    """As Spark looks for it: in what is on the path, of a Python without any options."""
    look = "import pkgutil; print(*(one.name for one in pkgutil.iter_modules() if one.name.startswith('pyspark_')))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "pyspark_mqfs" in done.stdout.split(), done.stderr


def test_a_command_does_not_import_pandas(tmp_path: Path) -> None:
    """Which would take longer than all else that is imported before Spark is started."""
    look = "import sys; import pyspark_mqfs.commands.verify; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], cwd=tmp_path, env=environment(), check=True)


def bodies(scene: Scene, path: str) -> list[bytes]:
    """What a stream keeps, in order."""
    group, _, name = path.rpartition("/")
    with scene.client.open(f"{group}/.cursor", "r+") as file:
        file.write(f"select '{name}'\nseek first\nuntil end\n".encode())
        return list(iter(lambda: file.receive(1 << 20), b""))


def remembered(scene: Scene, *groups: str) -> list[str]:
    """Consumers and producers that those groups know."""
    found = []
    for group in groups:
        found += scene.client.list(f"{group}/.consumers")
        with scene.client.open(f"{group}/.txn/ctl") as file:
            found += [line for line in file.receive(1 << 20).decode().splitlines() if line.startswith("committed ")]
    return found


def test_copy_what_a_condition_selects(spark: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    scene.stream("g/a", *(b"%d" % n for n in range(20)))
    scene.put("g", '{"stream":"a","headers":{"lang":"de"}}', b"hallo")
    source = Source(scene.address, ("g/a",))
    one = Copy(
        source,
        source,
        to="h/odd",
        where="try_cast(text as int) % 2 = 1 or header['lang'] = 'de'",
        checkpoint=str(tmp_path / "c"),
    )
    copy.run(spark, one)
    scene.write("g/a", b"21")
    copy.run(spark, one)
    assert bodies(scene, "h/odd") == [*(b"%d" % n for n in range(1, 20, 2)), b"hallo", b"21"]
    copy.run(spark, Copy(source, source, into="x/y"))
    assert bodies(scene, "x/y/g/a") == bodies(scene, "g/a")
    assert len(remembered(scene, "g", "h")) == 2  # of the one with a checkpoint alone
    with pytest.raises(CommandError, match="copy: no target"):
        copy.run(spark, Copy(source, source))


def test_dead_letters_aside_and_back(spark: Any, scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/mail", b"good", b"bad 1", b"bad 2")
    dead_letters.divert(spark, Divert(Source(scene.address, ("g/mail",)), "text like 'bad%'", "g/dead", "no good"))
    assert bodies(scene, "g/dead") == [b"bad 1", b"bad 2"]
    dead = Source(scene.address, ("g/dead",))
    found = dead_letters.redrive(spark, Redrive(dead, "header['letter.reason'] = 'no good' and text like '%1'"))
    assert found == {"redriven": 1}
    assert bodies(scene, "g/dead") == [b"bad 2"]
    assert bodies(scene, "g/mail") == [b"good", b"bad 1", b"bad 2", b"bad 1"]
    assert remembered(scene, "g") == []


def test_a_redriven_message_has_the_headers_that_it_had(spark: Any, scene: Scene) -> None:
    """Also those that begin as the ones of a dead letter do."""
    scene.group("g")
    scene.stream("g/mail")
    scene.stream("g/dead")
    scene.put("g", '{"stream":"mail","headers":{"letter.lang":"de","letter":"a","own":"b"}}', b"bad")
    source = Source(scene.address, ("g/mail",))
    for _ in range(2):
        dead_letters.divert(spark, Divert(source, "text = 'bad' and offset = 1", "g/dead", "no good"))
        dead_letters.redrive(spark, Redrive(Source(scene.address, ("g/dead",))))
    found = spark.read.format("mqfs").options(**source.options()).load().orderBy("offset").collect()
    own = {"letter.lang": b"de", "letter": b"a", "own": b"b", "sender": str(os.geteuid()).encode()}
    assert [{header["key"]: bytes(header["value"]) for header in row["headers"]} for row in found] == [own] * 3


def test_streams_in_one_argument_are_refused(spark: Any, scene: Scene, tmp_path: Path) -> None:
    """As option subscribe has them, but a stream may have such a name."""
    scene.group("g")
    for name in ("a", "b", "x,g"):
        scene.stream(f"g/{name}", name.encode())
    several, one = Source(scene.address, ("g/a, g/b",)), Source(scene.address, ("g/x,g", "g/a"))
    for act in (
        lambda: copy.run(spark, Copy(several, several, to="h/all")),
        lambda: archive.run(spark, Archive(several, str(tmp_path / "archive"))),
        lambda: verify.run(spark, Verify(source=several)),
    ):
        with pytest.raises(CommandError, match=r"g/a, g/b: no such stream .expected the streams as separate arguments"):
            act()
    assert not (tmp_path / "archive").exists()
    copy.run(spark, Copy(one, one, to="h/all"))
    assert sorted(bodies(scene, "h/all")) == [b"a", b"x,g"]


def test_nothing_stays_of_what_runs_once(spark: Any, scene: Scene) -> None:
    """A consumer over some streams of a group is over a view, which goes too."""
    scene.group("g")
    for name in ("a", "b", "c"):
        scene.stream(f"g/{name}", name.encode())
    source = Source(scene.address, pattern="g/[ab]")
    copy.run(spark, Copy(source, source, to="h/all"))
    assert sorted(bodies(scene, "h/all")) == [b"a", b"b"]
    assert remembered(scene, "g", "h") == []
    assert sorted(name for name in scene.client.list("g") if not name.startswith(".")) == [
        "a",
        "b",
        "c",
        "ctl",
        "order",
    ]


def test_dead_letters_of_the_server(spark: Any, scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/mail", b"one", b"two")
    scene.ctl("g", "consumer worker mail")
    with scene.client.open("g/.consumers/worker", "r+") as file:
        for _ in range(2):
            file.receive(100)
            file.write(b"dead no such address\n")
    assert bodies(scene, "g/dead") == [b"one", b"two"]
    assert dead_letters.redrive(spark, Redrive(Source(scene.address, ("g/dead",)))) == {"redriven": 2}
    assert bodies(scene, "g/dead") == []
    assert bodies(scene, "g/mail") == [b"one", b"two", b"one", b"two"]


def test_messages_are_diverted_in_their_group_only(spark: Any, scene: Scene) -> None:
    """A redrive publishes in the group of the dead letters."""
    scene.group("a")
    scene.group("b")
    for path in ("a/mail", "b/mail", "root"):
        scene.stream(path, f"bad {path}".encode())
    for source, to in (
        (Source(scene.address, ("b/mail",)), "a/dead"),
        (Source(scene.address, pattern="[ab]/mail"), "a/dead"),
        (Source(scene.address, ("root",)), "a/dead"),
        (Source(scene.address, ("a/mail",)), "dead"),
    ):
        with pytest.raises(CommandError, match=f"--to {to}: not in group"):
            dead_letters.divert(spark, Divert(source, "text like 'bad%'", to))
    assert not {"dead"} & {*scene.client.list("a"), *scene.client.list("")}


def test_a_group_that_comes_later_is_not_diverted_to_another(spark: Any, scene: Scene) -> None:
    scene.group("a")
    scene.stream("a/mail", b"bad a")
    ended = Event()

    def come_later() -> None:
        eventually(lambda: "dead" in scene.client.list("a") and bodies(scene, "a/dead"))
        scene.group("b")
        scene.stream("b/mail", b"bad b")
        eventually(lambda: ended.is_set() or len(bodies(scene, "a/dead")) > 1)
        for query in spark.streams.active:
            query.stop()

    request = Divert(Source(scene.address, pattern="[ab]/mail"), "text like 'bad%'", "a/dead", forever=True)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(come_later)
        with pytest.raises(Exception, match="not in the group of --to: b/mail"):
            dead_letters.divert(spark, request)
        ended.set()
        later.result(HANG_S)
    assert bodies(scene, "a/dead") == [b"bad a"]


@pytest.mark.parametrize("line", ["full drop-new", "replay off"])
def test_dead_letters_stay_where_the_group_would_not_retain_them(spark: Any, scene: Scene, line: str) -> None:
    scene.group("g", "replay all", "depth 1")
    scene.stream("g/mail", b"one")
    scene.stream("g/dead")
    scene.put("g", '{"stream":"dead","headers":{"letter.stream":"mail"}}', b"letter")
    scene.ctl("g", line)
    with pytest.raises(CommandError, match=line):
        dead_letters.redrive(spark, Redrive(Source(scene.address, ("g/dead",))))
    scene.ctl("g", "replay all")
    assert bodies(scene, "g/dead") == [b"letter"]


def test_a_group_whose_making_was_cut_off_is_finished(scene: Scene) -> None:
    scene.client.mkdir("cut")  # and the connection was lost
    replay.make_group(scene.client, "cut")
    assert "replay all" in replay.read_text(scene.client, "cut/ctl").splitlines()
    scene.client.mkdir("off")
    scene.ctl("off", "bind v 'a\rdeliver one\rb'")
    scene.stream("off/s", b"x")
    with pytest.raises(CommandError, match="off: replay off without consumers"):
        replay.make_group(scene.client, "off")
    scene.ctl("off", "consumer c s")
    replay.make_group(scene.client, "off")
    assert "replay off" in replay.read_text(scene.client, "off/ctl").splitlines()


def test_stats_and_their_pictures(spark: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    scene.stream("g/a", b"x" * 100, b"y" * 300)
    scene.stream("g/<b>")
    scene.put("g", '{"stream":"<b>","headers":{"sent":"0"}}', b"z")
    found = stats.run(spark, Stats(source=Source(scene.address, pattern="g/.*"), sent="sent"))
    a, b = sorted(found["streams"], key=lambda row: -row["messages"])
    assert (a["stream"], a["messages"], a["bytes"], a["smallest"], a["largest"]) == ("g/a", 2, 400, 100, 300)
    assert (a["latency_s"], b["messages"]) == (None, 1)
    assert b["latency_s"]["p50"] > 1_700_000_000  # it says that it was sent in 1970
    assert found["sizes"] == [(1, 1), (64, 1), (256, 1)]
    step = found["rates"]["step"]
    assert sum(found["rates"]["streams"]["g/a"]) * step == pytest.approx(2)
    assert all(png.startswith(b"\x89PNG") for png in report.plots(found).values())
    assert report.write(found, str(tmp_path / "r.html"), "<title>") == [str(tmp_path / "r.html")]
    text = (tmp_path / "r.html").read_text()
    assert "g/&lt;b&gt;" in text
    assert text.count("data:image/png;base64,") == 3
    assert "g/a" in report.table(found)


def test_one_odd_message_ends_no_command(spark: Any, scene: Scene, tmp_path: Path) -> None:
    """Bytes that are not UTF-8, empty messages, and a header that is not the number it should be."""
    scene.group("g")
    scene.stream("g/a", b"bad 1", b"\xff\0 bad", b"good")
    sent = ("1700000000.5", "yesterday", "nan", "inf", "")
    for text in sent:
        scene.put("g", json.dumps({"stream": "a", "headers": {"sent": text}}), b"")
    source, path = Source(scene.address, ("g/a",)), str(tmp_path / "archive")
    dead_letters.divert(spark, Divert(source, "text like '%bad%' and header['sent'] is null", "g/dead"))
    assert bodies(scene, "g/dead") == [b"bad 1", b"\xff\0 bad"]
    copy.run(spark, Copy(source, source, to="h/empty", where="text = '' and header['sent'] = 'yesterday'"))
    archive.run(spark, Archive(source, path))
    assert replay.run(spark, Replay(path, source, into="back"))["messages"] == 3 + len(sent)
    found = stats.run(spark, stats.Stats(source=Source(scene.address, pattern="(g/a|back/g/a|h/empty)"), sent="sent"))
    counts = {row["stream"]: (row["messages"], row["smallest"]) for row in found["streams"]}
    assert counts == {"g/a": (8, 0), "back/g/a": (8, 0), "h/empty": (1, 0)}
    latencies = next(row["latency_s"] for row in found["streams"] if row["stream"] == "g/a")
    assert 0 < latencies["p50"] == latencies["p999"] < float("inf")
    assert found["sizes"] == [(1, 11), (4, 6)]


def test_the_reason_of_a_failure_in_python_is_told(spark: Any, scene: Scene) -> None:
    """Not what Spark says first."""

    def fail(batch: Any, number: int) -> None:
        raise OSError("disk on fire")

    scene.group("g")
    scene.stream("g/a", b"1")
    source = Source(scene.address, ("g/a",))
    query = follow(spark, source).writeStream.foreachBatch(fail).trigger(availableNow=True).start()
    with pytest.raises(Exception, match="disk on fire") as failed:
        query.awaitTermination(HANG_S)
    assert explain(failed.value) == "OSError: disk on fire"


def pythons(program: str) -> dict[str, str]:
    return dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), program)


def test_a_task_that_fails_is_one_line_too(scene: Scene, tmp_path: Path, python: str) -> None:
    """Spark tells of it at length, in several threads."""
    scene.group("g")
    scene.stream("g/a", b"1")
    done = mqfs("spark", "copy", "--at", scene.address, "--to", "g", "g/a", cwd=tmp_path, **pythons(python))
    lines = [line for line in done.stderr.splitlines() if "incubator modules" not in line]  # Java's own
    assert lines == ["mqfs: topic 'g': a group (expected a stream in it, as g/all)"]
    assert done.returncode == 1


def test_a_command_says_how_far_it_is_and_ctrl_c_ends_it(scene: Scene, tmp_path: Path, python: str) -> None:
    scene.group("g")
    scene.stream("g/a", b"1", b"2", b"3")
    words = ["spark", "copy", "--follow", "--at", scene.address, "--to", "h/b", "g/a", "--master", "local[1]"]
    process = pexpect.spawn(
        COMMAND[0],
        [*COMMAND[1:], *words],
        cwd=str(tmp_path),
        env=environment(TERM="xterm", **pythons(python)),
        encoding="utf-8",
        timeout=HANG_S,
        dimensions=(24, 120),
    )
    try:
        process.expect(r" s   starting Spark   Ctrl-C ends it")
        process.expect(r" s   read: 3 messages, ")
        process.sendintr()
        process.expect(r"mqfs: interrupted: read: 3 messages, [^\n]*\r\n")
        process.expect(pexpect.EOF)
        process.wait()
        assert process.exitstatus == 130
    finally:
        process.close(force=True)
    assert bodies(scene, "h/b") == [b"1", b"2", b"3"]


def test_one_line_for_what_is_wrong_before_spark_is_started(tmp_path: Path) -> None:
    at = ("--at", "unix!/x")
    no_java, asked = tmp_path / "no java", tmp_path / "asked"
    (no_java / "bin").mkdir(parents=True)
    (no_java / "bin" / "java").write_text(f"#!/bin/sh\n: >'{asked}'\nexit 1\n")
    (no_java / "bin" / "java").chmod(0o755)
    for words, line in (
        (("archive", "x", "g/a"), "--at: missing (expected"),
        (("replay", "x", "--at", "unix!/x", "--since", "noon"), "bad time 'noon' (expected 2030"),
        (("archive", "x", "g/a", "--at", "unix!/x", "--file-size", "much"), "option --file-size: invalid value 'much'"),
        (
            ("copy", "--at", "unix!/x", "--conf", "x", "--to", "g/a", "g/a"),
            "--conf: bad setting 'x' (expected spark.KEY=VALUE)",
        ),
        (("archive", "x", *at), "streams and --pattern: none or both given"),
        (("archive", "x", "g/a", "--pattern", "g/.*", *at), "streams and --pattern: none or both given"),
        (("archive", "x", "--pattern", "(", *at), "expected a regular expression of Python"),
        (("archive", "x", "g/a", "--at", "nowhere"), "(expected unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT)"),
        (("replay", "x", "--rate", "1", "--speed", "1", *at), "--rate and --speed: both given"),
        (("replay", "x", "--speed", "-1", *at), "--speed"),
        (("verify",), "verify: no source (expected --archive, --at, or both)"),
        (("verify", "--archive", "x", "g/a"), "--at: missing (expected"),
        (("verify", "--archive", "x", *at), "streams and --pattern: none or both given"),
        (("stats",), "stats: no source or two (expected --archive or --at)"),
        (("stats", "g/a"), "--at: missing (expected"),
        (("stats", "g/a", "--archive", "x", *at), "stats: no source or two (expected --archive or --at)"),
        (("stats", "g/a", "--report", "absent/r.html", *at), "--report 'absent/r.html': no folder there"),
        (("copy", "g/a", *at), "copy: no target (expected --to GROUP/STREAM, or --into GROUP)"),
        (
            ("copy", "g/a", "--to", "g/b", "--target", "nowhere", *at),
            "(expected unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT)",
        ),
        (("dead-letters", "divert", "g/a", "--to", "g/dead", *at), "no --where (expected an SQL condition)"),
        (
            ("dead-letters", "divert", "g/a", "--where", "true", "--to", "h/dead", *at),
            "--to h/dead: not in group 'g' of the messages",
        ),
        (("dead-letters", "redrive", "", *at), "paths of streams, as jobs/mail,jobs/print)"),
    ):
        done = mqfs("spark", *words, cwd=tmp_path, JAVA_HOME=str(no_java))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert line in done.stderr
    assert not asked.exists(), "no Java is started"
    wrapped = "Job aborted\n  File x\npyspark_mqfs.options.OptionError: option x is y\n SQLSTATE: 38000\nat org.apache"
    assert explain(RuntimeError(wrapped)) == "option x is y"
    called = "An error occurred while calling o62.load.\n: org.apache.spark.Missing: [NOT_FOUND] no such source\n\tat x"
    assert explain(RuntimeError(called)) == "[NOT_FOUND] no such source"
