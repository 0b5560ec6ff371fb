"""README.md: what its examples say, typed as it stands into a shell beside script/run, is what comes."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pexpect
import pytest

from tests.server.clone import clone, installed
from tests.server.process import ROOT, mounted, unmount, until

PROMPT = "<<ready>>"


class Example(NamedTuple):
    typed: str
    shown: list[str]  # `^C` as the last: to be interrupted


def examples(text: str) -> list[Example]:
    """Every `$ ` line of the console blocks, with its `> ` lines, and the lines that it shows."""
    found: list[Example] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Example(line[2:], []))
            elif line.startswith("> ") and not found[-1].shown:
                found[-1] = Example(f"{found[-1].typed}\n{line[2:]}", [])
            else:
                found[-1].shown.append(line)
    return found


def bash(folder: Path) -> pexpect.spawn:
    """An interactive shell, as far as it can be told from the outside."""
    known = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    return pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "--noediting"],
        cwd=str(folder),
        env={**known, "PS1": PROMPT, "PS2": ""},
        echo=False,
        encoding="utf-8",
        timeout=20,
        use_poll=True,
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    folder = installed(clone(tmp_path / "mqfs"))
    process = subprocess.Popen(
        [folder / "script" / "run"], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: mounted(folder / "mq"), "a mount", 60)
        yield folder
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        unmount(folder / "mq")


@pytest.fixture
def shell(served: Path) -> Iterator[pexpect.spawn]:
    child = bash(served)
    child.expect_exact(PROMPT)
    yield child
    child.close(force=True)


def run(shell: pexpect.spawn, example: Example) -> None:
    """Type it; all that is shown comes, in that order and nothing else, and the prompt."""
    interrupted = example.shown[-1:] == ["^C"]
    wanted = example.shown[:-1] if interrupted else example.shown
    shell.sendline(example.typed)
    shown: list[str] = []
    prompted = False
    while len(shown) < len(wanted) or not (prompted or interrupted):
        which = shell.expect_exact([PROMPT, "\r\n"])
        line = shell.before.strip("\r")
        prompted = prompted or which == 0
        if line and not re.match(r"\[\d+\]", line):
            shown.append(line)
    assert shown == wanted, example.typed
    if interrupted:
        shell.sendintr()
        shell.expect_exact(PROMPT)


@pytest.mark.timeout(180)
def test_tour(served: Path, shell: pexpect.spawn) -> None:
    steps = examples((ROOT / "README.md").read_text())
    assert len(steps) > 20
    for example in steps:
        run(shell, example)
        if example.typed.endswith("&"):
            stats = served / "mq" / "news" / ".stats"
            until(lambda: '"waiting": 2' in stats.read_text(), "both readers wait")  # noqa: B023


def test_it_begins_with_the_two_commands() -> None:
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split()[0] for line in first.splitlines()[1:]] == ["script/run", "script/test"]


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "doc").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
