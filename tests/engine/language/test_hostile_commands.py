"""Numbers and texts in commands that are longer than anything sensible: refused at once, with a condition of ours."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import pytest

from mqfs.engine.language.programs import binding
from mqfs.errors import MqfsError
from tests.support.hand import ROOT, Hand

LONG = "1" * 5_000
NUMBERS = [LONG, "-" + LONG, "\u00b2", "\u0661", "1e400", "inf", "nan", "0x10", "1_0", "+1", "", "9" * 19, "9" * 20]
COMMANDS = {
    "ctl": [
        "depth {}", "depth {}K", "ttl {}s", "idle {}d", "lease {}", "retries {}", "backoff {}s {}s", "sync {}ms",
        "dedup {}h", "drop s {}", "redrive s {}", "consumer c s backlog {}",
    ],
    ".cursor": [
        "seek {}", "seek -{}", "seek @{}", "seek @{}.{}", "seek -{}s", "until {}", "measure {}",
        "measure 1 {} 3",
    ],
    ".consumers/work": [
        "seek {}", "seek @{}", "ack {}", "nack {}", "nack {} {}s", "release {}", "touch {}", "until {}",
    ],
    ".txn/ctl": ["commit app.{}", "commit {}.1 p", "abort {}", "forget {}"],
}  # fmt: skip


@pytest.mark.parametrize("file", COMMANDS)
@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
def test_numbers_of_any_kind(file: str, number: str) -> None:
    """Taken or refused: never an error of Python's."""
    tree = Hand("replay all", "consumer work s")
    tree.stream()
    tree.write("s", b"one", b"two")
    for command in COMMANDS[file]:
        handle = open_path(tree, file)
        with contextlib.suppress(MqfsError):
            handle.write(command.replace("{}", number).encode() + b"\n")
        handle.close()
    assert tree.cursor("seek first", "until end").read(100) == b"one"


def open_path(tree: Hand, path: str) -> Any:
    node = tree.group
    for name in path.split("/"):
        node = tree.tree.walk(ROOT, node, name)
    return tree.tree.open(ROOT, node, os.O_WRONLY if path in ("ctl", ".txn/ctl") else os.O_RDWR)


@pytest.mark.parametrize("key", ["delay", "at", "ttl", "priority", "single", "id", "stream", "headers"])
@pytest.mark.parametrize(
    "value",
    [LONG, "1e400", "-1e400", "NaN", "Infinity", '"' + LONG + 's"', "[" * 4_000, "{}", '{"a": 1}'],
    ids=range(9),
)
def test_values_of_any_kind(key: str, value: str) -> None:
    tree = Hand()
    tree.stream()
    keys = "" if key == "stream" else '"stream":"s",'
    handle = tree.open(".put", os.O_WRONLY)
    if value == "{}" and key == "headers":
        handle.write(f'{{{keys}"{key}":{value}}} x'.encode())
        return
    with pytest.raises(MqfsError):
        handle.write(f'{{{keys}"{key}":{value}}} x'.encode())


@pytest.mark.parametrize("text", ['"' * 60_001, '"' + '\\"' * 30_000, "(" * 60_000, '"\\' * 30_001, "#" * 60_000])
@pytest.mark.parametrize("verb", ["bind v prefix:", "bind v ", "unbind v exact:", "bind ", ""])
def test_a_line_costs_what_it_is_long(verb: str, text: str) -> None:
    """Twice as long, about twice the time: a regex that begins again at each quote took 42 s for one write."""
    tree = Hand()

    def seconds(line: str) -> float:
        handle = tree.open("ctl", os.O_WRONLY)
        begun = time.process_time()
        with contextlib.suppress(MqfsError):
            handle.write(line.encode() + b"\n")
        taken = time.process_time() - begun
        handle.close()
        return taken

    assert seconds(verb + text) < 0.5


def test_comments_behind_programs_and_unclosed_strings() -> None:
    for line, program in (
        ('bind v prefix:"a#b" # note', 'prefix:"a#b"'),
        ("bind v prefix:a#b", "prefix:a#b"),
        ('bind v prefix:"a b # c', 'prefix:"a b'),
        ('bind v prefix:"a\\" # c', 'prefix:"a\\"'),
        ('bind v prefix:a f("x") "y # z', 'prefix:a f("x") "y'),
    ):
        assert binding(line) == ("v", program), line


def test_headers_of_any_depth() -> None:
    tree = Hand()
    tree.stream()
    handle = tree.open(".put", os.O_WRONLY)
    with pytest.raises(MqfsError):
        handle.write(json.dumps({"stream": "s", "headers": {"a": ["b"]}}).encode() + b" x")
