"""The manual pages: clean for mandoc, complete, and true where a program can tell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.engine.language.settings import Settings
from mqfs.engine.nodes import META_FILES
from tests.docs.pages import PAGES
from tests.support import ROOT

EXPECTED = {
    "mqfs.1",
    "mqfs-bench.1",
    "mqfs-bridge.1",
    "mqfs-spark.1",
    "mqfs.4",
    "mqfs-fq.5",
    "mqfs-http.5",
    "mqfs-store.5",
    "mq.1",
    "mq-cat.1",
    "mq-work.1",
    "pin.1",
    "mount.mqfs.8",
}


def test_all_pages_are_there() -> None:
    assert {page.name for page in PAGES} == EXPECTED


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path) -> None:
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "style", str(page)], capture_output=True, text=True)
    # What other pages this machine has installed is no matter of ours.
    complaints = [line for line in done.stdout.splitlines() if "referenced manual not found" not in line]
    assert complaints == []
    text = page.read_text()
    assert ".Sh EXAMPLES" in text
    assert ".Sh SEE ALSO" in text
    for name, section in re.findall(r"^\.Xr (mq\S*|pin|mount\.mqfs) (\d)", text, re.MULTILINE):
        assert f"{name}.{section}" in EXPECTED, f"{page.name} refers to {name}({section})"


def test_tree_page_has_every_setting_file_and_limit() -> None:
    text = (ROOT / "man" / "mqfs.4").read_text()
    for line in Settings().lines():
        assert f".It Ic {line.split()[0]} " in text, line
    for name in META_FILES:
        assert f".It Pa {name}" in text, name
    for name in ("MESSAGE_BYTES", "NAME_BYTES", "PATH_GROUPS", "STREAMS", "GROUPS", "PARKED"):
        assert f"{getattr(limits, name):,}" in text, name
    for name in ("UNIT_MESSAGES", "PARTS", "PRODUCERS"):
        assert f"{getattr(limits, name):,}" in text, name
    assert f"{limits.GROUP_BYTES >> 30} GiB" in text
    assert f"{limits.STAGED_BYTES >> 30} GiB" in text
    assert f"{limits.UNIT_BYTES >> 20} MiB" in text
