"""The tests' own shape: fixtures are in a conftest, everything else that tests share in tests/support."""

from __future__ import annotations

import re

from tests.support import ROOT


def test_nothing_imports_a_conftest() -> None:
    importers = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if re.search(r"^\s*(from|import) \S*conftest\b|import conftest", file.read_text(), re.M)
    ]
    assert importers == []
