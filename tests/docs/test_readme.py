"""README.md: what its examples say, typed as it stands into a shell beside script/run, is what comes."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Line
from tests.docs.shell import Shell, shell
from tests.server.clone import clone, installed
from tests.server.process import ROOT, mounted, unmount, until


def examples(text: str) -> list[Line]:
    """Every `$ ` line of the console blocks, with its `> ` lines, and what it shows (`^C`: until interrupted)."""
    found: list[Line] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Line(line[2:], []))
            elif line.startswith("> ") and not found[-1].shown:
                found[-1] = Line(f"{found[-1].typed}\n{line[2:]}", [])
            else:
                found[-1].shown.append(line)
    return found


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


def run(shell: Shell, example: Line) -> None:
    """Type it; all that is shown comes, in that order and nothing else, and the prompt."""
    interrupted = example.shown[-1:] == ["^C"]
    shell.begin(example.typed)
    shell.shows(*(example.shown[:-1] if interrupted else example.shown), prompt=not interrupted)
    if interrupted:
        shell.interrupt()


@pytest.mark.timeout(900)
def test_tour(served: Path) -> None:
    steps = examples((ROOT / "README.md").read_text())
    assert len(steps) > 20
    with shell(served) as typing:
        for example in steps:
            run(typing, example)
            if example.typed.endswith("&"):
                stats = served / "mq" / "news" / ".stats"
                until(lambda: '"waiting": 2' in stats.read_text(), "both readers wait")  # noqa: B023


def test_it_begins_with_the_two_commands() -> None:
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split()[0] for line in first.splitlines()[1:]] == ["script/run", "script/test"]


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
