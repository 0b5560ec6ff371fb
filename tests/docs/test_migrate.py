"""docs/howto/migrate-*.md: each row of their tables says whether it works here, and names tests or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT

HOWTO = ROOT / "docs" / "howto"
PAGES = sorted(HOWTO.glob("migrate-*.md"))
_LINK = re.compile(r"`([\w/]*\.py)?::(\w+)`")
_VERDICT = re.compile(r"✓|(differs|not there): \S.*")


def rows(page: Path) -> list[list[str]]:
    """The cells of each row of its tables: theirs, ours, whether it works, tests."""
    lines = [
        line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith("| theirs")
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_row_works_or_has_a_reason(page: Path) -> None:
    for theirs, _, verdict, tests in rows(page):
        assert _VERDICT.fullmatch(verdict), f"{theirs}: {verdict}"
        assert _LINK.search(tests) or verdict.startswith("not there: "), f"no test is named: {theirs}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_rows_name_tests_that_are_there(page: Path) -> None:
    for row in rows(page):
        path = ""
        for named, test in _LINK.findall(row[-1]):
            path = named or path
            text = (ROOT / "tests" / path).read_text()
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{row[0]}: {path}::{test}"


def test_each_system_has_a_page() -> None:
    assert {page.stem for page in PAGES} >= {"migrate-fq", "migrate-mq", "migrate-qpubs"}
    assert all(len(rows(page)) > 10 for page in PAGES)
