"""mq-cat against a real mount: every option, every exit code, every way to end."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server
from tests.support.tools import environment, lines, mq_cat, opened, running, say, tools_server


def numbered(group: Path, streams: list[str], count: int, random_: random.Random, first: int = 0) -> list[bytes]:
    """Write `count` numbered lines to streams taken at random; the lines."""
    fds = [os.open(group / name, os.O_WRONLY) for name in streams]
    written = []
    for number in range(first, first + count):
        line = b"%d\n" % number
        os.write(random_.choice(fds), line)
        written.append(line)
    for fd in fds:
        os.close(fd)
    return written


def test_several_streams_in_the_order_they_were_written(server: Server) -> None:
    group = server.group("exact", "replay all", "sync off", streams=["a", "b", "c d"])
    written = numbered(group, ["a", "b", "c d"], size(20000), random.Random(seed()))
    result = mq_cat("-e", group)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"".join(written)


def test_two_writers_at_once_give_one_order(server: Server) -> None:
    group = server.group("writers", "replay all", "sync off", streams=["alice", "bob"])
    count = size(10000)

    def write(name: str) -> None:
        say(group / name, *(f"{name} {number}\n" for number in range(count)))

    writers = [threading.Thread(target=write, args=(name,)) for name in ("alice", "bob")]
    with running("mq-cat", "-n", 2 * count, group, "alice", "bob") as first, running("mq-cat", group) as second:
        for writer in writers:
            writer.start()
        seen = lines(first.stdout, 2 * count)
        assert first.wait(HANG_S) == 0
        assert lines(second.stdout, 2 * count) == seen
        for writer in writers:
            writer.join()
    for name in (b"alice", b"bob"):
        assert [line for line in seen if line.startswith(name)] == [b"%s %d\n" % (name, n) for n in range(count)]
    ordered = (group / "order").open("rb", buffering=0)
    assert [ordered.read(300).rstrip(b"\0") for _ in seen] == [line.split()[0] for line in seen]
    ordered.close()


def test_only_the_streams_asked_for_live(server: Server) -> None:
    group = server.group("some", streams=["a", "b", "c"])
    with running("mq-cat", group, "a", "c") as process:
        eventually(opened(group, ".cursor"))
        wait_until_waiting(process)
        for name in "abcabc":
            say(group / name, f"{name}\n")
        assert lines(process.stdout, 4) == [b"a\n", b"c\n", b"a\n", b"c\n"]
        assert process.poll() is None


def wait_until_waiting(process: subprocess.Popen[bytes]) -> None:
    """Until it has done all it does before it waits for a message: it sleeps in poll."""
    eventually(lambda: "poll" in Path(f"/proc/{process.pid}/wchan").read_text(), "waiting")


def test_a_stream_made_later_is_printed_too(server: Server) -> None:
    group = server.group("later", streams=["a"])
    with running("mq-cat", group) as process:
        wait_until_waiting(process)
        (group / "new").touch()
        say(group / "new", "one\n")
        assert lines(process.stdout, 1) == [b"one\n"]


def test_patterns_and_a_stream_by_its_path(server: Server) -> None:
    group = server.group("patterns", "replay all", streams=["log.a", "log.b", "other"])
    for name in ("log.a", "other", "log.b"):
        say(group / name, f"{name}\n")
    assert mq_cat("-e", group, "log.*").stdout == b"log.a\nlog.b\n"
    assert mq_cat("-e", group, "other", "*.b").stdout == b"other\nlog.b\n"
    assert mq_cat("-e", group / "log.a").stdout == b"log.a\n"
    assert mq_cat("-e", group / "log.#").stdout == b"log.a\nlog.b\n"
    assert mq_cat("-e", "log.b", cwd=group).stdout == b"log.b\n"
    with running("mq-cat", "-n", "1", "--from", "end", group, "late.#") as process:
        wait_until_waiting(process)
        (group / "late.x").touch()
        say(group / "late.x", "made later\n")
        assert process.wait(HANG_S) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"made later\n"


def test_count(server: Server) -> None:
    group = server.group("count", "replay all", streams=["a"])
    say(group / "a", "1\n", "2\n", "3\n")
    assert mq_cat("-n", 2, group).stdout == b"1\n2\n"
    assert mq_cat("-n", 0, group).stdout == b""
    assert mq_cat("-n", 3, "-e", "--idle", 9, group).returncode == 0


def test_idle_ends_with_124_after_silence(server: Server) -> None:
    group = server.group("idle", "replay all", streams=["a"])
    say(group / "a", "1\n")
    started = time.monotonic()
    result = mq_cat("--idle", "0.3", group)
    assert (result.returncode, result.stdout, result.stderr) == (124, b"1\n", b"")
    assert time.monotonic() - started >= 0.3
    assert mq_cat("--idle", "1s", "-n", 1, group).returncode == 0


def test_idle_begins_anew_with_each_message(server: Server) -> None:
    group = server.group("idle2", streams=["a"])
    with running("mq-cat", "--idle", "1", group) as process:
        wait_until_waiting(process)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            say(group / "a", "x\n")
            assert lines(process.stdout, 1) == [b"x\n"]
            still_runs(process, 0.2)
        assert process.wait(HANG_S) == 124


def still_runs(process: subprocess.Popen[bytes], seconds: float) -> None:
    """It must still run after that time."""
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)


def test_formats(server: Server) -> None:
    group = server.group("formats", "replay all", streams=["a"])
    say(group / "a", "one\n", "two")
    for format_, printed in (
        ("raw", b"one\ntwo"),
        ("line", b"one\ntwo\n"),
        ("nul", b"one\n\0two\0"),
        ("each", b"one\ntwo"),
        ("json", mq_cat("-e", "--json", group).stdout),
    ):
        assert mq_cat("-e", "-f", format_, group).stdout == printed, format_
    assert mq_cat("-e", "-0", "-f", "line", group).stdout == b"one\n\0two\0"
    assert mq_cat("-e", "-0", "--json", group).stdout.count(b"}\0{") == 1


def test_each_message_is_one_write(server: Server) -> None:
    group = server.group("each", "replay all", streams=["a"])
    other = server.group("each other", "replay all", streams=["b"])
    say(group / "a", "1", "2", "3")
    for format_, bodies in (("each", ["1", "2", "3"]), ("raw", ["123"])):
        with (other / "b").open("wb", buffering=0) as out:
            assert mq_cat("-e", "-f", format_, group, stdout=out).returncode == 0
        rows = mq_cat("-e", "--json", other).stdout.splitlines()
        assert [json.loads(row)["body"] for row in rows] == bodies
        (other / "ctl").write_text("clear\n")


def test_records_are_the_log_s_own_bytes(server: Server) -> None:
    group = server.group("records", "replay all", streams=["a", "b"])
    for name in "abab":
        say(group / name, f"{name}\n")
    cursor = os.open(group / ".cursor", os.O_RDWR)
    os.write(cursor, b"format record\nuntil end\n")
    expected = b""
    while data := os.read(cursor, 1 << 20):
        expected += data
    os.close(cursor)
    assert mq_cat("-e", "-f", "record", group).stdout == expected
    two = mq_cat("-n", 2, "-f", "record", group).stdout
    assert expected.startswith(two)
    assert (two.count(b"a\n"), two.count(b"b\n")) == (1, 1)


def test_headers_are_in_json(server: Server) -> None:
    group = server.group("headers", "replay all", streams=["a"])
    (group / ".put").write_text('{"stream":"a","headers":{"lang":"de","ä":""}} x')
    row = json.loads(mq_cat("-e", "--json", group).stdout)
    assert row["headers"].items() >= {"lang": "de", "ä": ""}.items()
    cursor = os.open(group / ".cursor", os.O_RDWR)
    os.write(cursor, b"format json\n")
    assert os.read(cursor, 65536) == mq_cat("-e", "--json", group).stdout
    os.close(cursor)


# ---------------------------------------------------------------- consumers


def work(server: Server, name: str, *bodies: str | bytes) -> Path:
    """A group with a consumer w that has those messages to take."""
    group = server.group(name, "replay all", "sync off", "consumer w a", streams=["a"])
    say(group / "a", *bodies)
    return group


def left(group: Path) -> tuple[int, int, int]:
    """How many wait for the consumer, were acknowledged, failed."""
    row = json.loads((group / ".stats").read_text())["consumers"]["w"]
    return row["waiting"], row["acknowledged"], row["failed"]


def test_a_consumer_s_messages_are_taken(server: Server) -> None:
    group = work(server, "takes", *(f"{number}\n" for number in range(10)))
    assert mq_cat("-n", 3, "--consumer", "w", group).stdout == b"0\n1\n2\n"
    assert left(group) == (7, 3, 0)
    result = mq_cat("-e", "--consumer", "w", group, "a")
    assert (result.returncode, result.stderr, result.stdout) == (0, b"", b"3\n4\n5\n6\n7\n8\n9\n")
    assert left(group) == (0, 10, 0)
    assert mq_cat("-e", "--consumer", "w", group).stdout == b""
    assert mq_cat("--idle", "0.2", "--consumer", "w", group).returncode == 124
    assert len(mq_cat("-e", group).stdout) == 20  # for others they are still there


@pytest.mark.parametrize("format_", ["raw", "line", "nul", "each", "json", "record"])
def test_a_consumer_in_every_format(server: Server, format_: str) -> None:
    bodies: list[str | bytes] = ["one\n", "two", b"\xff" * 1_000_000]
    group = work(server, f"format {format_}", *bodies)
    (group / "ctl").write_text("consumer other a\n")
    plain = mq_cat("-e", "-f", format_, group).stdout
    taken = mq_cat("-e", "-f", format_, "--consumer", "w", group).stdout
    if format_ == "json":
        taken = taken.replace(b',"deliveries":1', b"")
    if format_ == "record":
        assert taken.count(b"one\n") == 1
        assert len(taken) >= 1_000_000
    else:
        assert taken == plain
    assert left(group) == (0, 3, 0)


@pytest.mark.parametrize("format_", ["raw", "json", "record"])
def test_a_consumer_s_bodies_in_parts_are_whole(server: Server, format_: str) -> None:
    """The consumer shows the last part; by that all of it is acknowledged."""
    group = server.group(f"parts {format_}", "replay all", "sync off", "consumer w a", streams=["a"])
    bodies = [b"small\n", b"y" * 2_000_004, b"z" * 1_500_000, b"small again\n"]
    with server.connect() as client:
        for body in bodies:
            client.group(group.name).publish("a", body)
    result = mq_cat("-e", "-f", format_, "--consumer", "w", group)
    assert (result.returncode, result.stderr) == (0, b"")
    if format_ == "json":
        assert [json.loads(line)["body"].encode() for line in result.stdout.splitlines()] == bodies
    elif format_ == "record":
        assert all(result.stdout.count(letter) >= count for letter, count in ((b"y", 2_000_004), (b"z", 1_500_000)))
        assert result.stdout.count(b"small") == 2
    else:
        assert result.stdout == b"".join(bodies)
    assert left(group) == (0, 4, 0)


@pytest.mark.parametrize("format_", ["raw", "record"])
def test_a_consumer_s_body_of_which_a_part_is_missing_is_a_dead_letter(server: Server, format_: str) -> None:
    group = work(server, f"part missing {format_}", "first")
    (group / ".put").write_text('{"stream":"a","headers":{"part":"9/9"}} last of nine')
    say(group / "a", "whole")
    result = mq_cat("-e", "-f", format_, "--consumer", "w", group)
    assert (b"last of nine" in result.stdout, b"whole" in result.stdout) == (False, True)
    assert result.stderr == b"mq-cat: a 2: part 9 of a body that is not complete, not acknowledged\n"
    assert (group / ".kept" / "dead").read_bytes() == b"last of nine"


def test_a_consumer_s_times(server: Server) -> None:
    group = work(server, "times of work", "one")
    plain = mq_cat("-e", "-t", group).stdout
    assert mq_cat("-e", "-t", "--consumer", "w", group).stdout == plain


def test_records_that_were_not_asked_for_are_given_back(server: Server) -> None:
    group = work(server, "given back", "1", "2", "3", "4")
    assert b"1" in mq_cat("-n", 2, "-f", "record", "--consumer", "w", group).stdout
    assert left(group) == (2, 2, 0)
    assert mq_cat("-n", 1, "--json", "--consumer", "w", group).stdout.count(b'"deliveries":1,') == 1


def test_many_records_at_a_time(server: Server) -> None:
    group = work(server, "many records", *(f"{number}\n" for number in range(12_000)))
    result = mq_cat("-e", "-f", "record", "--consumer", "w", group)
    assert (result.returncode, result.stderr) == (0, b"")
    assert left(group) == (0, 12_000, 0)


def test_what_cannot_be_written_is_given_back(server: Server) -> None:
    group = work(server, "torn pipe", *("x" * 70_000 for _ in range(5)))
    script = f"mq-cat --consumer w '{group}' | head -c 100000 | wc -c"
    result = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True, check=True)
    assert (result.stdout.strip(), result.stderr) == (b"100000", b"")
    waiting, acknowledged, failed = left(group)
    assert (waiting + acknowledged, failed) == (5, 0)
    assert 1 <= acknowledged <= 3  # what the pipe had room for was written
    row = json.loads(mq_cat("-n", 1, "--json", "--consumer", "w", group).stdout)
    assert (row["sequence"], row["deliveries"]) == (acknowledged + 1, 1)


def test_a_lease_that_ran_out_while_nobody_read_the_output(server: Server) -> None:
    group = work(server, "lease", "x" * 100_000)
    (group / "ctl").write_text("lease 300ms\nbackoff 10ms 10ms\n")
    with running("mq-cat", "--consumer", "w", group) as process:
        eventually(lambda: left(group)[2] == 1, "the end of the lease")
        (group / "ctl").write_text("lease 1h\n")  # no other ends, though the machine is busy
        assert len(mq_cat("-n", 1, "--consumer", "w", group).stdout) == 100_000
        assert process.stdout is not None
        got = 0
        while got < 100_000:
            got += len(process.stdout.read(100_000 - got))
        say(group / "a", "next\n")
        assert lines(process.stdout, 1) == [b"next\n"]
        eventually(lambda: left(group)[1] == 2, "both acknowledged")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("format_", ["raw", "record"])
def test_what_is_claimed_at_a_signal_is_given_back(server: Server, format_: str, number: int) -> None:
    group = work(server, f"ended {format_} {number}", *("x" * 100_000 for _ in range(3)))
    (group / "ctl").write_text("retries 1\n")
    with running("mq-cat", "-f", format_, "--consumer", "w", group) as process:
        eventually(lambda: "pipe_write" in Path(f"/proc/{process.pid}/wchan").read_text(), "full output")
        process.send_signal(number)
        assert process.wait(HANG_S) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert left(group) == (3, 0, 0)
    assert json.loads(mq_cat("-n", 1, "--json", "--consumer", "w", group).stdout)["deliveries"] == 1


def test_a_signal_that_is_ignored_ends_nothing(server: Server) -> None:
    group = work(server, "nohup")
    command = f"trap '' HUP; exec mq-cat -n 1 --consumer w '{group}'"
    with subprocess.Popen(["sh", "-c", command], env=environment(), stdout=subprocess.PIPE) as process:
        wait_until_waiting(process)
        process.send_signal(signal.SIGHUP)
        say(group / "a", "one\n")
        assert process.communicate(timeout=HANG_S)[0] == b"one\n"
        assert process.returncode == 0


def test_two_take_from_one_consumer(server: Server) -> None:
    group = work(server, "shares")
    with running("mq-cat", "--consumer", "w", group) as one, running("mq-cat", "--consumer", "w", group) as two:
        for process in (one, two):
            wait_until_waiting(process)
        say(group / "a", *(f"{number}\n" for number in range(200)))
        eventually(lambda: left(group) == (0, 200, 0), "all taken")
        for process in (one, two):
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 130
        assert one.stdout is not None
        assert two.stdout is not None
        seen = one.stdout.read().split() + two.stdout.read().split()
    assert sorted(map(int, seen)) == list(range(200))


def test_a_consumer_that_is_not_there_or_removed(server: Server) -> None:
    group = work(server, "no consumer")
    assert refused(1, "--consumer", "x", group).startswith(f"{group}: no consumer 'x' (create it: touch ")
    assert "invalid consumer '../a'" in refused(1, "--consumer", "../a", group)
    with running("mq-cat", "--consumer", "w", group) as process:
        wait_until_waiting(process)
        (group / ".consumers" / "w").unlink()
        assert process.wait(HANG_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == f"mq-cat: {group}: the consumer 'w' was removed\n".encode()


def test_options_that_exclude_each_other(server: Server) -> None:
    group = server.group("excludes")
    for words in (
        ["--json", "-t"],
        ["--json", "-f", "raw"],
        ["-t", "-f", "record"],
        ["-0", "-f", "each"],
        ["--order", "--consumer", "w"],
        ["--from", "first", "--consumer", "w"],
    ):
        assert ": not with -" in refused(2, *words, group)


def test_nul_ends_each_message(server: Server) -> None:
    group = server.group("nul", "replay all", streams=["a"])
    say(group / "a", "one\n", "two", "\0")
    assert mq_cat("-e", "-0", group).stdout == b"one\n\0two\0\0\0"
    assert mq_cat("-e", group).stdout == b"one\ntwo\0"


def test_where_it_begins(server: Server) -> None:
    group = server.group("from", "replay last", streams=["a", "b"])
    (group / "ctl").write_text("replay all\n")
    say(group / "a", "1\n", "2\n")
    say(group / "b", "3\n", "4\n")
    row = mq_cat("-e", "--json", "--from", "first", group).stdout.splitlines()[2]
    third, third_time = json.loads(row), re.findall(r'"time":([0-9.]+)', row.decode())[0]

    def bodies(*arguments: object) -> bytes:
        result = mq_cat("-e", *arguments)
        assert result.returncode == 0, result.stderr
        return bytes(result.stdout.replace(b"\n", b""))

    assert bodies(group) == b"1234"
    assert bodies("--from", "first", group) == b"1234"
    assert bodies("--from", "first", group, "b") == b"34"
    assert bodies("--from", "last", group) == b"4"
    assert bodies("--from", "end", group) == b""
    assert bodies("--from", third["sequence"], group) == b"34"
    assert bodies("--from", "-1", group) == b"4"
    assert bodies("--from", "-1", group, "a") == b"2"
    assert bodies("--from", "-3", group) == b"234"
    assert bodies("--from", "-10m", group) == b"1234"
    assert bodies("--from", f"@{third_time}", group) == b"34"
    assert bodies("--from", "@0", group) == b"1234"
    assert bodies("--from", "@2001-02-03T04:05", group) == b"1234"
    (group / "ctl").write_text("replay last\n")
    assert bodies(group) == b"4"
    assert bodies(group, "a") == b"2"
    (group / "ctl").write_text("replay off\n")
    assert bodies(group) == b""


def test_json_is_what_the_cursor_itself_says(server: Server) -> None:
    group = server.group("json", "replay all", streams=["plain", "it's a 'name'"])
    every = bytes(range(256))
    say(group / "plain", "text\n", 'ä\t"quoted"\\', every, b"\xff\xfe", "\u2028\x00")
    say(group / "it's a 'name'", "x")
    result = mq_cat("-e", "--json", group)
    cursor = os.open(group / ".cursor", os.O_RDWR)
    os.write(cursor, b"format json\nuntil end\n")
    said = b""
    while data := os.read(cursor, 1 << 20):
        said += data
    os.close(cursor)
    assert result.stdout == said
    rows = [json.loads(row) for row in result.stdout.splitlines()]
    assert base64.b64decode(rows[2]["body_base64"]) == every
    assert rows[1]["body"] == 'ä\t"quoted"\\'
    assert rows[5]["stream"] == "it's a 'name'"


def test_times_and_streams_before_each_message(server: Server) -> None:
    group = server.group("times", "replay all", streams=["a", "it's b"])
    before = time.time()
    say(group / "a", "one\n")
    say(group / "it's b", "two")
    result = mq_cat("-e", "-t", group, env={"TZ": "IST-5:30"})
    first, second = result.stdout.decode().splitlines()
    stamp, rest = first.split(" ", 1)
    assert rest == "a one"
    assert stamp.endswith("+05:30")
    assert before - 1 <= datetime.fromisoformat(stamp).timestamp() <= time.time() + 1
    assert second.split(" ", 1)[1] == "'it''s b' two"


def test_names_with_blanks_and_quotes(server: Server) -> None:
    names = ["two words", "it's", "'", "-n", "ümlaut", "a,b"]
    group = server.group("a group", "replay all", streams=names)
    for name in names:
        say(group / name, f"{name}\n")
    for name in names:
        result = mq_cat("-e", "--", group, name)
        assert (result.stdout, result.stderr) == (f"{name}\n".encode(), b"")
    assert mq_cat("-e", "--", group, *names).stdout == "".join(f"{name}\n" for name in names).encode()


def test_large_and_binary_messages_are_whole(server: Server) -> None:
    group = server.group("large", "replay all", "sync off", streams=["a", "b"])
    random_ = random.Random(seed())
    bodies = [random_.randbytes(n) for n in (1_044_480, 1, 131_072, 1_044_479, 65_536)]
    for body, name in zip(bodies, "abbab", strict=True):
        say(group / name, body)
    assert mq_cat("-e", group).stdout == b"".join(bodies)
    assert mq_cat("-e", "--order", group).stdout == b"".join(bodies)


def test_end_marks_are_passed_over(server: Server) -> None:
    group = server.group("marks", "replay all", streams=["a"])
    say(group / "a", "1\n")
    (group / "ctl").write_text("eof a\n")
    say(group / "a", "2\n")
    assert mq_cat("-n", 2, group).stdout == b"1\n2\n"
    assert mq_cat("-n", 2, "--order", group).stdout == b"1\n2\n"


def test_a_group_that_may_be_entered_but_not_listed(server: Server) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: cannot become another user")
    group = server.group("entered", "replay all", "bind v a", streams=["a", "private"])
    say(group / "a", "one\n")
    group.chmod(0o711)
    (group / "private").chmod(0o600)
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/"}
    for words in ([group, "a"], [group / "a"], [group, "v"]):
        result = mq_cat("-e", *words, **nobody)
        assert (result.returncode, result.stdout, result.stderr) == (0, b"one\n", b""), words
    for name in ("private", "none", "ctl", ".stats", "../entered/a"):
        result = mq_cat("-e", group, name, **nobody)
        assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (1, b"", 1)


# ---------------------------------------------------------------- ways to end


def test_the_pipeline_ends_while_it_waits(server: Server) -> None:
    group = server.group("pipe", "replay all", streams=["a"])
    say(group / "a", "1\n")
    command = f"mq-cat '{group}' | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, env=environment(), timeout=HANG_S, check=True)
    assert (result.stdout, result.stderr) == (b"1\n141\n", b"")


@pytest.mark.parametrize("order", [[], ["--order"]])
def test_a_reader_that_goes_away_ends_it(server: Server, order: list[str]) -> None:
    group = server.group("gone" + "".join(order), streams=["a"])
    with running("mq-cat", *order, group) as process:
        wait_until_waiting(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(HANG_S) == -signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize("order", [[], ["--order"]])
def test_interrupted_is_130(server: Server, order: list[str]) -> None:
    group = server.group("ctrl-c" + "".join(order), streams=["a"])
    with running("mq-cat", *order, group) as process:
        wait_until_waiting(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize("order", [[], ["--order"]])
def test_a_group_that_is_removed_ends_it(server: Server, order: list[str]) -> None:
    group = server.group("removed" + "".join(order), streams=["a"])
    with running("mq-cat", *order, group) as process:
        wait_until_waiting(process)
        subprocess.run(["rm", "-r", str(group)], check=True)
        assert process.wait(HANG_S) == 1
        assert process.stderr is not None
        assert process.stderr.read().decode() == f"mq-cat: {group}: the group was removed\n"


@pytest.mark.parametrize("order", [[], ["--order"]])
def test_streams_that_are_all_removed_end_it(server: Server, order: list[str]) -> None:
    group = server.group("streams" + "".join(order), streams=["a", "b", "c"])
    with running("mq-cat", *order, group, "a", "b") as process:
        wait_until_waiting(process)
        (group / "a").unlink()
        (group / "b").rename(group / "renamed")
        if not order:
            still_runs(process, 2.5)
            say(group / "renamed", "still b\n")
            assert lines(process.stdout, 1) == [b"still b\n"]
        (group / "renamed").unlink()
        assert process.wait(HANG_S) == 1
        assert process.stderr is not None
        assert process.stderr.read().decode() == f"mq-cat: {group}: the streams were removed\n"


def test_a_reader_that_is_overtaken_says_so_and_goes_on(server: Server) -> None:
    group = server.group("behind", "replay all", "depth 10", "sync off", streams=["a"])
    with running("mq-cat", "-n", 11, group) as process:
        wait_until_waiting(process)
        say(group / "a", "first\n")
        assert lines(process.stdout, 1) == [b"first\n"]
        wait_until_waiting(process)
        process.send_signal(signal.SIGSTOP)
        numbered(group, ["a"], 100, random.Random(1))
        process.send_signal(signal.SIGCONT)
        assert lines(process.stdout, 10) == [b"%d\n" % n for n in range(90, 100)]
        assert process.wait(HANG_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b"mq-cat: reader fell behind\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_ends_it(tmp_path: Path, number: int) -> None:
    with tools_server(tmp_path) as server:
        group = server.group("a", streams=["s"])
        with running("mq-cat", group) as process:
            wait_until_waiting(process)
            server.stop(number)
            assert process.wait(HANG_S) == 1
            assert process.stderr is not None
            said = process.stderr.read().decode()
            assert said.startswith("mq-cat: ")
            assert said.count("\n") == 1


# ---------------------------------------------------------------- what is refused


def refused(code: int, *arguments: object, **more: object) -> str:
    """The one line on standard error, without the program's name."""
    result = mq_cat(*arguments, **more)
    text = result.stderr.decode()
    assert (result.returncode, result.stdout) == (code, b""), text
    assert text.startswith("mq-cat: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return str(text[8:-1])


def test_what_is_not_there(server: Server) -> None:
    group = server.group("there", streams=["a", "b"])
    assert refused(1, group / "not") == f"{group / 'not'}: no such group"
    assert "a file (expected GROUP" in refused(1, group / "a", "b")
    assert refused(1, group / "x") == f"{group / 'x'}: no such group"
    assert "pattern 'a.*': not with 'order'" in refused(1, "--order", group, "a.*")
    assert refused(1, group, "a", "x") == f"{group}: no stream 'x' (expected one of: a, b)"
    assert refused(1, server.group("empty"), "x").endswith("no stream 'x' (expected one of: none)")
    assert "no file 'order' in it" in refused(1, "/")
    assert "seek" in refused(1, "--from", "9" * 40, group)


def test_what_makes_no_sense(server: Server) -> None:
    group = server.group("sense", streams=["a"])
    assert "GROUP" in refused(2)
    assert "-n" in refused(2, "-n", "x", group)
    assert "-n" in refused(2, "-n", "-1", group)
    assert "bad duration" in refused(2, "--idle", "soon", group)
    assert "bad start" in refused(2, "--from", "yesterday", group)
    assert "bad time" in refused(2, "--from", "@yesterday", group)
    assert "not with" in refused(2, "-t", "--json", group)
    assert "--nope" in refused(2, "--nope", group)
    assert mq_cat("--help").returncode == 0


def test_what_may_not_be_read(server: Server) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: cannot become another user")
    group = server.group("secret", "replay all", streams=["a", "open"])
    say(group / "a", "secret\n")
    say(group / "open", "open\n")
    (group / "a").chmod(0o600)
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/"}
    assert refused(1, group, "a", **nobody).startswith(f"{group}: cannot read 'a': mode 600 of uid")
    assert refused(1, "--order", group, "a", **nobody) == f"{group / 'a'}: permission denied"
    assert mq_cat("-e", group, **nobody).stdout == b"open\n"
    result = mq_cat("-e", "--order", group, **nobody)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"open\n", b"mq-cat: a: permission denied\n")


