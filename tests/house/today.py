"""Breaches of the rules that the project still has: counts in today.json, which may only fall.

A test fails if a count grew, and if it fell: record the lower count, so that it cannot grow again:

    python -m tests.house.today
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support import ROOT

FILE = Path(__file__).with_name("today.json")
PACKAGES = ("mqfs", "pyspark_mqfs", "mq_cat", "mq_tools")
# Each is a module test_RULE.py with a function `breaches`.
RULES = ("words", "errors", "size", "one_writer", "imports", "protocols", "budgets")


def sources(*packages: str) -> Iterator[Path]:
    for package in packages or PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def check(rule: str, found: Mapping[str, int]) -> None:
    """Raise AssertionError if a rule has more breaches than recorded, or fewer."""
    allowed: dict[str, int] = json.loads(FILE.read_text())[rule]
    more = {
        where: f"{count} (allowed {allowed.get(where, 0)})"
        for where, count in found.items()
        if count > allowed.get(where, 0)
    }
    assert not more, f"new breaches of the rule '{rule}': {json.dumps(more, indent=1)}"
    fewer = [where for where, count in allowed.items() if count > found.get(where, 0)]
    assert not fewer, f"fewer breaches of the rule '{rule}' in {fewer}: run python -m tests.house.today"


def record() -> None:
    rules: dict[str, Callable[[], Mapping[str, int]]] = {
        rule: importlib.import_module(f"tests.house.test_{rule}").breaches for rule in RULES
    }
    found = {rule: dict(sorted(breaches().items())) for rule, breaches in rules.items()}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record()
