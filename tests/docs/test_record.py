"""docs/terminal.svg shows what the lines of docs/terminal.txt show now (else: script/record), and loads nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

from tests.docs.record import drawn, session
from tests.support import ROOT

PICTURE = ROOT / "docs" / "terminal.svg"


def texts(svg: str) -> list[str]:
    """Everything that is to be read in it."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_recording_is_of_today(tmp_path: Path) -> None:
    assert texts(drawn(session(tmp_path))) == texts(PICTURE.read_text())


def test_it_loads_nothing() -> None:
    ElementTree.parse(PICTURE)
    assert set(re.findall(r"https?://[\w./]+", PICTURE.read_text())) == {"http://www.w3.org/2000/svg"}
