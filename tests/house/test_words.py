"""The language of the project: standard terms of the field, without a dialect (docs/contributing/style.md)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house.today import PACKAGES, ROOT, check, name_of, sources

DIALECT = re.compile(
    r"\b(?:is|are) right\b|\banew\b|(?<!`)\btold\b|(?<!user )(?<!`)\bnobody\b|\bsomebody\b|\bis said\b|\bso many\b"
    r"|\bgoes on\b|\bdealt with\b|\blets? go\b|\bsuch (?:that|as are)\b|(?:^|[.;:] )(?:Who|What) \w+s\b"
    r"|\bwho (?:waits|takes|asks|reads|publishes)\b",
    re.MULTILINE,
)
# A docstring says what a thing is and does: not what it owns, nor only what it is of.
OWNER = re.compile(r"\bOwns\b|\AOf\b")
PRONOUN = re.compile(r"\A(?:It|They|These|Those|That|What|Who|Others)\b")  # a text of the packages names its subject
COMMENT = re.compile(r"(?:^|\s)#\s?(.*)$")


def documents() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in ("man", "docs"):
        yield from sorted(
            path for path in (ROOT / folder).rglob("*") if path.suffix in {".md", *(f".{n}" for n in range(1, 10))}
        )


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a source for people: strings with a space, among them docstrings, and comments. Of tests only
    docstrings and comments: their other strings are input and expected output."""
    text, is_test = path.read_text(), name_of(path).startswith("tests/")
    for node in ast.walk(ast.parse(text)):
        if is_test:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    for line in text.splitlines():
        if (comment := COMMENT.search(line)) is not None:
            yield comment[1]


def breaches() -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in documents():
        found[name_of(path)] += len(DIALECT.findall(path.read_text()))
    for path in sources(*PACKAGES):
        found[name_of(path)] += sum(len(PRONOUN.findall(text)) for text in texts(path))
    for path in sources(*PACKAGES, "examples", "benchmarks", "tests"):
        found[name_of(path)] += sum(len(DIALECT.findall(text)) + len(OWNER.findall(text)) for text in texts(path))
    return {where: count for where, count in found.items() if count}


def test_the_project_speaks_no_dialect() -> None:
    check("words", breaches())


def test_errors_end_without_a_full_stop() -> None:
    ended = [
        f"{name_of(path)}:{text.lineno}: {text.value}"
        for path in sources(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and re.search(r"[^.]\.$", text.value)
    ]
    assert ended == []
