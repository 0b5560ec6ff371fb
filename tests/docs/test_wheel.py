"""What an installation brings besides the sources: the manual, the format of the store, the page for browsers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from mqfs.http.groups import KINDS
from tests.docs.pages import PAGES
from tests.support import ROOT
from tests.support.clone import clone

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def test_the_manual_is_in_the_wheel(tmp_path: Path) -> None:
    source = clone(tmp_path / "mqfs")
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        assert {f"mqfs/http/web/{name}" for name in KINDS} <= set(archive.namelist())
        installed = {name.partition(".data/data/")[2]: archive.read(name) for name in archive.namelist()}
    for page in PAGES:
        assert installed[f"share/man/man{page.suffix[1:]}/{page.name}"] == page.read_bytes()
    assert installed["share/doc/mqfs/format.md"] == (ROOT / "docs" / "reference" / "format.md").read_bytes()
