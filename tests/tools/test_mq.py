"""mq against a real mount: each command, what it prints, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pexpect
import pytest

from mq_tools.errors import ToolError
from mq_tools.files import write
from mqfs import limits
from tests.support.eventually import HANG_S
from tests.support.server import Server
from tests.support.tools import environment, lines, mq, mq_cat, mq_work, running, say, tool


def said(*arguments: object, **more: Any) -> str:
    """The standard output of a command that succeeds in silence."""
    result = mq(*arguments, **more)
    assert (result.returncode, result.stderr) == (0, b""), result.stderr.decode()
    return str(result.stdout.decode())


def refused(code: int, *arguments: object, **more: Any) -> str:
    """The one line of a command that fails, without `mq: ` in front."""
    result = mq(*arguments, **more)
    assert (result.returncode, result.stdout) == (code, b"")
    line = str(result.stderr.decode())
    assert line.count("\n") == 1, line
    assert line.startswith("mq: ")
    return line[4:-1]


def kept(group: Path, *streams: str) -> list[dict[str, Any]]:
    rows = mq_cat("-e", "--json", "--from", "first", group, *streams).stdout.splitlines()
    return [json.loads(row) for row in rows]


BIDI = "\u202eb"


@pytest.mark.parametrize("table", ["ls", "stat", "top"])
def test_names_in_tables_are_escaped_and_in_json_as_they_are(server: Server, table: str) -> None:
    group = server.group(f"bidi {table}", "replay all", "consumer c", streams=[BIDI])
    say(group / BIDI, "x\n")
    text = said(table, group)
    assert BIDI not in text
    assert r"\u202eb" in text
    assert BIDI in said(table, "--json", group)


def test_names_in_messages_are_escaped(server: Server) -> None:
    group = server.group("bidi messages", "replay all", "consumer c", streams=[BIDI])
    say(group / BIDI, "x\n")
    assert refused(1, "peek", group / f"no{BIDI}").isprintable()
    shown = mq_cat("-e", "-t", "--from", "first", group).stdout.decode()
    assert BIDI not in shown
    assert r" '\u202eb' x" in shown
    assert json.loads(mq_cat("-e", "--json", "--from", "first", group).stdout)["stream"] == BIDI
    result = mq_work("-e", group / ".consumers/c", "false")
    assert BIDI not in result.stderr.decode()
    assert r"\u202eb" in result.stderr.decode()


# ---------------------------------------------------------------- put


@pytest.mark.parametrize(
    "options", [["-H", f"x={'y' * 5000}"], ["--ttl", "1h"], ["--key", "k"]], ids=lambda words: words[0]
)
def test_a_message_that_does_not_fit_with_its_metadata_is_refused(server: Server, options: list[str]) -> None:
    group = server.group(f"long{options[0]}", "replay all", streams=["s"])
    text = refused(1, "put", *options, group / "s", input=bytes(limits.MESSAGE_BYTES))
    assert text.endswith(f"bytes or more (expected at most {limits.MESSAGE_BYTES} with a mount)")
    assert kept(group) == []


def test_a_write_that_is_cut_short_is_an_error() -> None:
    end, fd = os.pipe()
    try:
        os.set_blocking(fd, False)  # so that it takes as much as fits
        with pytest.raises(ToolError, match=r"^pipe: cut short: [0-9]+ of 16777216 bytes written$"):
            write(fd, bytes(16 << 20), "pipe")
    finally:
        os.close(end)
        os.close(fd)


def test_put_words_and_standard_input(server: Server) -> None:
    group = server.group("put", "replay all", streams=["s"])
    assert said("put", group / "s", "hello", "world") == ""
    assert said("put", group / "s", "-N", "bare") == ""
    assert said("put", group / "s", input=b"a\nb") == ""
    assert said("put", group / "s", "-l", input=b"1\n2\n3") == ""
    assert said("put", group / "s", "--", "-l") == ""
    assert [row["body"] for row in kept(group)] == ["hello world\n", "bare", "a\nb", "1\n", "2\n", "3", "-l\n"]


def test_put_binary_and_large(server: Server) -> None:
    group = server.group("put large", "replay all", streams=["s"])
    body = b"\xff" + os.urandom(1_044_479)
    said("put", group / "s", input=body)
    assert mq_cat("-e", group).stdout == body
    assert "(expected at most 1044480" in refused(1, "put", group / "s", input=body + b"x")
    assert len(kept(group)) == 1


def test_put_makes_a_stream_only_where_it_is_to(server: Server) -> None:
    group = server.group("put make", "replay all")
    assert refused(1, "put", group / "s", "x") == f"{group}/s: no such stream (create it: --make)"
    said("put", "--make", group / "s", "x")
    said("put", "--make", "--priority", 7, group / "t", "y")
    assert [row["body"] for row in kept(group)] == ["x\n", "y\n"]


def test_put_makes_the_groups_above_too(server: Server, tmp_path: Path) -> None:
    said("put", "--make", server.path / "new" / "er" / "s", "x")
    said("put", "--make", "put below/s", "y", env={"MQFS": str(server.path)})
    assert [row["body"] for row in kept(server.path / "new" / "er")] == []
    assert (server.path / "put below" / "s").exists()
    assert "is the tree mounted?" in refused(1, "put", "--make", tmp_path / "no" / "s", "x")
    assert list(tmp_path.iterdir()) == []
    assert "no such group" in refused(1, "put", server.path / "none" / "s", "x")


def test_put_metadata(server: Server) -> None:
    group = server.group("put more", "replay all", streams=["e s"])
    words = ["--ttl", "1h", "--priority", 9, "--id", "a1", "--key", "k 1", "-H", "lang=de", "--header", "a=b=c"]
    assert said("put", "-v", *words, group / "e s", "x") == "1\n"
    assert said("put", "--json", *words, group / "e s", "x") == '{"sequence": 1}\n'  # the same id
    assert said("put", "-v", group / "e s", "plain") == "2\n"
    first, second = kept(group)
    expected = {"priority": "9", "ttl": "1h", "id": "a1", "key": "k 1", "lang": "de", "a": "b=c"}
    assert expected.items() <= first["headers"].items()
    assert set(second["headers"]) == {"sender"}
    assert re.fullmatch(r"(\d+\n){3}", said("put", "-v", "-l", group / "e s", input=b"1\n2\n3\n"))
    assert said("put", "-v", "--single", group / "e s", "for one") == "6\n"
    assert "for one\n" not in [row["body"] for row in kept(group)], "no mere reader sees it"


@pytest.mark.parametrize("option", ["id", "expect"])
def test_put_lines_takes_no_option_of_one_message(server: Server, option: str) -> None:
    group = server.group(f"put lines {option}", "replay all", "dedup 1h", streams=["s"])
    text = refused(2, "put", "-l", f"--{option}", 0, group / "s", input=b"1\n2\n")
    assert text == f"-l and --{option}: both given (expected one)"
    assert kept(group) == []


def test_put_without_a_body_removes_a_key(server: Server) -> None:
    group = server.group("put keys", "replay key", streams=["s"])
    for key, body in (("a", b"1"), ("b", b"2"), ("a", b"")):
        said("put", "--key", key, group / "s", input=body)
    assert (group / ".kept" / "s").read_bytes() == b"2"
    assert "empty message" in refused(1, "put", "--id", "a", group / "s")


def test_put_for_later(server: Server) -> None:
    group = server.group("put later", "replay all", streams=["s"])
    said("put", "--delay", "1h", group / "s", "much later")
    said("put", "--at", "2037-01-01", group / "s", "too")
    said("put", "--at", f"@{time.time() - 5}", group / "s", "now")
    said("put", "--delay", "200ms", group / "s", "soon")
    assert mq_cat("-n", 2, "--from", "first", group).stdout == b"now\nsoon\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--delay", "soon"], "bad duration 'soon' (expected 500ms"),
        (["--at", "tomorrow"], "bad time 'tomorrow' (expected 2030"),
        (["--priority", "10"], "--priority 10: out of range (expected 0 to 9)"),
        (["-H", "novalue"], "KEY=VALUE"),
        (["-l", "word"], "-l and BODY: both given"),
        (["--delay", "1s", "--at", "@1"], "both given (expected one)"),
    ],
)
def test_put_that_makes_no_sense(server: Server, words: list[str], text: str) -> None:
    group = server.path / "nonsense"
    if not group.exists():
        server.group("nonsense", streams=["s"])
    assert text in refused(2, "put", group / "s", *words)


def test_put_that_is_refused(server: Server) -> None:
    group = server.group("put refused", "depth 1", "full reject", streams=["s"])
    assert "at least one byte" in refused(1, "put", group / "s", input=b"")
    assert "set by the server" in refused(1, "put", "-H", "sender=me", group / "s", "x")
    assert "a group (expected a stream)" in refused(1, "put", group, "x")
    for name in ("ctl", "order", ".stats"):
        assert "a file of the group (expected a stream)" in refused(1, "put", "--make", group / name, "x")
    absent = server.path / "nothing"
    assert refused(1, "put", absent / "s", "x") == f"{absent / 's'}: no such group (create it: mkdir {absent})"
    assert f"no such group (create it: mkdir {absent})" in refused(1, "peek", absent / ".consumers" / "x")
    assert "not in a tree" in refused(1, "put", "/etc/passwd", "x")


# ---------------------------------------------------------------- peek


def test_peek_takes_nothing(server: Server) -> None:
    group = server.group("peek", "replay all", streams=["a", "b"])
    say(group / "a", "1\n", "2")
    say(group / "b", b"\xff")
    for _ in range(2):
        assert mq("peek", group).stdout == b"1\n2\n\xff\n"
    assert said("peek", "-n", 1, group) == "1\n"
    assert said("peek", group / "a") == "1\n2\n"
    rows = [json.loads(row) for row in said("peek", "--json", group / "b").splitlines()]
    assert [(row["sequence"], row["stream"], row["body_base64"]) for row in rows] == [(3, "b", "/w==")]


def test_peek_shows_ten_or_all(server: Server) -> None:
    group = server.group("peek all", "replay all", "sync off", streams=["s"])
    say(group / "s", *(f"{number}\n" for number in range(3000)))
    assert len(said("peek", group).splitlines()) == 10
    assert len(said("peek", "-n", 0, group).splitlines()) == 3000


def test_peek_a_shared_stream_and_a_consumer(server: Server) -> None:
    group = server.group("peek work", "replay all", "deliver one", "consumer w s", streams=["s"])
    say(group / "s", "1\n", "2\n")
    with (group / "s").open("r+b", buffering=0) as taker:
        assert taker.read(100) == b"1\n"
    assert said("peek", group / "s") == "2\n"
    assert said("peek", "--json", group / "s") == '{"body": "2\\n"}\n'
    assert said("peek", group / ".consumers" / "w") == "1\n2\n"
    assert mq_work("-n", 1, group / ".consumers" / "w", "true").returncode == 0
    assert said("peek", group / ".consumers" / "w") == "2\n"
    assert "no such consumer" in refused(1, "peek", group / ".consumers" / "x")


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_peek_sees_past_empty_messages(server: Server, deliver: str) -> None:
    group = server.group(f"peek empty {deliver}", "replay all", f"deliver {deliver}", "consumer w s", streams=["s"])
    for key, body in (("a", b"1\n"), ("b", b""), ("c", b""), ("d", b"2\n"), ("e", b"")):
        said("put", "--key", key, group / "s", input=body)
    for path in (group / "s", group / ".consumers" / "w"):
        assert said("peek", path) == "1\n\n\n2\n\n"
        assert said("peek", "-n", 3, path) == "1\n\n\n"
        assert len(said("peek", "--json", path).splitlines()) == 5


def test_peek_shows_no_more_than_this_user_may_read(server: Server) -> None:
    group = server.group("peek private", "replay all", "consumer w", streams=["public", "private"])
    (group / "private").chmod(0o600)
    (group / ".consumers" / "w").chmod(0o666)
    for name, text in (("public", "1\n"), ("private", "2\n"), ("private", "3\n"), ("public", "4\n")):
        say(group / name, text)
    assert said("peek", group / ".consumers" / "w") == "1\n2\n3\n4\n"
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": (), "cwd": "/"}
    result = tool("mq", "peek", group / ".consumers" / "w", **nobody)
    assert (result.stdout, result.stderr) == (b"1\n4\n", b"")


def test_peek_of_what_is_evicted_meanwhile(server: Server) -> None:
    group = server.group("peek evicted", "replay all", "sync off", "depth 2000", streams=["s"])
    say(group / "s", *(f"{number:0999}\n" for number in range(2000)))
    with running("mq", "peek", "-n", 0, group / "s") as process:
        read = lines(process.stdout, 1)  # from now on its output is full
        say(group / "s", *(f"{number:0999}\n" for number in range(2000, 3200)))
        assert process.stdout is not None
        read += process.stdout.read().splitlines()
        assert (process.wait(HANG_S), process.stderr and process.stderr.read()) == (0, b"")
    assert len(read) < 2000
    assert int(read[-1]) == 1999


def test_peek_where_nothing_is(server: Server) -> None:
    group = server.group("peek nothing", streams=["s"])
    assert said("peek", group) == said("peek", group / "s") == ""
    assert "no such stream" in refused(1, "peek", group / "t")


# ---------------------------------------------------------------- ls and stat


def listed(*arguments: object, **more: Any) -> dict[str, dict[str, Any]]:
    rows = [json.loads(row) for row in said("ls", "--json", *arguments, **more).splitlines()]
    return {row["name"]: row for row in rows}


def test_ls(server: Server) -> None:
    group = server.group("ls", "replay all", "bind both s.#", "consumer w s.a", streams=["s.a", "s b"])
    (group / "inner").mkdir()
    (group / "inner" / "deep").touch()
    say(group / "s.a", "1", "2")
    rows = listed(group)
    assert {name: row["kind"] for name, row in rows.items()} == {
        "inner/": "group", "s.a": "stream", "s b": "stream", "both": "view", ".consumers/w": "consumer",
    }  # fmt: skip
    assert (rows["s.a"]["waiting"], rows[".consumers/w"]["waiting"]) == (2, 2)
    assert (rows["both"]["over"], rows[".consumers/w"]["over"]) == ("s.#", "s.a")
    assert "inner/deep" in listed("-r", group)
    lines = said("ls", group).splitlines()
    assert lines[0].split() == ["NAME", "KIND", "WAITING", "CLAIMED", "DELAYED", "OPEN", "HELD-BACK", "OVER"]
    assert len(lines) == 6


def test_ls_and_top_show_what_is_held_back(server: Server) -> None:
    group = server.group("held", "consumer w s", "pause w", "consumer free s", streams=["s"])
    rows = listed(group)
    assert rows[".consumers/w"]["held_back"] == "paused"
    assert "held_back" not in rows[".consumers/free"]
    line = next(line for line in said("ls", group).splitlines() if line.startswith(".consumers/w "))
    assert line.split()[-2:] == ["paused", "s"]
    frame = json.loads(said("top", "--json", "--interval", "0.1", group))
    found = {row["name"].rpartition("/")[2]: row["held_back"] for row in frame if row["kind"] == "consumer"}
    assert found == {"w": "paused", "free": None}


def test_ls_finds_the_tree(server: Server) -> None:
    group = server.group("find", streams=["s"])
    assert "find/" in listed(server.path)
    assert "find/" in listed(f"{server.path}/")
    assert "find/" in listed(env={"MQFS": str(server.path)})
    assert "find/" in listed(cwd=group, env=environment(PYTHONSAFEPATH="1"))
    assert "find/" in listed(cwd=server.path.parent)
    assert "s" in listed("find", env={"MQFS": str(server.path)})
    assert "missing argument GROUP" in refused(1, "ls", cwd="/")
    assert "no tree mounted there" in refused(1, "ls", env={"MQFS": "/etc"})
    assert "a stream (expected a group)" in refused(1, "ls", group / "s")
    assert "no such group" in refused(1, "ls", group / "nothing")


def test_stat(server: Server) -> None:
    group = server.group("stat", "replay all", "consumer w s", streams=["s", "a b"])
    say(group / "s", "1", "2")
    assert json.loads(said("stat", "--json", group))["streams"]["s"]["written"] == 2
    assert {"written 2", "streams s messages 2", "streams 'a b' messages 0"} <= set(said("stat", group).splitlines())
    assert "messages 2" in said("stat", group / "s").splitlines()
    (group / "ctl").write_text("bind v s\n")
    assert said("stat", group / "v").startswith("readers 0\n")
    assert "waiting 2" in said("stat", group / ".consumers" / "w").splitlines()
    assert "no such stream" in refused(1, "stat", group / "t")


# ---------------------------------------------------------------- purge, redrive, ctl


def test_purge(server: Server) -> None:
    group = server.group("purge", "replay all", "consumer w a", streams=["a", "b c"])
    for name in ("a", "b c"):
        say(group / name, "x")
    assert "pass -y" in refused(2, "purge", group / "a", stdin=subprocess.DEVNULL)
    said("purge", "-y", group / "b c")
    assert [row["stream"] for row in kept(group)] == ["a"]
    said("purge", "-y", group / ".consumers" / "w")
    assert said("peek", group / ".consumers" / "w") == ""
    assert len(kept(group)) == 1
    said("purge", "-y", group)
    assert kept(group) == []
    (group / "ctl").write_text("protect on\n")
    assert "protected" in refused(1, "purge", "-y", group / "a")
    assert "no such stream" in refused(1, "purge", "-y", group / "nothing")


def terminal(*words: object) -> pexpect.spawn:
    settings = {"env": environment(TERM="xterm"), "timeout": HANG_S, "encoding": "utf-8", "use_poll": True}
    spawned = pexpect.spawn("mq", [*map(str, words)], dimensions=(24, 120), **settings)
    spawned.delaybeforesend = None
    return spawned


@pytest.mark.parametrize("words", [(), ("-l",)])
def test_put_at_a_terminal_says_what_it_waits_for(server: Server, words: tuple[str, ...]) -> None:
    group = server.group(f"typed {len(words)}", "replay all", streams=["s"])
    typing = terminal("put", *words, group / "s")
    typing.expect(r"mq: reading standard input \(Ctrl-D ends it\)")
    typing.sendline("hello")
    typing.sendeof()
    typing.expect(pexpect.EOF)
    assert [row["body"] for row in kept(group, "s")] == ["hello\n"]


@pytest.mark.parametrize(("answer", "left", "code"), [("y", 0, 0), ("n", 1, 1), ("", 1, 1)])
def test_purge_asks(server: Server, answer: str, left: int, code: int) -> None:
    group = server.group(f"ask {answer}", "replay all", streams=["s"])
    say(group / "s", "x")
    asked = terminal("purge", group / "s")
    asked.expect(r"Drop .*/s\? \[y/N\]")
    asked.sendline(answer)
    asked.expect(pexpect.EOF)
    asked.close()
    assert (asked.exitstatus, len(kept(group))) == (code, left)


def test_a_dead_letter_is_edited_and_sent(server: Server, tmp_path: Path) -> None:
    group = server.group("edit", "replay all", "retries 1", "consumer w s", streams=["s"])
    for body in ("one", "two"):
        said("put", "-N", "-H", "k=v", "--priority", 7, group / "s", body)
    mq_work("-n", 2, group / ".consumers" / "w", "false")
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/one/ONE/; \\$a\\\\" "$1"\n')
    editor.chmod(0o755)
    done = said("redrive", "--edit", "-n", 2, group, "s", env=environment(EDITOR=str(editor)))
    assert done == "3: sent to s\n4: unchanged, left\n"
    (row,) = [row for row in kept(group, "s") if row["body"] == "ONE"]
    assert row["headers"] == {"k": "v", "priority": "7", "sender": str(os.getuid()), "id": "edit of dead 3"}
    assert [row["body"] for row in kept(group, "dead")] == ["two"]
    editor.write_text('#!/bin/sh\n: >"$1"\n')
    for command, text in (
        ("false", "exit status 1, nothing sent"),
        ("/no/editor", "no such file"),
        ("rm", "rm: edited file: no such file or directory, nothing sent"),
        ("'", 'bad editor "\'": no closing quotation (expected a command in EDITOR)'),
        (str(editor), "dead letter 4: emptied, nothing sent (the dead letter stays)"),
    ):
        assert text in refused(1, "redrive", "--edit", group, env=environment(EDITOR=command))
    assert [row["body"] for row in kept(group, "dead")] == ["two"]


def test_letters_of_what_is_no_group_are_not_edited(tmp_path: Path) -> None:
    """A folder with files of these names, and nothing in them."""
    for name in ("ctl", "order", ".stats"):
        (tmp_path / name).touch()
    assert refused(1, "redrive", "--edit", tmp_path) == f"{tmp_path}: no line dead in ctl (expected a group of mqfs)"


@pytest.mark.parametrize(
    ("more", "change", "text"),
    [
        (["replay all", "depth 1", "full drop-new"], "depth 1", ": discarded: stream 's' is full"),
        (["replay off"], "remove w", ": no receiver of 's' (expected a consumer or a reader"),
    ],
    ids=["discarded", "not-retained"],
)
def test_a_dead_letter_stays_where_the_edited_message_has_no_receiver(
    server: Server, tmp_path: Path, more: list[str], change: str, text: str
) -> None:
    group = server.group(
        f"edit {more[0]}", *more, "retries 1", "consumer w s", "consumer d dead", streams=["s", "dead"]
    )
    said("put", "-N", group / "s", "one")
    mq_work("-n", 1, group / ".consumers" / "w", "false")
    if change.startswith("remove"):
        said("ctl", group, "remove d")
    said("ctl", group, change)
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho two > "$1"\n')
    editor.chmod(0o755)
    assert text in refused(1, "redrive", "--edit", group, env=environment(EDITOR=str(editor)))
    assert [row["body"] for row in kept(group, "dead")] == ["one"]


def test_a_refused_write_is_told_in_the_server_s_words(server: Server) -> None:
    """Also of files that take no reader: the words are in .errors."""
    group = server.group("refused", "replay all", "depth 1", "full reject", "consumer w s", streams=["s"])
    said("put", group / "s", "x")
    words = [refused(1, "put", *more, group / "s", "y") for more in ([], ["-v"])]
    assert [text.partition("refused/")[2].partition(": ")[2] for text in words] == [
        json.loads(row)["text"] for row in (group / ".errors").read_text().splitlines()
    ]
    said("ctl", group, "clear")
    said("ctl", group, "deliver one")
    assert "default consumer" in refused(1, "purge", "-y", group / ".consumers" / ".s")


def test_put_on_a_condition(server: Server) -> None:
    group = server.group("expected", "replay all", streams=["s"])
    said("put", "--expect", 0, group / "s", "one")
    assert "newest message 1 of 's' (expected 0)" in refused(1, "put", "--expect", 0, group / "s", "two")
    said("put", "--expect", 1, group / "s", "two")
    assert len(kept(group, "s")) == 2


def test_schedules(server: Server) -> None:
    group = server.group("schedules", "replay all", streams=["s"])
    said("schedule", "add", "--every", "1h", "--at", "@4000000000", "-H", "k=v", group / "s", "a b", "tick")
    said("schedule", "add", "--cron", "0 5 * * 1-5 Europe/Berlin", group / "s", "c", input=b"report")
    first, second = map(json.loads, said("schedule", "ls", "--json", group).splitlines())
    assert (first["id"], first["cron"]) == ("c", "0 5 * * 1-5 Europe/Berlin")
    assert (second["id"], second["every"], round(second["next"])) == ("a b", "1h", 4_000_000_000)
    assert "every 1h" in said("schedule", "ls", group)
    assert "no schedule 'd'" in refused(1, "schedule", "rm", group, "c", "d")
    said("schedule", "rm", group, "c", "a b")
    assert said("schedule", "ls", "--json", group) == ""
    assert "expected one of them" in refused(2, "schedule", "add", group / "s", "x", "tick")
    assert "too short" in refused(1, "schedule", "add", "--every", "10ms", group / "s", "x", "tick")
    text = refused(1, "schedule", "add", "--every", "1h", group / "t u", "x", "tick")
    assert text == f"{group}/t u: no such stream (create it: touch '{group}/t u')"


REPLIER = """
import mqfs, sys
with mqfs.connect(sys.argv[1]) as client:
    group = client.group(sys.argv[2])
    with group.consume("w") as claims, claims.get(60) as claim:
        body = claim.body[::-1]
        group.reply(claim.message, body * (int(sys.argv[3]) // len(body)) if sys.argv[3:] else body)
"""


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_request(server: Server, deliver: str) -> None:
    group = server.group(f"asked-{deliver}", f"deliver {deliver}", "consumer w s", streams=["s"])
    replier = subprocess.Popen([sys.executable, "-c", REPLIER, server.address, group.name])
    try:
        assert said("request", "-N", "--timeout", f"{HANG_S:.0f}s", group / "s", "abc") == "cba"
        replier.wait(HANG_S)
        assert "no reply from 's' in 0.2 s" in refused(124, "request", "--timeout", "200ms", group / "s", "abc")
    finally:
        replier.kill()
        replier.wait()
    assert [name for name in os.listdir(group) if name.startswith("reply")] == []


@pytest.mark.parametrize("replay", ["off", "all", "last"])
@pytest.mark.parametrize("deliver", ["all", "one"])
def test_a_reply_in_parts_is_printed_whole(server: Server, deliver: str, replay: str) -> None:
    group = server.group(
        f"long-{deliver}-{replay}", f"replay {replay}", f"deliver {deliver}", "consumer w s", streams=["s"]
    )
    replier = subprocess.Popen([sys.executable, "-c", REPLIER, server.address, group.name, "2000004"])
    try:
        result = mq("request", "--timeout", f"{HANG_S:.0f}s", group / "s", "abc")
        assert (result.returncode, result.stderr) == (0, b"")
        assert result.stdout.rstrip(b"\n") == b"\ncba" * 500_001
        replier.wait(HANG_S)
    finally:
        replier.kill()
        replier.wait()


numbers = count()
TRACED = {"traceparent": f"00-{'4b' * 16}-{'00f0' * 4}-01", "tracestate": "vendor=1"}


@pytest.mark.parametrize(
    ("environ", "words", "expected"),
    [
        ({}, [], {}),
        ({"TRACEPARENT": TRACED["traceparent"]}, [], {"traceparent": TRACED["traceparent"]}),
        ({name.upper(): text for name, text in TRACED.items()}, [], TRACED),
        ({name.upper(): text for name, text in TRACED.items()}, ["-H", "tracestate=x"], {**TRACED, "tracestate": "x"}),
        ({"TRACEPARENT": "nonsense", "TRACESTATE": "vendor=1"}, [], {}),
    ],
)
@pytest.mark.parametrize("command", ["put", "request"])
def test_a_message_belongs_to_the_trace_of_the_environment(
    server: Server, command: str, environ: dict[str, str], words: list[str], expected: dict[str, str]
) -> None:
    group = server.group(f"traced{next(numbers)}", "replay all", streams=["s"])
    with server.connect() as client, client.group(group.name).subscribe("s") as messages:
        timeout = ["--timeout", f"{HANG_S:.0f}s"] if command == "request" else []
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(said, command, *timeout, *words, group / "s", "x", env=environ)
            message = messages.get(HANG_S)
            if command == "request":
                client.group(group.name).reply(message, "y")
            assert answer.result() == ("y" if command == "request" else "")
    assert {name: text for name, text in message.headers.items() if name in TRACED} == expected


def test_a_request_that_is_discarded_does_not_wait(server: Server) -> None:
    group = server.group("asked full", "replay all", "depth 1", "full drop-new", streams=["s"])
    said("put", group / "s", "x")
    text = refused(1, "request", "--timeout", f"{HANG_S:.0f}s", group / "s", "abc")
    assert text == f"{group}/s: discarded: stream is full"


def test_redrive(server: Server) -> None:
    group = server.group("redrive", "replay all", "retries 1", "consumer w s", streams=["s"])
    say(group / "s", "1", "2", "3")
    consumer = group / ".consumers" / "w"
    mq_work("-n", 3, consumer, "false")
    assert len(kept(group, "dead")) == 3
    said("redrive", group, "s", "-n", 1)
    assert [row["body"] for row in kept(group, "dead")] == ["2", "3"]
    said("redrive", group)
    assert kept(group, "dead") == []
    assert sorted(mq_work("-n", 3, consumer, "cat").stdout) == sorted(b"123")
    assert "-n: missing argument STREAM" in refused(2, "redrive", "-n", 1, group)


def test_ctl(server: Server) -> None:
    group = server.group("control")
    said("ctl", group, "replay all", "depth 7")
    said("ctl", group, "-", input=b"ttl 1h\nsync off\n")
    assert said("ctl", group) == (group / "ctl").read_text()
    settings = json.loads(said("ctl", "--json", group))
    assert (settings["replay"], settings["depth"], settings["ttl"], settings["sync"]) == ("all", "7", "1h", "off")
    text = refused(1, "ctl", group, "depth 8", "replay everything")
    assert "replay 'everything': unknown value (expected off, last, key or all)" in text
    assert "depth 7" in said("ctl", group).splitlines()


def test_ctl_as_json_has_every_line(server: Server) -> None:
    group = server.group("all of control", "replay all", "bind v a.b", "bind v #")
    for name in ("c", "d e"):
        lines = [
            "consumer {} s backlog 5",
            "limit {} 3 key",
            "limit {} 7",
            "rate {} 5/s",
            "breaker {} 9/1m",
            "pause {}",
        ]
        said("ctl", group, *(line.format(f"'{name}'") for line in lines))
    settings = json.loads(said("ctl", "--json", group))
    there = [
        f"{key} {one}" for key, value in settings.items() for one in ([value] if isinstance(value, str) else value)
    ]
    assert sorted(there) == sorted((group / "ctl").read_text().splitlines())
    assert all(len(settings[key]) >= 2 for key in ("bind", "consumer", "limit", "rate", "breaker", "pause"))


def test_what_the_user_may_not(server: Server) -> None:
    group = server.group("not mine", "replay all", streams=["s"])
    (group / "s").chmod(0o600)
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": (), "cwd": "/"}
    if os.geteuid():
        pytest.skip("only root can be another user")
    assert "expected the group's owner" in tool("mq", "ctl", group, "depth 1", **nobody).stderr.decode()
    assert "permission denied" in tool("mq", "put", group / "s", "x", **nobody).stderr.decode()


# ---------------------------------------------------------------- top and completion


def test_top_prints_one_frame(server: Server) -> None:
    group = server.group("top", "replay all", "consumer w s", streams=["s", "[t]"])
    say(group / "s", *("x" for _ in range(7)))
    head, *rows = said("top", "--interval", "0.1", group).splitlines()
    assert head.split()[:3] == ["NAME", "WAITING", "IN/s"]
    found = {row.split()[0].removeprefix(str(group)): row.split()[1:] for row in rows}
    assert set(found) == {"/", "/s", "/[t]", "/.consumers/w"}
    assert found["/.consumers/w"][0] == found["/s"][0] == "7"
    assert re.fullmatch(r"\d+\.\ds", found["/s"][4])
    assert rows[-1].split()[0].endswith("/[t]")  # the most first


def test_top_has_rates(server: Server) -> None:
    group = server.group("rates", "replay all", "sync off", streams=["s"])
    command = ["mq", "top", "--json", "-n", "3", "--interval", "1", str(group)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        say(group / "s", *("x" for _ in range(50)))
        frame = {row["name"]: row for row in json.loads(process.stdout.readline())}
        last = {row["name"]: row for row in json.loads(process.stdout.readline())}
    assert process.returncode == 0
    assert 10 <= frame[f"{group}/s"]["rate_in"] <= 60
    assert last[f"{group}/"]["rate_out"] == 0  # its own looks do not count


def test_top_on_a_terminal(server: Server) -> None:
    group = server.group("live", "replay all", streams=["some-stream"])
    for key in ("q", "\x03"):
        live = terminal("top", "--interval", "0.1", group)
        live.expect("some-stream +0 ")
        say(group / "some-stream", "x")
        live.expect("some-stream +1 ")
        live.send(key)
        live.expect(pexpect.EOF)
        live.close()
        assert live.exitstatus == (0 if key == "q" else 130)
        (group / "ctl").write_text("clear\n")
    counted = terminal("top", "--interval", "0.1", "-n", 2, group)
    counted.expect(pexpect.EOF)
    counted.close()
    assert counted.exitstatus == 0


def test_top_without_an_interval_ends_at_q(server: Server) -> None:
    live = terminal("top", "--interval", "0", server.group("at once", streams=["some-stream"]))
    live.expect("some-stream")
    live.send("q")
    live.expect(pexpect.EOF)
    live.close()
    assert live.exitstatus == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str) -> None:
    text = said("completion", shell)
    for name in ("mq", "mq-work", "mq-cat"):
        assert re.search(rf"(complete|compdef).*\b{name}\b", text), name
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text.encode(), check=True)


def test_completion_in_bash() -> None:
    script = 'eval "$(mq completion bash)"; COMP_WORDS=(mq pe) COMP_CWORD=1; _mq_completion mq; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, check=True)
    assert done.stdout.split() == [b"peek"]


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["putt"], "unknown command 'putt' (did you mean put?)"),
        (["put", "--idd", "x"], "unknown option '--idd' (did you mean --id?)"),
        (["bogus"], "unknown command 'bogus' (expected one of put, request"),
        (["peek", "-n", "x", "g"], "-n 'x': not a number (expected at least 0)"),
        (["put"], "missing argument GROUP/STREAM (see mq put --help)"),
        (["ls", "a", "b"], "unexpected argument 'b' (see mq ls --help)"),
        (["top", "--sort", "size"], "--sort 'size': unknown (expected one of waiting, in, out"),
    ],
)
def test_what_makes_no_sense(words: list[str], text: str) -> None:
    assert refused(2, *words).startswith(text)


def test_help() -> None:
    assert said("--help").startswith("Usage: mq ")
    for name in ("put", "top"):
        assert said(name, "-h").startswith(f"Usage: mq {name} ")


@pytest.mark.parametrize("words", [[], ["schedule"]])
def test_commands_that_have_commands(words: list[str]) -> None:
    """Without one of these their help is the error, as lines."""
    nothing = mq(*words)
    assert (nothing.returncode, nothing.stdout) == (2, b"")
    assert nothing.stderr.decode().strip() == said(*words, "--help").strip()


def test_a_reader_that_goes_away(server: Server) -> None:
    group = server.group("goes away", "replay all", "sync off", streams=["s"])
    say(group / "s", *("x" * 10000 for _ in range(100)))
    result = subprocess.run(
        ["sh", "-c", f"mq peek -n 0 '{group}' | head -c 1"], env=environment(), capture_output=True, check=True
    )
    assert (result.stdout, result.stderr) == (b"x", b"")
