"""Modules named in texts exist, and so do the imports of the benchmarks, which no test runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.clone import AT_THE_TOP

NAMED = re.compile(r"(?<![\w/.*$}~-])[a-z_][a-z0-9_/]*\.py\b")
WRITTEN = re.compile(r'title="([\w.]+)"')  # files that the reader of a tutorial writes
OTHERS = {"setup.py", "matchers.py"}  # files of other packages


def texts() -> Iterator[Path]:
    """Yield the files of the project, except built ones."""
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


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    ours = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("mqfs", "pyspark_mqfs", "tests")
    ]
    exec(compile(ast.Module([*ours], []), path, "exec"), {})