# ---------------------------------------------------------------- order and the streams alone


def test_in_order_without_a_cursor(server: Server) -> None:
    group = server.group("plain", "replay all", "sync off", streams=["a", "b", "c d"])
    written = numbered(group, ["a", "b", "c d"], size(5000), random.Random(seed()))
    result = mq_cat("-e", "--order", group)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"".join(written)
    assert mq_cat("-n", 3, "--order", group).stdout == b"".join(written[:3])
    assert mq_cat("--idle", "0.2", "--order", group).returncode == 124


class Hammer:
    """Writes numbered lines to streams at random for as long as it runs."""

    def __init__(self, group: Path, streams: list[str], seed: int) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(group, streams, random.Random(seed)))
        self.written: list[tuple[str, int]] = []

    def _run(self, group: Path, streams: list[str], random_: random.Random) -> None:
        fds = {name: os.open(group / name, os.O_WRONLY) for name in streams}
        number, began = 0, time.monotonic()
        while not self._stop.is_set():
            name = random_.choice(streams)
            os.write(fds[name], b"%s %d\n" % (name.encode(), number))
            self.written.append((name, number))
            number += 1
            if not random_.randrange(8):  # bursts, at a rate that a reader can follow, on a busy machine too
                self._stop.wait(random_.random() / 50 + 3 * (time.monotonic() - began))
                began = time.monotonic()
        for fd in fds.values():
            os.close(fd)

    def is_warm(self) -> bool:
        return len(self.written) > 100

    def __enter__(self) -> Hammer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("replay", ["off", "last", "all"])
