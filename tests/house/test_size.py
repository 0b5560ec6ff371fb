"""How large a file, a class and a function may be."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.house.today import ROOT, check, name_of, sources

FILE_LINES = 400
PUBLIC_MEMBERS = 20  # of a class: methods and properties
MEDIAN, NINTH, LONGEST = 5, 15, 50  # lines of a function's body
EXEMPT = {
    "mqfs/client/group.py: Group": 26,  # each one line over a part
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources():
        yield path, ast.parse(path.read_text())


def public_members(node: ast.ClassDef) -> int:
    functions = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return sum(not name.startswith("_") for name in functions)


def breaches() -> dict[str, int]:
    """Files and classes over their bound, each with its size."""
    sizes = {}
    for path in [*sources(), *sorted((ROOT / "mqfs").rglob("*.[ch]"))]:
        if (lines := len(path.read_text().splitlines())) > EXEMPT.get(name_of(path), FILE_LINES):
            sizes[name_of(path)] = lines
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                name = f"{name_of(path)}: {node.name}"
                if (members := public_members(node)) > EXEMPT.get(name, PUBLIC_MEMBERS):
                    sizes[name] = members
    return sizes


def test_files_and_classes_are_small() -> None:
    check("size", breaches())


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without head and docstring."""
    body = node.body
    if ast.get_docstring(node, clean=False) is not None:
        body = body[1:]
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    functions = (node for _, tree in trees() for node in ast.walk(tree))
    lengths = sorted(length(f) for f in functions if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)))
    assert statistics.median(lengths) <= MEDIAN
    assert lengths[len(lengths) * 9 // 10] <= NINTH
    assert lengths[-1] <= LONGEST
