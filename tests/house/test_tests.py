"""The structure of the tests: fixtures are in a conftest, all other shared helpers in tests/support."""

from __future__ import annotations

import ast

from tests.support import ROOT
from tests.support.ports import free_port


def test_nothing_imports_a_conftest() -> None:
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any("conftest" in name for name in (module, *names)), f"{file} imports {module} {names}"


def test_no_port_is_given_twice() -> None:
    """The program that got a port may not listen yet."""
    assert len({free_port() for _ in range(1_000)}) == 1_000
