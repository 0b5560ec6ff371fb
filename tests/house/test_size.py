"""The largest size of a file, a class and a function, and the smallest of a file that only one other imports."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house.today import ROOT, check, name_of, sources

FILE_LINES = 700
ALONE_LINES = 120  # of a file that only one other imports: a smaller one should be part of the other
PUBLIC_MEMBERS = 20  # of a class: methods and properties
MEDIAN, NINTH, LONGEST = 5, 15, 50  # lines of a function's body
EXEMPT = {
    "mqfs/client/group.py: Group": 28,  # each is one line that calls a part
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources():
        yield path, ast.parse(path.read_text())


def public_members(node: ast.ClassDef) -> int:
    functions = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return sum(not name.startswith("_") for name in functions)


def count_importers() -> Counter[str]:
    """Count the files of the program that import each file."""
    found: Counter[str] = Counter()
    for _, tree in trees():
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found.update(name.replace(".", "/") + ".py" for name in names)
    return found


def breaches() -> dict[str, int]:
    """Return files and classes over their bounds, each with its size, and files that should be part of another."""
    sizes = {}
    for path in [*sources(), *sorted((ROOT / "mqfs").rglob("*.[ch]"))]:
        if (lines := len(path.read_text().splitlines())) > EXEMPT.get(name_of(path), FILE_LINES):
            sizes[name_of(path)] = lines
    importers = count_importers()
    for path in sources("mqfs"):
        lines = len(path.read_text().splitlines())
        if lines < ALONE_LINES and importers[name_of(path)] == 1 and not path.stem.startswith("__"):
            sizes[f"{name_of(path)}: one importer"] = 1
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
    """Return the lines of a function without its head and docstring."""
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
