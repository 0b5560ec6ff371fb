"""README.md and the tutorial: what they say to type, typed beside script/run, shows what they say."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.typed import Program, Served, steps, type_page
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.java import java
from tests.support.shell import shell
from tests.support.spark_pythons import forked_python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
SPARK_S = 300  # to start, on a busy machine


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, served: Served) -> None:
    has_spark = "spark" in page.name
    if has_spark and (why := java()):
        pytest.skip(why)
    with ExitStack() as stack:
        # The Pythons in which Spark plans; those of its tasks are what the page says.
        more = {"PYSPARK_DRIVER_PYTHON": stack.enter_context(forked_python())} if has_spark else {}
        typing = stack.enter_context(shell(served.folder, **more))
        typing.terminal.timeout = SPARK_S if has_spark else HANG_S
        try:
            assert type_page(served.text(page), typing, served.folder) > 5
        except AssertionError as error:
            log = served.folder / "spark.log"  # some failures of Spark are retried by their text
            raise AssertionError(f"{error}\n{log.read_text() if log.exists() else ''}") from error


def test_every_console_block_is_typed() -> None:
    for page in PAGES:
        text = page.read_text()
        typed = [step for step in steps(text) if not isinstance(step, Program)]
        assert sum(line.typed.count("\n") + 1 for line in typed) == sum(
            row.startswith(("$ ", "> ")) for row in text.splitlines() if not row.startswith("> *")
        ), page.name


def test_reading_a_page() -> None:
    text = '```console\n$ one\nshown\n$ two\n> more\n```\n```sh\nno\n```\n```python title="a.py"\nx = 1\n```\n'
    assert steps(text) == [("one", ["shown"]), ("two\nmore", []), ("a.py", "x = 1\n")]


def test_the_two_commands_are_in_the_readme() -> None:
    blocks = (ROOT / "README.md").read_text().split("```")
    commands = [line.split()[0] for block in blocks[1::2] for line in block.splitlines()[1:] if line[:7] == "script/"]
    assert commands == ["script/run", "script/test"]


@pytest.mark.timeout(900)
def test_guides(served: Served) -> None:
    guides = sorted((ROOT / "docs" / "howto").glob("*.md"))
    with shell(served.folder) as typing:
        lines = [type_page(served.text(guide), typing, served.folder) for guide in guides]
    assert sum(lines) > 30
