"""Modules that a text names are there, and what the benchmarks import of ours: no other test runs these."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT
from tests.support.clone import AT_THE_TOP

NAMED = re.compile(r"(?<![\w/.*$}~-])[a-z_][a-z0-9_/]*\.py\b")
WRITTEN = re.compile(r'title="([\w.]+)"')  # by the reader of a tutorial
OTHERS = {"setup.py", "matchers.py"}  # of other packages


def texts() -> Iterator[Path]:
    """Of the project; what was built or made here is left out."""
    for top in ROOT.iterdir():
        if top.name[0] != "." and top.name not in AT_THE_TOP:
            for path in (top, *top.rglob("*")):
                if path.suffix in {".py", ".md", ".c", ".h"} and path.name != "CHANGELOG.md":
                    yield path


def test_every_module_that_is_named_is_there() -> None:
    modules = [f"/{path.relative_to(ROOT)}" for path in texts() if path.suffix == ".py"]
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts()
        if path.parts[-3:-1] != ("tests", "house")
        for name in set(NAMED.findall(path.read_text())) - set(WRITTEN.findall(path.read_text()))
        if name not in OTHERS and not any(module.endswith(f"/{name}") for module in modules)
    ]
    assert stale == []


def test_what_the_benchmarks_import_is_there() -> None:
    missing = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("mqfs", "pyspark_mqfs", "tests"):
                names = vars(importlib.import_module(str(node.module)))
                missing += [
                    f"{path.name}: {node.module}.{each.name}"
                    for each in node.names
                    if each.name not in names and importlib.util.find_spec(f"{node.module}.{each.name}") is None
                ]
    assert missing == []