def test_never_slips_while_it_is_opened_under_load(server: Server, replay: str) -> None:
    streams = [f"s{number}" for number in range(200)]  # opening this many takes a while
    for trial in range(size(40)):
        group = server.group(f"slip {replay} {trial}", f"replay {replay}", "sync off", streams=streams)
        with Hammer(group, streams, seed() + trial) as hammer:
            eventually(hammer.is_warm)
            result = mq_cat("-n", 300, "--order", group)
        assert result.returncode == 0, result.stderr
        rows = [row.split() for row in result.stdout.decode().splitlines()]
        assert len(rows) == 300
        check_no_slip([(name, int(number)) for name, number in rows], hammer.written)


def check_no_slip(seen: list[tuple[str, int]], written: list[tuple[str, int]]) -> None:
    """In order; and from its first message on, each stream is complete up to the last message seen."""
    numbers = [number for _, number in seen]
    assert numbers == sorted(set(numbers))
    firsts: dict[str, int] = {}
    for name, number in seen:
        firsts.setdefault(name, number)
    expected = [
        (name, number) for name, number in written[: numbers[-1] + 1] if name in firsts and number >= firsts[name]
    ]
    assert seen == expected


def test_streams_that_come_and_go_without_a_cursor(server: Server) -> None:
    group = server.group("come", "replay all", streams=["a"])
    with running("mq-cat", "--order", group) as process:
        wait_until_waiting(process)
        say(group / "a", "1\n")
        assert lines(process.stdout, 1) == [b"1\n"]
        (group / "b").touch()
        say(group / "b", "2\n", "3\n")
        assert lines(process.stdout, 2) == [b"2\n", b"3\n"]
        (group / "a").unlink()
        (group / "a").touch()
        say(group / "a", "4\n")
        say(group / "b", "5\n")
        assert lines(process.stdout, 2) == [b"4\n", b"5\n"]


