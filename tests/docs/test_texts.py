"""Rules for every text: links lead somewhere, and no package index is named, since the name there is not ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES
from tests.support import ROOT

MARKDOWN = [ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md", "benchmarks/README.md")]
SITE = sorted((ROOT / "docs").rglob("*.md"))
FRAGMENTS = sorted(path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md")
INDEX = re.compile(r"pip install ['\"]?mqfs|\bmqfs\[|\bpypi\b", re.IGNORECASE)


@pytest.mark.parametrize("page", [*MARKDOWN, *SITE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """In a clone. Those of the site, anchors too, are checked where it is built."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_no_package_index() -> None:
    texts = [*MARKDOWN, *SITE, *PAGES, *(ROOT / "changelog.d").glob("*.md")]
    assert [f"{path.name}: {found}" for path in texts for found in INDEX.findall(path.read_text())] == []


def test_fragments_of_the_changelog() -> None:  # none, after a release
    for fragment in FRAGMENTS:
        assert re.fullmatch(r"[a-z-]+\.(?:added|changed|fixed)\.md", fragment.name)
        assert all(row.startswith(("- ", "  ")) for row in fragment.read_text().splitlines()), fragment.name


def test_the_map_has_each_folder_and_module() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall("`(.+?)`", row[1])}
    modules = [path for path in (ROOT / "mqfs").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    there = {f"{path.name}/" if path.is_dir() else path.name for path in modules if path.name[:2] != "__"}
    assert named == there
    for begin in re.findall("`(.+?)`", " ".join(row[3] for row in rows)):
        assert (ROOT / "mqfs" / begin).exists(), begin


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
