"""The tools' manuals name every option."""

from __future__ import annotations

import re

import pytest

from tests.tools.mount import ROOT, mq_cat, pin


@pytest.mark.parametrize(("page", "tool"), [("mq-cat.1", mq_cat), ("pin.1", pin)])
def test_every_option_is_told(page: str, tool: object) -> None:
    text = (ROOT / "man" / page).read_text()
    options = re.findall(r"^  (--?\w+)", tool("--help").stdout.decode(), re.MULTILINE)  # type: ignore[operator]
    assert len(options) > 4
    for option in set(options) - {"--help"}:
        assert f".It Fl {option[1:]}" in text, option