def test_aligned_again_after_messages_were_removed(server: Server) -> None:
    group = server.group("cleared", "replay all", streams=["a", "b"])
    with running("mq-cat", "--order", group) as process:
        wait_until_waiting(process)
        say(group / "a", "1\n")
        assert lines(process.stdout, 1) == [b"1\n"]
        wait_until_waiting(process)
        process.send_signal(signal.SIGSTOP)
        say(group / "a", "lost\n", "lost\n")
        say(group / "b", "2\n")
        (group / "ctl").write_text("clear a\n")
        say(group / "a", "3\n")
        process.send_signal(signal.SIGCONT)
        assert lines(process.stdout, 2) == [b"2\n", b"3\n"]
        say(group / "a", "4\n")
        say(group / "b", "5\n")
        assert lines(process.stdout, 2) == [b"4\n", b"5\n"]


def test_views(server: Server) -> None:
    group = server.group("views", "replay all", "bind 'both of' 's.*'", "bind x true()", streams=["s.a", "s.b"])
    for name, body in (("s.a", "1\n"), ("s.b", "2\n"), ("s.a", "3\n")):
        say(group / name, body)
    for words in ([], ["--order"]):
        result = mq_cat("-e", *words, group)
        assert (result.stdout, result.stderr) == (b"1\n2\n3\n", b"")
    assert mq_cat("-e", group, "both of").stdout == b"1\n2\n3\n"
    assert "view 'both of': not in 'order'" in refused(1, "-e", "--order", group, "both of")


def test_what_order_cannot_tell_is_refused(server: Server) -> None:
    group = server.group("cannot", "replay all", streams=["a"])
    for option in (["--from", "first"], ["--json"], ["-t"]):
        assert f"{option[0]}: not with 'order'" in refused(1, "--order", *option, group)
    (group / "ctl").write_text("data coalesce\n")
    say(group / "a", "1", "2")
    assert "data coalesce" in refused(1, "--order", group)


def test_patterns_of_other_words(server: Server) -> None:
    group = server.group("words", "replay all", "words . + >", streams=["log.a", "log.b", "log.*"])
    for name in ("log.a", "log.*", "log.b"):
        say(group / name, f"{name}\n")
    assert mq_cat("-e", group, "log.+").stdout == mq_cat("-e", f"{group}/log.>").stdout == b"log.a\nlog.*\nlog.b\n"
    assert mq_cat("-e", group, "log.*").stdout == b"log.*\n"
    assert refused(1, group, "#").startswith(f"{group}: no stream '#'")
