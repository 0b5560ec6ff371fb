"""Only one module appends to a group's log and applies the records; no other changes the state that is kept in a
log."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.house.today import check, name_of, sources

# Recovery applies the records that it reads; a ring's log is itself a log, over that of the store.
RINGS = {"mqfs/ring/server/ring_log.py", "mqfs/ring/server/intake.py"}
WRITERS = {"mqfs/engine/core/log.py", "mqfs/engine/tree/recovery.py", *RINGS}
APPENDS = {"append", "append_unit", "append_many", "append_batch", "skip", "reserve_space", "skip_to"}
LOGS = {"bucket", "writer"}  # names of a group's log in the code
APPLIES = {"apply"}
STATES = {"state", "progress"}


def owner(node: ast.expr) -> str:
    """Return the last name before an attribute: `bucket` of `self.group.log.bucket`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def breaks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        called = node.func
        return (called.attr in APPENDS and owner(called.value) in LOGS) or (
            called.attr in APPLIES and owner(called.value) in STATES
        )
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(target, ast.Attribute) and owner(target.value) in STATES for target in targets)


def of(path: Path) -> int:
    return sum(map(breaks, ast.walk(ast.parse(path.read_text()))))


def breaches() -> dict[str, int]:
    found = Counter(
        {name_of(path): of(path) for path in sources("mqfs/engine", "mqfs/ring") if name_of(path) not in WRITERS}
    )
    return {where: count for where, count in found.items() if count}


def test_one_module_writes_a_log() -> None:
    check("one_writer", breaches())
