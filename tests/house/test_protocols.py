"""A Protocol has two implementations, or a sentence with the reason for it. Their number in a file may only fall."""

from __future__ import annotations

import ast

from tests.house.today import check, name_of, sources


def breaches() -> dict[str, int]:
    found = {}
    for path in sources("mqfs"):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        if count := sum(any(ast.unparse(base).startswith("Protocol") for base in node.bases) for node in classes):
            found[name_of(path)] = count
    return found


def test_protocols_grow_no_more() -> None:
    check("protocols", breaches())
