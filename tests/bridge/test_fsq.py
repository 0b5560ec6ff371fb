"""`mqfs bridge fsq` beside processes of qlobber-fsq: what goes through it, and what it leaves alone."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from mqfs.bridge.exporter import SINGLES
from mqfs.bridge.folder import MULTI, SINGLE, Folder, Origin, Topics
from mqfs.bridge.importer import NAME_HEADER
from mqfs.client import Group
from mqfs.errors import Disconnected
from mqfs.syntax.names import escape
from tests.bridge.rig import Bridge, Make, Rig, digest, numbers, rig
from tests.support.eventually import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]
HOUR_MS = 3_600_000


def arrive(r: Rig, count: int, group: Group | None = None) -> list[tuple[str, bytes]]:
    eventually(lambda: len(r.kept(group)) >= count, f"{count} messages: {[bridge.text() for bridge in r.bridges]}")
    return r.kept(group)


def name_of(topic: str, *, kind: str = MULTI, ttl_ms: int = HOUR_MS) -> str:
    return str(Topics().name(topic, kind, int(time.time() * 1000) + ttl_ms, secrets.token_hex(16))[0])


def is_quiet(r: Rig, *bridges: Bridge) -> None:
    """The bridges have scanned what was there a while before: a file that was put later has come."""
    number = next(numbers)
    r.put(name_of(f"quiet{number}"), b"\0end")
    eventually(lambda: (f"quiet{number}", b"end") in r.kept(), f"a scan: {[bridge.text() for bridge in bridges]}")


# ---------------------------------------------------------------- what goes through


@pytest.mark.parametrize("size", [1, 100, 101, 200, 5_000])
def test_topics_of_any_length_go_both_ways(make: Make, size: int) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    r.bridge()
    topic = ("é" * (size // 2) + "a")[: max(size // 2, 1)] if size > 1 else "a"
    topic += "b" * (size - len(topic.encode()))
    node.publish(topic, "in")
    [(stream, body)] = arrive(r, 1)
    assert body == b"in"
    with r.group.history() as messages:
        assert next(messages).headers["fsq-topic"] == topic
    r.group.publish(stream, b"out", headers={"fsq-topic": topic})
    eventually(lambda: node.messages(topic=topic, body="out"), "the message")
    assert len(node.messages(topic=topic, body="in")) == 1


def test_long_topics_of_the_library_go_both_ways(make: Make) -> None:
    """Each side has the text of what the other has published, and both have one stream for it."""
    r = make()
    node = r.node()
    node.subscribe()
    r.bridge()
    topic = "orders." + "x/" * 200 + "é"
    group = r.client.group(r.group.path, escape=True)
    with group.subscribe(topic) as messages:
        node.publish(topic, "in")
        assert [(m.body, m.topic) for m in [messages.get(HANG_S)]] == [(b"in", topic)]
        group.publish(topic, "out")
        assert messages.get(HANG_S).topic == topic
    eventually(lambda: node.messages(topic=topic, body="out"), "the message")
    assert len(r.group.streams()) == 1


def test_raw_topics(make: Make) -> None:
    r = make()
    node = r.node(encode_topics=False)
    node.subscribe()
    bridge = r.bridge("--raw-topics")
    node.publish("foo.bar", "in")
    node.publish("x" * 210, "long")
    assert sorted(arrive(r, 2)) == [("foo.bar", b"in"), ("x" * 210, b"long")]
    r.group.publish("a%2Fb", b"no file's name")
    r.group.publish("foo.wup", b"out")
    eventually(lambda: node.messages(topic="foo.wup", body="out"), "the message")
    assert "'a/b': not the name of a file" in bridge.text()


def test_a_folder_with_raw_topics_is_told_from_one_with_encoded_ones(make: Make) -> None:
    r = make()
    node = r.node(encode_topics=False)
    bridge = r.bridge()
    node.publish("not hexadecimal", "x")
    eventually(lambda: "not hexadecimal (expected --raw-topics)" in bridge.text(), "the warning")
    is_quiet(r, bridge)
    assert bridge.text().count("passed over") == 1


def test_one_bucket_in_order_of_expiry(make: Make) -> None:
    r = make()
    node = r.node(order_by_expiry=True)
    for ttl in (900_000, 300_000, 600_000):
        node.publish("s", str(ttl), ttl=ttl)
    r.bridge()
    assert [body for _, body in arrive(r, 3)] == [b"300000", b"600000", b"900000"]
    r.group.publish("s", b"out")
    node.subscribe(existing=True)
    eventually(lambda: node.messages(body="out"), "the message")


def test_a_thousand_buckets_of_base_ten(make: Make) -> None:
    r = make()
    node = r.node(bucket_base=10, bucket_num_chars=3)
    node.subscribe()
    r.bridge()
    for number in range(5):
        node.publish("in", str(number))
        r.group.publish("out", str(number))
    arrive(r, 10)
    eventually(lambda: len(node.messages(topic="out")) == 5, "the messages")


@pytest.mark.parametrize("size", [1_000_000, 8_000_000])
def test_large_bodies(make: Make, size: int) -> None:
    r = make()
    node = r.node()
    node.subscribe(topic="out")
    r.bridge()
    node.publish("in", size=size, ttl=HOUR_MS)
    with r.group.subscribe("in", existing=True) as messages:
        message = messages.get(60)
        assert digest(message.body) == digest(b"x" * size)
        assert message.headers["fsq-topic"] == "in"
        assert HOUR_MS - 120_000 < int(message.headers["ttl"].removesuffix("ms")) <= HOUR_MS
    with r.group.writer("out") as file:
        file.write(b"y" * size)
    eventually(lambda: node.messages(topic="out", digest=digest(b"y" * size)), "the body")
    assert len(node.messages()) == 1


def test_a_lifetime_is_the_same_on_both_sides(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    r.bridge("--multi-ttl", "5m")
    before = time.time() * 1000
    node.publish("gone", "x", ttl=1)
    node.publish("in", "x", ttl=HOUR_MS)
    arrive(r, 1)
    with r.group.history() as messages:
        ttl = next(messages).headers["ttl"]
    assert HOUR_MS - 120_000 < int(ttl.removesuffix("ms")) <= HOUR_MS
    r.group.publish("long", b"x", ttl="2h")
    r.group.publish("usual", b"x")
    eventually(lambda: {event["topic"] for event in node.messages()} >= {"long", "usual"}, "the messages")
    for topic, ttl_ms in (("long", 2 * HOUR_MS), ("usual", 300_000)):
        expires = node.messages(topic=topic)[0]["expires"]
        assert before + ttl_ms - 1_000 <= expires <= time.time() * 1000 + ttl_ms
    assert [stream for stream, _ in r.kept()] == ["in", "long", "usual"]


def test_an_end_in_thousands_of_years(make: Make) -> None:
    r = make()
    r.node()
    r.bridge("--in")
    r.put(f"61@s+{'f' * 16}+m+{secrets.token_hex(16)}", b"\0x")
    assert arrive(r, 1) == [("a", b"x")]


def test_separators_change_places_and_patterns_select(make: Make) -> None:
    r = make()
    node = r.node(separator="/")
    node.subscribe(topic="a/*")
    r.bridge("--separator", "/:.", "--select", "a.*", "--select", "c")
    node.publish("b/x", "not selected")
    node.publish("a/x", "in")
    assert arrive(r, 1) == [("a.x", b"in")]
    r.group.publish("b.y", b"not selected")
    r.group.publish("a.y", b"out")
    eventually(lambda: node.messages(topic="a/y", body="out"), "the message")
    assert len([file for file in r.files() if file.startswith("messages")]) == 3


def test_patterns_have_the_words_of_the_group(make: Make) -> None:
    r = make("words : + #")
    node = r.node()
    r.bridge("--separator", ".::", "--select", "a:+")
    node.publish("a.b.c", "not selected")
    node.publish("a.b", "in")
    assert arrive(r, 1) == [("a:b", b"in")]


def test_empty_payloads(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    r.bridge()
    node.publish("in", "")
    assert arrive(r, 1) == [("in", b"")]
    r.group.publish("out", b"")
    eventually(lambda: node.messages(topic="out", size=0), "the message")


def test_one_way_only(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    into = r.bridge("--in")
    node.publish("s", "in")
    arrive(r, 1)
    assert r.group.consumers() == []
    into.stop()
    r.bridge("--out")
    eventually(lambda: "fsq" in r.group.consumers(), "the bridge")
    node.publish("s", "stays")
    r.group.publish("s", b"out")
    eventually(lambda: node.messages(body="out"), "the message")
    assert r.kept() == [("s", b"in"), ("s", b"out")]


def test_nothing_comes_back(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    bridges = [r.bridge(), r.bridge()]
    for number in range(20):
        node.publish("s", f"in{number}")
        r.group.publish("s", f"out{number}".encode())
    arrive(r, 40)
    eventually(lambda: len(node.messages()) == 40, "the messages")
    is_quiet(r, *bridges)
    assert max(Counter(r.kept()).values()) == 1
    assert len(node.messages()) <= 41
    assert len([file for file in r.files() if file.startswith("messages")]) == 41


# ---------------------------------------------------------------- singles


def test_a_single_stays_in_the_folder_until_a_reader_waits_for_it(make: Make) -> None:
    r = make()
    node = r.node()
    bridge = r.bridge()
    node.publish("jobs", "job", single=True)
    is_quiet(r, bridge)
    with r.group.consume("workers") as claims:
        bodies = [claims.get(60).body for _ in range(2)]  # the multi that made it quiet is one
        assert b"job" in bodies
    eventually(lambda: not [file for file in r.files() if "+s+" in file], "its file is removed")
    node.subscribe()
    assert node.of("done") == []


def test_a_single_that_is_discarded_stays_in_the_folder(make: Make) -> None:
    r = make("depth 1", "full drop-new")
    node = r.node()
    bridge = r.bridge("--in")
    r.group.publish("jobs", b"old")
    with r.group.consume("workers") as claims:
        claims.get(60).ack()
        node.publish("jobs", "job", single=True)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(claims.get, 60)
            eventually(lambda: "full, the message was discarded" in bridge.text(), "the warning")
            assert len([file for file in r.files() if "+s+" in file]) == 1
            discarded = r.group.stats().discarded
            eventually(lambda: r.group.stats().discarded > discarded, "another attempt")
            assert bridge.text().count("discarded") == 1
            r.group.ctl("depth 0")
            job.result().ack()
            assert job.result().body == b"job"
    eventually(lambda: not [file for file in r.files() if "+s+" in file], "its file is removed")


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_a_single_that_waited_longer_than_the_default_lifetime_is_exported(make: Make, deliver: str) -> None:
    r = make("replay off", f"deliver {deliver}")
    r.node().kill()
    r.group.publish("jobs", "job", single=deliver == "all")
    old = time.time() + 1.5
    eventually(lambda: time.time() > old, "it to be old")
    r.bridge("--out", "--single-ttl", "1s")
    eventually(lambda: [file for file in r.files() if "+s+" in file], "its file")


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_singles_are_no_dead_letters_where_the_folder_fails(make: Make, deliver: str) -> None:
    r = make("replay off", f"deliver {deliver}", "retries 1")
    r.node().kill()
    for bucket in (r.folder / "messages").iterdir():
        bucket.rmdir()
        bucket.touch()
    for number in range(3):
        r.group.publish("jobs", str(number), single=deliver == "all", ttl="1h")
    bridge = r.bridge("--out")
    assert bridge.process.wait(HANG_S) == 1
    assert "Not a directory" in bridge.text()
    assert "dead" not in r.group.streams()
    with r.group.take("jobs") as claims:
        assert sorted(claims.get(60).body for _ in range(3)) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_a_single_that_is_in_the_folder_when_the_next_fails_is_for_its_workers_alone(make: Make, deliver: str) -> None:
    r = make("replay off", f"deliver {deliver}")
    r.node().kill()
    for size in (1, 2, 3, 100_000, 4):
        r.group.publish("jobs", b"x" * size, single=deliver == "all", ttl="1h")
    bridge = r.bridge("--out", before=("prlimit", "--fsize=50000"))
    assert bridge.process.wait(HANG_S) == 1
    assert "File too large" in bridge.text()
    assert sorted((r.folder / file).stat().st_size - 1 for file in r.files()) == [1, 2, 3]
    with r.group.take("jobs") as claims:
        assert [claims.get(60).size for _ in range(2)] == [100_000, 4]
        with pytest.raises(TimeoutError):
            claims.get(0.0)


def test_a_single_whose_topic_is_no_name_is_a_dead_letter(make: Make) -> None:
    r = make("replay all")
    r.node().kill()
    r.group.publish(escape(b"a/b"), "job", single=True, ttl="1h")
    r.bridge("--out", "--raw-topics")
    with r.group.take("dead") as claims:
        letter = claims.get(60)
    assert (letter.body, letter.message.headers["stream"]) == (b"job", escape(b"a/b"))
    assert r.files() == []


def test_a_stream_of_a_work_queue_gets_one_for_each_reader(make: Make) -> None:
    r = make("replay off", "deliver one", "ack next")
    node = r.node()
    r.bridge("--in")
    r.group.create("jobs")
    for number in range(4):
        node.publish("jobs", str(number), single=True)
    with r.group.take("jobs") as claims:
        claim = claims.get(60)
        eventually(lambda: len([file for file in r.files() if "+s+" in file]) == 3, "one was taken")
        claim.ack()
        rest = [claims.get(60) for _ in range(3)]
        assert {claim.body, *(other.body for other in rest)} == {b"0", b"1", b"2", b"3"}
        for other in rest:
            other.ack()
    eventually(lambda: not [file for file in r.files() if "+s+" in file], "no single is left")


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_singles_of_the_group_are_for_fsq_s_workers_where_no_reader_waits(make: Make, deliver: str) -> None:
    r = make("replay off", f"deliver {deliver}")
    node = r.node()
    node.subscribe(fail=1)
    r.bridge("--out")
    for number in range(5):
        r.group.publish("jobs", str(number), single=deliver == "all", ttl="1h")
    eventually(lambda: len(node.of("done")) == 5, "the jobs")
    assert sorted(event["body"] for event in node.of("done")) == ["0", "1", "2", "3", "4"]
    assert len(node.of("refused")) == 1
    eventually(lambda: r.files() == [], "no file is left")


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_singles_of_the_group_are_exported_past_those_of_a_folder(make: Make, deliver: str) -> None:
    r = make("replay off", f"deliver {deliver}")
    r.node()
    foreign = 3 * SINGLES
    for number in range(foreign):
        headers = {NAME_HEADER: name_of("jobs", kind=SINGLE)}
        r.group.publish("jobs", str(number), single=deliver == "all", ttl="1h", headers=headers)
    r.group.publish("jobs", "own", single=deliver == "all", ttl="1h")
    r.bridge("--out")
    eventually(lambda: len([file for file in r.files() if "+s+" in file]) == 1, "its file")
    with r.group.take("jobs") as claims:
        held = [claims.get(60) for _ in range(foreign)]
        assert sorted(int(claim.body) for claim in held) == [*range(foreign)]
        with pytest.raises(TimeoutError):
            claims.get(0.0)


def test_a_worker_of_the_group_is_preferred_to_those_of_the_folder(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    r.bridge()
    handled: list[bytes] = []
    with r.group.work("workers", lambda claim: handled.append(claim.body)):
        for number in range(10):
            eventually(lambda: r.group.stats().consumers["workers"].parked, "the worker waits")
            r.group.publish("jobs", str(number), single=True)
            eventually(lambda: len(handled) > number, "the job")  # noqa: B023
    assert node.messages() == []


def test_a_single_that_is_no_one_message_is_for_work_queues(make: Make) -> None:
    r = make()
    node = r.node()
    bridge = r.bridge("--in")
    node.publish("jobs", size=2_000_000, single=True)
    with r.group.work("workers", lambda claim: None):
        eventually(lambda: "single of 2000000 bytes" in bridge.text(), "the warning")
    assert len([file for file in r.files() if "+s+" in file]) == 1
    queues = make("replay off", "deliver one", "ack next")
    other = queues.node()
    queues.group.create("jobs")
    queues.bridge("--in")
    other.publish("jobs", size=2_000_000, single=True)
    with queues.group.take("jobs") as claims, claims.get(60) as claim:
        assert digest(claim.body) == digest(b"x" * 2_000_000)


def test_a_large_single_that_would_be_discarded_stays_in_the_folder(make: Make) -> None:
    r = make("replay off", "deliver one", "ack next", "depth 3", "full drop-new")
    node = r.node()
    bridge = r.bridge("--in")
    for body in (b"0", b"1"):
        r.group.publish("jobs", body)
    with ThreadPoolExecutor(1) as pool, r.group.take("jobs") as claims:
        jobs = [claims.get(60) for _ in range(2)]  # with the two parts of the single four, until they are done
        next_job = pool.submit(claims.get, HANG_S)
        node.publish("jobs", size=2_000_000, single=True)
        eventually(lambda: "message of 2000000 bytes" in bridge.text() or not singles(r), "the warning")
        assert len(singles(r)) == 1
        assert "with 'full drop-new'" in bridge.text()
        for job in jobs:
            job.ack()
        r.group.publish("jobs", b"2")
        assert next_job.result().body == b"2"


def singles(r: Rig) -> list[str]:
    return [file for file in r.files() if "+s+" in file]


def test_without_singles(make: Make) -> None:
    r = make("sync 10ms")
    node = r.node()
    bridge = r.bridge("--no-singles")
    node.publish("jobs", "job", single=True)
    r.group.publish("jobs", b"ours", single=True)
    with r.group.take("jobs") as claims:
        is_quiet(r, bridge)
        assert claims.get(60).body == b"ours"
    assert len([file for file in r.files() if "+s+" in file]) == 1


def test_singles_need_sync_always(make: Make) -> None:
    r = make("sync 10ms")
    r.node()
    bridge = r.bridge()
    assert bridge.process.wait(60) == 2
    assert "sync 10ms (expected always, --no-singles, or --no-sync)" in bridge.text()
    bridge = r.bridge("--no-sync")
    node = r.nodes[0]
    node.publish("s", "x")
    arrive(r, 1)


# ---------------------------------------------------------------- what is not as it should be


def test_foreign_and_torn_files_are_left_alone(make: Make) -> None:
    r = make()
    node = r.node()
    bridge = r.bridge()
    handled = name_of("s")
    torn = name_of("t" * 300)
    empty = name_of("u" * 300)
    (r.folder / "topics" / Folder(str(r.folder)).bucket_of(empty) / empty).touch()
    paths = [
        r.put("note.txt", b"hello"),
        r.put("a@b+c+d+e", b"hello"),
        r.put(handled, b""),
        r.put(torn, b"\0x"),
        r.put(empty, b"\0x"),
        r.put(name_of("d", kind="d"), b"\0"),
    ]
    node.publish("s", "x")
    assert arrive(r, 1) == [("s", b"x")]
    eventually(lambda: bridge.text().count("passed over") == 2, "both are logged")
    is_quiet(r, bridge)
    assert bridge.text().count("passed over") == 2
    assert all(path.exists() for path in paths)


def test_a_topic_file_that_comes_late_is_found_at_the_next_scan(make: Make) -> None:
    r = make()
    r.node()
    bridge = r.bridge("--poll", "1s")
    is_quiet(r, bridge)
    name, rest = Topics().name("t" * 300, MULTI, int(time.time() * 1000) + HOUR_MS, secrets.token_hex(16))
    path = r.put(str(name), b"\0late")
    (r.folder / "topics" / path.parent.name / path.name).write_text(rest)
    assert ("t" * 221, b"late") in [(stream[:221], body) for stream, body in arrive(r, 2)]


@pytest.mark.parametrize("size", [None, 0, 100, 256 * 16])
def test_update_is_missing_cut_or_of_another_size(make: Make, size: int | None) -> None:
    r = make()
    node = r.node(notify=False)
    update = r.folder / "update" / "UPDATE"
    if size is None:
        update.unlink()
    else:
        os.truncate(update, size)
    r.bridge()
    node.publish("s", "in")
    assert arrive(r, 1) == [("s", b"in")]
    r.group.publish("s", b"out")
    other = r.node()  # each start writes UPDATE whole
    other.subscribe(existing=True)
    eventually(lambda: other.messages(body="out"), "the message")


def test_update_is_cut_while_the_bridge_runs(make: Make) -> None:
    r = make()
    node = r.node()
    bridge = r.bridge()
    is_quiet(r, bridge)
    os.truncate(r.folder / "update" / "UPDATE", 100)
    node.publish("s", "in")
    assert ("s", b"in") in arrive(r, 2)


def test_without_stamps(make: Make) -> None:
    r = make()
    node = r.node(bucket_stamp_size=0)
    node.subscribe()
    r.bridge()
    node.publish("s", "in")
    arrive(r, 1)
    r.group.publish("s", b"out")
    eventually(lambda: node.messages(body="out"), "the message")
    assert os.listdir(r.folder / "update") == []


def test_a_clock_that_is_an_hour_off_is_reported_once(make: Make) -> None:
    r = make()
    r.node()
    bridge = r.bridge()
    is_quiet(r, bridge)
    assert "clock" not in bridge.text()
    for _ in range(2):
        r.put(name_of("s"), b"\0x", late_s=3600)
    arrive(r, 3)
    assert bridge.text().count("the clock of a writer is +3600 s off ours (expected less than 2 s)") == 1


@pytest.mark.parametrize(
    ("late_ms", "ttl", "comes"), [(HOUR_MS, 60_000, 1), (-HOUR_MS, 60_000, 0), (-HOUR_MS, 2 * HOUR_MS, 1)]
)
def test_an_end_is_the_writer_s(make: Make, late_ms: int, ttl: int, comes: int) -> None:
    r = make()
    node = r.node(late_ms=late_ms)
    bridge = r.bridge()
    node.publish("s", "x", ttl=ttl)
    if comes:  # perhaps by a scan after that of the file below
        eventually(lambda: ("s", b"x") in r.kept(), "the message")
    is_quiet(r, bridge)
    assert [stream for stream, _ in r.kept()].count("s") == comes


def test_expired_files_are_removed_where_that_is_asked_for(make: Make) -> None:
    r = make()
    r.node().kill()
    old = name_of("t" * 300, ttl_ms=-1_000)
    kept = r.put(old, b"\0x")
    bridge = r.bridge()
    is_quiet(r, bridge)
    assert kept.exists()
    bridge.stop()
    r.bridge("--expire")
    eventually(lambda: not kept.exists(), "the file is removed")


def test_a_message_for_which_there_is_no_room_comes_later(make: Make) -> None:
    r = make("depth 1", "full reject")
    node = r.node()
    bridge = r.bridge("--in")
    node.publish("s", "1")
    arrive(r, 1)
    node.publish("s", "2")
    eventually(lambda: "again at the next scan" in bridge.text(), "the warning")
    r.group.purge("s")
    assert arrive(r, 1) == [("s", b"2")]


def test_a_message_that_the_group_discards_comes_later(make: Make) -> None:
    r = make("depth 2", "full drop-new")
    bare(r)
    names = [name_of("s", ttl_ms=HOUR_MS + number) for number in range(5)]
    for number, name in enumerate(names):
        r.put(name, b"\0%d" % number)
    bridge = r.bridge("--in")
    bodies: list[bytes] = []
    for count in (2, 2, 1):  # which two depends on where a scan is
        eventually(lambda: len(r.kept()) == count, bridge.text())  # noqa: B023
        bodies += [body for _, body in r.kept()]
        r.group.purge("s")
    assert sorted(bodies) == [b"0", b"1", b"2", b"3", b"4"]
    assert bridge.text().count("again at the next scan") == 1
    r.put(name_of("large"), bytes(2_000_001))
    eventually(lambda: "message of 2000000 bytes: with 'full drop-new'" in bridge.text(), "the warning")
    r.group.ctl("full reject")
    is_quiet(r, bridge)
    assert [body for _, body in r.kept()] == [b"end"]


# ---------------------------------------------------------------- repeats


def test_what_was_imported_is_known_without_the_state_file(make: Make) -> None:
    r = make()
    node = r.node()
    bridge = r.bridge()
    node.publish("s", "x", ttl=HOUR_MS)
    node.publish("s", size=2_000_000, ttl=HOUR_MS)
    eventually(lambda: len(r.kept()) == 2, "the messages")
    bridge.stop()
    shutil.rmtree(r.home / "state")
    bridge.start()
    is_quiet(r, bridge)
    assert len(r.kept()) == 3


def test_what_was_imported_is_known_by_the_state_file_alone(make: Make) -> None:
    r = make("dedup 100ms")
    node = r.node()
    first = r.bridge("--window", "0")
    node.publish("s", "x", ttl=HOUR_MS)
    arrive(r, 1)
    eventually(lambda: any((r.home / "state" / "mqfs").iterdir()), "the state file")
    first.stop()
    time.sleep(0.1)  # `dedup` is over
    second = r.bridge("--window", "0")
    is_quiet(r, second)
    assert len(r.kept()) == 2


def test_a_dedup_that_is_too_short_is_refused(make: Make) -> None:
    r = make("dedup 1m")
    r.node()
    bridge = r.bridge()
    assert bridge.process.wait(60) == 2
    assert "dedup 1m (expected 10m or more, or --window)" in bridge.text()


def test_a_folder_that_fsq_has_not_made_is_refused(make: Make) -> None:
    r = make()
    bridge = r.bridge()
    assert bridge.process.wait(60) == 2
    assert "no messages in it (expected a folder that qlobber-fsq has made)" in bridge.text()
    (r.folder / "messages" / "00").mkdir(parents=True)
    (r.folder / "messages" / "7").mkdir()
    bridge = r.bridge()
    assert bridge.process.wait(60) == 2
    assert "2 buckets (expected those of a folder of qlobber-fsq, as 00 to ff)" in bridge.text()


def test_a_consumer_of_something_else_is_refused_and_keeps_its_messages(make: Make) -> None:
    r = make()
    bare(r)
    r.group.publish("jobs", b"before")
    r.group.ctl("consumer worker jobs")
    r.group.publish("jobs", b"work")
    bridge = r.bridge("--out", "--consumer", "worker")
    assert bridge.process.wait(60) == 2
    assert "consumer 'worker': over 'jobs' (expected all of the group" in bridge.text()
    assert r.group.stats().consumers["worker"].waiting == 2


@pytest.mark.parametrize("option", ["--poll", "--multi-ttl", "--single-ttl"])
@pytest.mark.parametrize("zero", ["0", "0s"])
def test_a_duration_of_0_is_refused(make: Make, option: str, zero: str) -> None:
    r = make()
    bare(r)
    bridge = r.bridge(option, zero)
    assert bridge.process.wait(60) == 2
    assert f"'{zero}' (expected more than 0)" in bridge.text()


def test_one_bridge_exports_and_another_takes_over(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    bridges = [r.bridge("--out"), r.bridge("--out")]
    for number in range(2):
        r.group.publish("s", str(number))
        eventually(lambda: node.messages(body=str(number)), "the message")  # noqa: B023
        bridges[number].stop(9)
    assert len(node.messages()) == 2


def test_a_bridge_ends_while_its_server_is_away() -> None:
    with rig() as r:
        r.node()
        bridge = r.bridge()
        is_quiet(r, bridge)
        r.group.publish("s", b"out")
        eventually(lambda: len(r.files()) == 2, "the file")
        r.server.kill()
        eventually(lambda: "reconnecting" in bridge.text(), "the loss is noticed")
        assert bridge.stop() == 0


def test_leftovers_of_killed_bridges_are_removed_when_they_have_expired(make: Make) -> None:
    r = make()
    r.node()
    stats = r.group.stats()
    unique = Origin(stats.store, stats.group).unique(7)
    ours, theirs = (str(Topics().name("s", MULTI, 1, each)[0]) for each in (unique, secrets.token_hex(16)))
    for name in (ours, theirs):
        (r.folder / "staging" / name).write_bytes(b"\0begun")
    r.bridge()
    eventually(lambda: os.listdir(r.folder / "staging") == [theirs], "one is removed")


def test_the_server_may_be_restarted(make: Make) -> None:
    r = make()
    node = r.node()
    node.subscribe()
    r.bridge()
    node.publish("s", "1")
    arrive(r, 1)
    r.server.restart()
    node.publish("s", "2")
    with suppress(Disconnected):  # it is noticed by the first call
        r.group.streams()
    r.group.publish("s", b"out")
    arrive(r, 3)
    eventually(lambda: node.messages(body="out"), "the message")
    assert max(Counter(r.kept()).values()) == 1


def bare(r: Rig) -> None:
    """The folder, of one bucket, without a process of qlobber-fsq."""
    (r.folder / "messages" / "0").mkdir(parents=True)


def test_what_is_no_file_of_a_message_neither_hangs_a_bridge_nor_leaves_the_folder(make: Make) -> None:
    r = make("sync always")
    bare(r)
    secret = r.home / f"secret-{r.name}"
    secret.write_bytes(b"\0secret")
    secret.chmod(0o600)
    long = name_of("t" * 300)
    bridge = r.bridge()
    with r.group.consume("worker") as worker:
        with suppress(TimeoutError):
            worker.get(0.0)  # it waits for singles
        for kind in (MULTI, SINGLE):
            (r.folder / "messages/0" / name_of("link", kind=kind)).symlink_to(secret)
            os.mkfifo(r.folder / "messages/0" / name_of("fifo", kind=kind))
        (r.folder / "topics/0").mkdir(parents=True, exist_ok=True)
        os.mkfifo(r.folder / "topics/0" / long)
        r.put(long, b"\0x")
        got = threading.Thread(target=worker.get, args=(HANG_S,))
        got.start()
        r.put(name_of("plain", kind=SINGLE), b"\0x")
        got.join()
    is_quiet(r, bridge)
    assert bridge.text().count("not a plain file") >= 3
    assert {body for _, body in r.kept()} <= {b"x", b"end"}
    assert secret.read_bytes() == b"\0secret"
    assert bridge.stop() == 0


def test_a_bridge_ends_also_where_its_server_does_not_answer() -> None:
    with rig() as r:
        bare(r)
        bridge = r.bridge(stop_s=0.3)
        is_quiet(r, bridge)
        os.kill(r.server.pid, signal.SIGSTOP)
        try:
            r.put(name_of("s"), b"\0x")
            assert bridge.stop() in (0, -signal.SIGALRM)
        finally:
            os.kill(r.server.pid, signal.SIGCONT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has more rights than others")
def test_a_bridge_with_more_rights_than_the_folder_s_owner_says_so(make: Make) -> None:
    r = make()
    bare(r)
    bridge = r.bridge()
    is_quiet(r, bridge)
    assert "root" not in bridge.text()
    bridge.stop()
    os.chown(r.folder, 65534, 65534)
    bridge.start()
    eventually(lambda: "belongs to uid 65534, and the bridge runs as root" in bridge.text(), "the warning")
    is_quiet(r, bridge)
