"""The house's own rules, kept by tools: ruff, mypy --strict, the direction of imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
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
    for script in [*(ROOT / "script").iterdir(), ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
        run("bash", "-n", str(script))


def texts() -> list[Path]:
    """What a user reads."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "man").glob("*.[1-9]"), *(ROOT / "docs").rglob("*.md")]


NEVER_SAID = re.compile(
    r"\b(?:topics?(?!\.py)|chunks?|message (?:ids?|offsets?)|stream offsets?)\b"
    r"|(?<!message )(?<!work )(?<!tests/)\bqueues?\b",
    re.IGNORECASE,
)
A_COLUMN = re.compile(r"`[^`]*\btopic\b[^`]*`|\.(?:Li|Cm) topic\b|\btopic=")  # of Spark's; it has Kafka's name


def test_words_of_the_glossary() -> None:
    """Users read one word for each thing: a group is no topic, a stream no queue, a sequence no offset."""
    said = [
        f"{path.name}:{number}: {line}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NEVER_SAID.search(A_COLUMN.sub("", line) if "spark" in path.name else line)
    ]
    assert said == []
