"""The rules that tools check: ruff, mypy --strict, the direction of imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqfs.engine.language.settings import USAGE, Settings
from mqfs.engine.nodes import META_FILES
from tests.support import ROOT

BIN = Path(sys.executable).parent


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff() -> None:
    run(str(BIN / "ruff"), "check", "--quiet", ".")


@pytest.mark.timeout(600)
def test_types() -> None:
    run(str(BIN / "mypy"))


def test_imports_run_one_way() -> None:
    run(str(BIN / "lint-imports"))


def test_scripts_parse_and_may_be_run() -> None:
    scripts = [path for path in (ROOT / "script").iterdir() if path.is_file()]
    for script in [*scripts, *(ROOT / "script" / "debian").glob("p*"), ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
        run("bash", "-n", str(script))


CALLED = re.compile(r"\b(?:topics?|(?<!message )(?<!work )queues?|(?:message|stream|group) offsets?)\b", re.IGNORECASE)


def test_words_of_the_glossary() -> None:
    """In mqfs(4), so in docs/reference/tree, a group is no topic, a stream no queue, a sequence no offset."""
    page = (ROOT / "man" / "mqfs.4").read_text()
    text = re.sub(r"In terms of other brokers:.*?\.Pp", "", page, flags=re.DOTALL)
    assert len(text) < len(page)
    assert CALLED.findall(text) == []


def test_words_of_the_tree() -> None:
    """These words are no names of files of a group or words of ctl either."""
    names = [*META_FILES, *(line.split()[0] for line in Settings().lines()), *USAGE]
    assert [name for name in names if re.search("topic|queue|offset", name)] == []
