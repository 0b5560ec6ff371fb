"""docs/howto/migrate.md: every row of its tables of other programs' options names tests, and they are there."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

TEXT = (ROOT / "docs" / "howto" / "migrate.md").read_text()
_LINK = re.compile(r"`([\w/]*\.py)?::(\w+)`")


def rows() -> list[list[str]]:
    tables = TEXT[TEXT.index("## Coming from qlobber-fsq") :]
    lines = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| theirs")]
    return [line.strip("|").split(" | ") for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip(" `")[:40])
def test_row_names_tests_that_are_there(row: list[str]) -> None:
    links = _LINK.findall(row[-1])
    assert links, f"no test is named: {row}"
    path = ""
    for named, test in links:
        path = named or path
        file = ROOT / "tests" / (path if "/" in path else f"client/{path}")
        assert re.search(rf"^def {test}\(", file.read_text(), re.MULTILINE), f"{path}::{test}"


def test_there_are_rows_for_both() -> None:
    assert len(rows()) > 30
