"""The tools' manuals are clean mdoc, have examples, and name every option."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.tools.mount import ROOT, mq_cat, pin


@pytest.mark.parametrize("page", ["mq-cat.1", "pin.1"])
def test_clean(page: str) -> None:
    lint = subprocess.run(
        ["mandoc", "-Tlint", "-Wstyle", f"man/{page}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    # Whether a page that is referred to is installed is not the page's fault.
    assert [line for line in lint.stdout.splitlines() if "referenced manual not found" not in line] == []


@pytest.mark.parametrize(("page", "tool"), [("mq-cat.1", mq_cat), ("pin.1", pin)])
def test_every_option_is_told(page: str, tool: object) -> None:
    text = (ROOT / "man" / page).read_text()
    assert ".Sh EXAMPLES\n" in text
    options = re.findall(r"^  (--?\w+)", tool("--help").stdout.decode(), re.MULTILINE)  # type: ignore[operator]
    assert len(options) > 4
    for option in set(options) - {"--help"}:
        assert f".It Fl {option[1:]}" in text, option
