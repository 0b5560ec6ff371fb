"""Lines of the tree's files: a newline ends one, and nothing else that Python's `splitlines` takes for an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.server import Server
from tests.support.tools import environment, mq, mq_cat, say

IN_PATTERNS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
IN_NAMES = IN_PATTERNS[-3:]


@pytest.mark.parametrize("end", IN_PATTERNS, ids=ascii)
def test_a_pattern_of_a_view_is_no_setting(server: Server, end: str) -> None:
    bound = f"'a{end}replay last{end}lease 1s{end}b'"
    group = server.group(f"pattern {ord(end)}", "replay all", "lease 30s", f"bind v {bound}", streams=["s"])
    say(group / "s", "1\n", "2\n")
    assert mq_cat("-e", group / "s").stdout == b"1\n2\n"
    assert mq("ctl", group).stdout == (group / "ctl").read_bytes()
    settings = json.loads(mq("ctl", "--json", group).stdout)
    assert (settings["bind"], settings["lease"], settings["replay"]) == ([f"v {bound}"], "30s", "all")


@pytest.mark.parametrize("end", IN_NAMES, ids=ascii)
def test_a_name_is_whole(server: Server, tmp_path: Path, end: str) -> None:
    dead, view = f"dead{end}replay last{end}x", f"view{end}x"
    settings = "replay all", "retries 1", f"dead '{dead}'", f"bind '{view}' s", "consumer w s"
    group = server.group(f"name {ord(end)}", *settings, streams=["s"])
    say(group / "s", "one\n", "two\n")
    assert mq_cat("-e", group / "s").stdout == mq_cat("-e", group / view).stdout == b"one\ntwo\n"
    with open(group / ".consumers/w", "r+b", buffering=0) as consumer:
        consumer.write(b"format json\n")
        consumer.write(b"nack %d\n" % json.loads(consumer.read(4_096))["sequence"])
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\n")
    editor.chmod(0o755)
    edited = mq("redrive", "--edit", group, env=environment(EDITOR=str(editor)))
    assert (edited.returncode, edited.stdout.partition(b":")[2]) == (0, b" unchanged, left\n"), edited
