"""The tools' manuals name every option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import mqfs
from tests.support import ROOT
from tests.support.tools import mq, mq_cat, mq_work, pin

COMMANDS = ("put", "request", "peek", "ls", "stat", "purge", "redrive", "ctl", "top", "schedule", "completion")


def options(help: bytes) -> set[str]:
    """All options of a help text, short and long."""
    found = re.findall(r"^  (-\S+?)(?:, (--\S+))?(?=\s|$)", help.decode(), re.MULTILINE)
    return {option for both in found for option in both if option} - {"-h", "--help", "--version"}


@pytest.mark.parametrize("tool", [mq, mq_cat, mq_work, pin], ids=["mq", "mq-cat", "mq-work", "pin"])
def test_each_tool_has_help_and_a_version(tool: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    assert tool("-h").stdout == tool("--help").stdout
    assert tool("--version").stdout == f"{name} {mqfs.__version__}\n".encode()


@pytest.mark.parametrize(("page", "tool"), [("mq-cat.1", mq_cat), ("mq-work.1", mq_work), ("pin.1", pin)])
def test_every_option_is_told(page: str, tool: object) -> None:
    text = (ROOT / "man" / page).read_text()
    found = options(tool("--help").stdout)  # type: ignore[operator]
    assert len(found) >= 4
    for option in found:
        assert f".It Fl {option[1:]}" in text, option


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_mq_is_told(command: str) -> None:
    text = (ROOT / "man" / "mq.1").read_text()
    assert f".It Cm {command}\n" in text
    for option in options(mq(command, "--help").stdout):
        assert re.search(rf"(Fl|,) (Fl )?{option[1:]}\b", text), option


def test_every_command_of_mq_is_told() -> None:
    listed = mq("--help").stdout.decode().partition("Commands:\n")[2]
    assert tuple(row.split()[0] for row in listed.splitlines() if row[2] != " ") == COMMANDS
